"""Does any JSON body, however bent, end in inputs or in a worded refusal?

python tests/server/fuzz/fuzz_json.py [--inputs 1000000] [--seconds 180] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import time

from batchtune.server.rest.json.answers import error_answer
from batchtune.server.rest.json.predict_request import float_rows_reader, parse_examples, parse_predict
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from tests.server.fuzz.fuzz_mutations import Mutator, run

CORPUS = [
    b'{"instances": [[1.0, 2.5, -3e5], [4, 5, 6]]}',
    b'{"signature_name": "serving_default", "inputs": {"x": [[1, 2], [3, 4]], "y": ["a", {"b64": "AAE="}]}}',
    b'{"instances": [{"x": [1, 2], "y": {"b64": "YQ=="}}, {"x": [3, 4], "y": "text"}]}',
    b'{"inputs": [NaN, Infinity, -Infinity, Inf, 1e39, 123456789012345678901234567890]}',
    b'{"instances": [true, false, null, "\\u00e9\\ud83d\\ude00\\n", {}, [], [[[[]]]]]}',
    b'{"signature_name": "s", "context": {"c": 1}, "examples": [{"f": [1.5, 2], "t": ["x"], "b": {"b64": "/w=="}}]}',
    '{"instances": ["é😀", ""], "é": {"a": [1, {"b": [2]}]}}'.encode(),
    b'{"inputs": ' + b"[" * 30 + b"1" + b"]" * 30 + b"}",
]
TOKENS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"\\u",
        b"\\ud800",
        b"\\udc00",
        b"null",
        b"true",
        b"false",
    ),
    *(b"NaN", b"Infinity", b"-Inf", b"1e999", b"-0", b"1e-400", b"0.1", b"9" * 400, b"18446744073709551616"),
    *(
        b'"inputs"',
        b'"instances"',
        b'"b64"',
        b'"signature_name"',
        b'"examples"',
        b"\xff",
        b"\xed\xa0\x80",
        b"\0",
    ),
    *(b"[" * 70, b"]" * 70, b"[" * 1100, b'{"a":' * 600, b" " * 50, b"\xef\xbb\xbf"),
]
DTYPES = ("float32", "float64", "int8", "int32", "int64", "uint64", "bool", "object", "float16")
CODES = {"INVALID_ARGUMENT", "UNIMPLEMENTED"}


def signature(*dtypes: str) -> Signature:
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=None) for name, dtype in zip("xy", dtypes, strict=False)
    ]
    return Signature(name="s", method_name="", inputs=tuple(specs), outputs=())


SIGNATURES = [
    *(signature(dtype) for dtype in DTYPES),
    signature("float32", "object"),
    signature("object", "int64"),
]
READ_FLOAT_ROWS = float_rows_reader()


def check(body: bytes) -> None:
    """Read the body as every kind of request; raise unless each ends in a value or a StatusError that is sound."""
    for chosen in (SIGNATURES[len(body) % len(SIGNATURES)], SIGNATURES[0]):
        try:
            _, _, inputs = parse_predict(body, lambda _name, one=chosen: one)  # type: ignore[misc]
        except StatusError as error:
            check_error(error)
        else:
            dtypes = {spec.name: spec.dtype for spec in chosen.inputs}
            assert {name: array.dtype.name for name, array in inputs.items()} == dtypes
    try:
        parse_examples(body)[1].SerializeToString()
    except StatusError as error:
        check_error(error)
    rows = READ_FLOAT_ROWS(body)
    if rows is not None:
        expected = parse_predict(body, lambda _name: SIGNATURES[0])[2]["x"]
        assert (rows.shape, rows.tobytes()) == (expected.shape, expected.tobytes())


def check_error(error: StatusError) -> None:
    assert error.code in CODES, error
    text = json.loads(error_answer(error.message))["error"]
    assert 0 < len(text) < 6000, text


def fuzz(*, inputs: int, seconds: float, seed: int) -> int:
    """Check so many inputs, or until time is up; the number done."""
    return run(check, Mutator(CORPUS, TOKENS, seed), inputs=inputs, seconds=seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began_s = time.monotonic()
    done = fuzz(inputs=options.inputs, seconds=options.seconds, seed=options.seed)
    print(f"{done} bodies in {time.monotonic() - began_s:.0f} s, seed {options.seed}: no failure")
