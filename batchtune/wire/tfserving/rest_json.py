"""Tensors in TensorFlow Serving's REST predict call, the client's side.

Strings that are UTF-8 travel as text, others as `{"b64": …}` (util/json_tensor.cc of TensorFlow Serving).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchtune.wire.encoding import bounded_depth, read_fields
from batchtune.wire.signature import MAX_RANK, as_bytes

# The parameters with which a SavedModel batches inside its own graph.
#
# `tf.nondifferentiable_batch_function` leaves an op BatchFunction in the graph, in a function of its library as a rule
# (tensorflow/core/ops/batch_ops.cc). It is read from the file, so that nobody needs TensorFlow for that.

_OP: Final = "BatchFunction"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBatching:
    """One op BatchFunction of a graph: its attributes under their own names, 0 where one is absent."""

    max_batch_size: int
    batch_timeout_micros: int
    num_batch_threads: int
    allowed_batch_sizes: tuple[int, ...] = ()

    def in_words(self) -> str:
        """Format the attributes: `max_batch_size 32, batch_timeout_micros 5000, num_batch_threads 1`."""
        sizes = ",".join(map(str, self.allowed_batch_sizes))
        return (
            f"max_batch_size {self.max_batch_size}, batch_timeout_micros {self.batch_timeout_micros}, "
            f"num_batch_threads {self.num_batch_threads}{f', allowed_batch_sizes {sizes}' if sizes else ''}"
        )


def read_graph_batching(version_directory: Path) -> tuple[GraphBatching, ...]:
    """Return the distinct BatchFunction ops in the `saved_model.pb` of a version.

    () where there is no such file, or it is larger than 256 MiB or cannot be read.
    """
    file = "saved_model.pb"
    path = version_directory / file
    bytes_max = 1 << 28  # A larger graph is not looked at: it takes a second for each 100 MB.
    try:
        if path.stat().st_size > bytes_max:
            return ()
        saved_model = path.read_bytes()
    except OSError:
        return ()
    return graph_batching(saved_model) if _OP.encode() in saved_model else ()


def graph_batching(saved_model: bytes) -> tuple[GraphBatching, ...]:
    """Return the distinct BatchFunction ops of a serialised SavedModel; if its bytes are broken, those of the graphs
    before the fault."""
    from google.protobuf.message import DecodeError

    from batchtune.wire.tfserving.messages import MetaGraphDef

    kept: dict[GraphBatching, None] = {}
    meta_graphs = 2  # the field of a SavedModel
    try:
        for field, _, begin, end in read_fields(saved_model, 0, len(saved_model)):
            if field == meta_graphs:
                graph = MetaGraphDef.FromString(saved_model[begin:end]).graph_def
                for node in chain(graph.node, *(function.node_def for function in graph.library.function)):
                    if node.op == _OP:
                        kept[_batching_of(node.attr)] = None
    except (ValueError, IndexError, DecodeError):
        pass
    return tuple(kept)


def _batching_of(attributes: Any) -> GraphBatching:
    """Read the attributes of a BatchFunction, a map of names to AttrValue."""
    return GraphBatching(
        max_batch_size=attributes["max_batch_size"].i,
        batch_timeout_micros=attributes["batch_timeout_micros"].i,
        num_batch_threads=attributes["num_batch_threads"].i,
        allowed_batch_sizes=tuple(attributes["allowed_batch_sizes"].list.i),
    )


def encode_predict_json(
    inputs: Mapping[str, NDArray[Any]], *, signature_name: str, row_format: bool = True
) -> bytes:
    """Write the body of a REST predict call: with `row_format` `instances`, a list of rows, else `inputs`, a list per
    input.

    Raises ValueError for complex numbers, and in row format when the inputs differ in their first dimension.
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
    # json writes NaN and Infinity, which TensorFlow Serving reads.
    return json.dumps(body, default=lambda array: array.tolist()).encode()


@bounded_depth()
def decode_predict_json(body: bytes) -> dict[str, NDArray[Any]] | NDArray[Any]:
    """Read a REST predict answer: one array when the output is unnamed, else output name -> array.

    Bare NaN and Infinity are accepted, as TensorFlow Serving writes them. Raises ValueError for any other text, also
    for one nested too deeply to be read; a server's `{"error": …}` becomes the text of the ValueError.
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
