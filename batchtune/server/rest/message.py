"""What does the head of an HTTP request tell the REST API, and how does the head of an answer read?

Clients repeat themselves: the bytes of a head that named a model call are kept with what was read of them, so that the
next request that begins with the same bytes is not parsed again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

import httptools

from batchtune.server.rest.calls import Route

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
"""The header fields that change what the server does."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"

_KEPT_BYTES_MAX = 1024  # a head of curl, wrk, requests or a load balancer has 100 to 700
_KEPT_HEADS_MAX = 1024
_PIECES_MAX = 1024
"""Each takes 60 bytes beside its own; a body of 64 MiB that is read 64 KiB at a time has as many."""
_FIELDS_OF_OTHERS = frozenset({b"content-encoding", b"expect", b"upgrade"})
_GZIP = re.compile(rb"(?:^|,)[ \t]*gzip[ \t]*(?:;[ \t]*q=(?P<weight>[0-9.]+)[ \t]*)?(?:,|$)", re.IGNORECASE)


class Head:
    """The head of one request; `route` is the model call that it names, if any."""

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
        """Whether the body comes as gzip."""
        return b"gzip" in self.fields.get(b"content-encoding", b"").lower()

    @property
    def takes_gzip(self) -> bool:
        """Whether the client reads answers in gzip."""
        accepted = _GZIP.search(self.fields.get(b"accept-encoding", b""))
        return accepted is not None and accepted["weight"] not in {b"0", b"0.0", b"0.00", b"0.000"}

    @property
    def wants_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends the body."""
        return self.fields.get(b"expect", b"").lower() == b"100-continue"

    def without_upgrade(self) -> bytes:
        """The same head, written anew, of a client that wants no other protocol."""
        lines = [b"%b: %b\r\n" % field for field in self.fields.items() if field[0] != b"upgrade"]
        version = b"1.0" if self.is_http_1_0 else b"1.1"
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.method.encode(), self.target, version, b"".join(lines))


class Request:
    """A request on its way in: its head and the pieces of its body, or why it is `refused` (status and text)."""

    __slots__ = ("head", "pieces", "refused", "size")

    def __init__(self, head: Head, refused: tuple[int, str] | None = None) -> None:
        self.head = head
        self.pieces: list[bytes | bytearray] = []
        self.size = 0
        self.refused = refused

    def add(self, piece: bytes) -> None:
        """Take the next piece of the body; after many they are put together, for each may have a single byte."""
        self.size += len(piece)
        if len(self.pieces) < _PIECES_MAX:
            self.pieces.append(piece)
            return
        if len(self.pieces) == _PIECES_MAX:
            self.pieces.append(bytearray())
        self.pieces[-1] += piece

    def body(self) -> bytes:
        """The body, put together."""
        return bytes(self.pieces[0]) if len(self.pieces) == 1 else b"".join(self.pieces)


class KnownHeads:
    """Heads of model calls by their bytes; bounded at 1 MiB, then begun anew. Those with a field of `but_with` are
    not kept."""

    def __init__(self, *, but_with: set[bytes]) -> None:
        self._fields_of_others = _FIELDS_OF_OTHERS | but_with
        self._heads: dict[bytes, Head] = {}
        self.get = self._heads.get

    def keep(self, written: bytes, head: Head) -> None:
        """Remember a head that is short, keeps its connection, and whose body follows plainly in the length told."""
        if (
            len(written) > _KEPT_BYTES_MAX
            or not head.keep_alive
            or head.is_http_1_0
            or head.body_bytes < 0
            or not written.startswith(b"POST ")
            or not self._fields_of_others.isdisjoint(head.fields)
        ):
            return
        if len(self._heads) >= _KEPT_HEADS_MAX:
            self._heads.clear()
        self._heads[written] = head


def origin_form(target: bytes) -> bytes:
    """The path and query of a request's target, which may be an absolute URL; as it is where it is no URL."""
    if target.startswith(b"/") and b"#" not in target:
        return target
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (url.path or b"/") + (b"" if url.query is None else b"?" + url.query)
