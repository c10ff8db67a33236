"""How does the DATA of a request become messages, where it is not one message in one frame?"""

from __future__ import annotations

from batchtune.wire.grpc.framing import MessageBuffer
from batchtune.wire.grpc.held_calls import HeldCalls
from batchtune.wire.grpc.inflating import inflate_call
from batchtune.wire.grpc.request_head import RequestHead
from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream
from batchtune.wire.grpc.server_limits import ServerLimits
from batchtune.wire.grpc.server_writer import FEW_STREAMS, AnswerWriter
from batchtune.wire.http2 import frames as h2
from batchtune.wire.inflating import Inflating
from batchtune.wire.status import StatusError


def take_data(
    writer: AnswerWriter,
    stream: GrpcCall | GrpcStream,
    payload: bytes,
    limits: ServerLimits,
    inflating: Inflating,
    held: HeldCalls,
) -> None:
    """Cut DATA into messages and hand on what is complete; what cannot be taken ends the call with a status."""
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


def request_buffer(head: RequestHead, limits: ServerLimits) -> MessageBuffer:
    """Make what cuts the DATA of a unary call into its message."""
    return MessageBuffer(head.encoding, limits.max_message_bytes, inflates=False)


def _cut(
    writer: AnswerWriter, stream: GrpcCall | GrpcStream, payload: bytes, limits: ServerLimits
) -> tuple[list[bytes], MessageBuffer]:
    """The messages that `payload` completes, and the stream's buffer; raises StatusError beyond a limit."""
    if stream.buffer is None:
        stream.buffer = request_buffer(stream.head, limits)
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
    """Fail the requests that are not whole; False, and none, where they are too many to look at each."""
    begun = [stream for stream in writer.streams.values() if not stream.half_closed]
    if len(begun) > FEW_STREAMS:
        return False
    for stream in begun:
        if isinstance(stream, GrpcCall):
            stream.fail("RESOURCE_EXHAUSTED", message)
        elif stream.buffer is not None and stream.buffer.held_bytes:
            stream.finish("RESOURCE_EXHAUSTED", message)
    return True
