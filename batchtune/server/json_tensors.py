"""How does the body of a REST predict call become the inputs of a signature?

The reference is TensorFlow Serving's util/json_tensor.cc: its checks in its order, its texts. A body that is regular
(lists of equal length, all leaves numbers of the right kind) takes a short cut: the lists are flattened and packed by
`struct` (0.8 µs for 200 floats; numpy.array needs 2.4 µs). Whatever the short cut refuses, the slow path decides.
"""

from __future__ import annotations

import base64
import binascii
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.server.json_text import debug_text, parse_json, to_bytes, type_name
from batchtune.wire.status import StatusError
from batchtune.wire.tensors import Signature, TensorSpec

DEFAULT_SIGNATURE = "serving_default"

_EITHER = "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
_MAX_RANK = 64  # numpy's
_MAX_PACKED_VALUES = 1 << 16
# TensorFlow's names of the dtypes, for error texts.
_TYPE_NAMES = {"float32": "float", "float64": "double", "float16": "half", "object": "string"}
# dtype → (struct format of the wire type, its dtype); small integers travel as int32 and keep their low bits.
_WIRE_TYPES = {
    "float32": ("f", "<f4"),
    "float64": ("d", "<f8"),
    "int8": ("i", "<i4"),
    "int16": ("i", "<i4"),
    "int32": ("i", "<i4"),
    "uint8": ("i", "<i4"),
    "int64": ("q", "<i8"),
    "uint32": ("I", "<u4"),
    "uint64": ("Q", "<u8"),
}
_INTEGER_RANGES = {
    "i": (-(2**31), 2**31 - 1),
    "q": (-(2**63), 2**63 - 1),
    "I": (0, 2**32 - 1),
    "Q": (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonPredict:
    """A predict call: the inputs by name, and whether it came by row, so that the answer goes by row."""

    signature: Signature
    row_format: bool
    inputs: dict[str, NDArray[Any]]


def parse_predict(body: bytes, find_signature: Callable[[str], Signature]) -> JsonPredict:
    """Read the body of a predict call; `find_signature` maps a signature's name, never empty, and may raise.

    Raises:
        StatusError: INVALID_ARGUMENT or UNIMPLEMENTED with TensorFlow Serving's text; whatever find_signature raises.
    """
    document = parse_request_object(body)
    name = signature_name(document)
    signature = find_signature(name or DEFAULT_SIGNATURE)
    if not signature.inputs:
        raise _invalid(f"Failed to get input map for signature: {name or 'DEFAULT'}")
    if "instances" in document:
        instances = document["instances"]
        if "inputs" in document:
            raise _malformed(
                document,
                "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist ",
            )
        if not isinstance(instances, list):
            raise _malformed(document, "Expecting 'instances' to be an list/array")
        if not instances:
            raise _malformed(document, "No values in 'instances' array")
        reader = _Reader(_may_hold_booleans(body, document))
        return JsonPredict(
            signature=signature, row_format=True, inputs=reader.rows(instances, signature.inputs)
        )
    if "inputs" not in document:
        raise _invalid("Missing 'inputs' or 'instances' key")
    reader = _Reader(_may_hold_booleans(body, document))
    inputs = reader.columns(document["inputs"], signature.inputs)
    return JsonPredict(signature=signature, row_format=False, inputs=inputs)


def parse_request_object(body: bytes) -> dict[str, Any]:
    """Read a request's JSON object; raises StatusError when it is none."""
    document = parse_json(body)
    if not isinstance(document, dict):
        raise _malformed(document, "Is not object")
    return document


def signature_name(document: Mapping[str, Any]) -> str:
    """The optional `signature_name` of a request, "" when absent; raises StatusError when it is no string."""
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise _malformed(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return name


def is_base64_object(value: Any) -> bool:
    """Whether a JSON value is `{"b64": "<text>"}` and nothing more."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def decode_base64(text: str) -> bytes:
    """Decode base64, padded or not, spaces allowed; raises StatusError."""
    try:
        packed = "".join(text.split()).encode("ascii").rstrip(b"=")
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise _invalid("Unable to base64 decode") from error


def tensorflow_type_name(dtype: str) -> str:
    """Name a numpy dtype as TensorFlow's error texts do: "float" for float32, "string" for object."""
    return _TYPE_NAMES.get(dtype, dtype)


class _Reader:
    """Turns the JSON values of one request into arrays."""

    __slots__ = ("_may_hold_booleans",)

    def __init__(self, may_hold_booleans: bool) -> None:
        self._may_hold_booleans = may_hold_booleans

    def rows(self, instances: list[Any], specs: tuple[TensorSpec, ...]) -> dict[str, NDArray[Any]]:
        """The tensors of an `instances` list: dimension 0 counts its elements."""
        first = instances[0]
        if not isinstance(first, dict):
            if len(specs) > 1:
                raise _invalid(
                    "instances is a plain list, but expecting list of objects as multiple input tensors required as "
                    "per tensorinfo_map"
                )
            values = self._quickly(instances, specs[0].dtype)
            if values is not None:
                return {specs[0].name: values}
        elif not is_base64_object(first):
            columns = self._named_rows_quickly(instances, specs)
            if columns is not None:
                return columns
        return _rows_carefully(instances, specs)

    def columns(self, inputs: Any, specs: tuple[TensorSpec, ...]) -> dict[str, NDArray[Any]]:
        """The tensors of `inputs`: each with the shape it is written in."""
        if isinstance(inputs, dict) and not is_base64_object(inputs):
            tensors = {}
            for spec in specs:
                if spec.name not in inputs:
                    raise _invalid(f"Missing named input: {spec.name} in 'inputs' object.")
                tensors[spec.name] = self._tensor(inputs[spec.name], spec.dtype)
            return tensors
        if len(specs) > 1:
            raise _invalid(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
                "tensorinfo_map"
            )
        return {specs[0].name: self._tensor(inputs, specs[0].dtype)}

    def _tensor(self, value: Any, dtype: str) -> NDArray[Any]:
        if isinstance(value, list):
            tensor = self._quickly(value, dtype)
            if tensor is not None:
                return tensor
        shape = _shape_of(value)
        leaves: list[Any] = []
        _collect(value, 0, shape, dtype, leaves)
        return _array(leaves, shape, dtype)

    def _named_rows_quickly(
        self, instances: list[Any], specs: tuple[TensorSpec, ...]
    ) -> dict[str, NDArray[Any]] | None:
        columns = {}
        count = len(specs)
        try:
            for row in instances:
                if len(row) != count:
                    return None
            for spec in specs:
                name = spec.name
                tensor = self._quickly([row[name] for row in instances], spec.dtype)
                if tensor is None:
                    return None
                columns[name] = tensor
        except (KeyError, TypeError, IndexError):  # an element that is no object, or has other keys
            return None
        return columns

    def _quickly(self, values: list[Any], dtype: str) -> NDArray[Any] | None:
        """A regular nest of lists as an array; None when it is not regular or its leaves need a closer look."""
        shape = [len(values)]
        flat = values
        while flat and type(flat[0]) is list:
            length = len(flat[0])
            shape.append(length)
            if len(shape) > _MAX_RANK:
                return None
            if len(flat) == 1:
                flat = flat[0]
            elif set(map(type, flat)) == {list} and set(map(len, flat)) == {length}:
                flat = list(chain.from_iterable(flat))
            else:
                return None
        wire_type = _WIRE_TYPES.get(dtype)
        if wire_type is not None:
            if self._may_hold_booleans and bool in set(map(type, flat)):
                return None
            return _packed(flat, shape, dtype, wire_type)
        types = set(map(type, flat))
        if dtype == "object" and types == {str}:
            return _array([to_bytes(text) for text in flat], shape, dtype)
        if dtype == "bool" and types == {bool}:
            return _array(flat, shape, dtype)
        return None


def _may_hold_booleans(body: bytes, document: Mapping[str, Any]) -> bool:
    """Whether `true` or `false`, which Python takes for numbers, can be in the body beside the top-level keys.

    Counting two letters is forty times cheaper than looking at the type of each of 200 values.
    """
    if body.find(b"u") < 0 and body.find(b"l") < 0:
        return False
    keys = "".join(document) + str(document.get("signature_name", ""))
    return body.count(b"u") > keys.count("u") or body.count(b"l") > keys.count("l")


@lru_cache(maxsize=256)
def _packer(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def _packed(flat: list[Any], shape: list[int], dtype: str, wire_type: tuple[str, str]) -> NDArray[Any] | None:
    code, wire_dtype = wire_type
    try:
        if len(flat) <= _MAX_PACKED_VALUES:
            tensor = np.frombuffer(_packer(len(flat), code).pack(*flat), wire_dtype)
        else:
            tensor = np.frombuffer(array(code, flat), wire_dtype)
    except (struct.error, OverflowError, TypeError, ValueError):
        return None
    if wire_dtype == "<i4" and dtype != "int32":
        tensor = tensor.astype(dtype)
    return tensor.reshape(shape)


def _rows_carefully(instances: list[Any], specs: tuple[TensorSpec, ...]) -> dict[str, NDArray[Any]]:
    named = isinstance(instances[0], dict) and not is_base64_object(instances[0])
    by_name = {spec.name: _Column(spec) for spec in specs}
    first = specs[0].name
    for index, element in enumerate(instances):
        if named and (not isinstance(element, dict) or is_base64_object(element)):
            raise _invalid(f"Expecting object but got list at item {index} of input list")
        if not named and isinstance(element, dict) and not is_base64_object(element):
            raise _invalid(f"Expecting value/list but got object at item {index} of input list")
        for name, value in element.items() if named else ((first, element),):
            try:
                if name not in by_name:
                    raise _invalid(f"JSON object: does not have named input: {name}")
                by_name[name].add(value)
            except StatusError as error:
                key = f" key: {name}" if named else ""
                raise _invalid(
                    f"Failed to process element: {index}{key} of 'instances' list. Error: {error}"
                ) from error
        if named and element.keys() != by_name.keys():
            raise _invalid(
                f"Failed to process element: {index} of 'instances' list. JSON object: {debug_text(element)} keys "
                f"must be equal to: {','.join(sorted(by_name))}"
            )
    return {
        name: column.stacked(len(instances)) for name, column in by_name.items() if named or name == first
    }


class _Column:
    """One input, gathered element by element; all elements have the shape of the first."""

    __slots__ = ("_dtype", "_leaves", "_shape", "_size")

    def __init__(self, spec: TensorSpec) -> None:
        self._dtype = spec.dtype
        self._leaves: list[Any] = []
        self._shape: list[int] | None = None
        self._size = 0

    def add(self, value: Any) -> None:
        shape = _shape_of(value)
        before = len(self._leaves)
        _collect(value, 0, shape, self._dtype, self._leaves)
        size = len(self._leaves) - before
        if self._shape is None:
            self._shape, self._size = shape, size
        elif size != self._size:
            raise _invalid(f"Expecting tensor size: {self._size} but got: {size}")
        elif shape != self._shape:
            raise _invalid(f"Expecting shape {_shape_text(self._shape)} but got: {_shape_text(shape)}")

    def stacked(self, count: int) -> NDArray[Any]:
        return _array(self._leaves, [count, *(self._shape or ())], self._dtype)


def _shape_of(value: Any) -> list[int]:
    """The shape that the first element of every level suggests."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if len(shape) >= _MAX_RANK:
            raise _invalid(f"Tensors of more than {_MAX_RANK} dimensions are not supported")
        if not value:
            break
        value = value[0]
    return shape


def _collect(value: Any, level: int, shape: list[int], dtype: str, leaves: list[Any]) -> None:
    """Append the leaves of a nest of lists that must have this shape."""
    rank = len(shape)
    if not isinstance(value, list):
        if level != rank:
            raise _invalid(
                f"JSON Value: {debug_text(value)} found at incorrect level: {level + 1} in the JSON DOM. Expected at "
                f"level: {rank}"
            )
        leaves.append(_leaf(value, dtype))
        return
    if level >= rank:
        raise _invalid(f"Encountered list at unexpected level: {level} expected < {rank}")
    if len(value) != shape[level]:
        raise _invalid(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for element in value:
        _collect(element, level + 1, shape, dtype, leaves)


def _leaf(value: Any, dtype: str) -> Any:
    """One value as Python's, fit for the dtype; raises StatusError."""
    if isinstance(value, dict):
        if dtype != "object":
            raise _wrong_type(value, dtype)
        if not is_base64_object(value):
            raise _malformed(value, "not formatted correctly for base64 data")
        return decode_base64(value["b64"])
    if dtype == "object":
        if not isinstance(value, str):
            raise _wrong_type(value, dtype)
        return to_bytes(value)
    if dtype == "bool":
        if not isinstance(value, bool):
            raise _wrong_type(value, dtype)
        return value
    if dtype not in _WIRE_TYPES:
        raise StatusError(
            "UNIMPLEMENTED",
            f"Conversion of JSON Value: {debug_text(value)} to type: {tensorflow_type_name(dtype)}",
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(value, dtype)
    limits = _INTEGER_RANGES.get(_WIRE_TYPES[dtype][0])
    if limits is not None and not (isinstance(value, int) and limits[0] <= value <= limits[1]):
        raise _wrong_type(value, dtype)
    try:
        return value if limits is not None else float(value)
    except OverflowError as error:  # hundreds of digits, read as an integer
        raise _invalid("JSON Parse error: Number too big to be stored in double.") from error


def _array(leaves: list[Any], shape: list[int], dtype: str) -> NDArray[Any]:
    if dtype == "object":
        strings = np.empty(len(leaves), object)
        strings[:] = leaves
        return strings.reshape(shape)
    if dtype not in _WIRE_TYPES:
        return np.array(leaves, dtype).reshape(shape)
    _, wire_dtype = _WIRE_TYPES[dtype]
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        wire = np.array(leaves, np.float64 if dtype == "float32" else wire_dtype)
        return wire.astype(dtype).reshape(shape)


def _shape_text(shape: list[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _wrong_type(value: Any, dtype: str) -> StatusError:
    return _malformed(
        value, f"Type: {type_name(value)} is not of expected type: {tensorflow_type_name(dtype)}"
    )


def _malformed(value: Any, complaint: str) -> StatusError:
    return _invalid(f"JSON Value: {debug_text(value)} {complaint}")


def _invalid(message: str) -> StatusError:
    return StatusError("INVALID_ARGUMENT", message)
