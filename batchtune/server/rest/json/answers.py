"""Writes a model's outputs as the JSON that a REST client reads.

The layout is that of TensorFlow Serving (util/json_tensor.cc with rapidjson's PrettyWriter): indents of four
spaces; by row each array on one line, by column one value per line. A number is the shortest text that reads
back as an equal float32 or float64; NaN and the infinities are written bare, as TensorFlow Serving does.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from batchtune.server.rest.json.values import tensorflow_type_name
from batchtune.wire.status import invalid_argument

_STEP = b"    "
_LINE = orjson.OPT_SERIALIZE_NUMPY

_Cell = Callable[[bytes], bytes]


def predict_answer(outputs: Mapping[str, NDArray[Any]], *, row_format: bool) -> bytes:
    """Return the answer of a predict call: `predictions` by row, or `outputs` by column.

    Raises:
        StatusError: INVALID_ARGUMENT where there is no output or a dtype cannot be written, and by row where outputs
            have no rows or differ in their number.
    """
    if row_format and len(outputs) == 1:
        (tensor,) = outputs.values()
        text = _plain_rows(tensor)
        if text is not None:
            return b'{\n    "predictions": ' + text + b"\n    ]\n}"
    if not outputs:
        raise invalid_argument("Cannot convert empty tensor map to JSON")
    for tensor in outputs.values():
        # What json_tensor.cc writes: no half, no uint16. (dtype.name costs a microsecond.)
        if tensor.dtype.char not in "fdihbBOlq?ILQ":
            raise invalid_argument(
                f"Failed to write JSON value for tensor type: {tensorflow_type_name(tensor.dtype.name)}"
            )
    return _by_row(outputs) if row_format else _by_column(outputs)


def decimal(value: float) -> bytes:
    """Return the shortest text that reads back as an equal float32."""
    return _numbers(np.array([value], np.float32), _LINE)[1:-1]


def quoted(text: bytes) -> bytes:
    """Return a JSON string; bytes that are not UTF-8 become replacement characters."""
    return json.dumps(text.decode("utf-8", "replace"), ensure_ascii=False).encode()


def error_answer(message: str) -> bytes:
    """Return the body of an error: `{ "error": "<message>" }`."""
    return b'{ "error": ' + quoted(message.encode("utf-8", "replace")) + b" }"


def _by_row(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    rows = _common_rows(outputs)
    if rows == 0:
        return b'{\n    "predictions": []\n}'
    if len(outputs) > 1:
        return _rows_of_objects(outputs)
    ((name, tensor),) = outputs.items()
    text = _line(tensor, name)
    return b'{\n    "predictions": ' + text[:-1] + b"\n    ]\n}"


def _plain_rows(tensor: NDArray[Any]) -> bytes | None:
    """Return a tensor as JSON without the last bracket, in half the usual time.

    None where that cannot be done: other dtypes, no values, not contiguous, NaN or infinity.
    """
    if tensor.dtype.char not in "fdilq" or not tensor.ndim or not tensor.size:
        return None
    try:
        text = orjson.dumps(tensor, option=_LINE)
    except TypeError:  # not contiguous
        return None
    return text[:-1].replace(b",", b", ") if text.find(b"n") < 0 else None


def _common_rows(outputs: Mapping[str, NDArray[Any]]) -> int:
    rows = -1
    for name, tensor in outputs.items():
        if not tensor.ndim:
            raise invalid_argument(f"Tensor name: {name} has no shape information ")
        if rows >= 0 and len(tensor) != rows:
            raise invalid_argument(
                f"Tensor name: {name} has inconsistent batch size: {len(tensor)} expecting: {rows}"
            )
        rows = len(tensor)
    return rows


def _rows_of_objects(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    columns = []
    for name, tensor in outputs.items():
        key = quoted(name.encode()) + b": "
        columns.append([key + _line(row, name) for row in tensor])
    rows = [b",\n            ".join(members) for members in zip(*columns, strict=True)]
    objects = [b"\n        {\n            " + row + b"\n        }" for row in rows]
    return b'{\n    "predictions": [' + b",".join(objects) + b"\n    ]\n}"


def _by_column(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    if len(outputs) == 1:
        ((name, tensor),) = outputs.items()
        return b'{\n    "outputs": ' + _block(tensor, name, 1) + b"\n}"
    members = [quoted(name.encode()) + b": " + _block(tensor, name, 2) for name, tensor in outputs.items()]
    return b'{\n    "outputs": {\n        ' + b",\n        ".join(members) + b"\n    }\n}"


def _line(tensor: Any, name: str) -> bytes:
    """Return a tensor, or an element of one, as JSON on one line."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind != "O":
            return _numbers(tensor, _LINE).replace(b",", b", ")
        return _strings_line(tensor.tolist(), _cell_writer(name))
    if isinstance(tensor, np.generic):
        return _numbers(np.array([tensor]), _LINE)[1:-1]
    return _cell_writer(name)(tensor)


def _block(tensor: NDArray[Any], name: str, depth: int) -> bytes:
    """Return a tensor as JSON with one value per line, for a place that is indented by `depth` steps."""
    if not tensor.ndim:
        return _line(tensor[()], name)
    if tensor.dtype.kind == "O":
        return _strings_block(tensor.tolist(), _cell_writer(name), depth)
    text = _numbers(tensor, _LINE | orjson.OPT_INDENT_2)
    return text.replace(b"  ", _STEP).replace(b"\n", b"\n" + _STEP * depth)


def _numbers(tensor: NDArray[Any], option: int) -> bytes:
    text = orjson.dumps(tensor if tensor.flags.c_contiguous else np.ascontiguousarray(tensor), option=option)
    return text if text.find(b"n") < 0 else _with_bare_names(text, tensor)


def _with_bare_names(text: bytes, tensor: NDArray[Any]) -> bytes:
    """Return orjson's text of a tensor with NaN, Infinity or -Infinity in place of each null."""
    pieces = text.split(b"null")
    names = [
        b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
        for value in tensor[~np.isfinite(tensor)].tolist()
    ]
    return b"".join(piece + name for piece, name in zip(pieces, [*names, b""], strict=True))


def _cell_writer(name: str) -> _Cell:
    bytes_suffix = "_bytes"
    return _base64_object if name.endswith(bytes_suffix) else quoted


def _base64_object(value: bytes) -> bytes:
    return b'{"b64": "' + base64.b64encode(value) + b'"}'


def _strings_line(values: Any, cell: _Cell) -> bytes:
    if isinstance(values, list):
        return b"[" + b", ".join(_strings_line(value, cell) for value in values) + b"]"
    return cell(values)


def _strings_block(values: Any, cell: _Cell, depth: int) -> bytes:
    if not isinstance(values, list):
        return cell(values)
    if not values:
        return b"[]"
    indent = b"\n" + _STEP * (depth + 1)
    inner = (b"," + indent).join(_strings_block(value, cell, depth + 1) for value in values)
    return b"[" + indent + inner + b"\n" + _STEP * depth + b"]"
