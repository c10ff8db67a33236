"""What is a gRPC call to the server's API, and how does a call on a model end?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from batchtune.server.deadlines import Deadlines
from batchtune.server.request_counts import RequestCounts
from batchtune.server.served_models import Outputs
from batchtune.wire.status import StatusError

MESSAGE_CHARACTERS_MAX = 1024
"""TensorFlow Serving cuts longer error messages (grpc_status_util.cc)."""


class UnaryCall(Protocol):
    """One message in, one answer out; wire.grpc_server implements it."""

    @property
    def path(self) -> str:
        """ "/package.Service/Method"."""
        ...

    @property
    def message(self) -> bytes:
        """The request."""
        ...

    @property
    def deadline_ns(self) -> int | None:
        """On CLOCK_MONOTONIC."""
        ...

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits any more."""
        ...

    def reply(self, message: bytes) -> None:
        """End the call with OK."""
        ...

    def fail(self, code: str, message: str) -> None:
        """End the call with an error."""
        ...


def fail_call(call: UnaryCall, error: StatusError) -> None:
    """End a call with an error, its message cut as TensorFlow Serving cuts it."""
    message = error.message
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[:MESSAGE_CHARACTERS_MAX] + "...TRUNCATED"
    if not call.cancelled:
        call.fail(error.code, message)


class ModelCall:
    """A call that waits for a model: ends with the encoded outputs, an error, or its deadline, whichever is first."""

    __slots__ = ("_api", "_call", "_counts", "_deadlines", "_encode", "_ended", "_model_name", "_started_ns")

    def __init__(
        self,
        call: UnaryCall,
        counts: RequestCounts,
        deadlines: Deadlines,
        *,
        model_name: str,
        api: str,
        encode: Callable[[Outputs], bytes],
    ) -> None:
        self._call = call
        self._counts = counts
        self._deadlines = deadlines
        self._model_name = model_name
        self._api = api
        self._encode = encode
        self._ended = False
        self._started_ns = time.monotonic_ns()
        if call.deadline_ns is not None:
            deadlines.add(self, call.deadline_ns)

    def done(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Take what the model gave; nothing happens when the call has ended before."""
        if self._ended:
            return
        call = self._call
        if outputs is None or call.cancelled:
            self.fail(error or StatusError("CANCELLED", "CANCELLED"))
            return
        try:
            answer = self._encode(outputs)
        except StatusError as failure:
            self.fail(failure)
            return
        self._end()
        self._counts.succeeded(self._model_name, self._api, self._started_ns)
        call.reply(answer)

    def fail(self, error: StatusError) -> None:
        """End with an error, unless ended."""
        if not self._ended:
            self._end()
            self._counts.failed(self._model_name, error.code)
            fail_call(self._call, error)

    def _end(self) -> None:
        self._ended = True
        if self._call.deadline_ns is not None:
            self._deadlines.discard(self, self._call.deadline_ns)
