"""What may we send now? The peer's flow-control windows and the bodies that wait for them (RFC 9113 §5.2)."""

from __future__ import annotations

from collections import deque

from batchtune.wire.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    END_STREAM,
    LARGEST_WINDOW,
    ErrorCode,
    PeerError,
    frame,
)


class _Body:
    """What is left to send of one stream; `tail` follows the last DATA frame, None sets END_STREAM on it instead.

    `later`: what follows `data`, in pieces, for to join them each time would take the square of their number.
    """

    __slots__ = ("data", "later", "sent", "tail", "window")

    def __init__(self, data: bytes, tail: bytes | None, window: int) -> None:
        self.data = memoryview(data)
        self.later: deque[bytes] | None = None
        self.sent = 0
        self.tail = tail
        self.window = window


class OutgoingFlow:
    """The peer's receive windows, seen from the sender.

    Fast path of both ends: a body of n bytes with `n <= flow.window and n <= flow.at_once` may be written in one
    DATA frame; the writer then takes n off `window`. Everything else goes through `queue` and `pump`.
    """

    __slots__ = ("_frame_bytes", "_ready", "_waiting", "at_once", "initial_window", "queued_bytes", "window")

    def __init__(self) -> None:
        self.window = DEFAULT_WINDOW
        self.at_once = DEFAULT_FRAME_BYTES
        self.queued_bytes = 0  # of bodies not entirely written; each is in memory to its last byte
        self.initial_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME_BYTES
        self._waiting: dict[int, _Body] = {}
        self._ready: dict[int, _Body] = {}  # those that wait for the connection's window only

    @property
    def waiting(self) -> int:
        """Count the streams whose body has not been written entirely."""
        return len(self._waiting)

    def waits(self, stream_id: int) -> bool:
        """Tell whether part of this stream's body has not been written."""
        return stream_id in self._waiting

    def extend(self, stream_id: int, data: bytes, tail: bytes | None) -> None:
        """Append to a body that waits, and replace its tail."""
        body = self._waiting[stream_id]
        if data:
            if body.later is None:
                body.later = deque()
            body.later.append(data)
        body.tail = tail
        self.queued_bytes += len(data)

    def queue(self, stream_id: int, data: bytes, tail: bytes | None, extra_window: int = 0) -> None:
        """Append a body; `extra_window` is what WINDOW_UPDATEs have granted this stream above the initial window."""
        body = self._waiting[stream_id] = _Body(data, tail, self.initial_window + extra_window)
        if body.window > 0 or not data:
            self._ready[stream_id] = body
        self.queued_bytes += len(data)
        self.at_once = -1

    def drop(self, stream_id: int) -> bool:
        """Forget what is left of a stream; True if there was something."""
        body = self._waiting.pop(stream_id, None)
        if body is None:
            return False
        self._ready.pop(stream_id, None)
        self.queued_bytes -= len(body.data) + sum(map(len, body.later or ()))
        self._set_at_once()
        return True

    def pump(self, out: list[bytes]) -> list[int]:
        """Append all frames that the windows allow to `out`, oldest stream first; list the streams finished.

        Streams whose own window is closed are not looked at: a client may keep thousands of them.
        """
        finished: list[int] = []
        closed: list[int] = []
        for stream_id, body in self._ready.items():
            total = len(body.data)
            while True:
                if body.sent == total and body.later:
                    self.queued_bytes -= total
                    body.data, body.sent = memoryview(body.later.popleft()), 0
                    total = len(body.data)
                size = min(total - body.sent, body.window, self.window, self._frame_bytes)
                if size <= 0 and body.sent < total:
                    if body.window <= 0:
                        closed.append(stream_id)
                    break
                chunk = bytes(body.data[body.sent : body.sent + size])
                body.sent += size
                body.window -= size
                self.window -= size
                done = body.sent == total and not body.later
                out.append(frame(DATA, END_STREAM if done and body.tail is None else 0, stream_id, chunk))
                if done:
                    self.queued_bytes -= total
                    out.append(body.tail or b"")
                    finished.append(stream_id)
                    break
            if self.window <= 0:
                break
        for stream_id in closed:
            del self._ready[stream_id]
        for stream_id in finished:
            del self._waiting[stream_id], self._ready[stream_id]
        if finished:
            self._set_at_once()
        return finished

    def grow_connection(self, increment: int) -> None:
        """Apply a WINDOW_UPDATE of stream 0; raises PeerError when it is 0 or overflows."""
        if increment == 0:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        self.window += increment
        if self.window > LARGEST_WINDOW:
            raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "connection window above 2^31-1")

    def grow_stream(self, stream_id: int, increment: int) -> bool:
        """Apply a WINDOW_UPDATE to a stream that waits; False if it overflows 2^31-1."""
        body = self._waiting[stream_id]
        body.window += increment
        if body.window > 0:
            self._ready[stream_id] = body
        return body.window <= LARGEST_WINDOW

    def set_initial_window(self, size: int) -> None:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE to all streams, present ones by the difference (§6.9.2)."""
        change = size - self.initial_window
        self.initial_window = size
        for stream_id, body in self._waiting.items():
            body.window += change
            if body.window > 0:
                self._ready[stream_id] = body
            if body.window > LARGEST_WINDOW:
                raise PeerError(ErrorCode.FLOW_CONTROL_ERROR, "stream window above 2^31-1")
        self._set_at_once()

    def set_frame_bytes(self, size: int) -> None:
        """Apply SETTINGS_MAX_FRAME_SIZE."""
        self._frame_bytes = size
        self._set_at_once()

    def _set_at_once(self) -> None:
        self.at_once = -1 if self._waiting else min(self.initial_window, self._frame_bytes)
