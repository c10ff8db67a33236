"""Model files of the frameworks, where they are installed: a graph of ONNX, an exported program of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def onnx_graph(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any]
) -> Any:
    """A model whose tensors are given as (name, element type, shape), its weights as tensors of ONNX."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    helper = onnx.helper
    infos = [[helper.make_tensor_value_info(*one) for one in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "graph", *infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def save_onnx(directory: Path) -> None:
    """y = x @ [[1, 0], [0, 1], [1, 1]], and t = s, strings."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    helper, kind = onnx.helper, onnx.TensorProto
    model = onnx_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Identity", ["s"], ["t"])],
        [("x", kind.FLOAT, ["batch", 3]), ("s", kind.STRING, ["batch"])],
        [("y", kind.FLOAT, ["batch", 2]), ("t", kind.STRING, ["batch"])],
        [helper.make_tensor("w", kind.FLOAT, [3, 2], [1, 0, 0, 1, 1, 1])],
    )
    onnx.save(model, directory / "model.onnx")


def save_program(directory: Path, module: Any, *, width: int = 3) -> None:
    """What PyTorch exports of a module that takes any number of rows of this width."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(module, (torch.ones(2, width),), dynamic_shapes=rows)
    torch.export.save(program, directory / "model.pt2")
