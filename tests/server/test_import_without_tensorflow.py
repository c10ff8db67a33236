"""Where neither TensorFlow nor tensorflow-serving-api is installed, their APIs are spoken all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from batchtune.wire.tfserving.messages import DESCRIPTORS
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.server.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tensorflow", "tensorflow_serving", "keras", "tensorboard", "h5py"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
IMPORTS = """
import importlib, pkgutil
import batchtune.cli.app, batchtune.cli.commands.compare, batchtune.cli.commands.run_load, batchtune.cli.commands.run_sweep, batchtune.server
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


@pytest.fixture
def without_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python processes started from now on cannot import TensorFlow."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "sitecustomize.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "absent"))


@pytest.mark.usefixtures("without_tensorflow")
def test_commands_and_server_are_imported_and_tensorflow_stays_absent() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"absent\n"), done.stderr


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


def test_every_field_declared_is_tensorflows_own() -> None:
    """Of the versions that are installed, which may have more."""
    code = "from tests.wire.declared_messages import their_files; import sys; sys.stdout.buffer.write(their_files().SerializeToString())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True, cwd=ROOT)
    theirs = {one.name: one for one in descriptor_pb2.FileDescriptorSet.FromString(done.stdout).file}
    for ours in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        declared, real = (
            fields_of({one.name: one for one in file.message_type}) for file in (ours, theirs[ours.name])
        )
        assert declared.items() <= real.items(), ours.name
        for enum in ours.enum_type:
            (real_enum,) = (one for one in theirs[ours.name].enum_type if one.name == enum.name)
            assert numbers_of(enum).items() <= numbers_of(real_enum).items()
        for service in ours.service:
            assert service in theirs[ours.name].service


def numbers_of(enum: descriptor_pb2.EnumDescriptorProto) -> dict[str, int]:
    return {value.name: value.number for value in enum.value}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_tensorflow")
def test_a_torch_model_answers_over_grpc_and_rest(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    directory = tmp_path / "m" / "1"
    directory.mkdir(parents=True)
    module = torch.nn.Linear(3, 2).eval()
    torch.jit.trace(module, torch.ones(1, 3)).save(directory / "model.pt")
    (directory / "signature.yaml").write_text(
        "inputs: {x: {dtype: float32, shape: [3]}}\noutputs: {y: {dtype: float32, shape: [2]}}\n"
    )
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    expected = module(torch.tensor(x)).detach().numpy()
    with (
        ServerProcess(tmp_path / "m", "--enable_batching", "--device=cpu") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        answer = server.predict({"instances": x.tolist()})
        np.testing.assert_allclose(answer["predictions"], expected, rtol=1e-5)
        assert server.rest.get("/v1/models/m/metadata").status_code == 200
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        response = call(encode_predict_request("m", "", {"x": x}), timeout=20)
    np.testing.assert_allclose(decode_predict_response(response)["y"], expected, rtol=1e-5)
