"""A SavedModel is served as TensorFlow itself would run it: all signatures, strings, free lengths, its own errors."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.server.backends.emulated import load_emulated_model
from batchtune.server.backends.model import LoadedModel
from batchtune.server.backends.registry import load_model
from batchtune.server.models.warmup import WARMUP_FILE, warm_up
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import PredictionLog, PredictRequest, SignatureDefMap
from tests.server.server_process import ServerProcess
from tests.wire.stubs import Stub
from tests.wire.tensor_protos import tensor_to_proto

CPU = ServerFlags(device="cpu", tensorflow_intra_op_parallelism=1, tensorflow_inter_op_parallelism=1)
Counted = tuple[LoadedModel, list[int]]
EMULATED = """
memory: {rows_max: 8}
inputs: {x: {dtype: float32, shape: [1]}}
outputs: {y: {dtype: float32, shape: [1]}}
"""


def export(directory: Path) -> None:
    """half_plus_two in spirit: several signatures, two of them the same tensors, strings, a variable."""
    import tensorflow as tf

    class Model(tf.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.half = tf.Variable(0.5)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])  # type: ignore[untyped-decorator]
        def predict(self, x: Any) -> dict[str, Any]:
            return {"y": self.half * x + 2.0, "twice": 2.0 * x}

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.string, name="words")])  # type: ignore[untyped-decorator]
        def join(self, words: Any) -> dict[str, Any]:
            return {"joined": tf.strings.reduce_join(words, 1), "lengths": tf.strings.length(words)}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])  # type: ignore[untyped-decorator]
        def scalar(self, x: Any) -> dict[str, Any]:
            return {"sum": tf.reduce_sum(x)}

    model = Model()
    predict = model.predict.get_concrete_function()
    signatures = {"serving_default": predict, "join": model.join, "scalar": model.scalar}
    tf.saved_model.save(model, str(directory), signatures=signatures)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("half_plus_two") / "1"
    export(found)
    return found


@pytest.fixture(scope="module")
def model(directory: Path) -> LoadedModel:
    return load_model(directory, CPU)


def test_every_signature_is_served_with_its_names_types_and_shapes(model: LoadedModel) -> None:
    assert sorted(model.signatures) == ["join", "scalar", "serving_default"]
    assert model.signatures["join"].inputs == (TensorSpec(name="words", dtype="object", shape=(None, None)),)
    assert model.signatures["serving_default"].outputs == (
        TensorSpec(name="twice", dtype="float32", shape=(None,)),
        TensorSpec(name="y", dtype="float32", shape=(None,)),
    )
    assert model.signatures["serving_default"].method_name == "tensorflow/serving/predict"
    assert set(SignatureDefMap.FromString(model.metadata).signature_def) >= set(model.signatures)


def test_scores_are_those_of_the_saved_model_itself(model: LoadedModel, directory: Path) -> None:
    import tensorflow as tf

    x = np.array([1.0, 2.5, -3.0], np.float32)
    expected = tf.saved_model.load(str(directory)).signatures["serving_default"](x=tf.constant(x))
    outputs = model.runs["serving_default"]({"x": x})
    for name in ("y", "twice"):
        np.testing.assert_array_equal(outputs[name], expected[name].numpy())


def test_strings_go_in_and_out_as_bytes(model: LoadedModel) -> None:
    words = np.array([[b"a", b"bc"], [b"", "é".encode()]], dtype=object)
    outputs = model.runs["join"]({"words": words})
    assert outputs["joined"].tolist() == [b"abc", "é".encode()]
    np.testing.assert_array_equal(outputs["lengths"], [[1, 2], [0, 2]])


def test_tensorflow_s_own_error_is_passed_on(model: LoadedModel) -> None:
    with pytest.raises(StatusError) as raised:
        model.runs["serving_default"]({"x": np.zeros(2, np.float64)})
    assert raised.value.code == "INVALID_ARGUMENT"
    assert "actual double vs. expect float" in raised.value.message


def test_tags_that_the_model_lacks_are_said(directory: Path) -> None:
    with pytest.raises(StatusError, match=r"(?i)tags"):
        load_model(directory, ServerFlags(device="cpu", saved_model_tags="serve,tpu"))


def test_variables_cut_short_are_told_in_tensorflow_s_own_words(directory: Path, tmp_path: Path) -> None:
    """What it says begins with the heading "Graph execution error:"."""
    cut = tmp_path / "1"
    shutil.copytree(directory, cut)
    (data,) = cut.glob("variables/variables.data-*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(StatusError, match=rf"{cut}: (?!Graph execution error).*(bytes|truncated|corrupt)"):
        load_model(cut, ServerFlags(device="cpu"))


def test_a_broken_saved_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\x01garbage")
    with pytest.raises(StatusError, match=str(tmp_path)):
        load_model(tmp_path, CPU)


def test_a_session_configuration_file_is_read(tmp_path: Path, directory: Path) -> None:
    path = tmp_path / "session.txt"
    path.write_text("inter_op_parallelism_threads: 1")
    load_model(directory, ServerFlags(device="cpu", tensorflow_session_config_file=str(path))).close()
    path.write_text("threads: 1")
    with pytest.raises(StatusError, match="tensorflow_session_config_file"):
        load_model(directory, ServerFlags(device="cpu", tensorflow_session_config_file=str(path)))


def test_an_emulated_model_does_not_import_a_framework(tmp_path: Path) -> None:
    (tmp_path / "emulated.yaml").write_text(EMULATED)
    script = (
        "import sys; from pathlib import Path; import batchtune.server.model_server\n"
        "from batchtune.server.server_flags import ServerFlags\n"
        "from batchtune.server.backends.registry import load_model\n"
        f"load_model(Path({str(tmp_path)!r}), ServerFlags())\n"
        "heavy = {'tensorflow', 'torch', 'onnxruntime', 'pandas', 'pydantic', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.slow  # a second import of TensorFlow; the scores of a session, and live answers of a server, are held elsewhere
def test_a_server_gives_grpcio_and_httpx_its_scores(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    x = np.array([1.0, 2.5, -3.0], np.float32)
    expected = tf.saved_model.load(str(directory)).signatures["serving_default"](x=tf.constant(x))
    request = PredictRequest()
    request.model_spec.name = "m"
    request.inputs["x"].CopyFrom(tensor_to_proto(x, as_content=True))
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    flags = ("--enable_batching", "--tensorflow_session_parallelism=1")
    with ServerProcess(directory.parent, *flags) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            response = Stub(channel, "PredictionService").Predict(request, timeout=20)
        outputs = server.predict({"inputs": x.tolist()})["outputs"]
        for name in ("y", "twice"):
            np.testing.assert_array_equal(tf.make_ndarray(response.outputs[name]), expected[name].numpy())
            np.testing.assert_array_equal(np.float32(outputs[name]), expected[name].numpy())
        assert response.model_spec.version.value == 1
        words = server.predict({"signature_name": "join", "instances": [["a", "bc"], ["", "d"]]})
        joined = [{"joined": "abc", "lengths": [1, 2]}, {"joined": "d", "lengths": [0, 1]}]
        assert words["predictions"] == joined
        assert server.stop() == 0
    assert all(line.startswith("batchtune-model-server: ") for line in server.lines), server.lines


def test_tensorflow_says_that_it_sees_no_gpu(tmp_path: Path) -> None:
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this tensorflow can use a GPU")
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(StatusError, match=r"^FAILED_PRECONDITION: .*--device=cuda:1: TensorFlow sees no GPU"):
        load_model(tmp_path, ServerFlags(device="cuda:1"))


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    """An emulated model, and the rows of each of its runs."""
    (tmp_path / "emulated.yaml").write_text(EMULATED)
    loaded, rows = load_emulated_model(tmp_path), []

    def run(inputs: Any) -> Any:
        rows.append(len(inputs["x"]))
        return loaded.runs["serving_default"](inputs)

    return replace(loaded, runs={"serving_default": run}), rows


def write_warmup_requests(directory: Path, *contents: bytes) -> Path:
    path = directory / WARMUP_FILE
    path.parent.mkdir(exist_ok=True)
    records = [struct.pack("<QI", len(content), 0) + content + b"\0\0\0\0" for content in contents]
    path.write_bytes(b"".join(records))
    return path


def predict(*shape: int, signature: str = "") -> bytes:
    log = PredictionLog()
    request = log.predict_log.request
    request.model_spec.name, request.model_spec.signature_name = "m", signature
    if shape:
        request.inputs["x"].CopyFrom(tensor_to_proto(np.ones(shape, np.float32), as_content=True))
    return bytes(log.SerializeToString())


def no_tensor() -> bytes:
    log = PredictionLog()
    log.predict_log.request.inputs["x"].dtype = 20
    return bytes(log.SerializeToString())


def no_examples() -> bytes:
    log = PredictionLog()
    log.classify_log.request.model_spec.name = "m"
    return bytes(log.SerializeToString())


@pytest.mark.parametrize(
    ("recorded", "parameters", "iterations", "expected"),
    [
        ((), BatchingParameters(max_batch_size=8, allowed_batch_sizes=(2, 4, 8)), 1, [2, 4, 8]),
        ((), BatchingParameters(max_batch_size=8), 1, [1]),
        ((), None, 2, [1, 1]),
        ((3, 5), None, 2, [3, 3, 5, 5, 1, 1]),
    ],
)
def test_recorded_requests_and_then_allowed_sizes_are_run_first(
    recorded: Sequence[int],
    parameters: BatchingParameters | None,
    iterations: int,
    expected: list[int],
    counted: Counted,
    tmp_path: Path,
) -> None:
    model, rows = counted
    write_warmup_requests(tmp_path, *(predict(count, 1) for count in recorded))
    warm_up(model, tmp_path, parameters, iterations=iterations)
    assert rows == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff" * 9, "record 1: "),
        (no_tensor(), "record 1: "),
        (predict(), "record 1: has no input 'x'"),
        (no_examples(), "record 1: INVALID_ARGUMENT: Input is empty"),
        (predict(2, 3, 4), "record 1: signature serving_default input x shape is wrong"),
    ],
)
def test_a_corrupt_warmup_file_is_not_run(
    tmp_path: Path, content: bytes, said: str, counted: Counted
) -> None:
    model, rows = counted
    path = write_warmup_requests(tmp_path, content)
    with pytest.raises(StatusError) as raised:
        warm_up(model, tmp_path, None)
    assert (raised.value.code, raised.value.message.startswith(f"{path}: {said}")) == ("DATA_LOSS", True)
    assert rows == []


def test_a_recorded_request_that_fails_or_is_cut_fails_the_load(tmp_path: Path, counted: Counted) -> None:
    path = write_warmup_requests(tmp_path, predict(9, 1))
    with pytest.raises(StatusError, match="OOM when allocating"):
        warm_up(counted[0], tmp_path, None)
    write_warmup_requests(tmp_path, predict(1, 1, signature="other"))
    with pytest.raises(StatusError, match="names the unknown signature 'other'"):
        warm_up(counted[0], tmp_path, None)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(StatusError, match="the file ends within record 1"):
        warm_up(counted[0], tmp_path, None)


def test_a_batch_of_zeros_that_fails_is_only_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counted: Counted
) -> None:
    warm_up(counted[0], tmp_path, BatchingParameters(max_batch_size=16, allowed_batch_sizes=(8, 16)))
    assert "warm-up of signature serving_default with 16 rows of zeros: OOM" in capsys.readouterr().err


def test_free_lengths_and_strings_are_warmed_up(model: LoadedModel, directory: Path) -> None:
    warm_up(model, directory, BatchingParameters(max_batch_size=2, allowed_batch_sizes=(1, 2)))
