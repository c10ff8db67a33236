"""HTTP/1.1 for a load client, at a C client's cost: one request at a time over a connection.

Request bytes are prepared once by the caller. The head of an answer that was seen before (the same bytes, parsed
by httptools that first time) is recognised by one dictionary look-up, so that an ordinary answer costs no parsing;
everything else — a new head, a chunked body, a head in pieces — goes through httptools (llhttp).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, cast

import httptools

from batchtune.wire.encoding import Memo

HEAD_MAX_BYTES: Final = 256 * 1024
NO_TAG: Final = -1

_BLANK_LINE: Final = b"\r\n\r\n"


AnswerHeads = Memo[bytes, tuple[int, int]]
"""Maps the bytes of an answer's head, with its blank line, to (status, length of head and body together in bytes).

Only heads of keep-alive answers with Content-Length are added. The connections to a server share one; it is bounded,
because a `Date` header makes a new head each second.
"""


class Http1Events(Protocol):
    """Callbacks of connections; each tag given to `send` comes back once, in `answered` or in `lost`."""

    def ready(self, connection: Http1ClientConnection) -> None:
        """Called when the connection, and its TLS, is up."""

    def first_byte(self, connection: Http1ClientConnection, tag: int) -> None:
        """Called when an answer has begun and is not complete; not for an answer that arrives in one piece."""

    def piece(self, tag: int, data: bytes) -> None:
        """Called with each piece of the body of an answer with status 200, by connections made with `streams`."""

    def answered(self, connection: Http1ClientConnection, tag: int, status: int, body: bytes | None) -> None:
        """Called when the answer is complete; `body` is None unless `send` asked for it or the status is not 200."""

    def lost(self, connection: Http1ClientConnection, tag: int, reason: str) -> None:
        """Called when the connection is gone; `tag`: the request that gets no answer, or NO_TAG."""


class Http1ClientConnection(asyncio.Protocol):
    """One connection with at most one request in flight.

    `reusable`: whether it takes requests; False before the connection is up, once a close was announced, and when
    closed. `tag`: that of the request in flight, else NO_TAG. `malformed`: how the server broke the protocol ("": it
    did not); the connection then closes. `retry_after`: whether the last answer with another status than 200 had a
    Retry-After. `streams`: `events.piece` gets the body of an answer with status 200 piece by piece, unless its head is
    in `heads`.
    """

    __slots__ = (
        "_answered", "_events", "_heads", "_keep_body", "_missing_bytes", "_pieces", "_reader", "_status",
        "_streams", "_transport", "_write", "malformed", "retry_after", "reusable", "tag",
    )  # fmt: skip

    def __init__(self, events: Http1Events, heads: AnswerHeads, *, streams: bool = False) -> None:
        self._events = events
        self._streams = streams
        self._answered = events.answered
        self._heads = heads
        self._keep_body = False
        self._missing_bytes = 0  # of an answer whose head is known and whose body comes in pieces
        self._pieces: list[bytes] = []
        self._status = 0
        self._reader: _AnswerReader | None = None
        self._transport: asyncio.Transport | None = None
        self.malformed = ""
        self.retry_after = False
        self.reusable = False
        self.tag = NO_TAG

    def send(self, request: bytes, tag: int, keep_body: bool) -> None:
        """Write one whole HTTP/1.1 request, head and body; the caller has checked that nothing is in flight and
        `reusable` is true.

        `tag`: a number of at least 0 by which the events name the request. `keep_body`: whether `answered` gets the
        body of an answer with status 200 too.
        """
        self.tag = tag
        self._keep_body = keep_body
        self._write(request)

    def abandon(self) -> None:
        """Close at once and forget the request in flight: `lost` is called with NO_TAG."""
        self.tag = NO_TAG
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._write = self._transport.write
        self.reusable = True
        self._events.ready(self)

    def data_received(self, data: bytes) -> None:
        tag = self.tag
        if tag >= 0 and not self._missing_bytes and self._reader is None:
            head = data[: data.find(_BLANK_LINE) + 4]
            known = self._heads.get(head)
            if known is not None:
                status, whole_bytes = known
                if whole_bytes == len(data):
                    self.tag = NO_TAG
                    kept = data[len(head) :] if self._keep_body or status != 200 else None
                    self._answered(self, tag, status, kept)
                elif whole_bytes > len(data):
                    self._events.first_byte(self, tag)
                    self._status = status
                    self._missing_bytes = whole_bytes - len(head)
                    self._pieces.clear()
                    self._body_piece_received(data[len(head) :])
                else:
                    self._break("more bytes than Content-Length says")
                return
        self._piece_received(data)

    def eof_received(self) -> bool:
        reader = self._reader
        if reader is not None and reader.ends_with_connection:
            self._finish(reader.status, reader.body(), last=True)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        tag = self.tag
        self.tag = NO_TAG
        self._reader = None
        gone = f"connection lost: {exc}" if exc else "connection closed by the server"
        self._events.lost(self, tag, self.malformed or gone)

    def _piece_received(self, data: bytes) -> None:
        if self.tag == NO_TAG:
            self._break("bytes without a request")
        elif self._missing_bytes:
            self._body_piece_received(data)
        elif self._reader is None:
            tag = self.tag
            on_piece = partial(self._events.piece, tag) if self._streams else None
            reader = _AnswerReader(keep_body=self._keep_body, on_piece=on_piece)
            self._reader = reader
            self._feed(reader, data)
            if self._reader is reader and self.tag == tag:
                self._events.first_byte(self, tag)
        else:
            self._feed(self._reader, data)

    def _body_piece_received(self, data: bytes) -> None:
        self._missing_bytes -= len(data)
        if self._missing_bytes < 0:
            self._break("more bytes than Content-Length says")
            return
        if self._keep_body or self._status != 200:
            self._pieces.append(data)
        if not self._missing_bytes:
            self._finish(self._status, b"".join(self._pieces), last=False)

    def _feed(self, reader: _AnswerReader, data: bytes) -> None:
        try:
            reader.feed(data)
        except httptools.HttpParserError as error:
            self._break(str(error))
            return
        if not reader.complete:
            return
        if reader.head_to_learn is not None:
            head = reader.head_to_learn
            self._heads.keep(head, (reader.status, len(head) + reader.body_bytes))
        self._finish(reader.status, reader.body(), last=not reader.keep_alive)

    def _finish(self, status: int, body: bytes, *, last: bool) -> None:
        if self._reader is not None:
            self.retry_after = self._reader.retry_after and status != 200
        self._reader = None
        tag = self.tag
        self.tag = NO_TAG
        if last:
            self.reusable = False
        self._answered(self, tag, status, body if self._keep_body or status != 200 else None)
        if last and self._transport is not None:
            self._transport.close()

    def _break(self, reason: str) -> None:
        self.malformed = f"malformed answer: {reason}"
        self.reusable = False
        self._reader = None
        if self._transport is not None:
            self._transport.abort()


class _AnswerReader:
    """Parses one answer with httptools; interim (1xx) answers before it are skipped."""

    def __init__(self, *, keep_body: bool, on_piece: Callable[[bytes], None] | None = None) -> None:
        self._on_piece = on_piece
        self.complete = False
        self.status = 0
        self.keep_alive = False
        self.retry_after = False
        self.body_bytes = 0
        self._keep_body = keep_body
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._fed_bytes = 0
        self._first_piece_head = b""
        self._declared_length: int | None = None
        self._in_body = False

    def feed(self, data: bytes) -> None:
        """Parse further bytes; raises httptools.HttpParserError when they are not part of one HTTP/1.x answer."""
        if not self._fed_bytes:
            self._first_piece_head = data[: data.find(_BLANK_LINE) + 4]
        self._fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise httptools.HttpParserError("an upgrade nobody asked for") from error
        if not self._in_body and not self.complete and self._fed_bytes > HEAD_MAX_BYTES:
            raise httptools.HttpParserError(f"a head of more than {HEAD_MAX_BYTES} bytes")

    @property
    def ends_with_connection(self) -> bool:
        """Whether the head is read and the body lasts until the connection closes."""
        return self._in_body and not self.complete and self._declared_length is None and not self.keep_alive

    @property
    def head_to_learn(self) -> bytes | None:
        """The head, to be added to `AnswerHeads`; None: it has a Retry-After, or it and Content-Length do not account
        for all bytes of a keep-alive answer."""
        whole_bytes = len(self._first_piece_head) + self.body_bytes
        exact = self._declared_length == self.body_bytes and whole_bytes == self._fed_bytes
        return self._first_piece_head if exact and self.keep_alive and not self.retry_after else None

    def body(self) -> bytes:
        return b"".join(self._pieces)

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("a second answer to one request")
        self._declared_length = None

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self._declared_length = int(value)
        elif name == b"retry-after":
            self.retry_after = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keep_alive = self._parser.should_keep_alive()
        self._in_body = True

    def on_body(self, data: bytes) -> None:
        self.body_bytes += len(data)
        if self._on_piece is not None and self.status == 200:
            self._on_piece(data)
        elif self._keep_body or self.status != 200:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._in_body = False
        self.complete = self.status >= 200
