"""How does TensorFlow's AdaptiveSharedBatchScheduler batch? It learns how many batches should run at once.

Source: `tensorflow/core/kernels/batching_util/adaptive_shared_batch_scheduler.h`. Regular batches (timed out) run
while fewer than the limit are in flight; the limit climbs hills towards the lowest latency. Closed batches (full)
are express: they need only a free thread and teach the limit nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchtune.batching.parameters import default_num_batch_threads
from batchtune.server.scheduling.adaptive_queue import (
    AdaptiveBatch,
    AdaptiveQueue,
    WaitingBatches,
    check_queue,
)
from batchtune.server.scheduling.batch_queue import Batch, TaskT
from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads
from batchtune.server.scheduling.clock import Clock, MonotonicClock
from batchtune.server.scheduling.in_flight_limit import InFlightLimit
from batchtune.server.scheduling.queue_options import QueueOptions
from batchtune.wire.status import StatusError

_DEFAULT_INITIAL_LIMIT = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveOptions:
    """The reference's options, with its defaults.

    initial_in_flight_batches_limit: of 1 to all threads; None: 3, or all threads where there are fewer; a fraction
    is a probability.
    """

    initial_in_flight_batches_limit: float | None = None
    batches_to_average_over: int = 1000


class AdaptiveSharedBatchScheduler:
    """One pool of threads, many queues, a learned limit on batches in flight.

    Raises StatusError INVALID_ARGUMENT for less than one thread. `rng` draws whether a fractional limit lets
    one more batch run.
    """

    def __init__(
        self,
        *,
        num_batch_threads: int | None = None,
        clock: Clock | None = None,
        options: AdaptiveOptions | None = None,
        thread_pool_name: str = "adaptive_batch_threads",
        rng: random.Random | None = None,
    ) -> None:
        count = default_num_batch_threads() if num_batch_threads is None else num_batch_threads
        options = options or AdaptiveOptions()
        initial = options.initial_in_flight_batches_limit
        self._limit = InFlightLimit(
            initial=min(_DEFAULT_INITIAL_LIMIT, count) if initial is None else initial,
            lowest=1,
            highest=count,
            batches_to_average_over=options.batches_to_average_over,
        )
        self._rng = rng or random.Random()
        self._batches = WaitingBatches()
        self._queues: set[AdaptiveQueue[Any]] = set()
        self._regular = 0
        self._threads: BatchThreads[AdaptiveBatch[Any]] = BatchThreads(
            count=count, clock=clock or MonotonicClock(), name=thread_pool_name, source=self
        )

    @property
    def clock(self) -> Clock:
        return self._threads.clock

    @property
    def in_flight_batches_limit(self) -> float:
        """How many regular batches may run at once, as learned so far."""
        return self._limit.value

    def add_queue(
        self, options: QueueOptions, process_batch: Callable[[Batch[TaskT]], None]
    ) -> AdaptiveQueue[TaskT]:
        """A new queue; raises StatusError INVALID_ARGUMENT for options that break a rule.

        With splitting on, the reference's max_input_task_size is our max_batch_size, and its max_batch_size is our
        max_execution_batch_size.
        """
        check_queue(options)
        queue: AdaptiveQueue[TaskT] = AdaptiveQueue(
            options, process_batch, self._threads, self._batches, self._queues.discard
        )
        with self._threads.lock:
            if self._threads.count == 0:
                raise StatusError("UNAVAILABLE", "The batch scheduler is closed")
            self._queues.add(queue)
        return queue

    def close(self) -> None:
        """Close every queue, wait until all that was queued is processed, end the threads."""
        for queue in list(self._queues):
            queue.close()
        self._threads.stop()

    def take(
        self, now_micros: int
    ) -> tuple[tuple[AdaptiveSharedBatchScheduler, AdaptiveBatch[Any]] | None, int]:
        """For the pool: a regular batch if the limit allows, else an express one, else when to ask again."""
        batch = self._best_regular(now_micros) if self._may_run_regular() else None
        if batch is None:
            batch = self._batches.first_closed()
            if batch is None:
                return None, self._next_due_micros(now_micros)
            batch.express = True
        else:
            self._regular += 1
        self._batches.remove(batch)
        batch.queue.release(batch)
        return (self, batch), NEVER_MICROS

    def pending(self) -> bool:
        """For the pool: whether any task waits."""
        return bool(self._batches)

    def process(self, batch: AdaptiveBatch[Any]) -> None:
        """For the pool: run the batch."""
        batch.queue.process(batch)

    def finished(self, batch: AdaptiveBatch[Any]) -> None:
        """For the pool: count the batch out; a regular one teaches the limit its latency since creation."""
        if not batch.express:
            self._regular -= 1
            self._limit.record(self.clock.now_micros() - batch.opened_micros)
        batch.queue.batch_finished()

    def _may_run_regular(self) -> bool:
        spare = self._limit.value - self._regular
        return bool(self._batches) and spare > 0 and (spare >= 1 or self._rng.random() <= spare)

    def _best_regular(self, now_micros: int) -> AdaptiveBatch[Any] | None:
        return next((batch for batch in self._batches if batch.due_micros <= now_micros), None)

    def _next_due_micros(self, now_micros: int) -> int:
        """When a batch may become due; one that is held back by the limit runs when one in flight has ended."""
        if self._regular >= self._limit.value:
            return NEVER_MICROS
        return min(
            (batch.due_micros for batch in self._batches if batch.due_micros > now_micros),
            default=NEVER_MICROS,
        )
