"""Parses the JSON of request bodies, shows values in error messages, and makes tensors value by value.

orjson parses strict JSON. TensorFlow Serving's parser (rapidjson 1.1, iterative, with NaN and Infinity,
stopping after one value) accepts more: bare `NaN`, `Infinity` and `Inf`, text after the value, bytes that are
no UTF-8. So a body that orjson refuses is parsed again with python-rapidjson, whose error texts are used,
with the offset in bytes.

Tensors are made as TensorFlow Serving's util/json_tensor.cc does. This is the slow path of predict_request:
it decides on every body that the fast path does not take, and words every error.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import rapidjson
from numpy.typing import NDArray

from batchtune.wire.signature import MAX_RANK, TensorSpec, object_array
from batchtune.wire.status import StatusError, invalid_argument

DEBUG_BYTES = 256
"""JSON shown in an error message is cut at the first token past this many bytes."""

# Possessive and closed by the end of the text too: linear even on a hostile body.
_BARE_INFINITY = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z|\\\Z)|Inf(?!i)', re.DOTALL)


def parse_json(body: bytes) -> Any:
    """Parse one JSON value; text after it is ignored.

    Raises:
        StatusError: INVALID_ARGUMENT `JSON Parse error: …`, with TensorFlow Serving's text.
    """
    number_too_big = "Number too big to be stored in double."
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("number is infinity"):
            raise _parse_error(number_too_big, len(body.decode()[: error.pos].encode())) from error
        return _parse_leniently(body)


def debug_text(value: Any) -> str:
    """Return a JSON value as text for an error message: arrays on one line, cut near DEBUG_BYTES bytes."""
    parts: list[str] = []
    size = 0
    for part in _tokens(value, 0):
        if size >= DEBUG_BYTES:
            break
        parts.append(part)
        size += len(part.encode("utf-8", "replace"))
    return "".join(parts)


def type_name(value: Any) -> str:
    """Return the name of a JSON value's type in rapidjson, such as "Object" or "True"."""
    if value is None:
        return "Null"
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, dict):
        return "Object"
    if isinstance(value, list):
        return "Array"
    return "String" if isinstance(value, str) else "Number"


def to_bytes(text: str) -> bytes:
    """Encode a string of `parse_json` as UTF-8; bytes of the body that were not UTF-8 are restored."""
    return text.encode("utf-8", "surrogateescape")


def _parse_leniently(body: bytes) -> Any:
    text = body.decode("utf-8", "surrogateescape")
    start = len(text) - len(text.lstrip(" \t\r\n\ufeff"))
    if start == len(text):
        raise _parse_error("The document is empty" + ("." if body else ""), len(body) if body else None)
    lead = len(text[:start].encode())
    if text[start] in "}],:\0":  # no value starts so
        raise _parse_error("The document is empty.", lead)
    value = _read(text.encode("utf-8", "replace"), lead)  # a byte that is no UTF-8 is one byte here too
    spelled_out = _BARE_INFINITY.sub(lambda match: "Infinity" if match[0] == "Inf" else match[0], text)
    try:
        return _EXACT.raw_decode(spelled_out, start)[0]  # rapidjson's doubles may be off by their last bit
    except RecursionError as error:  # a few levels before rapidjson's
        raise _too_deep(body) from error
    except ValueError:  # -NaN
        return value


def _integer(digits: str) -> int | float:
    """Return an integer of 64 bits, or for a larger one the nearest double."""
    value = float(digits) if len(digits) > len(str(-(2**63))) else int(digits)
    return value if -(2**63) <= value < 2**64 else float(value)


_EXACT = json.JSONDecoder(parse_int=_integer)


