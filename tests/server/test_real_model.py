"""A real model on the bundled server gives grpcio and curl the scores that TensorFlow itself gives."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.model_files import resolve_model
from batchtune.target.telemetry import activity
from batchtune.target.tfserving import TfServingTarget

pytestmark = pytest.mark.slow  # a small SavedModel gives the same proof in backends/test_tensorflow.py
ROWS = 5


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 20_000, (ROWS, 200)).astype(np.float32)


@pytest.fixture(scope="module")
def target() -> Iterator[TfServingTarget]:
    with TfServingTarget(TargetSpec(model="imdb_transformer")) as target:
        parameters = BatchingParameters(
            max_batch_size=8, batch_timeout_micros=2_000, num_batch_threads=2, max_enqueued_batches=100
        )
        target.apply(Configuration(batching=parameters))
        yield target


@pytest.fixture(scope="module")
def expected(tokens: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Scores from the SavedModel called directly, in a process of its own."""
    folder = tmp_path_factory.mktemp("direct")
    np.save(folder / "tokens.npy", tokens)
    code = (
        "import sys, numpy as np, tensorflow as tf; model = tf.saved_model.load(sys.argv[1]);"
        "serve = model.signatures['serving_default'];"
        "scores = serve(tokens=tf.constant(np.load(sys.argv[2])))['scores'].numpy(); np.save(sys.argv[3], scores)"
    )
    model = resolve_model("imdb_transformer") / "1"
    paths = [str(model), str(folder / "tokens.npy"), str(folder / "scores.npy")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, capture_output=True, timeout=120)
    return np.load(folder / "scores.npy")


def test_scores_are_probabilities_that_differ_by_row(expected: np.ndarray) -> None:
    assert expected.shape == (ROWS, 2)
    np.testing.assert_allclose(expected.sum(axis=1), 1.0, rtol=1e-5)
    assert len({tuple(row) for row in expected.tolist()}) == ROWS


def test_grpcio_gets_the_scores_of_the_saved_model(
    target: TfServingTarget, tokens: np.ndarray, expected: np.ndarray
) -> None:
    """In a process of its own, because tensorflow_serving.apis brings the whole of TensorFlow along."""
    code = f"""
import json, sys, grpc, numpy as np, tensorflow as tf
from tensorflow_serving.apis import get_model_status_pb2, model_service_pb2_grpc, predict_pb2
from tensorflow_serving.apis import prediction_service_pb2_grpc
tokens = np.random.default_rng(3).integers(0, 20_000, ({ROWS}, 200)).astype(np.float32)
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "imdb_transformer"
    request.model_spec.signature_name = "serving_default"
    request.inputs["tokens"].CopyFrom(tf.make_tensor_proto(tokens))
    answer = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=30)
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "imdb_transformer"
    state = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, timeout=30)
print(json.dumps([tf.make_ndarray(answer.outputs["scores"]).tolist(), state.model_version_status[0].state]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, target.endpoint.grpc_authority],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scores, state = json.loads(done.stdout)
    np.testing.assert_allclose(np.array(scores), expected, rtol=1e-5, atol=1e-6)
    assert state == 30


@pytest.mark.parametrize("form", ["instances", "inputs"])
def test_curl_gets_the_scores_of_the_saved_model(
    target: TfServingTarget, tokens: np.ndarray, expected: np.ndarray, tmp_path: Path, form: str
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (tmp_path / "body.json").write_text(json.dumps({form: tokens.tolist()}))
    url = f"{target.endpoint.rest_url}/v1/models/imdb_transformer:predict"
    command = ["curl", "--silent", "--show-error", "--data-binary", f"@{tmp_path / 'body.json'}", url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    scores = answer["predictions" if form == "instances" else "outputs"]
    np.testing.assert_allclose(np.array(scores), expected, rtol=1e-5, atol=1e-6)


def test_the_server_counts_the_batches_it_ran_and_refuses_more_than_max_batch_size(
    target: TfServingTarget, tokens: np.ndarray
) -> None:
    before = target.counters()
    url = f"{target.endpoint.rest_url}/v1/models/imdb_transformer:predict"
    httpx.post(url, json={"instances": tokens.tolist()}).raise_for_status()
    seen = activity(before, target.counters())
    assert (seen.batches, seen.mean_batch_rows, sum(seen.close_reasons.values())) == (1, ROWS, 1)
    assert seen.execution_s_by_rows[ROWS] > 0
    assert not seen.emulated
    answer = httpx.post(url, json={"instances": np.zeros((9, 200)).tolist()})
    assert answer.status_code == 400
    assert "Task size 9 is larger than maximum input batch size 8" in answer.text


def test_parameters_are_replaced_between_batches_without_a_restart(target: TfServingTarget) -> None:
    pid = target.pid
    smaller = BatchingParameters(max_batch_size=4, batch_timeout_micros=0, num_batch_threads=1)
    for batching in (smaller, smaller, None):
        assert target.apply(Configuration(batching=batching)) is None
    assert target.pid == pid
