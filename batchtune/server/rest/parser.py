"""Parses HTTP/1.1 requests from the bytes of a connection.

httptools (llhttp in strict mode) refuses ambiguous requests: two lengths, a length beside chunks, bare line
feeds, control characters. The sizes of heads and bodies are checked here, as they arrive.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import httptools

from batchtune.server.rest.calls import Route
from batchtune.wire.listener import SharedLimits

# What the head of a request says to the API, and how the head of an answer reads.

PROXY_FIELDS = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
"""Header fields of a request that came by way of a proxy."""
NOTED_FIELDS = PROXY_FIELDS.union(
    {
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"host",
        b"origin",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""The header fields that the server reads; all others are dropped."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"

_GZIP = re.compile(rb"(?:^|,)[ \t]*gzip[ \t]*(?:;[ \t]*q=(?P<weight>[0-9.]+)[ \t]*)?(?:,|$)", re.IGNORECASE)


class Head:
    """The head of one request.

    fields: lower-case name -> value, of NOTED_FIELDS only. body_bytes: its content-length, -1 without one. route: the
    model call that it names; None: another request.
    """

    __slots__ = ("body_bytes", "fields", "is_http_1_0", "keep_alive", "method", "route", "target")

    def __init__(
        self,
        method: str,
        target: bytes,
        fields: Mapping[bytes, bytes],
        *,
        keep_alive: bool,
        is_http_1_0: bool,
    ) -> None:
        self.method = method
        self.target = target
        self.fields = fields
        self.keep_alive = keep_alive
        self.is_http_1_0 = is_http_1_0
        self.body_bytes = int(fields.get(b"content-length", -1))
        self.route: Route | None = None

    @property
    def is_gzipped(self) -> bool:
        """Whether the body is compressed with gzip."""
        return b"gzip" in self.fields.get(b"content-encoding", b"").lower()

    @property
    def takes_gzip(self) -> bool:
        """Whether the client accepts answers compressed with gzip."""
        accepted = _GZIP.search(self.fields.get(b"accept-encoding", b""))
        return accepted is not None and accepted["weight"] not in {b"0", b"0.0", b"0.00", b"0.000"}

    def is_remembered(self, written: bytes, *, but_with: set[bytes]) -> bool:
        """Whether the head, whose bytes are `written`, may be looked up by them later: it is short, a POST with a
        content-length that keeps the connection, and has none of the fields `but_with`."""
        kept_bytes_max = 1024  # a head of curl, wrk, requests or a load balancer has 100 to 700
        return (
            len(written) <= kept_bytes_max
            and self.keep_alive
            and not self.is_http_1_0
            and self.body_bytes >= 0
            and written.startswith(b"POST ")
            and but_with.isdisjoint(self.fields)
        )

    @property
    def wants_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends the body."""
        return self.fields.get(b"expect", b"").lower() == b"100-continue"

    def without_upgrade(self) -> bytes:
        """Return the head as bytes without its `Upgrade` field, with which a client offers another protocol."""
        lines = [b"%b: %b\r\n" % field for field in self.fields.items() if field[0] != b"upgrade"]
        version = b"1.0" if self.is_http_1_0 else b"1.1"
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.method.encode(), self.target, version, b"".join(lines))


class HttpRequest:
    """A request: its head, and the pieces of its body that have arrived (`size` bytes).

    refused: (HTTP status, text) of the error to answer with; None: the request is well formed.
    """

    __slots__ = ("head", "pieces", "refused", "size")

    def __init__(self, head: Head, refused: tuple[int, str] | None = None) -> None:
        self.head = head
        self.pieces: list[bytes | bytearray] = []
        self.size = 0
        self.refused = refused

    def add(self, piece: bytes) -> None:
        """Add the next piece of the body; from the 1,025th piece on they are joined, since each may be a single
        byte."""
        self.size += len(piece)
        # Each takes 60 bytes beside its own; a body of 64 MiB that is read 64 KiB at a time has as many.
        pieces_max = 1024
        if len(self.pieces) < pieces_max:
            self.pieces.append(piece)
            return
        if len(self.pieces) == pieces_max:
            self.pieces.append(bytearray())
        self.pieces[-1] += piece

    def body(self) -> bytes:
        """Return the whole body."""
        return bytes(self.pieces[0]) if len(self.pieces) == 1 else b"".join(self.pieces)


