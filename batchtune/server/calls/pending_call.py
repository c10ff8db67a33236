"""Ends each call on a model once: with its outputs, with an error, or at its deadline, whichever is first.

REST and gRPC share this path from the moment that a request has been checked: its deadline is watched, it is
submitted together with the other requests of this turn of the event loop, counted as TensorFlow Serving does,
and answered once.

An event loop timer for each call would cost 1 µs. Instead calls are put into slots of 8 ms by their
deadlines, and one timer ends the calls of past slots: a call fails up to 17 ms after its deadline, never
before.

A batch thread that every request wakes takes batches of one or two rows, and each batch costs two thread
switches. So requests are submitted together, at the end of the loop turn in which they were read: with 64
REST clients and an idle device this takes 24 µs of CPU per request instead of 38. A request waits only for
sockets that are readable already.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from batchtune.server.metrics import Metrics, Timings
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
from batchtune.server.sessions.batched import EXPIRED_IN_QUEUE, Completion, Deliver, Queued
from batchtune.wire.signature import Signature
from batchtune.wire.status import FAULT, StatusError

Outputs = Mapping[str, NDArray[Any]]


TIMED_OUT = "Timed out waiting for notification"
PREDICT_METHODS = tuple(f"tensorflow/serving/{name}" for name in ("predict", "classify", "regress"))

_SLOT_BITS = 23  # 2**23 ns = 8.4 ms
_SLOT_S = (1 << _SLOT_BITS) / 1e9

_logger = logging.getLogger(__name__)

_Client = TypeVar("_Client")


class Deadlines:
    """Ends calls at their deadlines (CLOCK_MONOTONIC); only for the thread of one event loop."""

    def __init__(self) -> None:
        self._slots: dict[int, set[PendingCall[Any]]] = {}
        self._passed = 0
        self._ticking = False

    def add(self, call: PendingCall[Any], deadline_ns: int) -> None:
        """Call `call.expire` on the event loop up to 17 ms after `deadline_ns` (CLOCK_MONOTONIC); a deadline more than
        an hour away is ignored."""
        slot = deadline_ns >> _SLOT_BITS
        calls = self._slots.get(slot)
        if calls is not None:
            calls.add(call)
            return
        now_ns = time.monotonic_ns()
        watched_ns = 3600 * 10**9
        if deadline_ns - now_ns > watched_ns:
            return
        if not self._ticking:
            self._ticking = True
            self._passed = (now_ns >> _SLOT_BITS) - 1
            asyncio.get_running_loop().call_later(_SLOT_S, self._tick)
        self._slots.setdefault(max(slot, self._passed + 1), set()).add(call)

    def discard(self, call: PendingCall[Any], deadline_ns: int) -> None:
        """Stop watching the deadline of a call that has ended; does nothing if it is not watched. `deadline_ns`: as
        given to `add`."""
        slot = deadline_ns >> _SLOT_BITS
        calls = self._slots.get(slot)
        if calls is not None:
            calls.discard(call)
            if not calls:  # a client may name a slot of its own with every deadline, for an hour
                del self._slots[slot]

    def _tick(self) -> None:
        last = (time.monotonic_ns() >> _SLOT_BITS) - 1
        expired: list[PendingCall[Any]] = []
        for slot in range(self._passed + 1, last + 1):
            expired.extend(self._slots.pop(slot, ()))
        self._passed = last
        self._ticking = bool(self._slots)
        if self._ticking:
            asyncio.get_running_loop().call_later(_SLOT_S, self._tick)
        for call in expired:
            call.expire()


Take = Callable[[Outputs | None, StatusError | None], None]
"""Accepts a model's outputs, or where they are None its error."""

_Submit = tuple[
    "PendingCall[Any]", Servable, str, dict[str, NDArray[Any]], tuple[str, ...] | None, int | None, Take
]  # the call, and the arguments of Servable.submit


class PendingCalls(Generic[_Client]):
    """State that the calls of one front end share, and their counts; only for the thread of one event loop.

    entrypoint: "REST" or "GRPC", as in TF Serving's metrics. reply: sends a client its answer; refuse: sends a client
    an error; is_gone: whether a client does not wait any more.
    """

    def __init__(
        self,
        metrics: Metrics,
        entrypoint: str,
        models: ModelRepository,
        *,
        reply: Callable[[_Client, bytes], None],
        refuse: Callable[[_Client, StatusError], None],
        is_gone: Callable[[_Client], bool],
    ) -> None:
        self.reply = reply
        self.is_gone = is_gone
        self._refuse = refuse
        self.metrics = metrics
        self._entrypoint = entrypoint
        self._configured = models.names
        self._failed_names: set[str] = set()
        self._unknown_names = 0  # of them, those that no model had
        self.deadlines = Deadlines()
        self._submits: list[_Submit] = []  # of this turn of the loop

    def submit(self, call_and_arguments: _Submit) -> None:
        """Submit a request at the end of this loop turn; `call.fail` follows if it is refused.

        `call_and_arguments`: (call, servable), then the arguments of `Servable.submit`, of which the deadline is on
        CLOCK_MONOTONIC.
        """
        if not self._submits:
            asyncio.get_running_loop().call_soon(self._flush)
        self._submits.append(call_and_arguments)

    def _flush(self) -> None:
        submits, self._submits = self._submits, []
        now_ns = time.monotonic_ns()
        for call, servable, signature_name, inputs, output_names, deadline_ns, take in submits:
            call.submitted_ns = now_ns
            try:
                queued = servable.submit(signature_name, inputs, output_names, deadline_ns, take)
                if not call.ended:  # else each would refer to the other for ever
                    call.queued = queued
            except StatusError as error:
                call.fail(error)
            except Exception:  # the requests of other clients follow
                _logger.exception("a request for signature %s could not be submitted", signature_name)
                call.fail(StatusError("INTERNAL", FAULT))

    def refuse(self, client: _Client, model_name: str, error: StatusError) -> None:
        """Count a request that ends with an error, and send the client the error."""
        self.failed(model_name, error.code)
        self._refuse(client, error)

    def times(self, model_name: str, api: str) -> ModelTimes:
        """Return the histograms for calls of one API, such as "Predict", on a served model.

        As in TF Serving (predict_util.cc, classifier.cc) request_latency has the API's name in lower case for
        REST, runtime_latency never.
        """
        request_api = api.lower() if self._entrypoint == "REST" else api
        return ModelTimes(
            model_name=model_name,
            # TensorFlow Serving's name of sessions; its other one is TFRT.
            runtime=self.metrics.runtime_times(model_name, api, "TF1"),
            request=self.metrics.request_times(model_name, request_api, self._entrypoint),
        )

    def failed(self, model_name: str, code: str) -> None:
        """Count a request that ended with an error; code: gRPC's name.

        A client may invent any number of model names, of any length: the first 256 unknown names are counted
        separately, cut to 256 characters; all others are counted under "".
        """
        names_max = 256
        name_characters_max = 256
        if model_name not in self._failed_names:
            if model_name not in self._configured():
                model_name = model_name[:name_characters_max] if self._unknown_names < names_max else ""
                self._unknown_names += model_name not in self._failed_names
            self._failed_names.add(model_name)
        self.metrics.request_count(model_name, code)


