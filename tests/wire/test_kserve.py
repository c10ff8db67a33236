"""KServe v2: arrays keep their values in JSON, in binary data and in gRPC; what is malformed is refused in words."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchtune.wire.kserve_infer import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    decode_infer_json,
    decode_infer_response,
    encode_infer_json,
    encode_infer_request,
    json_length,
    numpy_name,
    signature_from_metadata,
    signature_from_response,
)
from batchtune.wire.signature import Signature, TensorSpec

Array = np.ndarray[Any, Any]

NUMERIC = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMERIC += ["float32", "float64"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
JSON_ARRAYS = st.sampled_from(NUMERIC).flatmap(lambda name: hnp.arrays(np.dtype(name), SHAPES))
RAW_ARRAYS = st.sampled_from([*NUMERIC, "float16"]).flatmap(lambda name: hnp.arrays(np.dtype(name), SHAPES))
TEXT_ARRAYS = hnp.arrays(object, SHAPES, elements=st.text(st.characters(codec="utf-8"), max_size=8))
BYTES_ARRAYS = hnp.arrays(object, SHAPES, elements=st.binary(max_size=8), fill=st.nothing())


def same(left: Array, right: Array) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and (left.tolist() == right.tolist() or left.tobytes() == right.tobytes())
    )


def strings(*values: Any) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def answered(body: bytes) -> bytes:
    """The answer of a REST server that gives back its inputs."""
    end = json_length(body)
    return body[:end].replace(b'"inputs"', b'"outputs"', 1) + body[end:]


def answer(*outputs: dict[str, Any], tail: bytes = b"") -> bytes:
    return json.dumps({"model_name": "m", "outputs": outputs}).encode() + tail


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "y", "datatype": "FP32", "shape": [2], "data": [1, 2], **changes}


def echoed(message: bytes) -> bytes:
    """The answer of a gRPC server that gives back its inputs."""
    request = ModelInferRequest.FromString(message)
    return ModelInferResponse(
        outputs=[type(one).FromString(one.SerializeToString()) for one in request.inputs],
        raw_output_contents=request.raw_input_contents,
    ).SerializeToString()


def through_json(*arrays: Array, binary: bool = False) -> list[Array]:
    inputs = {str(number): array for number, array in enumerate(arrays)}
    return list(decode_infer_json(answered(encode_infer_json(inputs, binary=binary))).values())


def through_grpc(*arrays: Array) -> list[Array]:
    inputs = {str(number): array for number, array in enumerate(arrays)}
    return list(decode_infer_response(echoed(encode_infer_request("m", inputs))).values())


@given(JSON_ARRAYS, JSON_ARRAYS, TEXT_ARRAYS)
@settings(max_examples=80, deadline=None)
def test_numbers_and_text_survive_the_way_through_json(first: Array, second: Array, text: Array) -> None:
    *numbers, words = through_json(first, second, text)
    for found, sent in zip(numbers, (first, second), strict=True):
        assert (found.shape, found.dtype) == (sent.shape, sent.dtype)
        assert np.array_equal(found, sent, equal_nan=sent.dtype.kind == "f")
    assert words.shape == text.shape
    assert words.ravel().tolist() == [word.encode() for word in text.ravel().tolist()]


@given(RAW_ARRAYS, RAW_ARRAYS, BYTES_ARRAYS)
@example(np.array([[1.5, -2.0]], ml_dtypes.bfloat16), np.zeros(0), strings(b""))
@settings(max_examples=80, deadline=None)
def test_everything_survives_as_binary_data_and_in_grpc(first: Array, second: Array, text: Array) -> None:
    arrays = (first, second, text)
    for found in (through_json(*arrays, binary=True), through_grpc(*arrays)):
        assert all(map(same, found, arrays))


HALF, BRAIN = np.zeros(2, np.float16), np.zeros(2, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (HALF, "FP16 cannot travel as JSON, only as binary data"),
        (BRAIN, "BF16 cannot travel as JSON, only as binary data"),
        (strings(b"\xff"), "not UTF-8"),
        (np.zeros(1, np.complex64), "has no KServe datatype"),
        (np.zeros(1, "datetime64[s]"), "has no KServe datatype"),
        (strings(3), "strings are bytes or text, not int"),
    ],
)
def test_an_array_that_cannot_travel_is_refused_in_words(array: Array, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode_infer_json({"x": array})
    if "JSON" in words or "UTF-8" in words:
        assert same(through_grpc(array)[0], array)
    else:
        with pytest.raises(ValueError, match=words):
            encode_infer_request("m", {"x": array})


def test_memory_order_and_byte_order_of_an_array_do_not_matter() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    plain = np.ascontiguousarray(array, "<i4")
    for encode in (
        encode_infer_json,
        partial(encode_infer_json, binary=True),
        partial(encode_infer_request, "m"),
    ):
        assert encode({"x": array}) == encode({"x": plain})


def test_nan_and_infinity_are_written_bare_as_triton_reads_them() -> None:
    body = encode_infer_json({"x": np.array([math.nan, math.inf, 1.0], np.float32)})
    assert b"[NaN, Infinity, 1.0]" in body


def test_model_and_version_are_named_in_grpc() -> None:
    x = {"x": np.zeros(1, np.float32)}
    request = ModelInferRequest.FromString(encode_infer_request("m", x, version=3))
    assert (request.model_name, request.model_version) == ("m", "3")
    assert ModelInferRequest.FromString(encode_infer_request("m", x)).model_version == ""


def test_the_length_of_the_json_is_found_without_its_header() -> None:
    body = encode_infer_json({"x": strings('}"é{', "")}, binary=True)
    end = json_length(body)
    assert json.loads(body[:end])["inputs"][0]["parameters"] == {"binary_data_size": len(body) - end}
    assert json_length(b' {"a": "\xc3\xa9"}\n') == 12


MIXED = {"name": "b", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}
ARRAYS = [
    (answer(entry(data=[1e300, 1])), {"y": [math.inf, 1.0]}),
    (answer(entry(shape=[2, 1, 2], data=[[[1, 2]], [[3, 4]]])), {"y": [[[1, 2]], [[3, 4]]]}),
    (
        answer(entry(), MIXED, entry(name="z"), tail=np.array([7, 8]).tobytes()),
        {"y": [1, 2], "b": [7, 8], "z": [1, 2]},
    ),
]


@pytest.mark.parametrize(("body", "arrays"), ARRAYS, ids=["beyond fp32", "nested", "binary and listed"])
def test_an_answer_is_read_as_it_says(body: bytes, arrays: dict[str, Any]) -> None:
    assert {name: array.tolist() for name, array in decode_infer_json(body).items()} == arrays


BINARY = {"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((body, "no JSON at the start") for body in (b"", b"\x00\x01", b'{"outputs": [', b"[" * 100_000)),
        (b'{"error": "unknown model"}', r"^unknown model$"),
        (b"[]", "not a JSON object"),
        (b"{}", "no list of 'outputs'"),
        (answer({"name": "y"}), "lacks name, datatype, shape"),
        (answer(entry(datatype="FLOAT")), "output 'y': 'FLOAT' is not a KServe datatype"),
        (answer(entry(shape=[3])), r"output 'y': 2 values are not a tensor with shape \[3\]"),
        (answer(entry(shape=[-2])), "is not the shape"),
        (answer(entry(shape=[2.0])), "is not the shape"),
        (answer(entry(shape=["2"])), "is not the shape"),
        (answer(entry(shape=[1] * 65)), "is not the shape"),
        (answer(entry(data=3)), "not a list"),
        (answer(entry(data=["1", "2"])), "FP32 data hold str"),
        (answer(entry(data=[1, None])), "FP32 data hold NoneType"),
        (answer(entry(data=[True, False])), "FP32 data hold bool"),
        (answer(entry(datatype="INT8", data=[1, 128])), "outside INT8"),
        (answer(entry(datatype="UINT64", data=[1, -1])), "outside UINT64"),
        (answer(entry(datatype="INT32", data=[1.5, 1])), "INT32 data hold float"),
        (answer(entry(datatype="BOOL")), "BOOL data hold int"),
        (answer(entry(datatype="BYTES")), "BYTES data hold int"),
        (answer(entry(shape=[2, 1], data=[[1], 2])), "nested data"),
        (answer(entry(shape=[2, 1], data=[[1], [2, 3]])), "nested data"),
        (answer(entry(shape=[2], data=[[1], [2]])), "FP32 data hold list"),
        (answer(entry(shape=[2, 1], data=[[[1]], [[2]]])), "FP32 data hold list"),
        (answer(BINARY, tail=bytes(7)), "8 bytes are announced; 7 follow"),
        (answer(BINARY, tail=bytes(9)), "1 bytes follow that belong to no output"),
        (answer({**BINARY, "parameters": {"binary_data_size": -8}}), "-8 bytes are announced"),
        (answer({**BINARY, "shape": [3]}, tail=bytes(8)), "8 bytes are not a tensor of FP32"),
        (answer({**BINARY, "datatype": "BYTES"}, tail=b"\x01\0\0\0a\x01\0\0"), "cut short"),
        (answer({**BINARY, "datatype": "BYTES"}, tail=b"\x01\0\0\0a\x09\0\0"), "cut short"),
        (answer({**BINARY, "datatype": "BYTES", "shape": [1]}, tail=b"\x09\0\0\0abcd"), "BYTES end at 13"),
        (answer({**BINARY, "datatype": "BYTES", "shape": [1]}, tail=b"\x03\0\0\0abcd"), "BYTES end at 7"),
    ],
)
def test_a_malformed_answer_is_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_infer_json(body)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_damaged_answers_decode_or_raise_value_error(noise: bytes, place: int, byte: int) -> None:
    inputs = {"x": np.arange(4, dtype=np.float32), "s": strings(b"ab", b"")}
    rest = bytearray(answered(encode_infer_json(inputs, binary=True)))
    rpc = bytearray(echoed(encode_infer_request("m", inputs)))
    for body, decode in ((rest, decode_infer_json), (rpc, decode_infer_response)):
        body[place % len(body)] = byte
        for damaged in (bytes(body), bytes(body[:place]), bytes(body) + noise, noise):
            try:
                decode(damaged)
            except ValueError:
                continue


@pytest.mark.parametrize(
    ("field", "datatype", "values"),
    [
        ("bool_contents", "BOOL", [True, False]),
        ("int_contents", "INT8", [-1, 2]),
        ("int_contents", "INT32", [-1, 2]),
        ("int64_contents", "INT64", [-1, 2]),
        ("uint_contents", "UINT16", [1, 2]),
        ("uint64_contents", "UINT64", [1, 2**63]),
        ("fp32_contents", "FP32", [0.5, 1]),
        ("fp64_contents", "FP64", [0.1, 1]),
        ("bytes_contents", "BYTES", [b"a", b"\xff"]),
    ],
)
def test_typed_contents_are_read_where_a_server_has_them(
    field: str, datatype: str, values: list[Any]
) -> None:
    response = ModelInferResponse()
    output = response.outputs.add(name="y", datatype=datatype, shape=[2, 1])
    getattr(output.contents, field).extend(values)
    found = decode_infer_response(response.SerializeToString())["y"]
    assert (found.dtype, found.shape) == (np.dtype(numpy_name(datatype)), (2, 1))
    assert found.ravel().tolist() == values


def test_malformed_responses_are_refused_in_words() -> None:
    def response(
        *raws: bytes, datatype: str = "FP32", shape: tuple[int, ...] = (2,), typed: int = 0
    ) -> bytes:
        made = ModelInferResponse(raw_output_contents=raws)
        output = made.outputs.add(name="y", datatype=datatype, shape=shape)
        output.contents.fp32_contents.extend([1.0] * typed)
        output.contents.int_contents.extend([200] * typed)
        return bytes(made.SerializeToString())

    assert decode_infer_response(response(typed=2))["y"].tolist() == [1, 1]
    for message, words in (
        (b"\xff\xff", "not a ModelInferResponse"),
        (response(bytes(8), bytes(8)), "1 outputs come with 2 raw contents"),
        (response(bytes(7)), "output 'y': 7 bytes are not a tensor of FP32"),
        (response(bytes(8), datatype="FP8"), "'FP8' is not a KServe datatype"),
        (response(bytes(8), shape=(-1,)), "is not the shape"),
        (response(), "0 fp32_contents are not a tensor"),
        (response(typed=2, datatype="FP16"), "FP16 travels as raw contents only"),
        (response(typed=2, datatype="INT8"), "outside INT8"),
    ):
        with pytest.raises(ValueError, match=words):
            decode_infer_response(message)


METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "python",
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "s", "datatype": "BYTES", "shape": [-1, -1]},
    ],
    "outputs": [{"name": "y", "datatype": "BF16", "shape": []}],
}


def test_metadata_become_a_signature() -> None:
    expected = Signature(
        name="serving_default",
        method_name="kserve/infer",
        inputs=(
            TensorSpec(name="s", dtype="object", shape=(None, None)),
            TensorSpec(name="x", dtype="float32", shape=(None, 3)),
        ),
        outputs=(TensorSpec(name="y", dtype="bfloat16", shape=()),),
    )
    assert signature_from_metadata("serving_default", METADATA) == expected
    response = ModelMetadataResponse(**METADATA).SerializeToString()
    assert signature_from_response("serving_default", response) == expected


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "not a JSON object"),
        ({}, "no 'inputs'"),
        ({"error": "unknown model"}, r"^unknown model$"),
        ({"inputs": 3}, "not a list"),
        ({"inputs": [{"name": "x", "datatype": "FP32"}]}, "no name, datatype and shape"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": ["2"]}]}, "no name, datatype and shape"),
        ({"inputs": [{"name": "x", "datatype": "FP12", "shape": [2]}]}, "is not a KServe datatype"),
    ],
)
def test_metadata_that_say_nothing_are_refused_in_words(document: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        signature_from_metadata("s", document)
    with pytest.raises(ValueError, match="not a ModelMetadataResponse"):
        signature_from_response("s", b"\xff")


def test_an_answer_of_any_depth_is_a_value_error() -> None:
    for depth in range(500, 1_200):
        for leaf in (b"1", b"NaN"):
            with pytest.raises(ValueError, match=r"^\[\[|nested too deeply|no JSON"):
                decode_infer_json(b'{"error": ' + b"[" * depth + leaf + b"]" * depth + b"}")
