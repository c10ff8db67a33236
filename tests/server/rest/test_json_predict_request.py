"""Does a REST predict body become the inputs that TensorFlow Serving would make of it, or its very complaint?

A matrix of floats that takes the short way is the same as by the long one, and everything else is left to that.
"""

from __future__ import annotations

import base64
import gc
import itertools
import json
import math
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.server.rest.json.predict_request import float_rows_reader, parse_predict, takes_float_rows
from batchtune.server.rest.json.values import debug_text
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from tests.server.server_fakes import FakeServable, running_rest, signature, spec

INF = math.inf
MANY = list(range(70_000))


def make_signature(**inputs: str) -> Signature:
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=None) for name, dtype in sorted(inputs.items()))
    return Signature(name="serving_default", method_name="", inputs=specs, outputs=())


def parse(body: bytes | str | dict[str, Any], **inputs: str) -> SimpleNamespace:
    if isinstance(body, dict):
        body = json.dumps(body)
    raw = body.encode() if isinstance(body, str) else body
    signature = make_signature(**(inputs or {"x": "float32"}))
    _, by_row, read = parse_predict(raw, lambda name: signature)
    return SimpleNamespace(row_format=by_row, inputs=read)


def refusal(body: bytes | str | dict[str, Any], **inputs: str) -> StatusError:
    with pytest.raises(StatusError) as caught:
        parse(body, **inputs)
    return caught.value


def message(body: bytes | str | dict[str, Any], **inputs: str) -> str:
    error = refusal(body, **inputs)
    assert error.code == "INVALID_ARGUMENT"
    return error.message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"instances": [1.0, 2.0, 5.0]}, [1.0, 2.0, 5.0]),
        ({"instances": [[1, 2.5], [3, 4]]}, [[1, 2.5], [3, 4]]),
        ({"instances": [{"x": 1.5}, {"x": 2}]}, [1.5, 2]),
        ({"instances": [{"x": [[1], [2]]}]}, [[[1], [2]]]),
        ({"instances": [[], []]}, [[], []]),
        ({"inputs": [[1, 2], [3, 4]]}, [[1, 2], [3, 4]]),
        ({"inputs": {"x": [1, 2]}}, [1, 2]),
        ({"inputs": 7}, 7),
        ({"inputs": []}, []),
        ({"inputs": {"x": 7, "unknown": "ignored"}}, 7),
        ('{"instances": [Infinity, -Infinity, Inf, -Inf, 1]} more', [INF, -INF, INF, -INF, 1]),
        ('{"instances": [1e39, -1e39, 1e-60]}', [INF, -INF, 0]),
    ],
)
def test_both_formats_and_all_shapes_are_read(body: str | dict[str, Any], expected: Any) -> None:
    request = parse(body)
    assert request.row_format == ("instances" in body)
    assert request.inputs["x"].dtype == np.float32
    assert request.inputs["x"].shape == np.array(expected).shape
    assert request.inputs["x"].tolist() == np.array(expected, np.float32).tolist()


@pytest.mark.parametrize(
    ("body", "dtypes", "expected"),
    [
        (
            {"instances": [{"a": 1, "b": [1.5]}, {"b": [2.5], "a": 2}]},
            "int64 float64",
            [[1, 2], [[1.5], [2.5]]],
        ),
        ({"inputs": {"a": [1, 2], "b": [[1.5], [2.5]]}}, "int64 float64", [[1, 2], [[1.5], [2.5]]]),
        ({"inputs": {"a": [1, 2, 3], "b": 4}}, "float32 float32", [[1, 2, 3], 4]),
        ({"instances": ["é", ""]}, "object", [["é".encode(), b""]]),
        ({"instances": ["é", {"b64": "/wA="}]}, "object", [["é".encode(), b"\xff\x00"]]),
        ({"instances": [{"a": {"b64": "/wA="}}]}, "object", [[b"\xff\x00"]]),
        ({"inputs": {"b64": "/wA="}}, "object", [b"\xff\x00"]),
        (b'{"instances": ["\xff\xfe"]}', "object", [[b"\xff\xfe"]]),
        ({"instances": [257, -1]}, "uint8", [[1, 255]]),
        ({"instances": [40000]}, "int16", [[40000 - 65536]]),
        ({"instances": MANY}, "int32", [MANY]),
        ({"instances": [MANY]}, "float64", [[MANY]]),
    ],
    ids=itertools.count(),
)
def test_inputs_of_every_kind_are_read(body: Any, dtypes: str, expected: list[Any]) -> None:
    inputs = parse(body, **dict(zip("ab", dtypes.split(), strict=False))).inputs
    assert [array.tolist() for array in inputs.values()] == expected


