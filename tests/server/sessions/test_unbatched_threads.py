"""How many requests run at the same time when batching is off: as many as a model's own batcher waits for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from batchtune.server.backends.model import Tensors
from batchtune.server.metrics import Metrics
from batchtune.server.sessions.pool import BatchingSettings, SessionPool
from batchtune.server.sessions.unbatched import HANDLERS_MAX, handlers_at_least
from batchtune.wire.signature import Signature, TensorSpec
from tests.server.sessions.session_fakes import Answer, deliver

X, Y = (TensorSpec(name=name, dtype="int32", shape=(None,)) for name in "xy")
SIGNATURE = Signature(name="s", method_name="p", inputs=(X,), outputs=(Y,))


def test_a_model_that_batches_inside_gets_as_many_requests_at_once_as_it_waits_for() -> None:
    """Every run waits for all the others, as in a batch of the graph that closes when it is full."""
    count = handlers_at_least() + 5
    together = threading.Barrier(count)

    def run(inputs: Tensors) -> Tensors:
        together.wait(10)
        return {"y": inputs["x"]}

    pool = SessionPool(BatchingSettings(), observer=Metrics(), deliver=deliver)
    session = pool.open(SIGNATURE, run, parameters=None, at_once=count)
    answers = [Answer() for _ in range(count)]
    for answer in answers:
        session.submit({"x": np.ones(1, np.int32)}, None, None, answer)
    pool.close()
    assert [answer.error for answer in answers] == [None] * count


@pytest.mark.parametrize(("at_once", "expected"), [(0, handlers_at_least()), (10**9, HANDLERS_MAX)])
def test_other_models_have_the_usual_threads_and_none_has_any_number(at_once: int, expected: int) -> None:
    pool = SessionPool(BatchingSettings(), observer=Metrics(), deliver=deliver)
    pool.open(SIGNATURE, lambda inputs: inputs, parameters=None, at_once=at_once)
    assert list(pool._handlers) == [expected]
    pool.close()
