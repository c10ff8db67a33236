"""numpy arrays as TensorProto, PredictRequest and PredictResponse.

Arrays made from messages may be views of immutable bytes: treat them as read-only. Strings are object arrays
of bytes. The rules are TensorFlow's own (core/framework/tensor.cc `FromProto`): `tensor_content` holds raw
little-endian rows; of typed values the last one is repeated, and none at all means zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.encoding import length_delimited, read_varint
from batchtune.wire.signature import MAX_RANK, Signature, TensorSpec, as_bytes, little_endian, object_array
from batchtune.wire.tfserving.messages import DataType, PredictRequest, PredictResponse, SignatureDef

MAX_TENSOR_BYTES = 2**31 - 1
"""Largest tensor, as large as a gRPC message can be; by the declared shape, however few values the message carries."""

# name of the DataType, numpy's name, field of the typed values
_DTYPES: tuple[tuple[str, str, str], ...] = (
    ("DT_FLOAT", "float32", "float_val"),
    ("DT_DOUBLE", "float64", "double_val"),
    ("DT_INT32", "int32", "int_val"),
    ("DT_UINT8", "uint8", "int_val"),
    ("DT_INT16", "int16", "int_val"),
    ("DT_INT8", "int8", "int_val"),
    ("DT_STRING", "object", "string_val"),
    ("DT_COMPLEX64", "complex64", "scomplex_val"),
    ("DT_INT64", "int64", "int64_val"),
    ("DT_BOOL", "bool", "bool_val"),
    ("DT_BFLOAT16", "bfloat16", "half_val"),
    ("DT_UINT16", "uint16", "int_val"),
    ("DT_COMPLEX128", "complex128", "dcomplex_val"),
    ("DT_HALF", "float16", "half_val"),
    ("DT_UINT32", "uint32", "uint32_val"),
    ("DT_UINT64", "uint64", "uint64_val"),
)
_NUMBER_BY_NAME: dict[str, int] = {numpy: DataType.Value(tf) for tf, numpy, _ in _DTYPES}
_NAME_BY_NUMBER: dict[int, str] = {number: name for name, number in _NUMBER_BY_NAME.items()}
_FIELD_BY_NUMBER: dict[int, str] = {DataType.Value(tf): field for tf, _, field in _DTYPES}
_STRING: int = DataType.Value("DT_STRING")
RAW_FIELDS: dict[str, int] = {"float32": 5, "float64": 6, "complex64": 9, "bool": 11, "complex128": 12}
"""numpy's name -> packed repeated field of a TensorProto whose bytes are the array's own."""


def numpy_name(number: int) -> str:
    """Return the name of numpy's dtype for a DataType number; raises ValueError for a type that no array can hold."""
    name = _NAME_BY_NUMBER.get(number)
    if name is None:
        raise ValueError(f"tensors of type {datatype_name(number)} are not supported")
    return name


def datatype_number(dtype_name: str) -> int:
    """Return the DataType number for the name of a numpy dtype; text and bytes are DT_STRING.

    Raises ValueError for a dtype that TensorFlow does not have.
    """
    number = _NUMBER_BY_NAME.get(dtype_name)
    if number is None:
        if dtype_name.startswith(("str", "bytes")):
            return _STRING
        raise ValueError(f"numpy dtype {dtype_name} has no TensorFlow type")
    return number


def datatype_name(number: int) -> str:
    """Return the name of a DataType number: "DT_FLOAT" for 1; the number as text where TensorFlow has no name."""
    return str(DataType.Name(number)) if number in DataType.values() else str(number)


def tensor_from_proto(proto: Any, *, filled_bytes_max: int = 2**24) -> NDArray[Any]:
    """Decode a TensorProto; raises ValueError when type, shape and values do not agree.

    Missing values repeat the last one. A tensor of one repeated value takes no memory (a broadcast view) and may have
    MAX_TENSOR_BYTES; with several values, where repeating more than doubles them, it may have `filled_bytes_max`: to
    fill 16 MiB takes 5 ms, though the message may have 30 bytes.
    """
    dtype = _dtype_of(proto.dtype)
    shape_proto = proto.tensor_shape
    rank = len(shape_proto.dim)
    if rank > MAX_RANK:  # before the sizes are multiplied, which takes the square of their number
        raise ValueError(f"a tensor of {rank} dimensions has more than {MAX_RANK}")
    shape = [dim.size for dim in shape_proto.dim]
    if shape_proto.unknown_rank or (shape and min(shape) < 0):
        raise ValueError(f"tensor shape {shape} is not fully known")
    count = math.prod(shape)
    if count * dtype.itemsize > MAX_TENSOR_BYTES:
        raise ValueError(f"a tensor of shape {shape} would exceed {MAX_TENSOR_BYTES} bytes")
    content = proto.tensor_content
    if dtype.hasobject:
        values = _split_strings(content, count) if content else proto.string_val
        return _repeat_last(object_array(values), count, b"", filled_bytes_max).reshape(shape)
    if content:
        if len(content) != count * dtype.itemsize:
            raise ValueError(f"tensor_content has {len(content)} bytes, which is not {shape} of {dtype}")
        return np.frombuffer(content, dtype).reshape(shape)
    return _repeat_last(_typed_values(proto, dtype), count, 0, filled_bytes_max).reshape(shape)


