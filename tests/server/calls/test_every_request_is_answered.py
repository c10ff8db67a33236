"""Does every request get an answer, also where the server itself has a fault?"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchtune.server.calls.pending_call import Deadlines, PendingCalls, deliver_to
from batchtune.server.metrics import Metrics
from batchtune.wire.status import StatusError


def test_an_answer_that_cannot_be_written_becomes_an_error(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def unwritable(outputs: Any, error: StatusError | None) -> None:
        if error is None:
            raise TypeError("no such dtype")
        told.append(error.code)

    def hopeless(_outputs: Any, _error: Any) -> None:
        raise RuntimeError("fails twice")

    async def scenario() -> None:
        deliver = deliver_to(asyncio.get_running_loop())
        finished = asyncio.Event()
        deliver([(hopeless, {}, None), (unwritable, {}, None), (lambda *_: finished.set(), {}, None)])
        await asyncio.wait_for(finished.wait(), 20)

    asyncio.run(scenario())
    assert told == ["INTERNAL"]
    assert caplog.text.count("an answer could not be given") == 3


class Call:
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.queued: Any = None
        self.submitted_ns = 0

    def done(self, outputs: Any, error: StatusError | None) -> None:
        self.ended.append("OK" if error is None else error.code)

    def fail(self, error: StatusError) -> None:
        self.ended.append(error.code)

    def expire(self) -> None:
        self.ended.append("DEADLINE_EXCEEDED")


def test_a_request_that_cannot_be_submitted_does_not_hold_up_the_others() -> None:
    calls = [Call(), Call(), Call()]

    def submit(name: str, _inputs: Any, _names: Any, _deadline_ns: Any, done: Any) -> None:
        if name == "refused":
            raise StatusError("UNAVAILABLE", "full")
        if name == "surprise":
            raise ZeroDivisionError
        done({}, None)

    before_ns = time.monotonic_ns()

    async def scenario() -> None:
        servable, models = SimpleNamespace(submit=submit), SimpleNamespace(names=tuple)
        turn = PendingCalls(
            *(Metrics(), "GRPC", models),  # type: ignore[arg-type]
            reply=lambda *_: None,
            refuse=lambda *_: None,
            is_gone=lambda _: False,
        )
        for call, name in zip(calls, ("surprise", "refused", "taken"), strict=True):
            turn.submit((call, servable, name, {"x": np.zeros(1)}, None, None, call.done))  # type: ignore[arg-type]
        await asyncio.sleep(0)  # the turn ends

    asyncio.run(scenario())
    assert [call.ended for call in calls] == [["INTERNAL"], ["UNAVAILABLE"], ["OK"]]
    assert before_ns <= calls[0].submitted_ns == calls[1].submitted_ns == calls[2].submitted_ns


def test_a_deadline_that_has_passed_already_replaces_none_that_is_watched() -> None:
    late, watched = [Call() for _ in range(20)], [Call() for _ in range(20)]

    async def scenario() -> None:
        deadlines = Deadlines()
        now_ns = time.monotonic_ns()
        for number in range(20):
            deadlines.add(watched[number], now_ns + (number << 18))
            deadlines.add(late[number], now_ns - 10**9 + number * 10**7)
        while not all(call.ended for call in late + watched):  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert {tuple(call.ended) for call in late + watched} == {("DEADLINE_EXCEEDED",)}


def test_calls_that_end_in_time_leave_nothing_behind() -> None:
    async def scenario() -> None:
        deadlines, now_ns = Deadlines(), time.monotonic_ns()
        calls = [Call() for _ in range(1000)]
        for number, call in enumerate(calls):
            deadlines.add(call, now_ns + (number + 10) * 10**9)
        for number, call in enumerate(calls):
            deadlines.discard(call, now_ns + (number + 10) * 10**9)
            deadlines.discard(call, now_ns + (number + 10) * 10**9)
        assert not deadlines._slots

    asyncio.run(scenario())
