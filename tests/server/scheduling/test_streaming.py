"""TF Serving's StreamingBatchScheduler, rule by rule (ST1-ST7)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchtune.server.scheduling.batch_queue import Batch, QueueOptions
from batchtune.server.scheduling.streaming import StreamingBatchScheduler
from batchtune.wire.status import StatusError
from tests.server.scheduling.scheduler_bench import Bench, Piece

Make = Callable[..., Bench]
BUSY = (
    "UNAVAILABLE: This task would start a fresh batch, but all batch threads are busy, so at present there is no "
    "processing capacity available for this task"
)
TOO_LARGE = "INVALID_ARGUMENT: Task size 6 is larger than maximum batch size 5"


@pytest.mark.parametrize(
    ("threads", "timeout_micros", "trace", "batches", "refusals"),
    [
        (2, 1000, "3 3", ["a no_room", "b closed"], []),
        # At exactly the maximum, and the next one takes a thread.
        (1, 1000, "5 1", ["a full"], [BUSY]),
        (2, 1000, "4 4 1 4", ["a no_room", "b c full"], [BUSY]),
        # The timeout counts from the first task; zero or less is none.
        (2, 1000, "1 +600 1 +399", ["a b closed"], []),
        (2, 1000, "1 +600 1 +400", ["a b timeout"], []),
        (1, 0, "1 +1000000000", ["a closed"], []),
        (1, -1, "1 +1000000000", ["a closed"], []),
        (1, 1000, "6", [], [TOO_LARGE]),
    ],
)
def test_batches_and_refusals_are_tensorflows(
    make_bench: Make, threads: int, timeout_micros: int, trace: str, batches: list[str], refusals: list[str]
) -> None:
    bench = make_bench(threads, StreamingBatchScheduler)
    queue = bench.queue(max_batch_size=5, batch_timeout_micros=timeout_micros)
    assert bench.play(queue, f"shut {trace} +0") == refusals
    assert sorted(bench.ran()) == batches
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        queue.schedule(Piece(1))


def test_a_thread_that_is_done_takes_new_tasks(make_bench: Make) -> None:
    bench = make_bench(1, StreamingBatchScheduler)
    queue = bench.queue(max_batch_size=4, batch_timeout_micros=1000)
    taken = 0
    while taken < 5:
        try:
            queue.schedule(Piece(4, "a"))
            taken += 1
        except StatusError:
            threading.Event().wait(0.001)
    bench.scheduler.close()
    assert bench.ran() == ["a full"] * 5


def test_bad_sizes_are_refused_with_the_reference_texts(make_bench: Make) -> None:
    with pytest.raises(StatusError, match="max_batch_size must be positive; was 0"):
        make_bench(1, StreamingBatchScheduler).queue(max_batch_size=0)
    with pytest.raises(StatusError, match="num_batch_threads must be positive; was 0"):
        StreamingBatchScheduler(num_batch_threads=0)


class Prepared(Bench):
    """With early work: what is done, in order; a task of 2 rows ends in its preparation."""

    def __init__(self, threads: int, **options: Any) -> None:
        super().__init__(threads, StreamingBatchScheduler)
        self.events: list[tuple[str, int]] = []
        self.stream = self.scheduler.add_queue(QueueOptions(**options), self.process, self.prepare)

    def prepare(self, piece: Piece) -> bool:
        self.note("prepared", piece.size)
        return piece.size != 2

    def process(self, batch: Batch[Piece]) -> None:
        assert len(batch.enqueued_micros) == len(batch.tasks)
        self.note(batch.close_reason, batch.size)

    def note(self, what: str, rows: int) -> None:
        with self.changed:
            self.events.append((what, rows))
            self.changed.notify_all()

    def after(self, *sizes: int, count: int) -> list[tuple[str, int]]:
        """The first `count` events, once these tasks are scheduled."""
        for size in sizes:
            self.stream.schedule(Piece(size))
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= count, 10), self.events
            return self.events[:count]


@pytest.fixture
def early() -> Iterator[Prepared]:
    bench = Prepared(2, max_batch_size=4, batch_timeout_micros=1000)
    yield bench
    bench.close()


def test_a_task_is_prepared_as_it_comes_and_the_batch_runs_when_it_is_full(early: Prepared) -> None:
    assert early.after(1, count=1) == [("prepared", 1)]
    assert early.after(3, count=3) == [("prepared", 1), ("prepared", 3), ("full", 4)]


def test_a_prepared_batch_runs_at_its_timeout_without_what_has_ended(early: Prepared) -> None:
    early.after(1, 2, count=2)
    early.clock.advance(1000)
    assert early.after(count=3)[-1] == ("timeout", 1)


def test_a_batch_that_closes_while_it_is_watched_is_run_once(early: Prepared) -> None:
    early.after(3, count=1)
    assert sorted(early.after(3, count=3)) == [("no_room", 3), ("prepared", 3), ("prepared", 3)]
    early.scheduler.close()
    assert early.events[3:] == [("closed", 3)]
