"""The schedulers as a library under TensorFlow's names: README's example, and how much they say still fits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import batchtune.server
from batchtune.server.scheduling import (
    BasicBatchScheduler,
    BatchSchedulerRetrier,
    RetrierOptions,
    StreamingBatchScheduler,
)
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
def test_what_fits_is_scheduled_and_one_row_more_is_refused(
    bench: Bench, splits: bool, refused: str, sizes: list[int]
) -> None:
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


def test_a_streaming_queue_has_room_in_its_open_batch_and_for_its_free_threads(
    make_bench: Callable[..., Bench],
) -> None:
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
def test_a_blocking_retry_ends_with_the_task_scheduled_or_with_the_last_refusal(
    refusals: int, code: str, attempts: int, refused: str
) -> None:
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
