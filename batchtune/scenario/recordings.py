"""Reads recorded requests, and fits arrays to the inputs that a model's signature names.

.npz: one array per input, the first axis being rows. .jsonl: one TensorFlow Serving predict body a line, of protocol
http any JSON. Anything else: TFRecords of PredictionLog, TensorFlow Serving's `tf_serving_warmup_requests`.
"""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import did_you_mean
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.places import json_lines, values_at
from batchtune.wire.encoding import tfrecords
from batchtune.wire.signature import Signature, TensorSpec, little_endian
from batchtune.wire.tfserving.tensors import tensor_from_proto


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """One request before it is encoded: its inputs by name, and its outputs if they are known; the first
    dimension is rows.

    `rest_body` is a REST body that was recorded as such and is sent as it is.
    """

    signature_name: str
    rows: int
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]] | None = None
    rest_body: bytes | None = None


def read_recordings(file: str, signature: Signature, *, rows: int, rest: bool) -> list[Recording]:
    """Read every recorded request of a file, in the file's order.

    `rows`: rows of each request that an .npz file is cut into; requests of other files have the recorded
    rows. `rest`: return the bodies of a .jsonl file as well, unchanged, as `rest_body`.

    Raises:
        ScenarioError: `file:line: …` or `file: record n: …` for what cannot be read.
        UsageError: a request that does not fit the signature.
    """
    path = Path(file)
    match path.suffix:
        case ".npz":
            requests = _from_arrays(path, signature, rows)
        case ".jsonl" | ".ndjson":
            requests = list(_from_bodies(path, signature, rest=rest))
        case _:
            requests = list(_from_prediction_logs(path, signature))
    if not requests:
        raise ScenarioError(f"{file}: no request in it")
    return requests


def _from_arrays(path: Path, signature: Signature, rows: int) -> list[Recording]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ScenarioError(f"{path}: cannot be read as .npz: {error}") from error
    inputs = fitted(arrays, signature, where=str(path))
    lengths = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
    recorded = min(lengths.values(), default=0)
    if len(set(lengths.values())) > 1:
        raise ScenarioError(f"{path}: the inputs have different numbers of rows: {lengths}")
    if recorded < rows:
        raise ScenarioError(f"{path}: {recorded} rows; one request takes {rows}", hint="lower request.rows")
    return [
        Recording(
            signature_name=signature.name,
            rows=rows,
            inputs={name: array[at : at + rows] for name, array in inputs.items()},
        )
        for at in range(0, recorded - rows + 1, rows)
    ]


def _from_bodies(path: Path, signature: Signature, *, rest: bool) -> Iterator[Recording]:
    for number, line, body in json_lines(path):
        where = f"{path}:{number}"
        inputs = fitted(_arrays_of_body(body, signature, where), signature, where=where)
        yield Recording(
            signature_name=signature.name,
            rows=rows_of(inputs),
            inputs=inputs,
            rest_body=line if rest else None,
        )


def _require_call(called: Any, signature: Signature, where: str) -> None:
    """Check that a request was recorded for the signature that is called.

    Raises:
        ScenarioError: it was for another.
    """
    if called != signature.name:
        raise ScenarioError(
            f"{where}: recorded for signature {called!r}; the request calls {signature.name!r}",
            hint="set request.signature",
        )


def _arrays_of_body(body: Any, signature: Signature, where: str) -> dict[str, NDArray[Any]]:
    if not isinstance(body, dict) or ("instances" in body) == ("inputs" in body):
        raise ScenarioError(f'{where}: expected a predict body: {{"instances": […]}} or {{"inputs": …}}')
    _require_call(body.get("signature_name", signature.name), signature, where)
    names = [spec.name for spec in signature.inputs]
    if "inputs" in body:
        columns = body["inputs"]
    elif isinstance(body["instances"], list) and body["instances"]:
        columns = _columns(body["instances"], where)
    else:
        raise ScenarioError(f"{where}: instances must be a list with at least one row")
    if not isinstance(columns, dict) or _is_base64(columns):
        if len(names) != 1:
            raise ScenarioError(f"{where}: the model has several inputs; expected {', '.join(names)} by name")
        columns = {names[0]: columns}
    types = {spec.name: spec.dtype for spec in signature.inputs}
    return {name: _array(value, types.get(name, ""), f"{where}: {name}") for name, value in columns.items()}


def _columns(rows: list[Any], where: str) -> Any:
    if not isinstance(rows[0], dict) or _is_base64(rows[0]):
        return rows
    if any(not isinstance(row, dict) or row.keys() != rows[0].keys() for row in rows):
        raise ScenarioError(f"{where}: the instances do not name the same inputs")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _array(value: Any, dtype: str, where: str) -> NDArray[Any]:
    try:
        if dtype == "object":
            return np.array(_decoded(value), dtype=object)
        array = np.array(value)
    except ValueError as error:
        raise ScenarioError(f"{where}: rows of different shapes, or bad base64") from error
    if array.dtype.kind not in "biuf":
        raise ScenarioError(f"{where}: expected numbers of one shape")
    return array


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict) and _is_base64(value):
        return base64.b64decode(value["b64"], validate=True)
    return value.encode() if isinstance(value, str) else value


