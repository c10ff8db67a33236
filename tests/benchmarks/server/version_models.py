"""How is a version written whose answers name it? y = x + 1000 × version, read from a table as large as asked for.

An emulated device, which has no weights, answers with one of two widths instead.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

VERSION_STEP = 1000.0
_EMULATED = """
service_time: {{base_ms: 1.0, per_row_ms: 0.02}}
inputs: {{x: {{dtype: float32, shape: [1]}}}}
outputs: {{y: {{dtype: float32, shape: [{width}]}}}}
"""
_SIGNATURE = """
inputs: {x: {dtype: float32, shape: [1]}}
outputs: {y: {dtype: float32, shape: [1]}}
"""
_PACKAGES = {
    "emulated": (),
    "onnx": ("onnx", "onnxruntime"),
    "tensorflow": ("tensorflow",),
    "torch": ("torch",),
}


def installed_backends() -> list[str]:
    return [name for name, packages in _PACKAGES.items() if all(map(importlib.util.find_spec, packages))]


def write_version(backend: str, directory: str, version: int, weights_bytes: int) -> None:
    """The files of a version; run in a process of its own, for it imports the framework."""
    path = Path(directory)
    path.mkdir(parents=True)
    if backend == "emulated":
        (path / "emulated.yaml").write_text(_EMULATED.format(width=1 + version))
        return
    table = np.full(weights_bytes // 4, VERSION_STEP * version, np.float32)
    writers = {"onnx": _write_onnx, "tensorflow": _write_tensorflow, "torch": _write_torch}
    writers[backend](path, table)


def version_of(backend: str, x: float, values: list[float]) -> int | None:
    """The version that gave this answer; None where none gives such a one."""
    if backend == "emulated":
        expected = [x + index for index in range(len(values))]
        return len(values) - 1 if values == expected else None
    version, rest = divmod(values[0] - x, VERSION_STEP)
    return int(version) if not rest and len(values) == 1 else None


def _write_onnx(path: Path, table: np.ndarray) -> None:
    import onnx

    weights = onnx.numpy_helper.from_array(table, "table")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, 1]) for name in "xy")
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["index"], to=onnx.TensorProto.INT64),
        onnx.helper.make_node("Gather", ["table", "index"], ["offset"]),
        onnx.helper.make_node("Add", ["x", "offset"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "lookup", [x], [y], [weights])
    opset = onnx.helper.make_opsetid("", 13)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), path / "model.onnx")


def _write_tensorflow(path: Path, table: np.ndarray) -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    class Lookup(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(table)

        @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.float32, name="x")])
        def serve(self, x: Any) -> dict[str, Any]:
            return {"y": x + tf.gather(self.table, tf.cast(x, tf.int64))}

    module = Lookup()
    tf.saved_model.save(module, str(path), signatures=module.serve)


def _write_torch(path: Path, table: np.ndarray) -> None:
    import torch

    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.from_numpy(table), requires_grad=False)

        def forward(self, x: Any) -> Any:
            return x + self.table[x.to(torch.int64)]

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Lookup(), (torch.ones(2, 1),), dynamic_shapes=shapes)
    torch.export.save(program, path / "model.pt2")
    (path / "signature.yaml").write_text(_SIGNATURE)
