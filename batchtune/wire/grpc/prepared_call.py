"""Encodes unary calls once, to be sent many times, and decodes the header blocks of their answers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.wire.encoding import Memo
from batchtune.wire.grpc.framing import (
    PREFIX,
    MessageBuffer,
    decode_grpc_message,
    encode_timeout,
    status_of_http,
)
from batchtune.wire.http2 import frames as h2
from batchtune.wire.http2.frames import (
    ErrorCode,
    Fields,
    PeerError,
    Setting,
    decode_block,
    encode_block,
    new_decoder,
)
from batchtune.wire.status import GRPC_CODES, StatusError

HEADER_LIST_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """A decoded header block of an answer: its initial headers, its trailers or both in one.

    `plain`: HTTP 200, gRPC, not compressed and no status yet. `status`: number of grpc-status, None where it is absent.
    `message`: grpc-message, or what is wrong with the HTTP status. `http_status` is "" in trailers.
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
    """Decode a header block that `known_heads` lacks and add it there; raises PeerError when it is malformed."""
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
    """Collects an answer in several frames, compressed, or broken, until its stream ends.

    `unacknowledged_bytes`: DATA since the last WINDOW_UPDATE; the owner sends that and sets it to 0.
    """

    __slots__ = ("_buffer", "_failure", "_head", "_messages", "unacknowledged_bytes")

    def __init__(self, head: ResponseHead, message_bytes_max: int) -> None:
        self._head = head
        self._buffer = MessageBuffer(head.encoding, message_bytes_max)
        self._messages: list[bytes] = []
        self._failure: StatusError | None = None
        self.unacknowledged_bytes = 0

    def add_message(self, message: bytes) -> None:
        """Add a message that the fast path had read already."""
        self._messages.append(message)

    def feed(self, data: bytes) -> bool:
        """Add DATA; returns False when the stream should be reset because nothing more of it is wanted."""
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
        """Return the call's outcome: (gRPC status number, message, grpc-message); `trailers` None: none came."""
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

    `head` (HEADERS), and `at_once` (HEADERS and DATA, where one DATA frame can hold the body), are the pieces of frames
    between which the packed stream id goes: `STREAM_ID.pack(stream_id).join(pieces)`. `body`: the message with its
    prefix, of `body_bytes` bytes.
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
        raise ValueError(f"{key!r} is no metadata key: lower-case ASCII letters, digits, '-', '_' and '.'")
    if key.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return key, base64.b64encode(raw).rstrip(b"=").decode()
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text.isascii() or not (text.isprintable() or not text):
        raise ValueError(f"the value of metadata {key!r} is not printable ASCII")
    return key, text
