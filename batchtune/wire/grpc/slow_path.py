"""Handles what is rare on a gRPC server connection: the preface, requests that are no calls, DATA in pieces, gzip."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from batchtune.wire import http2 as h2
from batchtune.wire.grpc.framing import MessageBuffer, inflate_failure, wbits_of
from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream, RequestHead, hand_over
from batchtune.wire.grpc.server_writer import FEW_STREAMS, AnswerWriter, HeldCalls, ServerLimits
from batchtune.wire.http2 import ErrorCode, PeerError, Setting, encode_block
from batchtune.wire.inflating import InflateError, Inflating, Outcome, Packed
from batchtune.wire.status import StatusError

_TEXT = b"This port speaks gRPC (HTTP/2 with prior knowledge) only.\n"


def read_preface(
    writer: AnswerWriter, limits: ServerLimits, missing: bytes, data: bytes
) -> tuple[bytes, bytes]:
    """Compare `data` with the bytes of the client's preface that are `missing`.

    Returns (bytes that are still missing, bytes of `data` after the preface). A client that speaks HTTP/1 gets an
    answer in HTTP/1. Raises PeerError for anything else.
    """
    size = min(len(data), len(missing))
    if data[:size] != missing[:size]:
        if missing == h2.PREFACE and data[:1].isupper() and b" " in data[:32]:
            writer.out.append(
                b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
            )
            writer.close_when_idle = True
            return missing, b""
        raise PeerError(ErrorCode.PROTOCOL_ERROR, "not the preface of HTTP/2")
    if size == len(missing):
        writer.out.append(_opening_frames(limits))
    return missing[size:], data[size:]


def _opening_frames(limits: ServerLimits) -> bytes:
    """Encode the frames that a server sends first: its SETTINGS, and the widest connection window."""
    settings = {
        Setting.HEADER_TABLE_SIZE: 0,
        Setting.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
        Setting.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW,
        Setting.MAX_FRAME_SIZE: h2.OUR_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
    }
    return h2.settings_frame(settings) + h2.window_update_frame(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)


def refuse(writer: AnswerWriter, stream_id: int, head: RequestHead) -> None:
    """Answer a request that is no gRPC call with an HTTP status and a line of text; the rest of the request is
    ignored."""
    text = b"" if head.method == "HEAD" else _TEXT
    fields = [
        (":status", head.http_status),
        ("content-type", "text/plain"),
        ("content-length", str(len(text))),
    ]
    writer.send_text(stream_id, encode_block(fields), text)


def inflate_call(call: GrpcCall, inflating: Inflating, inflated_bytes_max: int, held: HeldCalls) -> None:
    """Inflate a call's message and dispatch the call, now or later.

    If its client then has too many answers to read, the call waits in `held` again.

    Raises:
        StatusError: an unknown encoding, or too many compressed bytes wait.
    """
    content = call.message
    packed = Packed(
        content=content,
        wbits=wbits_of(call.head.encoding),
        bytes_max=inflated_bytes_max,
        go_on=partial(_go_on, call, inflated_bytes_max, held.dispatch),
        is_gone=lambda: call.cancelled,
        put_off=lambda: held.put_off(
            call, content, lambda call: inflate_call(call, inflating, inflated_bytes_max, held)
        ),
    )
    call.message = b""
    inflating.start(packed)


def _go_on(
    call: GrpcCall,
    inflated_bytes_max: int,
    dispatch: Callable[[GrpcCall], None],
    outcome: Outcome,
    release: Callable[[], None],
) -> None:
    call.release = release
    if isinstance(outcome, InflateError):
        outcome = inflate_failure(outcome, inflated_bytes_max)
    if isinstance(outcome, StatusError):
        call.fail(outcome.code, outcome.message)
        return
    call.message = outcome
    hand_over(call, dispatch)


def take_data(
    writer: AnswerWriter,
    stream: GrpcCall | GrpcStream,
    payload: bytes,
    limits: ServerLimits,
    inflating: Inflating,
    held: HeldCalls,
) -> None:
    """Cut DATA into messages and pass on the complete ones; a fault or an exceeded limit ends the call with a
    status."""
    try:
        messages, buffer = _cut(writer, stream, payload, limits)
        if isinstance(stream, GrpcStream):
            _feed_stream(stream, messages)
        else:
            _take_unary(writer, stream, buffer, messages)
            if stream.half_closed and buffer.compressed:
                bytes_max = min(limits.max_inflated_bytes, limits.max_message_bytes)
                held.begin(stream, lambda call: inflate_call(call, inflating, bytes_max, held))
            elif stream.half_closed:
                held.begin(stream)
    except StatusError as error:
        if isinstance(stream, GrpcStream):
            stream.finish(error.code, error.message)
        else:
            stream.fail(error.code, error.message)


def _cut(
    writer: AnswerWriter, stream: GrpcCall | GrpcStream, payload: bytes, limits: ServerLimits
) -> tuple[list[bytes], MessageBuffer]:
    """Return (messages that `payload` completes, the stream's buffer); raises StatusError beyond a limit."""
    if stream.buffer is None:
        stream.buffer = MessageBuffer(stream.head.encoding, limits.max_message_bytes, inflates=False)
    buffer = stream.buffer
    held_bytes = buffer.held_bytes
    try:
        messages = buffer.feed(payload)
        if isinstance(stream, GrpcCall):
            buffer.retained_bytes += sum(map(len, messages))
    finally:
        writer.held_bytes += buffer.held_bytes - held_bytes
    if writer.held_bytes > max(limits.max_buffered_bytes, buffer.held_bytes):
        raise StatusError("RESOURCE_EXHAUSTED", "too many incomplete requests on this connection")
    if buffer.unacknowledged_bytes > h2.WINDOW_UPDATE_AT and not stream.half_closed:
        writer.out.append(h2.window_update_frame(stream.stream_id, buffer.unacknowledged_bytes))
        buffer.unacknowledged_bytes = 0
    if stream.half_closed and buffer.incomplete:
        raise StatusError("INTERNAL", "the request ended within a message")
    return messages, buffer


def _take_unary(writer: AnswerWriter, call: GrpcCall, buffer: MessageBuffer, messages: list[bytes]) -> None:
    if buffer.completed > 1 or (call.half_closed and not buffer.completed):
        raise StatusError("UNIMPLEMENTED", f"a unary call with {buffer.completed} messages; one was expected")
    if messages:
        call.message = messages[0]
    if call.half_closed:
        writer.held_bytes -= buffer.held_bytes
        call.buffer = None


def _feed_stream(stream: GrpcStream, messages: list[bytes]) -> None:
    for message in messages:
        if stream.on_message is not None and not stream.answered:
            stream.on_message(message)
    if stream.half_closed and stream.on_end is not None and not stream.answered:
        stream.on_end()


def fail_begun(writer: AnswerWriter, message: str) -> bool:
    """Fail the incomplete requests of a connection. Returns False, and fails none, where there are more than
    FEW_STREAMS."""
    begun = [stream for stream in writer.streams.values() if not stream.half_closed]
    if len(begun) > FEW_STREAMS:
        return False
    for stream in begun:
        if isinstance(stream, GrpcCall):
            stream.fail("RESOURCE_EXHAUSTED", message)
        elif stream.buffer is not None and stream.buffer.held_bytes:
            stream.finish("RESOURCE_EXHAUSTED", message)
    return True
