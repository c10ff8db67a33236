"""The large tables of an ONNX model are held once: cut out of the graph, and used where they were read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.server.backends import onnx as onnx_backend
from batchtune.server.backends.onnx import WEIGHT_BYTES_MIN, Weight, cut_weights, read_weights
from batchtune.server.backends.registry import load_model
from batchtune.server.server_flags import ServerFlags
from tests.server.backends.model_files import onnx_graph

onnx = pytest.importorskip("onnx", reason="onnx is not installed")


def table_of(dtype: Any) -> np.ndarray:
    """One of WEIGHT_BYTES_MIN bytes."""
    count = WEIGHT_BYTES_MIN // np.dtype(dtype).itemsize
    return (np.arange(count) % 100).astype(dtype).reshape(-1, 2)


def save(directory: Path, table: np.ndarray, *more_nodes: Any, raw: bool = True) -> Path:
    """y = table[x], beside other nodes."""
    helper = onnx.helper
    kind = helper.np_dtype_to_tensor_dtype(table.dtype)
    weights = onnx.numpy_helper.from_array(table, "table")
    if not raw:
        weights = helper.make_tensor("table", kind, table.shape, table.ravel().tolist())
    model = onnx_graph(
        [helper.make_node("Gather", ["table", "x"], ["y"]), *more_nodes],
        [("x", onnx.TensorProto.INT64, ["batch"])],
        [("y", kind, ["batch", 2])],
        [weights, onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "small")],
    )
    onnx.save(model, directory / "model.onnx")
    return directory / "model.onnx"


def cut(path: Path) -> tuple[bytes, list[Weight]]:
    model = cut_weights(path)
    assert model is not None
    return model


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int8", "uint16", "bool"])
def test_a_table_is_used_where_it_lies(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    held: list[np.ndarray] = []
    monkeypatch.setattr(
        onnx_backend, "read_weights", lambda *which: held.extend(read_weights(*which)) or held[:]
    )
    table = table_of(dtype)
    path = save(tmp_path, table)
    proto, _ = cut(path)
    assert len(proto) < 1_000
    run = load_model(tmp_path, ServerFlags(device="cpu", tensorflow_intra_op_parallelism=1)).runs[
        "serving_default"
    ]
    rows = np.array([3, len(table) - 1])
    np.testing.assert_array_equal(run({"x": rows})["y"], table[rows])
    held[0][3] = held[0][4]
    np.testing.assert_array_equal(run({"x": rows})["y"], table[[4, len(table) - 1]])


def test_a_table_of_a_linked_file_is_used(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    table = table_of("float32")
    (tmp_path / "kept").mkdir()
    file = save(tmp_path / "kept", table).rename(tmp_path / "kept/ranker.onnx")
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.onnx").symlink_to(file)  # as `sweep ranker.onnx` lays a file out
    run = load_model(tmp_path / "1", ServerFlags(device="cpu")).runs["serving_default"]
    np.testing.assert_array_equal(run({"x": np.array([7])})["y"], table[[7]])


def test_the_values_are_read_from_the_file_alone(tmp_path: Path) -> None:
    path = save(tmp_path, table_of("float32"))
    _, (weight,) = cut(path)
    assert (weight.name, weight.shape, weight.size) == ("table", (8192, 2), WEIGHT_BYTES_MIN)
    (values,) = read_weights(path, (weight,))
    np.testing.assert_array_equal(values.view(np.float32), table_of("float32"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(OSError, match=r"model\.onnx has become shorter"):
        read_weights(path, (weight,))


def node(operation: str, *inputs: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(operation, inputs, ["z"], **attributes)


def branch() -> Any:
    """A graph of its own that reads the table of the one around it."""
    helper = onnx.helper
    value = helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, [None, 2])
    return helper.make_graph([helper.make_node("Identity", ["table"], ["t"])], "branch", [], [value])


def test_what_others_read_too_is_small_or_no_plain_bytes_stays_in_the_graph(tmp_path: Path) -> None:
    table = table_of("float32")
    assert cut_weights(save(tmp_path, table, node("MatMul", "table", "small"))) is None
    choice = node("If", "condition", then_branch=branch(), else_branch=branch())
    assert cut_weights(save(tmp_path, table, choice)) is None
    assert cut_weights(save(tmp_path, table[:-1])) is None
    assert cut_weights(save(tmp_path, table, raw=False)) is None
    path = save(tmp_path, table)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    assert cut_weights(path) is None


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x3a\xff\x7f", b"\x3a\x05\x2a\x03\x4a\x01x"])
def test_what_is_no_model_is_left_to_the_runtime_to_refuse(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    assert cut_weights(tmp_path / "model.onnx") is None
