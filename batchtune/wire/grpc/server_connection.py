"""gRPC for the server, at a few microseconds per request: one client's HTTP/2 connection, read.

What makes it cheap: header blocks are looked up, not decoded, once the client has taken note that we keep no
dynamic table; headers and trailers of answers are constants; all answers of one loop turn leave in one write;
our windows are so large that they hardly ever need an update. What is rare (padding, CONTINUATION, messages in
pieces, streams) takes the slow path next to it. Frames that take longer than a slice wait for the connection's turn.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from batchtune.wire import http2 as h2
from batchtune.wire.grpc.framing import FIRST_DATA
from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream, HeadReader, RequestHead, known_heads
from batchtune.wire.grpc.server_writer import AnswerWriter, HeldCalls, ServerLimits
from batchtune.wire.grpc.slow_path import fail_begun, read_preface, refuse, take_data
from batchtune.wire.http2 import FRAME, ErrorCode, HeaderBlock, PartialFrame, PeerError
from batchtune.wire.inflating import Inflating
from batchtune.wire.listener import LARGE_READ_BYTES, SMALL_FRAME_BYTES, STRIDE_BYTES, Listener
from batchtune.wire.status import StatusError


def close_with_goaway(writer: AnswerWriter, last_id: int, error: PeerError) -> None:
    """Send GOAWAY with the error that the client made, and close; what the client still sends is ignored."""
    writer.out.append(h2.goaway_frame(last_id, error.code, error.reason))
    writer.flush()
    transport = writer.transport
    linger_s = 2.0  # for a client to read our last GOAWAY
    if transport is not None:
        transport.close()
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(linger_s, transport.abort)
    writer.abandon()


Dispatch = Callable[[GrpcCall], None]
StreamServices = Mapping[str, Callable[[GrpcStream], None]]

_SHAPE = h2.END_HEADERS | h2.PADDED
_DRAIN_PING = b"draining"


class RateLimit:
    """Allows a client `per_s` frames per second of a kind that costs work and carries no request.

    `frames`: the kind's name in errors. The clock is read only when `per_s` frames have come.
    """

    __slots__ = ("_count", "_frames", "_per_s", "_since_s")

    def __init__(self, per_s: int, frames: str) -> None:
        self._per_s = per_s
        self._frames = frames
        self._count = 0
        self._since_s = time.monotonic()

    def count(self) -> None:
        """Count one frame; raises PeerError where the client sends them faster than allowed."""
        self._count += 1
        if self._count > self._per_s:
            now_s = time.monotonic()
            if now_s - self._since_s < 1.0:
                raise PeerError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._frames}")
            self._since_s = now_s
            self._count = 0


class GrpcServerConnection(asyncio.Protocol):
    """The connection of one client.

    `dispatch(call)` is called for each unary call when its message is complete; a StatusError that it raises ends the
    call. `streams`: path of a method -> what serves it as a stream. `listener`: counts the memory held for all clients.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        limits: ServerLimits | None = None,
        streams: StreamServices | None = None,
        listener: Listener | None = None,
        inflating: Inflating | None = None,
    ) -> None:
        self._limits = limits or ServerLimits()
        self._message_bytes_max = self._limits.max_message_bytes
        self._streams = streams or {}
        self._listener = listener or Listener(self._limits.shared)
        self._inflating = inflating or Inflating(self._listener.unsent)
        self._held = HeldCalls(dispatch, self._limits, self._listener.unsent, self._note_arriving)
        self._dispatch = self._held.begin
        self._arriving_noted = False
        self._writer: AnswerWriter | None = None  # None before the connection and after it
        self._preface = h2.PREFACE  # what of it has not arrived
        self._partial = PartialFrame()
        self._turns = self._listener.turns
        self._waits_turn = False  # and reads nothing meanwhile
        self._unread, self._unread_from = b"", 0  # whole frames, and perhaps a part, that wait for it
        self._block = HeaderBlock(self._limits.max_header_list_bytes)
        self._head_reader = HeadReader(self._limits.max_header_list_bytes)
        self._last_id = self._opened = 0  # streams: the latest, and how many there were
        self._received_bytes = 0  # of DATA since our last WINDOW_UPDATE
        self._announced = False  # that we will close
        self._draining = False  # no new streams
        self._control = RateLimit(self._limits.max_control_frames_per_s, "control frames")
        self._resets = RateLimit(self._limits.max_resets_per_s, "streams reset")
        self._settings = RateLimit(self._limits.max_settings_per_s, "SETTINGS frames")
        self._free_spent = 0  # small frames
        # Those that came at once shall not go at once.
        age_ms = random.uniform(0.9, 1.1) * self._limits.max_connection_age_ms
        self._old_at_s = time.monotonic() + age_ms / 1000

    def drain(self) -> None:
        """Answer the requests that the client has sent, accept no more, then close.

        A first GOAWAY announces this; a second, sent when the client has answered a PING, names the last stream.
        """
        writer = self._writer
        if writer is None:
            return
        if self._preface:
            writer.close_when_idle = True
        else:
            writer.out.append(h2.goaway_frame(h2.LARGEST_STREAM_ID, ErrorCode.NO_ERROR))
            writer.out.append(h2.frame(h2.PING, 0, 0, _DRAIN_PING))
            self._announced = True
        writer.flush()

    def close_if_due(self) -> None:
        """Drain the connection when it is older than `max_connection_age_ms`, and close it when the grace is over."""
        limits = self._limits
        over_s = time.monotonic() - self._old_at_s
        if not limits.max_connection_age_ms or over_s < 0:
            return
        if not self._announced:
            self.drain()
        elif limits.max_connection_age_grace_ms and over_s * 1000 > limits.max_connection_age_grace_ms:
            self.abort()

    def abort(self) -> None:
        """Close now, whatever is in flight."""
        if self._writer is not None and self._writer.transport is not None:
            self._writer.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._writer = AnswerWriter(cast("asyncio.Transport", transport), self._limits, self._note_unsent)
        self._listener.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        writer, self._writer = self._writer, None
        self._unread = b""
        if writer is not None:
            writer.abandon()
        self._held.forget()
        self._listener.closed(self)

    def pause_writing(self) -> None:
        if self._writer is not None:
            self._writer.pause()

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._writer.resume()

    def data_received(self, data: bytes) -> None:
        if self._waits_turn:
            self._unread, self._unread_from = self._unread[self._unread_from :] + data, 0
            self._note_arriving()
            return
        self._read(data, 0)
        if len(data) >= LARGE_READ_BYTES and not self._waits_turn:
            self._wait_turn(b"", 0)

    def _wait_turn(self, data: bytes, position: int) -> None:
        """Pause reading, and hold data[position:], until it is this connection's turn."""
        self._unread, self._unread_from, self._waits_turn = data, position, True
        if self._writer is not None:
            self._writer.hold_reading(held=True)
        self._turns.wait(self._take_turn)

    def _take_turn(self) -> None:
        data, position = self._unread, self._unread_from
        self._unread, self._unread_from, self._waits_turn = b"", 0, False
        try:
            self._read(data, position)
        except Exception:
            self.abort()  # as a transport does where `data_received` fails
            raise
        if self._writer is not None and not self._waits_turn:
            self._writer.hold_reading(held=False)

    def _read(self, data: bytes, position: int) -> None:
        """Handle data[position:], for a slice of time at most."""
        writer = self._writer
        if writer is None:
            return
        writer.flush_due = True  # whatever is answered from here on leaves below
        try:
            if self._preface:
                self._preface, data = read_preface(writer, self._limits, self._preface, data)
            elif self._partial.held:
                data = self._partial.join(data)
            used = self._read_frames(writer, data, position)
            if used < len(data) and not self._waits_turn:
                self._partial.keep(data, used)
            writer.tells_flushes |= self._held.held_bytes > 0
            is_held = self._partial.held or self._unread or writer.held_bytes or self._held.held_bytes
            if is_held or self._arriving_noted:
                self._note_arriving()
        except PeerError as error:
            close_with_goaway(writer, self._last_id, error)
            self._writer = None
        finally:
            writer.flush()

    @property
    def arriving_bytes(self) -> int:
        """Bytes in memory of requests that are incomplete, wait for their turn, or wait until the client reads
        answers."""
        cut_bytes = len(self._partial.held) + self._block.held_bytes + self._held.held_bytes
        cut_bytes += len(self._unread) - self._unread_from
        return 0 if self._writer is None else cut_bytes + self._writer.held_bytes + self._writer.idle_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes in memory of answers that the client has not read."""
        return 0 if self._writer is None else self._writer.unsent_bytes

    @property
    def waits_for_us(self) -> bool:
        """Whether the server has paused reading because the client reads no answers or other connections have their
        turn."""
        return self._waits_turn or (self._writer is not None and self._writer.is_paused)

    def refuse_arriving(self) -> None:
        """Fail the incomplete requests; close the connection if there are many, or if a frame or header block is
        incomplete."""
        writer = self._writer
        if writer is None:
            return
        too_much = "incomplete requests, of all clients together, hold too much memory"
        self._held.refuse(too_much)
        if not fail_begun(writer, too_much) or self._unread or self._partial.held or self._block.held_bytes:
            close_with_goaway(writer, self._last_id, PeerError(ErrorCode.ENHANCE_YOUR_CALM, too_much))
            self._writer = None

    def _note_unsent(self, unsent_bytes: int) -> bool:
        self._listener.unsent.note(self, unsent_bytes)
        return self._held.note_unsent(unsent_bytes)

    def _note_arriving(self) -> None:
        arriving_bytes = self.arriving_bytes
        self._arriving_noted = arriving_bytes > 0
        self._listener.arriving.note(self, arriving_bytes)

    def _read_frames(self, writer: AnswerWriter, data: bytes, position: int) -> int:
        """Read complete frames until the slice of time is over; returns the position of the next frame.

        The clock is looked at only once in STRIDE_BYTES.
        """
        end = len(data)
        end_s, look_at = math.inf, end
        if end - position > STRIDE_BYTES:
            end_s, look_at = self._turns.slice_end_s(), position + STRIDE_BYTES
        streams, pending, heads, reader = writer.streams, self._block, known_heads, self._head_reader
        message_bytes_max, mask = self._message_bytes_max, h2.LARGEST_STREAM_ID  # without the reserved bit
        unpack = FRAME.unpack_from
        while end - position >= 9:
            word, flags, stream_id = unpack(data, position)
            stream_id &= mask
            after = position + 9 + (word >> 8)
            if after > end:
                break
            if position >= look_at:
                if self._turns.now_s() >= end_s:
                    self._wait_turn(data, position)
                    break
                look_at = position + STRIDE_BYTES
            kind = word & 0xFF
            if pending.stream_id and kind != h2.CONTINUATION:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
            if kind == h2.DATA:
                self._received_bytes += word >> 8
                call = streams.get(stream_id)
                if flags == 1 and word >= 0x500 and type(call) is GrpcCall and not call.half_closed:
                    prefix, said_bytes = FIRST_DATA.unpack_from(data, position), call.head.content_bytes
                    if (
                        call.buffer is None
                        and prefix[3] == 0
                        and prefix[4] == (word >> 8) - 5 <= message_bytes_max
                        and (said_bytes < 0 or said_bytes == word >> 8)
                    ):
                        call.message = data[position + 14 : after]
                        writer.begun_streams -= 1
                        self._deliver(call)
                        position = after
                        continue
                self._read_data(writer, flags, stream_id, data[position + 9 : after])
                look_at -= SMALL_FRAME_BYTES
            elif kind == h2.HEADERS and flags & _SHAPE == h2.END_HEADERS and word >= 0x500:
                block = data[position + (14 if flags & h2.WITH_PRIORITY else 9) : after]
                head = heads.get(block) if reader.is_pure else None
                self._open(writer, flags, stream_id, head or reader.read(block))
            else:
                self._read_other(writer, kind, flags, stream_id, data[position + 9 : after])
                look_at -= SMALL_FRAME_BYTES
            position = after
        self._widen_window(writer)
        return position

    def _widen_window(self, writer: AnswerWriter) -> None:
        """Send a WINDOW_UPDATE for the bytes read, once they are more than WINDOW_UPDATE_AT."""
        if self._received_bytes > h2.WINDOW_UPDATE_AT:
            writer.out.append(h2.window_update_frame(0, self._received_bytes))
            self._received_bytes = 0

    def _deliver(self, call: GrpcCall) -> None:
        call.half_closed = True
        try:
            self._dispatch(call)
        except StatusError as error:
            call.fail(error.code, error.message)

    def _open(self, writer: AnswerWriter, flags: int, stream_id: int, head: RequestHead) -> None:
        """Begin a stream, or refuse it."""
        if stream_id <= self._last_id or not stream_id & 1:
            self._read_trailers(writer, flags, stream_id)
            return
        self._last_id = stream_id
        self._opened += 1
        stream_message_bytes_max = 2**16  # questions of reflection and health; inflated on the event loop
        if head.malformed:
            writer.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif self._draining or writer.is_full:
            writer.reset(stream_id, ErrorCode.REFUSED_STREAM)
        elif head.http_status:
            refuse(writer, stream_id, head)
        else:
            writer.begun_streams += 1
            if self._streams and head.path in self._streams:
                stream = GrpcStream(writer, stream_id, head, stream_message_bytes_max)
                writer.streams[stream_id] = stream
                self._streams[head.path](stream)
            else:
                deadline_ns = None if head.timeout_ns is None else time.monotonic_ns() + head.timeout_ns
                writer.streams[stream_id] = GrpcCall(writer, stream_id, head, deadline_ns)
            if flags & h2.END_STREAM:
                self._read_data(writer, flags, stream_id, b"")

    def _read_trailers(self, writer: AnswerWriter, flags: int, stream_id: int) -> None:
        """Handle HEADERS that open no stream: they end a request, or belong to a stream that is closed."""
        if not stream_id & 1:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if stream_id not in writer.streams:
            self._control.count()
        elif not flags & h2.END_STREAM:
            writer.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            self._read_data(writer, h2.END_STREAM, stream_id, b"")

    def _read_data(self, writer: AnswerWriter, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle DATA off the fast path: padded, in pieces, compressed, of a stream, or out of place."""
        if flags & h2.PADDED:
            payload = h2.without_padding(payload, flags)
        stream = writer.streams.get(stream_id)
        if stream is None or stream.half_closed:
            self._check_not_idle(stream_id, "DATA")
            if stream is not None:
                writer.reset(stream_id, ErrorCode.STREAM_CLOSED)
            return
        said_bytes = stream.head.content_bytes
        if said_bytes >= 0:  # malformed where DATA differs (RFC 9113 8.1.1)
            fed_bytes = 0 if stream.buffer is None else stream.buffer.fed_bytes
            left_bytes = said_bytes - fed_bytes - len(payload)
            if left_bytes < 0 or (left_bytes and flags & h2.END_STREAM):
                writer.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
        if flags & h2.END_STREAM:
            stream.half_closed = True
            writer.begun_streams -= 1
        elif not payload:
            self._control.count()
        elif len(payload) < SMALL_FRAME_BYTES:
            self._count_small(writer)
        take_data(writer, stream, payload, self._limits, self._inflating, self._held)

    def _read_other(
        self, writer: AnswerWriter, kind: int, flags: int, stream_id: int, payload: bytes
    ) -> None:
        """Handle every frame but DATA, and HEADERS that are complete and unpadded."""
        h2.check_control_frame(kind, flags, stream_id, len(payload))
        match kind:
            case h2.HEADERS | h2.CONTINUATION:
                block = self._block.add(kind, flags, stream_id, payload)
                if block is not None:
                    self._open(writer, self._block.flags, stream_id, self._head_reader.read(block))
            case h2.WINDOW_UPDATE:
                if stream_id > self._last_id:
                    self._check_not_idle(stream_id, "WINDOW_UPDATE")
                self._count_small(writer)
                writer.grow_window(stream_id, h2.read_increment(payload))
            case h2.RST_STREAM:
                self._take_reset(writer, stream_id)
            case h2.SETTINGS:
                self._control.count()
                if not flags & h2.ACK:
                    self._settings.count()
                    writer.apply_settings(payload)
            case h2.PING:
                self._control.count()
                self._take_ping(writer, flags, payload)
            case h2.PUSH_PROMISE:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            case _:  # PRIORITY, GOAWAY and types unknown to us have no consequence
                self._control.count()

    def _count_small(self, writer: AnswerWriter) -> None:
        """Count a WINDOW_UPDATE, or DATA of a few bytes; raises PeerError where there are too many.

        Eight are free for each stream, and for each frame of an answer that had to wait.
        """
        # Small frames that a client may send for each request, and for each frame of an answer that had to
        # wait: it opens two windows for each, and may send a message's prefix by itself
        # (tests/benchmarks/server/greedy_clients.py).
        free_frames = 8
        if self._free_spent < (self._opened + writer.progress) * free_frames:
            self._free_spent += 1
        else:
            self._control.count()

    def _take_reset(self, writer: AnswerWriter, stream_id: int) -> None:
        if stream_id not in writer.streams:
            self._check_not_idle(stream_id, "RST_STREAM")
            return
        self._resets.count()
        writer.cancel(stream_id)

    def _take_ping(self, writer: AnswerWriter, flags: int, payload: bytes) -> None:
        if not flags & h2.ACK:
            writer.out.append(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif payload == _DRAIN_PING and self._announced:
            self._draining = True
            writer.close_when_idle = True
            writer.out.append(h2.goaway_frame(self._last_id, ErrorCode.NO_ERROR))

    def _check_not_idle(self, stream_id: int, what: str) -> None:
        """Count a frame of a closed stream, which is tolerated; raises PeerError for a stream that was never opened."""
        if not stream_id & 1 or stream_id > self._last_id:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {stream_id}, which is not open")
        self._control.count()


async def serve(
    host: str,
    port: int,
    dispatch: Callable[[GrpcCall], None],
    *,
    streams: StreamServices | None = None,
    limits: ServerLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> Listener:
    """Listen on host:port (0: any free port, see `Listener.port`); raises OSError where that fails.

    `dispatch(call)` is called on the loop's thread for every unary call and must answer it sooner or later with
    `call.reply` or `call.fail`; `streams` maps the paths of streaming methods to what serves them. The context `tls`
    must offer ALPN "h2".
    """
    limits = limits or ServerLimits()
    listener = Listener(limits.shared)
    inflating = Inflating(listener.unsent)
    connect = partial(
        GrpcServerConnection, dispatch, limits=limits, streams=streams, listener=listener, inflating=inflating
    )
    await listener.listen(connect, host, port, tls=tls)
    return listener
