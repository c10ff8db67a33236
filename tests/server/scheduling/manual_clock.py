"""A clock that is moved by hand, for the schedulers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from batchtune.server.scheduling.batch_threads import Clock, Parker

_SETTLE_POLL_S = 50e-6
_SETTLE_LIMIT_S = 10.0


class ManualClock(Clock):
    """A clock that stands still until `advance`.

    `advance` returns once every thread that the new time concerns has looked at its queues (it then runs a batch or
    sleeps again), so a test needs no sleeps of its own.
    """

    def __init__(self, start_micros: int = 0) -> None:
        self._now_micros = start_micros
        self._changed = threading.Condition()
        self._watched: list[Callable[[], bool]] = []

    def now_micros(self) -> int:
        return self._now_micros

    def advance(self, micros: int) -> None:
        """Move the time forward and wake the threads whose instant has come."""
        if micros < 0:
            raise ValueError(f"time does not go back; was asked for {micros} µs")
        self.settle()
        with self._changed:
            self._now_micros += micros
            self._changed.notify_all()
        self.settle()

    def settle(self) -> None:
        """Wait until each thread that was woken has looked at its queues; gives up after 10 s."""
        give_up_s = time.monotonic() + _SETTLE_LIMIT_S
        while not all(settled() for settled in list(self._watched)) and time.monotonic() < give_up_s:
            time.sleep(_SETTLE_POLL_S)

    def parker(self) -> Parker:
        return _ManualParker(self, self._changed)

    def watch(self, settled: Callable[[], bool]) -> None:
        self._watched.append(settled)

    def unwatch(self, settled: Callable[[], bool]) -> None:
        if settled in self._watched:
            self._watched.remove(settled)


class _ManualParker(Parker):
    __slots__ = ("_changed", "_clock", "_permitted")

    def __init__(self, clock: ManualClock, changed: threading.Condition) -> None:
        self._clock = clock
        self._changed = changed
        self._permitted = False

    def park(self, until_micros: int | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._permitted or (until_micros is not None and self._clock.now_micros() >= until_micros)
                )
            )
            self._permitted = False

    def unpark(self) -> None:
        with self._changed:
            self._permitted = True
            self._changed.notify_all()
