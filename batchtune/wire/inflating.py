"""How is what comes compressed inflated, without holding up the event loop or filling memory?

16 kB of gzip may hold 16 MB, which take 100 ms. What turns out small is inflated on the event loop; the rest on one
thread, in the order of arrival, for zlib lets go of the interpreter, and only while the inflated requests that are not
answered yet leave room for it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from batchtune.wire.status import StatusError

GZIP = 31
"""zlib's wbits; those of "deflate" are 15."""
WAITING_BYTES_MAX = 1 << 26
"""Of compressed requests that wait for the thread; a lone one may be larger."""
HELD_BYTES_MAX = 1 << 28
"""Of requests that were inflated and are not answered: four of the largest."""
_QUICK_PACKED_BYTES_MAX = 1 << 10
_QUICK_BYTES_MAX = 1 << 16  # 0.1 ms of the event loop


class InflateError(Exception):
    """What cannot be inflated: why."""


class TooLargeError(InflateError):
    """More comes out than is allowed."""


Outcome = bytes | InflateError | StatusError
"""StatusError: there is no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A compressed request. `go_on` is called once, with the outcome and a function to be called when the request is
    answered. `is_gone`: nobody waits for the answer; asked on the thread."""

    content: bytes
    wbits: int
    bytes_max: int
    go_on: Callable[[Outcome, Callable[[], None]], None]
    is_gone: Callable[[], bool] = lambda: False


class Inflating:
    """Inflates the requests of a port; only for the thread of one event loop.

    `waiting_bytes`: compressed, of those that wait. `held_bytes`: inflated, of those that are not answered.
    """

    def __init__(self) -> None:
        self.waiting_bytes = self.held_bytes = 0
        self._waiting: deque[Packed] = deque()
        self._is_busy = False
        self._thread: ThreadPoolExecutor | None = None

    def start(self, packed: Packed) -> None:
        """Inflate now or later.

        Raises:
            StatusError: RESOURCE_EXHAUSTED while too much waits.
        """
        size = len(packed.content)
        if size <= _QUICK_PACKED_BYTES_MAX and not self._waiting and self._has_room(packed):
            outcome = _outcome(packed, min(packed.bytes_max, _QUICK_BYTES_MAX))
            if not isinstance(outcome, TooLargeError):
                self._hand_on(packed, outcome)
                return
        if self.waiting_bytes and self.waiting_bytes + size > WAITING_BYTES_MAX:
            raise StatusError("RESOURCE_EXHAUSTED", "too many compressed requests wait to be inflated")
        self.waiting_bytes += size
        self._waiting.append(packed)
        self._go_on()

    def _has_room(self, packed: Packed) -> bool:
        return not self.held_bytes or self.held_bytes + packed.bytes_max <= HELD_BYTES_MAX

    def _go_on(self) -> None:
        if self._waiting and not self._is_busy and self._has_room(self._waiting[0]):
            self._is_busy = True
            packed = self._waiting.popleft()
            self._thread = self._thread or ThreadPoolExecutor(1, "inflate")
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._thread, _outcome, packed, packed.bytes_max)
            future.add_done_callback(partial(self._take, packed))

    def _take(self, packed: Packed, future: asyncio.Future[Outcome]) -> None:
        self._is_busy = False
        self.waiting_bytes -= len(packed.content)
        try:
            self._hand_on(packed, future.result())
        finally:
            self._go_on()

    def _hand_on(self, packed: Packed, outcome: Outcome) -> None:
        held = [len(outcome) if isinstance(outcome, bytes) else 0]
        self.held_bytes += held[0]
        packed.go_on(outcome, partial(self._release, held))

    def _release(self, held: list[int]) -> None:
        """Take note of an answer, the first one only."""
        if held:
            self.held_bytes -= held.pop()
            self._go_on()


def inflate(content: bytes, wbits: int, bytes_max: int) -> bytes:
    """Undo gzip or deflate; raises InflateError, beyond `bytes_max` TooLargeError."""
    stream = zlib.decompressobj(wbits=wbits)
    try:
        plain = stream.decompress(content, bytes_max + 1)
    except zlib.error as error:
        raise InflateError(str(error)) from error
    if len(plain) > bytes_max:
        raise TooLargeError(f"it exceeds {bytes_max} bytes")
    if not stream.eof:
        raise InflateError("it is cut short")
    return plain


def _outcome(packed: Packed, bytes_max: int) -> Outcome:
    """What `inflate` gives or raises, without the frames of an error: they hold all that was inflated."""
    if packed.is_gone():
        return b""
    try:
        return inflate(packed.content, packed.wbits, bytes_max)
    except InflateError as error:
        return type(error)(str(error))
    except MemoryError:
        return StatusError("RESOURCE_EXHAUSTED", "there is no memory to inflate the request")