@pytest.mark.parametrize(("text", "plain"), [("YQ", b"a"), ("YQ==", b"a"), ("Y Q\n==", b"a"), ("", b"")])
def test_base64_may_lack_padding_and_hold_spaces(text: str, plain: bytes) -> None:
    assert parse({"instances": [{"b64": text}]}, s="object").inputs["s"].tolist() == [plain]


@pytest.mark.parametrize(
    ("dtype", "value", "kind"),
    [
        ("float32", '"1"', "String"),
        ("float32", "true", "True"),
        ("float64", "null", "Null"),
        ("int32", "1.0", "Number"),
        ("int32", "2147483648", "Number"),
        ("int8", "-2147483649", "Number"),
        ("int64", "9223372036854775808", "Number"),
        ("uint32", "-1", "Number"),
        ("uint32", "4294967296", "Number"),
        ("uint64", "-1", "Number"),
        ("int32", "false", "False"),
        ("bool", "1", "Number"),
        ("object", "1", "Number"),
    ],
)
def test_values_of_another_type_are_refused(dtype: str, value: str, kind: str) -> None:
    name = {"float32": "float", "float64": "double", "object": "string"}.get(dtype, dtype)
    complaint = f"JSON Value: {value} Type: {kind} is not of expected type: {name}"
    row = f"Failed to process element: 0 of 'instances' list. Error: INVALID_ARGUMENT: {complaint}"
    assert message(f'{{"inputs": [{value}]}}', x=dtype) == complaint
    assert message(f'{{"instances": [{value}]}}', x=dtype) == row


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_types_without_json_are_unimplemented(dtype: str) -> None:
    name = "half" if dtype == "float16" else dtype
    error = refusal({"inputs": [1]}, x=dtype)
    assert (error.code, error.message) == (
        "UNIMPLEMENTED",
        f"Conversion of JSON Value: 1 to type: {name}",
    )


