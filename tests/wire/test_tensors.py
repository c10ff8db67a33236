"""Tensors keep their values on every way that TensorFlow Serving accepts or sends them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.tfserving.messages import PredictRequest, PredictResponse, SignatureDef, TensorProto
from batchtune.wire.tfserving.rest_json import decode_predict_json, encode_predict_json
from batchtune.wire.tfserving.tensors import (
    MAX_TENSOR_BYTES,
    decode_predict_response,
    encode_predict_request,
    signature_from_def,
    signature_to_def,
    tensor_from_proto,
)
from tests.wire.tensor_protos import tensor_to_proto

NUMERIC = ["float32", "float64", "int32", "uint8", "int16", "int8", "complex64", "int64", "bool", "uint16"]
NUMERIC += ["complex128", "float16", "uint32", "uint64"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
NUMERIC_ARRAYS = st.sampled_from(NUMERIC).flatmap(lambda name: hnp.arrays(np.dtype(name), SHAPES))


def same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and (left.tolist() == right.tolist() or left.tobytes() == right.tobytes())
    )


def strings(values: list[bytes], shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array if shape is None else array.reshape(shape)


@given(NUMERIC_ARRAYS, st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_numeric_array_survives_the_round_trip(array: np.ndarray[Any, Any], as_content: bool) -> None:
    message = tensor_to_proto(array, as_content=as_content).SerializeToString()
    assert same(tensor_from_proto(TensorProto.FromString(message)), array)


@given(st.lists(st.binary(max_size=20), max_size=8), st.booleans())
def test_strings_survive_the_round_trip(values: list[bytes], as_content: bool) -> None:
    proto = tensor_to_proto(strings(values), as_content=as_content)
    assert tensor_from_proto(proto).tolist() == values


@pytest.mark.parametrize("as_content", [True, False])
def test_bfloat16_survives_the_round_trip(as_content: bool) -> None:
    import ml_dtypes

    array = np.array([[1.5, -2.0], [0.0, 3.25]], ml_dtypes.bfloat16)
    assert same(tensor_from_proto(tensor_to_proto(array, as_content=as_content)), array)


@pytest.mark.parametrize("as_content", [True, False])
def test_text_and_arrays_out_of_order_travel_too(as_content: bool) -> None:
    text = tensor_to_proto(np.array(["é", "b"]), as_content=as_content)
    assert tensor_from_proto(text).tolist() == ["é".encode(), b"b"]
    array = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    assert tensor_from_proto(tensor_to_proto(array, as_content=as_content)).tolist() == array.tolist()


def proto_of(size: int, dtype: int = 1, **fields: Any) -> Any:
    return TensorProto(dtype=dtype, tensor_shape={"dim": [{"size": size}]}, **fields)


@pytest.mark.parametrize(
    ("proto", "values"),
    [
        (proto_of(4), [0, 0, 0, 0]),
        (proto_of(4, float_val=[7]), [7, 7, 7, 7]),
        (proto_of(4, float_val=[1, 2]), [1, 2, 2, 2]),
        (proto_of(4, float_val=[1, 2, 3, 4, 5]), [1, 2, 3, 4]),
        (proto_of(4, dtype=7, string_val=[b"a", b"b"]), [b"a", b"b", b"b", b"b"]),
        (proto_of(2, dtype=7), [b"", b""]),
        (proto_of(2, dtype=7, tensor_content=b"\x01\x82\x01a" + b"b" * 130), [b"a", b"b" * 130]),
        (proto_of(2, dtype=6, int_val=[300, -1]), [44, -1]),
    ],
)
def test_values_are_read_as_tensorflow_does(proto: Any, values: list[Any]) -> None:
    """The last is repeated, none means zeros, and integers out of range keep their low bits."""
    assert tensor_from_proto(proto).tolist() == values


def test_a_value_repeated_over_a_large_shape_takes_no_memory() -> None:
    assert tensor_from_proto(proto_of(2**28, float_val=[1.0])).strides == (0,)


BROKEN = {
    "dtype": TensorProto(dtype=20),
    "unset dtype": TensorProto(),
    "content of another size": TensorProto(dtype=1, tensor_content=b"12345678"),
    "unknown rank": TensorProto(dtype=1, float_val=[1], tensor_shape={"unknown_rank": True}),
    "negative dimension": TensorProto(dtype=1, tensor_shape={"dim": [{"size": -1}]}),
    "huge shape": TensorProto(dtype=1, tensor_shape={"dim": [{"size": 2**40}, {"size": 2**40}]}),
    "too many dimensions": TensorProto(dtype=1, tensor_shape={"dim": [{"size": 1}] * 65}),
    "odd complex": TensorProto(dtype=8, scomplex_val=[1, 2, 3], tensor_shape={"dim": [{"size": 2}]}),
    "strings cut short": TensorProto(dtype=7, tensor_content=b"\x05ab"),
    "endless string length": TensorProto(dtype=7, tensor_content=b"\xff" * 12),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tensor_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        tensor_from_proto(BROKEN[name])


def test_many_dimensions_are_refused_before_they_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(sizes: list[int]) -> int:
        assert len(sizes) <= 64
        return 1

    monkeypatch.setattr(math, "prod", product)
    message = TensorProto(dtype=1, tensor_shape={"dim": [{"size": 2**62}] * 16_000})
    with pytest.raises(ValueError, match="16000 dimensions") as raised:
        tensor_from_proto(message)
    assert len(str(raised.value)) < 200


def test_the_largest_tensor_is_a_grpc_message() -> None:
    with pytest.raises(ValueError, match="exceed"):
        tensor_from_proto(proto_of(MAX_TENSOR_BYTES + 1, dtype=4))


def test_an_unknown_numpy_dtype_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="datetime64"):
        tensor_to_proto(np.array(["2020-01-01"], "datetime64[D]"), as_content=True)
    with pytest.raises(ValueError, match="bytes or text"):
        tensor_to_proto(np.array([{"a": 1}], object), as_content=True)


def test_a_predict_request_says_what_was_asked() -> None:
    inputs = {"x": np.ones((2, 3), np.float32), "s": strings([b"a", b"b"])}
    encoded, again = (
        encode_predict_request("m", "sig", dict(given), version=3, output_filter=("y",))
        for given in (inputs.items(), reversed(inputs.items()))
    )
    assert encoded == again
    request = PredictRequest.FromString(encoded)
    spec = request.model_spec
    assert (spec.name, spec.signature_name, spec.version.value) == ("m", "sig", 3)
    assert list(request.output_filter) == ["y"]
    assert tensor_from_proto(request.inputs["x"]).tolist() == inputs["x"].tolist()
    assert tensor_from_proto(request.inputs["s"]).tolist() == [b"a", b"b"]


def test_a_predict_response_is_read_by_output_name() -> None:
    response = PredictResponse()
    response.outputs["y"].CopyFrom(tensor_to_proto(np.array([1.0, 2.0], np.float32), as_content=False))
    assert decode_predict_response(response.SerializeToString())["y"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="PredictResponse"):
        decode_predict_response(b"\xff\xff")


def test_a_signature_survives_the_round_trip() -> None:
    signature = Signature(
        name="serving_default",
        method_name="tensorflow/serving/predict",
        inputs=(
            TensorSpec(name="ids", dtype="int64", shape=(None, 200)),
            TensorSpec(name="s", dtype="object", shape=()),
        ),
        outputs=(TensorSpec(name="y", dtype="float32", shape=None),),
    )
    definition = SignatureDef.FromString(signature_to_def(signature).SerializeToString())
    assert signature_from_def("serving_default", definition) == signature


ROW_ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int32, np.int64]),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4),
)


@given(ROW_ARRAYS)
@settings(deadline=None)
def test_the_row_body_holds_the_rows(array: np.ndarray[Any, Any]) -> None:
    body = json.loads(encode_predict_json({"x": array}, signature_name="s"))
    assert body["signature_name"] == "s"
    assert np.array_equal(np.array(body["instances"], array.dtype), array, equal_nan=True)


TWO = {"a": np.array([[1, 2], [3, 4]]), "b": strings([b"u", b"\xff"])}


@pytest.mark.parametrize(
    ("inputs", "rows", "document"),
    [
        (TWO, True, [{"a": [1, 2], "b": "u"}, {"a": [3, 4], "b": {"b64": "/w=="}}]),
        (TWO, False, {"a": [[1, 2], [3, 4]], "b": ["u", {"b64": "/w=="}]}),
        ({"x": np.array([0.5], np.float16)}, True, [0.5]),
        ({"x": np.array(3)}, False, 3),
        ({"x": np.array([np.inf, -np.inf, 1.0])}, True, [math.inf, -math.inf, 1.0]),
    ],
)
def test_inputs_make_rows_or_columns(inputs: dict[str, Any], rows: bool, document: Any) -> None:
    body = encode_predict_json(inputs, signature_name="s", row_format=rows)
    assert json.loads(body) == {"signature_name": "s", "instances" if rows else "inputs": document}


def test_rows_need_as_many_of_each_input_and_non_finite_numbers_are_written_bare() -> None:
    with pytest.raises(ValueError, match="first dimension"):
        encode_predict_json({"a": np.ones(2), "b": np.ones(3)}, signature_name="s")
    body = encode_predict_json({"x": np.array([np.nan, np.inf, 1.0])}, signature_name="s")
    assert b"[NaN, Infinity, 1.0]" in body


def listed(arrays: Any) -> Any:
    return (
        {name: array.tolist() for name, array in arrays.items()}
        if isinstance(arrays, dict)
        else arrays.tolist()
    )


@pytest.mark.parametrize(
    ("body", "arrays"),
    [
        (b'{"predictions": [[2.5, Infinity], [3.5, -Infinity]]}', [[2.5, math.inf], [3.5, -math.inf]]),
        (
            b'{"predictions": [{"a": 1, "b": "x"}, {"a": 2, "b": {"b64": "/w=="}}]}',
            {"a": [1, 2], "b": [b"x", b"\xff"]},
        ),
        (b'{"outputs": {"a": [1], "b64": [true]}}', {"a": [1], "b64": [True]}),
        (b'{"predictions": []}', []),
    ],
)
def test_answers_are_read_in_every_format(body: bytes, arrays: Any) -> None:
    assert listed(decode_predict_json(body)) == arrays
    assert np.isnan(decode_predict_json(b'{"predictions": [NaN]}'))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"error": "Servable not found"}',
        b'{"predictions": 3}',
        b'{"predictions": [1, [2]]}',
        b'{"predictions": [{"a": 1}, {"b": 1}]}',
        b'{"predictions": ["a", 1]}',
        b'{"predictions": [null]}',
        b'{"outputs": {"b64": "?"}}',
        b'{"outputs": ["a", ' + b"[" * 400 + b'"b"' + b"]" * 400 + b"]}",
        b'{"predictions": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"error": ' + b"[" * 1_020 + b"]" * 1_020 + b"}",
    ],
    ids=lambda body: body[:40].decode(),
)
def test_an_answer_that_is_none_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode_predict_json(body)


BESIDE = """
import sys
from batchtune.wire.tfserving import messages as protos, tensors
import numpy as np
import tensorflow as tf
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

