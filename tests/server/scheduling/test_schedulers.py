"""The schedulers under a manual clock, rule by rule: S1-S25 of TensorFlow's SharedBatchScheduler, then ST1-ST7 of TF
Serving's StreamingBatchScheduler."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchtune.server.scheduling.batch_queue import Batch, QueueOptions, SharedBatchScheduler
from batchtune.server.scheduling.batch_threads import Clock
from batchtune.server.scheduling.streaming import StreamingBatchScheduler
from batchtune.wire.status import StatusError
from tests.server.scheduling.scheduler_bench import Bench, Piece, tasks_waiting

pytestmark = pytest.mark.smoke

Make = Callable[..., Bench]
FULL = "UNAVAILABLE: The batch scheduling queue to which this task was submitted is full; "
QUEUED = "currently {0} batches enqueued and max_enqueued_batches is {0}"
NO_ROOM = (
    "task size is 4 but scheduling capacity is only 3 (num_enqueued_batches=2, max_enqueued_batches=2, "
    "open_batch_size=2, max_execution_batch_size=5)"
)
TOO_LARGE = "INVALID_ARGUMENT: Task size 5 is larger than maximum input batch size 4"
TEN = {"max_batch_size": 10, "batch_timeout_micros": 1000}
FOUR = {"max_batch_size": 4, "batch_timeout_micros": 1000}
ONE_WAITS = {**FOUR, "max_enqueued_batches": 1}
FIVES = {
    "max_batch_size": 20,
    "batch_timeout_micros": 1000,
    "enable_large_batch_splitting": True,
    "max_execution_batch_size": 5,
}
FOURS = {**FIVES, "max_batch_size": 8, "max_execution_batch_size": 4}
SIXES = {"max_batch_size": 6, "batch_timeout_micros": 1000, "enable_large_batch_splitting": True}


@pytest.mark.parametrize(
    ("options", "trace", "batches"),
    [
        # A task that does not fit closes the open batch, and nothing is packed or reordered.
        (TEN, "hold 6 5 1 9 2 +1000 go", ["a no_room", "b c no_room", "d no_room", "e timeout"]),
        # The timeout counts from the first task of the batch that is open.
        (TEN, "1 +600 1 +399", ["a b closed"]),
        (TEN, "1 +600 1 +400", ["a b timeout"]),
        (TEN, "+700 1 +999", ["a closed"]),
        (TEN, "+700 1 +1000", ["a timeout"]),
        # A full batch runs at once; while it waits it stays open until it is taken or another task comes.
        (FOUR, "1 1 1 1 +0 1", ["a b c d full", "e closed"]),
        (FOUR, "hold 4 1 go", ["a full", "b closed"]),
        # One that has expired keeps filling while every thread is busy.
        (TEN, "hold 1 +5000 1 1 1 go +0", ["a b c d timeout"]),
        # Closed batches come first, and the oldest of them.
        ({"max_batch_size": 2}, "hold 1 1 1 1 1 go +0", ["a b full", "c d full", "e timeout"]),
        # With timeout zero a free thread takes whatever waits.
        ({"max_batch_size": 10}, "1 +0 hold 1 1 1 1 go +0", ["a timeout", "b c d e timeout"]),
        # Empty batches are never delivered, a task without rows is.
        (FOUR, "4 +5000", ["a full"]),
        (FOUR, "0 +1000 0", ["a timeout", "b closed"]),
        # Running batches do not count against the queue.
        (ONE_WAITS, "shut 4 +0 4 go", ["a full", "b full"]),
        # Splitting fills the open batch, then full batches, then the rest; a full open batch gets no part.
        (FIVES, "hold 3 14 2 go +1000", ["a b[0] full", "b[1] full", "b[2] full", "b[3] c timeout"]),
        (FOURS, "hold 4 3 6 go +1000", ["a full", "b c[0] full", "c[1] full", "c[2] timeout"]),
        (SIXES, "hold 4 4 go +1000", ["a b[0] full", "b[1] timeout"]),
        ({**FOUR, "max_execution_batch_size": 2}, "4 +0", ["a full"]),
    ],
)
def test_batches_are_tensorflows(
    bench: Bench, options: dict[str, Any], trace: str, batches: list[str]
) -> None:
    assert bench.play(bench.queue(**options), trace) == []
    assert bench.ran() == batches


@pytest.mark.parametrize(
    ("options", "trace", "refusal", "sizes"),
    [
        # Too large comes first, even when the queue is full.
        (ONE_WAITS, "hold 4 5", TOO_LARGE, [4]),
        (ONE_WAITS, "hold 4 1", FULL + QUEUED.format(1), [4]),
        ({**FOUR, "max_enqueued_batches": 0}, "hold 4 1", FULL + QUEUED.format(1), [4]),
        # Without splitting the queue is full only when the task needs another batch, with it when the rows do not fit.
        ({**TEN, "max_enqueued_batches": 2}, "hold 6 6 4 1", FULL + QUEUED.format(2), [6, 10]),
        ({**FIVES, "max_enqueued_batches": 2}, "hold 7 4 3", FULL + NO_ROOM, [5, 5]),
    ],
)
def test_tasks_are_refused_as_in_tensorflow(
    bench: Bench, options: dict[str, Any], trace: str, refusal: str, sizes: list[int]
) -> None:
    assert bench.play(bench.queue(**options), trace) == [refusal]
    assert [batch.size for batch in bench.batches] == sizes


def test_a_batch_says_when_it_was_opened_and_its_tasks_came(bench: Bench) -> None:
    queue = bench.queue(**TEN)
    bench.clock.advance(5)
    queue.schedule(Piece(1))
    bench.clock.advance(600)
    queue.schedule(Piece(2))
    assert (queue.num_enqueued_batches, queue.num_enqueued_rows) == (1, 3)
    bench.clock.advance(400)
    bench.wait_for(1)
    assert (bench.batches[0].opened_micros, bench.batches[0].enqueued_micros) == (5, [5, 605])


def test_queues_are_served_in_turn_one_batch_each(bench: Bench) -> None:
    first, second, third = (bench.queue(max_batch_size=2) for _ in range(3))
    bench.occupy()
    for queue, name in zip((first, first, first, second, third, third), "abcdef", strict=True):
        queue.schedule(Piece(2, name))
    bench.gate.set()
    bench.wait_for(6)
    assert [batch.tasks[0].name for batch in bench.batches] == ["a", "d", "e", "b", "f", "c"]


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_batches_run_as_there_are_threads(make_bench: Make, threads: int) -> None:
    bench = make_bench(threads)
    queue = bench.queue(max_batch_size=1, max_enqueued_batches=10)
    bench.gate.clear()
    for _ in range(5):
        queue.schedule(Piece(1))
    bench.wait_for(threads)
    bench.clock.settle()
    assert (tasks_waiting(queue), len(bench.batches)) == (5 - threads, threads)
    bench.gate.set()
    bench.wait_for(5)


def test_closing_a_queue_runs_the_rest_at_once_and_waits_for_it(make_bench: Make) -> None:
    bench = make_bench(2)
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=10**9)
    queue.schedule(Piece(3, "a"))
    queue.close()
    assert bench.ran() == ["a closed"]
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        queue.schedule(Piece(1))
    queue.close()


def test_closing_the_scheduler_processes_everything_in_every_queue(bench: Bench) -> None:
    queues = [bench.queue(max_batch_size=4, batch_timeout_micros=10**9) for _ in range(3)]
    for queue in queues * 2:
        queue.schedule(Piece(3))
    bench.scheduler.close()
    assert [batch.size for batch in bench.batches] == [3] * 6
    bench.scheduler.close()
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        bench.queue()


SPLITTING = (
    "When enable_large_batch_splitting is true, input_batch_size_limit must be greater than or equal to "
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "input_batch_size_limit must be positive; was 0"),
        ({"batch_timeout_micros": -1}, "batch_timeout_micros must be non-negative; was -1"),
        ({**FIVES, "max_enqueued_batches": 0}, "max_enqueued_batches must be positive; was 0"),
        ({**FIVES, "max_batch_size": 4}, SPLITTING + "max_execution_batch_size.145"),
        ({**FIVES, "max_execution_batch_size": 0}, "max_execution_batch_size must be positive; was 0"),
    ],
)
def test_options_that_break_a_rule_are_refused(bench: Bench, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StatusError) as caught:
        bench.queue(**options)
    assert (caught.value.code, caught.value.message) == ("INVALID_ARGUMENT", message)


@pytest.mark.parametrize(("threads", "rule"), [(0, "positive; was 0"), (4097, "at most 4096; was 4097")])
def test_a_scheduler_needs_a_thread(threads: int, rule: str) -> None:
    before = threading.active_count()
    with pytest.raises(StatusError, match=f"num_batch_threads must be {rule}"):
        SharedBatchScheduler(num_batch_threads=threads)
    assert threading.active_count() == before


def test_the_defaults_are_those_of_tf_serving() -> None:
    assert QueueOptions() == QueueOptions(
        max_batch_size=1000,
        batch_timeout_micros=0,
        max_enqueued_batches=10,
        enable_large_batch_splitting=False,
        max_execution_batch_size=None,
        allowed_batch_sizes=(),
    )


def test_a_callback_that_raises_ends_no_thread(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def process(batch: Batch[Piece]) -> None:
        if batch.tasks[0].name == "bad":
            raise RuntimeError("no such device")
        done.set()

    queue = bench.scheduler.add_queue(QueueOptions(max_batch_size=1), process)
    queue.schedule(Piece(1, "bad"))
    queue.schedule(Piece(1, "good"))
    assert done.wait(10)
    assert "no such device" in caplog.text


def test_a_parked_thread_keeps_no_batch_alive(bench: Bench) -> None:
    queue = bench.scheduler.add_queue(QueueOptions(max_batch_size=1), lambda batch: None)
    piece = Piece(1)
    gone = weakref.ref(piece)
    queue.schedule(piece)
    del piece
    queue.close()
    bench.clock.settle()
    gc.collect()
    assert gone() is None


def test_the_monotonic_clock_runs_batches_by_their_timeout() -> None:
    clock, waits = Clock(), []
    scheduler = SharedBatchScheduler(num_batch_threads=2, clock=clock)
    done = threading.Event()

    def process(batch: Batch[Piece]) -> None:
        waits.append(clock.now_micros() - batch.opened_micros)
        done.set()

    scheduler.add_queue(QueueOptions(batch_timeout_micros=3000), process).schedule(Piece(1))
    assert done.wait(10)
    scheduler.close()
    assert waits[0] >= 3000


def test_two_queues_with_different_timeouts_share_one_timekeeper(make_bench: Make) -> None:
    bench = make_bench(2)
    slow, fast = bench.queue(**TEN), bench.queue(max_batch_size=10, batch_timeout_micros=100)
    slow.schedule(Piece(1, "slow"))
    bench.clock.advance(500)
    fast.schedule(Piece(1, "fast"))
    bench.clock.advance(100)
    assert bench.wait_for(1) == ["fast timeout"]
    assert tasks_waiting(slow) == 1
    bench.clock.advance(400)
    assert bench.wait_for(2) == ["fast timeout", "slow timeout"]


BUSY = (
    "UNAVAILABLE: This task would start a fresh batch, but all batch threads are busy, so at present there is no "
    "processing capacity available for this task"
)
SIX_IS_TOO_LARGE = "INVALID_ARGUMENT: Task size 6 is larger than maximum batch size 5"


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
        (1, 1000, "6", [], [SIX_IS_TOO_LARGE]),
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
