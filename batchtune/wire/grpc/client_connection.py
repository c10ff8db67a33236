"""gRPC for a load client, at a few microseconds per request: one HTTP/2 connection, unary calls only.

What makes it cheap: the header block and the data of a request are written once (`prepare_call`) and only stream
ids are packed per call; all calls of a turn leave in one write; header blocks of answers, which repeat byte for
byte because we allow the peer no dynamic table, are looked up, not decoded; windows are too large to need updates.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from batchtune.wire import http2 as h2
from batchtune.wire.encoding import Memo
from batchtune.wire.grpc.framing import (
    FIRST_DATA,
    PREFIX,
    MessageBuffer,
    decode_grpc_message,
    encode_timeout,
    status_of_http,
    status_of_reset,
)
from batchtune.wire.http2 import (
    FRAME,
    STREAM_ID,
    ErrorCode,
    Fields,
    HeaderBlock,
    OutgoingFlow,
    PartialFrame,
    PeerError,
    Setting,
    decode_block,
    encode_block,
    new_decoder,
)
from batchtune.wire.status import GRPC_CODES, StatusError

OnDone = Callable[[int, int, bytes, str], None]
OnLost = Callable[["GrpcClientConnection", list[int], str], None]
OnConnection = Callable[["GrpcClientConnection"], None]

NOT_PROCESSED = "the peer did not process the stream"
"""First words of the grpc_message of calls that end UNAVAILABLE by a GOAWAY; they may be sent again."""

_DATA_ENDING_HEADERS = h2.END_HEADERS | h2.END_STREAM


class GrpcClientConnection(asyncio.Protocol):
    """One HTTP/2 connection (prior knowledge, or TLS with ALPN "h2" by its transport) for unary calls.

    Calls `on_ready(conn)` once the peer's SETTINGS are known; `on_done(tag, grpc_status, message, grpc_message)` once
    per call, resets and refusals included; `on_lost(conn, tags, reason)` exactly once, perhaps from within `close`,
    with the tags of calls that got no answer; `on_capacity(conn)` when `capacity` grows though no call ended.
    Calls made inside a callback are sent together once the bytes at hand are read; elsewhere `flush` sends them.
    `retiring`: why no more calls are accepted; "": they are.
    """

    def __init__(
        self,
        on_done: OnDone,
        on_lost: OnLost,
        on_ready: OnConnection | None = None,
        *,
        on_capacity: OnConnection | None = None,
        max_message_bytes: int = 2**31 - 1,
    ) -> None:
        self._on_done = on_done
        self._on_lost = on_lost
        self._on_ready = on_ready
        self._on_capacity = on_capacity
        self._message_bytes_max = max_message_bytes
        self._transport: asyncio.Transport | None = None
        self._flow = OutgoingFlow()
        self._out: list[bytes] = []
        self._partial = PartialFrame()
        self._block = HeaderBlock(HEADER_LIST_BYTES)
        self._tags: dict[int, int] = {}  # stream id -> tag of the call
        # of streams with headers: None before the message, the message, or what comes off the fast path
        self._bodies: dict[int, bytes | CollectedAnswer | None] = {}
        self._next_id = 1
        self._limit = h2.LARGEST_STREAM_ID  # MAX_CONCURRENT_STREAMS
        self._received_bytes = 0  # of DATA since our last WINDOW_UPDATE
        self._ready = False
        self._paused = False
        self._reading = False
        self.retiring = ""

    @property
    def capacity(self) -> int:
        """Number of calls that may be made now; 0 before `on_ready`, after GOAWAY and while the socket is clogged."""
        if not self._ready or self.retiring or self._paused:
            return 0
        return max(0, self._limit - len(self._tags))

    @property
    def in_flight(self) -> int:
        """Number of calls that await their answer."""
        return len(self._tags)

    def call(self, prepared: PreparedCall, tag: int) -> None:
        """Buffer a call, which callbacks name by `tag`; only while `capacity` > 0, which is not checked here."""
        stream_id = self._next_id
        self._next_id = stream_id + 2
        self._tags[stream_id] = tag
        flow = self._flow
        size = prepared.body_bytes
        if size <= flow.at_once and size <= flow.window:
            flow.window -= size
            self._out.append(STREAM_ID.pack(stream_id).join(prepared.at_once))
        else:
            self._out.append(STREAM_ID.pack(stream_id).join(prepared.head))
            flow.queue(stream_id, prepared.body, None)
            flow.pump(self._out)
        if stream_id >= h2.LARGEST_STREAM_ID - 1:
            self.retiring = "stream ids are used up"

    def flush(self) -> None:
        """Send everything buffered in one write; inside a callback do nothing, since all is sent at the end of the
        read."""
        if self._out and not self._reading:
            if self._transport is not None:
                self._transport.write(b"".join(self._out))
            self._out.clear()

    def cancel(self, tag: int) -> None:
        """Reset the call's stream; no callback will name the tag again. Unknown tags are ignored."""
        for stream_id, open_tag in self._tags.items():
            if open_tag == tag:
                self._reset(stream_id, ErrorCode.CANCEL)
                del self._tags[stream_id]
                self._bodies.pop(stream_id, None)
                self.flush()
                break
        self._close_if_retired()

    def close(self) -> None:
        """Send GOAWAY and close; calls in flight are reported by `on_lost`."""
        self._out.append(h2.goaway_frame(0, ErrorCode.NO_ERROR))
        self._lose("closed by the client")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=2**24)
        self._transport.write(OPENING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"connection lost: {exc}" if exc is not None else "the peer closed the connection")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._tell_capacity()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._partial.held:
            data = self._partial.join(data)
        self._reading = True
        try:
            used = self._read_frames(data)
            if used < len(data):
                self._partial.keep(data, used)
        except PeerError as fault:
            self._reading = False
            self._out.append(h2.goaway_frame(0, fault.code, fault.reason))
            self._lose(str(fault))
            return
        self._reading = False
        if self._received_bytes > h2.WINDOW_UPDATE_AT:
            self._out.append(h2.window_update_frame(0, self._received_bytes))
            self._received_bytes = 0
        if self._out:
            self.flush()
        if self.retiring:
            self._close_if_retired()

    def _read_frames(self, data: bytes) -> int:
        """Read all complete frames; returns the number of bytes used."""
        position, end = 0, len(data)
        bodies, tags, heads = self._bodies, self._tags, known_heads
        unpack = FRAME.unpack_from
        while end - position >= 9 and self._transport is not None:  # a callback may close
            word, flags, stream_id = unpack(data, position)
            after = position + 9 + (word >> 8)
            if after > end:
                break
            kind = word & 0xFF
            if self._block.stream_id and kind != h2.CONTINUATION:
                raise PeerError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
            if kind == h2.DATA:
                self._received_bytes += word >> 8
                if bodies.get(stream_id, False) is None and flags == 0 and word >= 0x500:
                    prefix = FIRST_DATA.unpack_from(data, position)
                    if prefix[3] == 0 and prefix[4] == (word >> 8) - 5 <= self._message_bytes_max:
                        bodies[stream_id] = data[position + 14 : after]
                        position = after
                        continue
                self._read_data(flags, stream_id, data[position + 9 : after])
            elif kind == h2.HEADERS and flags | h2.END_STREAM == _DATA_ENDING_HEADERS:
                block = data[position + 9 : after]
                head = heads.get(block) or read_response_head(block)
                if flags != h2.END_HEADERS:
                    body = bodies.pop(stream_id, None)
                    if head.status == 0 and type(body) is bytes:
                        tag = tags.pop(stream_id, None)
                        if tag is not None:
                            self._on_done(tag, 0, body, "")
                    else:
                        self._end(stream_id, body, head)
                elif head.plain and stream_id in tags and stream_id not in bodies:
                    bodies[stream_id] = None
                else:
                    self._begin(stream_id, head)
            else:
                self._read_other(kind, flags, stream_id, data[position + 9 : after])
            position = after
        return position

    def _read_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle DATA off the fast path: padded, in pieces, compressed, ending the stream, or out of place."""
        if flags & h2.PADDED:
            payload = h2.without_padding(payload, flags)
        if stream_id not in self._bodies:
            self._check_closed(stream_id, "DATA")
            return
        body = self._bodies[stream_id]
        if not isinstance(body, CollectedAnswer):
            answer = CollectedAnswer(PLAIN_HEAD, self._message_bytes_max)
            if isinstance(body, bytes):
                answer.add_message(body)
            self._bodies[stream_id] = body = answer
        wanted = body.feed(payload)
        if flags & h2.END_STREAM or not wanted:
            if not flags & h2.END_STREAM:
                self._reset(stream_id, ErrorCode.CANCEL)
            del self._bodies[stream_id]
            self._settle(stream_id, body, None)
        elif body.unacknowledged_bytes > h2.WINDOW_UPDATE_AT:
            self._out.append(h2.window_update_frame(stream_id, body.unacknowledged_bytes))
            body.unacknowledged_bytes = 0

    def _take_head(self, stream_id: int, head: ResponseHead) -> None:
        if self._block.flags & h2.END_STREAM:
            self._end(stream_id, self._bodies.pop(stream_id, None), head)
        else:
            self._begin(stream_id, head)

    def _begin(self, stream_id: int, head: ResponseHead) -> None:
        """Handle the first header block of an answer whose headers are not those of PLAIN_HEAD (compressed, or with
        fields of its own).

        Raises PeerError for a header block that comes after the first and does not end the stream.
        """
        if stream_id not in self._tags:
            self._check_closed(stream_id, "HEADERS")
            return
        if stream_id in self._bodies or not head.http_status:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
        if len(head.http_status) != 3 or head.http_status[0] != "1":  # a 1xx head comes before the real one
            self._bodies[stream_id] = CollectedAnswer(head, self._message_bytes_max)

    def _end(self, stream_id: int, body: bytes | CollectedAnswer | None, head: ResponseHead) -> None:
        """Handle the header block that ends an answer which is not simply OK with one message."""
        if stream_id not in self._tags:
            self._check_closed(stream_id, "HEADERS")
            return
        if not isinstance(body, CollectedAnswer):
            answer = CollectedAnswer(head if head.http_status else PLAIN_HEAD, self._message_bytes_max)
            if body is not None:
                answer.add_message(body)
            body = answer
        self._settle(stream_id, body, head)

    def _settle(self, stream_id: int, answer: CollectedAnswer, trailers: ResponseHead | None) -> None:
        if self._flow.drop(stream_id):  # answered before the request was sent entirely
            self._reset(stream_id, ErrorCode.NO_ERROR)
        self._on_done(self._tags.pop(stream_id), *answer.settle(trailers))

    def _fail(self, stream_id: int, status: int, message: str) -> None:
        """End a call without an answer, by a gRPC status number and a message."""
        self._flow.drop(stream_id)
        self._bodies.pop(stream_id, None)
        self._on_done(self._tags.pop(stream_id), status, b"", message)

    def _reset(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream and drop what waits to be sent on it."""
        self._flow.drop(stream_id)
        self._out.append(h2.rst_stream_frame(stream_id, code))

    def _check_closed(self, stream_id: int, what: str) -> None:
        """Ignore frames of a stream that was open once; raises PeerError for one that was not, or not yet."""
        if stream_id in self._tags:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"{what} before HEADERS on stream {stream_id}")
        if stream_id % 2 == 0 or stream_id >= self._next_id:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {stream_id}, which is not open")

    def _read_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle every frame but DATA and whole, unpadded HEADERS."""
        h2.check_control_frame(kind, flags, stream_id, len(payload))
        if kind in {h2.HEADERS, h2.CONTINUATION}:
            block = self._block.add(kind, flags, stream_id, payload)
            if block is not None:
                self._take_head(stream_id, read_response_head(block))
        elif kind == h2.SETTINGS:
            if not flags & h2.ACK:
                self._apply_settings(payload)
        elif kind == h2.PING:
            if not flags & h2.ACK:
                self._out.append(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.WINDOW_UPDATE:
            self._grow_window(stream_id, h2.read_increment(payload))
        elif kind == h2.RST_STREAM:
            if stream_id in self._tags:
                self._fail(stream_id, *status_of_reset(int.from_bytes(payload)))
            else:
                self._check_closed(stream_id, "RST_STREAM")
        elif kind == h2.GOAWAY:
            self._retire(*h2.read_goaway(payload))
        elif kind == h2.PUSH_PROMISE:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE though push is off")

    def _grow_window(self, stream_id: int, increment: int) -> None:
        """Apply a WINDOW_UPDATE and write what it allows; raises PeerError for an increment of 0 or too large."""
        flow = self._flow
        if stream_id == 0:
            flow.grow_connection(increment)
        elif increment == 0 or (flow.waits(stream_id) and not flow.grow_stream(stream_id, increment)):
            raise PeerError(
                ErrorCode.FLOW_CONTROL_ERROR, f"WINDOW_UPDATE of stream {stream_id} by {increment}"
            )
        if flow.waiting:
            flow.pump(self._out)

    def _apply_settings(self, payload: bytes) -> None:
        before = self.capacity
        for key, value in h2.read_settings(payload, by_server=True):
            if key == Setting.MAX_CONCURRENT_STREAMS:
                self._limit = value
            elif key == Setting.INITIAL_WINDOW_SIZE:
                self._flow.set_initial_window(value)
            elif key == Setting.MAX_FRAME_SIZE:
                self._flow.set_frame_bytes(value)
        self._out.append(h2.SETTINGS_ACK)
        self._flow.pump(self._out)
        if not self._ready:
            self._ready = True
            if self._on_ready is not None:
                self._on_ready(self)
        elif self.capacity > before:
            self._tell_capacity()

    def _tell_capacity(self) -> None:
        if self._on_capacity is not None and self.capacity:
            self._on_capacity(self)

    def _retire(self, last_stream_id: int, error_code: int, debug: str) -> None:
        """Handle a GOAWAY: no more calls, and those above the last stream id were not processed."""
        reason = f"the peer said GOAWAY: {h2.error_name(error_code)}{': ' + debug if debug else ''}"
        self.retiring = reason
        for stream_id in [open_id for open_id in self._tags if open_id > last_stream_id]:
            self._fail(stream_id, GRPC_CODES["UNAVAILABLE"], f"{NOT_PROCESSED}: {reason}")

    def _close_if_retired(self) -> None:
        if self.retiring and not self._tags and not self._reading:
            self._lose(self.retiring)

    def _lose(self, reason: str) -> None:
        """End the connection once: send what is buffered, close, report the calls without an answer."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if self._out:
            transport.write(b"".join(self._out))
        abort_above_bytes = 2**16
        if transport.get_write_buffer_size() > abort_above_bytes:  # the peer does not read
            transport.abort()
        else:
            transport.close()
        self.retiring = self.retiring or reason
        tags = list(self._tags.values())
        for state in (self._out, self._tags, self._bodies, self._partial.held):
            state.clear()
        self._on_lost(self, tags, reason)


