"""How does a connection begin and end, and what hears a client that speaks no gRPC?"""

from __future__ import annotations

import asyncio

from batchtune.wire.grpc.request_head import RequestHead
from batchtune.wire.grpc.server_limits import ServerLimits
from batchtune.wire.grpc.server_writer import AnswerWriter
from batchtune.wire.http2 import frames as h2
from batchtune.wire.http2.frames import ErrorCode, PeerError, Setting
from batchtune.wire.http2.header_blocks import encode_block

_LINGER_S = 2.0  # for a client to read our last GOAWAY
_TEXT = b"This port speaks gRPC (HTTP/2 with prior knowledge) only.\n"
_HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)


def read_preface(
    writer: AnswerWriter, limits: ServerLimits, missing: bytes, data: bytes
) -> tuple[bytes, bytes]:
    """Check the client's preface, of which `missing` is to come; what is missing now, and what follows it.

    Who speaks HTTP/1 is answered in HTTP/1. Raises PeerError for anything else.
    """
    size = min(len(data), len(missing))
    if data[:size] != missing[:size]:
        if missing == h2.PREFACE and data[:1].isupper() and b" " in data[:32]:
            writer.out.append(_HTTP1_ANSWER)
            writer.close_when_idle = True
            return missing, b""
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
    if size == len(missing):
        writer.out.append(_opening_frames(limits))
    return missing[size:], data[size:]


def _opening_frames(limits: ServerLimits) -> bytes:
    """The frames that a server begins with: its SETTINGS, and the widest connection window."""
    settings = {
        Setting.HEADER_TABLE_SIZE: 0,
        Setting.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
        Setting.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW,
        Setting.MAX_FRAME_SIZE: h2.OUR_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
    }
    return h2.settings_frame(settings) + h2.window_update_frame(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)


def refuse(writer: AnswerWriter, stream_id: int, head: RequestHead) -> None:
    """Answer a request that is no gRPC call with an HTTP status and a line of text; its body will be ignored."""
    text = b"" if head.method == "HEAD" else _TEXT
    fields = [
        (":status", head.http_status),
        ("content-type", "text/plain"),
        ("content-length", str(len(text))),
    ]
    writer.send_text(stream_id, encode_block(fields), text)


def close_with_goaway(writer: AnswerWriter, last_id: int, error: PeerError) -> None:
    """Name the client's fault and close; what it does not read of that is dropped soon."""
    writer.out.append(h2.goaway_frame(last_id, error.code, error.reason))
    writer.flush()
    transport = writer.transport
    if transport is not None:
        transport.close()
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)
    writer.abandon()
