"""KServe v2 as NVIDIA's own client speaks it: the same bytes, and each reads what the other wrote."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchtune.wire.kserve_infer import (
    ModelStatisticsRequest,
    ModelStatisticsResponse,
    datatype_of,
    decode_infer_json,
    decode_infer_response,
    encode_infer_json,
    encode_infer_request,
    json_length,
    to_raw,
)

WHY = "tritonclient is missing: pip install 'tritonclient[all]'"
triton_grpc = pytest.importorskip("tritonclient.grpc", reason=WHY)
triton_http = pytest.importorskip("tritonclient.http", reason=WHY)

Array = np.ndarray[Any, Any]
NAMES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NAMES += ["float16", "float32", "float64"]
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
NUMBERS = st.sampled_from(NAMES).flatmap(lambda name: hnp.arrays(np.dtype(name), SHAPES))
TEXTS = hnp.arrays(object, SHAPES, elements=st.text(st.characters(codec="utf-8"), max_size=8).map(str.encode))
ARRAYS = NUMBERS | TEXTS


def same(left: Array, right: Array) -> bool:
    if left.dtype == object:  # JSON's strings stay text there, here they are bytes
        values = [one.encode() if isinstance(one, str) else one for one in right.ravel().tolist()]
        return left.shape == right.shape and left.ravel().tolist() == values
    return left.shape == right.shape and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")


def http_input(name: str, array: Array, *, binary: bool) -> Any:
    one = triton_http.InferInput(name, list(array.shape), datatype_of(array))
    return one.set_data_from_numpy(array, binary_data=binary)


@given(ARRAYS, ARRAYS)
@settings(max_examples=150, deadline=None)
def test_binary_bodies_are_the_same_bytes(first: Array, second: Array) -> None:
    theirs, header_length = triton_http.InferenceServerClient.generate_request_body(
        [http_input("a", first, binary=True), http_input("b", second, binary=True)]
    )
    ours = encode_infer_json({"a": first, "b": second}, binary=True)
    assert json.loads(ours[: json_length(ours)]) == json.loads(theirs[:header_length])
    assert ours[json_length(ours) :] == theirs[header_length:]
    assert json_length(theirs) == header_length


@given(ARRAYS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_tritonclient_reads_rest_answers_as_we_do(array: Array, binary: bool) -> None:
    if array.dtype == np.float16 or (array.dtype.kind == "f" and not np.isfinite(array).all()):
        binary = True  # JSON has no FP16, and tritonclient's knows no NaN
    body = encode_infer_json({"y": array}, binary=binary)
    length = json_length(body)
    body = body[:length].replace(b'"inputs"', b'"outputs"', 1) + body[length:]
    theirs = triton_http.InferenceServerClient.parse_response_body(
        body, header_length=length + 1 if binary else None
    ).as_numpy("y")
    assert same(decode_infer_json(body)["y"], theirs)


@given(ARRAYS)
@settings(max_examples=150, deadline=None)
def test_grpc_requests_are_what_tritonclient_makes_of_the_same_arrays(array: Array) -> None:
    ours = triton_grpc.service_pb2.ModelInferRequest.FromString(
        encode_infer_request("m", {"x": array}, version=2)
    )
    given_input = triton_grpc.InferInput("x", list(array.shape), datatype_of(array))
    given_input.set_data_from_numpy(array)
    theirs = triton_grpc.service_pb2.ModelInferRequest(
        model_name="m",
        model_version="2",
        inputs=[given_input._get_tensor()],
        raw_input_contents=[given_input._get_content()],
    )
    assert ours == theirs


@given(ARRAYS)
@settings(max_examples=150, deadline=None)
def test_tritonclient_reads_grpc_answers_as_we_do(array: Array) -> None:
    message = triton_grpc.service_pb2.ModelInferResponse(model_name="m", model_version="1", id="7")
    message.parameters["triton_final_response"].bool_param = True
    message.outputs.add(name="a", datatype=datatype_of(array), shape=array.shape)
    message.raw_output_contents.append(to_raw(array))
    theirs = triton_grpc.InferResult(message).as_numpy("a")
    assert same(decode_infer_response(message.SerializeToString())["a"], theirs)


@given(counts=st.lists(st.integers(0, 2**64 - 1), min_size=15, max_size=15))
def test_statistics_by_grpc_are_read_as_tritonclient_writes_them(counts: list[int]) -> None:
    theirs = triton_grpc.service_pb2
    number = iter(counts)

    def duration() -> Any:
        return theirs.StatisticDuration(count=next(number), ns=next(number))

    parts = {name: duration() for name in ("compute_input", "compute_infer", "compute_output")}
    model = theirs.ModelStatistics(
        name="m",
        version="1",
        inference_count=next(number),
        execution_count=next(number),
        inference_stats=theirs.InferStatistics(success=duration(), fail=duration(), queue=duration()),
        batch_stats=[theirs.InferBatchStatistics(batch_size=next(number), **parts)],
    )
    written = theirs.ModelStatisticsResponse(model_stats=[model]).SerializeToString()
    (ours,) = json_format.MessageToDict(ModelStatisticsResponse.FromString(written))["modelStats"]
    assert ours == json_format.MessageToDict(model)
    asked = ModelStatisticsRequest(name="m", version="3").SerializeToString()
    assert theirs.ModelStatisticsRequest.FromString(asked).version == "3"
