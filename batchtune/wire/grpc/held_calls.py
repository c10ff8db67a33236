"""Which calls wait until their client has taken answers? Those of a client that has too many of them to take.

The connection is read on meanwhile: the windows that let answers go arrive on it too. While answers for all clients
together fill much of what they may, a client that has never taken any that waited has a few calls under way at a time,
one more for each whose answer left at once: one that reads nothing is known by their answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from batchtune.wire.grpc.server_call import GrpcCall, hand_over
from batchtune.wire.http2.frames import ErrorCode, PeerError
from batchtune.wire.shared_bytes import SharedBytes, SharedLimits
from batchtune.wire.status import StatusError

_FREE_FRAMES = 8
"""Small frames that a client may send for each request, and for each frame of an answer that had to wait: it opens two
windows for each, and may send a message's prefix by itself (tests/benchmarks/server/greedy_clients.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds per connection. What exceeds one ends in a status, a reset stream or a GOAWAY, never in growth.

    `max_concurrent_streams` also counts cancelled calls that the service has not finished, so that opening and
    resetting streams quickly (CVE-2023-44487) gains nothing. Of requests that are not whole there may be
    `max_begun_streams`; further ones are refused unread. `max_buffered_bytes` bounds the incomplete requests
    of a connection together; one request alone may use `max_message_bytes`, one that comes compressed
    `max_inflated_bytes`. `stall_s`: a client that takes no
    data for so long, though answers wait for it, is cut off. While answers of `max_queued_bytes` wait for the client's
    windows, or for its socket, the next ones that have to wait fail; a single answer may be larger. While more than
    `max_unsent_bytes` of them wait, no further call of the client is begun.
    `max_queued_stream_bytes` is the same for the messages of streams, which a client may ask for without end. Each
    SETTINGS frame may touch every answer that waits for a window, hence their own, low `max_settings_per_s`.
    A connection older than `max_connection_age_ms` (0: none is), give or take a tenth, is told to go, so that clients
    spread over new replicas, and closed `max_connection_age_grace_ms` later at the latest (0: once it is idle); both
    are looked at every SWEEP_S.
    `shared` bounds what all connections hold together.
    """

    max_concurrent_streams: int = 65_536
    max_begun_streams: int = 4_096
    max_message_bytes: int = 2**31 - 1
    max_inflated_bytes: int = 2**26
    max_buffered_bytes: int = 2**28
    max_queued_bytes: int = 2**26
    max_unsent_bytes: int = 2**20
    max_queued_stream_bytes: int = 2**20
    max_header_list_bytes: int = 32_768
    max_control_frames_per_s: int = 10_000
    max_settings_per_s: int = 100
    max_resets_per_s: int = 50_000
    stall_s: float = 60.0
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0
    shared: SharedLimits = field(default_factory=SharedLimits)


class FrameRates:
    """How many frames that cost us work, and carry no request, a client may send; one too many is a PeerError."""

    __slots__ = ("_control", "_free_spent", "_resets", "_settings")

    def __init__(self, limits: ServerLimits) -> None:
        self._control = RateLimit(limits.max_control_frames_per_s)
        self._free_spent = 0
        self._resets = RateLimit(limits.max_resets_per_s)
        self._settings = RateLimit(limits.max_settings_per_s)

    def count_control(self) -> None:
        """Count a frame that asks for nothing."""
        if self._control.exceeded():
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")

    def count_small(self, earned: int) -> None:
        """Count a WINDOW_UPDATE, or DATA of a few bytes; some are free for each of the `earned` streams and frames."""
        if self._free_spent < earned * _FREE_FRAMES:
            self._free_spent += 1
        else:
            self.count_control()

    def count_reset(self) -> None:
        """Count a RST_STREAM."""
        if self._resets.exceeded():
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "too many streams reset")

    def count_settings(self) -> None:
        """Count a SETTINGS frame that sets something."""
        if self._settings.exceeded():
            raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, "too many SETTINGS frames")


class RateLimit:
    """Counts events and tells when more than `per_s` came within a second; reads the clock rarely."""

    __slots__ = ("_count", "_per_s", "_since_s")

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._count = 0
        self._since_s = time.monotonic()

    def exceeded(self) -> bool:
        """Count one event; True when it is one too many."""
        self._count += 1
        if self._count <= self._per_s:
            return False
        now_s = time.monotonic()
        if now_s - self._since_s < 1.0:
            return True
        self._since_s = now_s
        self._count = 0
        return False


_CALL_BYTES = 1_000  # of a call beside its message
_CALLS_PER_TURN = 8  # begun before other connections have their turn
_TIGHT_UNSENT_BYTES_MAX = 2**16  # of a client, while there is little room for all
_TRIED_CALLS_MAX = 2  # under way, of such a client, at first
_TOO_MANY = "too many calls wait for the client to read its answers"


class HeldCalls:
    """The calls of one connection that wait; `dispatch` hands a call to the service, `unsent` counts for all.

    `note_held` is called when calls come to wait that had been begun.
    """

    __slots__ = (
        "_calls",
        "_has_taken",
        "_is_behind",
        "_is_due",
        "_limits",
        "_note_held",
        "_tried",
        "_tried_max",
        "_unsent",
        "_unsent_bytes",
        "dispatch",
        "held_bytes",
    )

    def __init__(
        self,
        dispatch: Callable[[GrpcCall], None],
        limits: ServerLimits,
        unsent: SharedBytes,
        note_held: Callable[[], None],
    ) -> None:
        self.held_bytes = 0
        self.dispatch = dispatch
        self._limits = limits
        self._unsent = unsent
        self._note_held = note_held
        self._calls: deque[tuple[GrpcCall, Callable[[GrpcCall], None] | None]] = deque()
        self._is_behind = False  # the client, with its answers
        self._is_due = False  # that we go on
        self._unsent_bytes = 0
        self._has_taken = False  # answers that had to wait
        self._tried: list[GrpcCall] = []  # under way, begun while there was little room for all
        self._tried_max = _TRIED_CALLS_MAX

    def begin(self, call: GrpcCall, start: Callable[[GrpcCall], None] | None = None) -> None:
        """Start a call whose message is whole, now or once the client has taken answers; by default, hand it over.

        Raises:
            StatusError: too much waits, or the service refuses the call.
        """
        if not self._is_behind and not self._calls and (self._has_taken or not self._unsent.is_tight):
            (start or self.dispatch)(call)
            return
        self._hold(call, start)
        self._go_on_soon()

    def put_off(self, call: GrpcCall, message: bytes, start: Callable[[GrpcCall], None]) -> bool:
        """Let a call that was begun, and not handed over, wait again if its client has fallen behind since.

        It fails where too much waits.
        """
        if not self._is_behind or call.cancelled:
            return False
        call.message = message
        try:
            self._hold(call, start)
        except StatusError as error:
            call.message = b""
            call.fail(error.code, error.message)
        self._note_held()
        return True

    def note_unsent(self, unsent_bytes: int) -> bool:
        """Take note of how much the client has to take; go on with its calls where it is little.

        True: calls wait, so that each answer matters.
        """
        bytes_max = self._limits.max_unsent_bytes
        if unsent_bytes < self._unsent_bytes:
            self._has_taken = True
        elif not self._has_taken and self._unsent.is_tight:
            bytes_max = min(bytes_max, _TIGHT_UNSENT_BYTES_MAX)
        if not unsent_bytes:
            self._tried_max += sum(call.answered and not call.cancelled for call in self._tried)
        self._unsent_bytes = unsent_bytes
        self._is_behind = unsent_bytes > bytes_max
        self._tried = [call for call in self._tried if not call.answered]
        self._go_on_soon()
        return bool(self._calls or self._tried)

    def refuse(self, message: str) -> None:
        """Fail every call that waits."""
        calls = list(self._calls)
        self._drop()
        for call, _ in calls:
            call.fail("RESOURCE_EXHAUSTED", message)

    def forget(self) -> None:
        """Drop every call that waits: the client is gone."""
        self._drop()
        self._note_held = _nothing  # it refers to the connection, which refers to us

    def _drop(self) -> None:
        self._calls.clear()
        self._tried.clear()
        self.held_bytes = 0
        self._unsent.waiting.discard(self._go_on_soon)

    def _hold(self, call: GrpcCall, start: Callable[[GrpcCall], None] | None) -> None:
        held_bytes = self.held_bytes + len(call.message) + _CALL_BYTES
        if held_bytes > self._limits.max_buffered_bytes:
            raise StatusError("RESOURCE_EXHAUSTED", _TOO_MANY)
        self.held_bytes = held_bytes
        self._calls.append((call, start))

    def _go_on_soon(self) -> None:
        if self._calls and not self._is_behind and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        for _ in range(min(_CALLS_PER_TURN, len(self._calls))):
            is_tried = self._unsent.is_tight and not self._has_taken
            if self._is_behind:
                return
            if is_tried and len(self._tried) >= self._tried_max:
                self._unsent.waiting.add(self._go_on_soon)
                return
            call, start = self._calls.popleft()
            self.held_bytes -= len(call.message) + _CALL_BYTES
            if is_tried:
                self._tried.append(call)
            hand_over(call, start or self.dispatch)
        self._go_on_soon()


def _nothing() -> None:
    pass
