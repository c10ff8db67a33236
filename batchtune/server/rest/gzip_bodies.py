"""How are bodies that come as gzip inflated, and answers deflated for clients that want that?"""

from __future__ import annotations

import gzip
import zlib

from batchtune.wire.status import StatusError

_LEVEL = 1  # 9 takes five times as long for an eighth fewer bytes of JSON numbers


class BodyTooLargeError(Exception):
    """An inflated body beyond the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the inflated request body exceeds {limit} bytes")


def inflate(body: bytes, limit: int) -> bytes:
    """Undo gzip; raises StatusError for what is no gzip, BodyTooLargeError beyond `limit` bytes."""
    inflater = zlib.decompressobj(wbits=31)
    try:
        plain = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise StatusError("INVALID_ARGUMENT", f"Failed to uncompress the gzipped body: {error}") from error
    if len(plain) > limit:
        raise BodyTooLargeError(limit)
    if not inflater.eof:
        raise StatusError("INVALID_ARGUMENT", "Failed to uncompress the gzipped body: it is cut short")
    return plain


def deflate(answer: bytes) -> bytes:
    """Make gzip of an answer."""
    return gzip.compress(answer, _LEVEL, mtime=0)
