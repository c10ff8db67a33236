"""A gRPC call as the server's services see it: its head, decoded once for equal header blocks, and how it is answered.

Unary calls, and streams for health and server reflection.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import hpack

from batchtune.wire import http2 as h2
from batchtune.wire.encoding import Memo
from batchtune.wire.grpc.framing import MessageBuffer, decode_timeout_ns, encode_grpc_message
from batchtune.wire.http2 import EMPTY_TABLE, Fields, decode_block, encode_block, new_decoder
from batchtune.wire.status import FAULT, GRPC_CODES, StatusError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """The headers of a request.

    `metadata`: values of keys in "-bin" are base64 as sent. `malformed`: the rule of HTTP/2 that the headers break;
    `http_status`: the answer to a request that is no gRPC call; both "" for a call. `timeout_ns`: None without
    grpc-timeout. `content_bytes`: the content-length, -1 without one.
    """

    path: str
    metadata: tuple[tuple[str, str], ...]
    timeout_ns: int | None
    encoding: str
    malformed: str
    http_status: str
    method: str
    content_bytes: int


# Only blocks that need no dynamic table (see header_blocks) are kept here, so all connections share them.
known_heads: Memo[bytes, RequestHead] = Memo(1_024)


class HeadReader:
    """Decodes the header blocks of one connection.

    `is_pure`: the client has emptied its dynamic table for good, so that equal blocks are equal headers.
    """

    __slots__ = ("_decoder", "_header_list_bytes", "is_pure")

    def __init__(self, header_list_bytes: int) -> None:
        self.is_pure = False
        self._decoder: hpack.Decoder | None = None
        self._header_list_bytes = header_list_bytes

    def read(self, block: bytes) -> RequestHead:
        """Decode a header block; a block that begins by emptying the dynamic table sets `is_pure`.

        Raises PeerError when the block cannot be decoded.
        """
        if not self.is_pure and block[:1] == EMPTY_TABLE:
            self.is_pure = True
            self._decoder = None
        if self.is_pure:
            known = known_heads.get(block)
            if known is not None:
                return known
            decoder = new_decoder(table_bytes=0, header_list_bytes=self._header_list_bytes)
            return _remember(block, decode_block(decoder, block))
        if self._decoder is None:
            self._decoder = new_decoder(table_bytes=4_096, header_list_bytes=self._header_list_bytes)
        return read_head(decode_block(self._decoder, block))


def _remember(block: bytes, fields: Fields) -> RequestHead:
    """Make a head of a block's fields and add it to `known_heads`, unless it is large; only where `is_pure`."""
    # Of a head's names and values: clients' are of some hundred, and may hold a token of a thousand.
    remembered_bytes_max = 2_048
    if sum(len(name) + len(value) for name, value in fields) > remembered_bytes_max:
        return read_head(fields)
    return known_heads.keep(block, read_head(fields))


def read_head(fields: Fields) -> RequestHead:
    """Make a head from a request's fields (RFC 9113 §8.3, PROTOCOL-HTTP2.md "Requests"); faults are noted in
    `malformed`."""
    values = dict(fields)
    malformed = _malformation(fields, values)
    timeout = values.get("grpc-timeout")
    timeout_ns = None if timeout is None else decode_timeout_ns(timeout)
    if timeout is not None and timeout_ns is None:
        malformed = malformed or f"grpc-timeout is {timeout!r}"
    length = values.get("content-length", "-1")
    method = values.get(":method", "")
    http_status = ""
    if method != "POST":
        http_status = "405"
    elif not _is_grpc(values.get("content-type", "")):
        http_status = "415"
    of_grpc = {"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"}
    return RequestHead(
        path=values.get(":path", ""),
        metadata=tuple(field for field in fields if field[0][:1] != ":" and field[0] not in of_grpc),
        timeout_ns=timeout_ns,
        encoding=values.get("grpc-encoding", ""),
        malformed=malformed,
        http_status=http_status,
        method=method,
        content_bytes=-1 if malformed else int(length),
    )


def _is_grpc(content_type: str) -> bool:
    base = "application/grpc"
    return content_type.startswith(base) and content_type[len(base) : len(base) + 1] in {"", "+", ";"}


