"""What does a service see of a request, and how does it answer? Unary calls, and streams for server reflection."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from batchtune.wire.grpc.framing import MessageBuffer, encode_grpc_message
from batchtune.wire.grpc.request_head import RequestHead
from batchtune.wire.http2 import frames as h2
from batchtune.wire.http2.header_blocks import encode_block
from batchtune.wire.status import GRPC_CODES, StatusError

_MESSAGE_CHARACTERS_MAX = 1_024
"""TensorFlow Serving cuts longer error messages (grpc_status_util.cc)."""
_CONTENT_TYPE = ("content-type", "application/grpc")
_HEAD_BLOCK = encode_block([(":status", "200"), _CONTENT_TYPE])
_OK_BLOCK = encode_block([("grpc-status", "0")], opens_table=False)

HEAD_PIECES = h2.header_frames(_HEAD_BLOCK, 0)
OK_PIECES = h2.header_frames(_OK_BLOCK, h2.END_STREAM)

_REPLY_HEAD = struct.Struct(f">IBI{len(_HEAD_BLOCK)}sIBIBI")
_REPLY_TAIL = struct.Struct(f">IBI{len(_OK_BLOCK)}s")
_HEAD_WORD = len(_HEAD_BLOCK) << 8 | h2.HEADERS
_HEAD_FLAGS = h2.END_HEADERS
_OK_WORD = len(_OK_BLOCK) << 8 | h2.HEADERS
_OK_FLAGS = h2.END_HEADERS | h2.END_STREAM


def write_reply(out: list[bytes], stream_id: int, message: bytes) -> None:
    """Append headers, one DATA frame and OK trailers; the caller has seen that the windows allow it."""
    size = len(message)
    out += (
        _REPLY_HEAD.pack(
            _HEAD_WORD, _HEAD_FLAGS, stream_id, _HEAD_BLOCK, size + 5 << 8, 0, stream_id, 0, size
        ),
        message,
        _REPLY_TAIL.pack(_OK_WORD, _OK_FLAGS, stream_id, _OK_BLOCK),
    )


@lru_cache(maxsize=256)
def failure_pieces(code: str, message: str, *, trailers_only: bool) -> tuple[bytes, ...]:
    """Write the header frames that end a call with a status, with gaps for the stream id."""
    fields = [(":status", "200"), _CONTENT_TYPE] if trailers_only else []
    fields.append(("grpc-status", str(GRPC_CODES[code])))
    if message:
        fields.append(("grpc-message", encode_grpc_message(message)))
    return h2.header_frames(encode_block(fields, opens_table=trailers_only), h2.END_STREAM)


class CallSink(Protocol):
    """The connection, as calls see it; all methods belong to the event loop's thread."""

    def send_reply(self, call: GrpcCall, message: bytes) -> None: ...
    def send_failure(self, call: GrpcCall | GrpcStream, code: str, message: str) -> None: ...


class AnswerSink(CallSink, Protocol):
    """The connection, as streams see it."""

    def send_message(self, stream: GrpcStream, message: bytes) -> None: ...
    def send_end(self, stream: GrpcStream) -> None: ...


class GrpcCall:
    """A unary call. `reply` or `fail` must be called once, on the loop's thread, even when it was cancelled.

    `deadline_ns` is on CLOCK_MONOTONIC, None without grpc-timeout. `cancelled` turns true and `on_cancel` is called
    when the client resets the stream or is gone; an answer then goes nowhere. Later answers are ignored.
    """

    __slots__ = (
        "answered",
        "buffer",
        "cancelled",
        "deadline_ns",
        "half_closed",
        "head",
        "message",
        "on_cancel",
        "sink",
        "stream_id",
    )

    def __init__(self, sink: CallSink, stream_id: int, head: RequestHead, deadline_ns: int | None) -> None:
        self.sink = sink
        self.stream_id = stream_id
        self.head = head
        self.deadline_ns = deadline_ns
        self.message = b""
        self.cancelled = False
        self.on_cancel: Callable[[], None] | None = None
        self.buffer: MessageBuffer | None = None  # set when the message comes in pieces
        self.half_closed = False  # the client has sent everything
        self.answered = False

    @property
    def path(self) -> str:
        """The method, as "/package.Service/Method"."""
        return self.head.path

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The client's metadata; values of keys in "-bin" are base64 as sent."""
        return self.head.metadata

    def reply(self, message: bytes) -> None:
        """Answer OK with one message; the answers of one loop turn leave in one write."""
        if not self.answered:
            self.answered = True
            self.sink.send_reply(self, message)

    def fail(self, code: str, message: str) -> None:
        """Answer with a status other than OK, such as ("UNAVAILABLE", "queue is full")."""
        if not self.answered:
            self.answered = True
            self.sink.send_failure(self, code, message)

    def refuse(self, error: StatusError) -> None:
        """Answer with an error, its message cut as TensorFlow Serving cuts it."""
        message = error.message
        if len(message) > _MESSAGE_CHARACTERS_MAX:
            message = message[:_MESSAGE_CHARACTERS_MAX] + "...TRUNCATED"
        self.fail(error.code, message)

    def cancel(self) -> None:
        """Take note that the client no longer waits; for the connection to call."""
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()


def hand_over(call: GrpcCall, dispatch: Callable[[GrpcCall], None]) -> None:
    """Dispatch a call that waited meanwhile; it ends where its client is gone or the service refuses it."""
    try:
        if call.cancelled:
            raise StatusError("CANCELLED", "the client is gone")
        dispatch(call)
    except StatusError as error:
        call.fail(error.code, error.message)


class GrpcStream:
    """A call with any number of messages both ways: set `on_message` and `on_end`, then `send` and `finish`.

    `on_end` is called when the client has sent its last message, `on_cancel` when it is gone. Everything is called
    on the loop's thread. Messages sent wait in memory while the client's windows are closed.
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

    @property
    def path(self) -> str:
        """The method, as "/package.Service/Method"."""
        return self.head.path

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The client's metadata."""
        return self.head.metadata

    def send(self, message: bytes) -> None:
        """Send one message; ignored once the stream has ended."""
        if not self.answered and not self.cancelled:
            self.sink.send_message(self, message)

    def finish(self, code: str = "OK", message: str = "") -> None:
        """End the stream with a status."""
        if self.answered:
            return
        self.answered = True
        if code == "OK":
            self.sink.send_end(self)
        else:
            self.sink.send_failure(self, code, message)

    def cancel(self) -> None:
        """Take note that the client is gone; for the connection to call."""
        self.cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()
