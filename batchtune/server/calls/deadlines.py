"""Which calls have waited too long for their answer?

A timer of the loop per request would cost a microsecond. Calls are put into slots of 8 ms by their deadline instead,
and one timer looks at the slots that have passed: a call fails up to 17 ms after its deadline, never before.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

_SLOT_BITS = 23  # 2**23 ns = 8.4 ms
_SLOT_S = (1 << _SLOT_BITS) / 1e9
_WATCHED_NS = 3600 * 10**9


TIMED_OUT = "Timed out waiting for notification"


class Expiring(Protocol):
    """A call that has a deadline."""

    def expire(self) -> None:
        """End the call, unless it has ended."""
        ...


class Deadlines:
    """Ends calls; only for the thread of one event loop. Deadlines are on CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._slots: dict[int, set[Expiring]] = {}
        self._passed = 0
        self._ticking = False

    def add(self, call: Expiring, deadline_ns: int) -> None:
        """Watch a call; a deadline more than an hour away is nobody's concern."""
        slot = deadline_ns >> _SLOT_BITS
        calls = self._slots.get(slot)
        if calls is not None:
            calls.add(call)
            return
        now_ns = time.monotonic_ns()
        if deadline_ns - now_ns > _WATCHED_NS:
            return
        if not self._ticking:
            self._ticking = True
            self._passed = (now_ns >> _SLOT_BITS) - 1
            asyncio.get_running_loop().call_later(_SLOT_S, self._tick)
        self._slots.setdefault(max(slot, self._passed + 1), set()).add(call)

    def discard(self, call: Expiring, deadline_ns: int) -> None:
        """Stop watching a call that has ended; one that is not watched is no error."""
        slot = deadline_ns >> _SLOT_BITS
        calls = self._slots.get(slot)
        if calls is not None:
            calls.discard(call)
            if not calls:  # a client may name a slot of its own with every deadline, for an hour
                del self._slots[slot]

    def _tick(self) -> None:
        last = (time.monotonic_ns() >> _SLOT_BITS) - 1
        expired: list[Expiring] = []
        for slot in range(self._passed + 1, last + 1):
            expired.extend(self._slots.pop(slot, ()))
        self._passed = last
        self._ticking = bool(self._slots)
        if self._ticking:
            asyncio.get_running_loop().call_later(_SLOT_S, self._tick)
        for call in expired:
            call.expire()
