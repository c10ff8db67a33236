"""How do the bytes of a connection become requests, and which bytes end it?

httptools (llhttp in its strict mode) refuses what is ambiguous: two lengths, a length beside chunks, bare line feeds,
control characters. Sizes are bounded here, while they arrive.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

from batchtune.server.rest.message import NOTED_FIELDS, Head, Request, origin_form
from batchtune.wire.shared_bytes import SharedLimits

_PIECE_BYTES = 1 << 14
_CHUNKED_PIECE_BYTES = 1 << 12
_AHEAD_BYTES = 1 << 9
"""Beyond the end of a body: at most some 30 requests, of 0.5 kB each, which wait until that before is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestLimits:
    """What a connection may take: `idle_s` between two requests; `stalled_s` without a byte either way while one is
    under way; for a whole request `stalled_s`, and a second for every `bytes_per_s_min` bytes of it. A head may have
    `head_bytes_max` bytes and `fields_max` fields.
    `shared` bounds what all connections hold together."""

    idle_s: float = 3600.0
    stalled_s: float = 60.0
    bytes_per_s_min: int = 1_000
    head_bytes_max: int = 1 << 16
    fields_max: int = 256
    shared: SharedLimits = field(default_factory=SharedLimits)


class RequestParser:
    """Appends each request that is complete, or refused, to `ready`.

    `arriving`: a request has begun and not ended. `ended`: one was refused, and nobody knows where the next begins.
    `owes_continue`: the client waits for a 100 before it sends the body. `on_head` is called with each head.
    """

    def __init__(
        self,
        *,
        limits: RestLimits,
        body_bytes_max: int,
        on_head: Callable[[Head], None],
        now_s: Callable[[], float],
    ) -> None:
        self.ready: deque[Request] = deque()
        self.arriving = self.ended = self.owes_continue = False
        self.begun_s = 0.0  # when the request that is arriving began
        self.arrived_bytes = 0  # of it
        self._limits = limits
        self._body_bytes_max = body_bytes_max
        self._on_head = on_head
        self._now_s = now_s
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._request: Request | None = None  # the one arriving, once its head has ended
        self._target = b""
        self._fields: dict[bytes, bytes] = {}
        self._field_count = self._head_bytes = 0
        self._events = self._quiet_bytes = 0  # what the parser has reported, and the bytes since
        self._upgrading: Head | None = None

    @property
    def piece_bytes(self) -> int:
        """How much to feed next: of a body what is left of it, and little of what follows."""
        request = self._request
        if request is None:
            return _AHEAD_BYTES
        if request.head.body_bytes < 0:
            return _CHUNKED_PIECE_BYTES
        return min(_PIECE_BYTES, request.head.body_bytes - request.size + _AHEAD_BYTES)

    def feed(self, data: bytearray) -> bytes | bytearray:
        """Parse; gives what is to be fed next, before all else that has arrived."""
        if self.ended or self._parser is None:
            return b""
        events = self._events
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse(400, f"Malformed HTTP request: {error}")
        self._quiet_bytes = 0 if self._events != events else self._quiet_bytes + len(data)
        if self.arriving and self._quiet_bytes > self._limits.head_bytes_max:
            self._refuse(400, f"a line of the request exceeds {self._limits.head_bytes_max} bytes")
        return b""

    def refuse(self, status: int, text: str) -> None:
        """Answer the request that is arriving, if none was refused before, and take no more."""
        self._refuse(status, text)

    def close(self) -> None:
        """Drop what has arrived; the parser and whoever takes the heads refer back to us."""
        self._parser = self._request = None
        self._target, self._fields, self._on_head = b"", {}, _nobody
        self.ready.clear()
        self.ended = True

    def on_message_begin(self) -> None:
        self._events += 1
        self.arriving = True
        self.begun_s = self._now_s()
        self.arrived_bytes = self._field_count = self._head_bytes = 0
        self._target, self._fields = b"", {}

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head, or of the trailer, which only counts."""
        self._events += 1
        self._field_count += 1
        self._count_head(len(name) + len(value) + 4)
        name = name.lower()
        if name in NOTED_FIELDS and self._request is None:
            before = self._fields.get(name)
            self._fields[name] = value if before is None else before + b", " + value

    def on_headers_complete(self) -> None:
        self._events += 1
        parser = self._parser
        if parser is None:
            return
        version = parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            self._refuse(505, f"HTTP/{version} is not spoken here; send HTTP/1.1")
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
        self._request = Request(head)
        if head.body_bytes > self._body_bytes_max:
            self._refuse_body()
        self.owes_continue = head.wants_continue
        self._on_head(head)

    def on_body(self, body: bytes) -> None:
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
        self._events += 1
        request, self._request = self._request, None
        if request is not None:
            self.arriving = self.owes_continue = False
            self.ready.append(request)

    def _check_fields(self, *, is_http_1_0: bool) -> None:
        """Refuse what RFC 9112 has refused: HTTP/1.1 without one Host (3.2), a coding that is not known here (6.1)."""
        host = self._fields.get(b"host")
        *codings, last = self._fields.get(b"transfer-encoding", b"").lower().split(b",")
        if (host is None and not is_http_1_0) or (host and re.search(rb"[\s,/@?#]", host)):
            self._refuse(400, "Malformed HTTP request: it needs one Host field")
        elif codings and last.strip() == b"chunked":
            self._refuse(501, "a transfer-encoding other than chunked is not understood")
        if self.ended:
            raise _RefusedError

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        self.arrived_bytes += size
        limits = self._limits
        if self._head_bytes > limits.head_bytes_max:
            self._refuse(400, f"the head of the request exceeds {limits.head_bytes_max} bytes")
        if self._field_count > limits.fields_max:
            self._refuse(400, f"the request has more than {limits.fields_max} header fields")
        if self.ended:
            raise _RefusedError

    def _refuse_body(self) -> None:
        self._refuse(413, f"the request body exceeds {self._body_bytes_max} bytes")
        raise _RefusedError

    def _refuse(self, status: int, text: str) -> None:
        """Put an answer in line after which the connection ends; the first reason is told."""
        if not self.ended:
            head = Head("", b"", {}, keep_alive=False, is_http_1_0=False)
            self.ready.append(Request(head, (status, text)))
        self._request = None
        self.ended = True
        self.arriving = self.owes_continue = False

    def _without_upgrade(self) -> bytes:
        """The head of a request that asks for another protocol, written anew without that, as HTTP lets a server."""
        head, self._upgrading = self._upgrading, None
        if head is None or head.method == "CONNECT":
            self._refuse(400, "Malformed request: CONNECT")
            return b""
        return head.without_upgrade()


def _nobody(_head: Head) -> None:
    """Takes the heads of a connection that is closed."""


class _RefusedError(Exception):
    """Raised in a callback: the parser stops in the middle of what it was fed."""
