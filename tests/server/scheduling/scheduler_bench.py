"""A scheduler under a manual clock whose batches can be held up on their threads, as a busy device would."""

from __future__ import annotations

import itertools
import string
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from batchtune.server.scheduling.batch_queue import Batch, QueueOptions, SharedBatchScheduler
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock


class Piece:
    """A task of `size` rows; remembers how it was split."""

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name

    def split(self, sizes: Sequence[int]) -> list[Piece]:
        return [Piece(size, f"{self.name}[{index}]") for index, size in enumerate(sizes)]


class Rows:
    """A task that knows its rows by their numbers."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = list(rows)
        self.size = len(self.rows)

    def split(self, sizes: Sequence[int]) -> list[Rows]:
        assert sum(sizes) == self.size
        rows = iter(self.rows)
        return [Rows(itertools.islice(rows, size)) for size in sizes]


class Bench:
    def __init__(self, threads: int = 1, scheduler: Callable[..., Any] = SharedBatchScheduler) -> None:
        self.clock = ManualClock()
        self.scheduler = scheduler(num_batch_threads=threads, clock=self.clock)
        self.batches: list[Batch[Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()

    def process(self, batch: Batch[Any]) -> None:
        with self.changed:
            self.batches.append(batch)
            self.changed.notify_all()
        self.gate.wait(10)

    def queue(self, **options: Any) -> Any:
        return self.scheduler.add_queue(QueueOptions(**options), self.process)

    def occupy(self) -> None:
        """Keep a thread busy with a batch of another queue until the gate opens."""
        self.gate.clear()
        busy = threading.Event()

        def block(_: Batch[Piece]) -> None:
            busy.set()
            self.gate.wait(10)

        self.scheduler.add_queue(QueueOptions(max_batch_size=1), block).schedule(Piece(1))
        assert busy.wait(10)

    def wait_for(self, count: int) -> list[str]:
        """What `ran` returns, once there are `count` batches."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.batches) >= count, timeout=10)
            return self.ran()

    def ran(self) -> list[str]:
        """Of each batch so far its tasks, and why it was closed."""
        return [" ".join([*(task.name for task in one.tasks), one.close_reason]) for one in self.batches]

    def play(self, queue: Any, trace: str) -> list[str]:
        """The refusals of a trace of `3` (a task of 3 rows, named a, b, ...), `+9` (9 µs pass), `hold` (a thread is
        busy from now on), `shut` (batches stay on their threads) and `go`; at its end the queue is closed."""
        names, refusals = iter(string.ascii_lowercase), []
        for word in trace.split():
            match word:
                case "hold":
                    self.occupy()
                case "shut":
                    self.gate.clear()
                case "go":
                    self.gate.set()
                case _ if word.startswith("+"):
                    self.clock.advance(int(word))
                case _:
                    try:
                        queue.schedule(Piece(int(word), next(names)))
                    except StatusError as error:
                        refusals.append(str(error))
        self.gate.set()
        queue.close()
        return refusals

    def close(self) -> None:
        self.gate.set()
        self.scheduler.close()


def tasks_waiting(queue: Any) -> int:
    return sum(len(batch.tasks) for batch in (*queue._waiting, queue._open))
