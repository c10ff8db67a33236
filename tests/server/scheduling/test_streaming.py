"""TF Serving's StreamingBatchScheduler, rule by rule (ST1-ST7)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchtune.server.scheduling.batch_queue import Batch, QueueOptions
from batchtune.server.scheduling.streaming import StreamingBatchScheduler
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock

BUSY = (
    "This task would start a fresh batch, but all batch threads are busy, so at present there is no processing "
    "capacity available for this task"
)


class Piece:
    def __init__(self, size: int) -> None:
        self.size = size


class Stream:
    """A streaming queue whose batches stay on their threads until `gate` is set."""

    def __init__(self, threads: int, **options: Any) -> None:
        self.clock = ManualClock()
        self.scheduler = StreamingBatchScheduler(num_batch_threads=threads, clock=self.clock)
        self.gate = threading.Event()
        self.batches: list[tuple[int, str]] = []
        self.queue = self.scheduler.add_queue(QueueOptions(**options), self.process)

    def process(self, batch: Batch[Piece]) -> None:
        self.batches.append((batch.size, batch.close_reason))
        self.gate.wait(10)

    def refusal(self, size: int) -> tuple[str, str]:
        with pytest.raises(StatusError) as caught:
            self.queue.schedule(Piece(size))
        return caught.value.code, caught.value.message


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    made: list[Stream] = []
    yield made
    for stream in made:
        stream.gate.set()
        stream.scheduler.close()


def test_a_batch_closes_when_the_next_task_does_not_fit(streams: list[Stream]) -> None:
    stream = Stream(2, max_batch_size=5, batch_timeout_micros=1000)
    streams.append(stream)
    stream.queue.schedule(Piece(3))
    stream.queue.schedule(Piece(3))
    stream.clock.settle()
    assert stream.batches == [(3, "no_room")]


def test_a_batch_closes_at_exactly_the_maximum_and_the_next_one_takes_a_thread(streams: list[Stream]) -> None:
    stream = Stream(1, max_batch_size=4, batch_timeout_micros=1000)
    streams.append(stream)
    stream.queue.schedule(Piece(4))
    stream.clock.settle()
    assert stream.batches == [(4, "full")]
    assert stream.refusal(1) == ("UNAVAILABLE", BUSY)


def test_a_batch_closes_at_the_timeout_of_its_first_task(streams: list[Stream]) -> None:
    stream = Stream(2, max_batch_size=5, batch_timeout_micros=1000)
    streams.append(stream)
    stream.queue.schedule(Piece(1))
    stream.clock.advance(600)
    stream.queue.schedule(Piece(1))
    stream.clock.advance(399)
    assert stream.batches == []
    stream.clock.advance(1)
    stream.clock.settle()
    assert stream.batches == [(2, "timeout")]


def test_closing_the_scheduler_closes_the_open_batch(streams: list[Stream]) -> None:
    stream = Stream(1, max_batch_size=5, batch_timeout_micros=1000)
    stream.queue.schedule(Piece(2))
    stream.gate.set()
    stream.scheduler.close()
    assert stream.batches == [(2, "closed")]
    assert stream.refusal(1)[0] == "UNAVAILABLE"


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_of_zero_or_less_is_none(streams: list[Stream], timeout: int) -> None:
    stream = Stream(1, max_batch_size=5, batch_timeout_micros=timeout)
    streams.append(stream)
    stream.queue.schedule(Piece(1))
    stream.clock.advance(10**9)
    assert stream.batches == []


def test_a_task_is_refused_when_it_would_start_a_batch_without_a_thread(streams: list[Stream]) -> None:
    stream = Stream(2, max_batch_size=5, batch_timeout_micros=1000)
    streams.append(stream)
    stream.queue.schedule(Piece(4))
    stream.queue.schedule(Piece(4))
    stream.queue.schedule(Piece(1))
    assert stream.refusal(4) == ("UNAVAILABLE", BUSY)
    stream.clock.settle()
    assert sorted(stream.batches) == [(4, "no_room"), (5, "full")]
    stream.gate.set()


def test_a_thread_that_is_done_takes_new_tasks(streams: list[Stream]) -> None:
    stream = Stream(1, max_batch_size=4, batch_timeout_micros=1000)
    streams.append(stream)
    stream.gate.set()
    taken = 0
    while taken < 5:
        try:
            stream.queue.schedule(Piece(4))
            taken += 1
        except StatusError:
            threading.Event().wait(0.001)
    stream.scheduler.close()
    assert stream.batches == [(4, "full")] * 5


def test_bad_sizes_are_refused_with_the_reference_texts(streams: list[Stream]) -> None:
    stream = Stream(1, max_batch_size=5)
    streams.append(stream)
    assert stream.refusal(6) == ("INVALID_ARGUMENT", "Task size 6 is larger than maximum batch size 5")
    with pytest.raises(StatusError, match="max_batch_size must be positive; was 0"):
        stream.scheduler.add_queue(QueueOptions(max_batch_size=0), stream.process)
    with pytest.raises(StatusError, match="num_batch_threads must be positive; was 0"):
        StreamingBatchScheduler(num_batch_threads=0)


class Prepared:
    """A streaming queue with early work: what is done, in order; a task of 2 rows ends in its preparation."""

    def __init__(self, threads: int, **options: Any) -> None:
        self.clock = ManualClock()
        self.scheduler = StreamingBatchScheduler(num_batch_threads=threads, clock=self.clock)
        self.changed = threading.Condition()
        self.events: list[tuple[str, int]] = []
        self.queue = self.scheduler.add_queue(QueueOptions(**options), self.process, self.prepare)

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

    def wait_for(self, count: int) -> list[tuple[str, int]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= count, 10), self.events
            return list(self.events)


@pytest.fixture
def prepared() -> Iterator[list[Prepared]]:
    made: list[Prepared] = []
    yield made
    for stream in made:
        stream.scheduler.close()


def test_a_task_is_prepared_as_it_comes_and_the_batch_runs_when_it_is_full(prepared: list[Prepared]) -> None:
    stream = Prepared(1, max_batch_size=4, batch_timeout_micros=1000)
    prepared.append(stream)
    stream.queue.schedule(Piece(1))
    assert stream.wait_for(1) == [("prepared", 1)]
    stream.queue.schedule(Piece(3))
    assert stream.wait_for(3) == [("prepared", 1), ("prepared", 3), ("full", 4)]


def test_a_prepared_batch_runs_at_its_timeout_without_what_has_ended(prepared: list[Prepared]) -> None:
    stream = Prepared(1, max_batch_size=5, batch_timeout_micros=1000)
    prepared.append(stream)
    stream.queue.schedule(Piece(1))
    stream.queue.schedule(Piece(2))
    stream.wait_for(2)
    stream.clock.advance(1000)
    assert stream.wait_for(3)[-1] == ("timeout", 1)


def test_a_batch_that_closes_while_it_is_watched_is_run_once(prepared: list[Prepared]) -> None:
    stream = Prepared(2, max_batch_size=4, batch_timeout_micros=1000)
    prepared.append(stream)
    stream.queue.schedule(Piece(3))
    stream.wait_for(1)
    stream.queue.schedule(Piece(3))
    assert sorted(stream.wait_for(3)) == [("no_room", 3), ("prepared", 3), ("prepared", 3)]
    stream.scheduler.close()
    assert stream.events[3:] == [("closed", 3)]
