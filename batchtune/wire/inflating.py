"""Inflates compressed requests, without holding up the event loop or filling memory.

16 kB of gzip may hold 16 MB, which take 100 ms. Small requests are inflated on the event loop; the others on one
thread (zlib releases the GIL), in the order of arrival, and only while there is room: inflated requests that are not
answered, and answers that clients have not read, share ROOM_BYTES. How much a request will take is read from the length
at the end of a gzip before the work; a gzip that is padded, or of several members, may hold more, and is then inflated
again once there is room for the most that it may hold.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from batchtune.wire.listener import SharedBytes
from batchtune.wire.status import StatusError

GZIP = 31
"""zlib's `wbits` for gzip; for "deflate" it is 15."""
WAITING_BYTES_MAX = 1 << 26
"""Most bytes of all compressed requests that wait for the thread; a request that waits alone may be larger."""
ROOM_BYTES = 1 << 26
"""Memory for inflated requests that are not answered, and for answers not read; a request alone may take more."""
BYTES_FOR_EACH = 4
"""Bytes of memory counted for each inflated byte: the request, its tensors, the answer's tensors, and its bytes."""


class InflateError(Exception):
    """Bytes that cannot be inflated; the message says why."""


class TooLargeError(InflateError):
    """Bytes that inflate to more than is allowed."""


Outcome = bytes | InflateError | StatusError
"""The inflated bytes, or why there are none; StatusError: there was no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A compressed request.

    `wbits`: GZIP, or 15 for deflate. `bytes_max`: most bytes that may come out. `go_on(outcome, release)` is called
    once; `release()` has to be called when the request is answered. `is_gone()`: whether no client waits for the answer
    any more; may be called on the inflating thread. `put_off()`, called before a request is inflated on that thread:
    whether the client has to read answers first; the request is then dropped here, and its caller starts it again
    later. `heeds_end`: whether the length at the end of a gzip is believed.
    """

    content: bytes
    wbits: int
    bytes_max: int
    go_on: Callable[[Outcome, Callable[[], None]], None]
    is_gone: Callable[[], bool] = lambda: False
    put_off: Callable[[], bool] = lambda: False
    heeds_end: bool = True

    @property
    def plain_bytes_max(self) -> int:
        """Most bytes that can come out; for a gzip whose end is believed at most the length written there."""
        ratio_max = 1_032  # deflate's: 258 bytes for 2 bits
        bytes_max = min(self.bytes_max, ratio_max * len(self.content))
        if self.wbits != GZIP or not self.heeds_end:
            return bytes_max
        told_bytes = 4  # the length at the end of a gzip
        return min(bytes_max, int.from_bytes(self.content[-told_bytes:], "little"))


