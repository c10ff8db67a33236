"""The shared scheduler, rule by rule (S1-S25 of TensorFlow's SharedBatchScheduler), driven by a manual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from batchtune.server.scheduling.batch_queue import Batch, QueueOptions, SharedBatchScheduler
from batchtune.server.scheduling.batch_threads import Clock
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock

pytestmark = pytest.mark.smoke

FULL = "The batch scheduling queue to which this task was submitted is full; "


class Piece:
    """A task of `size` rows; remembers how it was split."""

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name

    def split(self, sizes: Sequence[int]) -> list[Piece]:
        return [Piece(size, f"{self.name}[{index}]") for index, size in enumerate(sizes)]


class Bench:
    """A scheduler whose batches can be held up on their threads, as a busy device would."""

    def __init__(self, threads: int = 1, **scheduler_options: Any) -> None:
        self.clock = ManualClock()
        self.scheduler = SharedBatchScheduler(
            num_batch_threads=threads, clock=self.clock, **scheduler_options
        )
        self.batches: list[Batch[Piece]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()

    def process(self, batch: Batch[Piece]) -> None:
        with self.changed:
            self.batches.append(batch)
            self.changed.notify_all()
        self.entered.release()
        self.gate.wait(10)

    def queue(self, **options: Any) -> Any:
        return self.scheduler.add_queue(QueueOptions(**options), self.process)

    def occupy(self, threads: int = 1) -> None:
        """Keep `threads` threads busy with one-row batches until `release`."""
        self.gate.clear()
        busy = threading.Semaphore(0)

        def block(_: Batch[Piece]) -> None:
            busy.release()
            self.gate.wait(10)

        blockers = self.scheduler.add_queue(QueueOptions(max_batch_size=1), block)
        for _ in range(threads):
            blockers.schedule(Piece(1))
            assert busy.acquire(timeout=10)
        self.batches.clear()

    def release(self) -> None:
        self.gate.set()

    def wait_for(self, count: int) -> list[int]:
        """Sizes of the batches so far, once there are `count` of them."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.batches) >= count, timeout=10)
            return [batch.size for batch in self.batches]

    def names(self) -> list[list[str]]:
        return [[task.name for task in batch.tasks] for batch in self.batches]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*args: Any, **kwargs: Any) -> Bench:
        benches.append(Bench(*args, **kwargs))
        return benches[-1]

    yield make
    for bench in benches:
        bench.release()
        bench.scheduler.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def refusal(schedule: Callable[[Any], None], task: Piece) -> tuple[str, str]:
    with pytest.raises(StatusError) as caught:
        schedule(task)
    return caught.value.code, caught.value.message


def tasks_waiting(queue: Any) -> int:
    return sum(len(batch.tasks) for batch in (*queue._waiting, queue._open))


def test_the_public_example_of_the_scheduler_works() -> None:
    clock = ManualClock()
    scheduler = SharedBatchScheduler(num_batch_threads=2, clock=clock)
    sizes: list[int] = []
    queue = scheduler.add_queue(
        QueueOptions(
            max_batch_size=10,
            batch_timeout_micros=10_000,
            max_enqueued_batches=2,
            enable_large_batch_splitting=False,
            max_execution_batch_size=None,
            allowed_batch_sizes=(),
        ),
        lambda batch: sizes.append(batch.size),
    )
    queue.schedule(Piece(3))
    assert (queue.num_enqueued_batches, queue.num_enqueued_rows) == (1, 3)
    clock.advance(10_000)
    assert clock.now_micros() == 10_000
    queue.close()
    scheduler.close()
    assert sizes == [3]


def test_a_task_that_does_not_fit_closes_the_open_batch_and_nothing_is_packed_or_reordered(
    bench: Bench,
) -> None:
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=1000)
    bench.occupy()
    for size, name in [(6, "a"), (5, "b"), (1, "c"), (9, "d"), (2, "e")]:
        queue.schedule(Piece(size, name))
    bench.clock.advance(1000)
    bench.release()
    assert bench.wait_for(4) == [6, 6, 9, 2]
    assert bench.names() == [["a"], ["b", "c"], ["d"], ["e"]]
    assert [batch.close_reason for batch in bench.batches] == ["no_room", "no_room", "no_room", "timeout"]


def test_the_timeout_counts_from_the_first_task_of_the_open_batch(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=1000)
    queue.schedule(Piece(1))
    bench.clock.advance(600)
    queue.schedule(Piece(1))
    bench.clock.advance(399)
    assert tasks_waiting(queue) == 2
    bench.clock.advance(1)
    assert tasks_waiting(queue) == 0
    assert bench.wait_for(1) == [2]
    assert (bench.batches[0].close_reason, bench.batches[0].opened_micros) == ("timeout", 0)
    assert bench.batches[0].enqueued_micros == [0, 600]


