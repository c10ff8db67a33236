"""Calls models in KServe v2 (Triton, KServe, OpenVINO Model Server): by JSON, JSON with binary data, or gRPC.

The client's side: requests are encoded, answers decoded. Source: KServe's open inference protocol, and Triton's
extension for binary tensor data, in which the raw tensors follow the JSON in the order in which it names them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from batchtune.wire.encoding import bounded_depth
from batchtune.wire.signature import MAX_RANK, Signature, TensorSpec, as_bytes, little_endian, object_array

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"
"""An HTTP header of requests and answers with binary data: how many bytes of JSON come before them."""

_WHITESPACE = b" \t\r\n"


def encode_infer_json(inputs: Mapping[str, NDArray[Any]], *, binary: bool = False) -> bytes:
    """Write the body of a REST infer call; with `binary`, tensors follow the JSON as raw bytes, in the answer too.

    Raises ValueError for an array without a KServe datatype, or that JSON cannot hold (FP16, BF16, other BYTES than
    UTF-8).
    """
    entries: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for name, array in inputs.items():
        entry: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": datatype_of(array)}
        if binary:
            raw = to_raw(array)
            tails.append(raw)
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            entry["data"] = to_json(array)
        entries.append(entry)
    document: dict[str, Any] = {"inputs": entries}
    if binary:
        document["parameters"] = {"binary_data_output": True}
    if binary or all(array.dtype.kind != "f" or np.isfinite(array).all() for array in inputs.values()):
        return b"".join((orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), *tails))
    return json.dumps(document, default=lambda array: array.tolist()).encode()  # NaN as Triton reads it


def json_length(body: bytes) -> int:
    """Return the length, in bytes, of the JSON at the start of a body, after which binary data may follow.

    It equals the value of the header `JSON_LENGTH_HEADER`, but is found from the body. Raises ValueError where there is
    no JSON.
    """
    start = len(body) - len(body.lstrip(_WHITESPACE))
    try:
        # Latin-1 makes every byte one character, so that what is found counts bytes.
        _, end = json.JSONDecoder().raw_decode(body.decode("latin-1"), start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON at the start: {error}") from error
    return end


@bounded_depth()
def decode_infer_json(body: bytes) -> dict[str, NDArray[Any]]:
    """Read the answer of a REST infer call, with or without binary data: output name -> array.

    Bare NaN and Infinity are accepted, as Triton writes them. Raises ValueError for any other text; a server's
    `{"error": …}` becomes the text of the ValueError.
    """
    end = json_length(body)
    try:
        document = orjson.loads(body[:end])
    except orjson.JSONDecodeError:
        document = json.loads(body[:end])
    if not isinstance(document, dict):
        raise ValueError("the answer is not a JSON object")
    entries = document.get("outputs")
    if not isinstance(entries, list):
        raise ValueError(str(document.get("error", "the answer has no list of 'outputs'")))
    outputs: dict[str, NDArray[Any]] = {}
    for entry in entries:
        name, array, end = _read_entry(entry, body, end)
        outputs[name] = array
    if body[end:].strip(_WHITESPACE):
        raise ValueError(f"{len(body) - end} bytes follow that belong to no output")
    return outputs


def encode_infer_request(
    model_name: str, inputs: Mapping[str, NDArray[Any]], *, version: int | None = None
) -> bytes:
    """Serialise a ModelInferRequest with raw contents; `version` None: the server chooses.

    Raises ValueError for an array without a KServe datatype.
    """
    request = ModelInferRequest(model_name=model_name, model_version="" if version is None else str(version))
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        request.raw_input_contents.append(to_raw(array))
    return bytes(request.SerializeToString(deterministic=True))


def decode_infer_response(message: bytes) -> dict[str, NDArray[Any]]:
    """Parse a ModelInferResponse with raw or typed contents: output name -> array; raises ValueError for other
    bytes."""
    try:
        response = ModelInferResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a ModelInferResponse: {error}") from error
    raws = response.raw_output_contents
    if raws and len(raws) != len(response.outputs):
        raise ValueError(f"{len(response.outputs)} outputs come with {len(raws)} raw contents")
    outputs: dict[str, NDArray[Any]] = {}
    for position, output in enumerate(response.outputs):
        with _naming(output.name):
            if raws:
                array = from_raw(raws[position], output.datatype, output.shape)
            else:
                array = from_contents(output.contents, output.datatype, output.shape)
        outputs[output.name] = array
    return outputs


def _read_entry(entry: Any, body: bytes, position: int) -> tuple[str, NDArray[Any], int]:
    """Return (name, array, position) of an output; `position` is where the next output's binary data begin.

    Raises ValueError where the entry is no output, or its data do not fit its shape.
    """
    match entry:
        case {
            "name": str(name),
            "datatype": str(datatype),
            "shape": [*shape],
            "parameters": {"binary_data_size": int(size)},
        }:
            with _naming(name):
                if not 0 <= size <= len(body) - position:
                    raise ValueError(f"{size} bytes are announced; {len(body) - position} follow")
                return name, from_raw(body[position : position + size], datatype, shape), position + size
        case {"name": str(name), "datatype": str(datatype), "shape": [*shape], "data": data}:
            with _naming(name):
                return name, from_json(data, datatype, shape), position
    raise ValueError("an output lacks name, datatype, shape, or its data")


@contextmanager
def _naming(output_name: str) -> Iterator[None]:
    """Put the output's name in front of the message of a ValueError raised within the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"output {output_name!r}: {error}") from error