class Inflating:
    """Inflates the requests of a port; only for the thread of one event loop.

    `waiting_bytes`: compressed bytes of requests that wait or are being inflated. `held_bytes`: inflated bytes, actual
    or expected, of requests that are not answered. `unsent`: the answers that clients have not read, which need memory
    too.
    """

    def __init__(self, unsent: SharedBytes | None = None) -> None:
        self.waiting_bytes = self.held_bytes = 0
        self.unsent = unsent
        self._waiting: deque[Packed] = deque()
        self._is_busy = False
        self._thread: ThreadPoolExecutor | None = None

    def start(self, packed: Packed) -> None:
        """Inflate a request now if it is small, else on a thread as soon as there is room; `packed.go_on` gets the
        bytes, or the error where they cannot be inflated, perhaps before this returns.

        Raises:
            StatusError: RESOURCE_EXHAUSTED, since too many bytes wait; `packed.go_on` is not called.
        """
        size = len(packed.content)
        quick_packed_bytes_max = 1 << 10
        quick_bytes_max = 1 << 16  # 0.1 ms of the event loop
        if size <= quick_packed_bytes_max and not self._waiting and self._has_room(packed):
            outcome = _outcome(packed, min(packed.bytes_max, quick_bytes_max))
            if not isinstance(outcome, TooLargeError):
                self._hand_on(packed, 0, outcome)
                return
        if self.waiting_bytes and self.waiting_bytes + size > WAITING_BYTES_MAX:
            raise StatusError("RESOURCE_EXHAUSTED", "too many compressed requests wait to be inflated")
        self.waiting_bytes += size
        self._waiting.append(packed)
        self._go_on()

    def _has_room(self, packed: Packed) -> bool:
        if not self.held_bytes:  # whoever is next is not kept waiting by clients that take nothing
            return True
        unsent_bytes = self.unsent.held_bytes if self.unsent else 0
        return BYTES_FOR_EACH * (self.held_bytes + packed.plain_bytes_max) + unsent_bytes <= ROOM_BYTES

    def _go_on(self) -> None:
        if self.unsent is not None:
            self.unsent.make_room()
        while self._waiting and not self._is_busy and self._has_room(self._waiting[0]):
            packed = self._waiting.popleft()
            if packed.put_off():
                self.waiting_bytes -= len(packed.content)
                continue
            self._is_busy = True
            expected_bytes = packed.plain_bytes_max
            self.held_bytes += expected_bytes
            self._thread = self._thread or ThreadPoolExecutor(1, "inflate")
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._thread, _outcome, packed, expected_bytes)
            future.add_done_callback(partial(self._take, packed, expected_bytes))

    def _take(self, packed: Packed, expected_bytes: int, future: asyncio.Future[Outcome]) -> None:
        self._is_busy = False
        outcome = future.result()
        try:
            if packed.heeds_end and isinstance(outcome, TooLargeError) and expected_bytes < packed.bytes_max:
                self.held_bytes -= expected_bytes
                self._waiting.appendleft(replace(packed, heeds_end=False))
            else:
                self.waiting_bytes -= len(packed.content)
                self._hand_on(packed, expected_bytes, outcome)
        finally:
            self._go_on()

    def _hand_on(self, packed: Packed, expected_bytes: int, outcome: Outcome) -> None:
        held = [len(outcome) if isinstance(outcome, bytes) else 0]
        self.held_bytes += held[0] - expected_bytes
        packed.go_on(outcome, partial(self._release, held))

    def _release(self, held: list[int]) -> None:
        """Free a request's bytes when it is answered; further calls do nothing.

        The next request begins in a later turn of the loop, when the answer is on its way.
        """
        if held:
            self.held_bytes -= held.pop()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._go_on)


def inflate(content: bytes, wbits: int, bytes_max: int) -> bytes:
    """Decompress gzip (one member or several, perhaps followed by zeros) or deflate, as `wbits` says.

    Raises:
        TooLargeError: more than `bytes_max` bytes come out.
        InflateError: the content is broken, cut short or of too many members.
    """
    members: list[bytes] = []
    left_bytes = bytes_max
    members_max = 64  # of a gzip; each may copy what follows it
    while content or not members:
        if len(members) == members_max:
            raise InflateError(f"it has more than {members_max} members")
        stream = zlib.decompressobj(wbits=wbits)
        try:
            plain = stream.decompress(content, left_bytes + 1)
        except zlib.error as error:
            raise InflateError(str(error)) from error
        if len(plain) > left_bytes:
            raise TooLargeError(f"it exceeds {bytes_max} bytes")
        if not stream.eof:
            raise InflateError("it is cut short")
        members.append(plain)
        left_bytes -= len(plain)
        content = stream.unused_data.lstrip(b"\0") if wbits == GZIP else b""
    return b"".join(members)


def _outcome(packed: Packed, bytes_max: int) -> Outcome:
    """Return what `inflate` returns or raises; b"" where the client is gone.

    An error is made anew: the frames in its traceback would hold all that was inflated.
    """
    if packed.is_gone():
        return b""
    try:
        return inflate(packed.content, packed.wbits, bytes_max)
    except InflateError as error:
        return type(error)(str(error))
    except MemoryError:
        return StatusError("RESOURCE_EXHAUSTED", "there is no memory to inflate the request")
