"""Does a gRPC message of at most 1 MB hold up the event loop, or take far more memory than its bytes?"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from batchtune.server.grpc_api.services import make_grpc_api
from batchtune.server.metrics import Metrics
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.hostile_attacks import PREDICT, expanding, predict_of
from tests.server.server_fakes import HALF_PLUS_TWO, FakeModels, FakeServable, signature, spec

CALLS_MAX = 60_000
"""Of Python and C functions, at 0.1-0.5 µs each; one for every byte or field of 1 MB would be 300,000 and more."""
MEMORY_MAX = 96 << 20
CLASSIFIER = signature(
    "serving_default", [spec("inputs", "object")], [spec("scores", "float32", 1)], "classify"
)


class Call(GrpcCall):
    """Remembers its answer."""

    def __init__(self, path: str, message: bytes) -> None:
        self.answer = ""
        head: Any = type("Head", (), {"path": path, "metadata": ()})()
        super().__init__(self, 1, head, None)  # type: ignore[arg-type]
        self.message = message

    def send_reply(self, call: GrpcCall, message: bytes) -> None:
        self.answer = "OK"

    def send_failure(self, call: Any, code: str, message: str) -> None:
        self.answer = code


def dispatch(call: Call, servable: FakeServable) -> None:
    """Dispatch a call, and let the loop turn until it is answered."""

    async def scenario() -> None:
        start, _, _ = make_grpc_api(FakeModels(servable), Metrics(), ServerFlags())
        start(call)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(scenario())


def scores(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"scores": np.zeros((len(inputs["inputs"]), 1), np.float32)}


def nothing(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": np.zeros(1, np.float32)}


@pytest.mark.parametrize("number", range(len(expanding())))
def test_a_megabyte_is_read_in_few_steps_and_little_memory(number: int) -> None:
    path, message = expanding()[number]
    assert len(message) <= 1_100_000
    run = (HALF_PLUS_TWO, nothing) if path == PREDICT else (CLASSIFIER, scores)

    async def scenario() -> None:
        start, _, _ = make_grpc_api(
            FakeModels(FakeServable({"serving_default": run})), Metrics(), ServerFlags()
        )
        for _ in range(3):  # the second of a length may leave a template, which the third fits
            call, calls = Call(path, message), 0

            def count(*_: Any) -> None:
                nonlocal calls
                calls += 1

            tracemalloc.start()
            sys.setprofile(count)
            start(call)
            sys.setprofile(None)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert calls < CALLS_MAX
            assert peak_bytes < MEMORY_MAX
            for _ in range(5):
                await asyncio.sleep(0)
            assert call.answer

    asyncio.run(scenario())


def test_what_fits_is_still_read() -> None:
    """As many inputs, examples and strings as a large model might take."""
    many = {f"x{number}": np.zeros(1, np.float32) for number in range(1_500)}
    wide = signature("serving_default", [spec(name) for name in many], [spec("y")])
    call = Call(PREDICT, encode_predict_request("m", "", many))
    dispatch(call, FakeServable({"serving_default": (wide, nothing)}))
    assert call.answer == "OK"


@pytest.mark.parametrize(
    ("size", "float_values", "answer"),
    [
        (1 << 20, 1, "OK"),
        ((1 << 20) + 1, 1, "INVALID_ARGUMENT"),
        (1 << 28, 1, "INVALID_ARGUMENT"),
        (1 << 28, 0, "INVALID_ARGUMENT"),
        (1 << 16, 2, "OK"),
        ((1 << 16) + 1, 2, "INVALID_ARGUMENT"),
    ],
)
def test_few_values_stand_for_megabytes_at_most(size: int, float_values: int, answer: str) -> None:
    """A model copies what it is given, and a request waits with what was made of it."""
    call = Call(PREDICT, predict_of(1, size, float_values))
    servable = FakeServable({"serving_default": (HALF_PLUS_TWO, nothing)})
    dispatch(call, servable)
    assert call.answer == answer
    assert len(servable.asked) == (answer == "OK")


@pytest.mark.parametrize(
    ("shape", "answer"),
    [
        ((1 << 20, 0), "OK"),
        (((1 << 20) + 1, 0), "INVALID_ARGUMENT"),
        ((1 << 40, 0), "INVALID_ARGUMENT"),
        ((0, 1 << 40), "INVALID_ARGUMENT"),
    ],
)
def test_rows_without_values_are_counted_too(shape: tuple[int, ...], answer: str) -> None:
    """They take no memory, but each has a row in the answer."""
    call = Call(PREDICT, encode_predict_request("m", "", {"x": np.empty(shape, np.float32)}))
    wide = signature("serving_default", [spec("x", "float32", None)], [spec("y")])
    servable = FakeServable({"serving_default": (wide, nothing)})
    dispatch(call, servable)
    assert call.answer == answer
    assert len(servable.asked) == (answer == "OK")
