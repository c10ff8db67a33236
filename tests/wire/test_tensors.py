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


def test_arrays_of_text_travel_as_bytes() -> None:
    assert tensor_from_proto(tensor_to_proto(np.array(["é", "b"]), as_content=True)).tolist() == [
        "é".encode(),
        b"b",
    ]


def test_a_big_endian_or_strided_array_is_brought_into_order() -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    for as_content in (True, False):
        assert tensor_from_proto(tensor_to_proto(array, as_content=as_content)).tolist() == array.tolist()


def test_the_last_typed_value_is_repeated_and_none_means_zeros() -> None:
    def proto(values: list[float]) -> Any:
        message = TensorProto(dtype=1, float_val=values)
        message.tensor_shape.dim.add().size = 4
        return message

    assert tensor_from_proto(proto([])).tolist() == [0, 0, 0, 0]
    assert tensor_from_proto(proto([7])).tolist() == [7, 7, 7, 7]
    assert tensor_from_proto(proto([1, 2])).tolist() == [1, 2, 2, 2]
    assert tensor_from_proto(proto([1, 2, 3, 4, 5])).tolist() == [1, 2, 3, 4]


def test_a_short_string_tensor_repeats_its_last_value() -> None:
    message = TensorProto(dtype=7, string_val=[b"a", b"b"])
    message.tensor_shape.dim.add().size = 4
    assert tensor_from_proto(message).tolist() == [b"a", b"b", b"b", b"b"]
    message = TensorProto(dtype=7)
    message.tensor_shape.dim.add().size = 2
    assert tensor_from_proto(message).tolist() == [b"", b""]


def test_strings_in_tensor_content_are_lengths_then_bytes() -> None:
    message = TensorProto(dtype=7, tensor_content=b"\x01\x82\x01" + b"a" + b"b" * 130)
    message.tensor_shape.dim.add().size = 2
    assert tensor_from_proto(message).tolist() == [b"a", b"b" * 130]


def test_a_value_repeated_over_a_large_shape_takes_no_memory() -> None:
    message = TensorProto(dtype=1, float_val=[1.0])
    message.tensor_shape.dim.add().size = 2**28
    assert tensor_from_proto(message).strides == (0,)


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


def test_a_shape_of_many_dimensions_is_refused_before_they_are_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def product(sizes: list[int]) -> int:
        assert len(sizes) <= 64
        return 1

    monkeypatch.setattr(math, "prod", product)
    message = TensorProto(dtype=1, tensor_shape={"dim": [{"size": 2**62}] * 16_000})
    with pytest.raises(ValueError, match="16000 dimensions") as raised:
        tensor_from_proto(message)
    assert len(str(raised.value)) < 200


def test_the_largest_tensor_is_a_grpc_message() -> None:
    message = TensorProto(dtype=4, tensor_shape={"dim": [{"size": MAX_TENSOR_BYTES + 1}]})
    with pytest.raises(ValueError, match="exceed"):
        tensor_from_proto(message)


def test_out_of_range_integers_keep_their_low_bits_as_in_tensorflow() -> None:
    message = TensorProto(dtype=6, int_val=[300, -1], tensor_shape={"dim": [{"size": 2}]})
    assert tensor_from_proto(message).tolist() == [44, -1]


def test_an_unknown_numpy_dtype_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="datetime64"):
        tensor_to_proto(np.array(["2020-01-01"], "datetime64[D]"), as_content=True)
    with pytest.raises(ValueError, match="bytes or text"):
        tensor_to_proto(np.array([{"a": 1}], object), as_content=True)


def test_a_predict_request_says_what_was_asked() -> None:
    inputs = {"x": np.ones((2, 3), np.float32), "s": strings([b"a", b"b"])}
    encoded = encode_predict_request("m", "sig", inputs, version=3, output_filter=("y",))
    assert encoded == encode_predict_request(
        "m", "sig", dict(reversed(inputs.items())), version=3, output_filter=("y",)
    )
    request = PredictRequest.FromString(encoded)
    assert request.model_spec.name == "m"
    assert request.model_spec.signature_name == "sig"
    assert request.model_spec.version.value == 3
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


def test_several_inputs_make_rows_of_objects_or_named_columns() -> None:
    inputs = {"a": np.array([[1, 2], [3, 4]]), "b": strings([b"u", b"\xff"])}
    rows = json.loads(encode_predict_json(inputs, signature_name="s"))["instances"]
    assert rows == [{"a": [1, 2], "b": "u"}, {"a": [3, 4], "b": {"b64": "/w=="}}]
    columns = json.loads(encode_predict_json(inputs, signature_name="s", row_format=False))["inputs"]
    assert columns == {"a": [[1, 2], [3, 4]], "b": ["u", {"b64": "/w=="}]}
    with pytest.raises(ValueError, match="first dimension"):
        encode_predict_json({"a": np.ones(2), "b": np.ones(3)}, signature_name="s")


def test_half_floats_and_scalars_are_plain_numbers() -> None:
    body = encode_predict_json({"x": np.array([0.5], np.float16)}, signature_name="s")
    assert json.loads(body)["instances"] == [0.5]
    body = encode_predict_json({"x": np.array(3)}, signature_name="s", row_format=False)
    assert json.loads(body)["inputs"] == 3


def test_non_finite_numbers_are_written_bare() -> None:
    body = encode_predict_json({"x": np.array([np.nan, np.inf, 1.0])}, signature_name="s")
    assert b"[NaN, Infinity, 1.0]" in body


def test_answers_are_read_in_every_format() -> None:
    one = decode_predict_json(b'{"predictions": [[2.5, NaN], [3.5, -Infinity]]}')
    assert isinstance(one, np.ndarray)
    assert one[:, 0].tolist() == [2.5, 3.5]
    assert math.isnan(one[0, 1])
    rows = decode_predict_json(b'{"predictions": [{"a": 1, "b": "x"}, {"a": 2, "b": {"b64": "/w=="}}]}')
    assert isinstance(rows, dict)
    assert rows["a"].tolist() == [1, 2]
    assert rows["b"].tolist() == [b"x", b"\xff"]
    columns = decode_predict_json(b'{"outputs": {"a": [1], "b64": [true]}}')
    assert isinstance(columns, dict)
    assert columns["b64"].tolist() == [True]
    empty = decode_predict_json(b'{"predictions": []}')
    assert isinstance(empty, np.ndarray)
    assert empty.shape == (0,)


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


SEPARATE = """
import sys, time
started = time.perf_counter()
from batchtune.wire.tfserving import messages as protos
elapsed = time.perf_counter() - started
assert "tensorflow" not in sys.modules
assert not any(name.startswith("tensorflow.python") for name in sys.modules)
print(f"messages imported in {elapsed:.3f} s")
"""

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


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_importing_the_messages_does_not_import_tensorflow() -> None:
    finished = run_python("-W", "error", "-c", SEPARATE)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_a_real_tensorflow_in_the_same_process_agrees_on_every_tensor() -> None:
    finished = run_python("-c", BESIDE, *NUMERIC)
    assert finished.stdout.strip() == "agreed", finished.stderr
