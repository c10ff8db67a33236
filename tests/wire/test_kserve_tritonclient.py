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
    signature_from_response,
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


@given(st.sampled_from([name for name in NAMES if name != "float16"]), SHAPES, st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_json_bodies_say_the_same(name: str, shape: tuple[int, ...], seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(name)
    theirs, _ = triton_http.InferenceServerClient.generate_request_body(
        [http_input("a", array, binary=False)],
        outputs=[triton_http.InferRequestedOutput("y", binary_data=False)],
    )
    assert json.loads(encode_infer_json({"a": array}))["inputs"] == json.loads(theirs)["inputs"]


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


@given(ARRAYS, ARRAYS)
@settings(max_examples=150, deadline=None)
def test_tritonclient_reads_grpc_answers_as_we_do(first: Array, second: Array) -> None:
    message = triton_grpc.service_pb2.ModelInferResponse(model_name="m", model_version="1", id="7")
    message.parameters["triton_final_response"].bool_param = True
    for name, array in (("a", first), ("b", second)):
        message.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        message.raw_output_contents.append(to_raw(array))
    theirs = triton_grpc.InferResult(message)
    ours = decode_infer_response(message.SerializeToString())
    assert list(ours) == ["a", "b"]
    assert same(ours["a"], theirs.as_numpy("a"))
    assert same(ours["b"], theirs.as_numpy("b"))


def test_metadata_written_with_tritons_messages_are_read() -> None:
    message = triton_grpc.service_pb2.ModelMetadataResponse(name="m", versions=["1", "2"], platform="python")
    message.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    message.outputs.add(name="y", datatype="BYTES", shape=[-1])
    found = signature_from_response("any", message.SerializeToString())
    assert [(one.name, one.dtype, one.shape) for one in found.inputs] == [("x", "float32", (None, 3))]
    assert [(one.name, one.dtype, one.shape) for one in found.outputs] == [("y", "object", (None,))]


@given(counts=st.lists(st.integers(0, 2**64 - 1), min_size=15, max_size=15))
def test_statistics_by_grpc_are_read_as_tritonclient_writes_them(counts: list[int]) -> None:
    theirs = triton_grpc.service_pb2
    number = iter(counts)

    def duration() -> Any:
        return theirs.StatisticDuration(count=next(number), ns=next(number))

    batch = theirs.InferBatchStatistics(
        batch_size=next(number), compute_input=duration(), compute_infer=duration(), compute_output=duration()
    )
    totals = theirs.InferStatistics(success=duration(), fail=duration(), queue=duration())
    model = theirs.ModelStatistics(
        name="m",
        version="1",
        last_inference=7,
        inference_count=next(number),
        execution_count=next(number),
        inference_stats=totals,
        batch_stats=[batch],
    )
    written = theirs.ModelStatisticsResponse(model_stats=[model]).SerializeToString()
    ours = json_format.MessageToDict(ModelStatisticsResponse.FromString(written))["modelStats"][0]
    known = json_format.MessageToDict(model)
    assert known.pop("lastInference") == "7"
    assert ours == known
    asked = ModelStatisticsRequest(name="m", version="3").SerializeToString()
    assert theirs.ModelStatisticsRequest.FromString(asked).version == "3"