def test_a_later_batch_counts_its_own_timeout(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=1000)
    bench.clock.advance(700)
    queue.schedule(Piece(1))
    bench.clock.advance(999)
    assert tasks_waiting(queue) == 1
    bench.clock.advance(1)
    assert bench.wait_for(1) == [1]


def test_a_full_batch_runs_at_once(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=4, batch_timeout_micros=10**9)
    for _ in range(4):
        queue.schedule(Piece(1))
    bench.clock.settle()
    assert bench.wait_for(1) == [4]
    assert bench.batches[0].close_reason == "full"


def test_a_full_batch_stays_open_until_it_is_taken_or_another_task_comes(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=4, batch_timeout_micros=10**9, max_enqueued_batches=3)
    bench.occupy()
    queue.schedule(Piece(4))
    queue.schedule(Piece(1))
    bench.release()
    assert bench.wait_for(1)[0] == 4


def test_an_expired_batch_keeps_filling_while_every_thread_is_busy(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=5, batch_timeout_micros=1000)
    bench.occupy()
    queue.schedule(Piece(1))
    bench.clock.advance(5000)
    for _ in range(3):
        queue.schedule(Piece(1))
    assert tasks_waiting(queue) == 4
    bench.release()
    assert bench.wait_for(1) == [4]


def test_closed_batches_come_first_and_oldest_first(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=2, batch_timeout_micros=0, max_enqueued_batches=10)
    bench.occupy()
    for name in "abcde":
        queue.schedule(Piece(1, name))
    bench.release()
    assert bench.wait_for(3) == [2, 2, 1]
    assert bench.names() == [["a", "b"], ["c", "d"], ["e"]]


def test_with_timeout_zero_a_free_thread_takes_whatever_waits(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=10)
    queue.schedule(Piece(1))
    bench.clock.settle()
    assert bench.wait_for(1) == [1]
    bench.occupy()
    for _ in range(7):
        queue.schedule(Piece(1))
    bench.release()
    assert bench.wait_for(1) == [7]


def test_queues_are_served_in_turn_one_batch_each(bench: Bench) -> None:
    first, second, third = (bench.queue(max_batch_size=2) for _ in range(3))
    bench.occupy()
    for number in range(3):
        first.schedule(Piece(2, f"first{number}"))
    second.schedule(Piece(1, "second0"))
    third.schedule(Piece(2, "third0"))
    third.schedule(Piece(2, "third1"))
    bench.release()
    bench.wait_for(6)
    assert bench.names() == [["first0"], ["second0"], ["third0"], ["first1"], ["third1"], ["first2"]]


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_batches_run_at_once_as_there_are_threads(
    make_bench: Callable[..., Bench], threads: int
) -> None:
    bench = make_bench(threads)
    queue = bench.queue(max_batch_size=1, max_enqueued_batches=10)
    bench.gate.clear()
    for _ in range(5):
        queue.schedule(Piece(1))
    for _ in range(threads):
        assert bench.entered.acquire(timeout=10)
    bench.clock.settle()
    assert tasks_waiting(queue) == 5 - threads
    assert len(bench.batches) == threads
    bench.release()
    bench.wait_for(5)


def test_a_task_that_is_too_large_is_refused_first_even_when_the_queue_is_full(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=4, max_enqueued_batches=1, batch_timeout_micros=1000)
    bench.occupy()
    queue.schedule(Piece(4))
    assert refusal(queue.schedule, Piece(5)) == (
        "INVALID_ARGUMENT",
        "Task size 5 is larger than maximum input batch size 4",
    )
    assert refusal(queue.schedule, Piece(1))[0] == "UNAVAILABLE"


def test_without_splitting_the_queue_is_full_only_when_the_task_needs_another_batch(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=10, max_enqueued_batches=2, batch_timeout_micros=1000)
    bench.occupy()
    queue.schedule(Piece(6))
    queue.schedule(Piece(6))
    queue.schedule(Piece(4))
    assert refusal(queue.schedule, Piece(1)) == (
        "UNAVAILABLE",
        FULL + "currently 2 batches enqueued and max_enqueued_batches is 2",
    )
    assert tasks_waiting(queue) == 3
    bench.release()
    assert bench.wait_for(2) == [6, 10]