# Calls that are encoded once and sent many times, and the decoding of their answers' header blocks.

HEADER_LIST_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """A decoded header block of an answer: its initial headers, its trailers, or both in one.

    `plain`: HTTP 200, gRPC, not compressed and without a status yet. `status`: number of grpc-status; None: absent.
    `message`: grpc-message, or what is wrong with the HTTP status. `http_status`: "" in trailers.
    """

    plain: bool
    is_grpc: bool
    http_status: str
    status: int | None
    message: str
    encoding: str


PLAIN_HEAD = ResponseHead(plain=True, is_grpc=True, http_status="200", status=None, message="", encoding="")

# Blocks are pure functions of their bytes (see header_blocks), so all connections share one memo.
known_heads: Memo[bytes, ResponseHead] = Memo(1_024)


def read_response_head(block: bytes) -> ResponseHead:
    """Decode a header block that is not in `known_heads` and add it there; raises PeerError when it is malformed."""
    decoder = new_decoder(table_bytes=0, header_list_bytes=HEADER_LIST_BYTES)
    return known_heads.keep(block, _head_of(decode_block(decoder, block)))


def _head_of(fields: Fields) -> ResponseHead:
    values = dict(fields)
    http_status = values.get(":status", "")
    if http_status and not (http_status.isascii() and http_status.isdigit()):
        raise PeerError(ErrorCode.PROTOCOL_ERROR, f":status is {http_status!r}")
    encoding = values.get("grpc-encoding", "")
    message = decode_grpc_message(values.get("grpc-message", ""))
    status: int | None = None
    if "grpc-status" in values:
        text = values["grpc-status"]
        status = int(text) if text.isascii() and text.isdigit() and len(text) < 3 else -1
        if not 0 <= status <= max(GRPC_CODES.values()):
            status, message = GRPC_CODES["UNKNOWN"], f"grpc-status is {text!r}: {message}"
    is_grpc = values.get("content-type", "").startswith("application/grpc")
    if http_status and not is_grpc and not message:
        message = f"HTTP status {http_status} with content-type {values.get('content-type', '')!r}"
    return ResponseHead(
        plain=http_status == "200" and is_grpc and status is None and encoding in {"", "identity"},
        is_grpc=is_grpc,
        http_status=http_status,
        status=status,
        message=message,
        encoding=encoding,
    )


