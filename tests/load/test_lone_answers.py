"""Batched answers are compared with what the same server answers to each request alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import numpy as np
import pytest

from batchtune.errors import TargetError
from batchtune.load.answers import difference, with_lone_answers
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.endpoint import Endpoint
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.tfserving.messages import PredictRequest, PredictResponse
from batchtune.wire.tfserving.tensors import tensor_from_proto
from tests.wire.tensor_protos import tensor_to_proto

SIGNATURE = Signature(
    name="serving_default",
    method_name="",
    inputs=(TensorSpec(name="x", dtype="float32", shape=(None, 3)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(None,)),),
)


def requests_of(protocol: str) -> RequestSet:
    spec = RequestSpec.model_validate({"protocol": protocol, "rows": 2})
    return build_requests(spec, SIGNATURE, model_name="m", seed=1, distinct=4)


@pytest.fixture
def rest() -> Iterator[Endpoint]:
    class Sums(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rows = [row["x"] if isinstance(row, dict) else row for row in body["instances"]]
            answer = json.dumps({"predictions": [sum(row) for row in rows]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Sums)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Endpoint(model_name="m", rest_port=server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


def serve_grpc(answer) -> tuple[grpc.Server, Endpoint]:
    handler = grpc.method_handlers_generic_handler(
        "tensorflow.serving.PredictionService", {"Predict": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    return server, Endpoint(model_name="m", grpc_port=server.add_insecure_port("127.0.0.1:0"))


def sums(body: bytes, _context: grpc.ServicerContext) -> bytes:
    rows = tensor_from_proto(PredictRequest.FromString(body).inputs["x"])
    answer = PredictResponse()
    answer.outputs["y"].CopyFrom(tensor_to_proto(rows.sum(axis=1), as_content=False))
    return answer.SerializeToString()


def test_rest_answers_to_each_request_alone_are_what_is_expected(rest: Endpoint) -> None:
    requests = with_lone_answers(rest, requests_of("rest"))
    assert requests.expected is not None
    assert [one[""].shape for one in requests.expected if one] == [(2,)] * 4


def test_grpc_answers_to_each_request_alone_are_what_is_expected() -> None:
    server, endpoint = serve_grpc(sums)
    server.start()
    try:
        requests = with_lone_answers(endpoint, requests_of("grpc"))
    finally:
        server.stop(None).wait()
    assert requests.expected is not None
    for body, expected in zip(requests.bodies, requests.expected, strict=True):
        rows = tensor_from_proto(PredictRequest.FromString(body).inputs["x"])
        assert expected is not None
        assert difference({"y": rows.sum(axis=1)}, expected) == ""
        assert difference({"y": rows.sum(axis=1) + np.float32(0.1)}, expected) != ""


def test_a_server_that_refuses_is_told_with_its_own_words() -> None:
    def refuse(_body: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.NOT_FOUND, "Servable not found for request: Latest(m)")

    server, endpoint = serve_grpc(refuse)
    server.start()
    try:
        with pytest.raises(TargetError, match="Servable not found"):
            with_lone_answers(endpoint, requests_of("grpc"))
    finally:
        server.stop(None).wait()


def test_an_answer_that_is_no_message_is_told() -> None:
    server, endpoint = serve_grpc(lambda _body, _context: b"\xff\xff nonsense")
    server.start()
    try:
        with pytest.raises(TargetError, match="does not decode"):
            with_lone_answers(endpoint, requests_of("grpc"))
    finally:
        server.stop(None).wait()
