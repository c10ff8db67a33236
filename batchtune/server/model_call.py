"""How does a gRPC call on a model end: with its outputs, an error, or its deadline, whichever is first?"""

from __future__ import annotations

import time
from collections.abc import Callable

from batchtune.server.deadlines import Deadlines
from batchtune.server.request_counts import RequestCounts
from batchtune.server.served_models import Outputs
from batchtune.wire.grpc_call import GrpcCall
from batchtune.wire.status import StatusError

MESSAGE_CHARACTERS_MAX = 1024
"""TensorFlow Serving cuts longer error messages (grpc_status_util.cc)."""


def fail_call(call: GrpcCall, error: StatusError) -> None:
    """End a call with an error, its message cut as TensorFlow Serving cuts it."""
    message = error.message
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[:MESSAGE_CHARACTERS_MAX] + "...TRUNCATED"
    call.fail(error.code, message)


class ModelCall:
    """A call that waits for a model; `encode` makes its answer of the outputs."""

    __slots__ = ("_api", "_call", "_counts", "_deadlines", "_encode", "_ended", "_model_name", "_started_ns")

    def __init__(
        self,
        call: GrpcCall,
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
