"""Does a gRPC message of at most 1 MB hold up the event loop, or take far more memory than its bytes?"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchtune.server.grpc_api.services import make_grpc_api
from batchtune.server.metrics import Metrics
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.hostile_attacks import PREDICT, expanding, predict_of
from tests.server.server_fakes import HALF_PLUS_TWO, FakeModels, FakeServable, RecordedCall, signature, spec
from tests.wire.wire_peers import turns

CALLS_MAX = 60_000
"""Of Python and C functions, at 0.1-0.5 µs each; one for every byte or field of 1 MB would be 300,000 and more."""
MEMORY_MAX = 96 << 20
CLASSIFIER = signature(
    "serving_default", [spec("inputs", "object")], [spec("scores", "float32", 1)], "classify"
)


def starting(servable: FakeServable) -> Callable[[GrpcCall], None]:
    return make_grpc_api(FakeModels(servable), Metrics(), ServerFlags())[0]


async def answered(servable: FakeServable, message: bytes) -> str:
    """The code with which a Predict ends, after which the model was asked or not."""
    call = RecordedCall(PREDICT, message)
    starting(servable)(call)
    await turns(5)
    ((code, _),) = call.answers
    assert len(servable.asked) == (code == "OK")
    return code


def scores(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"scores": np.zeros((len(inputs["inputs"]), 1), np.float32)}


def nothing(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": np.zeros(1, np.float32)}


@pytest.mark.parametrize("number", range(len(expanding())))
async def test_a_megabyte_is_read_in_few_steps_and_little_memory(number: int) -> None:
    path, message = expanding()[number]
    assert len(message) <= 1_100_000
    run = (HALF_PLUS_TWO, nothing) if path == PREDICT else (CLASSIFIER, scores)

    start = starting(FakeServable({"serving_default": run}))
    for _ in range(3):  # the second of a length may leave a template, which the third fits
        call, calls = RecordedCall(path, message), 0

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
        await turns(5)
        assert call.answers


async def test_what_fits_is_still_read() -> None:
    """As many inputs, examples and strings as a large model might take."""
    many = {f"x{number}": np.zeros(1, np.float32) for number in range(1_500)}
    wide = signature("serving_default", [spec(name) for name in many], [spec("y")])
    servable = FakeServable({"serving_default": (wide, nothing)})
    assert await answered(servable, encode_predict_request("m", "", many)) == "OK"


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
async def test_few_values_stand_for_megabytes_at_most(size: int, float_values: int, answer: str) -> None:
    """A model copies what it is given, and a request waits with what was made of it."""
    servable = FakeServable({"serving_default": (HALF_PLUS_TWO, nothing)})
    assert await answered(servable, predict_of(1, size, float_values)) == answer


@pytest.mark.parametrize(
    ("shape", "answer"),
    [
        ((1 << 20, 0), "OK"),
        (((1 << 20) + 1, 0), "INVALID_ARGUMENT"),
        ((1 << 40, 0), "INVALID_ARGUMENT"),
        ((0, 1 << 40), "INVALID_ARGUMENT"),
    ],
)
async def test_rows_without_values_are_counted_too(shape: tuple[int, ...], answer: str) -> None:
    """They take no memory, but each has a row in the answer."""
    message = encode_predict_request("m", "", {"x": np.empty(shape, np.float32)})
    wide = signature("serving_default", [spec("x", "float32", None)], [spec("y")])
    assert await answered(FakeServable({"serving_default": (wide, nothing)}), message) == answer
