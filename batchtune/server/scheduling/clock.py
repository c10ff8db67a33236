"""What time is it for a scheduler, and how does one of its threads sleep until an instant?

A `Parker` belongs to one thread. `park` sleeps until `unpark`, or until the clock shows an instant; like
LockSupport of Java it holds one permit, so an `unpark` that comes before `park` is not lost.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

_PR_SET_TIMERSLACK = 29


def lower_timer_slack() -> None:
    """Let the kernel end this thread's sleeps on time: 1 ns of slack instead of 50 µs (prctl(2); Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


_LONGEST_SLEEP_S = 3600.0


class Parker(Protocol):
    def park(self, until_micros: int | None) -> None:
        """Sleep until `unpark()` or until the clock shows `until_micros` (None: no limit); may return early."""

    def unpark(self) -> None:
        """Let the owner's present `park`, or else its next one, return."""


class Clock(Protocol):
    def now_micros(self) -> int:
        """Microseconds since an arbitrary origin; never goes back."""

    def parker(self) -> Parker:
        """A parker whose instants are this clock's."""

    def watch(self, settled: Callable[[], bool]) -> None:
        """Let a clock that is moved by hand ask whether the threads have taken note of the time."""

    def unwatch(self, settled: Callable[[], bool]) -> None:
        """Undo `watch`."""


class MonotonicClock:
    """CLOCK_MONOTONIC in microseconds."""

    __slots__ = ()

    def now_micros(self) -> int:
        return time.monotonic_ns() // 1000

    def parker(self) -> Parker:
        return _MonotonicParker()

    def watch(self, settled: Callable[[], bool]) -> None:
        """Nothing to do: time moves by itself."""

    def unwatch(self, settled: Callable[[], bool]) -> None:
        """Nothing to do."""


class _MonotonicParker:
    """A lock used as a binary semaphore: about a third of the cost of `threading.Condition`."""

    __slots__ = ("_permit",)

    def __init__(self) -> None:
        self._permit = threading.Lock()
        self._permit.acquire()

    def park(self, until_micros: int | None) -> None:
        if until_micros is None:
            self._permit.acquire()
            return
        remaining_s = (until_micros * 1000 - time.monotonic_ns()) / 1e9
        if remaining_s > 0:
            self._permit.acquire(timeout=min(remaining_s, _LONGEST_SLEEP_S))
        else:
            self._permit.acquire(blocking=False)

    def unpark(self) -> None:
        if self._permit.locked():
            self._permit.release()
