"""Batched answers are compared with what the same server answers to each request alone."""

from __future__ import annotations

import json

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
from tests.load.load_servers import Predict, grpcio_server, python_server
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


def rest_sums(body: bytes) -> bytes:
    rows = [row["x"] if isinstance(row, dict) else row for row in json.loads(body)["instances"]]
    return json.dumps({"predictions": [sum(row) for row in rows]}).encode()


def sums(body: bytes, _context: grpc.ServicerContext) -> bytes:
    rows = tensor_from_proto(PredictRequest.FromString(body).inputs["x"])
    answer = PredictResponse()
    answer.outputs["y"].CopyFrom(tensor_to_proto(rows.sum(axis=1), as_content=False))
    return answer.SerializeToString()


def test_answers_to_each_request_alone_are_what_is_expected() -> None:
    with python_server(rest_sums) as port:
        requests = with_lone_answers(Endpoint(model_name="m", rest_port=port), requests_of("rest"))
    assert requests.expected is not None
    assert [one[""].shape for one in requests.expected if one] == [(2,)] * 4
    with grpcio_server(sums) as port:
        requests = with_lone_answers(Endpoint(model_name="m", grpc_port=port), requests_of("grpc"))
    assert requests.expected is not None
    for body, expected in zip(requests.bodies, requests.expected, strict=True):
        rows = tensor_from_proto(PredictRequest.FromString(body).inputs["x"])
        assert expected is not None
        assert difference({"y": rows.sum(axis=1)}, expected) == ""
        assert difference({"y": rows.sum(axis=1) + np.float32(0.1)}, expected) != ""


def refuse(_body: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.NOT_FOUND, "Servable not found for request: Latest(m)")
    raise AssertionError


@pytest.mark.parametrize(
    ("predict", "told"),
    [(refuse, "Servable not found"), (lambda *_: b"\xff\xff nonsense", "does not decode")],
    ids=["refused", "no message"],
)
def test_a_server_that_does_not_answer_is_told_with_its_own_words(predict: Predict, told: str) -> None:
    with grpcio_server(predict) as port, pytest.raises(TargetError, match=told):
        with_lone_answers(Endpoint(model_name="m", grpc_port=port), requests_of("grpc"))
