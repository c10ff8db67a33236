"""Retrying when the queue is full, and the limit on concurrent requests."""

from __future__ import annotations

import threading

import pytest

from batchtune.batching.parameters import BatchingParameters
from batchtune.errors import UsageError
from batchtune.server.models.servable import ConcurrencyLimit
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier, RetrierOptions
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.startup import concurrency_limit
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock


class Queue:
    """Refuses with `codes` in turn, then accepts; `errors` are what was told of."""

    def __init__(self, *codes: str) -> None:
        self.codes = list(codes)
        self.attempts = 0
        self.tasks: list[object] = []
        self.errors: list[StatusError] = []

    def schedule(self, task: object) -> None:
        self.attempts += 1
        if self.codes:
            raise StatusError(self.codes.pop(0), f"attempt {self.attempts}")
        self.tasks.append(task)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.mark.parametrize(
    ("codes", "max_time_micros", "attempts", "tasks", "errors"),
    [
        (["UNAVAILABLE"] * 2, 1000, [0, 1, 2, 3, 3, 3], ["task"], []),
        (["UNAVAILABLE"] * 99, 300, [0, 1, 2, 2, 2, 2], [], ["UNAVAILABLE: attempt 2"]),
        (["INVALID_ARGUMENT"], 1000, [0, 1, 1, 1, 1, 1], [], ["INVALID_ARGUMENT: attempt 1"]),
    ],
    ids=["until it is taken", "while another delay is within the limit", "no other error"],
)
def test_a_task_refused_as_unavailable_is_tried_again_after_the_delay(
    codes: list[str],
    max_time_micros: int,
    attempts: list[int],
    tasks: list[str],
    errors: list[str],
    clock: ManualClock,
) -> None:
    options = RetrierOptions(max_time_micros=max_time_micros, retry_delay_micros=100)
    retrier = BatchSchedulerRetrier(options, clock=clock)
    queue = Queue(*codes)
    retrier.schedule_later(queue, "task", queue.errors.append)
    seen = []
    for micros in (99, 1, 100, 100, 100, 100):
        clock.advance(micros)
        seen.append(queue.attempts)
    retrier.close()
    assert (seen, queue.tasks, list(map(str, queue.errors))) == (attempts, tasks, errors)


@pytest.mark.parametrize(
    ("max_time_micros", "retry_delay_micros", "retries"),
    [(1, 1, False), (50, 100, False), (100, 100, False), (2, 1, True), (201, 100, True), (10, 4, True)],
)
def test_a_time_that_holds_no_pause_allows_no_retry(
    max_time_micros: int, retry_delay_micros: int, retries: bool
) -> None:
    """As BatchSchedulerRetrier::Schedule, which looks at the time before it pauses for the first time."""
    options = RetrierOptions(max_time_micros=max_time_micros, retry_delay_micros=retry_delay_micros)
    retrier = BatchSchedulerRetrier(options)
    assert retrier.retries is retries
    retrier.close()


def test_who_waits_for_the_retries_waits_for_those_under_way_only(clock: ManualClock) -> None:
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=10**9), clock=clock)
    retrier.wait_until_idle(60)  # returns at once
    retrier.schedule_later(Queue("UNAVAILABLE"), "task", pytest.fail)
    waiting = threading.Thread(target=retrier.wait_until_idle, args=(60,))
    waiting.start()
    clock.advance(100)
    clock.settle()
    assert waiting.is_alive()
    clock.advance(100)
    waiting.join(10)
    assert not waiting.is_alive()
    retrier.close()


def test_closing_refuses_what_still_waits_and_what_comes_later(clock: ManualClock) -> None:
    retrier = BatchSchedulerRetrier(clock=clock)
    errors: list[StatusError] = []
    retrier.schedule_later(Queue(), "task", errors.append)
    retrier.close()
    retrier.schedule_later(Queue(), "task", errors.append)
    assert [error.code for error in errors] == ["UNAVAILABLE"] * 2


@pytest.mark.parametrize("name", ["max_time_micros", "retry_delay_micros"])
def test_negative_options_are_refused_with_the_reference_text(name: str) -> None:
    with pytest.raises(StatusError) as caught:
        BatchSchedulerRetrier(RetrierOptions(**{name: -1}))
    assert caught.value.message == f"{name} must be non-negative; was -1"


def test_rest_requests_beyond_the_limit_wait_in_order() -> None:
    limit = ConcurrencyLimit(1)
    started: list[str] = []
    for name in "abc":
        limit.enter_or_wait(lambda name=name: started.append(name))
    assert (started, len(limit.waiting)) == (["a"], 2)
    limit.leave()
    limit.leave()
    assert (started, limit.inside) == (["a", "b", "c"], 1)
    limit.leave()
    assert limit.inside == 0


def test_few_requests_wait_beyond_the_limit() -> None:
    limit = ConcurrencyLimit(1)
    for _ in range(1025):
        limit.enter_or_wait(lambda: None)
    with pytest.raises(StatusError, match="Server Threadpool Exhausted"):
        limit.enter_or_wait(lambda: None)
    assert (limit.inside, len(limit.waiting)) == (1, 1024)


def test_a_cortex_replica_takes_processes_times_threads_requests() -> None:
    flags = ServerFlags(processes_per_replica=2, threads_per_process=3)
    settings = BatchingSettings(enabled=True, parameters=BatchingParameters(max_batch_size=6))
    limit = concurrency_limit(flags, settings)
    assert limit is not None
    for _ in range(7):
        limit.enter_or_wait(lambda: None)
    assert (limit.inside, len(limit.waiting)) == (6, 1)
    settings = BatchingSettings(enabled=True, parameters=BatchingParameters(max_batch_size=7))
    with pytest.raises(UsageError) as caught:
        concurrency_limit(flags, settings)
    assert caught.value.message == (
        "max_batch_size (7) must be less than or equal to processes_per_replica * threads_per_process (2 * 3 = 6)"
    )
