"""Small ONNX graphs, written by hand: no framework is needed to make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper


def write_graph(
    path: Path,
    node: tuple[str, list[str]],
    inputs: dict[str, tuple[int, list[Any]]],
    constants: dict[str, np.ndarray] | None = None,
) -> Path:
    """One node whose output is `y`; `inputs` by name: type and shape, where a word leaves a dimension open."""
    kind, arguments = node
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(
        [helper.make_node(kind, arguments, ["y"])],
        "tiny",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8), path)
    return path


def product(path: Path, *, rows: int | str = "batch", columns: int | str = 4) -> Path:
    """x · w, of 4 columns; where `columns` is a word the graph does not tell them."""
    weight = np.ones((4, 2), np.float32)
    return write_graph(
        path, ("MatMul", ["x", "w"]), {"x": (TensorProto.FLOAT, [rows, columns])}, {"w": weight}
    )


def lookup(path: Path, *, vocabulary: int) -> Path:
    """Rows of a table by the numbers of `ids`, as many a row as one likes."""
    table = np.ones((vocabulary, 2), np.float32)
    return write_graph(
        path,
        ("Gather", ["table", "ids"]),
        {"ids": (TensorProto.INT64, ["batch", "length"])},
        {"table": table},
    )
