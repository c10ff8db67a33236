"""Which thread runs what comes before and after the device part of a request?

Requests that are nearly done come first, so that what the device has computed does not wait behind what it has not.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from batchtune.server.sessions.unbatched import WAITING_MAX
from batchtune.wire.status import StatusError

Job = Callable[[], None]

_logger = logging.getLogger(__name__)


class RequestThreads:
    """`count` threads; a job answers for its own errors."""

    def __init__(self, count: int, *, waiting_max: int = WAITING_MAX) -> None:
        self._changed = threading.Condition()
        self._begun: deque[Job] = deque()
        self._new: deque[Job] = deque()
        self._waiting_max = waiting_max
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"request_stage_{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Queue the first stage of a request; raises StatusError RESOURCE_EXHAUSTED while too many wait."""
        with self._changed:
            if len(self._new) >= self._waiting_max:
                raise StatusError("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")
            self._new.append(job)
            self._changed.notify()

    @property
    def has_room(self) -> bool:
        """Whether fewer last stages wait than first ones may."""
        return len(self._begun) < self._waiting_max

    def put_last_stage(self, job: Job) -> None:
        """Queue the last stage of a request, before all first stages; never refused, since its room was given."""
        with self._changed:
            self._begun.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Run what is queued, then end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                _logger.exception("a stage of a request failed to end it")
            del job

    def _next(self) -> Job | None:
        with self._changed:
            while not (self._begun or self._new):
                if self._closed:
                    return None
                self._changed.wait()
            return (self._begun or self._new).popleft()
