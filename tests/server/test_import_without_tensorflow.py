"""Where TensorFlow is not installed, its messages are declared here, and a PyTorch model is served all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from batchtune.wire.tfserving.messages import _FILES, DataType, PredictRequest, PredictResponse, _described
from batchtune.wire.tfserving.tensors import decode_predict_response
from tests.server.server_process import ServerProcess
from tests.wire.tensor_protos import tensor_to_proto

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tensorflow", "keras", "tensorboard", "ml_dtypes", "h5py"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def without_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes started from now on cannot import TensorFlow."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "sitecustomize.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "absent"))


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("without_tensorflow")
def test_commands_and_server_are_imported_and_tensorflow_stays_absent() -> None:
    said = python(
        """
import importlib, pkgutil, sys
import batchtune.cli.app, batchtune.cli.commands.compare, batchtune.cli.commands.load, batchtune.cli.commands.sweep, batchtune.server
for found in pkgutil.walk_packages(batchtune.server.__path__, "batchtune.server."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from batchtune.wire.tfserving import messages as protos
request = protos.PredictRequest()
request.inputs["x"].float_val.extend([1, 2])
assert protos.PredictRequest.FromString(request.SerializeToString()) == request
assert protos.StatusProto(error_code=3).SerializeToString() == bytes([8, 3])
try:
    import tensorflow.core
except ModuleNotFoundError:
    print("absent")
"""
    )
    assert said == "absent\n"


def described_files() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The declarations by file name, dependencies first."""
    described = (_described(path, *declared) for path, declared in _FILES.items())
    return {file.name: file for file in described}


def real_files() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    pytest.importorskip("tensorflow.core.framework.tensor_pb2", reason="tensorflow is not installed")
    files = {}
    for name in described_files():
        files[name] = descriptor_pb2.FileDescriptorProto()
        descriptor_pool.Default().FindFileByName(name).CopyToProto(files[name])
    return files


def fields_of(
    messages: dict[str, descriptor_pb2.DescriptorProto],
) -> dict[str, tuple[int, int, int, str, str]]:
    """By full name: number, type, label, name of the type, name of the oneof."""
    found = {}
    for name, message in messages.items():
        for one in message.field:
            group = message.oneof_decl[one.oneof_index].name if one.HasField("oneof_index") else ""
            found[f"{name}.{one.name}"] = (one.number, one.type, one.label, one.type_name, group)
        found |= fields_of({f"{name}.{nested.name}": nested for nested in message.nested_type})
    return found


@pytest.mark.parametrize("name", described_files())
def test_every_field_declared_is_tensorflows_own(name: str) -> None:
    ours, real = described_files()[name], real_files()[name]
    declared = fields_of({one.name: one for one in ours.message_type})
    theirs = fields_of({one.name: one for one in real.message_type})
    assert {field: theirs[field] for field in declared} == declared
    for enum in ours.enum_type:
        if name.endswith("types.proto"):
            numbers = {value.name: value.number for value in enum.value}
            assert numbers == {value: DataType.Value(value) for value in numbers}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_tensorflow")
def test_a_torch_model_answers_over_grpc_and_rest(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    directory = tmp_path / "m" / "1"
    directory.mkdir(parents=True)
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 2).eval()
    torch.jit.trace(module, torch.ones(1, 3)).save(directory / "model.pt")
    (directory / "signature.yaml").write_text(
        "inputs: {x: {dtype: float32, shape: [3]}}\noutputs: {y: {dtype: float32, shape: [2]}}\n"
    )
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    expected = module(torch.tensor(x)).detach().numpy()
    request = PredictRequest()
    request.model_spec.name = "m"
    request.inputs["x"].CopyFrom(tensor_to_proto(x, as_content=True))
    with ServerProcess(tmp_path / "m", "--enable_batching", "--device=cpu") as server:
        answer = server.predict({"instances": x.tolist()})
        np.testing.assert_allclose(answer["predictions"], expected, rtol=1e-5)
        assert server.rest.get("/v1/models/m/metadata").status_code == 200
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            response = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")(
                request.SerializeToString(), timeout=20
            )
    np.testing.assert_allclose(decode_predict_response(response)["y"], expected, rtol=1e-5)
    assert PredictResponse.FromString(response).model_spec.version.value == 1
