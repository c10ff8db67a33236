"""How does a numpy array travel in KServe v2: as raw bytes, as a JSON list, as typed contents?

Raw bytes are little-endian rows; of BYTES each element is preceded by its length as four bytes (the binary tensor
data extension). Arrays made from messages may be views of immutable bytes: treat them as read-only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.shared_bytes import MAX_RANK, as_bytes, little_endian, object_array

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
_MAX_DIMENSION = 2**63 - 1
_LENGTH = struct.Struct("<I")


def numpy_name(datatype: str) -> str:
    """Name numpy's dtype for a datatype such as "FP32"; raises ValueError for one that there is not."""
    name = _DATATYPES.get(datatype)
    if name is None:
        raise ValueError(f"{datatype!r} is no KServe datatype: {', '.join(_DATATYPES)}")
    return name[0]


def datatype_of(array: NDArray[Any]) -> str:
    """Name the datatype of an array; text and bytes are BYTES; raises ValueError for a dtype without one."""
    name = "object" if array.dtype.kind in "OSU" else array.dtype.name
    datatype = _DATATYPE_BY_NUMPY_NAME.get(name)
    if datatype is None:
        raise ValueError(f"numpy dtype {array.dtype} has no KServe datatype")
    return datatype


def to_raw(array: NDArray[Any]) -> bytes:
    """The array's elements as bytes; raises ValueError for objects that are neither text nor bytes."""
    if datatype_of(array) != "BYTES":
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    values = [as_bytes(value) for value in array.ravel().tolist()]
    return b"".join(piece for value in values for piece in (_LENGTH.pack(len(value)), value))


def from_raw(raw: bytes, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """The array that `raw` holds; raises ValueError when its length is not that of datatype and shape."""
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
    """The elements, row by row in one flat list, as orjson takes them.

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
    """The array of a JSON list, flat or nested as `shape` says; raises ValueError when it does not fit."""
    dtype = little_endian(numpy_name(datatype))
    flat = _flattened(data, shape)
    strange = set(map(type, flat)) - _JSON_TYPES[dtype.kind]
    if strange:
        raise ValueError(f"{datatype} data hold {', '.join(sorted(kind.__name__ for kind in strange))}")
    if dtype.hasobject:
        return object_array([text.encode() for text in flat]).reshape(shape)
    return _array_of(flat, datatype, dtype).reshape(shape)


def from_contents(contents: Any, datatype: str, shape: Sequence[int]) -> NDArray[Any]:
    """The array of an InferTensorContents; raises ValueError when it does not fit."""
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
    if len(shape) > MAX_RANK or any(
        not isinstance(size, int) or not 0 <= size <= _MAX_DIMENSION for size in shape
    ):
        raise ValueError(f"{list(shape)} is no shape of a tensor")
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
