"""How is a process started that does not die of a Ctrl-C meant for its parent?"""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Final

OF_A_TERMINAL: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C, a terminal that goes away, Ctrl-backslash: sent to all that it runs, and for the parent to answer."""


def start_undisturbed(process: SpawnProcess) -> None:
    """Start a child that inherits a mask without those signals; it ends when its parent does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
    try:
        resource_tracker.ensure_running()  # the first child would start it, which lets Ctrl-C through again
        signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
