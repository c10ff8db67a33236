"""May a page from another origin call the REST API? The answers of tensorflow_model_server."""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchtune.wire.status import StatusError

CORS_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"POST, GET"),
    (b"access-control-allow-headers", b"Content-Type"),
)
"""Added to every answer of the API when --rest_api_enable_cors_support is given (http_rest_api_util.cc)."""

_ORIGIN = re.compile(rb"https?://")


def check_preflight(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Accept an OPTIONS request that names its origin.

    Raises:
        StatusError: FAILED_PRECONDITION without an http or https `Origin`.
    """
    if not any(name == b"origin" and _ORIGIN.search(value) for name, value in headers):
        raise StatusError("FAILED_PRECONDITION", "Origin header is missing in CORS preflight")
