"""TF Serving's StreamingBatchScheduler: each batch owns a thread from its first task on; no batch is queued.

Source: `tensorflow_serving/batching/streaming_batch_scheduler.h`. There a callback watches its batch fill up,
and can begin to work on each task before the batch is full. Here a queue takes that early work as a function
`prepare`: the batch's thread prepares each task as it comes, and calls `process_batch` when the batch has
closed. Without `prepare` the thread is only reserved: it calls `process_batch` when the batch closes. A batch
without tasks is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import compress
from typing import Any, Generic

from batchtune.batching.parameters import default_num_batch_threads
from batchtune.server.scheduling.batch_queue import Batch, CloseReason, QueueOptions, TaskT
from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads, Clock, Parker
from batchtune.wire.status import StatusError, invalid_argument


class StreamingBatchScheduler:
    """Makes queues that each have `num_batch_threads` threads of their own (None: one per CPU).

    Of QueueOptions only max_batch_size and batch_timeout_micros have an effect. A timeout of 0 or less means
    no timeout, as in TF Serving's code (its comment says otherwise): a batch closes only when it is full,
    when a task does not fit, or with the queue. Raises StatusError INVALID_ARGUMENT for fewer than one
    thread.
    """

    def __init__(
        self,
        *,
        num_batch_threads: int | None = None,
        clock: Clock | None = None,
        thread_pool_name: str = "batch_threads",
    ) -> None:
        self.clock = clock or Clock()
        self._count = default_num_batch_threads() if num_batch_threads is None else num_batch_threads
        self._name = thread_pool_name
        self._queues: set[StreamingQueue[Any]] = set()
        self._closed = False
        if self._count < 1:
            raise invalid_argument(f"num_batch_threads must be positive; was {self._count}")

    def add_queue(
        self,
        options: QueueOptions,
        process_batch: Callable[[Batch[TaskT]], None],
        prepare: Callable[[TaskT], bool] | None = None,
    ) -> StreamingQueue[TaskT]:
        """Add a queue whose batches are passed to `process_batch` on a batch thread.

        `prepare` does the early work on one task, on the thread of its batch; a task for which it returns False is
        removed from the batch. Raises StatusError INVALID_ARGUMENT for a max_batch_size below 1, UNAVAILABLE after
        `close`.
        """
        if self._closed:
            raise StatusError("UNAVAILABLE", "The batch scheduler is closed")
        queue: StreamingQueue[TaskT] = StreamingQueue(
            options,
            process_batch,
            prepare,
            count=self._count,
            clock=self.clock,
            name=self._name,
            on_gone=self._queues.discard,
        )
        self._queues.add(queue)
        return queue

    def close(self) -> None:
        """Close every queue; returns when every scheduled task has been processed."""
        self._closed = True
        for queue in list(self._queues):
            queue.close()


class StreamingQueue(Generic[TaskT]):
    """A queue of a StreamingBatchScheduler: its open batch and its threads; any thread may call it."""

    def __init__(
        self,
        options: QueueOptions,
        process_batch: Callable[[Batch[TaskT]], None],
        prepare: Callable[[TaskT], bool] | None = None,
        *,
        count: int,
        clock: Clock,
        name: str,
        on_gone: Callable[[StreamingQueue[TaskT]], None],
    ) -> None:
        _check(options)
        self._on_gone = on_gone
        self.process = process_batch if prepare is None else self._watch
        self._process_batch = process_batch
        self._prepare = prepare
        self._watcher: Parker | None = None  # of the open batch's thread, while it waits for tasks
        self._clock = clock
        self._options = options
        self._open: Batch[TaskT] | None = None
        self._ready: deque[Batch[TaskT]] = deque()
        self._in_progress = 0  # the open batch included, even while it is empty
        self._closed = False
        self._done = threading.Event()
        self._threads: BatchThreads[Batch[TaskT]] = BatchThreads(
            count=count, clock=clock, name=name, source=self
        )
        self._lock = self._threads.lock
        self._now_micros = clock.now_micros

    # Every task belongs to a batch that has a thread.
    num_enqueued_tasks = num_enqueued_rows = num_enqueued_batches = 0

    @property
    def scheduling_capacity(self) -> int:
        """Number of rows that fit into the open batch and into a batch for each free thread; 0 when closed."""
        with self._lock:
            free = self._threads.count - self._in_progress
            if self._closed or free < 0:
                return 0
            limit = self._options.max_batch_size
            return free * limit + (limit - self._open.size if self._open is not None else 0)

    def schedule(self, task: TaskT) -> None:
        """Put `task` into the open batch, or into a new batch if a thread is free; never blocks.

        Raises StatusError: INVALID_ARGUMENT for a task that is too large, UNAVAILABLE when no thread is free
        or the queue is closed.
        """
        size = task.size
        with self._lock:
            limit = self._options.max_batch_size
            if self._closed:
                raise StatusError(
                    "UNAVAILABLE", "The batch scheduler to which this task was submitted is closed"
                )
            if size > limit:
                raise invalid_argument(f"Task size {size} is larger than maximum batch size {limit}")
            if self._open is None or self._open.size + size > limit:
                self._start_batch("no_room")
                self._threads.wake()
            if self._in_progress > self._threads.count or self._open is None:
                raise StatusError(
                    "UNAVAILABLE",
                    "This task would start a fresh batch, but all batch threads are busy, so at present there is no "
                    "processing capacity available for this task",
                )
            first = not self._open.tasks
            self._open.add(task, size, self._now_micros())
            if self._prepare is not None:
                self._call_watcher(first=first)
            if self._open.size == limit:
                self._start_batch("full")
                self._threads.wake()
            elif self._prepare is None and first and self._options.batch_timeout_micros > 0:
                self._threads.wake_at(self._due_micros())

    def close(self) -> None:
        """Refuse new tasks, close the open batch at once, and return when every batch has been processed."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_open("closed")
                self._threads.wake_all()
                self._finish_if_done()
        self._done.wait()
        self._threads.stop()
        self._on_gone(self)

    def take(self, now_micros: int) -> tuple[tuple[StreamingQueue[TaskT], Batch[TaskT]] | None, int]:
        """Return ((self, batch), NEVER_MICROS) for a batch to process; else (None, instant at which to call again).

        The instant is when the open batch times out; NEVER_MICROS: it has no timeout or no tasks, or its own thread
        waits for that instant. Called by the threads with the scheduler's lock held. Where a thread prepares the
        tasks of a batch while it fills, the batch returned is still open.
        """
        due_micros = self._due_micros() if self._prepare is None else NEVER_MICROS
        if now_micros >= due_micros:
            self._start_batch("timeout")
            due_micros = NEVER_MICROS
        if self._ready:
            return (self, self._ready.popleft()), NEVER_MICROS
        unwatched = self._unwatched()
        if unwatched is not None:
            unwatched.announced = True
            return (self, unwatched), NEVER_MICROS
        return None, due_micros

    def pending(self) -> bool:
        """Whether another thread should look for a batch; called by the threads."""
        if self._prepare is not None:
            return bool(self._ready) or self._unwatched() is not None
        return bool(self._ready) or (self._open is not None and bool(self._open.tasks))

    def finished(self, batch: Batch[TaskT]) -> None:  # noqa: ARG002 the pool's interface
        """Count a thread as free again; called by the threads when a batch has been processed."""
        self._in_progress -= 1
        self._finish_if_done()

    def _due_micros(self) -> int:
        timeout_micros = self._options.batch_timeout_micros
        if self._open is None or not self._open.tasks or timeout_micros <= 0:
            return NEVER_MICROS
        return self._open.opened_micros + timeout_micros

    def _start_batch(self, close_reason: CloseReason) -> None:
        self._close_open(close_reason)
        self._open = Batch()
        self._in_progress += 1

    def _close_open(self, close_reason: CloseReason) -> None:
        batch, self._open = self._open, None
        if batch is None:
            return
        if not batch.tasks:
            self._in_progress -= 1
            return
        batch.close_reason = close_reason
        if not batch.announced:
            self._ready.append(batch)
        elif self._watcher is not None:
            self._watcher.unpark()
            self._watcher = None

    def _unwatched(self) -> Batch[TaskT] | None:
        """Return the open batch if it has tasks to prepare and no thread yet, else None."""
        batch = self._open
        if self._prepare is None or batch is None or not batch.tasks or batch.announced:
            return None
        return batch

    def _call_watcher(self, *, first: bool) -> None:
        if first:
            self._threads.wake()
        elif self._watcher is not None:
            self._watcher.unpark()

    def _watch(self, batch: Batch[TaskT]) -> None:
        """Prepare each task of a batch as it comes, until it has closed; then run those still in it."""
        parker = self._clock.parker()
        kept: list[bool] = []
        while (task := self._next_task(batch, len(kept), parker)) is not None:
            kept.append(self._prepared(task))
        if not all(kept):
            batch.enqueued_micros = list(compress(batch.enqueued_micros, kept))
            batch.tasks = list(compress(batch.tasks, kept))
            batch.size = sum(task.size for task in batch.tasks)
        if batch.tasks:
            self._process_batch(batch)

    def _next_task(self, batch: Batch[TaskT], prepared: int, parker: Parker) -> TaskT | None:
        """Wait for the next task of a batch and return it; None: the batch has closed without a further task.

        prepared: number of the batch's tasks that this thread has prepared.
        """
        while True:
            with self._lock:
                if prepared < len(batch.tasks):
                    return batch.tasks[prepared]
                if batch is not self._open:
                    return None
                due_micros = self._due_micros()
                if self._now_micros() >= due_micros:
                    self._start_batch("timeout")
                    return None
                self._watcher = parker
            parker.park(due_micros)

    def _prepared(self, task: TaskT) -> bool:
        return self._prepare is None or self._prepare(task)

    def _finish_if_done(self) -> None:
        if self._closed and self._in_progress == 0:
            self._done.set()


def _check(options: QueueOptions) -> None:
    if options.max_batch_size < 1:
        raise invalid_argument(f"max_batch_size must be positive; was {options.max_batch_size}")