def _read(body: bytes, lead: int) -> Any:
    """Return the value that begins at byte `lead`, whatever follows; raises StatusError as rapidjson does."""
    try:
        return rapidjson.loads(body[lead:], number_mode=rapidjson.NM_NAN | rapidjson.NM_NATIVE)
    except RecursionError as error:
        raise _too_deep(body) from error
    except rapidjson.JSONDecodeError as error:
        place, _, message = str(error).removeprefix("Parse error at offset ").partition(": ")
        if message.startswith("The document root must not be followed"):
            return _read(body[: lead + int(place)], lead)
        if message == "Invalid encoding in string.":  # of a later commit than rapidjson 1.1
            message = "Invalid escape character in string."
        raise _parse_error(message, lead + int(place)) from error


def _too_deep(body: bytes) -> StatusError:
    return _parse_error("Nested too deeply.", len(body))


def _parse_error(message: str, offset: int | None) -> StatusError:
    where = "" if offset is None else f" at offset: {offset}"
    return StatusError("INVALID_ARGUMENT", f"JSON Parse error: {message}{where}")


def _tokens(value: Any, depth: int) -> Iterator[str]:
    """Yield the pieces of a value's JSON as rapidjson's PrettyWriter writes it, arrays on a single line."""
    if isinstance(value, dict):
        yield "{"
        for index, (key, member) in enumerate(value.items()):
            yield ("," if index else "") + "\n" + "    " * (depth + 1) + _quoted(key) + ": "
            yield from _tokens(member, depth + 1)
        yield "\n" + "    " * depth + "}" if value else "}"
    elif isinstance(value, list):
        yield "["
        for index, element in enumerate(value):
            if index:
                yield ", "
            yield from _tokens(element, depth + 1)
        yield "]"
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """Return a JSON string; one longer than DEBUG_BYTES characters without its end."""
    shown = json.dumps(text[:DEBUG_BYTES], ensure_ascii=False)
    return shown if len(text) <= DEBUG_BYTES else shown[:-1]


# The tensor that a nest of JSON lists makes, looked at value by value.