def test_running_batches_do_not_count_against_the_queue(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=2, max_enqueued_batches=1)
    bench.gate.clear()
    queue.schedule(Piece(2))
    assert bench.entered.acquire(timeout=10)
    queue.schedule(Piece(2))
    bench.release()


def test_with_splitting_the_queue_is_full_when_the_rows_do_not_fit(bench: Bench) -> None:
    queue = bench.queue(
        max_batch_size=20,
        max_enqueued_batches=2,
        batch_timeout_micros=1000,
        enable_large_batch_splitting=True,
        max_execution_batch_size=5,
    )
    bench.occupy()
    queue.schedule(Piece(7))
    assert refusal(queue.schedule, Piece(4)) == (
        "UNAVAILABLE",
        FULL
        + "task size is 4 but scheduling capacity is only 3 (num_enqueued_batches=2, max_enqueued_batches=2, "
        "open_batch_size=2, max_execution_batch_size=5)",
    )
    queue.schedule(Piece(3))


def test_splitting_fills_the_open_batch_then_full_batches_then_the_rest(bench: Bench) -> None:
    queue = bench.queue(
        max_batch_size=20,
        batch_timeout_micros=1000,
        enable_large_batch_splitting=True,
        max_execution_batch_size=5,
    )
    bench.occupy()
    queue.schedule(Piece(3, "a"))
    queue.schedule(Piece(14, "b"))
    queue.schedule(Piece(2, "c"))
    assert tasks_waiting(queue) == 6
    bench.release()
    bench.clock.advance(1000)
    assert bench.wait_for(4) == [5, 5, 5, 4]
    assert bench.names() == [["a", "b[0]"], ["b[1]"], ["b[2]"], ["b[3]", "c"]]


def test_a_full_open_batch_gets_no_part_of_a_split_task(bench: Bench) -> None:
    queue = bench.queue(
        max_batch_size=8,
        batch_timeout_micros=1000,
        enable_large_batch_splitting=True,
        max_execution_batch_size=4,
    )
    bench.occupy()
    queue.schedule(Piece(4, "a"))
    queue.schedule(Piece(3, "b"))
    queue.schedule(Piece(6, "c"))
    bench.release()
    bench.clock.advance(1000)
    assert bench.wait_for(4) == [4, 4, 4, 1]
    assert bench.names() == [["a"], ["b", "c[0]"], ["c[1]"], ["c[2]"]]


def test_with_splitting_and_no_execution_size_batches_are_as_large_as_tasks_may_be(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=6, batch_timeout_micros=1000, enable_large_batch_splitting=True)
    bench.occupy()
    queue.schedule(Piece(4, "a"))
    queue.schedule(Piece(4, "b"))
    bench.release()
    bench.clock.advance(1000)
    assert bench.wait_for(2) == [6, 2]


def test_max_execution_batch_size_is_ignored_without_splitting(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=8, max_execution_batch_size=2, batch_timeout_micros=1000)
    queue.schedule(Piece(8))
    assert bench.wait_for(1) == [8]


def test_closing_a_queue_runs_the_rest_at_once_and_waits_for_it(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(2)
    queue = bench.queue(max_batch_size=10, batch_timeout_micros=10**9)
    queue.schedule(Piece(3))
    queue.close()
    assert bench.wait_for(1) == [3]
    assert bench.batches[0].close_reason == "closed"
    assert refusal(queue.schedule, Piece(1))[0] == "UNAVAILABLE"
    queue.close()


def test_closing_the_scheduler_processes_everything_in_every_queue(bench: Bench) -> None:
    queues = [bench.queue(max_batch_size=4, batch_timeout_micros=10**9) for _ in range(3)]
    for queue in queues:
        queue.schedule(Piece(3))
        queue.schedule(Piece(3))
    bench.scheduler.close()
    assert bench.wait_for(6) == [3] * 6
    bench.scheduler.close()
    with pytest.raises(StatusError, match="UNAVAILABLE"):
        bench.queue()


def test_empty_batches_are_never_delivered(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=4, batch_timeout_micros=1000)
    queue.schedule(Piece(4))
    bench.clock.advance(5000)
    queue.close()
    assert bench.wait_for(1) == [4]


def test_no_enqueued_batches_means_one_without_splitting(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=4, max_enqueued_batches=0, batch_timeout_micros=1000)
    bench.occupy()
    queue.schedule(Piece(4))
    assert (
        refusal(queue.schedule, Piece(1))[1]
        == FULL + "currently 1 batches enqueued and max_enqueued_batches is 1"
    )


def test_a_task_without_rows_is_delivered_instead_of_hanging(bench: Bench) -> None:
    queue = bench.queue(max_batch_size=4, batch_timeout_micros=1000)
    queue.schedule(Piece(0, "empty"))
    bench.clock.advance(1000)
    assert bench.wait_for(1) == [0]
    queue.schedule(Piece(0))
    queue.close()
    assert bench.wait_for(2) == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "input_batch_size_limit must be positive; was 0"),
        ({"batch_timeout_micros": -1}, "batch_timeout_micros must be non-negative; was -1"),
        (
            {"max_enqueued_batches": 0, "enable_large_batch_splitting": True},
            "max_enqueued_batches must be positive; was 0",
        ),
        pytest.param(
            {"max_batch_size": 5, "max_execution_batch_size": 10, "enable_large_batch_splitting": True},
            "When enable_large_batch_splitting is true, input_batch_size_limit must be greater "
            "than or equal to max_execution_batch_size.1510",
        ),
        (
            {"max_execution_batch_size": 0, "enable_large_batch_splitting": True},
            "max_execution_batch_size must be positive; was 0",
        ),
    ],
)
def test_options_that_break_a_rule_are_refused_with_the_reference_text(
    bench: Bench, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StatusError) as caught:
        bench.queue(**options)
    assert (caught.value.code, caught.value.message) == ("INVALID_ARGUMENT", message)


