"""What time is it for a scheduler, and how does one of its threads sleep until an instant?

A `Parker` belongs to one thread. `park` sleeps until `unpark`, or until the clock shows an instant; like
LockSupport of Java it holds one permit, so an `unpark` that comes before `park` is not lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

_LONGEST_SLEEP_S = 3600.0
_SETTLE_POLL_S = 50e-6
_SETTLE_LIMIT_S = 10.0


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


class ManualClock:
    """A clock that stands still until `advance`; for tests.

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


class _ManualParker:
    __slots__ = ("_changed", "_clock", "_permit")

    def __init__(self, clock: ManualClock, changed: threading.Condition) -> None:
        self._clock = clock
        self._changed = changed
        self._permit = False

    def park(self, until_micros: int | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._permit or (until_micros is not None and self._clock.now_micros() >= until_micros)
                )
            )
            self._permit = False

    def unpark(self) -> None:
        with self._changed:
            self._permit = True
            self._changed.notify_all()
