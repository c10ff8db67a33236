"""Runs a model before it is AVAILABLE, so that no request has to wait for what a model does only once.

It runs the requests recorded in `assets.extra/tf_serving_warmup_requests` (a TFRecord of PredictionLog, at
most 1,000, as TF Serving reads it), and for each predict signature batches of zeros: of each allowed size,
else of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.model import PREDICT_METHOD, LoadedModel, Tensors, example_inputs, zeros
from batchtune.server.log import note
from batchtune.server.sessions.input_shapes import InputShape
from batchtune.wire.encoding import tfrecords
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.tensors import tensor_from_proto

WARMUP_FILE = Path("assets.extra") / "tf_serving_warmup_requests"


def warm_up(
    model: LoadedModel, version_directory: Path, parameters: BatchingParameters | None, *, iterations: int = 1
) -> None:
    """Run the requests recorded in WARMUP_FILE of the version's directory (none: no such file), then for each predict
    signature batches of zeros, each `iterations` times; the answers are discarded.

    `parameters`: those of the model's batches, of whose `allowed_batch_sizes` each is run; without these, or None (it
    is not batched), one row. If the model refuses a batch of zeros, a note is written to stderr, and larger batches of
    that signature are not run.

    Raises:
        StatusError: DATA_LOSS for a recorded request that cannot be read or does not fit its signature; as in TF
            Serving, the error of a recorded request that fails.
    """
    path = version_directory / WARMUP_FILE
    for number, signature_name, inputs in _recorded(path):
        if signature_name not in model.runs:
            raise _corrupt(path, f"record {number} names the unknown signature {signature_name!r}")
        fault = _fault(model.signatures[signature_name], inputs)
        if fault:
            raise _corrupt(path, f"record {number}: {fault}")
        for _ in range(iterations):
            model.runs[signature_name](inputs)
    sizes = (1,) if parameters is None else parameters.allowed_batch_sizes or (1,)
    for name, signature in model.signatures.items():
        if signature.method_name in {PREDICT_METHOD, ""}:
            _run_zeros(model, name, signature, sizes, iterations)


def expected_sizes(parameters: BatchingParameters | None) -> tuple[int, ...]:
    """Return the numbers of rows, ascending, for which a CUDA graph pays; parameters None: not batched.

    The allowed sizes, since no other sizes occur; without these 1 to 16 and the largest, which is most frequent under
    load.
    """
    unbatched_sizes = (1, 2, 4, 8)
    if parameters is None:
        return unbatched_sizes
    if parameters.allowed_batch_sizes:
        return parameters.allowed_batch_sizes
    small_sizes_max = 16
    largest = parameters.max_batch_size or small_sizes_max
    if parameters.enable_large_batch_splitting and parameters.max_execution_batch_size:
        largest = parameters.max_execution_batch_size
    return tuple(sorted({*range(1, min(largest, small_sizes_max) + 1), largest}))


def _run_zeros(
    model: LoadedModel, name: str, signature: Signature, sizes: Sequence[int], iterations: int
) -> None:
    for size in sizes:
        inputs = {spec.name: zeros(spec, size) for spec in signature.inputs}
        try:
            for _ in range(iterations):
                model.runs[name](inputs)
        except StatusError as error:
            first_line = error.message.partition("\n")[0]
            note(f"warm-up of signature {name} with {size} rows of zeros: {first_line}")
            return


def _recorded(path: Path) -> Iterator[tuple[int, str, dict[str, NDArray[Any]]]]:
    """Yield (record number, signature name, inputs by name) of each recorded request; none without a file."""
    if not path.is_file():
        return
    from batchtune.wire.tfserving.messages import PredictionLog

    records_max = 1000
    try:
        records = list(islice(tfrecords(path.read_bytes()), records_max))
    except ValueError as error:
        raise _corrupt(path, str(error)) from error
    for number, record in enumerate(records, start=1):
        try:
            request = _request_of(PredictionLog.FromString(record))
        except (DecodeError, ValueError, StatusError) as error:
            raise _corrupt(path, f"record {number}: {error}") from error
        if request is not None:
            yield number, *request


def _request_of(log: Any) -> tuple[str, dict[str, NDArray[Any]]] | None:
    kind = log.WhichOneof("log_type")
    if kind == "predict_log":
        request = log.predict_log.request
        inputs = {name: tensor_from_proto(tensor) for name, tensor in request.inputs.items()}
        return request.model_spec.signature_name or DEFAULT_SIGNATURE, inputs
    if kind in {"classify_log", "regress_log"}:
        request = getattr(log, kind).request
        return request.model_spec.signature_name or DEFAULT_SIGNATURE, example_inputs(request.input)
    return None


def _fault(signature: Signature, inputs: Tensors) -> str:
    """Return why a signature cannot take these inputs, "" if it can; a framework may crash on wrong ones."""
    for spec in signature.inputs:
        if spec.name not in inputs:
            return f"has no input {spec.name!r}"
        if fault := InputShape(signature.name, spec).fault(inputs[spec.name].shape):
            return fault
    return ""


def _corrupt(path: Path, what: str) -> StatusError:
    return StatusError("DATA_LOSS", f"{path}: {what}")
