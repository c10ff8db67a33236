"""KServe v2 against a real tritonserver: its answers decode, its refusals are classified, its counts are read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import ml_dtypes
import numpy as np
import pytest

from batchtune.errors import TargetError
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import Samples, Status
from batchtune.scenario.arrivals import Arrivals
from batchtune.scenario.payloads import build_requests
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.endpoint import Endpoint
from batchtune.target.external import ExternalTarget
from batchtune.target.telemetry import activity
from batchtune.wire.kserve_infer import (
    INFER_PATH,
    JSON_LENGTH_HEADER,
    decode_infer_json,
    decode_infer_response,
    encode_infer_json,
    encode_infer_request,
    json_length,
)
from batchtune.wire.signature import Signature
from tests.load.load_servers import closed, evenly, run_here
from tests.target.triton.triton_server import NEEDS_TRITON, PACKAGES, TritonServer

pytestmark = NEEDS_TRITON

PROTOCOLS = ["kserve_grpc", "kserve_rest", "kserve_rest_binary"]
ECHO = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
"""
DOUBLE = """
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(%s)
        answer = lambda x: pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy() * 2)])
        return [answer(pb_utils.get_input_tensor_by_name(request, "x")) for request in requests]
"""
DOUBLE_CONFIG = """
backend: "python" max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""
JSON_TYPES = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]
JSON_TYPES += ["FP32", "FP64", "STRING"]


def echo_config(types: list[str]) -> str:
    declared = ",".join(f'{{ name: "{one}" data_type: TYPE_{one} dims: [ -1, 2 ] }}' for one in types)
    return (
        f'backend: "python" max_batch_size: 8 input [{declared}] output [{declared}]'
        "instance_group [{ count: 1 kind: KIND_CPU }]"
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    assert PACKAGES is not None
    queue = "default_queue_policy { max_queue_size: 4 %s }"
    models = {
        "echo": (echo_config(JSON_TYPES), ECHO),
        "echo_half": (echo_config(["FP16", "BF16"]), ECHO),
        "double": (DOUBLE_CONFIG + "dynamic_batching { }", DOUBLE % 0.002),
        "full": (DOUBLE_CONFIG + "dynamic_batching { %s }" % (queue % ""), DOUBLE % 0.02),
        "late": (
            DOUBLE_CONFIG + "dynamic_batching { %s }" % (queue % "default_timeout_microseconds: 1000"),
            DOUBLE % 0.03,
        ),
    }
    with TritonServer(models, tmp_path_factory.mktemp("triton"), PACKAGES) as started:
        yield started


def endpoint(server: TritonServer, model: str) -> Endpoint:
    return Endpoint(model_name=model, rest_port=server.rest_port, grpc_port=server.grpc_port)


def load(server: TritonServer, model: str, protocol: str, arrivals: Arrivals, *, rows: int = 1) -> Samples:
    target = ExternalTarget(endpoint(server, model), kserve=True)
    spec = RequestSpec.model_validate({"protocol": protocol, "rows": rows, "distinct": 4})
    requests = build_requests(spec, target.signature(spec.signature), model_name=model)
    job = LoadJob(endpoint=endpoint(server, model), requests=requests, arrivals=arrivals, check_every=1)
    return run_here(job)


def infer(server: TritonServer, model: str, protocol: str, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """One call by clients that are not ours, in bytes that are."""
    if protocol == "kserve_grpc":
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            return decode_infer_response(channel.unary_unary(INFER_PATH)(encode_infer_request(model, inputs)))
    body = encode_infer_json(inputs, binary=protocol == "kserve_rest_binary")
    headers = {JSON_LENGTH_HEADER: str(json_length(body))} if protocol == "kserve_rest_binary" else {}
    url = f"http://127.0.0.1:{server.rest_port}/v2/models/{model}/infer"
    answer = httpx.post(url, content=body, headers=headers)
    if JSON_LENGTH_HEADER in answer.headers:
        assert json_length(answer.content) == int(answer.headers[JSON_LENGTH_HEADER])
    return decode_infer_json(answer.content)


def samples_of_every_type() -> dict[str, np.ndarray]:
    limits = {name: np.iinfo(name.lower()) for name in JSON_TYPES[1:-3]}
    return {
        **{name: np.array([[[one.min, one.max]]], name.lower()) for name, one in limits.items()},
        "BOOL": np.array([[[True, False]]]),
        "FP32": np.array([[[0.1, -3.4e38]]], np.float32),
        "FP64": np.array([[[0.1, 1.7e308]]]),
        "STRING": np.array([[['é\n"', "\U0001f600"]]], object),
    }


HALVES = {
    "FP16": np.array([[[0.5, -65504]]], np.float16),
    "BF16": np.array([[[0.5, -3e38]]], ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_type_comes_back_from_the_real_server(server: TritonServer, protocol: str) -> None:
    sent = samples_of_every_type()
    found = infer(server, "echo", protocol, sent)
    assert set(found) == set(JSON_TYPES)
    assert found.pop("STRING").tolist() == [[[text.encode() for text in sent.pop("STRING")[0, 0]]]]
    if protocol != "kserve_rest":
        sent |= HALVES
        found |= infer(server, "echo_half", protocol, HALVES)
    for name, array in sent.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def test_nan_and_infinity_come_back_in_json(server: TritonServer) -> None:
    sent = np.array([[np.nan, 0.0, 1.0]], np.float32)
    assert np.array_equal(infer(server, "double", "kserve_rest", {"x": sent})["y"], 2 * sent, equal_nan=True)


@pytest.mark.parametrize("port", ["rest_port", "grpc_port"])
def test_the_signature_is_the_same_by_rest_and_by_grpc(server: TritonServer, port: str) -> None:
    def signature(model: str) -> Signature:
        named = Endpoint(model_name=model, **{port: getattr(server, port)})
        return ExternalTarget(named, kserve=True).signature("s")

    assert [(one.name, one.dtype, one.shape) for one in signature("echo_half").inputs] == [
        ("BF16", "bfloat16", (None, None, 2)),
        ("FP16", "float16", (None, None, 2)),
    ]
    with pytest.raises(TargetError, match="unknown model: 'nope'"):
        signature("nope")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_load_is_answered_and_counted(server: TritonServer, protocol: str) -> None:
    by_grpc = Endpoint(model_name="double", grpc_port=server.grpc_port)
    target = ExternalTarget(by_grpc if protocol == "kserve_grpc" else endpoint(server, "double"), kserve=True)
    before = target.counters()
    for arrivals in (closed(8, 200), evenly(400, 0.5)):
        samples = load(server, "double", protocol, arrivals, rows=2)
        assert samples.errors() == {}
        assert samples.answers_checked == len(samples) == 200
        assert (samples.latency_ns > 2_000_000).all()
    counted = activity(before, target.counters())
    for _ in range(100):  # Triton may count a request after it has answered it
        if counted.rows >= 800:
            break
        time.sleep(0.02)
        counted = activity(before, target.counters())
    assert counted.requests_by_status == {"OK": 400}
    assert counted.rows == 800
    assert counted.batches == sum(counted.batches_by_rows.values())
    assert sum(rows * count for rows, count in counted.batches_by_rows.items()) == 800
    assert set(counted.batches_by_rows) <= {2, 4}
    assert all(mean_s >= 0.002 for mean_s in counted.execution_s_by_rows.values())
    assert counted.queue_wait_mean_s is not None
    assert counted.mean_batch_rows == pytest.approx(800 / counted.batches)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("model", "rows", "status"),
    [("full", 1, Status.QUEUE_FULL), ("late", 1, Status.EXPIRED), ("double", 5, Status.TOO_LARGE)],
)
def test_refusals_are_classed(
    server: TritonServer, protocol: str, model: str, rows: int, status: Status
) -> None:
    samples = load(server, model, protocol, closed(24, 60), rows=rows)
    assert status.name in samples.errors()
    assert set(samples.errors()) <= {Status.QUEUE_FULL.name, status.name}
