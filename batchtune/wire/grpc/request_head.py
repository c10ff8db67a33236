"""What does a request's header block ask for? Decoded once per distinct block, then remembered."""

from __future__ import annotations

import re
from dataclasses import dataclass

import hpack

from batchtune.wire.grpc.framing import decode_timeout_ns
from batchtune.wire.http2.header_blocks import EMPTY_TABLE, Fields, decode_block, new_decoder

_DEFAULT_TABLE_BYTES = 4_096
_MEMO_ENTRIES = 1_024
_REMEMBERED_BYTES_MAX = 2_048
"""Of a head's names and values: clients' are of some hundred, and may hold a token of a thousand."""
_PSEUDO = {":method", ":scheme", ":path", ":authority"}
_OF_ONE_HOP = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
_BAD_IN_NAME = re.compile("[\0- A-Z:\x7f-\xff]")
_OF_GRPC = {"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request as its headers tell it; `malformed` (what rule of HTTP/2 it breaks) and `http_status` (it is no
    gRPC call) are empty for a call; `content_bytes` -1: it does not say its length."""

    path: str
    metadata: tuple[tuple[str, str], ...]
    timeout_ns: int | None
    encoding: str
    malformed: str
    http_status: str
    method: str
    content_bytes: int


# Only blocks that need no dynamic table (see header_blocks) are kept here, so all connections share them.
known_heads: dict[bytes, RequestHead] = {}


class HeadReader:
    """The header blocks of one connection. `is_pure`: the client has emptied its dynamic table for good."""

    __slots__ = ("_decoder", "_header_list_bytes", "is_pure")

    def __init__(self, header_list_bytes: int) -> None:
        self.is_pure = False
        self._decoder: hpack.Decoder | None = None
        self._header_list_bytes = header_list_bytes

    def read(self, block: bytes) -> RequestHead:
        """Decode a block; one that begins by emptying the dynamic table makes the connection pure.

        Raises PeerError where it cannot be decoded.
        """
        if not self.is_pure and block[:1] == EMPTY_TABLE:
            self.is_pure = True
            self._decoder = None
        if self.is_pure:
            known = known_heads.get(block)
            if known is not None:
                return known
            decoder = new_decoder(table_bytes=0, header_list_bytes=self._header_list_bytes)
            return _remember(block, decode_block(decoder, block))
        if self._decoder is None:
            self._decoder = new_decoder(
                table_bytes=_DEFAULT_TABLE_BYTES, header_list_bytes=self._header_list_bytes
            )
        return read_head(decode_block(self._decoder, block))


def _remember(block: bytes, fields: Fields) -> RequestHead:
    """Read a block's fields and remember what they mean; only for blocks that depend on nothing but their bytes."""
    if sum(len(name) + len(value) for name, value in fields) > _REMEMBERED_BYTES_MAX:
        return read_head(fields)
    if len(known_heads) >= _MEMO_ENTRIES:
        known_heads.clear()
    known_heads[block] = head = read_head(fields)
    return head


def read_head(fields: Fields) -> RequestHead:
    """Read the fields of a request (RFC 9113 §8.3, PROTOCOL-HTTP2.md "Requests"); never raises."""
    values = dict(fields)
    malformed = _malformation(fields, values)
    timeout = values.get("grpc-timeout")
    timeout_ns = None if timeout is None else decode_timeout_ns(timeout)
    if timeout is not None and timeout_ns is None:
        malformed = malformed or f"grpc-timeout is {timeout!r}"
    length = values.get("content-length", "-1")
    method = values.get(":method", "")
    http_status = ""
    if method != "POST":
        http_status = "405"
    elif not _is_grpc(values.get("content-type", "")):
        http_status = "415"
    return RequestHead(
        path=values.get(":path", ""),
        metadata=tuple(field for field in fields if field[0][:1] != ":" and field[0] not in _OF_GRPC),
        timeout_ns=timeout_ns,
        encoding=values.get("grpc-encoding", ""),
        malformed=malformed,
        http_status=http_status,
        method=method,
        content_bytes=-1 if malformed else int(length),
    )


def _is_grpc(content_type: str) -> bool:
    base = "application/grpc"
    return content_type.startswith(base) and content_type[len(base) : len(base) + 1] in {"", "+", ";"}


def _malformation(fields: Fields, values: dict[str, str]) -> str:
    """Say which rule of RFC 9113 §8.2-8.3 the fields break; "" if none."""
    pseudo = [name for name, _ in fields if name[:1] == ":"]
    if len(pseudo) != len(set(pseudo)) or not set(pseudo) <= _PSEUDO:
        return "repeated or unknown pseudo-header"
    if any(name[:1] == ":" for name, _ in fields[len(pseudo) :]):
        return "pseudo-header after a header"
    if not values.get(":method") or not values.get(":scheme") or not values.get(":path"):
        return "pseudo-header missing"
    lengths = [value for name, value in fields if name == "content-length"]
    for name, _ in fields[len(pseudo) :]:
        if not name or name in _OF_ONE_HOP or _BAD_IN_NAME.search(name):
            return f"header {name!r} is not allowed in HTTP/2"
    if any(re.search("[\0\r\n]", value) for _, value in fields):
        return "header value with a line break"
    if len(set(lengths)) > 1 or not all(re.fullmatch("[0-9]{1,18}", length) for length in lengths):
        return "content-length is not one number"
    return "te is not trailers" if values.get("te", "trailers") != "trailers" else ""
