"""Which class of failure is this answer?

gRPC's codes and HTTP's are ambiguous: RESOURCE_EXHAUSTED is an expired queue, a full thread pool or an oversized
message; UNAVAILABLE is a full queue or a dead server. So the words decide first, then the code. The texts are those
of TensorFlow Serving (servables, batching_util/basic_batch_scheduler.h, gRPC's server_cc.cc) and Triton.
"""

from __future__ import annotations

from typing import Final

from batchtune.load.record.samples import Status
from batchtune.wire.status import GRPC_CODES

_WORDS: Final = (
    ("batch scheduling queue", Status.QUEUE_FULL),
    ("queue is full", Status.QUEUE_FULL),
    ("all batch threads are busy", Status.QUEUE_FULL),
    ("exceeds maximum queue size", Status.QUEUE_FULL),
    ("waiting in batching queue", Status.EXPIRED),
    ("request timeout expired", Status.EXPIRED),
    ("threadpool exhausted", Status.THREAD_POOL_EXHAUSTED),
    ("thread pool exhausted", Status.THREAD_POOL_EXHAUSTED),
    ("task size", Status.TOO_LARGE),
    ("larger than max_batch_size", Status.TOO_LARGE),
    ("batch-size must be <=", Status.TOO_LARGE),
    ("message larger than max", Status.TOO_LARGE),
    ("failed to parse the request json", Status.INVALID_REQUEST),  # Triton says 500
    ("reset the stream", Status.RESET),
    ("did not process the stream", Status.RESET),
)

_BY_GRPC_CODE: Final = {
    GRPC_CODES["INVALID_ARGUMENT"]: Status.INVALID_REQUEST,
    GRPC_CODES["NOT_FOUND"]: Status.INVALID_REQUEST,
    GRPC_CODES["ALREADY_EXISTS"]: Status.INVALID_REQUEST,
    GRPC_CODES["PERMISSION_DENIED"]: Status.INVALID_REQUEST,
    GRPC_CODES["FAILED_PRECONDITION"]: Status.INVALID_REQUEST,
    GRPC_CODES["OUT_OF_RANGE"]: Status.INVALID_REQUEST,
    GRPC_CODES["UNIMPLEMENTED"]: Status.INVALID_REQUEST,
    GRPC_CODES["UNAUTHENTICATED"]: Status.INVALID_REQUEST,
    GRPC_CODES["DEADLINE_EXCEEDED"]: Status.TIMEOUT,
}


def of_grpc(code: int, text: str) -> Status:
    """The class of a gRPC answer whose status `code` is not 0."""
    status = _by_words(text)
    if status is not None:
        return status
    if code == GRPC_CODES["RESOURCE_EXHAUSTED"] and not text:
        return Status.THREAD_POOL_EXHAUSTED  # TF Serving's older gRPC says nothing at all (issue #1795)
    return _BY_GRPC_CODE.get(code, Status.SERVER_ERROR)


def of_http(code: int, text: str) -> Status:
    """The class of an HTTP answer whose status `code` is not 200."""
    status = _by_words(text)
    if status is not None:
        return status
    if code == 413:
        return Status.TOO_LARGE
    if code in {408, 504}:
        return Status.TIMEOUT
    return Status.INVALID_REQUEST if 300 <= code < 500 and code not in {429, 499} else Status.SERVER_ERROR


def of_lost_connection(reason: str) -> Status:
    """The class of requests whose HTTP/2 connection ended under them."""
    lowered = reason.lower()
    return Status.MALFORMED if "malformed" in lowered or "protocol" in lowered else Status.RESET


def _by_words(text: str) -> Status | None:
    lowered = text.lower()
    return next((status for words, status in _WORDS if words in lowered), None)
