"""Does a client read back the very numbers that the model gave, in TensorFlow Serving's layout?"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf.text_format import Parse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from batchtune.server.rest.json.answers import decimal, error_answer, predict_answer, quoted
from batchtune.server.rest.json.predict_request import (
    classification_answer,
    parse_examples,
    regression_answer,
)
from batchtune.server.rest.json.values import debug_text
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import ClassificationResult, RegressionResult


def array(values: Any, dtype: Any = np.float32) -> NDArray[Any]:
    return np.array(values, dtype)


def by_row(**outputs: NDArray[Any]) -> str:
    return predict_answer(outputs, row_format=True).decode()


def by_column(**outputs: NDArray[Any]) -> str:
    return predict_answer(outputs, row_format=False).decode()


ROW = '{\n    "predictions": %s\n}'
COLUMN = '{\n    "outputs": %s\n}'
STRINGS = array([[b"a", "é\n".encode()]], object)
NOT_FINITE = array([[math.nan, 1.5], [math.inf, -math.inf]])


def test_one_output_by_row_is_a_list_on_one_line() -> None:
    assert by_row(y=array([[2.5, 3], [3.5, 4]])) == ROW % "[[2.5, 3.0], [3.5, 4.0]\n    ]"
    assert by_row(y=array([2.5, 3, 4.5])) == ROW % "[2.5, 3.0, 4.5\n    ]"
    assert by_row(y=array([[[1], [2]]], np.int64)) == ROW % "[[[1], [2]]\n    ]"
    assert by_row(y=NOT_FINITE) == ROW % "[[NaN, 1.5], [Infinity, -Infinity]\n    ]"


def test_several_outputs_by_row_are_objects() -> None:
    assert by_row(a=array([1.5, math.inf]), b=array([[1, 2], [3, 4]], np.int32)) == ROW % (
        '[\n        {\n            "a": 1.5,\n            "b": [1, 2]\n        },\n'
        '        {\n            "a": Infinity,\n            "b": [3, 4]\n        }\n    ]'
    )


def test_columns_have_one_value_per_line() -> None:
    assert by_column(y=array([[1, math.nan]])) == COLUMN % (
        "[\n        [\n            1.0,\n            NaN\n        ]\n    ]"
    )
    assert by_column(y=array(1.5)) == COLUMN % "1.5"
    assert by_column(y=array(math.nan)) == COLUMN % "NaN"
    assert by_column(a=array([True], bool), b=array([], np.int8)) == COLUMN % (
        '{\n        "a": [\n            true\n        ],\n        "b": []\n    }'
    )


@pytest.mark.parametrize(
    ("outputs", "predictions"),
    [
        ({"y": np.empty((0, 2), np.float32)}, []),
        ({"a": np.empty(0, np.float32), "b": np.empty((0, 3), np.int32)}, []),
        ({"y": STRINGS}, [["a", "é\n"]]),
        ({"y_bytes": STRINGS}, [[{"b64": "YQ=="}, {"b64": "w6kK"}]]),
        ({"y": array([b"\xff"], object)}, ["�"]),
        ({"y": np.arange(12, dtype=np.float64).reshape(3, 4)[1:3, ::2]}, [[4, 6], [8, 10]]),
    ],
    ids=["no rows", "no rows of two", "text", "base64", "no text", "slices"],
)
def test_rows_read_back(outputs: dict[str, NDArray[Any]], predictions: Any) -> None:
    assert json.loads(by_row(**outputs)) == {"predictions": predictions}


def test_strings_by_column_are_text_or_base64_by_the_outputs_name() -> None:
    assert json.loads(by_column(y_bytes=array(b"a", object))) == {"outputs": {"b64": "YQ=="}}
    assert json.loads(by_column(y=STRINGS, z=array([1]))) == {"outputs": {"y": [["a", "é\n"]], "z": [1.0]}}


NO_JSON = "Failed to write JSON value for tensor type:"
UNEVEN = {"a": array([1, 2]), "b": array([1])}


@pytest.mark.parametrize(
    ("outputs", "row_format", "text"),
    [
        ({}, True, "Cannot convert empty tensor map to JSON"),
        ({"y": array(1.0)}, True, "Tensor name: y has no shape information "),
        (UNEVEN, True, "Tensor name: b has inconsistent batch size: 1 expecting: 2"),
        ({"y": array([1], np.float16)}, True, f"{NO_JSON} half"),
        ({"y": array([1], np.complex64)}, False, f"{NO_JSON} complex64"),
        ({"y": array([1], np.uint16)}, False, f"{NO_JSON} uint16"),
    ],
)
def test_outputs_without_json_are_refused(outputs: Any, row_format: bool, text: str) -> None:
    with pytest.raises(StatusError) as caught:
        predict_answer(outputs, row_format=row_format)
    assert (caught.value.code, caught.value.message) == ("INVALID_ARGUMENT", text)


INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
INTEGERS.remove("uint16")


@settings(max_examples=200, deadline=None)
@given(
    values=st.sampled_from(["float32", "float64", *INTEGERS, "bool"]).flatmap(
        lambda dtype: arrays_of.arrays(dtype, st.integers(1, 20))
    ),
    row_format=st.booleans(),
)
def test_every_number_reads_back_as_itself(values: NDArray[Any], row_format: bool) -> None:
    answer = json.loads(predict_answer({"y": values}, row_format=row_format))
    read = answer["predictions" if row_format else "outputs"]
    if values.dtype == np.float32:
        with np.errstate(over="ignore"):
            read = np.array(read, np.float64).astype(np.float32)
        assert all(json.loads(decimal(value)) is not None for value in values.tolist())
    np.testing.assert_array_equal(read, values.tolist())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_type_is_written_whole(dtype: str) -> None:
    limits = array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    assert json.loads(by_row(y=limits))["predictions"] == limits.tolist()


@settings(deadline=None)
@given(text=st.binary(max_size=20))
def test_any_bytes_make_a_string(text: bytes) -> None:
    assert json.loads(quoted(text)) == text.decode("utf-8", "replace")


def test_errors_are_json_whatever_the_message() -> None:
    for text in ("plain", 'a "quote"\n', "\udcff half", "é"):
        body = error_answer(text)
        assert json.loads(body)["error"] == text.encode("utf-8", "replace").decode()
    assert error_answer("x") == b'{ "error": "x" }'


def test_classifications_and_regressions_are_under_results() -> None:
    result = Parse(
        'classifications { classes { label: "a" score: 0.1 } classes { label: "b" score: 0.9 } } '
        'classifications { classes { label: "c" score: 1 } }',
        ClassificationResult(),
    )
    assert json.loads(classification_answer(result)) == {"results": [[["a", 0.1], ["b", 0.9]], [["c", 1.0]]]}
    values = Parse("regressions { value: 0.1 } regressions { value: inf }", RegressionResult())
    assert regression_answer(values) == b'{\n    "results": [0.1, Infinity]\n}'
    with pytest.raises(StatusError, match="Cannot convert empty ClassificationResults to JSON"):
        classification_answer(ClassificationResult())
    with pytest.raises(StatusError, match="Cannot convert empty RegressionResults to JSON"):
        regression_answer(RegressionResult())


def test_examples_carry_lists_of_one_kind() -> None:
    body = {
        "signature_name": "s",
        "context": {"c": [1, True]},
        "examples": [{"f": [1.5, 2.5], "t": "x"}, {"b": {"b64": "/w=="}, "none": []}],
    }
    name, message = parse_examples(json.dumps(body).encode())
    kind = message.example_list_with_context
    first, second = kind.examples
    assert name == "s"
    assert list(kind.context.features.feature["c"].int64_list.value) == [1, 1]
    assert list(first.features.feature["f"].float_list.value) == [1.5, 2.5]
    assert list(first.features.feature["t"].bytes_list.value) == [b"x"]
    assert list(second.features.feature["b"].bytes_list.value) == [b"\xff"]
    assert second.features.feature["none"].WhichOneof("kind") is None
    assert len(parse_examples(b'{"examples": [{}]}')[1].example_list.examples) == 1


UNEXPECTED = "Feature: n has element with unexpected JSON type:"
MIXED = "Unexpected element type in feature: n expecting type:"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{}", "JSON Value: $ When method is classify, key 'examples' is expected and was not found"),
        ('{"examples": 1}', "JSON Value: $ Expecting 'examples' value to be an list/array"),
        ('{"examples": []}', "JSON Value: $ 'examples' value is an empty array"),
        ('{"examples": [1]}', "Example must be JSON object but got JSON Number"),
        ('{"context": [], "examples": [{}]}', "Example must be JSON object but got JSON Array"),
        ('{"examples": [{"n": null}]}', f"{UNEXPECTED} Null"),
        ('{"examples": [{"n": {"a": 1}}]}', f"{UNEXPECTED} Object"),
        ('{"examples": [{"n": [[1]]}]}', f"{UNEXPECTED} Array"),
        ('{"examples": [{"n": [1, 1.5]}]}', f"{MIXED} int64"),
        ('{"examples": [{"n": ["a", 1]}]}', f"{MIXED} bytes"),
        ('{"examples": [{"n": [1.5, "a"]}]}', f"{MIXED} float"),
        (
            f'{{"examples": [{{"n": {1 << 63}}}]}}',
            "Feature: n has uint64_t element. Only int64_t is supported.",
        ),
    ],
)
def test_malformed_examples_are_refused_in_the_references_words(body: str, text: str) -> None:
    """In which $ stands for the body."""
    with pytest.raises(StatusError) as caught:
        parse_examples(body.encode())
    assert caught.value.message == text.replace("$", debug_text(json.loads(body)))