A_AND_B = "as multiple input tensors required as per tensorinfo_map"
NO_TENSOR = "of 'instances' list. Error: INVALID_ARGUMENT:"
COMPLAINTS = {
    "": "JSON Parse error: The document is empty",
    "[1]": "JSON Value: [1] Is not object",
    '{"signature_name": 5}': "JSON Value: $ not formatted correctly. 'signature_name' key must be a string value.",
    '{"instances": [1], "inputs": [1]}': (
        "JSON Value: $ Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
    ),
    '{"instances": 5}': "JSON Value: $ Expecting 'instances' to be an list/array",
    '{"instances": []}': "JSON Value: $ No values in 'instances' array",
    "{}": "Missing 'inputs' or 'instances' key",
    '{"instances": [[1, 2], [3]]}': (
        f"Failed to process element: 1 {NO_TENSOR} Expecting tensor size: 2 but got: 1"
    ),
    '{"instances": [[[1], [2]], [[3, 4]]]}': (
        f"Failed to process element: 1 {NO_TENSOR} Expecting shape [2,1] but got: [1,2]"
    ),
    '{"instances": [{"x": 1}, 2]}': "Expecting object but got list at item 1 of input list",
    '{"instances": [1, {"x": 1}]}': "Expecting value/list but got object at item 1 of input list",
    '{"instances": [{"x": 1}, {"y": 1}]}': (
        f"Failed to process element: 1 key: y {NO_TENSOR} JSON object: does not have named input: y"
    ),
    '{"instances": [{"x": 1}, {}]}': (
        "Failed to process element: 1 of 'instances' list. JSON object: {} keys must be equal to: x"
    ),
    '{"inputs": {"y": 1}}': "Missing named input: x in 'inputs' object.",
    '{"inputs": [[1], 2]}': "JSON Value: 2 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
    '{"inputs": [1, [2]]}': "Encountered list at unexpected level: 1 expected < 1",
    '{"inputs": [[1, 2], [3]]}': "Encountered list at unexpected size: 1 at level: 1 expected size: 2",
    '{"inputs": {"x": [{"a": 1}]}}': 'JSON Value: {\n    "a": 1\n} Type: Object is not of expected type: float',
}
COMPLAINTS_OF_SEVERAL = {
    '{"instances": [1]}': f"instances is a plain list, but expecting list of objects {A_AND_B}",
    '{"inputs": [1]}': f"inputs is a plain value/list, but expecting an object {A_AND_B}",
    '{"instances": [{"b": 1}]}': (
        "Failed to process element: 0 of 'instances' list. JSON object: {\n    \"b\": 1\n} keys must be equal to: a,b"
    ),
}
COMPLAINTS_OF_STRINGS = {
    '{"inputs": [{"b64": "a"}]}': "Unable to base64 decode",
    '{"inputs": {"b64": "ä"}}': "Unable to base64 decode",
    '{"inputs": [{"b64": 5}]}': 'JSON Value: {\n    "b64": 5\n} not formatted correctly for base64 data',
}


@pytest.mark.parametrize(
    ("inputs", "body", "text"),
    [
        *(({"x": "float32"}, *row) for row in COMPLAINTS.items()),
        *(({"a": "float32", "b": "float32"}, *row) for row in COMPLAINTS_OF_SEVERAL.items()),
        *(({"s": "object"}, *row) for row in COMPLAINTS_OF_STRINGS.items()),
    ],
)
def test_complaints_are_tensorflow_servings(inputs: dict[str, str], body: str, text: str) -> None:
    """In which $ stands for the body."""
    shown = debug_text(json.loads(body)) if "$" in text else ""
    assert message(body, **inputs) == text.replace("$", shown)


def test_base64_is_no_object_of_several_inputs() -> None:
    assert message({"instances": [{"b64": "YQ=="}]}, a="object", b="object") == (
        "input size does not match signature: 1!=2 len({a}) != len({a,b}). Sent extra: {}. Missing but required: {b}."
    )


def test_checks_come_in_the_references_order() -> None:
    def not_found(name: str) -> Signature:
        raise StatusError("NOT_FOUND", name)

    for body in (b'{"signature_name": "other"}', b'{"signature_name": "other", "instances": 5}'):
        with pytest.raises(StatusError, match="NOT_FOUND: other"):
            parse_predict(body, not_found)
    with pytest.raises(StatusError, match="NOT_FOUND: serving_default"):
        parse_predict(b'{"signature_name": ""}', not_found)
    with pytest.raises(StatusError, match="must be a string"):
        parse_predict(b'{"signature_name": 1}', not_found)


def test_a_signature_without_inputs_is_refused_by_name() -> None:
    empty = Signature(name="s", method_name="", inputs=(), outputs=())
    with pytest.raises(StatusError, match="Failed to get input map for signature: DEFAULT"):
        parse_predict(b"{}", lambda name: empty)
    with pytest.raises(StatusError, match="Failed to get input map for signature: s"):
        parse_predict(b'{"signature_name": "s"}', lambda name: empty)


def test_deep_nests_are_refused_without_recursion() -> None:
    for depth in (64, 65, 900, 5000):
        body = b'{"instances": [' + b"[" * depth + b"]" * depth + b"]}"
        with pytest.raises(StatusError, match=r"dimensions|Nested too deeply"):
            parse_predict(body, lambda name: make_signature(x="float32"))


