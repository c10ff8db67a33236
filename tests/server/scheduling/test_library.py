"""The schedulers as a library under TensorFlow's names: README's example, and how much they say still fits."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import batchtune.server
from batchtune.batching.parameters import BatchingParameters
from batchtune.errors import UsageError
from batchtune.server.models.servable import ConcurrencyLimit
from batchtune.server.scheduling import (
    BasicBatchScheduler,
    BatchSchedulerRetrier,
    RetrierOptions,
    StreamingBatchScheduler,
)
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.startup import concurrency_limit
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock
from tests.server.scheduling.scheduler_bench import Bench, Piece

LONG_MICROS = 10**12


def test_the_example_of_the_readme_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(batchtune.server.__file__).parent / "README.md").read_text(encoding="utf-8")
    section = text.partition("## The schedulers alone\n")[2]
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)[:2]
    exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("splits", "refused", "sizes"), [(True, "capacity is only 9", [9]), (False, "", [1, 4, 4])]
)
def test_what_fits_is_taken_and_no_more(bench: Bench, splits: bool, refused: str, sizes: list[int]) -> None:
    queue = bench.queue(
        max_batch_size=12 if splits else 4,
        max_execution_batch_size=4,
        batch_timeout_micros=LONG_MICROS,
        max_enqueued_batches=3,
        enable_large_batch_splitting=splits,
    )
    assert (queue.num_enqueued_tasks, queue.scheduling_capacity) == (0, 12)
    bench.occupy()
    queue.schedule(Piece(3))
    assert (queue.num_enqueued_tasks, queue.scheduling_capacity) == (1, 9)
    if refused:
        with pytest.raises(StatusError, match=refused):
            queue.schedule(Piece(10))
    for size in sizes:
        queue.schedule(Piece(size))
    assert (queue.num_enqueued_tasks, queue.scheduling_capacity) == (4, 0)
    with pytest.raises(StatusError, match="is full"):
        queue.schedule(Piece(1))


def test_a_streaming_queue_has_room_for_its_free_threads(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(2, StreamingBatchScheduler)
    bench.gate.clear()
    queue = bench.queue(max_batch_size=5)
    assert (queue.num_enqueued_tasks, queue.scheduling_capacity) == (0, 10)
    for size, capacity in ((3, 7), (2, 5), (4, 1), (1, 0)):
        queue.schedule(Piece(size))
        assert queue.scheduling_capacity == capacity
    with pytest.raises(StatusError, match="no processing capacity"):
        queue.schedule(Piece(1))


def test_a_basic_scheduler_takes_the_options_of_a_queue_by_name() -> None:
    done: list[tuple[int, str]] = []
    scheduler = BasicBatchScheduler(
        lambda batch: done.append((batch.size, batch.close_reason)),
        max_batch_size=4,
        batch_timeout_micros=LONG_MICROS,
        num_batch_threads=1,
    )
    scheduler.schedule(Piece(3))
    assert scheduler.num_enqueued_tasks == 1
    scheduler.close()
    assert done == [(3, "closed")]
    with pytest.raises(StatusError, match="max_enqueued_batches must be positive"):
        BasicBatchScheduler(done.append, max_enqueued_batches=-1)
    with pytest.raises(TypeError, match="batch_timeout_ms"):
        BasicBatchScheduler(done.append, batch_timeout_ms=1)


class JumpingClock(ManualClock):
    """Jumps ahead where somebody would sleep, once `jumps` is set."""

    jumps = False

    def parker(self) -> Any:
        if not self.jumps:
            return super().parker()
        return SimpleNamespace(park=lambda until_micros: self.advance(until_micros - self.now_micros()))


@pytest.mark.parametrize(
    ("refusals", "code", "attempts", "refused"),
    [(1, "UNAVAILABLE", 2, ""), (9, "UNAVAILABLE", 3, "attempt 3"), (9, "INVALID_ARGUMENT", 1, "attempt 1")],
)
def test_a_retry_ends_with_the_last_refusal(refusals: int, code: str, attempts: int, refused: str) -> None:
    clock, tried = JumpingClock(), itertools.count(1)
    retrier = BatchSchedulerRetrier(RetrierOptions(max_time_micros=300, retry_delay_micros=100), clock=clock)
    clock.jumps = True

    def schedule(_: object) -> None:
        attempt = next(tried)
        if attempt <= refusals:
            raise StatusError(code, f"attempt {attempt}")

    ended = ""
    try:
        retrier.schedule(SimpleNamespace(schedule=schedule), "task")
    except StatusError as error:
        ended = error.message
    assert (ended, next(tried) - 1, clock.now_micros()) == (refused, attempts, 100 * (attempts - 1))
    retrier.close()


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
    ("codes", "limit", "attempts", "tasks", "errors"),
    [
        (["UNAVAILABLE"] * 2, 1000, [0, 1, 2, 3, 3, 3], ["task"], []),
        (["UNAVAILABLE"] * 99, 300, [0, 1, 2, 2, 2, 2], [], ["UNAVAILABLE: attempt 2"]),
        (["INVALID_ARGUMENT"], 1000, [0, 1, 1, 1, 1, 1], [], ["INVALID_ARGUMENT: attempt 1"]),
    ],
    ids=["until it is taken", "while another delay is within the limit", "no other error"],
)
def test_a_task_refused_as_unavailable_is_tried_again_after_the_delay(
    codes: list[str], limit: int, attempts: list[int], tasks: list[str], errors: list[str], clock: ManualClock
) -> None:
    options = RetrierOptions(max_time_micros=limit, retry_delay_micros=100)
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
def test_no_time_for_a_pause_is_no_retry(
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
