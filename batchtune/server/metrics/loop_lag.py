"""How late does the event loop listen?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SAMPLE_INTERVAL_S = 0.05


class LoopLagSampler:
    """Measures from its own thread, 20 times a second, how long the loop takes to run what it is handed.

    That is what an answer waits after its batch has ended. `run_soon` hands it a function; `record(micros)` is called
    on the loop.
    """

    def __init__(
        self, run_soon: Callable[[Callable[[], None]], None], record: Callable[[float], None]
    ) -> None:
        self._run_soon = run_soon
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
            self._run_soon(lambda handed_ns=handed_ns: self._heard(handed_ns))  # type: ignore[misc]

    def _heard(self, handed_ns: int) -> None:
        self._record((time.monotonic_ns() - handed_ns) / 1000)
