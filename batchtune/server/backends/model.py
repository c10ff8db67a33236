"""The interface of backends: the loaded model that a backend returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.signature import Signature, TensorSpec, little_endian, object_array
from batchtune.wire.status import StatusError, invalid_argument
from batchtune.wire.tfserving.rest_json import GraphBatching


def zeros(spec: TensorSpec, rows: int) -> NDArray[Any]:
    """Return an input of `rows` rows of zeros or of empty strings; an open dimension has length 1."""
    sizes = (spec.shape or (None,))[1:]
    length_of_free_dimension = 1
    shape = (rows, *(length_of_free_dimension if size is None else size for size in sizes))
    if spec.dtype == "object":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, little_endian(spec.dtype))


def example_inputs(message: Any) -> dict[str, NDArray[Any]]:
    """Convert a tensorflow.serving.Input message into {"inputs": array of serialised Examples, one for each row}.

    The bytes of a context are put before those of each example: protobuf merges concatenated messages.

    Raises:
        StatusError: INVALID_ARGUMENT when there is no example, RESOURCE_EXHAUSTED for more than 65,536, or where the
            context, once for each example, takes more than 16 MiB.
    """
    context = b""
    examples = message.example_list.examples
    if message.WhichOneof("kind") == "example_list_with_context":
        examples = message.example_list_with_context.examples
        context = message.example_list_with_context.context.SerializeToString()
    if not examples:
        raise invalid_argument("Input is empty.")
    examples_max = 1 << 16  # of three bytes and more; they hold the event loop for 30 ms
    context_bytes_max = 1 << 24  # put before examples: those of a message of 1 MB could have 125 GB
    if len(examples) > examples_max or len(context) * len(examples) > context_bytes_max:
        raise StatusError(
            "RESOURCE_EXHAUSTED", f"{len(examples)} examples, or so many contexts, are too many"
        )
    return {"inputs": object_array([context + example.SerializeToString() for example in examples])}


PREDICT_METHOD = "tensorflow/serving/predict"

Tensors = Mapping[str, NDArray[Any]]
Empty = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
Prepare = Callable[[Sequence[int], int | None], None]
Runner = Callable[[Tensors], Tensors]
"""Returns all outputs of a signature, given all inputs of a batch; called on batch threads; raises StatusError. It may
have `empty(shape, dtype)`, which allocates the memory to gather a batch in."""


def _nothing_to_close() -> None:
    """Do nothing: most backends free everything with their last reference."""


def nothing_to_prepare(sizes: Sequence[int], at_once: int | None) -> None:
    """Do nothing: most backends run batches of every size alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One version of a model, ready to run.

    signatures: name -> signature; runs: name of a signature -> function that takes all of its inputs and returns all of
    its outputs. Several batch threads may call a run at once; it raises StatusError. Signatures with one run share a
    batching queue. metadata: a serialised tensorflow.serving.SignatureDefMap, b"": it is made from `signatures`.
    emulated: there is no model, only a service time; parallel: an emulated device that runs batches at once, none of
    them slower. empty(shape, dtype): allocates the array to gather a batch in. prepare(sizes, at_once): prepares for
    batches of these numbers of rows, `at_once` of them at a time (None: unknown); takes milliseconds to seconds, never
    fails, and may be called again. inside: the batchers in the model's own graph.
    """

    signatures: Mapping[str, Signature]
    runs: Mapping[str, Runner]
    metadata: bytes = b""
    emulated: bool = False
    parallel: bool = False
    close: Callable[[], None] = field(default=_nothing_to_close)
    empty: Empty = field(default=np.empty)
    prepare: Prepare = field(default=nothing_to_prepare)
    inside: tuple[GraphBatching, ...] = ()


def out_of_memory(message: str) -> StatusError:
    """Return the error of a batch that did not fit into memory: RESOURCE_EXHAUSTED.

    Full queues have that code too; a tuner tells them apart by "out of memory" or "OOM" in the text.
    """
    text = message if "out of memory" in message or "OOM" in message else f"out of memory: {message}"
    return StatusError("RESOURCE_EXHAUSTED", text)
