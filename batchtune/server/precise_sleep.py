"""How does a thread sleep until an instant and wake within microseconds of it?

`clock_nanosleep` with TIMER_ABSTIME, called through ctypes, which releases the interpreter lock; the thread's timer
slack is lowered to 1 ns first. Median overshoot on an idle 2-core virtual machine: time.sleep 75 µs, this see
`tests/benchmarks/emulated_device.py`.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import time

_PR_SET_TIMERSLACK = 29
_TIMER_ABSTIME = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_clock_nanosleep = _libc.clock_nanosleep
_clock_nanosleep.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimeSpec), ctypes.c_void_p)
_clock_nanosleep.restype = ctypes.c_int
_prctl = _libc.prctl
_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
_slack_lowered = threading.local()


def sleep_until(deadline_ns: int) -> None:
    """Sleep until CLOCK_MONOTONIC reads `deadline_ns`; return at once when it has passed."""
    if time.monotonic_ns() >= deadline_ns:
        return
    if not hasattr(_slack_lowered, "done"):
        _prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _slack_lowered.done = True
    until = _TimeSpec(*divmod(deadline_ns, 1_000_000_000))
    while _clock_nanosleep(time.CLOCK_MONOTONIC, _TIMER_ABSTIME, ctypes.byref(until), None) == errno.EINTR:
        pass
