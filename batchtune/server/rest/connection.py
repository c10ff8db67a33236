"""A client's connection to the REST API: HTTP/1.1 at a few microseconds of CPU per request."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

from batchtune.server.rest.json.answers import error_answer
from batchtune.server.rest.parser import CONTINUE, STATUS_LINES, Head, HttpRequest, RequestParser, RestLimits
from batchtune.server.rest.rest_api import RestApi
from batchtune.wire.listener import LARGE_READ_BYTES, Listener

# What makes it cheap: a request whose head is known byte for byte, and whose body came with it, is started without
# being parsed; an answer is one write; silent connections are found by one sweep over all of them instead of a timer
# each. One request at a time is answered; what a client sends meanwhile waits unparsed, and beyond `_AHEAD_BYTES` in
# its socket. So does what takes longer than a slice, until it is this connection's turn again.

_AHEAD_BYTES = 1 << 16  # a pipelining client keeps us busy between two of our answers


class RestConnection(asyncio.Protocol):
    """One client's connection; answers one request at a time, in order.

    listener: counts the bytes in memory for all clients together, and lets connections work in turns.
    """

    def __init__(self, service: RestApi, *, limits: RestLimits, listener: Listener) -> None:
        self._service = service
        self._limits = limits
        self._listener = listener
        self._turns = listener.turns
        self._noted_bytes = 0  # as arriving
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # None before the connection and after it
        self._peer = ""
        self._parser = RequestParser(
            limits=limits,
            body_bytes_max=service.body_bytes_max,
            on_head=self._note_head,
        )
        self._unparsed = bytearray()
        self._written_head = b""  # the bytes of the head that is parsed next, where all of them came at once
        self._answering: Head | None = None
        self._clogged = False  # the client does not take our answers
        self._paused = False  # we read no more
        self._waits_turn = False  # with what has arrived, though it could go on
        self._advancing = False
        self._closing = False
        self._draining = False
        self._heard_s = self._loop.time()

    @property
    def is_paused(self) -> bool:
        """Whether the server has stopped reading from the client for now."""
        return self._paused

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes that have arrived and are not parsed."""
        return len(self._unparsed)

    @property
    def arriving_bytes(self) -> int:
        """Number of bytes in memory of incomplete requests and of requests that wait for their turn."""
        parser = self._parser
        return len(self._unparsed) + (max(parser.arrived_bytes, 1) if parser.arriving else 0)

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes in memory of answers that the client has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def waits_for_us(self) -> bool:
        """Whether the client waits for the server: for an answer, for room to write it, or for its turn."""
        return self._answering is not None or self._clogged or self._waits_turn

    def refuse_arriving(self) -> None:
        """Refuse the incomplete request with 503; if another request is being answered, abort the connection."""
        if self._answering is not None or self._clogged or self._parser.ready:
            self.abort()
        else:
            self._unparsed.clear()
            self._parser.refuse(503, "incomplete requests, of all clients together, hold too much memory")
            self._advance()

    def drain(self) -> None:
        """Answer the requests that have arrived, accept no more, then close."""
        self._draining = True
        if not self._is_busy() and not self._parser.arriving:
            self._close()

    def abort(self) -> None:
        """Close the connection at once; requests under way get no answer."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_due(self) -> None:
        """Close the connection if the client has sent no request for too long; the listener calls this regularly, and
        looks for slow clients itself."""
        transport, now_s = self._transport, self._loop.time()
        if transport is None:
            return
        if self._is_busy() or self._parser.arriving or transport.get_write_buffer_size():
            self._heard_s = now_s
        elif now_s - self._heard_s > self._limits.idle_s:
            transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if peer else ""
        self._listener.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = self._answering = None
        self._closing = True
        self._unparsed.clear()
        self._parser.close()
        self._listener.closed(self)

    def eof_received(self) -> bool:
        """Answer the requests of a client that sends no more (`nc -N`), then close; True while any is due."""
        self._draining = True
        return self._is_busy()

    def pause_writing(self) -> None:
        """Read and start no more requests while the client does not read its answers."""
        self._clogged = True
        self._pause_reading()
        self._listener.unsent.note(self, self.unsent_bytes)

    def resume_writing(self) -> None:
        self._clogged = False
        self._listener.unsent.note(self, self.unsent_bytes)
        self._advance()

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        if len(data) >= LARGE_READ_BYTES:
            self._wait_turn()
        if self._closing:
            return
        if self._waits_turn or self._is_busy():
            self._unparsed += data
            if len(self._unparsed) > _AHEAD_BYTES:
                self._pause_reading()
            self._note_arriving()
            return
        if not self._parser.arriving:
            end = data.find(b"\r\n\r\n") + 4
            head = self._service.known_heads.get(data[:end])
            if head is not None and len(data) - end == head.body_bytes and head.route is not None:
                self._answering = head
                self._service.start_model_call(head.route, data[end:], self.respond)
                return
            self._written_head = data[:end] if end >= 4 else b""
        self._unparsed += data
        self._advance()

    def respond(self, status: int, answer: bytes, *header_lines: bytes) -> None:
        """Write the answer to the request under way, in one piece, and continue with the next request.

        header_lines: header fields that replace the API's usual ones, each with its line end. Does nothing if the
        connection is closed.
        """
        head, self._answering = self._answering, None
        transport = self._transport
        if head is None or transport is None or transport.is_closing():
            return
        parser = self._parser
        has_more = bool(parser.ready or self._unparsed or parser.arriving)
        kept = head.keep_alive and (has_more or not self._draining)
        connection = b"" if kept else b"connection: close\r\n"
        if kept and head.is_http_1_0:
            connection = b"connection: keep-alive\r\n"  # HTTP/1.0 closes unless both ends say so
        lines = b"".join(header_lines) or self._service.header_lines
        body = b"" if head.method == "HEAD" else answer
        transport.write(
            b"%b%bcontent-length: %d\r\n%b\r\n%b"
            % (STATUS_LINES[status], lines, len(answer), connection, body)
        )
        if not kept:
            self._close()
        elif has_more or self._paused:
            self._advance()

    def _note_head(self, head: Head) -> None:
        """Find a head's model call, and remember the head by its bytes if they came at once."""
        written, self._written_head = self._written_head, b""
        head.route = self._service.find_model_call(head.method, head.target)
        if written and head.route is not None:
            self._service.remember(written, head)

    def _note_arriving(self) -> None:
        arriving_bytes = self.arriving_bytes
        if arriving_bytes != self._noted_bytes:
            self._noted_bytes = arriving_bytes
            self._listener.arriving.note(self, arriving_bytes)

    def _is_busy(self) -> bool:
        """Whether arriving bytes have to wait: for an answer, for room to write it, or for earlier bytes."""
        return self._answering is not None or self._clogged or bool(self._unparsed or self._parser.ready)

    def _advance(self) -> None:
        """Parse and start requests that have arrived, until one has no answer yet or the time slice ends."""
        if self._advancing or self._waits_turn:
            return
        self._advancing = True
        try:
            self._work_off()
        finally:
            self._advancing = False
        self._note_arriving()
        transport, parser = self._transport, self._parser
        if transport is None or transport.is_closing() or self._closing:
            return
        if parser.owes_continue and self._answering is None and not parser.ready:
            parser.owes_continue = False
            transport.write(CONTINUE)
        if self._draining and not self._is_busy() and not parser.arriving:
            self._close()
        elif not self._clogged and len(self._unparsed) <= _AHEAD_BYTES:
            self._resume_reading()

    def _work_off(self) -> None:
        ready, now_s = self._parser.ready, self._turns.now_s
        end_s = self._turns.slice_end_s()
        while self._answering is None and not self._clogged and not self._closing and not self._waits_turn:
            if ready:
                self._start(ready.popleft())
            elif self._unparsed:
                piece_bytes = self._parser.piece_bytes
                piece = self._unparsed[:piece_bytes]
                del self._unparsed[:piece_bytes]
                self._unparsed[:0] = self._parser.feed(piece)
                if self._parser.ended:
                    self._unparsed.clear()
            else:
                return
            if (ready or self._unparsed) and now_s() >= end_s:
                self._wait_turn()

    def _wait_turn(self) -> None:
        """Stop reading, and do nothing until it is this connection's turn."""
        if not self._waits_turn:
            self._waits_turn = True
            self._pause_reading()
            self._turns.wait(self._take_turn)

    def _take_turn(self) -> None:
        self._waits_turn = False
        if self._closing:
            self._resume_reading()
        else:
            self._advance()

    def _start(self, request: HttpRequest) -> None:
        self._answering = request.head
        if request.refused is None:
            self._service.start(request, self._peer, self.respond)
        else:
            status, text = request.refused
            self.respond(status, error_answer(text))

    def _pause_reading(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        transport = self._transport
        if self._paused and not self._waits_turn and transport is not None and not transport.is_closing():
            self._paused = False
            transport.resume_reading()

    def _close(self) -> None:
        """Close the connection; a client that was refused while it sends has 2 s to read why."""
        self._closing = True
        self._unparsed.clear()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        linger_s = 2.0  # for a client that still sends to read why it was refused
        if self._parser.ended and transport.can_write_eof():
            transport.write_eof()
            self._resume_reading()
            self._loop.call_later(linger_s, transport.abort)
        else:
            transport.close()


async def serve_rest(service: RestApi, host: str, port: int, *, limits: RestLimits | None = None) -> Listener:
    """Listen on host and port (0: any free port) in the running loop, and return the listener.

    limits None: the defaults.

    Raises:
        OSError: the address cannot be bound.
    """
    limits = limits or RestLimits()
    listener = Listener(limits.shared)
    service.share(listener.unsent)
    await listener.listen(partial(RestConnection, service, limits=limits, listener=listener), host, port)
    return listener