def _is_base64(value: Mapping[str, Any]) -> bool:
    return set(value) == {"b64"} and isinstance(value["b64"], str)


def _from_prediction_logs(path: Path, signature: Signature) -> Iterator[Recording]:
    from google.protobuf.message import DecodeError

    from batchtune.wire.tfserving.messages import PredictionLog

    try:
        records = list(tfrecords(path.read_bytes()))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ScenarioError(
            f"{path}: no TFRecords: {error}",
            hint="expected .npz, .jsonl, or uncompressed TFRecords such as tf_serving_warmup_requests",
        ) from error
    for number, record in enumerate(records, start=1):
        where = f"{path}: record {number}"
        try:
            log = PredictionLog.FromString(record)
        except DecodeError as error:
            raise ScenarioError(f"{where}: no PredictionLog") from error
        kind = log.WhichOneof("log_type")
        if kind != "predict_log":
            raise ScenarioError(f"{where}: {kind or 'an empty log'}; only predict_log can be sent")
        request = log.predict_log.request
        _require_call(request.model_spec.signature_name or "serving_default", signature, where)
        try:
            arrays = {name: tensor_from_proto(proto) for name, proto in request.inputs.items()}
        except ValueError as error:
            raise ScenarioError(f"{where}: {error}") from error
        inputs = fitted(arrays, signature, where=where)
        yield Recording(signature_name=signature.name, rows=rows_of(inputs), inputs=inputs)


def recorded_bodies(path: Path, rows_path: str, signature_name: str) -> Iterator[Recording]:
    """Yield recorded JSON bodies, one a line, which are sent unchanged.

    `rows_path`: place of a list in the body that has an item for each row; "": each body is one row.

    Raises:
        ScenarioError: the file cannot be read, a line is no JSON, or has no list there.
    """
    for number, line, body in json_lines(path):
        rows = 1
        if rows_path:
            lists = [value for value in values_at(body, rows_path) if isinstance(value, list)]
            if not lists or not lists[0]:
                raise ScenarioError(
                    f"{path}:{number}: no list of rows at {rows_path!r}",
                    hint="correct request.rows_path, or leave it out",
                )
            rows = len(lists[0])
        yield Recording(signature_name=signature_name, rows=rows, inputs={}, rest_body=line)


def check_names(signature: Signature, names: Iterable[str], *, key: str) -> None:
    """Check that all names are inputs of the signature.

    Raises:
        UsageError: one is not; the message begins with `key`, the hint names the input that was probably
            meant.
    """
    known = [spec.name for spec in signature.inputs]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, otherwise="the model has")
            raise UsageError(f"{key}: signature {signature.name!r} has no input {name!r}", hint=hint)


def fitted(
    arrays: Mapping[str, NDArray[Any]], signature: Signature, *, where: str
) -> dict[str, NDArray[Any]]:
    """Return the arrays by the names of the signature's inputs, converted to the inputs' types.

    Raises:
        UsageError: `where: …` for a missing or unknown input, a wrong shape, or a type that cannot be converted
            without loss.
    """
    check_names(signature, arrays, key=where)
    result = {}
    for spec in signature.inputs:
        if spec.name not in arrays:
            raise UsageError(
                f"{where}: input {spec.name!r} is missing", hint=f"there are: {', '.join(arrays) or 'none'}"
            )
        array = _typed(arrays[spec.name], spec, where)
        if spec.shape is not None and (
            array.ndim != len(spec.shape)
            or any(own is not None and own != size for own, size in zip(spec.shape, array.shape, strict=True))
        ):
            raise UsageError(
                f"{where}: input {spec.name!r} has shape {shown_shape(array.shape)}; "
                f"the model takes {shown_shape(spec.shape)}"
            )
        result[spec.name] = array
    return result


def rows_of(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the number of rows, the first dimension of the first array that is no scalar; 1: all are scalars."""
    return next((len(array) for array in arrays.values() if array.ndim), 1)


def _typed(array: NDArray[Any], spec: TensorSpec, where: str) -> NDArray[Any]:
    if spec.dtype == "object":
        if array.dtype.kind in "OSU":
            return array.astype(object)
    elif array.dtype.name == spec.dtype:
        return array
    elif array.dtype.kind in "biuf":
        # JSON and notebooks turn 1 into 1.0 and float32 into float64; only a whole number that changes is refused.
        with np.errstate(invalid="ignore", over="ignore"):
            converted: NDArray[Any] = array.astype(little_endian(spec.dtype))
        if converted.dtype.kind not in "biu" or np.array_equal(converted, array):
            return converted
    raise UsageError(f"{where}: input {spec.name!r} is {array.dtype}; the model takes {spec.dtype}")


def shown_shape(shape: Sequence[int | None]) -> str:
    """Write a shape as text, such as `[?, 200]`."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