def origin_form(target: bytes) -> bytes:
    """Return the path and query of a request's target, which may be an absolute URL.

    A target that is no URL is returned unchanged.
    """
    if target.startswith(b"/") and b"#" not in target:
        return target
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (url.path or b"/") + (b"" if url.query is None else b"?" + url.query)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestLimits:
    """Limits of a connection, in seconds and bytes.

    idle_s: between two requests. head_bytes_max, fields_max: for one head. shared: limits on what is in memory for all
    connections, and on the time of slow clients.
    """

    idle_s: float = 3600.0
    head_bytes_max: int = 1 << 16
    fields_max: int = 256
    shared: SharedLimits = field(default_factory=SharedLimits)


class RequestParser:
    """Parses the requests of a connection; appends each that is complete, or refused, to `ready`.

    arriving: whether a request has begun and not ended. ended: whether a request was refused, so that no further one
    can be found. owes_continue: whether the client waits for a 100 before it sends the body. on_head: called with each
    head.
    """

    def __init__(
        self,
        *,
        limits: RestLimits,
        body_bytes_max: int,
        on_head: Callable[[Head], None],
    ) -> None:
        self.ready: deque[HttpRequest] = deque()
        self.arriving = self.ended = self.owes_continue = False
        self.arrived_bytes = 0  # of the request that is arriving
        self._limits = limits
        self._body_bytes_max = body_bytes_max
        self._on_head = on_head
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._request: HttpRequest | None = None  # the one arriving, once its head has ended
        self._target = b""
        self._fields: dict[bytes, bytes] = {}
        self._field_count = self._head_bytes = 0
        self._events = self._quiet_bytes = 0  # what the parser has reported, and the bytes since
        self._upgrading: Head | None = None

    @property
    def piece_bytes(self) -> int:
        """Number of bytes to feed next: 512 before a body; the rest of a body whose length is known and at most 512 of
        what follows it, 16 KiB in all; 4 KiB of a chunked body."""
        read_bytes = 1 << 14
        request = self._request
        # Beyond the end of a body: at most some 30 requests, of 0.5 kB each, which wait until that before is
        # answered.
        ahead_bytes = 1 << 9
        if request is None:
            return ahead_bytes
        chunked_piece_bytes = 1 << 12
        if request.head.body_bytes < 0:
            return chunked_piece_bytes
        return min(read_bytes, request.head.body_bytes - request.size + ahead_bytes)

    def feed(self, data: bytearray) -> bytes | bytearray:
        """Parse bytes; return those that have to be fed again, ahead of the rest that has arrived."""
        if self.ended or self._parser is None:
            return b""
        events = self._events
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self.refuse(400, f"Malformed HTTP request: {error}")
        self._quiet_bytes = 0 if self._events != events else self._quiet_bytes + len(data)
        if self.arriving and self._quiet_bytes > self._limits.head_bytes_max:
            self.refuse(400, f"a line of the request exceeds {self._limits.head_bytes_max} bytes")
        return b""

    def refuse(self, status: int, text: str) -> None:
        """Append a refused request (HTTP status, text) to `ready` in place of the arriving one; end parsing.

        Only the first refusal of a connection counts.
        """
        if not self.ended:
            head = Head("", b"", {}, keep_alive=False, is_http_1_0=False)
            self.ready.append(HttpRequest(head, (status, text)))
        self._request = None
        self.ended = True
        self.arriving = self.owes_continue = False

    def close(self) -> None:
        """Discard what has arrived, and every reference that would keep the connection in memory."""
        self._parser = self._request = None
        self._target, self._fields, self._on_head = b"", {}, _nobody
        self.ready.clear()
        self.ended, self.arriving = True, False

    def on_message_begin(self) -> None:
        """Note that a request arrives, and forget the fields of the one before; httptools calls this."""
        self._events += 1
        self.arriving = True
        self.arrived_bytes = self._field_count = self._head_bytes = 0
        self._target, self._fields = b"", {}

    def on_url(self, url: bytes) -> None:
        """Add a piece of the request's target."""
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a field of the head; fields of a trailer are only counted."""
        self._events += 1
        self._field_count += 1
        self._count_head(len(name) + len(value) + 4)
        name = name.lower()
        if name in NOTED_FIELDS and self._request is None:
            before = self._fields.get(name)
            self._fields[name] = value if before is None else before + b", " + value

    def on_headers_complete(self) -> None:
        """Check the head, make the request whose body follows, and call `on_head`; httptools calls this.

        A request to upgrade to another protocol is only recorded: `feed` has it parsed once more without that wish.

        Raises:
            _RefusedError: the head is refused, which ends the parsing: another version than HTTP/1.0 and 1.1, no Host,
                an unknown transfer coding, or a body that is declared too large.
        """
        self._events += 1
        parser = self._parser
        if parser is None:
            return
        version = parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            self.refuse(505, f"HTTP/{version} is not spoken here; send HTTP/1.1")
            raise _RefusedError
        self._check_fields(is_http_1_0=version == "1.0")
        head = Head(
            parser.get_method().decode(),
            origin_form(self._target),
            self._fields,
            keep_alive=parser.should_keep_alive(),
            is_http_1_0=version == "1.0",
        )
        if parser.should_upgrade():
            self._upgrading = head
            return
        self._request = HttpRequest(head)
        if head.body_bytes > self._body_bytes_max:
            self._refuse_body()
        self.owes_continue = head.wants_continue
        self._on_head(head)

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body; a body that is too large is refused."""
        self._events += 1
        self.owes_continue = False
        request = self._request
        if request is None:
            return
        request.add(body)
        self.arrived_bytes += len(body)
        if request.size > self._body_bytes_max:
            self._refuse_body()

    def on_message_complete(self) -> None:
        """Append the whole request to `ready`."""
        self._events += 1
        request, self._request = self._request, None
        if request is not None:
            self.arriving = self.owes_continue = False
            self.ready.append(request)

    def _check_fields(self, *, is_http_1_0: bool) -> None:
        """Refuse HTTP/1.1 without exactly one Host (RFC 9112, 3.2) and an unknown transfer coding (6.1)."""
        host = self._fields.get(b"host")
        *codings, last = self._fields.get(b"transfer-encoding", b"").lower().split(b",")
        if (host is None and not is_http_1_0) or (host and re.search(rb"[\s,/@?#]", host)):
            self.refuse(400, "Malformed HTTP request: it needs one Host field")
        elif codings and last.strip() == b"chunked":
            self.refuse(501, "a transfer-encoding other than chunked is not understood")
        if self.ended:
            raise _RefusedError

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        self.arrived_bytes += size
        limits = self._limits
        if self._head_bytes > limits.head_bytes_max:
            self.refuse(400, f"the head of the request exceeds {limits.head_bytes_max} bytes")
        if self._field_count > limits.fields_max:
            self.refuse(400, f"the request has more than {limits.fields_max} header fields")
        if self.ended:
            raise _RefusedError

    def _refuse_body(self) -> None:
        self.refuse(413, f"the request body exceeds {self._body_bytes_max} bytes")
        raise _RefusedError

    def _without_upgrade(self) -> bytes:
        """Return the head of a request for another protocol without that wish, which a server may ignore."""
        head, self._upgrading = self._upgrading, None
        if head is None or head.method == "CONNECT":
            self.refuse(400, "Malformed request: CONNECT")
            return b""
        return head.without_upgrade()


def _nobody(_head: Head) -> None:
    """Do nothing with the head of a closed connection."""


class _RefusedError(Exception):
    """Raised in a callback of httptools to stop parsing at once."""
