"""Is a matrix of floats that takes the short way the same as by the long one, and everything else left to that?"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.server.rest.json.predict_request import float_rows_reader, parse_predict, takes_float_rows
from batchtune.wire.status import StatusError
from tests.server.server_fakes import FakeServable, running_rest, signature, spec

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
