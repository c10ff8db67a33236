"""Whose turn is it, where connections have more to do than fits into a moment? Each works for a slice, then waits.

uvloop hands a busy socket up to 32 reads of 256 KiB in one turn of the event loop, and to work off one read of small
frames takes some 100 ms. So a connection stops reading when its slice is over, and goes on with what it holds in a
later turn of the loop, after whatever else was due. Connections that ask for little never wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_SLICE_S = 0.0005
"""What one connection does at once; some 50 small requests (tests/benchmarks/server/greedy_clients.py)."""
_SHORT_SLICE_S = 0.0001
"""What it does before its turn while others wait for theirs; 64 may come at once (greedy_clients.py, 64 clients)."""
STRIDE_BYTES = 1_024
"""Between two looks at the clock, which take 0.1 µs each; a smaller read is worked off without one (front_ends.py)."""
SMALL_FRAME_BYTES = 64
"""What a frame counts in a stride beside its own bytes, where it is no request in two frames, so that the clock is
looked at after 14 of the smallest; DATA of fewer bytes is small (greedy_clients.py)."""
LARGE_READ_BYTES = 1 << 16
"""Of a read after which the next one waits for a turn: to copy it takes 0.1 ms (greedy_clients.py, uploads)."""
_CONNECTIONS_PER_TURN = 2
"""Of those that wait, in one turn of the loop; each may read 256 KiB afterwards, for 0.2 ms (greedy_clients.py)."""


class Turns:
    """Connections of one port that have more to do than a slice; for the thread of one event loop."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.now_s = now_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taking = False

    def slice_end_s(self) -> float:
        """Tell when a slice that begins now is over, on the clock `now_s`."""
        return self.now_s() + (_SLICE_S if self._is_taking or not self._waiting else _SHORT_SLICE_S)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once, in a later turn of the event loop, after the connections that have waited for longer."""
        if not self._waiting and not self._is_taking:
            asyncio.get_running_loop().call_soon(self._take)
        self._waiting.append(go_on)

    def _take(self) -> None:
        """Let those go on that have waited for longest."""
        self._is_taking = True
        try:
            for _ in range(min(len(self._waiting), _CONNECTIONS_PER_TURN)):
                self._waiting.popleft()()
        finally:
            self._is_taking = False
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._take)