# dtype → (struct format of the wire type, its dtype); small integers travel as int32 and keep their low bits.
WIRE_TYPES = {
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


def dense_tensor(value: Any, dtype: str) -> NDArray[Any]:
    """Return nested JSON lists as an array, whose shape follows the first element of every level.

    `dtype`: numpy's name, such as `float32`, or `object` for strings.

    Raises:
        StatusError: INVALID_ARGUMENT for lists or values that do not fit, UNIMPLEMENTED for a dtype that JSON
            cannot express.
    """
    shape = _shape_of(value)
    leaves: list[Any] = []
    _collect(value, 0, shape, dtype, leaves)
    return array_of(leaves, shape, dtype)


class Column:
    """Collects the rows of one input; all must have the shape of the first row."""

    __slots__ = ("_dtype", "_leaves", "_shape", "_size")

    def __init__(self, spec: TensorSpec) -> None:
        self._dtype = spec.dtype
        self._leaves: list[Any] = []
        self._shape: list[int] | None = None
        self._size = 0

    def add(self, value: Any) -> None:
        """Add a row; raises StatusError INVALID_ARGUMENT when its shape is not that of the first row."""
        shape = _shape_of(value)
        before = len(self._leaves)
        _collect(value, 0, shape, self._dtype, self._leaves)
        size = len(self._leaves) - before
        if self._shape is None:
            self._shape, self._size = shape, size
        elif size != self._size:
            raise invalid_argument(f"Expecting tensor size: {self._size} but got: {size}")
        elif shape != self._shape:
            raise invalid_argument(
                f"Expecting shape {_shape_text(self._shape)} but got: {_shape_text(shape)}"
            )

    def stacked(self, count: int) -> NDArray[Any]:
        """Return the tensor of the `count` rows that were added."""
        return array_of(self._leaves, [count, *(self._shape or ())], self._dtype)


def is_base64_object(value: Any) -> bool:
    """Whether a JSON value is `{"b64": "<text>"}` without further keys."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def decode_base64(text: str) -> bytes:
    """Decode base64, with padding or without, with white space; raises StatusError INVALID_ARGUMENT."""
    try:
        packed = "".join(text.split()).encode("ascii").rstrip(b"=")
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise invalid_argument("Unable to base64 decode") from error


def tensorflow_type_name(dtype: str) -> str:
    """Return a numpy dtype's name in TensorFlow's error texts: "float" for float32, "string" for object."""
    names = {"float32": "float", "float64": "double", "float16": "half", "object": "string"}
    return names.get(dtype, dtype)


def _shape_of(value: Any) -> list[int]:
    """Return the shape by the first element of every level; raises StatusError beyond MAX_RANK dimensions."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if len(shape) >= MAX_RANK:
            raise invalid_argument(f"Tensors of more than {MAX_RANK} dimensions are not supported")
        if not value:
            break
        value = value[0]
    return shape


def _collect(value: Any, level: int, shape: list[int], dtype: str, leaves: list[Any]) -> None:
    """Append the values of nested lists to `leaves`; raises StatusError where lists or values do not fit."""
    rank = len(shape)
    if not isinstance(value, list):
        if level != rank:
            raise invalid_argument(
                f"JSON Value: {debug_text(value)} found at incorrect level: {level + 1} in the JSON DOM. Expected at "
                f"level: {rank}"
            )
        leaves.append(_leaf(value, dtype))
        return
    if level >= rank:
        raise invalid_argument(f"Encountered list at unexpected level: {level} expected < {rank}")
    if len(value) != shape[level]:
        raise invalid_argument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for element in value:
        _collect(element, level + 1, shape, dtype, leaves)


def _leaf(value: Any, dtype: str) -> Any:
    """Return a JSON value as a Python value that fits the dtype; raises StatusError where it does not."""
    if isinstance(value, dict):
        if dtype != "object":
            raise _wrong_type(value, dtype)
        if not is_base64_object(value):
            raise malformed(value, "not formatted correctly for base64 data")
        return decode_base64(value["b64"])
    if dtype == "object":
        if not isinstance(value, str):
            raise _wrong_type(value, dtype)
        return to_bytes(value)
    if dtype == "bool":
        if not isinstance(value, bool):
            raise _wrong_type(value, dtype)
        return value
    if dtype not in WIRE_TYPES:
        raise StatusError(
            "UNIMPLEMENTED",
            f"Conversion of JSON Value: {debug_text(value)} to type: {tensorflow_type_name(dtype)}",
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(value, dtype)
    limits = _INTEGER_RANGES.get(WIRE_TYPES[dtype][0])
    if limits is not None and not (isinstance(value, int) and limits[0] <= value <= limits[1]):
        raise _wrong_type(value, dtype)
    try:
        return value if limits is not None else float(value)
    except OverflowError as error:  # hundreds of digits, read as an integer
        raise invalid_argument("JSON Parse error: Number too big to be stored in double.") from error


def array_of(leaves: list[Any], shape: list[int], dtype: str) -> NDArray[Any]:
    """Return an array of shape `shape` of values in row-major order that fit the dtype; a value beyond float32 becomes
    infinity."""
    if dtype == "object":
        return object_array(leaves).reshape(shape)
    if dtype not in WIRE_TYPES:
        return np.array(leaves, dtype).reshape(shape)
    _, wire_dtype = WIRE_TYPES[dtype]
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        wire = np.array(leaves, np.float64 if dtype == "float32" else wire_dtype)
        return wire.astype(dtype).reshape(shape)


def _shape_text(shape: list[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _wrong_type(value: Any, dtype: str) -> StatusError:
    return malformed(
        value, f"Type: {type_name(value)} is not of expected type: {tensorflow_type_name(dtype)}"
    )


def malformed(value: Any, complaint: str) -> StatusError:
    """Return an error INVALID_ARGUMENT that shows the JSON value and what is wrong with it."""
    return invalid_argument(f"JSON Value: {debug_text(value)} {complaint}")
