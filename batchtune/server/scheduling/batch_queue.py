"""Makes batches of the tasks of queues, and chooses which batch runs next, on which thread.

TensorFlow's SharedBatchScheduler: many queues, each a deque of closed batches and one open batch, and one pool of
threads that takes batches from them with `take`. Semantics: `tensorflow/core/kernels/batching_util/
shared_batch_scheduler.h` of TF 2.21, but for two things: a thread sleeps until the earliest timeout instead of polling
every millisecond, and a task without rows is delivered instead of hanging.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

from batchtune.batching.parameters import BatchingParameters, default_num_batch_threads, validate
from batchtune.errors import BatchingParametersError
from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads, Clock
from batchtune.wire.status import StatusError, invalid_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """TF Serving's options of a queue, with its defaults.

    max_batch_size: most rows of one task, and of a batch unless splitting is on.
    batch_timeout_micros: from the first task of the open batch; 0: the batch runs as soon as a thread is free.
    max_enqueued_batches: most batches that wait for a thread, the open batch included; 0 counts as 1 (with splitting it
    breaks a rule).
    max_execution_batch_size: most rows of a batch when splitting is on (None: max_batch_size); ignored otherwise.
    allowed_batch_sizes: rows, ascending, to which a batch is padded before it runs; (): no padding.
    """

    max_batch_size: int = 1000
    batch_timeout_micros: int = 0
    max_enqueued_batches: int = 10
    enable_large_batch_splitting: bool = False
    max_execution_batch_size: int | None = None
    allowed_batch_sizes: tuple[int, ...] = ()

    @property
    def batch_size_limit(self) -> int:
        """Most rows of a batch: max_execution_batch_size if splitting is on and it is set, otherwise max_batch_size."""
        if self.enable_large_batch_splitting and self.max_execution_batch_size is not None:
            return self.max_execution_batch_size
        return self.max_batch_size

    def validate(self, *, sizes: bool = False) -> None:
        """Check the options against the rules of `SharedBatchScheduler::AddQueue`, with its error texts.

        `sizes`: whether to check too that allowed_batch_sizes ascend and end at max_batch_size, as
        `WrapSessionForBatching` of TF Serving does, with splitting and without. Raises StatusError INVALID_ARGUMENT for
        a broken rule.
        """
        parameters = BatchingParameters(**asdict(self if sizes else replace(self, allowed_batch_sizes=())))
        try:
            validate(parameters)
        except BatchingParametersError as error:
            raise invalid_argument(error.message) from error


def split_sizes(size: int, open_slot: int, limit: int) -> list[int]:
    """Return the rows of each part of a task of `size` rows: a part for the open batch, full batches, and the rest.

    open_slot: rows for which the open batch has room; limit: rows of a full batch. Source: TensorFlow's
    `InputSplitMetadata`.
    """
    sizes = [min(size, open_slot)] if open_slot > 0 else []
    rest = size - sum(sizes)
    sizes += [limit] * (rest // limit)
    if rest % limit or not sizes:
        sizes.append(rest % limit)
    return sizes


def next_allowed_size(rows: int, allowed_sizes: Sequence[int]) -> int:
    """Return the rows to which a batch of `rows` rows is padded: the smallest of the ascending `allowed_sizes` that is
    large enough; `rows` if none of them is."""
    return next((size for size in allowed_sizes if size >= rows), rows)


CloseReason = Literal["full", "timeout", "no_room", "closed"]


class Task(Protocol):
    """A protocol: a unit of work that a queue accepts, such as one request; only a queue with splitting on divides
    it."""

    @property
    def size(self) -> int:
        """Number of rows."""

    def split(self, sizes: Sequence[int]) -> Sequence[Any]:
        """Return new tasks of these sizes (rows) in place of this task; called only when splitting is on."""


TaskT = TypeVar("TaskT", bound=Task)


class Batch(Generic[TaskT]):
    """Tasks that run together.

    size: sum of the rows of all tasks. enqueued_micros: when each task was scheduled, in the order of `tasks`.
    opened_micros: when the first task was scheduled; the batch timeout counts from then. close_reason: why the batch
    accepts no more tasks; valid once a thread has the batch. Times are on the scheduler's clock.
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
        """Add a task of `size` rows that was scheduled at `enqueued_micros`, on the scheduler's clock."""
        if not self.tasks:
            self.opened_micros = enqueued_micros
        self.tasks.append(task)
        self.enqueued_micros.append(enqueued_micros)
        self.size += size


