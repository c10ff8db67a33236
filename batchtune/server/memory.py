"""Gives memory that was used at a peak back to the system.

The process would keep it, for two reasons. glibc has a heap for each thread and returns free memory at its
end only above a threshold; `malloc_trim` returns all free memory of the main thread's heap, but not that at
the end of the others. Python keeps freed small objects, and objects in reference cycles until a full
collection, which the server delays.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 2.0
_STILL_BYTES = 1 << 20  # between two looks: the peak is over
_PAGE_BYTES = resource.getpagesize()
_libc = ctypes.CDLL(None)


def share_one_heap() -> None:
    """Have all threads use the main thread's heap, whose freed memory stays there until `trim`; to be called before
    there are other threads. Does nothing where the C library has no mallopt.

    After answers of 64 kB that clients did not read, 8 threads' heaps kept 75 MB, one heap 9 MB. With the library's own
    thresholds every batch of a transformer returned the memory of its tensors and took its pages again, 6,000 page
    faults and a quarter of the time, unless the process had once run a larger batch.
    """
    mallopt = getattr(_libc, "mallopt", None)
    m_arena_max, m_mmap_threshold, m_trim_threshold = -8, -3, -1  # malloc.h
    if mallopt is not None:
        mallopt(m_arena_max, 1)
        mallopt(m_mmap_threshold, 1 << 25)  # the most that glibc takes
        mallopt(m_trim_threshold, 1 << 30)


def trim() -> None:
    """Return free memory to the system; takes 2 to 15 ms."""
    gc.collect()
    malloc_trim = getattr(_libc, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where /proc does not report it."""
    statm = Path("/proc/self/statm")
    try:
        return int(statm.read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


class Trimming:
    """Returns free memory to the system after a peak; only for the thread of one event loop.

    trim: a function that returns free memory; resident_bytes: a function that returns the memory that the process has.
    """

    def __init__(
        self, *, trim: Callable[[], None] = trim, resident_bytes: Callable[[], int] = resident_bytes
    ) -> None:
        self._trim = trim
        self._resident_bytes = resident_bytes
        self._before_bytes = self._used_bytes = resident_bytes()
        self._vain = self._looks_left = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call `look` every 2 s until `close`."""
        self._timer = loop.call_later(_LOOK_S, self._look_on, loop)

    def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Return memory if the process has 4 MiB more than it uses and has stopped growing.

        If that frees less than 1 MiB, it is tried again after 2, 4, 8, 16 and 32 s; then the memory counts as used.
        """
        before_bytes, self._before_bytes = self._before_bytes, self._resident_bytes()
        self._used_bytes = min(self._used_bytes, self._before_bytes)
        change_bytes = self._before_bytes - before_bytes
        if abs(change_bytes) > _STILL_BYTES:
            self._vain = self._looks_left = 0
        growth_bytes = 1 << 22  # above what is in use, before memory is given back
        if self._looks_left:
            self._looks_left -= 1
        elif change_bytes <= _STILL_BYTES and self._before_bytes > self._used_bytes + growth_bytes:
            self._give_back()

    def _give_back(self) -> None:
        self._trim()
        resident_bytes = self._resident_bytes()
        self._vain = self._vain + 1 if resident_bytes > self._before_bytes - _STILL_BYTES else 0
        self._looks_left = 2**self._vain - 1
        self._before_bytes = resident_bytes
        # Times that next to nothing went back, after 2, 4, 8, 16 and 32 s, before the rest counts as in use: a
        # slow client is cut off after 60 s, and the system does not see that what it held is free then.
        vain_max = 5
        if self._vain == vain_max:
            self._used_bytes, self._vain, self._looks_left = resident_bytes, 0, 0

    def _look_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(_LOOK_S, self._look_on, loop)
        self.look()
