"""TF Serving's BatchSchedulerRetrier: tries again for a while when a queue is full.

Source: `tensorflow_serving/batching/batch_scheduler_retrier.h`; the model server itself does not install it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads, Clock, MonotonicClock
from batchtune.wire.status import StatusError


class RetriedQueue(Protocol):
    def schedule(self, task: Any, /) -> None:
        """Schedule a task; raises StatusError UNAVAILABLE when the queue is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrierOptions:
    """max_time_micros: how long one task is tried at most. retry_delay_micros: pause between two attempts."""

    max_time_micros: int = 10_000
    retry_delay_micros: int = 100

    def validate(self) -> None:
        """Raise INVALID_ARGUMENT with the reference's texts."""
        for name in ("max_time_micros", "retry_delay_micros"):
            value = getattr(self, name)
            if value < 0:
                raise StatusError("INVALID_ARGUMENT", f"{name} must be non-negative; was {value}")


@dataclass(slots=True, kw_only=True)
class _Attempt:
    queue: RetriedQueue
    task: Any
    on_refused: Callable[[StatusError], None]
    started_micros: int
    due_micros: int


class BatchSchedulerRetrier:
    """Retries tasks that are refused with UNAVAILABLE, and only those.

    Raises StatusError INVALID_ARGUMENT for negative options.
    """

    def __init__(self, options: RetrierOptions | None = None, *, clock: Clock | None = None) -> None:
        self._options = options or RetrierOptions()
        self._options.validate()
        self._clock = clock or MonotonicClock()
        self._waiting: deque[_Attempt] = deque()
        self._unended = 0
        self._threads: BatchThreads[_Attempt] = BatchThreads(
            count=1, clock=self._clock, name="batch_retries", source=self
        )
        self._idle = threading.Condition(self._threads.lock)

    @property
    def retries(self) -> bool:
        """Whether the time allowed for retries is longer than one pause."""
        return self._options.retry_delay_micros < self._options.max_time_micros

    def schedule(self, queue: RetriedQueue, task: Any) -> None:
        """Schedules a task and blocks while it is retried, as TF Serving's does; raises the last StatusError."""
        started_micros = self._clock.now_micros()
        while True:
            try:
                queue.schedule(task)
            except StatusError as error:
                now_micros = self._clock.now_micros()
                if error.code != "UNAVAILABLE" or not self._may_retry(started_micros, now_micros):
                    raise
                self._clock.parker().park(now_micros + self._options.retry_delay_micros)
            else:
                return

    def schedule_later(
        self, queue: RetriedQueue, task: Any, on_refused: Callable[[StatusError], None]
    ) -> None:
        """Retry a task that was just refused, without blocking the caller; only where `retries` is true.

        Attempts run on a thread of the retrier; `on_refused` gets the last error there when time is up.
        """
        now_micros = self._clock.now_micros()
        due_micros = now_micros + self._options.retry_delay_micros
        attempt = _Attempt(
            queue=queue, task=task, on_refused=on_refused, started_micros=now_micros, due_micros=due_micros
        )
        with self._threads.lock:
            if self._threads.count:
                self._unended += 1
                self._waiting.append(attempt)
                self._threads.wake_at(due_micros)
                return
        on_refused(_shutting_down())

    def wait_until_idle(self, limit_s: float) -> None:
        """Return when no task is being retried any more, or after `limit_s`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._unended, limit_s)

    def close(self) -> None:
        """Refuse the tasks that wait and all later ones; end the thread."""
        self._threads.stop()
        while self._waiting:
            self._waiting.popleft().on_refused(_shutting_down())

    def take(self, now_micros: int) -> tuple[tuple[BatchSchedulerRetrier, _Attempt] | None, int]:
        """Return the next attempt that is due; called by the thread."""
        if not self._waiting:
            return None, NEVER_MICROS
        if self._waiting[0].due_micros > now_micros:
            return None, self._waiting[0].due_micros
        return (self, self._waiting.popleft()), NEVER_MICROS

    def pending(self) -> bool:
        """Whether an attempt waits; called by the thread."""
        return bool(self._waiting)

    def process(self, attempt: _Attempt) -> None:
        """Try a task once more; called by the thread."""
        try:
            attempt.queue.schedule(attempt.task)
            self._end_one()
        except StatusError as error:
            now_micros = self._clock.now_micros()
            if error.code != "UNAVAILABLE" or not self._may_retry(attempt.started_micros, now_micros):
                self._end_one()
                attempt.on_refused(error)
                return
            attempt.due_micros = now_micros + self._options.retry_delay_micros
            with self._threads.lock:
                self._waiting.append(attempt)

    def finished(self, attempt: _Attempt) -> None:
        """Do nothing; called by the thread."""

    def _end_one(self) -> None:
        with self._idle:
            self._unended -= 1
            self._idle.notify_all()

    def _may_retry(self, started_micros: int, now_micros: int) -> bool:
        return now_micros + self._options.retry_delay_micros - started_micros < self._options.max_time_micros


def _shutting_down() -> StatusError:
    return StatusError("UNAVAILABLE", "The server is shutting down")
