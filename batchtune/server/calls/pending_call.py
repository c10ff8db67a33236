"""How does a call on a model end: with its outputs, an error, or its deadline, whichever is first?

One way for REST and gRPC, from the moment a request is known to be sound: its deadline is watched, it is submitted
with what else arrives in this turn of the loop, counted as TensorFlow Serving counts it, and answered once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from batchtune.server.calls.contract import Outputs, Servable
from batchtune.server.calls.deadlines import TIMED_OUT, Deadlines
from batchtune.server.calls.request_counts import ModelTimes, RequestCounts, RequestMetrics
from batchtune.server.calls.submit_together import LoopTurn
from batchtune.server.sessions.request import EXPIRED_IN_QUEUE, Queued
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError

PREDICT_METHODS = tuple(f"tensorflow/serving/{name}" for name in ("predict", "classify", "regress"))

_Client = TypeVar("_Client")
_Client_contra = TypeVar("_Client_contra", contravariant=True)


class FrontEnd(Protocol[_Client_contra]):
    """What REST and gRPC do each in its own way; `client` is whom a call answers."""

    def reply(self, client: _Client_contra, answer: bytes) -> None:
        """Answer OK."""
        ...

    def refuse(self, client: _Client_contra, error: StatusError) -> None:
        """Answer with an error."""
        ...

    def is_gone(self, client: _Client_contra) -> bool:
        """Whether nobody waits for the answer any more."""
        ...


class PendingCalls(Generic[_Client]):
    """What the calls of one front end share; only for the thread of one event loop."""

    def __init__(self, front_end: FrontEnd[_Client], metrics: RequestMetrics, entrypoint: str) -> None:
        self.front_end = front_end
        self.counts = RequestCounts(metrics, entrypoint)
        self.deadlines = Deadlines()
        self.turn = LoopTurn()

    def refuse(self, client: _Client, model_name: str, error: StatusError) -> None:
        """End a request that never became a call."""
        self.counts.failed(model_name, error.code)
        self.front_end.refuse(client, error)


class PendingCall(Generic[_Client]):
    """A call that waits for a model; `encode` makes its answer of the outputs.

    `started_ns` and `deadline_ns` (None: none) are on CLOCK_MONOTONIC; `examples` are those of a Classify or Regress
    request, 0: it carries none. `submitted_ns` is when its turn of the loop ended.
    """

    __slots__ = (
        "_calls",
        "_client",
        "_deadline_ns",
        "_encode",
        "_examples",
        "_started_ns",
        "_times",
        "ended",
        "queued",
        "submitted_ns",
    )

    def __init__(
        self,
        calls: PendingCalls[_Client],
        times: ModelTimes,
        client: _Client,
        started_ns: int,
        deadline_ns: int | None,
        encode: Callable[[Outputs], bytes],
        examples: int = 0,
    ) -> None:
        self._calls = calls
        self._times = times
        self._client = client
        self._started_ns = self.submitted_ns = started_ns
        self._deadline_ns = deadline_ns
        self._encode = encode
        self._examples = examples
        self.ended = False
        self.queued: Queued | None = None  # what stands for it in a batching queue, once it is submitted
        if deadline_ns is not None:
            calls.deadlines.add(self, deadline_ns)

    def submit(
        self,
        servable: Servable,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
    ) -> None:
        """Submit at the end of this turn of the loop; the answer follows."""
        self._calls.turn.submit(self, servable, signature_name, inputs, output_names, self._deadline_ns)

    def done(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Take what the model gave; nothing happens when the call has ended before."""
        if self.ended:
            self.queued = None
            return
        if outputs is None:
            self.fail(error or StatusError("INTERNAL", "the model gave no outputs"))
            return
        calls, times = self._calls, self._times
        times.runtime.add((time.monotonic_ns() - self.submitted_ns) / 1000)
        if self._examples:
            calls.counts.examples(times.model_name, self._examples)
        if calls.front_end.is_gone(self._client):
            self.fail(StatusError("CANCELLED", "CANCELLED"))
            return
        try:
            answer = self._encode(outputs)
        except StatusError as failure:
            self.fail(failure)
            return
        self._end()
        times.request.add((time.monotonic_ns() - self._started_ns) / 1000)
        calls.front_end.reply(self._client, answer)

    def fail(self, error: StatusError) -> None:
        """End with an error, unless ended."""
        if not self.ended:
            self._end()
            self._calls.refuse(self._client, self._times.model_name, error)

    def expire(self) -> None:
        """End for the deadline's sake: TensorFlow Serving tells a request that never left its queue from a run."""
        step = "" if self.queued is None else self.queued.step
        if self.queued is not None and not self.queued.taken:
            self.fail(StatusError("RESOURCE_EXHAUSTED", f"{step}{EXPIRED_IN_QUEUE}"))
        else:
            self.fail(StatusError("DEADLINE_EXCEEDED", f"{step}{TIMED_OUT}"))

    def _end(self) -> None:
        self.ended = True
        self.queued = None  # it refers back to us by way of `done`
        if self._deadline_ns is not None:
            self._calls.deadlines.discard(self, self._deadline_ns)


def check_predict_method(signature: Signature) -> None:
    """What --enable_signature_method_name_check asks of a Predict call; raises StatusError INTERNAL."""
    if signature.method_name not in PREDICT_METHODS:
        raise StatusError(
            "INTERNAL",
            "Expected prediction signature method_name to be one of {"
            f"{', '.join(PREDICT_METHODS)}}}. Was: {signature.method_name}",
        )
