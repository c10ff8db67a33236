"""How is a process started that does not die of a Ctrl-C meant for its parent?"""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess


def start_undisturbed(process: SpawnProcess) -> None:
    """Start a child that inherits a mask without Ctrl-C, so that it hears none before it ignores it itself."""
    resource_tracker.ensure_running()  # the first child would start it, which lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
