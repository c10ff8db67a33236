"""Load by KServe v2: what is sent, what is decoded, and which class each of Triton's refusals has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from batchtune.errors import UsageError
from batchtune.load.clients.client import http_posts
from batchtune.load.fleet import LoadJob
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.endpoint import Endpoint
from batchtune.wire.kserve_infer import ModelInferRequest, json_length, signature_from_metadata
from tests.load.load_servers import closed, evenly, run_here
from tests.target.kserve_server import METADATA, KserveServer

PROTOCOLS = ["kserve_grpc", "kserve_rest", "kserve_rest_binary"]
SIGNATURE = signature_from_metadata("serving_default", METADATA)


@pytest.fixture(scope="module")
def started() -> Iterator[KserveServer]:
    with KserveServer() as server:
        yield server


@pytest.fixture
def server(started: KserveServer) -> KserveServer:
    started.fail, started.garbage = None, False
    started.heads.clear()
    started.paths.clear()
    return started


def requests_of(protocol: str, *, version: int | None = None, **keys: Any) -> RequestSet:
    spec = RequestSpec.model_validate({"protocol": protocol, "distinct": 3, **keys})
    return build_requests(spec, SIGNATURE, model_name="m", version=version)


def job(server: KserveServer, requests: RequestSet, arrivals: Any, **changes: Any) -> LoadJob:
    endpoint = Endpoint(model_name="m", rest_port=server.rest_port, grpc_port=server.grpc_port, **changes)
    return LoadJob(endpoint=endpoint, requests=requests, arrivals=arrivals, check_every=1)


def doubles(requests: RequestSet, factor: float = 2.0) -> tuple[dict[str, Any], ...]:
    """What is to be expected of gRPC bodies."""
    messages = [ModelInferRequest.FromString(body) for body in requests.bodies]
    arrays = [
        np.frombuffer(one.raw_input_contents[0], np.float32).reshape(one.inputs[0].shape) for one in messages
    ]
    return tuple({"y": factor * array} for array in arrays)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("arrivals", [closed(4, 40), evenly(200, 0.2)], ids=["closed", "open"])
def test_every_answer_is_decoded(server: KserveServer, protocol: str, arrivals: Any) -> None:
    samples = run_here(job(server, requests_of(protocol, rows=2), arrivals))
    assert samples.errors() == {}
    assert samples.answers_checked == len(samples) == 40
    assert samples.rows.tolist() == [2] * 40


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_are_compared_with_what_is_expected(server: KserveServer, protocol: str) -> None:
    expected = doubles(requests_of("kserve_grpc"))  # the same seed draws the same values
    plain = requests_of(protocol)
    for answers, errors in ((expected, {}), (doubles(requests_of("kserve_grpc"), 3.0), {"WRONG_ANSWER": 6})):
        requests = replace(plain, expected=answers)
        assert run_here(job(server, requests, closed(1, 6))).errors() == errors


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_that_do_not_decode_are_malformed(server: KserveServer, protocol: str) -> None:
    server.garbage = True
    assert run_here(job(server, requests_of(protocol), closed(1, 3))).errors() == {"MALFORMED": 3}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_headers_travel_and_the_version_is_named(server: KserveServer, protocol: str) -> None:
    requests = requests_of(protocol, headers={"authorization": "Bearer x"}, version=7)
    run_here(job(server, requests, closed(1, 1), model_version=7))
    if protocol == "kserve_grpc":
        assert server.paths == ["/inference.GRPCInferenceService/ModelInfer"]
        assert ModelInferRequest.FromString(requests.bodies[0]).model_version == "7"
    else:
        assert server.paths == ["/v2/models/m/versions/7/infer"]
    assert server.heads[0]["authorization"] == "Bearer x"


def test_binary_posts_say_where_their_json_ends() -> None:
    endpoint = Endpoint(model_name="m", rest_port=80)
    plain, binary = requests_of("kserve_rest"), requests_of("kserve_rest_binary")
    head, _, body = http_posts(endpoint, binary)[0].partition(b"\r\n\r\n")
    assert body == binary.bodies[0]
    assert head.split(b"\r\n") == [
        b"POST /v2/models/m/infer HTTP/1.1",
        b"Host: 127.0.0.1:80",
        b"Content-Type: application/octet-stream",
        b"Inference-Header-Content-Length: %d" % json_length(body),
        b"Content-Length: %d" % len(body),
    ]
    head = http_posts(endpoint, plain)[0].partition(b"\r\n\r\n")[0]
    assert b"\r\nContent-Type: application/json\r\nContent-Length: " in head


def test_what_json_cannot_hold_is_a_usage_error_that_names_the_way_out() -> None:
    document = {"inputs": [{"name": "x", "datatype": "FP16", "shape": [-1]}]}
    signature = signature_from_metadata("serving_default", document)
    for protocol in ("kserve_grpc", "kserve_rest_binary"):
        build_requests(RequestSpec(protocol=protocol), signature, model_name="m")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="FP16 cannot travel as JSON, only as binary data"):
        build_requests(RequestSpec(protocol="kserve_rest"), signature, model_name="m")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_full_queue_is_seen_through_the_whole_client(server: KserveServer, protocol: str) -> None:
    server.fail = (503, grpc.StatusCode.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")
    samples = run_here(job(server, requests_of(protocol), closed(2, 8)))
    assert samples.errors() == {"QUEUE_FULL": 8}
    assert "Exceeds maximum queue size" in samples.error_texts["QUEUE_FULL"]