def _malformation(fields: Fields, values: dict[str, str]) -> str:
    """Return which rule of RFC 9113 §8.2-8.3 the fields break; "" if none."""
    pseudo = [name for name, _ in fields if name[:1] == ":"]
    if len(pseudo) != len(set(pseudo)) or not set(pseudo) <= {":method", ":scheme", ":path", ":authority"}:
        return "repeated or unknown pseudo-header"
    if any(name[:1] == ":" for name, _ in fields[len(pseudo) :]):
        return "pseudo-header after a header"
    if not values.get(":method") or not values.get(":scheme") or not values.get(":path"):
        return "pseudo-header missing"
    lengths = [value for name, value in fields if name == "content-length"]
    of_one_hop = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
    for name, _ in fields[len(pseudo) :]:
        if not name or name in of_one_hop or re.search("[\0- A-Z:\x7f-\xff]", name):
            return f"header {name!r} is not allowed in HTTP/2"
    if any(re.search("[\0\r\n]", value) for _, value in fields):
        return "header value with a line break"
    if len(set(lengths)) > 1 or not all(re.fullmatch("[0-9]{1,18}", length) for length in lengths):
        return "content-length is not one number"
    return "te is not trailers" if values.get("te", "trailers") != "trailers" else ""


_CONTENT_TYPE = ("content-type", "application/grpc")
_HEAD_BLOCK = encode_block([(":status", "200"), _CONTENT_TYPE])
_OK_BLOCK = encode_block([("grpc-status", "0")], opens_table=False)

HEAD_PIECES = h2.header_frames(_HEAD_BLOCK, 0)
OK_PIECES = h2.header_frames(_OK_BLOCK, h2.END_STREAM)

_REPLY_HEAD = struct.Struct(f">5sI{len(_HEAD_BLOCK)}sIBIBI")
_REPLY_TAIL = struct.Struct(f">5sI{len(_OK_BLOCK)}s")


def write_reply(out: list[bytes], stream_id: int, message: bytes) -> None:
    """Append to `out` headers, one DATA frame and OK trailers; the caller has checked that the windows allow it.

    `message`: serialised, without gRPC's prefix of 5 bytes, which is written here.
    """
    size = len(message)
    out += (
        _REPLY_HEAD.pack(HEAD_PIECES[0], stream_id, _HEAD_BLOCK, size + 5 << 8, 0, stream_id, 0, size),
        message,
        _REPLY_TAIL.pack(OK_PIECES[0], stream_id, _OK_BLOCK),
    )


@lru_cache(maxsize=256)
def failure_pieces(code: str, message: str, *, trailers_only: bool) -> tuple[bytes, ...]:
    """Encode the header frames that end a call with a status: pieces between which the packed stream id goes.

    `trailers_only`: no headers were sent before, so they are part of these.
    """
    fields = [(":status", "200"), _CONTENT_TYPE] if trailers_only else []
    fields.append(("grpc-status", str(GRPC_CODES[code])))
    if message:
        fields.append(("grpc-message", encode_grpc_message(message)))
    return h2.header_frames(encode_block(fields, opens_table=trailers_only), h2.END_STREAM)


class AnswerSink(Protocol):
    """A protocol: what a call needs of its connection to be answered; for the event loop's thread only.

    `send_reply` answers OK with one message, serialised and without gRPC's prefix; `send_failure` ends the call with a
    status, by the name of its code. Of a stream, `send_message` sends one message; `send_end` ends it with OK.
    """

    def send_reply(self, call: GrpcCall, message: bytes) -> None: ...
    def send_failure(self, call: GrpcCall | GrpcStream, code: str, message: str) -> None: ...
    def send_message(self, stream: GrpcStream, message: bytes) -> None: ...
    def send_end(self, stream: GrpcStream) -> None: ...


def nothing() -> None:
    """Do nothing: most calls hold nothing until they are answered."""


