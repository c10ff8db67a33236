"""Which signals end a command in good order, as Ctrl-C does, and who hears them?"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C, a service manager, a terminal that goes away, Ctrl-backslash."""


def hear_interrupts() -> None:
    """From now on each of them raises KeyboardInterrupt; those that are ignored (nohup) stay so."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def interrupt(number: int, _frame: FrameType | None) -> None:
    """A signal's handler: raise KeyboardInterrupt. A terminal that goes away says so more than once: heard once."""
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Collect the first that would raise KeyboardInterrupt; the second raises at once. For the main thread only."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            before[signal.SIGHUP] = signal.SIG_IGN
        if noted and number != signal.SIGHUP:
            raise KeyboardInterrupt
        noted.append(number)

    raising = (interrupt, signal.default_int_handler)
    handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in INTERRUPTS}
    before = {number: handler for number, handler in handlers.items() if handler in raising}
    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
