"""A real model on the bundled server gives the reference client and curl the scores that TensorFlow itself gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.model_files import resolve_model
from batchtune.target.tfserving import TfServingTarget

pytestmark = pytest.mark.slow  # a small SavedModel gives the same proof in backends/test_tensorflow.py
PARAMETERS = BatchingParameters(
    max_batch_size=8, batch_timeout_micros=2_000, num_batch_threads=2, max_enqueued_batches=100
)
DIRECTLY_AND_BY_GRPC = """
import json, sys, grpc, numpy as np, tensorflow as tf
from tensorflow_serving.apis import get_model_status_pb2, model_service_pb2_grpc, predict_pb2
from tensorflow_serving.apis import prediction_service_pb2_grpc
tokens = np.array(json.load(open(sys.argv[3])), np.float32)
model = tf.saved_model.load(sys.argv[2])
direct = model.signatures["serving_default"](tokens=tf.constant(tokens))["scores"].numpy()
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "imdb_transformer"
    request.model_spec.signature_name = "serving_default"
    request.inputs["tokens"].CopyFrom(tf.make_tensor_proto(tokens))
    answer = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=30)
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "imdb_transformer"
    state = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, timeout=30)
served = tf.make_ndarray(answer.outputs["scores"])
print(json.dumps([direct.tolist(), served.tolist(), state.model_version_status[0].state]))
"""


def run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_reference_client_and_curl_get_the_scores_of_the_saved_model(tmp_path: Path) -> None:
    """The client in a process of its own, because tensorflow_serving.apis brings the whole of TensorFlow along."""
    tokens = np.random.default_rng(3).integers(0, 20_000, (5, 200)).tolist()
    for form in ("instances", "inputs"):
        (tmp_path / form).write_text(json.dumps({form: tokens}))
    (tmp_path / "tokens").write_text(json.dumps(tokens))
    with TfServingTarget(TargetSpec(model="imdb_transformer")) as target:
        target.apply(Configuration(batching=PARAMETERS))
        paths = (str(resolve_model("imdb_transformer") / "1"), str(tmp_path / "tokens"))
        code = (sys.executable, "-c", DIRECTLY_AND_BY_GRPC, target.endpoint.grpc_authority or "", *paths)
        direct, by_grpc, state = json.loads(run(*code))
        url = f"{target.endpoint.rest_url}/v1/models/imdb_transformer:predict"
        by_row, by_column = (
            json.loads(run("curl", "--silent", "--show-error", "--data-binary", f"@{tmp_path / form}", url))
            for form in ("instances", "inputs")
        )
    assert state == 30
    np.testing.assert_allclose(np.sum(direct, axis=1), 1.0, rtol=1e-5)
    assert len({tuple(row) for row in direct}) == 5
    for scores in (by_grpc, by_row["predictions"], by_column["outputs"]):
        np.testing.assert_allclose(scores, direct, rtol=1e-5, atol=1e-6)