# Arrays: raw bytes are little-endian rows; of BYTES each element is preceded by its length as four bytes (the binary
# tensor data extension). Arrays made from messages may be views of immutable bytes: treat them as read-only.
#
# datatype -> numpy's name, and the field of typed contents (none for FP16 and BF16)
_DATATYPES: dict[str, tuple[str, str]] = {
    "BOOL": ("bool", "bool_contents"),
    "INT8": ("int8", "int_contents"),
    "INT16": ("int16", "int_contents"),
    "INT32": ("int32", "int_contents"),
    "INT64": ("int64", "int64_contents"),
    "UINT8": ("uint8", "uint_contents"),
    "UINT16": ("uint16", "uint_contents"),
    "UINT32": ("uint32", "uint_contents"),
    "UINT64": ("uint64", "uint64_contents"),
    "FP16": ("float16", ""),
    "BF16": ("bfloat16", ""),
    "FP32": ("float32", "fp32_contents"),
    "FP64": ("float64", "fp64_contents"),
    "BYTES": ("object", "bytes_contents"),
}
_DATATYPE_BY_NUMPY_NAME = {numpy: datatype for datatype, (numpy, _) in _DATATYPES.items()}
_JSON_TYPES: dict[str, set[type]] = {
    "b": {bool},
    "i": {int},
    "u": {int},
    "f": {int, float},
    "V": {int, float},  # bfloat16
    "O": {str},
}
_LENGTH = struct.Struct("<I")


def numpy_name(datatype: str) -> str:
    """Return the name of numpy's dtype for a KServe datatype such as "FP32"; raises ValueError for an unknown one."""
    name = _DATATYPES.get(datatype)
    if name is None:
        raise ValueError(f"{datatype!r} is not a KServe datatype: {', '.join(_DATATYPES)}")
    return name[0]


def datatype_of(array: NDArray[Any]) -> str:
    """Return the KServe datatype of an array; text and bytes are BYTES; raises ValueError for a dtype without one."""
    name = "object" if array.dtype.kind in "OSU" else array.dtype.name
    datatype = _DATATYPE_BY_NUMPY_NAME.get(name)
    if datatype is None:
        raise ValueError(f"numpy dtype {array.dtype} has no KServe datatype")
    return datatype


def to_raw(array: NDArray[Any]) -> bytes:
    """Return the array's elements as little-endian bytes, row by row; each element of BYTES follows its length.

    Raises ValueError for objects that are neither text nor bytes.
    """
    if datatype_of(array) != "BYTES":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    values = [as_bytes(value) for value in array.ravel().tolist()]
    return b"".join(piece for value in values for piece in (_LENGTH.pack(len(value)), value))