def fill_tensor(proto: Any, array: NDArray[Any], *, as_content: bool) -> None:
    """Encode `array` into an empty TensorProto in place, such as `response.outputs["y"]`.

    `as_content`: as raw bytes in `tensor_content`, else as typed values; strings are always typed values. Raises
    ValueError for a dtype that TensorFlow does not have.
    """
    name = array.dtype.name
    number = datatype_number(name)
    proto.dtype = number
    dims = proto.tensor_shape.dim
    for size in array.shape:
        dims.add().size = size
    if number == _STRING:
        proto.string_val.extend([as_bytes(value) for value in array.ravel().tolist()])
    elif as_content:
        proto.tensor_content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    elif name in RAW_FIELDS:
        raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        proto.MergeFromString(length_delimited(RAW_FIELDS[name], len(raw)) + raw)
    else:
        values = array.view(np.uint16) if _FIELD_BY_NUMBER[number] == "half_val" else array
        getattr(proto, _FIELD_BY_NUMBER[number]).extend(values.ravel().tolist())


def signature_from_def(name: str, definition: Any) -> Signature:
    """Make a `Signature` of a SignatureDef; raises ValueError for a tensor type that no array can hold."""
    return Signature(
        name=name,
        method_name=definition.method_name,
        inputs=tuple(_spec(alias, definition.inputs[alias]) for alias in sorted(definition.inputs)),
        outputs=tuple(_spec(alias, definition.outputs[alias]) for alias in sorted(definition.outputs)),
    )


def signature_to_def(signature: Signature) -> Any:
    """Make a SignatureDef; raises ValueError for a dtype that TensorFlow does not have.

    A `Signature` does not know the graph's tensor names, so that each becomes `<alias>:0`.
    """
    definition = SignatureDef(method_name=signature.method_name)
    for specs, target in ((signature.inputs, definition.inputs), (signature.outputs, definition.outputs)):
        for spec in specs:
            tensor = target[spec.name]
            tensor.name = f"{spec.name}:0"
            tensor.dtype = datatype_number(spec.dtype)
            tensor.tensor_shape.unknown_rank = spec.shape is None
            for size in spec.shape or ():
                tensor.tensor_shape.dim.add().size = -1 if size is None else size
    return definition


def encode_predict_request(
    model_name: str,
    signature_name: str,
    inputs: Mapping[str, NDArray[Any]],
    *,
    version: int | None = None,
    output_filter: Sequence[str] = (),
    as_content: bool = True,
) -> bytes:
    """Serialise a PredictRequest; equal arguments give equal bytes.

    `version` None: the server chooses; `output_filter` empty: all outputs; `as_content`: see `fill_tensor`. Raises
    ValueError for a dtype that TensorFlow does not have.
    """
    request = PredictRequest(output_filter=output_filter)
    request.model_spec.name = model_name
    request.model_spec.signature_name = signature_name
    if version is not None:
        request.model_spec.version.value = version
    for name, array in inputs.items():
        fill_tensor(request.inputs[name], array, as_content=as_content)
    return bytes(request.SerializeToString(deterministic=True))


def decode_predict_response(message: bytes) -> dict[str, NDArray[Any]]:
    """Parse a PredictResponse: output name -> array; raises ValueError for other bytes."""
    from google.protobuf.message import DecodeError

    try:
        response = PredictResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a PredictResponse: {error}") from error
    return {name: tensor_from_proto(proto) for name, proto in response.outputs.items()}


@cache
def _dtype_of(number: int) -> np.dtype[Any]:
    return little_endian(numpy_name(number))


def _typed_values(proto: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    field = _FIELD_BY_NUMBER[proto.dtype]
    values = getattr(proto, field)
    if field == "half_val":  # bit patterns
        return np.array(values, dtype=np.int32).astype(np.uint16).view(dtype)
    if dtype.kind == "c":
        parts = np.array(values, dtype=np.float32 if dtype.itemsize == 8 else np.float64)
        if len(parts) % 2:
            raise ValueError("complex values must come in pairs")
        return parts.view(dtype)
    if field == "int_val" and dtype.itemsize < 4:  # TensorFlow keeps the low bits
        return np.array(values, dtype=np.int32).astype(dtype)
    return np.array(values, dtype=dtype)


def _repeat_last(values: NDArray[Any], count: int, empty: Any, filled_bytes_max: int) -> NDArray[Any]:
    """Return `count` values: the excess cut, or the last one repeated, a single one by a view that takes no memory.

    `empty` is repeated where there are no values. Raises ValueError where that takes more than `filled_bytes_max`.
    """
    given = len(values)
    if given >= count:
        return values if given == count else values[:count]
    if given <= 1:
        last = values[0] if given else empty
        single = np.empty(1, values.dtype)
        single[0] = last
        return np.broadcast_to(single, (count,))
    if count * values.itemsize > max(filled_bytes_max, 2 * given * values.itemsize):
        raise ValueError(f"{given} values are too few for {count}")
    full = np.empty(count, values.dtype)
    full[:given] = values
    full[given:] = values[-1]
    return full


def _split_strings(content: bytes, count: int) -> list[bytes]:
    """Decode strings in `tensor_content`: the lengths as varints, then all bytes (port::DecodeStringList)."""
    split_strings_max = 2**16  # they hold the event loop for 25 ms
    if count > split_strings_max:
        raise ValueError(f"{count} strings in tensor_content are too many; send them in string_val")
    sizes, position = [], 0
    for _ in range(count):
        try:
            size, position = read_varint(content, position)
        except IndexError as error:
            raise ValueError("tensor_content of strings is cut short") from error
        sizes.append(size)
    if position + sum(sizes) != len(content):
        raise ValueError("tensor_content of strings does not have the length that its sizes add up to")
    strings = []
    for size in sizes:
        strings.append(content[position : position + size])
        position += size
    return strings


def _spec(alias: str, info: Any) -> TensorSpec:
    shape = info.tensor_shape
    dims = tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
    return TensorSpec(name=alias, dtype=numpy_name(info.dtype), shape=None if shape.unknown_rank else dims)