@pytest.mark.parametrize(
    "body",
    [
        r'{"\u006call": 1, "inputs": [false]}',
        r'{"inp\u0075ts": [true]}',
        '{"ul": 1, "inputs": [true, false]}',
    ],
)
def test_booleans_hidden_by_escapes_are_still_noticed(body: str) -> None:
    assert "is not of expected type: float" in message(body)


RANGES = {
    "int32": (-(2**31), 2**31),
    "uint8": (-(2**31), 2**31),
    "int64": (-(2**63), 2**63),
    "uint32": (0, 2**32),
    "uint64": (0, 2**64),
}
Leaf = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-5, 300),
    st.floats(allow_nan=True),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.builds(lambda raw: {"b64": base64.b64encode(raw).decode()}, st.binary(max_size=4)),
)
Nest = st.recursive(Leaf, lambda inner: st.lists(inner, max_size=3), max_leaves=12)
Regular = st.integers(0, 3).flatmap(
    lambda width: st.lists(
        st.lists(st.one_of(st.integers(-9, 300), st.floats(width=32)), min_size=width, max_size=width),
        min_size=1,
        max_size=4,
    )
)
Dtype = st.sampled_from(["float32", "float64", *RANGES, "bool", "object"])


class NotATensorError(Exception):
    pass


def _as_rapidjson_reads(digits: str) -> int | float:
    return int(digits) if -(2**63) <= int(digits) < 2**64 else float(digits)


def reference_leaf(value: Any, dtype: str) -> Any:
    if dtype == "object":
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict):
            return base64.b64decode(value["b64"])
    elif dtype == "bool" and isinstance(value, bool):
        return value
    elif dtype.startswith("float") and isinstance(value, int | float) and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            return np.float64(value).astype(dtype)
    elif dtype in RANGES and type(value) is int and RANGES[dtype][0] <= value < RANGES[dtype][1]:
        return np.array(value, object).astype(np.int32).astype(dtype) if dtype == "uint8" else value
    raise NotATensorError


def reference_tensor(value: Any, dtype: str) -> tuple[tuple[int, ...], list[Any]]:
    """Shape and leaves, by plain recursion; written apart from the code under test."""
    if not isinstance(value, list):
        return (), [reference_leaf(value, dtype)]
    parts = [reference_tensor(element, dtype) for element in value]
    if len({shape for shape, _ in parts}) > 1:
        raise NotATensorError
    inner = parts[0][0] if parts else ()
    return (len(value), *inner), [leaf for _, leaves in parts for leaf in leaves]


@settings(max_examples=150, deadline=None)
@given(value=st.one_of(Nest, Regular), dtype=Dtype, by_row=st.booleans())
def test_every_nest_gives_the_reference_tensor_or_an_error(value: Any, dtype: str, by_row: bool) -> None:
    if by_row and not (isinstance(value, list) and value):
        value = [value]
    key = "instances" if by_row else "inputs"
    body = json.dumps({key: value})
    value = json.loads(body, parse_int=_as_rapidjson_reads)[key]
    try:
        shape, leaves = reference_tensor(value, dtype)
    except NotATensorError:
        assert refusal(body, x=dtype).code == "INVALID_ARGUMENT"
        return
    tensor = parse(body, x=dtype).inputs["x"]
    assert tensor.shape == shape
    assert tensor.dtype == np.dtype(dtype)
    np.testing.assert_equal(tensor.ravel().tolist(), leaves)


SIGNATURE = signature("serving_default", [spec("x", "float32", None)], [spec("y")])
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
ROWS = st.lists(st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS), max_size=3)
NESTS = st.recursive(
    st.one_of(NUMBERS, st.booleans(), st.none(), st.text(max_size=2)),
    lambda values: st.lists(values, max_size=3),
    max_leaves=8,
)


def by_the_long_way(body: bytes) -> Any:
    try:
        return parse_predict(body, lambda name: SIGNATURE)[2]["x"]
    except StatusError as error:
        return error