class BatchQueue(Generic[TaskT]):
    """One queue of a scheduler; made by `SharedBatchScheduler.add_queue`; any thread may call it.

    process_batch: runs a batch, on a batch thread. on_gone: called once, while the scheduler's lock is held,
    when the queue is closed and empty.
    """

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
        """Number of rows that no thread has taken, the open batch included."""
        with self._lock:
            return sum(batch.size for batch in self._waiting) + self._open.size

    @property
    def num_enqueued_tasks(self) -> int:
        """Number of tasks that no thread has taken; each part of a split task counts."""
        with self._lock:
            return sum(len(batch.tasks) for batch in (*self._waiting, self._open))

    @property
    def scheduling_capacity(self) -> int:
        """Number of rows that still fit into the queue; without splitting, a task must fit into one batch."""
        with self._lock:
            return self._capacity()

    @property
    def num_enqueued_batches(self) -> int:
        """Number of batches with tasks that wait for a thread, the open batch included."""
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
        """Refuse new tasks, run the waiting tasks at once, and return when all have been processed."""
        self.begin_close()
        self._gone.wait()

    def begin_close(self) -> None:
        """Refuse new tasks and let the waiting tasks run at once; returns without waiting for them."""
        with self._lock:
            self._closed = True
            self._threads.wake_all()
            self._leave_if_done()

    def take(self, now_micros: int) -> Batch[TaskT] | None:
        """Remove and return the oldest batch if it is full, closed, or timed out at `now_micros` (the scheduler's
        clock), else None.

        Called by the scheduler, which holds its lock.
        """
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
        """Instant, on the scheduler's clock, at which the open batch times out, NEVER_MICROS while it is empty; the
        caller holds the scheduler's lock."""
        return self._open.opened_micros + self._timeout_micros if self._open.tasks else NEVER_MICROS

    @property
    def pending(self) -> bool:
        """Whether a task waits for a thread; the caller holds the scheduler's lock."""
        return bool(self._waiting or self._open.tasks)

    def finished(self, batch: Batch[TaskT]) -> None:  # noqa: ARG002 the pool's interface
        """Count a batch as processed; called by a batch thread, which holds the scheduler's lock."""
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

    def _capacity(self) -> int:
        return (self._batches_max - len(self._waiting)) * self._limit - self._open.size

    def _schedule_parts(self, task: TaskT, size: int) -> None:
        capacity = self._capacity()
        if size > capacity:
            raise StatusError(
                "UNAVAILABLE",
                "The batch scheduling queue to which this task was submitted is full; task size is "
                f"{size} but scheduling capacity is only {capacity} "
                f"(num_enqueued_batches={len(self._waiting) + 1}, max_enqueued_batches={self._batches_max}, "
                f"open_batch_size={self._open.size}, max_execution_batch_size={self._limit})",
            )
        sizes = split_sizes(size, self._limit - self._open.size, self._limit)
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


