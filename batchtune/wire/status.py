"""The status that a request ends with, in gRPC's names and numbers and as an HTTP code.

The HTTP mapping is TensorFlow Serving's (http_server.cc).
"""

from __future__ import annotations

HTTP_CODES = {
    "OK": 200,
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
    "UNAUTHENTICATED": 401,
}
"""gRPC's name -> HTTP code, in the order of gRPC's numbers from 0 on."""

GRPC_NAMES = dict(enumerate(HTTP_CODES))
GRPC_CODES = {name: number for number, name in GRPC_NAMES.items()}

FAULT = "the server failed to handle the request"
"""The message that a client gets, with the code INTERNAL, for an exception inside the server; the log has details."""


class StatusError(Exception):
    """A request that ends with a status other than OK; `code` is gRPC's name, such as "UNAVAILABLE"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[StatusError], tuple[str, str]]:
        return StatusError, (self.code, self.message)


def invalid_argument(message: str) -> StatusError:
    """Make a StatusError with the code INVALID_ARGUMENT."""
    return StatusError("INVALID_ARGUMENT", message)