class PendingCall(Generic[_Client]):
    """A call that waits for a model's outputs.

    started_ns: when the request arrived; deadline_ns: when the call fails, None: never; both on
    CLOCK_MONOTONIC. encode: turns the outputs into the answer's bytes; may raise StatusError. examples:
    number of Examples of a Classify, Regress or MultiInference request; 0: it has none.
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
        self.queued: Queued | None = None  # its entry in a batching queue, once it is submitted
        if deadline_ns is not None:
            calls.deadlines.add(self, deadline_ns)

    def submit(
        self,
        servable: Servable,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        take: Take | None = None,
    ) -> None:
        """Submit a request at the end of this loop turn; its outcome goes to `take` (None: to `done`).

        output_names: None: all outputs.
        """
        self._calls.submit(
            (self, servable, signature_name, inputs, output_names, self._deadline_ns, take or self.done)
        )

    def done(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Answer the client with the model's outputs or error, unless the call has ended before."""
        if self.ended:
            return
        if outputs is None:
            self.fail(error or StatusError("INTERNAL", "the model gave no outputs"))
            return
        calls, times = self._calls, self._times
        times.runtime.add((time.monotonic_ns() - self.submitted_ns) / 1000)
        if self._examples:
            calls.metrics.example_count(times.model_name, self._examples)
        if calls.is_gone(self._client):
            self.fail(StatusError("CANCELLED", "CANCELLED"))
            return
        try:
            answer = self._encode(outputs)
        except StatusError as failure:
            self.fail(failure)
            return
        self._end()
        times.request.add((time.monotonic_ns() - self._started_ns) / 1000)
        calls.reply(self._client, answer)

    def fail(self, error: StatusError) -> None:
        """End the call with an error, unless it has ended."""
        if not self.ended:
            self._end()
            self._calls.refuse(self._client, self._times.model_name, error)

    def expire(self) -> None:
        """End the call because its deadline has passed, with one of TensorFlow Serving's two errors: RESOURCE_EXHAUSTED
        if its request still waits in a batching queue, else DEADLINE_EXCEEDED."""
        if self.queued is not None and not self.queued.taken:
            self.fail(StatusError("RESOURCE_EXHAUSTED", EXPIRED_IN_QUEUE))
        else:
            self.fail(StatusError("DEADLINE_EXCEEDED", TIMED_OUT))

    def _end(self) -> None:
        self.ended = True
        self.queued = None  # it refers back to us by way of `done`
        if self._deadline_ns is not None:
            self._calls.deadlines.discard(self, self._deadline_ns)


def check_predict_method(signature: Signature) -> None:
    """Check that Predict may call a signature, by its method name (--enable_signature_method_name_check).

    Raises StatusError INTERNAL where the name is not one of PREDICT_METHODS.
    """
    if signature.method_name not in PREDICT_METHODS:
        raise StatusError(
            "INTERNAL",
            "Expected prediction signature method_name to be one of {"
            f"{', '.join(PREDICT_METHODS)}}}. Was: {signature.method_name}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """The two histograms, in microseconds, to which calls of one API on one model add their times.

    runtime: from submission to the outputs, for every call that has outputs; request: from arrival to the answer, for
    calls that succeed. Callers keep the object: to look it up costs as much as to add a time.
    """

    model_name: str
    runtime: Timings
    request: Timings


def deliver_to(loop: asyncio.AbstractEventLoop) -> Deliver:
    """Return a function that has the loop call `done(outputs, error)` of each completion; any thread may call it.

    It wakes the loop only once.
    """
    call_soon = loop.call_soon_threadsafe

    def deliver(completions: list[Completion]) -> None:
        call_soon(_complete, completions)

    return deliver


def _complete(completions: list[Completion]) -> None:
    for done, outputs, error in completions:
        try:
            done(outputs, error)
        except Exception:
            _logger.exception("an answer could not be given")
            if error is None:
                _complete([(done, None, StatusError("INTERNAL", "the server failed to write the answer"))])
