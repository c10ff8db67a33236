"""What a backend hands over when it has loaded a version of a model, and the options that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.rest_json import GraphBatching


def zeros(spec: TensorSpec, rows: int) -> NDArray[Any]:
    """Make a batch of zeros, or of empty strings; a free dimension has length 1."""
    sizes = (spec.shape or (None,))[1:]
    length_of_free_dimension = 1
    shape = (rows, *(length_of_free_dimension if size is None else size for size in sizes))
    if spec.dtype == "object":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, _dtype(spec.dtype))


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


PREDICT_METHOD = "tensorflow/serving/predict"

Tensors = Mapping[str, NDArray[Any]]
Empty = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
Prepare = Callable[[Sequence[int], int | None], None]


class Runner(Protocol):
    """Runs batches. One that has `empty(shape, dtype)` gives the memory itself in which a batch is best gathered."""

    def __call__(self, inputs: Tensors) -> Tensors:
        """All outputs of the signature for all of its inputs; called on a batch thread; raises StatusError."""


def _nothing_to_close() -> None:
    """Most backends free everything with their last reference."""


def nothing_to_prepare(sizes: Sequence[int], at_once: int | None) -> None:
    """Do nothing: most backends run batches of every size alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One version, ready to run: for each signature what it takes and gives, and how to run it.

    A run takes all inputs and gives all outputs of its signature, is called on batch threads, several at a
    time, and raises StatusError. Signatures that share one run share one batching queue. `metadata` is a
    serialised tensorflow.serving.SignatureDefMap; "": made from the signatures. `empty(shape, dtype)` gives the
    array in which a batch is best gathered. `prepare(sizes, at_once)` makes ready for batches of these row counts,
    so many (None: unknown) at a time; it takes from milliseconds to seconds, fails never, and may be called again.
    `inside` are the batchers in its own graph, which wait for requests that run at the same time.
    """

    platform: str
    signatures: Mapping[str, Signature]
    runs: Mapping[str, Runner]
    metadata: bytes = b""
    emulated: bool = False
    parallel: bool = False
    close: Callable[[], None] = field(default=_nothing_to_close)
    empty: Empty = field(default=np.empty)
    prepare: Prepare = field(default=nothing_to_prepare)
    inside: tuple[GraphBatching, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """How to set up a framework; a thread count of 0 means the framework's own choice for the process's affinity.

    `device` is auto, cpu, cuda or cuda:N; `torch_dtype` as_exported, float32, float16 or bfloat16.
    `memory_fraction` is per_process_gpu_memory_fraction: 0 means grow as needed; `session_config_file` is a
    text ConfigProto, from which the other options start.
    """

    device: str = "auto"
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    saved_model_tags: tuple[str, ...] = ("serve",)
    session_config_file: str = ""
    memory_fraction: float = 0.0
    torch_dtype: str = "as_exported"

    @property
    def wants_cuda(self) -> bool:
        """Whether a GPU is required, not only used if present."""
        return self.device.startswith("cuda")

    @property
    def cuda_index(self) -> int:
        """N of cuda:N, else 0."""
        return int(self.device.partition(":")[2] or 0)


def out_of_memory(message: str) -> StatusError:
    """Make the error of a batch that did not fit into memory; other batches are not affected.

    Not every exhausted resource is memory: a tuner looks for "out of memory" or "OOM" in the text.
    """
    text = message if "out of memory" in message or "OOM" in message else f"out of memory: {message}"
    return StatusError("RESOURCE_EXHAUSTED", text)
