"""How much may one client ask of the server?"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from batchtune.wire.http2.frames import ErrorCode, PeerError
from batchtune.wire.shared_bytes import SharedLimits

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