def received(theirs):
    return tensors.tensor_from_proto(protos.TensorProto.FromString(theirs.SerializeToString()))

def sent(array, as_content):
    ours = protos.TensorProto()
    tensors.fill_tensor(ours, array, as_content=as_content)
    assert tensors.tensor_from_proto(ours).tolist() == array.tolist()
    return tf.make_ndarray(TensorProto.FromString(ours.SerializeToString()))

assert predict_pb2.PredictRequest is not protos.PredictRequest
assert tf.reduce_sum(tf.constant([1, 2])).numpy() == 3
for name in sys.argv[1:]:
    array = np.arange(6).reshape(2, 3).astype(name)
    for got in (received(tf.make_tensor_proto(array)), sent(array, True), sent(array, False)):
        assert got.tolist() == array.tolist(), name
    filled = tf.make_tensor_proto(array.flat[1], shape=[3, 2])
    assert received(filled).tolist() == tf.make_ndarray(filled).tolist()
half = tf.constant([1.5, -2.0], tf.bfloat16)
for got in (received(tf.make_tensor_proto(half)), sent(half.numpy(), True), sent(half.numpy(), False)):
    assert (got == half.numpy()).all()
text = tf.make_tensor_proto([[b"a", b""], [b"\\xff", b"d"]])
assert received(text).tolist() == tf.make_ndarray(text).tolist()
serialized = tf.io.serialize_tensor(tf.constant([b"a", b"bc"])).numpy()
assert tensors.tensor_from_proto(protos.TensorProto.FromString(serialized)).tolist() == [b"a", b"bc"]
print("agreed")
"""


@pytest.mark.slow
def test_a_real_tensorflow_in_the_same_process_agrees_on_every_tensor() -> None:
    command = [sys.executable, "-c", BESIDE, *NUMERIC]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.stdout.strip() == "agreed", finished.stderr
