"""TF Serving's BatchSchedulerRetrier: offers a task to a full queue again, for a limited time.

Source: `tensorflow_serving/batching/batch_scheduler_retrier.h`; tensorflow_model_server itself does not use
it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchtune.server.scheduling.batch_queue import BasicBatchScheduler, BatchQueue
from batchtune.server.scheduling.batch_threads import NEVER_MICROS, BatchThreads, Clock
from batchtune.server.scheduling.streaming import StreamingQueue
from batchtune.wire.status import StatusError

RetriedQueue = BasicBatchScheduler[Any] | BatchQueue[Any] | StreamingQueue[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrierOptions:
    """Limits of the attempts for one task.

    max_time_micros: no attempt begins later than this after the first one. retry_delay_micros: pause between attempts.
    """

    max_time_micros: int = 10_000
    retry_delay_micros: int = 100

    def validate(self) -> None:
        """Raise StatusError INVALID_ARGUMENT for a negative value, with the text of TF Serving."""
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
    """Schedules again the tasks that a queue refused with UNAVAILABLE; any other error is final.

    Raises StatusError INVALID_ARGUMENT for negative options.
    """

    def __init__(self, options: RetrierOptions | None = None, *, clock: Clock | None = None) -> None:
        self._options = options or RetrierOptions()
        self._options.validate()
        self._clock = clock or Clock()
        self._waiting: deque[_Attempt] = deque()
        self._unended = 0
        self._threads: BatchThreads[_Attempt] = BatchThreads(
            count=1, clock=self._clock, name="batch_retries", source=self
        )
        self._idle = threading.Condition(self._threads.lock)

    @property
    def retries(self) -> bool:
        """Whether a refused task gets a second attempt, because max_time_micros is longer than one pause."""
        return self._options.retry_delay_micros < self._options.max_time_micros

    def schedule(self, queue: RetriedQueue, task: Any) -> None:
        """Schedule a task; blocks while it is refused as UNAVAILABLE and retried, as TF Serving does; raises the
        StatusError of the last attempt, or at once any other."""
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
        """Retry a task that `queue` has just refused, without blocking; only where `retries` is True.

        Attempts run on the retrier's thread. When the time is over, `on_refused` is called on that thread with the last
        attempt's error; after `close` it is called with UNAVAILABLE at once, on the caller's thread.
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
        """Return when no task waits for another attempt, or after `limit_s` seconds."""
        with self._idle:
            self._idle.wait_for(lambda: not self._unended, limit_s)

    def close(self) -> None:
        """Refuse with UNAVAILABLE the tasks that wait for an attempt and all later ones; end the thread."""
        self._threads.stop()
        while self._waiting:
            self._waiting.popleft().on_refused(_shutting_down())

    def take(self, now_micros: int) -> tuple[tuple[BatchSchedulerRetrier, _Attempt] | None, int]:
        """Return ((self, attempt), NEVER_MICROS) for a due attempt; else (None, instant of the next attempt).

        The instant is NEVER_MICROS if no attempt waits. Called by the retrier's thread.
        """
        if not self._waiting:
            return None, NEVER_MICROS
        if self._waiting[0].due_micros > now_micros:
            return None, self._waiting[0].due_micros
        return (self, self._waiting.popleft()), NEVER_MICROS

    def pending(self) -> bool:
        """Whether a task waits for an attempt; called by the retrier's thread."""
        return bool(self._waiting)

    def process(self, attempt: _Attempt) -> None:
        """Schedule a task again; called by the retrier's thread. Where it is refused as UNAVAILABLE, another attempt is
        queued while there is time; any other refusal, or the last, goes to `on_refused`."""
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
        """Do nothing; called by the retrier's thread, since a BatchOwner needs this method."""

    def _end_one(self) -> None:
        with self._idle:
            self._unended -= 1
            self._idle.notify_all()

    def _may_retry(self, started_micros: int, now_micros: int) -> bool:
        return now_micros + self._options.retry_delay_micros - started_micros < self._options.max_time_micros


def _shutting_down() -> StatusError:
    return StatusError("UNAVAILABLE", "The server is shutting down")