class GrpcCall:
    """A unary call. `reply` or `fail` must be called once, on the loop's thread, even when the call was cancelled.

    A second answer is ignored. `deadline_ns` is on CLOCK_MONOTONIC, None without grpc-timeout. When the client resets
    the stream or is gone, `cancelled` turns true; the answer is then not sent. `release`: called
    after the answer, to free what the request took.
    """

    __slots__ = (
        "answered",
        "buffer",
        "cancelled",
        "deadline_ns",
        "half_closed",
        "head",
        "message",
        "release",
        "sink",
        "stream_id",
    )

    def __init__(self, sink: AnswerSink, stream_id: int, head: RequestHead, deadline_ns: int | None) -> None:
        self.sink = sink
        self.stream_id = stream_id
        self.head = head
        self.deadline_ns = deadline_ns
        self.message = b""
        self.cancelled = False
        self.release: Callable[[], None] = nothing
        self.buffer: MessageBuffer | None = None  # set when the message comes in pieces
        self.half_closed = False  # the client has sent everything
        self.answered = False

    @property
    def path(self) -> str:
        """The method, as "/package.Service/Method"."""
        return self.head.path

    def reply(self, message: bytes) -> None:
        """Answer OK with one message, serialised and without gRPC's prefix; the answers of one loop turn leave in one
        write."""
        if not self.answered:
            self.answered = True
            try:
                self.sink.send_reply(self, message)
            finally:
                self.release()

    def fail(self, code: str, message: str) -> None:
        """Answer with a status other than OK, such as ("UNAVAILABLE", "queue is full")."""
        if not self.answered:
            self.answered = True
            try:
                self.sink.send_failure(self, code, message)
            finally:
                self.release()

    def refuse(self, error: StatusError) -> None:
        """Answer with an error; its message is cut to the length at which TensorFlow Serving cuts messages."""
        message = error.message
        message_characters_max = 1_024  # TensorFlow Serving cuts longer error messages (grpc_status_util.cc).
        if len(message) > message_characters_max:
            message = message[:message_characters_max] + "...TRUNCATED"
        self.fail(error.code, message)

    def cancel(self) -> None:
        """Mark the call as cancelled; called by the connection when the client does not wait any more."""
        self.cancelled = True


def dispatcher(methods: Mapping[str, Callable[[GrpcCall], None]]) -> Callable[[GrpcCall], None]:
    """Return a function that passes each call to the handler of its path.

    A call to an unknown path ends with UNIMPLEMENTED, a call whose handler raises with INTERNAL.
    """

    def dispatch(call: GrpcCall) -> None:
        method = methods.get(call.head.path)
        if method is None:
            call.refuse(StatusError("UNIMPLEMENTED", f"unknown method {call.path}"))
            return
        try:
            method(call)
        except Exception:
            _logger.exception("%s failed", call.path)
            call.refuse(StatusError("INTERNAL", FAULT))

    return dispatch


def hand_over(call: GrpcCall, dispatch: Callable[[GrpcCall], None]) -> None:
    """Dispatch a call that has waited; the call fails where its client is gone or `dispatch` raises StatusError."""
    try:
        if call.cancelled:
            raise StatusError("CANCELLED", "the client is gone")
        dispatch(call)
    except StatusError as error:
        call.fail(error.code, error.message)


class GrpcStream:
    """A call with any number of messages both ways: set `on_message` and `on_end`, then `send` and `finish`.

    `on_end` is called when the client has sent its last message, `on_cancel` when the client is gone. Everything is
    called on the loop's thread. Sent messages stay in memory while the client's windows are closed.
    """

    __slots__ = (
        "answered",
        "buffer",
        "cancelled",
        "half_closed",
        "head",
        "on_cancel",
        "on_end",
        "on_message",
        "opened",
        "sink",
        "stream_id",
    )

    def __init__(self, sink: AnswerSink, stream_id: int, head: RequestHead, message_bytes_max: int) -> None:
        self.sink = sink
        self.stream_id = stream_id
        self.head = head
        self.buffer: MessageBuffer | None = MessageBuffer(head.encoding, message_bytes_max)
        self.on_message: Callable[[bytes], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_cancel: Callable[[], None] | None = None
        self.cancelled = False
        self.half_closed = False
        self.opened = False  # our headers are sent
        self.answered = False

    def send(self, message: bytes) -> None:
        """Send one message, serialised and without gRPC's prefix; ignored once the stream has ended."""
        if not self.answered and not self.cancelled:
            self.sink.send_message(self, message)

    def finish(self, code: str = "OK", message: str = "") -> None:
        """End the stream with a status; of a stream that has ended, nothing."""
        if self.answered:
            return
        self.answered = True
        if code == "OK":
            self.sink.send_end(self)
        else:
            self.sink.send_failure(self, code, message)

    def cancel(self) -> None:
        """Mark the stream as cancelled and call `on_cancel`; called by the connection when the client is gone."""
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()
