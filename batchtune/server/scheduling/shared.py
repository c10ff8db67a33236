"""Which batch runs next, on which thread? TensorFlow's SharedBatchScheduler: many queues, one pool of threads.

Semantics: `tensorflow/core/kernels/batching_util/shared_batch_scheduler.h` of TF 2.21, but for two things: a
thread sleeps until the earliest timeout instead of polling every millisecond, and a task without rows is delivered
instead of hanging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchtune.batching.parameters import default_num_batch_threads
from batchtune.server.scheduling.batch_queue import Batch, BatchQueue, TaskT
from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads
from batchtune.server.scheduling.clock import Clock, MonotonicClock
from batchtune.server.scheduling.queue_options import QueueOptions
from batchtune.wire.status import StatusError


class SharedBatchScheduler:
    """A pool of batch threads that serves its queues in turn, one batch per queue per round.

    Raises StatusError INVALID_ARGUMENT for less than one thread.
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
            clock=clock or MonotonicClock(),
            name=thread_pool_name,
            source=self,
        )

    @property
    def clock(self) -> Clock:
        return self._threads.clock

    def add_queue(
        self, options: QueueOptions, process_batch: Callable[[Batch[TaskT]], None]
    ) -> BatchQueue[TaskT]:
        """A new queue whose batches are passed to `process_batch` on a batch thread.

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
        """Close every queue, wait until all that was queued is processed, end the threads."""
        with self._threads.lock:
            queues = list(self._queues)
        for queue in queues:
            queue.begin_close()
        for queue in queues:
            queue.close()
        self._threads.stop()

    def take(self, now_micros: int) -> tuple[tuple[BatchQueue[Any], Batch[Any]] | None, int]:
        """For the pool: the next batch and its queue, or when to ask again."""
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
        """For the pool: whether any task waits."""
        return any(queue.pending for queue in self._queues)

    def _forget(self, queue: BatchQueue[Any]) -> None:
        index = self._queues.index(queue)
        del self._queues[index]
        if index < self._next:
            self._next -= 1
        if self._next >= len(self._queues):
            self._next = 0