class CollectedAnswer:
    """Collects an answer that comes in several frames, compressed or broken, until its stream ends.

    `unacknowledged_bytes`: DATA since the last WINDOW_UPDATE; the owner sends the next one and sets this to 0.
    """

    __slots__ = ("_buffer", "_failure", "_head", "_messages", "unacknowledged_bytes")

    def __init__(self, head: ResponseHead, message_bytes_max: int) -> None:
        self._head = head
        self._buffer = MessageBuffer(head.encoding, message_bytes_max)
        self._messages: list[bytes] = []
        self._failure: StatusError | None = None
        self.unacknowledged_bytes = 0

    def add_message(self, message: bytes) -> None:
        """Add a message that the fast path has already read."""
        self._messages.append(message)

    def feed(self, data: bytes) -> bool:
        """Add DATA; return False when the stream should be reset because no more of it is needed."""
        self.unacknowledged_bytes += len(data)
        if not self._head.is_grpc:
            return True  # an error page
        try:
            self._messages += self._buffer.feed(data)
        except StatusError as error:
            self._failure = error
            return False
        return True

    def settle(self, trailers: ResponseHead | None) -> tuple[int, bytes, str]:
        """Return (gRPC status number, message, grpc-message), the call's outcome; `trailers` None: there were none."""
        if self._failure is not None:
            return GRPC_CODES[self._failure.code], b"", self._failure.message
        if trailers is None or trailers.status is None:
            http_status = self._head.http_status
            detail = self._head.message or "the stream ended without grpc-status"
            return status_of_http(http_status), self._messages[0] if self._messages else b"", detail
        if trailers.status:
            return trailers.status, b"", trailers.message
        if len(self._messages) == 1 and not self._buffer.incomplete:
            return 0, self._messages[0], trailers.message
        cut_short = "a message cut short" if self._buffer.incomplete else f"{len(self._messages)} messages"
        return GRPC_CODES["INTERNAL"], b"", f"the call ended OK with {cut_short}; one was expected"


