"""Writes the answers of a gRPC server connection, and holds back calls while its client does not read them.

An answer is sent at once when the client's windows allow it, else when they open. The connection of a client that has
too many answers to read is still read, because the frames that open its windows arrive on it too; its next calls wait.
While the answers of all clients together take much of the memory allowed, a client that has never read an answer that
had to wait may have only a few calls under way, one more for each whose answer could be sent at once: so a client that
reads nothing is known after a few answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from batchtune.wire import http2 as h2
from batchtune.wire.grpc.framing import PREFIX
from batchtune.wire.grpc.server_call import (
    HEAD_PIECES,
    OK_PIECES,
    GrpcCall,
    GrpcStream,
    failure_pieces,
    hand_over,
    nothing,
    write_reply,
)
from batchtune.wire.http2 import STREAM_ID, ErrorCode, OutgoingFlow
from batchtune.wire.listener import SharedBytes, SharedLimits
from batchtune.wire.status import StatusError

FEW_STREAMS = 1_024
"""So many incomplete requests of one connection are no burden: they count no memory, and may be failed one by one."""
_TOO_SLOW = "too many answers wait for the client to read them"
_CALL_BYTES = 1_000  # of a call beside its message


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds per connection. Beyond one a call fails, a stream is reset or the connection closed; memory never grows.

    Requests: `max_concurrent_streams` also counts cancelled calls that the service has not finished, so that opening
    and resetting streams quickly (CVE-2023-44487) gains nothing. Beyond `max_begun_streams` incomplete requests,
    further ones are refused unread. The incomplete requests together may hold `max_buffered_bytes`; one request alone
    `max_message_bytes`, a compressed one `max_inflated_bytes` when inflated.

    Answers: while `max_queued_bytes` wait for the client's windows, or for its socket, the next answers that have to
    wait fail; a single answer may be larger. While more than `max_unsent_bytes` wait, no further call of the client is
    begun. While more than `max_queued_stream_bytes` wait, a stream that sends a message ends.

    Frames: each SETTINGS frame may touch every answer that waits for a window, hence the low `max_settings_per_s`.

    Age: a connection older than `max_connection_age_ms` (0: no limit), give or take a tenth, is asked to end, so that
    clients spread over new replicas, and closed `max_connection_age_grace_ms` later at the latest (0: when it is idle);
    both are checked every SWEEP_S. `shared` bounds what all connections hold together, and for how long a client may
    read nothing.
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
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0
    shared: SharedLimits = field(default_factory=SharedLimits)


class AnswerWriter:
    """The writing half of a server connection: its open streams, their windows and everything not yet sent.

    `note_unsent(unsent_bytes)`: called when answers still wait after a flush, and after each flush while it last
    returned True.
    """

    __slots__ = (
        "_flow",
        "_grants",
        "_limits",
        "_loop",
        "_note_unsent",
        "_reading_held",
        "begun_streams",
        "close_when_idle",
        "flush_due",
        "held_bytes",
        "is_paused",
        "out",
        "progress",
        "streams",
        "tells_flushes",
        "transport",
        "zombies",
    )

    def __init__(
        self, transport: asyncio.Transport, limits: ServerLimits, note_unsent: Callable[[int], bool]
    ) -> None:
        transport.set_write_buffer_limits(high=2**16)
        self.transport: asyncio.Transport | None = transport
        self.streams: dict[int, GrpcCall | GrpcStream] = {}
        self.begun_streams = 0  # whose requests are not whole
        self.out: list[bytes] = []
        self.flush_due = False
        self.close_when_idle = False
        self.zombies = 0  # cancelled calls that the service still works on
        self.held_bytes = 0  # of requests that are incomplete
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._note_unsent = note_unsent
        self.tells_flushes = False  # for answers wait, or calls wait for answers
        self._flow = OutgoingFlow()
        self._grants: dict[int, int] = {}  # WINDOW_UPDATEs of open streams that wait for nothing
        self.is_paused = False  # the socket is clogged, so that no more requests are read
        self._reading_held = False  # others have their turn
        self.progress = 0  # frames of answers that had to wait, and times that the socket took data again

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that wait for the socket or for the client's windows."""
        waiting = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return waiting + self._flow.queued_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that requests take before their data; 0 while at most FEW_STREAMS are incomplete."""
        stream_bytes = 300  # of one without data; by tracemalloc
        return self.begun_streams * stream_bytes if self.begun_streams > FEW_STREAMS else 0

    @property
    def is_full(self) -> bool:
        """Whether the client has as many requests under way as it may."""
        limits = self._limits
        if self.begun_streams >= limits.max_begun_streams:
            return True
        return len(self.streams) + self.zombies >= limits.max_concurrent_streams

    def send_reply(self, call: GrpcCall, message: bytes) -> None:
        """Send an OK answer with its one message, serialised and without gRPC's prefix; where the client reads too
        slowly the call fails with RESOURCE_EXHAUSTED."""
        if call.cancelled:
            self._forget_zombie()
            return
        size = len(message) + 5
        flow = self._flow
        stream_id = call.stream_id
        if self.is_paused and self._exceeds_socket(size):
            self.send_failure(call, "RESOURCE_EXHAUSTED", _TOO_SLOW)
            return
        if size <= flow.at_once and size <= flow.window:
            flow.window -= size
            del self.streams[stream_id]
            if self._grants:
                self._grants.pop(stream_id, None)
            write_reply(self.out, stream_id, message)
        elif flow.queued_bytes and flow.queued_bytes + size > self._limits.max_queued_bytes:
            self.send_failure(call, "RESOURCE_EXHAUSTED", _TOO_SLOW)
        else:
            packed_id = STREAM_ID.pack(stream_id)
            self.out.append(packed_id.join(HEAD_PIECES))
            self._queue(stream_id, PREFIX.pack(0, len(message)) + message, packed_id.join(OK_PIECES))
        if not self.flush_due:
            self.flush_soon()

    def send_failure(self, call: GrpcCall | GrpcStream, code: str, message: str) -> None:
        """End a call with a status other than OK, without waiting for the rest of its request."""
        if call.cancelled:
            if type(call) is GrpcCall:
                self._forget_zombie()
            return
        opened = isinstance(call, GrpcStream) and call.opened
        pieces = failure_pieces(code, message, trailers_only=not opened)
        self._send_tail(call, STREAM_ID.pack(call.stream_id).join(pieces))

    def send_message(self, stream: GrpcStream, message: bytes) -> None:
        """Send one message of a stream, after the headers if it is the first; the stream fails where too many bytes
        wait."""
        if self._flow.queued_bytes > self._limits.max_queued_stream_bytes:
            stream.finish("RESOURCE_EXHAUSTED", _TOO_SLOW)
            return
        packed_id = STREAM_ID.pack(stream.stream_id)
        if not stream.opened:
            stream.opened = True
            self.out.append(packed_id.join(HEAD_PIECES))
        self._queue(stream.stream_id, PREFIX.pack(0, len(message)) + message, b"")
        self.flush_soon()

    def send_end(self, stream: GrpcStream) -> None:
        """End a stream with status OK."""
        if not stream.cancelled:
            packed_id = STREAM_ID.pack(stream.stream_id)
            head = b"" if stream.opened else packed_id.join(HEAD_PIECES)
            self._send_tail(stream, head + packed_id.join(OK_PIECES))

    def send_text(self, stream_id: int, block: bytes, text: bytes) -> None:
        """Answer a request that is no gRPC call with header fields, the HTTP status among them, and a text; without the
        text where the windows have no room for it.

        `block`: the fields, encoded by `encode_block`. `text`: the body; b"": none.
        """
        flow = self._flow
        fits = 0 < len(text) <= min(flow.at_once, flow.window)
        packed_id = STREAM_ID.pack(stream_id)
        self.out.append(packed_id.join(h2.header_frames(block, 0 if fits else h2.END_STREAM)))
        if fits:
            flow.window -= len(text)
            self.out.append(h2.frame(h2.DATA, h2.END_STREAM, stream_id, text))

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream with RST_STREAM; a call that is open is cancelled."""
        self.cancel(stream_id)
        self.out.append(h2.rst_stream_frame(stream_id, code))

    def cancel(self, stream_id: int) -> None:
        """Discard a stream that the client no longer wants, and cancel its call."""
        stream = self._forget(stream_id)
        if stream is not None and not stream.answered:
            self.zombies += type(stream) is GrpcCall and stream.half_closed
            stream.cancel()

    def grow_window(self, stream_id: int, increment: int) -> None:
        """Apply a WINDOW_UPDATE; raises PeerError when it breaks the connection's window. Where it breaks that of a
        stream, the stream is reset."""
        flow = self._flow
        if stream_id == 0:
            flow.grow_connection(increment)
        elif increment == 0:
            self.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif flow.waits(stream_id):
            if not flow.grow_stream(stream_id, increment):
                self.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        elif stream_id in self.streams:
            granted = self._grants.get(stream_id, 0) + increment
            if granted > h2.LARGEST_WINDOW - flow.initial_window:
                self.reset(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            else:
                self._grants[stream_id] = granted
        self._pump()

    def apply_settings(self, payload: bytes) -> None:
        """Apply the client's SETTINGS and acknowledge them; raises PeerError."""
        for key, value in h2.read_settings(payload, by_server=False):
            if key == h2.Setting.INITIAL_WINDOW_SIZE:
                self._flow.set_initial_window(value)
            elif key == h2.Setting.MAX_FRAME_SIZE:
                self._flow.set_frame_bytes(value)
        self.out.append(h2.SETTINGS_ACK)
        self._pump()

    def flush_soon(self) -> None:
        """Flush at the end of this loop turn, with all else that is answered in it."""
        if not self.flush_due:
            self.flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write everything buffered; close the connection if `close_when_idle` and every request is answered."""
        self.flush_due = False
        transport = self.transport
        if transport is None:
            self.out.clear()
            return
        if self.out:
            transport.write(b"".join(self.out))
            self.out.clear()
        if self.is_paused or self.tells_flushes or self._flow.queued_bytes:
            self._note()
        if self.close_when_idle and not self.streams:
            transport.close()

    def pause(self) -> None:
        """Read no more requests: the socket is clogged."""
        self.is_paused = True
        self._set_reading()
        self._note()

    def resume(self) -> None:
        """Read requests and write answers again: the socket takes data."""
        self.is_paused = False
        self.progress += 1
        self._set_reading()
        self._note()

    def hold_reading(self, *, held: bool) -> None:
        """Pause or resume reading requests; it stays paused while the socket is clogged."""
        self._reading_held = held
        self._set_reading()

    def abandon(self) -> None:
        """Cancel every call that was not answered: the connection is gone."""
        self.transport = None
        self.out.clear()
        self._flow = OutgoingFlow()  # calls that the service still works on refer to this writer
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            if not stream.answered:
                stream.cancel()

    def _set_reading(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self.is_paused or self._reading_held:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _note(self) -> None:
        unsent_bytes = self.unsent_bytes
        self.tells_flushes = self._note_unsent(unsent_bytes) or unsent_bytes > 0

    def _exceeds_socket(self, size: int) -> bool:
        """Whether too much would wait for a socket that is clogged, whatever the client's windows allow."""
        waiting = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return waiting + size > self._limits.max_queued_bytes

    def _send_tail(self, stream: GrpcCall | GrpcStream, tail: bytes) -> None:
        stream_id = stream.stream_id
        if self._flow.waits(stream_id):
            self._flow.extend(stream_id, b"", tail)
        else:
            self.out.append(tail)
            self._finish(stream_id)
        self.flush_soon()

    def _forget_zombie(self) -> None:
        """Count one zombie less: the service has ended a call that was cancelled."""
        self.zombies -= 1
        if self.tells_flushes:
            self.flush_soon()

    def _finish(self, stream_id: int) -> None:
        """Close a stream whose answer is complete; a request still arriving is no longer wanted."""
        stream = self._forget(stream_id)
        if stream is not None and not stream.half_closed:
            self.out.append(h2.rst_stream_frame(stream_id, ErrorCode.NO_ERROR))

    def _forget(self, stream_id: int) -> GrpcCall | GrpcStream | None:
        """Drop all that is held for a stream; returns the stream, None where it was not open."""
        stream = self.streams.pop(stream_id, None)
        self._flow.drop(stream_id)
        self._grants.pop(stream_id, None)
        if stream is not None:
            self.begun_streams -= not stream.half_closed
            if stream.buffer is not None:
                self.held_bytes -= stream.buffer.held_bytes
                stream.buffer = None
        return stream

    def _queue(self, stream_id: int, data: bytes, tail: bytes) -> None:
        if self._flow.waits(stream_id):
            self._flow.extend(stream_id, data, tail)
        else:
            self._flow.queue(stream_id, data, tail, self._grants.pop(stream_id, 0))
        self._pump()

    def _pump(self) -> None:
        if not self._flow.waiting:
            return
        before = len(self.out)
        for stream_id in self._flow.pump(self.out):
            if self.streams[stream_id].answered:
                self._finish(stream_id)
        self.progress += len(self.out) - before


class HeldCalls:
    """Holds back the calls of one connection while its client does not read its answers.

    `dispatch`: passes a call to the service. `unsent`: counts the unread answers of all clients. `note_held()`: called
    when a call that had been begun is held again. `held_bytes`: memory of the held calls.
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
        tried_calls_max = 2  # under way, of such a client, at first
        self._tried_max = tried_calls_max

    def begin(self, call: GrpcCall, start: Callable[[GrpcCall], None] | None = None) -> None:
        """Start a complete call by `start(call)` (None: by `dispatch`): now, or when the client has read enough
        answers.

        Raises:
            StatusError: the held calls take too much memory, or the service refuses the call.
        """
        if not self._is_behind and not self._calls and (self._has_taken or not self._unsent.is_tight):
            (start or self.dispatch)(call)
            return
        self._hold(call, start)
        self._go_on_soon()

    def put_off(self, call: GrpcCall, message: bytes, start: Callable[[GrpcCall], None]) -> bool:
        """Hold a call again that was begun but not dispatched, if its client now has too many answers to read.

        Returns False if the call may go on; True if it is held, or has failed because held calls take too much memory.
        `start(call)`: begins it later.
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
        """Set how many bytes of answers the client has to read; start its held calls if these are few.

        Returns whether the caller has to report every further change: calls are held, or some were started although the
        answers of all clients take nearly as much memory as they may.
        """
        bytes_max = self._limits.max_unsent_bytes
        tight_unsent_bytes_max = 2**16  # of a client, while there is little room for all
        if unsent_bytes < self._unsent_bytes:
            self._has_taken = True
        elif not self._has_taken and self._unsent.is_tight:
            bytes_max = min(bytes_max, tight_unsent_bytes_max)
        if not unsent_bytes:
            self._tried_max += sum(call.answered and not call.cancelled for call in self._tried)
        self._unsent_bytes = unsent_bytes
        self._is_behind = unsent_bytes > bytes_max
        self._tried = [call for call in self._tried if not call.answered]
        self._go_on_soon()
        return bool(self._calls or self._tried)

    def refuse(self, message: str) -> None:
        """Fail every held call with RESOURCE_EXHAUSTED and this message."""
        calls = list(self._calls)
        self._drop()
        for call, _ in calls:
            call.fail("RESOURCE_EXHAUSTED", message)

    def forget(self) -> None:
        """Discard every held call without an answer: the client is gone."""
        self._drop()
        self._note_held = nothing  # it refers to the connection, which refers to us

    def _drop(self) -> None:
        self._calls.clear()
        self._tried.clear()
        self.held_bytes = 0
        self._unsent.waiting.discard(self._go_on_soon)

    def _hold(self, call: GrpcCall, start: Callable[[GrpcCall], None] | None) -> None:
        held_bytes = self.held_bytes + len(call.message) + _CALL_BYTES
        if held_bytes > self._limits.max_buffered_bytes:
            raise StatusError("RESOURCE_EXHAUSTED", "too many calls wait for the client to read its answers")
        self.held_bytes = held_bytes
        self._calls.append((call, start))

    def _go_on_soon(self) -> None:
        if self._calls and not self._is_behind and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        calls_per_turn = 8  # begun before other connections have their turn
        for _ in range(min(calls_per_turn, len(self._calls))):
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
