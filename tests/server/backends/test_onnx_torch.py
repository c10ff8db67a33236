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
from tests.server.backends.model_files import save_onnx, save_program

CPU = ServerFlags(device="cpu", tensorflow_intra_op_parallelism=1)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def run(model: LoadedModel, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    return dict(model.runs["serving_default"](inputs))


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
    with pytest.raises(StatusError, match=r"^INVALID_ARGUMENT: "):
        run(model, x=X[:, :2], s=np.array([b"a", b"b"], dtype=object))


def test_a_broken_onnx_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(StatusError, match=r"^INVALID_ARGUMENT: .*model\.onnx"):
        load_model(tmp_path, CPU)


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
    save_program(tmp_path, module)
    model = load_model(tmp_path, CPU)
    signature = model.signatures["serving_default"]
    assert signature.inputs == (TensorSpec(name="input", dtype="float32", shape=(None, 3)),)
    assert signature.outputs == (TensorSpec(name="output_0", dtype="float32", shape=(None, 2)),)
    expected = module(torch.tensor(X)).detach().numpy()
    np.testing.assert_array_equal(run(model, input=X)["output_0"], expected)
    np.testing.assert_allclose(run(model, input=X[:1])["output_0"], expected[:1], rtol=1e-6)
    with pytest.raises(StatusError, match=r"^INVALID_ARGUMENT: "):
        run(model, input=X[:, :2])


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
    save_program(tmp_path, torch.nn.Linear(3, 3))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(StatusError, match=r"^INVALID_ARGUMENT: .*model\.pt2: "):
        load_model(tmp_path, ServerFlags(device="cpu"))


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


def test_onnx_runtime_takes_the_gpu_and_its_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's GPU build on a machine where CUDA's libraries may not load: it goes on without a GPU."""
    gpu, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    started, asked = [gpu, cpu], []
    argument = SimpleNamespace(name="x", type="tensor(float)", shape=["n", 3])

    def starve(names: object, feeds: object) -> None:
        raise RuntimeError(
            "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 9"
        )

    def session(path: str, options: object, *, providers: list[object]) -> object:
        asked.append(providers)
        arguments = {"get_inputs": lambda: [argument], "get_outputs": lambda: [argument]}
        return SimpleNamespace(get_providers=lambda: started, run=starve, **arguments)

    fake = SimpleNamespace(
        get_available_providers=lambda: [gpu, cpu], SessionOptions=SimpleNamespace, InferenceSession=session
    )
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    monkeypatch.setattr(onnx_backend, "_failures", lambda: (RuntimeError,))
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)  # type: ignore[arg-type]
    (tmp_path / "model.onnx").write_bytes(b"")
    model = load_model(tmp_path, ServerFlags(device="cuda:1"))
    with pytest.raises(StatusError, match=r"^RESOURCE_EXHAUSTED: .*out of memory"):
        run(model, x=X)
    load_model(tmp_path, ServerFlags(device="cpu"))
    assert asked == [[(gpu, {"device_id": 1}), cpu], [cpu]]
    started.remove(gpu)
    load_model(tmp_path, ServerFlags(device="auto"))
    with pytest.raises(StatusError, match="could not start its CUDAExecutionProvider"):
        load_model(tmp_path, ServerFlags(device="cuda"))