class SharedBatchScheduler:
    """A pool of batch threads that serves its queues in turn, one batch per queue per round.

    num_batch_threads None: TF Serving's default, one per CPU. Raises StatusError INVALID_ARGUMENT for fewer
    than one thread or more than THREADS_MAX.
    """

    def __init__(
        self,
        *,
        num_batch_threads: int | None = None,
        clock: Clock | None = None,
        thread_pool_name: str = "batch_threads",
    ) -> None:
        self._queues: list[BatchQueue[Any]] = []
        self._next = 0
        self._threads: BatchThreads[Batch[Any]] = BatchThreads(
            count=default_num_batch_threads() if num_batch_threads is None else num_batch_threads,
            clock=clock or Clock(),
            name=thread_pool_name,
            source=self,
        )

    @property
    def clock(self) -> Clock:
        """The clock on which the scheduler's times are."""
        return self._threads.clock

    def add_queue(
        self, options: QueueOptions, process_batch: Callable[[Batch[TaskT]], None]
    ) -> BatchQueue[TaskT]:
        """Add a queue whose batches are passed to `process_batch` on a batch thread.

        Raises StatusError INVALID_ARGUMENT for options that break a rule, UNAVAILABLE after `close`.
        """
        options.validate()
        queue: BatchQueue[TaskT] = BatchQueue(options, process_batch, self._threads, self._forget)
        with self._threads.lock:
            if self._threads.count == 0:
                raise StatusError("UNAVAILABLE", "The batch scheduler is closed")
            self._queues.append(queue)
        return queue

    def close(self) -> None:
        """Close every queue, wait until every queued task is processed, end the threads."""
        with self._threads.lock:
            queues = list(self._queues)
        for queue in queues:
            queue.begin_close()
        for queue in queues:
            queue.close()
        self._threads.stop()

    def take(self, now_micros: int) -> tuple[tuple[BatchQueue[Any], Batch[Any]] | None, int]:
        """Return ((queue, batch), NEVER_MICROS) for a batch to run at `now_micros`; else (None, instant at which to
        call again), both on `clock`.

        The instant is NEVER_MICROS while every queue is empty. Called by the batch threads, which hold the scheduler's
        lock.
        """
        due_micros = NEVER_MICROS
        for _ in range(len(self._queues)):
            queue = self._queues[self._next]
            self._next = (self._next + 1) % len(self._queues)
            batch = queue.take(now_micros)
            if batch is not None:
                return (queue, batch), NEVER_MICROS
            due_micros = min(due_micros, queue.due_micros)
        return None, due_micros

    def pending(self) -> bool:
        """Whether a task waits in any queue; called by the batch threads, which hold the scheduler's lock."""
        return any(queue.pending for queue in self._queues)

    def _forget(self, queue: BatchQueue[Any]) -> None:
        index = self._queues.index(queue)
        del self._queues[index]
        if index < self._next:
            self._next -= 1
        if self._next >= len(self._queues):
            self._next = 0


class BasicBatchScheduler(Generic[TaskT]):
    """One queue with threads of its own; `options`: the fields of QueueOptions, by name.

    Raises StatusError INVALID_ARGUMENT for options that break a rule, TypeError for a name that QueueOptions does not
    have.
    """

    def __init__(
        self,
        process_batch: Callable[[Batch[TaskT]], None],
        *,
        num_batch_threads: int | None = None,
        clock: Clock | None = None,
        thread_pool_name: str = "batch_threads",
        **options: Any,
    ) -> None:
        checked = QueueOptions(**options)
        checked.validate()
        self._shared = SharedBatchScheduler(
            num_batch_threads=num_batch_threads, clock=clock, thread_pool_name=thread_pool_name
        )
        self._queue = self._shared.add_queue(checked, process_batch)

    @property
    def num_enqueued_tasks(self) -> int:
        """Number of tasks that no thread has taken."""
        return self._queue.num_enqueued_tasks

    @property
    def scheduling_capacity(self) -> int:
        """Number of rows that still fit into the queue."""
        return self._queue.scheduling_capacity

    def schedule(self, task: TaskT) -> None:
        """Put `task` into the open batch, or its parts into several; never blocks.

        Raises StatusError: INVALID_ARGUMENT for a task that is too large, UNAVAILABLE when the queue is full or closed.
        """
        self._queue.schedule(task)

    def close(self) -> None:
        """Run the waiting tasks at once, then end the threads."""
        self._shared.close()