def from_raw(raw: bytes, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return the array in `raw`; raises ValueError when its length does not fit datatype and shape."""
    count = _count(shape)
    dtype = little_endian(numpy_name(datatype))
    if dtype.hasobject:
        return object_array(_split(raw, count)).reshape(shape)
    if len(raw) != count * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are not a tensor of {datatype} with shape {list(shape)}")
    if dtype.kind == "b":
        bits: NDArray[np.bool_] = np.frombuffer(raw, np.uint8) != 0
        return bits.reshape(shape)
    return np.frombuffer(raw, dtype).reshape(shape)


def to_json(array: NDArray[Any]) -> Any:
    """Return the elements, row by row, as one flat list or array that orjson can write.

    Raises ValueError for what JSON cannot hold: FP16, BF16, and BYTES that are not UTF-8.
    """
    datatype = datatype_of(array)
    if datatype == "BYTES":
        try:
            return [as_bytes(value).decode() for value in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise ValueError("BYTES that are not UTF-8 cannot travel as JSON, only as binary data") from error
    if not _DATATYPES[datatype][1]:
        raise ValueError(f"{datatype} cannot travel as JSON, only as binary data")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("=")).ravel()


def from_json(data: Any, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Make the array of a JSON list, flat or nested as `shape` says; raises ValueError when it does not fit."""
    dtype = little_endian(numpy_name(datatype))
    flat = _flattened(data, shape)
    strange = set(map(type, flat)) - _JSON_TYPES[dtype.kind]
    if strange:
        raise ValueError(f"{datatype} data hold {', '.join(sorted(kind.__name__ for kind in strange))}")
    if dtype.hasobject:
        return object_array([text.encode() for text in flat]).reshape(shape)
    return _array_of(flat, datatype, dtype).reshape(shape)


def from_contents(contents: Any, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Make the array of an InferTensorContents; raises ValueError when its values do not fit datatype and shape."""
    dtype = little_endian(numpy_name(datatype))
    field = _DATATYPES[datatype][1]
    if not field:
        raise ValueError(f"{datatype} travels as raw contents only")
    values = list(getattr(contents, field))
    if len(values) != _count(shape):
        raise ValueError(f"{len(values)} {field} are not a tensor with shape {list(shape)}")
    if dtype.hasobject:
        return object_array(values).reshape(shape)
    return _array_of(values, datatype, dtype).reshape(shape)


def _count(shape: Sequence[Any]) -> int:
    max_dimension = 2**63 - 1
    if len(shape) > MAX_RANK or any(
        not isinstance(size, int) or not 0 <= size <= max_dimension for size in shape
    ):
        raise ValueError(f"{list(shape)} is not the shape of a tensor")
    return math.prod(shape)


def _array_of(values: list[Any], datatype: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        with np.errstate(over="ignore"):  # 1e300 is an infinite FP32
            return np.array(values, dtype)
    except OverflowError as error:
        raise ValueError(f"a value lies outside {datatype}") from error


def _flattened(data: Any, shape: Sequence[int]) -> list[Any]:
    count = _count(shape)
    if not isinstance(data, list):
        raise ValueError("data is not a list")
    flat = data
    if data and isinstance(data[0], list):
        if len(data) != shape[0]:
            raise ValueError(f"nested data do not have shape {list(shape)}")
        for size in shape[1:]:
            if any(not isinstance(inner, list) or len(inner) != size for inner in flat):
                raise ValueError(f"nested data do not have shape {list(shape)}")
            flat = list(chain.from_iterable(flat))
    if len(flat) != count:
        raise ValueError(f"{len(flat)} values are not a tensor with shape {list(shape)}")
    return flat


def _split(raw: bytes, count: int) -> list[bytes]:
    values, position = [], 0
    for _ in range(count):
        end_of_length = position + 4
        if end_of_length > len(raw):
            raise ValueError("BYTES are cut short")
        position = end_of_length + _LENGTH.unpack_from(raw, position)[0]
        values.append(raw[end_of_length:position])
    if position != len(raw):
        raise ValueError(f"BYTES end at {position}, not after {len(raw)} bytes")
    return values


# Messages, as kserve.textproto declares them, without protoc or tritonclient. The pool is our own, since tritonclient
# registers the same names in the default one.
INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
METADATA_PATH = "/inference.GRPCInferenceService/ModelMetadata"
STATISTICS_PATH = "/inference.GRPCInferenceService/ModelStatistics"

_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(
    text_format.Parse(
        Path(__file__).with_name("kserve.textproto").read_text("utf-8"), descriptor_pb2.FileDescriptorProto()
    )
)


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelMetadataRequest = _message("ModelMetadataRequest")
ModelMetadataResponse = _message("ModelMetadataResponse")
ModelStatisticsRequest = _message("ModelStatisticsRequest")
ModelStatisticsResponse = _message("ModelStatisticsResponse")


METHOD_NAME = "kserve/infer"


def signature_from_metadata(name: str, document: Any) -> Signature:
    """Make a `Signature` from the JSON of `GET /v2/models/M`; raises ValueError for any other document.

    KServe models have one signature, without a name; here it gets the name `name`.
    """
    if not isinstance(document, dict):
        raise ValueError("the metadata are not a JSON object")
    if "inputs" not in document:
        raise ValueError(str(document.get("error", "the metadata have no 'inputs'")))
    return Signature(
        name=name,
        method_name=METHOD_NAME,
        inputs=_specs(_json_tensors(document["inputs"])),
        outputs=_specs(_json_tensors(document.get("outputs", []))),
    )


def signature_from_response(name: str, message: bytes) -> Signature:
    """Make a `Signature` called `name` from a serialised ModelMetadataResponse; raises ValueError for other bytes."""
    try:
        response = ModelMetadataResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a ModelMetadataResponse: {error}") from error
    inputs, outputs = (
        _specs((tensor.name, tensor.datatype, tensor.shape) for tensor in tensors)
        for tensors in (response.inputs, response.outputs)
    )
    return Signature(name=name, method_name=METHOD_NAME, inputs=inputs, outputs=outputs)


def _json_tensors(entries: Any) -> Iterable[tuple[str, str, Sequence[int]]]:
    if not isinstance(entries, list):
        raise ValueError("the metadata's tensors are not a list")
    for entry in entries:
        match entry:
            case {"name": str(name), "datatype": str(datatype), "shape": [*shape]} if all(
                isinstance(size, int) for size in shape
            ):
                yield name, datatype, shape
            case _:
                raise ValueError(f"the metadata tell no name, datatype and shape: {entry!r}")


def _specs(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=name,
            dtype=numpy_name(datatype),
            shape=tuple(None if size < 0 else size for size in shape),
        )
        for name, datatype, shape in sorted(tensors)
    )
