"""What holds for every trace of arrivals, busy threads and changes of options?"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.server.scheduling.batch_queue import (
    Batch,
    QueueOptions,
    SharedBatchScheduler,
    next_allowed_size,
    split_sizes,
)
from batchtune.server.scheduling.streaming import StreamingBatchScheduler
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock
from tests.server.scheduling.scheduler_bench import Rows

SMALL = settings(max_examples=120, deadline=None)


@dataclass(frozen=True)
class Arrival:
    size: int
    gap_micros: int
    busy: bool  # the thread runs a batch meanwhile


arrivals = st.lists(
    st.builds(
        Arrival,
        size=st.integers(1, 9),
        gap_micros=st.sampled_from([0, 0, 0, 3, 10, 25]),
        busy=st.booleans(),
    ),
    max_size=30,
)


@st.composite
def queue_options(draw: st.DrawFn) -> QueueOptions:
    max_batch_size = draw(st.integers(1, 12))
    splitting = draw(st.booleans())
    return QueueOptions(
        max_batch_size=max_batch_size,
        batch_timeout_micros=draw(st.sampled_from([0, 10, 50])),
        max_enqueued_batches=draw(st.integers(1, 4)),
        enable_large_batch_splitting=splitting,
        max_execution_batch_size=draw(st.integers(1, max_batch_size)) if splitting else None,
        allowed_batch_sizes=tuple(sorted(draw(st.sets(st.integers(1, 12), max_size=3)))),
    )


class Trace:
    """Plays arrivals into one queue of a scheduler and writes down what happens."""

    def __init__(self, scheduler: Any, clock: ManualClock, options: QueueOptions) -> None:
        self.clock = clock
        self.batches: list[Batch[Rows]] = []
        self.accepted: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.queue = scheduler.add_queue(options, self.process)

    def process(self, batch: Batch[Rows]) -> None:
        self.gate.wait(10)
        self.batches.append(batch)

    def play(self, trace: Sequence[Arrival]) -> None:
        first = 0
        for arrival in trace:
            (self.gate.clear if arrival.busy else self.gate.set)()
            task = Rows(range(first, first + arrival.size))
            try:
                self.queue.schedule(task)
                self.accepted += task.rows
            except StatusError as error:
                if error.code not in ("UNAVAILABLE", "INVALID_ARGUMENT"):
                    raise
            first += arrival.size
            self.clock.advance(arrival.gap_micros)
        self.gate.set()

    def delivered(self) -> list[int]:
        return [row for batch in self.batches for task in batch.tasks for row in task.rows]


def played(
    trace: Sequence[Arrival], options: QueueOptions, kind: Any, *, threads: int = 1, queues: int = 1
) -> list[Trace]:
    """A trace in each queue of a scheduler that has then ended."""
    clock = ManualClock()
    scheduler = kind(num_batch_threads=threads, clock=clock)
    plays = [Trace(scheduler, clock, options) for _ in range(queues)]
    for play in plays:
        play.play(trace)
    scheduler.close()
    return plays


@SMALL
@given(options=queue_options(), trace=arrivals)
def test_one_thread_delivers_every_accepted_row_in_order(options: QueueOptions, trace: list[Arrival]) -> None:
    (play,) = played(trace, options, SharedBatchScheduler)
    assert play.delivered() == play.accepted
    for batch in play.batches:
        assert batch.tasks
        assert batch.size == sum(task.size for task in batch.tasks) <= options.batch_size_limit
        assert len(batch.enqueued_micros) == len(batch.tasks)
        assert batch.enqueued_micros == sorted(batch.enqueued_micros)


@SMALL
@given(options=queue_options(), trace=arrivals, threads=st.integers(1, 3))
def test_threads_and_queues_lose_nothing(options: QueueOptions, trace: list[Arrival], threads: int) -> None:
    for play in played(trace, options, SharedBatchScheduler, threads=threads, queues=2):
        assert sorted(play.delivered()) == play.accepted


@given(size=st.integers(0, 100), slot=st.integers(0, 20), limit=st.integers(1, 20))
def test_splitting_keeps_rows_fills_the_slot_and_keeps_the_limit(size: int, slot: int, limit: int) -> None:
    slot = min(slot, limit)
    sizes = split_sizes(size, slot, limit)
    assert sum(sizes) == size
    assert all(0 < part <= limit for part in sizes) or size == 0
    if size > slot > 0:
        assert sizes[0] == slot
        assert all(part == limit for part in sizes[1:-1])


allowed_sizes = st.sets(st.integers(1, 64), max_size=6).map(sorted)


@given(rows=st.integers(1, 80), sizes=allowed_sizes)
def test_rounding_goes_up_to_the_nearest_allowed_size(rows: int, sizes: list[int]) -> None:
    larger = [size for size in sizes if size >= rows]
    assert next_allowed_size(rows, sizes) == (larger[0] if larger else rows)


@SMALL
@given(trace=arrivals, timeout=st.sampled_from([5, 20]), threads=st.integers(1, 3))
def test_streaming_delivers_every_accepted_row_once(trace: list[Arrival], timeout: int, threads: int) -> None:
    options = QueueOptions(max_batch_size=7, batch_timeout_micros=timeout)
    (play,) = played(trace, options, StreamingBatchScheduler, threads=threads)
    assert sorted(play.delivered()) == play.accepted
    assert all(0 < batch.size <= 7 for batch in play.batches)
