"""How many requests may be inside the server at once? Cortex's processes_per_replica × threads_per_process.

A server whose workers block on their request can batch no more requests than it has workers: the limit caps the
batch size. Source: Cortex 0.31 API reference and `pkg/types/spec/validations.go`. TF Serving's front ends meet the
same limit in two ways: gRPC refuses (RESOURCE_EXHAUSTED), REST lets the request wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from batchtune.server.sessions.unbatched import WAITING_MAX
from batchtune.wire.status import StatusError


class ConcurrencyLimit:
    """Counts the requests inside; for one thread, the event loop. None: no limit."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise StatusError(
                "INVALID_ARGUMENT", f"the limit on concurrent requests must be positive; was {limit}"
            )
        self._limit = limit
        self._inside = 0
        self._waiting: deque[Callable[[], None]] = deque()

    @classmethod
    def of_cortex(
        cls, *, processes_per_replica: int, threads_per_process: int, max_batch_size: int | None = None
    ) -> ConcurrencyLimit:
        """The limit of a Cortex replica with the TensorFlow predictor (max_batch_size None: batching off).

        Raises StatusError INVALID_ARGUMENT where a batch could never fill.
        """
        limit = processes_per_replica * threads_per_process
        if max_batch_size is not None and max_batch_size > limit:
            raise StatusError(
                "INVALID_ARGUMENT",
                f"max_batch_size ({max_batch_size}) must be less than or equal to processes_per_replica * "
                f"threads_per_process ({processes_per_replica} * {threads_per_process} = {limit})",
            )
        return cls(limit)

    @property
    def inside(self) -> int:
        return self._inside

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter_or_wait(self, start: Callable[[], None]) -> None:
        """Enter and call `start` now, or as soon as those before it have left; in order of arrival.

        Raises:
            StatusError: RESOURCE_EXHAUSTED while WAITING_MAX wait.
        """
        if self._limit is not None and self._inside >= self._limit:
            if len(self._waiting) >= WAITING_MAX:
                raise StatusError("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")
            self._waiting.append(start)
            return
        self._inside += 1
        start()

    def leave(self) -> None:
        """One request is answered; the next one waiting starts in its place."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._inside -= 1