@settings(deadline=None)
@given(st.one_of(ROWS, NESTS), st.sampled_from([None, 1]))
def test_what_is_read_is_what_the_long_way_reads(instances: Any, indent: int | None) -> None:
    body = json.dumps({"instances": instances}, indent=indent).encode()
    rows = float_rows_reader()(body)
    if rows is not None:
        expected = by_the_long_way(body)
        assert (rows.dtype, rows.shape) == (expected.dtype, expected.shape)
        assert rows.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b'{"instances": [[0.1, 2], [3, 1e-60]]}',
        b'{"instances": [ \n [ 1 , 2 ] \t]}',
        b'{"signature_name": "serving_default", "instances": [[1, 2]]}',
        b'{"inst\\u0061nces": [[-0.0, -0]]}',
        b'{"instances": [[1e300, -1e39]]}',
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_matrix_of_numbers_is_read(body: bytes) -> None:
    rows = float_rows_reader()(body)
    assert rows is not None
    assert rows.tobytes() == by_the_long_way(body).tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[[1]]",
        b"{}",
        b'{"inputs": [[1]]}',
        b'{"instances": 5}',
        b'{"instances": "0"}',
        b'{"instances": null}',
        b'"instances"',
        b'{"instances": []}',
        b'{"instances": [1, 2]}',
        b'{"instances": [[[1], [2]]]}',
        b'{"instances": [[[1], [2]], [[3], [4]]]}',
        b'{"instances": [[1, 2, 3], [4]]}',
        b'{"instances": [[1, 2], [[3], [4]]]}',
        b'{"instances": [[1, 2], 3]}',
        b'{"instances": [[true]]}',
        b'{"instances": [["1"]]}',
        b'{"instances": [[null]]}',
        b'{"instances": [{"x": [1]}]}',
        b'{"instances": [[NaN]]}',
        b'{"instances": [[18446744073709551616]]}',
        b'{"instances": [[1]]} text',
        b'{"instances": [[1]], "instances": [[2]]}',
        b'{"instances": [[1]], "inputs": [[2]]}',
        b'{"instances": [[1]], "signature_name": "other"}',
        b'{"instances": [[1]], "signature_name": 1}',
        b'{"instances": [["\xff"]]}',
    ],
)
def test_all_else_is_left_to_the_long_way(body: bytes) -> None:
    read = float_rows_reader()
    assert read(body) is None
    assert read(b'{"instances": [[1]]}') is not None


def test_importing_silences_the_warning_of_that_cast() -> None:
    code = (
        "from batchtune.server.rest.json.predict_request import float_rows_reader\n"
        "assert float_rows_reader()(b'{\"instances\": [[1e300]]}') is not None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_only_one_matrix_of_float32_takes_the_short_way() -> None:
    assert takes_float_rows((spec("x", "float32", 3),))
    assert not takes_float_rows((spec("x", "float32"),))
    assert not takes_float_rows((spec("x", "float32", 3, 3),))
    assert not takes_float_rows((spec("x", "int32", 3),))
    assert not takes_float_rows((spec("x", "float32", 3), spec("y", "float32", 3)))


def matrix_model(version: int) -> FakeServable:
    signed = signature("serving_default", [spec("x", "float32", None)], [spec("y", "float32", None)])
    run = {"serving_default": (signed, lambda inputs: {"y": inputs["x"] + version})}
    return FakeServable(run, version=version)


def test_a_matrix_is_answered_by_the_version_that_serves_now() -> None:
    body = {"instances": [[1, 2.5], [3, 4]]}
    with running_rest() as rest:
        rest.models.servable = matrix_model(1)
        assert rest.ask(body).json() == {"predictions": [[2.0, 3.5], [4.0, 5.0]]}
        assert "Expecting tensor size: 2 but got: 1" in rest.ask({"instances": [[1, 2], [3]]}).json()["error"]
        assert rest.ask({"instances": [[1]]}, "/v1/models/x:predict").status_code == 404
        old = weakref.ref(rest.models.servable)
        rest.models.servable = matrix_model(2)
        assert rest.ask(body).json() == {"predictions": [[3.0, 4.5], [5.0, 6.0]]}
        gc.collect()
        assert old() is None
