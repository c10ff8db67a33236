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
    """Refuses with `codes` in turn, then accepts."""

    def __init__(self, codes: list[str], clock: ManualClock | None = None, step_micros: int = 0) -> None:
        self.codes = codes
        self.clock = clock
        self.step_micros = step_micros
        self.attempts = 0
        self.tasks: list[object] = []

    def schedule(self, task: object) -> None:
        self.attempts += 1
        if self.codes:
            raise StatusError(self.codes.pop(0), f"attempt {self.attempts}")
        self.tasks.append(task)


def test_a_task_refused_as_unavailable_is_tried_again_after_the_delay() -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=1000, retry_delay_micros=100), clock=clock)
    queue = Queue(["UNAVAILABLE", "UNAVAILABLE"])
    retrier.schedule_later(queue, "task", pytest.fail)
    clock.advance(99)
    assert queue.attempts == 0
    clock.advance(1)
    clock.settle()
    assert queue.attempts == 1
    clock.advance(100)
    clock.advance(100)
    assert queue.tasks == ["task"]
    retrier.close()


def test_retries_end_when_another_delay_would_pass_the_limit() -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=300, retry_delay_micros=100), clock=clock)
    queue = Queue(["UNAVAILABLE"] * 99)
    errors: list[StatusError] = []
    retrier.schedule_later(queue, "task", errors.append)
    for _ in range(5):
        clock.advance(100)
    retrier.close()
    assert queue.attempts == 2
    assert [error.message for error in errors] == ["attempt 2"]


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


def test_who_waits_for_the_retries_waits_for_those_under_way_only() -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=10**9), clock=clock)
    retrier.wait_until_idle(60)  # returns at once
    retrier.schedule_later(Queue(["UNAVAILABLE"]), "task", pytest.fail)
    waiting = threading.Thread(target=retrier.wait_until_idle, args=(60,))
    waiting.start()
    clock.advance(100)
    clock.settle()
    assert waiting.is_alive()
    clock.advance(100)
    waiting.join(10)
    assert not waiting.is_alive()
    retrier.close()


def test_another_error_ends_the_retries() -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(clock=clock)
    queue = Queue(["INVALID_ARGUMENT"])
    errors: list[StatusError] = []
    retrier.schedule_later(queue, "task", errors.append)
    clock.advance(100)
    retrier.close()
    assert [error.code for error in errors] == ["INVALID_ARGUMENT"]


def test_closing_refuses_what_still_waits_and_what_comes_later() -> None:
    clock = ManualClock()
    retrier = BatchSchedulerRetrier(clock=clock)
    errors: list[StatusError] = []
    retrier.schedule_later(Queue([]), "task", errors.append)
    retrier.close()
    retrier.schedule_later(Queue([]), "task", errors.append)
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


def cortex_limit(processes: int, threads: int, *, max_batch_size: int) -> ConcurrencyLimit | None:
    flags = ServerFlags(processes_per_replica=processes, threads_per_process=threads)
    parameters = BatchingParameters(max_batch_size=max_batch_size)
    return concurrency_limit(flags, BatchingSettings(enabled=True, parameters=parameters))


def test_a_cortex_replica_takes_processes_times_threads_requests() -> None:
    limit = cortex_limit(2, 2, max_batch_size=4)
    assert limit is not None
    for _ in range(5):
        limit.enter_or_wait(lambda: None)
    assert (limit.inside, len(limit.waiting)) == (4, 1)


def test_a_cortex_batch_that_could_never_fill_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        cortex_limit(2, 3, max_batch_size=7)
    assert caught.value.message == (
        "max_batch_size (7) must be less than or equal to processes_per_replica * threads_per_process (2 * 3 = 6)"
    )
