"""How are bodies that come as gzip inflated, and answers deflated for clients that want that?"""

from __future__ import annotations

import gzip

from batchtune.wire.inflating import InflateError, Outcome, TooLargeError
from batchtune.wire.status import StatusError

_LEVEL = 1  # 9 takes five times as long for an eighth fewer bytes of JSON numbers


class BodyTooLargeError(Exception):
    """An inflated body beyond the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the inflated request body exceeds {limit} bytes")


def plain_body(outcome: Outcome, limit: int) -> bytes:
    """The inflated body; raises StatusError for what is no gzip, BodyTooLargeError beyond `limit` bytes."""
    if isinstance(outcome, bytes):
        return outcome
    if isinstance(outcome, TooLargeError):
        raise BodyTooLargeError(limit)
    if isinstance(outcome, InflateError):
        raise StatusError("INVALID_ARGUMENT", f"Failed to uncompress the gzipped body: {outcome}")
    raise outcome


def deflate(answer: bytes) -> bytes:
    """Make gzip of an answer."""
    return gzip.compress(answer, _LEVEL, mtime=0)
