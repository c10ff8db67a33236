"""Does anything sent to either front end, however bent, end in one answer or one worded refusal, soon and in bounds?

A few thousand inputs; for more, `BATCHTUNE_FUZZ=1000000:7 pytest --timeout 0 tests/server/fuzz`, of seed 7.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.server.grpc_api.predict import PredictRequests
from batchtune.server.grpc_api.services import make_grpc_api
from batchtune.server.metrics import Metrics
from batchtune.server.rest.json.answers import error_answer
from batchtune.server.rest.json.predict_request import float_rows_reader, parse_examples, parse_predict
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import GRPC_CODES, StatusError
from batchtune.wire.tfserving.messages import ClassificationRequest, MultiInferenceRequest, PredictResponse
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.grpc_api.test_predict_messages import outcome
from tests.server.server_fakes import FakeModels, FakeServable, RecordedCall, signature, spec

INPUTS, SEED = map(int, os.environ.get("BATCHTUNE_FUZZ", "4000:20").split(":"))
GROWTH_BYTES_MAX = 64 << 20
INPUT_S_MAX = 1.0


def bent(corpus: Sequence[bytes], tokens: Sequence[bytes], pick: random.Random) -> bytes:
    """One of a corpus, bent, cut, repeated and spliced, with tokens of the language thrown in."""
    value = bytearray(pick.choice(corpus))
    for _ in range(pick.choice((1, 1, 1, 2, 3, 8))):
        at = pick.randrange(len(value) + 1)
        to = min(len(value), at + pick.choice((1, 2, 4, 16)))
        match pick.randrange(7):
            case 0 if at < len(value):
                value[at] ^= 1 << pick.randrange(8)
            case 1 if at < len(value):
                value[at] = pick.choice((0, 1, 0x7F, 0x80, 0xFF, pick.randrange(256)))
            case 2:
                del value[at:to]
            case 3:
                value[at:at] = value[at:to] * pick.choice((1, 2, 20))
            case 4:
                other = pick.choice(corpus)
                value[at:] = other[pick.randrange(len(other) + 1) :]
            case 5:
                value[at:at] = pick.choice(tokens)
            case _:
                del value[at:]
    return bytes(value[:4096])


def fuzz(check: Callable[[bytes], None], corpus: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    pick, resident = random.Random(SEED), 0
    for done in range(INPUTS):
        value = bent(corpus, tokens, pick)
        began_s = time.monotonic()
        try:
            check(value)
        except Exception as error:
            raise AssertionError(f"input {done} failed: {value!r}") from error
        took_s = time.monotonic() - began_s
        assert took_s < INPUT_S_MAX, f"input {done} took {took_s:.2f} s: {value!r}"
        if done == min(20_000, INPUTS // 2):
            resident = resident_bytes()
    growth = resident_bytes() - resident
    assert growth < GROWTH_BYTES_MAX, f"memory grew by {growth >> 20} MiB over {INPUTS} inputs"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


BODIES = [
    b'{"instances": [[1.0, 2.5, -3e5], [4, 5, 6]]}',
    b'{"signature_name": "serving_default", "inputs": {"x": [[1, 2], [3, 4]], "y": ["a", {"b64": "AAE="}]}}',
    b'{"instances": [{"x": [1, 2], "y": {"b64": "YQ=="}}, {"x": [3, 4], "y": "text"}]}',
    b'{"inputs": [NaN, Infinity, -Infinity, Inf, 1e39, 123456789012345678901234567890]}',
    b'{"instances": [true, false, null, "\\u00e9\\ud83d\\ude00\\n", {}, [], [[[[]]]]]}',
    b'{"signature_name": "s", "context": {"c": 1}, "examples": [{"f": [1.5, 2], "t": ["x"], "b": {"b64": "/w=="}}]}',
    '{"instances": ["é😀", ""], "é": {"a": [1, {"b": [2]}]}}'.encode(),
    b'{"inputs": ' + b"[" * 30 + b"1" + b"]" * 30 + b"}",
]
JSON_TOKENS = [
    *rb'{ } [ ] , : " \ \u \ud800 \udc00 null true false NaN Infinity -Inf 1e999 -0 1e-400 0.1'.split(),
    *b'18446744073709551616 "inputs" "instances" "b64" "signature_name" "examples"'.split(),
    *(b"\xff", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf", b"9" * 400, b" " * 50),
    *(b"[" * 70, b"]" * 70, b"[" * 1100, b'{"a":' * 600),
]
DTYPES = ("float32", "float64", "int8", "int32", "int64", "uint64", "bool", "object", "float16")


def of_dtypes(*dtypes: str) -> Signature:
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=None) for name, dtype in zip("xy", dtypes, strict=False)
    ]
    return Signature(name="s", method_name="", inputs=tuple(specs), outputs=())


SIGNATURES = [*map(of_dtypes, DTYPES), of_dtypes("float32", "object"), of_dtypes("object", "int64")]


def test_bent_json_bodies_are_read_or_refused() -> None:
    read_float_rows = float_rows_reader()

    def refused(error: StatusError) -> None:
        assert error.code in {"INVALID_ARGUMENT", "UNIMPLEMENTED"}, error
        text = json.loads(error_answer(error.message))["error"]
        assert 0 < len(text) < 6000, text

    def check(body: bytes) -> None:
        """Read the body as every kind of request."""
        for chosen in (SIGNATURES[len(body) % len(SIGNATURES)], SIGNATURES[0]):
            try:
                _, _, inputs = parse_predict(body, lambda _name, one=chosen: one)  # type: ignore[misc]
            except StatusError as error:
                refused(error)
            else:
                dtypes = {spec.name: spec.dtype for spec in chosen.inputs}
                assert {name: array.dtype.name for name, array in inputs.items()} == dtypes
        try:
            parse_examples(body)[1].SerializeToString()
        except StatusError as error:
            refused(error)
        rows = read_float_rows(body)
        if rows is not None:
            expected = parse_predict(body, lambda _name: SIGNATURES[0])[2]["x"]
            assert (rows.shape, rows.tobytes()) == (expected.shape, expected.tobytes())

    fuzz(check, BODIES, JSON_TOKENS)


METHODS = ("Predict", "Predict", "Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata")
WIRE_TOKENS = [
    *(
        b"\x00",
        b"\xff",
        b"\x80" * 11,
        b"\xff" * 10 + b"\x01",
        b"\x0a\x00",
        b"\x12\x02\x08\x01",
        b"\x0b",
        b"\x0c",
    ),
    *(
        b"\x22\xff\xff\xff\xff\x07",
        b"\x2a\x04\x00\x00\x80\x3f",
        b"\x2d\x00\x00\x80\x3f",
        b"\x08\x07",
        b"\x08\x65",
    ),
    *(
        b"\x12\x0b\x12\x09\x08\x80\x80\x80\x80\x80\x80\x80\x01",
        b"\x12\x04\x12\x02\x08\x02",
        b"\x1a\x01y",
        b"m",
    ),
]


def messages() -> list[bytes]:
    floats, ids = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, np.arange(3)
    texts = {"ids": ids, "t": np.array([b"a", b"\xff\x00"], object)}
    classify = ClassificationRequest()
    classify.model_spec.name = "m"
    classify.input.example_list.examples.add().features.feature["f"].int64_list.value.append(3)
    multi = MultiInferenceRequest(input=classify.input)
    multi.tasks.add(method_name="tensorflow/serving/classify").model_spec.name = "m"
    return [
        encode_predict_request("m", "serving_default", floats),
        encode_predict_request("m", "", floats, as_content=False, version=123, output_filter=("y",)),
        encode_predict_request("m", "two", texts),
        encode_predict_request("m", "two", texts, as_content=False),
        classify.SerializeToString(),
        multi.SerializeToString(),
    ]


def test_bent_grpc_messages_get_one_answer_each_with_and_without_templates() -> None:
    def echo(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": next(iter(inputs.values()))}

    runs = {"serving_default": [spec("x")], "two": [spec("ids"), spec("t")]}
    model = FakeServable(
        {name: (signature(name, inputs, [spec("y")]), echo) for name, inputs in runs.items()}
    )
    dispatch = make_grpc_api(FakeModels(model), Metrics(), ServerFlags())[0]
    warm = PredictRequests()

    async def ask(call: RecordedCall) -> None:
        dispatch(call)
        for _ in range(3):
            if not call.answers:
                await asyncio.sleep(0)

    def check(message: bytes) -> None:
        assert outcome(warm, message) == outcome(PredictRequests(), message)
        method = METHODS[len(message) % len(METHODS)]
        call = RecordedCall(f"/tensorflow.serving.PredictionService/{method}", message)
        loop.run(ask(call))
        model.asked.clear()
        ((code, answer),) = call.answers
        assert code in GRPC_CODES
        if code == "OK" and method == "Predict":
            PredictResponse.FromString(answer)
        elif code != "OK":
            assert 0 < len(answer) <= 1024 + len("...TRUNCATED")

    with asyncio.Runner() as loop:
        fuzz(check, messages(), WIRE_TOKENS)
