"""How do the tasks of one queue become batches of the adaptive scheduler?

Source: `ASBSQueue` in `tensorflow/core/kernels/batching_util/adaptive_shared_batch_scheduler.h`. A batch is known to
the scheduler from its first task on; it closes when it is full, when a task does not fit, or when it is taken.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic

from batchtune.server.scheduling.batch_queue import Batch, CloseReason, TaskT
from batchtune.server.scheduling.batch_threads import BatchThreads
from batchtune.server.scheduling.queue_options import QueueOptions, split_sizes
from batchtune.wire.status import StatusError, invalid_argument


class AdaptiveBatch(Batch[TaskT]):
    """A batch that knows its queue; `opened_micros` is its creation."""

    __slots__ = ("closed", "due_micros", "express", "queue")

    def __init__(self, queue: AdaptiveQueue[TaskT], now_micros: int, timeout_micros: int) -> None:
        super().__init__()
        self.queue = queue
        self.opened_micros = now_micros
        self.due_micros = now_micros + timeout_micros
        self.closed = False
        self.express = False


class WaitingBatches:
    """The waiting batches of all queues in the order of their creation; with the lock held.

    Taking the first one must stay cheap when a million wait, as they may while max_batch_size is being searched.
    """

    __slots__ = ("_batches", "_closed")

    def __init__(self) -> None:
        self._batches: OrderedDict[AdaptiveBatch[Any], None] = OrderedDict()
        self._closed = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __iter__(self) -> Iterator[AdaptiveBatch[Any]]:
        return iter(self._batches)

    def add(self, batch: AdaptiveBatch[Any]) -> None:
        self._batches[batch] = None

    def close(self, batch: AdaptiveBatch[Any]) -> None:
        """The batch takes no more tasks: it may run at once."""
        batch.closed = True
        self._closed += 1

    def remove(self, batch: AdaptiveBatch[Any]) -> None:
        del self._batches[batch]
        self._closed -= batch.closed

    def first_closed(self) -> AdaptiveBatch[Any] | None:
        return next((batch for batch in self._batches if batch.closed), None) if self._closed else None


class AdaptiveQueue(Generic[TaskT]):
    """One queue of the scheduler; safe to use from any thread."""

    def __init__(
        self,
        options: QueueOptions,
        process_batch: Callable[[Batch[TaskT]], None],
        threads: BatchThreads[AdaptiveBatch[Any]],
        batches: WaitingBatches,
        on_gone: Callable[[AdaptiveQueue[TaskT]], None],
    ) -> None:
        self.process = process_batch
        self._options = options
        self._threads = threads
        self._lock = threads.lock
        self._batches = batches
        self._on_gone = on_gone
        self._open: AdaptiveBatch[TaskT] | None = None
        self._waiting: dict[AdaptiveBatch[TaskT], None] = {}
        self._running = 0
        self._closed = False
        self._done = threading.Event()

    @property
    def num_enqueued_rows(self) -> int:
        with self._lock:
            return sum(batch.size for batch in self._waiting)

    @property
    def num_enqueued_batches(self) -> int:
        with self._lock:
            return len(self._waiting)

    def schedule(self, task: TaskT) -> None:
        """Put `task` into the open batch, or a new one; raises StatusError INVALID_ARGUMENT or UNAVAILABLE."""
        size = task.size
        with self._lock:
            self._refuse_unless_it_fits(size)
            limit = self._options.batch_size_limit
            room = limit - (self._open.size if self._open is not None else 0)
            if not self._options.enable_large_batch_splitting or size <= room:
                self._enqueue(task, size)
                return
            sizes = split_sizes(size, room if self._open is not None else 0, limit)
            for part, part_size in zip(task.split(sizes), sizes, strict=True):
                self._enqueue(part, part_size)

    def close(self) -> None:
        """Refuse new tasks, run at once what waits, return when it is processed."""
        with self._lock:
            self._closed = True
            self._close_open("closed")
            self._finish_if_done()
        self._done.wait()

    def release(self, batch: AdaptiveBatch[TaskT]) -> None:
        """For the scheduler, with the lock held: the batch is about to run and takes no more tasks."""
        del self._waiting[batch]
        self._running += 1
        if batch is self._open:
            batch.close_reason = "timeout"
            self._open = None

    def batch_finished(self) -> None:
        """For the scheduler, with the lock held."""
        self._running -= 1
        self._finish_if_done()

    def _refuse_unless_it_fits(self, size: int) -> None:
        options = self._options
        if self._closed:
            raise StatusError("UNAVAILABLE", "The batch scheduling queue is closed")
        if not options.enable_large_batch_splitting and size > options.batch_size_limit:
            raise invalid_argument(
                f"Task size {size} is larger than maximum batch size {options.batch_size_limit}"
            )
        if size > options.max_batch_size:
            raise invalid_argument(
                f"Task size {size} is larger than max input task size {options.max_batch_size}"
            )
        if size > self._capacity():
            raise StatusError("UNAVAILABLE", "The batch scheduling queue is full")

    def _capacity(self) -> int:
        limit = self._options.batch_size_limit
        room = limit - self._open.size if self._open is not None else 0
        return max((self._options.max_enqueued_batches - len(self._waiting)) * limit + room, 0)

    def _enqueue(self, task: TaskT, size: int) -> None:
        now_micros = self._threads.clock.now_micros()
        limit = self._options.batch_size_limit
        if self._open is not None and self._open.size + size > limit:
            self._close_open("no_room")
        batch = self._open
        if batch is None:
            batch = self._open = AdaptiveBatch(self, now_micros, self._options.batch_timeout_micros)
            self._waiting[batch] = None
            self._batches.add(batch)
        batch.add(task, size, now_micros)
        if batch.size == limit:
            self._close_open("full")
        elif len(batch.tasks) == 1:
            self._threads.wake_at(batch.due_micros)

    def _close_open(self, reason: CloseReason) -> None:
        batch, self._open = self._open, None
        if batch is not None:
            self._batches.close(batch)
            batch.close_reason = reason
            self._threads.wake()

    def _finish_if_done(self) -> None:
        if self._closed and not self._running and not self._waiting:
            self._done.set()
            self._on_gone(self)


def check_queue(options: QueueOptions) -> None:
    """Raise INVALID_ARGUMENT with the reference's texts."""
    limit = options.batch_size_limit
    if limit < 1:
        raise invalid_argument(f"max_batch_size must be positive; was {limit}")
    if options.max_enqueued_batches < 1:
        raise invalid_argument(f"max_enqueued_batches must be positive; was {options.max_enqueued_batches}")
    if options.max_batch_size < limit:
        raise invalid_argument(
            "max_input_task_size must be larger than or equal to max_batch_size;got max_input_task_size as "
            f"{options.max_batch_size} and max_batch_size as {limit}"
        )