def test_a_scheduler_needs_a_thread() -> None:
    with pytest.raises(StatusError) as caught:
        SharedBatchScheduler(num_batch_threads=0)
    assert caught.value.message == "num_batch_threads must be positive; was 0"
    before = threading.active_count()
    with pytest.raises(StatusError, match="num_batch_threads must be at most 4096; was 4097"):
        SharedBatchScheduler(num_batch_threads=4097)
    assert threading.active_count() == before


def test_the_defaults_are_those_of_tf_serving() -> None:
    options = QueueOptions()
    assert (options.max_batch_size, options.batch_timeout_micros, options.max_enqueued_batches) == (
        1000,
        0,
        10,
    )
    assert (options.enable_large_batch_splitting, options.max_execution_batch_size) == (False, None)
    assert options.allowed_batch_sizes == ()


def test_a_callback_that_raises_does_not_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = SharedBatchScheduler(num_batch_threads=1)
    done = threading.Event()

    def process(batch: Batch[Piece]) -> None:
        if batch.tasks[0].name == "bad":
            raise RuntimeError("no such device")
        done.set()

    queue = scheduler.add_queue(QueueOptions(max_batch_size=1), process)
    queue.schedule(Piece(1, "bad"))
    queue.schedule(Piece(1, "good"))
    assert done.wait(10)
    queue.close()
    scheduler.close()
    assert "no such device" in caplog.text


def test_a_parked_thread_keeps_no_batch_alive() -> None:
    import gc
    import weakref

    clock = ManualClock()
    scheduler = SharedBatchScheduler(num_batch_threads=1, clock=clock)
    queue = scheduler.add_queue(QueueOptions(max_batch_size=1), lambda batch: None)
    piece = Piece(1)
    gone = weakref.ref(piece)
    queue.schedule(piece)
    del piece
    queue.close()
    clock.settle()
    gc.collect()
    scheduler.close()
    assert gone() is None


def test_the_monotonic_clock_runs_batches_by_their_timeout() -> None:
    clock = Clock()
    scheduler = SharedBatchScheduler(num_batch_threads=2, clock=clock)
    done = threading.Event()
    waits: list[int] = []

    def process(batch: Batch[Piece]) -> None:
        waits.append(clock.now_micros() - batch.opened_micros)
        done.set()

    queue = scheduler.add_queue(QueueOptions(max_batch_size=10, batch_timeout_micros=3000), process)
    queue.schedule(Piece(1))
    assert done.wait(10)
    scheduler.close()
    assert waits[0] >= 3000


def test_two_queues_with_different_timeouts_share_one_timekeeper(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(2)
    slow = bench.queue(max_batch_size=10, batch_timeout_micros=1000)
    fast = bench.queue(max_batch_size=10, batch_timeout_micros=100)
    slow.schedule(Piece(1, "slow"))
    bench.clock.advance(500)
    fast.schedule(Piece(1, "fast"))
    bench.clock.advance(100)
    bench.wait_for(1)
    assert (tasks_waiting(slow), bench.names()) == (1, [["fast"]])
    bench.clock.advance(400)
    bench.wait_for(2)
    assert bench.names() == [["fast"], ["slow"]]


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        ManualClock().advance(-1)