OPENING = (
    h2.PREFACE
    + h2.settings_frame(
        {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.ENABLE_PUSH: 0,
            Setting.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW,
            Setting.MAX_FRAME_SIZE: h2.OUR_FRAME_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: HEADER_LIST_BYTES,
        }
    )
    + h2.window_update_frame(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)
)
"""The bytes that a client sends first: the preface, and settings of no dynamic table, no push, the widest windows."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request encoded for any stream of any connection.

    `head` (HEADERS) and `at_once` (HEADERS and DATA, if one DATA frame can hold the body) are pieces of frames; the
    packed stream id goes between them: `STREAM_ID.pack(stream_id).join(pieces)`. `body`: the message with its prefix,
    `body_bytes` bytes.
    """

    at_once: tuple[bytes, ...]
    head: tuple[bytes, ...]
    body: bytes
    body_bytes: int


def prepare_call(
    path: str,
    authority: str,
    message: bytes,
    *,
    metadata: Sequence[tuple[str, str | bytes]] = (),
    timeout_s: float | None = None,
    scheme: str = "http",
) -> PreparedCall:
    """Encode a unary call; `path` is "/package.Service/Method", metadata keys are lower case.

    `timeout_s` travels as grpc-timeout and is enforced by the server only. Values of keys that end in "-bin" are
    bytes. Raises ValueError for a key, a value or a timeout that cannot be sent.
    """
    fields = [(":method", "POST"), (":scheme", scheme), (":path", path), (":authority", authority)]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "batchtune")]
    if timeout_s is not None:
        fields.append(("grpc-timeout", encode_timeout(timeout_s)))
    fields += [_metadata_field(key, value) for key, value in metadata]
    head = h2.header_frames(encode_block(fields), 0)
    body = PREFIX.pack(0, len(message)) + message
    at_once = head
    if len(body) <= h2.LARGEST_FRAME_BYTES:
        data_head = struct.pack(">IB", len(body) << 8 | h2.DATA, h2.END_STREAM)
        at_once = (*head[:-1], head[-1] + data_head, body)
    return PreparedCall(at_once, head, body, len(body))


def _metadata_field(key: str, value: str | bytes) -> tuple[str, str]:
    if (
        not key
        or key != key.lower()
        or not key.isascii()
        or not key.isprintable()
        or key[0] == ":"
        or " " in key
    ):
        raise ValueError(f"{key!r} is not a metadata key: lower-case ASCII letters, digits, '-', '_' and '.'")
    if key.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return key, base64.b64encode(raw).rstrip(b"=").decode()
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text.isascii() or not (text.isprintable() or not text):
        raise ValueError(f"the value of metadata {key!r} is not printable ASCII")
    return key, text
