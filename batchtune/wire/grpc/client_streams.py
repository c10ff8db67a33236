"""How do the calls of one client connection end, where the answer is not one message in one frame with status OK?"""

from __future__ import annotations

from collections.abc import Callable

from batchtune.wire.grpc.client_answers import PLAIN_HEAD, Answer, ResponseHead
from batchtune.wire.grpc.framing import status_of_reset
from batchtune.wire.http2 import frames as h2
from batchtune.wire.http2.flow import OutgoingFlow
from batchtune.wire.http2.frames import ErrorCode, PeerError

OnDone = Callable[[int, int, bytes, str], None]


class ClientStreams:
    """The open streams of a connection; `flow` and `out` are the connection's, which writes and clears `tags` itself.

    `bodies`: of streams with headers: None before the message, the message, or an Answer off the fast path.
    `on_done(tag, grpc_status, message, grpc_message)` is called once per call.
    """

    __slots__ = ("_flow", "_message_bytes_max", "_on_done", "_out", "bodies", "tags")

    def __init__(
        self, flow: OutgoingFlow, out: list[bytes], on_done: OnDone, *, message_bytes_max: int
    ) -> None:
        self.tags: dict[int, int] = {}
        self.bodies: dict[int, bytes | Answer | None] = {}
        self._flow = flow
        self._out = out
        self._on_done = on_done
        self._message_bytes_max = message_bytes_max

    def begin(self, stream_id: int, head: ResponseHead) -> None:
        """Take the first header block of an answer that is not plain."""
        if stream_id in self.bodies or not head.http_status:
            raise PeerError(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
        if not head.informational:
            self.bodies[stream_id] = Answer(head, self._message_bytes_max)

    def feed(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take DATA of a stream with headers: in pieces, compressed or ending the stream."""
        body = self.bodies[stream_id]
        if not isinstance(body, Answer):
            answer = Answer(PLAIN_HEAD, self._message_bytes_max)
            if isinstance(body, bytes):
                answer.add_message(body)
            self.bodies[stream_id] = body = answer
        wanted = body.feed(payload)
        if flags & h2.END_STREAM or not wanted:
            if not flags & h2.END_STREAM:
                self.reset(stream_id, ErrorCode.CANCEL)
            del self.bodies[stream_id]
            self._settle(stream_id, body, None)
        elif body.unacknowledged_bytes > h2.WINDOW_UPDATE_AT:
            self._out.append(h2.window_update_frame(stream_id, body.unacknowledged_bytes))
            body.unacknowledged_bytes = 0

    def end(self, stream_id: int, body: bytes | Answer | None, head: ResponseHead) -> None:
        """Take the header block that ends an answer which is not simply OK with one message."""
        if isinstance(body, Answer):
            self._settle(stream_id, body, head)
            return
        answer = Answer(head if head.http_status else PLAIN_HEAD, self._message_bytes_max)
        if body is not None:
            answer.add_message(body)
        self._settle(stream_id, answer, head)

    def _settle(self, stream_id: int, answer: Answer, trailers: ResponseHead | None) -> None:
        if self._flow.drop(stream_id):  # answered before the request was sent entirely
            self.reset(stream_id, ErrorCode.NO_ERROR)
        self._on_done(self.tags.pop(stream_id), *answer.settle(trailers))

    def take_reset(self, stream_id: int, error_code: int) -> None:
        """End a call whose stream the peer has reset."""
        status, message = status_of_reset(error_code)
        self.fail(stream_id, status, message)

    def fail(self, stream_id: int, status: int, message: str) -> None:
        """End a call without an answer."""
        self._flow.drop(stream_id)
        self.bodies.pop(stream_id, None)
        self._on_done(self.tags.pop(stream_id), status, b"", message)

    def cancel(self, tag: int) -> bool:
        """Reset the call's stream; False where no call has the tag."""
        for stream_id, open_tag in self.tags.items():
            if open_tag == tag:
                self.reset(stream_id, ErrorCode.CANCEL)
                del self.tags[stream_id]
                self.bodies.pop(stream_id, None)
                return True
        return False

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Say that nothing more of a stream is wanted, nor sent."""
        self._flow.drop(stream_id)
        self._out.append(h2.rst_stream_frame(stream_id, code))

    def grow_window(self, stream_id: int, increment: int) -> None:
        """Apply a WINDOW_UPDATE and send what it lets go; raises PeerError for a window that cannot be."""
        flow = self._flow
        if stream_id == 0:
            flow.grow_connection(increment)
        elif increment == 0 or (flow.waits(stream_id) and not flow.grow_stream(stream_id, increment)):
            raise PeerError(
                ErrorCode.FLOW_CONTROL_ERROR, f"WINDOW_UPDATE of stream {stream_id} by {increment}"
            )
        if flow.waiting:
            flow.pump(self._out)
