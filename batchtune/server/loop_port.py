"""How do other threads reach the event loop, and how late does it listen?"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from batchtune.server.batching_session import Completion
from batchtune.wire.status import StatusError

_SAMPLE_INTERVAL_S = 0.05

_logger = logging.getLogger(__name__)


class LoopPort:
    """Hands answers and functions to one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon_threadsafe

    def deliver(self, completions: list[Completion]) -> None:
        """Let the loop call each completion; one wake-up of the loop for all of them."""
        self._call_soon(_complete, completions)

    def run_soon(self, function: Callable[[], None]) -> None:
        """Let the loop call `function` after what it has been given before."""
        self._call_soon(function)


class LoopLagSampler:
    """Measures from its own thread, 20 times a second, how long the loop takes to run what it is handed.

    That is what an answer waits after its batch has ended. `record(micros)` is called on the loop.
    """

    def __init__(self, port: LoopPort, record: Callable[[float], None]) -> None:
        self._port = port
        self._record = record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="event_loop_lag", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; call before the loop is closed."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_INTERVAL_S):
            handed_ns = time.monotonic_ns()
            self._port.run_soon(lambda handed_ns=handed_ns: self._heard(handed_ns))  # type: ignore[misc]

    def _heard(self, handed_ns: int) -> None:
        self._record((time.monotonic_ns() - handed_ns) / 1000)


def _complete(completions: list[Completion]) -> None:
    for done, outputs, error in completions:
        try:
            done(outputs, error)
        except Exception:
            _logger.exception("an answer could not be given")
            if error is None:
                _complete([(done, None, StatusError("INTERNAL", "the server failed to write the answer"))])
