"""How do tensors travel in TensorFlow Serving's REST predict call? The client's side of it.

Strings that are UTF-8 travel as text, others as `{"b64": …}` (util/json_tensor.cc of TensorFlow Serving).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from batchtune.wire.arrays import MAX_RANK, as_bytes


def encode_predict_json(
    inputs: Mapping[str, NDArray[Any]], *, signature_name: str, row_format: bool = True
) -> bytes:
    """Write the body of a REST predict call, `instances` by row or `inputs` by column.

    Raises ValueError when rows are asked for and the inputs do not share their first dimension.
    """
    columns = {name: _json_values(array) for name, array in inputs.items()}
    body: dict[str, Any] = {"signature_name": signature_name}
    single = next(iter(columns.values())) if len(columns) == 1 else None
    if not row_format:
        body["inputs"] = columns if single is None else single
    elif len({array.shape[:1] for array in inputs.values()}) != 1 or any(not a.ndim for a in inputs.values()):
        raise ValueError("the row format needs inputs that share their first dimension")
    elif single is not None:
        body["instances"] = single
    else:
        names = tuple(columns)
        rows = zip(*columns.values(), strict=True)
        body["instances"] = [dict(zip(names, row, strict=True)) for row in rows]
    if all(_is_finite(array) for array in inputs.values()):
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(
        body, default=_plain
    ).encode()  # writes NaN and Infinity, which TensorFlow Serving reads


def decode_predict_json(body: bytes) -> dict[str, NDArray[Any]] | NDArray[Any]:
    """Read a REST predict answer: one array when the output is unnamed, else arrays by output name.

    Bare NaN and Infinity are accepted, as TensorFlow Serving writes them. Raises ValueError for anything that
    is not such an answer; a server's `{"error": …}` becomes the text of the ValueError.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError("the answer is not a JSON object")
    if "predictions" in document:
        return _read_rows(document["predictions"])
    if "outputs" in document:
        outputs = document["outputs"]
        if _is_named(outputs):
            return {name: _read_values(value) for name, value in outputs.items()}
        return _read_values(outputs)
    raise ValueError(str(document.get("error", "the answer has neither 'predictions' nor 'outputs'")))


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind not in "fV" or bool(np.isfinite(array).all())


def _json_values(array: NDArray[Any]) -> Any:
    if array.dtype.kind in "OSU":
        return _map_nested(array.tolist(), _json_string)
    if array.dtype.kind == "c":
        raise ValueError("TensorFlow Serving's JSON has no complex numbers")
    if array.dtype.itemsize == 2 and array.dtype.kind in "fV":  # float16 and bfloat16
        array = array.astype(np.float32)
    return np.ascontiguousarray(array) if array.ndim else array.item()


def _json_string(value: Any) -> Any:
    raw = as_bytes(value)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(raw).decode()}


def _map_nested(value: Any, function: Callable[[Any], Any], rank: int = 0) -> Any:
    if not isinstance(value, list):
        return function(value)
    if rank >= MAX_RANK:
        raise ValueError(f"lists are nested more than {MAX_RANK} deep")
    return [_map_nested(item, function, rank + 1) for item in value]


def _plain(value: Any) -> Any:
    return value.tolist()


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not (set(value) == {"b64"} and isinstance(value["b64"], str))


def _read_rows(rows: Any) -> dict[str, NDArray[Any]] | NDArray[Any]:
    if not isinstance(rows, list):
        raise ValueError("'predictions' is not a list")
    if not rows or not _is_named(rows[0]):
        return _read_values(rows)
    names = rows[0].keys()
    if any(not isinstance(row, dict) or row.keys() != names for row in rows):
        raise ValueError("the rows of 'predictions' do not name the same outputs")
    return {name: _read_values([row[name] for row in rows]) for name in names}


def _read_values(value: Any) -> NDArray[Any]:
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, (str, dict)):
        return np.array(_map_nested(value, _read_string), dtype=object)
    array = np.array(value)
    if array.dtype.kind not in "fiub":
        raise ValueError("the answer holds values that are neither numbers nor strings")
    return array


def _read_string(leaf: Any) -> bytes:
    if isinstance(leaf, str):
        return leaf.encode()
    if isinstance(leaf, dict) and not _is_named(leaf):
        return base64.b64decode(leaf["b64"], validate=True)
    raise ValueError("strings and other values are mixed in one tensor")
