"""TensorFlow's AdaptiveSharedBatchScheduler, rule by rule (A1-A8)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from batchtune.server.scheduling.adaptive import AdaptiveOptions, AdaptiveSharedBatchScheduler
from batchtune.server.scheduling.batch_queue import Batch
from batchtune.server.scheduling.in_flight_limit import InFlightLimit
from batchtune.server.scheduling.queue_options import QueueOptions
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock


class Piece:
    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name

    def split(self, sizes: Sequence[int]) -> list[Piece]:
        return [Piece(size, f"{self.name}[{index}]") for index, size in enumerate(sizes)]


class Bench:
    def __init__(self, threads: int, *, limit: float | None = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.scheduler = AdaptiveSharedBatchScheduler(
            num_batch_threads=threads,
            clock=self.clock,
            options=AdaptiveOptions(initial_in_flight_batches_limit=limit, **options),
            rng=random.Random(7),
        )
        self.gate = threading.Event()
        self.changed = threading.Condition()
        self.batches: list[Batch[Piece]] = []

    def process(self, batch: Batch[Piece]) -> None:
        with self.changed:
            self.batches.append(batch)
            self.changed.notify_all()
        self.gate.wait(10)

    def queue(self, **options: Any) -> Any:
        return self.scheduler.add_queue(QueueOptions(**options), self.process)

    def names(self, count: int) -> list[list[str]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.batches) >= count, timeout=10)
        self.clock.settle()
        return [[task.name for task in batch.tasks] for batch in self.batches]


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def build(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield build
    for bench in made:
        bench.gate.set()
        bench.scheduler.close()


def test_a_batch_is_due_a_timeout_after_its_creation(make: Callable[..., Bench]) -> None:
    bench = make(2)
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=1000)
    queue.schedule(Piece(1, "a"))
    bench.clock.advance(600)
    queue.schedule(Piece(1, "b"))
    bench.clock.advance(399)
    assert queue.num_enqueued_rows == 2
    bench.clock.advance(1)
    assert bench.names(1) == [["a", "b"]]
    assert bench.batches[0].close_reason == "timeout"


def test_regular_batches_run_only_up_to_the_limit(make: Callable[..., Bench]) -> None:
    bench = make(3, limit=1)
    first, second = bench.queue(max_batch_size=10), bench.queue(max_batch_size=10)
    first.schedule(Piece(1, "a"))
    assert bench.names(1) == [["a"]]
    second.schedule(Piece(1, "b"))
    second.schedule(Piece(1, "c"))
    bench.clock.settle()
    assert second.num_enqueued_rows == 2
    bench.gate.set()
    assert bench.names(2) == [["a"], ["b", "c"]]


def test_a_full_batch_is_express_and_needs_only_a_thread(make: Callable[..., Bench]) -> None:
    bench = make(2, limit=1, batches_to_average_over=1)
    queue = bench.queue(max_batch_size=3, batch_timeout_micros=10**6)
    other = bench.queue(max_batch_size=10)
    other.schedule(Piece(1, "regular"))
    assert bench.names(1) == [["regular"]]
    queue.schedule(Piece(3, "express"))
    assert bench.names(2) == [["regular"], ["express"]]
    queue.schedule(Piece(3, "late"))
    bench.clock.settle()
    assert queue.num_enqueued_batches == 1  # no thread is free
    bench.gate.set()
    assert bench.names(3)[2] == ["late"]


def test_the_oldest_batch_runs_first_though_a_fuller_one_waits(make: Callable[..., Bench]) -> None:
    bench = make(1, limit=1)
    blocker, small, large = (bench.queue(max_batch_size=10) for _ in range(3))
    blocker.schedule(Piece(1, "blocker"))
    bench.names(1)
    small.schedule(Piece(1, "small"))
    bench.clock.advance(100)
    large.schedule(Piece(9, "large"))
    bench.gate.set()
    assert [name for (name,) in bench.names(3)] == ["blocker", "small", "large"]


def test_the_queue_is_full_when_the_rows_do_not_fit(make: Callable[..., Bench]) -> None:
    bench = make(1)
    queue = bench.queue(max_batch_size=10, max_enqueued_batches=2, batch_timeout_micros=1000)
    queue.schedule(Piece(6))
    queue.schedule(Piece(6))
    with pytest.raises(StatusError) as caught:
        queue.schedule(Piece(5))
    assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", "The batch scheduling queue is full")


def test_large_tasks_are_split_or_refused(make: Callable[..., Bench]) -> None:
    bench = make(1)
    whole = bench.queue(max_batch_size=4)
    with pytest.raises(StatusError, match="Task size 5 is larger than maximum batch size 4"):
        whole.schedule(Piece(5))
    bench.gate.set()
    splitting = bench.queue(
        max_batch_size=12,
        max_execution_batch_size=4,
        enable_large_batch_splitting=True,
        batch_timeout_micros=1000,
    )
    with pytest.raises(StatusError, match="Task size 13 is larger than max input task size 12"):
        splitting.schedule(Piece(13))
    splitting.schedule(Piece(3, "a"))
    splitting.schedule(Piece(6, "b"))
    bench.clock.advance(1000)
    assert bench.names(3) == [["a", "b[0]"], ["b[1]"], ["b[2]"]]


def test_the_limit_first_goes_down_then_follows_the_latency() -> None:
    limit = InFlightLimit(initial=8, lowest=1, highest=16, batches_to_average_over=2)
    values = []
    for latency_micros in (100, 90, 80, 120, 60):
        limit.record(latency_micros)
        assert limit.value == (values[-1] if values else 8)  # half of the batches
        limit.record(latency_micros)
        values.append(limit.value)
    assert values == pytest.approx(
        [
            8 * 7 / 8,  # not below 0: turn round, step 1/8
            7 * 15 / 16,  # below, for the first time: step 1/16
            6.5625 * 7 / 8,  # below again: step 1/8
            5.7421875 * 9 / 8,  # not below: turn round
            6.4599609375 * 17 / 16,  # below after a rise: step 1/16, same way
        ]
    )


def test_the_limit_stays_between_its_ends() -> None:
    limit = InFlightLimit(initial=1, lowest=1, highest=2, batches_to_average_over=1)
    for latency_micros in range(100, 0, -1):
        limit.record(latency_micros)
        assert 1 <= limit.value <= 2


def test_express_batches_teach_the_limit_nothing(make: Callable[..., Bench]) -> None:
    bench = make(4, limit=4, batches_to_average_over=1)
    bench.gate.set()
    queue = bench.queue(max_batch_size=1, batch_timeout_micros=10**6)
    queue.schedule(Piece(1, "express"))
    queue.close()
    assert bench.scheduler.in_flight_batches_limit == 4
    regular = bench.queue(max_batch_size=2)
    regular.schedule(Piece(1, "regular"))
    regular.close()
    assert bench.scheduler.in_flight_batches_limit == 3.5


def test_closing_a_queue_runs_what_waits_at_once(make: Callable[..., Bench]) -> None:
    bench = make(1)
    bench.gate.set()
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=10**9)
    queue.schedule(Piece(1, "a"))
    queue.close()
    assert bench.names(1) == [["a"]]
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        queue.schedule(Piece(1))


def test_a_scheduler_needs_a_thread() -> None:
    with pytest.raises(StatusError) as caught:
        AdaptiveSharedBatchScheduler(num_batch_threads=0)
    assert (caught.value.code, caught.value.message) == (
        "INVALID_ARGUMENT",
        "num_batch_threads must be positive; was 0",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be positive; was 0"),
        ({"max_enqueued_batches": 0}, "max_enqueued_batches must be positive; was 0"),
        pytest.param(
            {"max_batch_size": 3, "max_execution_batch_size": 4, "enable_large_batch_splitting": True},
            "max_input_task_size must be larger than or equal to max_batch_size;got max_input_task_size as 3 "
            "and max_batch_size as 4",
        ),
    ],
)
def test_bad_queue_options_are_refused_with_the_reference_texts(
    make: Callable[..., Bench], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StatusError) as caught:
        make(1).queue(**options)
    assert caught.value.message == message
