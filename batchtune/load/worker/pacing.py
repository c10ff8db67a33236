"""How is the event loop woken at the nanosecond a request is due?

On Linux by a timerfd on CLOCK_MONOTONIC: the kernel's high-resolution timer, absolute, free of timer slack. Loops'
own timers round: asyncio's to the clock resolution of its selector (1 ms), uvloop's to whole milliseconds.
Elsewhere the loop's timer is used, up to 1 ms late; `COARSE_NOTE` says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Final

COARSE_NOTE: Final = "pacing is up to 1 ms coarse: this platform has no timerfd"

_CLOCK_MONOTONIC: Final = 1
_TFD_CLOEXEC: Final = getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME: Final = 1
_monotonic_ns = time.monotonic_ns


class _Itimerspec(ctypes.Structure):
    """struct itimerspec of timerfd_settime(2), with time_t and long both of 64 bits."""

    _fields_ = (
        ("interval_s", ctypes.c_int64),
        ("interval_ns", ctypes.c_int64),
        ("value_s", ctypes.c_int64),
        ("value_ns", ctypes.c_int64),
    )


class Pacer:
    """Calls `on_wake()` in the loop once, as soon as the absolute time given to `wake_at` is reached.

    A new `wake_at` replaces the one before. A time in the past wakes at once. `close()` when done.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_wake: Callable[[], None]) -> None:
        self._loop = loop
        self._on_wake = on_wake
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = -1
        self._armed = False
        self._closed = False
        self.notes: tuple[str, ...] = ()
        if sys.platform == "linux" and ctypes.sizeof(ctypes.c_long) == 8:
            self._open_timerfd()
        else:
            self.notes = (COARSE_NOTE,)

    def wake_at(self, when_ns: int) -> None:
        """Wake at `when_ns` (CLOCK_MONOTONIC); never after `close`."""
        if self._closed:
            return
        if self._descriptor < 0:
            self._wake_by_loop_timer(when_ns)
            return
        self._armed = True
        spec = self._spec
        spec.value_s, spec.value_ns = divmod(when_ns if when_ns > 0 else 1, 1_000_000_000)
        if self._settime(self._descriptor, _TFD_TIMER_ABSTIME, self._spec_pointer, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_timerfd(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._spec = _Itimerspec()
        self._spec_pointer = ctypes.addressof(self._spec)
        self._descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | _TFD_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop.add_reader(self._descriptor, self._timer_fired)

    def _timer_fired(self) -> None:
        # Readable until read or set again; on_wake usually sets it again, which saves the read.
        self._armed = False
        self._on_wake()
        if not self._armed and self._descriptor >= 0:
            self._drain()

    def _drain(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return

    def _wake_by_loop_timer(self, when_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, when_ns - _monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s, self._on_wake)
