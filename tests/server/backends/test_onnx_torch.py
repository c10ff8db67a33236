"""ONNX and PyTorch models are served through the same signatures and runs as a SavedModel."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.server.backends import onnx as onnx_backend
from batchtune.server.backends.model import LoadedModel
from batchtune.server.backends.registry import load_model
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError

CPU = ServerFlags(device="cpu", tensorflow_intra_op_parallelism=1)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def run(model: LoadedModel, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    return dict(model.runs["serving_default"](inputs))


def save_onnx(directory: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    helper, kind = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Identity", ["s"], ["t"])],
        "graph",
        [
            helper.make_tensor_value_info("x", kind.FLOAT, ["batch", 3]),
            helper.make_tensor_value_info("s", kind.STRING, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("y", kind.FLOAT, ["batch", 2]),
            helper.make_tensor_value_info("t", kind.STRING, ["batch"]),
        ],
        [helper.make_tensor("w", kind.FLOAT, [3, 2], [1, 0, 0, 1, 1, 1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, directory / "model.onnx")


def test_an_onnx_graph_runs_under_its_own_names(tmp_path: Path) -> None:
    save_onnx(tmp_path)
    model = load_model(tmp_path, CPU)
    assert model.signatures["serving_default"].inputs == (
        TensorSpec(name="s", dtype="object", shape=(None,)),
        TensorSpec(name="x", dtype="float32", shape=(None, 3)),
    )
    outputs = run(model, x=X, s=np.array([b"a", b"b"], dtype=object))
    np.testing.assert_array_equal(outputs["y"], X @ [[1, 0], [0, 1], [1, 1]])
    assert list(outputs["t"]) == [b"a", b"b"]


def test_onnx_says_what_is_wrong_with_an_input(tmp_path: Path) -> None:
    save_onnx(tmp_path)
    model = load_model(tmp_path, CPU)
    with pytest.raises(StatusError) as raised:
        run(model, x=X[:, :2], s=np.array([b"a", b"b"], dtype=object))
    assert raised.value.code == "INVALID_ARGUMENT"


def test_a_broken_onnx_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(StatusError, match=r"model\.onnx") as raised:
        load_model(tmp_path, CPU)
    assert raised.value.code == "INVALID_ARGUMENT"


def test_no_gpu_is_an_error_only_when_one_is_asked_for(tmp_path: Path) -> None:
    save_onnx(tmp_path)
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime can use a GPU")
    with pytest.raises(StatusError, match="CUDAExecutionProvider"):
        load_model(tmp_path, ServerFlags(device="cuda"))


@pytest.mark.filterwarnings("ignore")
def test_torchscript_needs_a_signature_file_and_follows_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Two(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x, scale):  # type: ignore[no-untyped-def]
            return x * scale, x.sum(1)

    torch.jit.trace(Two(), (torch.ones(2, 3), torch.ones(2, 1))).save(tmp_path / "model.pt")
    with pytest.raises(StatusError, match=r"needs a signature\.yaml"):
        load_model(tmp_path, CPU)
    (tmp_path / "signature.yaml").write_text(
        "inputs: {x: {dtype: float32, shape: [3]}, scale: {dtype: float32, shape: [1]}}\n"
        "outputs: {scaled: {dtype: float32, shape: [3]}, sum: {dtype: float32}}\n"
    )
    outputs = run(load_model(tmp_path, CPU), x=X, scale=np.array([[2], [10]], np.float32))
    np.testing.assert_array_equal(outputs["scaled"], [[0, 2, 4], [30, 40, 50]])
    np.testing.assert_array_equal(outputs["sum"], [3, 12])


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_tells_its_own_signature(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 2).eval()
    program = torch.export.export(
        module, (torch.ones(2, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, tmp_path / "model.pt2")
    model = load_model(tmp_path, CPU)
    signature = model.signatures["serving_default"]
    assert signature.inputs == (TensorSpec(name="input", dtype="float32", shape=(None, 3)),)
    assert signature.outputs == (TensorSpec(name="output_0", dtype="float32", shape=(None, 2)),)
    expected = module(torch.tensor(X)).detach().numpy()
    np.testing.assert_array_equal(run(model, input=X)["output_0"], expected)
    np.testing.assert_allclose(run(model, input=X[:1])["output_0"], expected[:1], rtol=1e-6)
    with pytest.raises(StatusError) as raised:
        run(model, input=X[:, :2])
    assert raised.value.code == "INVALID_ARGUMENT"


def emptied(archive: bytes) -> bytes:
    """A .pt2 file whose parts say nothing."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(written, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"{}" if name.endswith(".json") else old.read(name))
    return written.getvalue()


@pytest.mark.parametrize(
    "spoil", [lambda _: b"", lambda _: b"garbage", lambda good: good[: len(good) // 2], emptied]
)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_no_exported_program_is_named(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),)), path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(StatusError, match=r"model\.pt2: ") as refused:
        load_model(tmp_path, ServerFlags(device="cpu"))
    assert refused.value.code == "INVALID_ARGUMENT"


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_gives_more_than_tensors_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Partly(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return x * 2, None

    torch.export.save(torch.export.export(Partly(), (torch.ones(2, 3),)), tmp_path / "model.pt2")
    with pytest.raises(StatusError, match="output_1 is not a tensor"):
        load_model(tmp_path, ServerFlags(device="cpu"))


def test_a_program_exported_on_the_cpu_moves_with_the_constants_it_makes() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from batchtune.server.backends.torch.loading import _moved

    class Positions(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x):  # type: ignore[no-untyped-def]
            return x + torch.arange(3, device=x.device) + torch.zeros(3)

    program = torch.export.export(Positions(), (torch.ones(2, 3),))
    moved = _moved(program, torch.device("meta"))  # a device that every build of torch has
    assert moved.module()(torch.ones(2, 3, device="meta")).device.type == "meta"


class FakeOnnxRuntime:
    """onnxruntime's GPU build on a machine where CUDA's libraries cannot be loaded: it goes on without a GPU."""

    def __init__(self, *, started: list[str]) -> None:
        self.started = started
        self.asked: list[object] = []

    def get_available_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def SessionOptions(self) -> SimpleNamespace:  # noqa: N802  (onnxruntime's name)
        return SimpleNamespace()

    def InferenceSession(self, path: str, options: object, *, providers: list[object]) -> object:  # noqa: N802
        self.asked = providers
        argument = SimpleNamespace(name="x", type="tensor(float)", shape=["n", 3])

        def starve(names: object, feeds: object) -> None:
            raise RuntimeError(
                "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 9"
            )

        return SimpleNamespace(
            get_providers=lambda: self.started,
            get_inputs=lambda: [argument],
            get_outputs=lambda: [argument],
            run=starve,
        )


def test_onnx_runtime_takes_the_gpu_that_is_asked_for_and_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    fake = FakeOnnxRuntime(started=["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(onnx_backend, "_failures", lambda: (RuntimeError,))
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)  # type: ignore[arg-type]
    (tmp_path / "model.onnx").write_bytes(b"")
    model = load_model(tmp_path, ServerFlags(device="cuda:1"))
    assert fake.asked == [("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"]
    with pytest.raises(StatusError, match="out of memory") as raised:
        run(model, x=X)
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    load_model(tmp_path, ServerFlags(device="cpu"))
    assert fake.asked == ["CPUExecutionProvider"]
    fake.started = ["CPUExecutionProvider"]
    load_model(tmp_path, ServerFlags(device="auto"))
    with pytest.raises(StatusError, match="could not start its CUDAExecutionProvider"):
        load_model(tmp_path, ServerFlags(device="cuda"))
