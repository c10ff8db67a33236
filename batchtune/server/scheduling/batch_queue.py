"""How do the tasks of one queue become batches?

A deque of closed batches and one open batch; semantics of the internal Queue in TensorFlow's
`shared_batch_scheduler.h`. The queue has no thread of its own: a pool asks it for batches with `take`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads
from batchtune.server.scheduling.queue_options import QueueOptions, split_sizes
from batchtune.wire.status import StatusError, invalid_argument

CloseReason = Literal["full", "timeout", "no_room", "closed"]


class Task(Protocol):
    """What is scheduled; whole unless `enable_large_batch_splitting` is on."""

    @property
    def size(self) -> int:
        """Rows."""

    def split(self, sizes: Sequence[int]) -> Sequence[Any]:
        """Tasks of these sizes, in order, that together stand for this one; only asked for when splitting is on."""


TaskT = TypeVar("TaskT", bound=Task)


class Batch(Generic[TaskT]):
    """Tasks that run together.

    size: rows. enqueued_micros: when each task was scheduled, parallel to `tasks`. opened_micros: from when the
    timeout counts. close_reason: valid once the batch is handed out.
    """

    __slots__ = ("announced", "close_reason", "enqueued_micros", "opened_micros", "size", "tasks")

    def __init__(self) -> None:
        self.tasks: list[TaskT] = []
        self.enqueued_micros: list[int] = []
        self.size = 0
        self.opened_micros = 0
        self.close_reason: CloseReason = "timeout"
        self.announced = False  # a thread was woken because the batch became schedulable

    def add(self, task: TaskT, size: int, enqueued_micros: int) -> None:
        if not self.tasks:
            self.opened_micros = enqueued_micros
        self.tasks.append(task)
        self.enqueued_micros.append(enqueued_micros)
        self.size += size


class BatchQueue(Generic[TaskT]):
    """One queue of a scheduler; made by `SharedBatchScheduler.add_queue`, safe to use from any thread."""

    def __init__(
        self,
        options: QueueOptions,
        process_batch: Callable[[Batch[TaskT]], None],
        threads: BatchThreads[Batch[TaskT]],
        on_gone: Callable[[BatchQueue[TaskT]], None],
    ) -> None:
        self.process = process_batch
        self._threads = threads
        self._lock = threads.lock
        self._now_micros = threads.clock.now_micros
        self._on_gone = on_gone
        self._waiting: deque[Batch[TaskT]] = deque()
        self._open: Batch[TaskT] = Batch()
        self._running = 0
        self._closed = False
        self._gone = threading.Event()
        self._limit = options.batch_size_limit
        self._task_limit = options.max_batch_size
        self._timeout_micros = options.batch_timeout_micros
        self._batches_max = max(options.max_enqueued_batches, 1)
        self._splits = options.enable_large_batch_splitting

    @property
    def num_enqueued_rows(self) -> int:
        with self._lock:
            return sum(batch.size for batch in self._waiting) + self._open.size

    @property
    def num_enqueued_batches(self) -> int:
        """Waiting batches that hold a task."""
        with self._lock:
            return len(self._waiting) + bool(self._open.tasks)

    def schedule(self, task: TaskT) -> None:
        """Put `task` into the open batch, or its parts into several; never blocks.

        Raises StatusError: INVALID_ARGUMENT for a task that is too large, UNAVAILABLE when the queue is full or
        closed. A task without rows waits for the timeout like any other (TensorFlow never delivers it).
        """
        size = task.size
        with self._lock:
            batch = self._open
            if batch.tasks and batch.size + size < self._limit and not self._closed:
                batch.tasks.append(task)  # neither opens the batch nor fills it: nobody need be woken
                batch.enqueued_micros.append(self._now_micros())
                batch.size += size
                return
            if self._closed:
                raise StatusError(
                    "UNAVAILABLE", "The batch scheduling queue to which this task was submitted is closed"
                )
            if size > self._task_limit:
                raise invalid_argument(
                    f"Task size {size} is larger than maximum input batch size {self._task_limit}"
                )
            if self._open.size + size <= self._limit:
                self._enqueue(task, size, self._now_micros())
            elif self._splits:
                self._schedule_parts(task, size)
            elif len(self._waiting) + 1 >= self._batches_max:
                raise StatusError(
                    "UNAVAILABLE",
                    "The batch scheduling queue to which this task was submitted is full; currently "
                    f"{len(self._waiting) + 1} batches enqueued and max_enqueued_batches is {self._batches_max}",
                )
            else:
                self._enqueue(task, size, self._now_micros())

    def close(self) -> None:
        """Refuse new tasks, run at once what waits, and return when all of it has been processed."""
        self.begin_close()
        self._gone.wait()

    def begin_close(self) -> None:
        """`close` without the wait."""
        with self._lock:
            self._closed = True
            self._threads.wake_all()
            self._leave_if_done()

    def take(self, now_micros: int) -> Batch[TaskT] | None:
        """The oldest batch if it may run now; for the pool, with the lock held."""
        if self._waiting:
            self._running += 1
            return self._waiting.popleft()
        batch = self._open
        if not batch.tasks or not self._schedulable(batch, now_micros):
            return None
        self._open = Batch()
        self._running += 1
        return batch

    @property
    def due_micros(self) -> int:
        """When the open batch times out; NEVER_MICROS while it is empty. With the lock held."""
        return self._open.opened_micros + self._timeout_micros if self._open.tasks else NEVER_MICROS

    @property
    def pending(self) -> bool:
        """Whether any task waits; with the lock held."""
        return bool(self._waiting or self._open.tasks)

    def finished(self, batch: Batch[TaskT]) -> None:  # noqa: ARG002 the pool's interface
        self._running -= 1
        self._leave_if_done()

    def _enqueue(self, task: TaskT, size: int, enqueued_micros: int) -> None:
        batch = self._open
        if batch.tasks and batch.size + size > self._limit:
            batch.close_reason = "full" if batch.size >= self._limit else "no_room"
            self._waiting.append(batch)
            if not batch.announced:
                self._threads.wake()
            batch = self._open = Batch()
        batch.add(task, size, enqueued_micros)
        if batch.announced:
            return
        if batch.size >= self._limit or self._timeout_micros == 0:
            batch.announced = True
            self._threads.wake()
        elif len(batch.tasks) == 1:
            self._threads.wake_at(enqueued_micros + self._timeout_micros)

    def _schedule_parts(self, task: TaskT, size: int) -> None:
        room = self._limit - self._open.size
        capacity = (self._batches_max - len(self._waiting) - 1) * self._limit + room
        if size > capacity:
            raise StatusError(
                "UNAVAILABLE",
                "The batch scheduling queue to which this task was submitted is full; task size is "
                f"{size} but scheduling capacity is only {capacity} "
                f"(num_enqueued_batches={len(self._waiting) + 1}, max_enqueued_batches={self._batches_max}, "
                f"open_batch_size={self._open.size}, max_execution_batch_size={self._limit})",
            )
        sizes = split_sizes(size, room, self._limit)
        if len(sizes) == 1:
            self._enqueue(task, size, self._now_micros())
            return
        now_micros = self._now_micros()
        parts: Sequence[TaskT] = task.split(sizes)
        for part, part_size in zip(parts, sizes, strict=True):
            self._enqueue(part, part_size, now_micros)

    def _schedulable(self, batch: Batch[TaskT], now_micros: int) -> bool:
        if batch.size >= self._limit:
            batch.close_reason = "full"
            return True
        if now_micros >= batch.opened_micros + self._timeout_micros:
            batch.close_reason = "timeout"
            return True
        batch.close_reason = "closed"
        return self._closed

    def _leave_if_done(self) -> None:
        if self._closed and not self._running and not self.pending and not self._gone.is_set():
            self._gone.set()
            self._on_gone(self)
