"""Answers Classify, Regress and MultiInference calls; texts and order of checks are TensorFlow Serving's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from batchtune.server.calls.classification import (
    CLASSIFY,
    CLASSIFY_METHOD,
    REGRESS,
    REGRESS_METHOD,
    Kind,
    example_inputs,
)
from batchtune.server.calls.pending_call import Outputs, PendingCall, PendingCalls
from batchtune.server.grpc_api.predict import read_model_spec
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
from batchtune.server.sessions.batched import Queued
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.signature import DEFAULT_SIGNATURE
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import (
    ModelSpec,
    MultiInferenceRequest,
    MultiInferenceResponse,
)


def parse_message(kind: Any, message: bytes) -> Any:
    """Parse bytes as a message of class `kind`; raises StatusError INTERNAL, as gRPC does, if that fails."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise StatusError("INTERNAL", f"Failed to parse the {kind.DESCRIPTOR.name}: {error}") from error


class InferenceCalls:
    """Answers Classify, Regress and MultiInference calls, later, by way of `pending`.

    check_methods: check the signatures' method names (--enable_signature_method_name_check).
    """

    def __init__(
        self, models: ModelRepository, pending: PendingCalls[GrpcCall], *, check_methods: bool = False
    ) -> None:
        self._models = models
        self._pending = pending
        self._check_methods = check_methods

    def classify(self, call: GrpcCall) -> None:
        """Start a Classify call."""
        self._start_single(call, CLASSIFY)

    def regress(self, call: GrpcCall) -> None:
        """Start a Regress call."""
        self._start_single(call, REGRESS)

    def multi_inference(self, call: GrpcCall) -> None:
        """Start a MultiInference call: each task runs as its own request, the answer waits for all."""
        name, started_ns = "", time.monotonic_ns()
        try:
            request = parse_message(MultiInferenceRequest, call.message)
            name = request.tasks[0].model_spec.name if request.tasks else ""
            servable, tasks = self._tasks(request)
            inputs = example_inputs(request.input)
        except StatusError as error:
            self._pending.refuse(call, name, error)
            return
        examples = len(inputs["inputs"])
        times = self._pending.times(name, "MultiInference")

        def encode(_: Outputs) -> bytes:
            return join.encode(examples)

        running = PendingCall(self._pending, times, call, started_ns, call.deadline_ns, encode, examples)
        join = _TaskJoin(servable, tasks, running)
        for index, task in enumerate(tasks):
            part = _Part(join, index)
            self._pending.submit(part, servable, task.signature_name, inputs, task.outputs, call.deadline_ns)

    def _start_single(self, call: GrpcCall, kind: Kind) -> None:
        name, started_ns = "", time.monotonic_ns()
        try:
            request = parse_message(kind.request, call.message)
            if not request.HasField("model_spec"):
                raise StatusError("INVALID_ARGUMENT", "Missing ModelSpec")
            name, version, label, given = read_model_spec(request.model_spec)
            servable = self._models.find(name, version=version, label=label)
            signature = servable.signatures.get(given or DEFAULT_SIGNATURE)
            if signature is None:
                raise StatusError(
                    "INVALID_ARGUMENT", f"No signature was found with the name: {given or DEFAULT_SIGNATURE}"
                )
            outputs = kind.outputs(signature, check_method=self._check_methods)
            inputs = example_inputs(request.input)
        except StatusError as error:
            self._pending.refuse(call, name, error)
            return
        examples = len(inputs["inputs"])

        def encode(results: Outputs) -> bytes:
            response = kind.response(
                result=kind.result(results, examples), model_spec=_spec(servable, signature.name)
            )
            return bytes(response.SerializeToString())

        times = self._pending.times(name, kind.api)
        running = PendingCall(self._pending, times, call, started_ns, call.deadline_ns, encode, examples)
        running.submit(servable, signature.name, inputs, outputs)

    def _tasks(self, request: Any) -> tuple[Servable, list[_Task]]:
        """Check a MultiInference request; returns its tasks and the servable that they all run on.

        Raises StatusError for a model or signature that is unknown, differs between tasks or does not fit the
        task.
        """
        first = request.tasks[0].model_spec if request.tasks else ModelSpec()
        name, version, label, _ = read_model_spec(first)
        servable = self._models.find(name, version=version, label=label)
        tasks: dict[str, _Task] = {}
        for task in request.tasks:
            own_name, _, _, given = read_model_spec(task.model_spec)
            signature_name = given or DEFAULT_SIGNATURE
            if not own_name:
                raise StatusError("INVALID_ARGUMENT", "Found ModelSpec with an empty model name.")
            if own_name != name:
                raise StatusError(
                    "INVALID_ARGUMENT",
                    "All ModelSpecs in a MultiInferenceRequest must access the same model name.",
                )
            if signature_name in tasks:
                raise StatusError("INVALID_ARGUMENT", f"Duplicate evaluation of signature: {signature_name}")
            signature = servable.signatures.get(signature_name)
            if signature is None:
                raise StatusError(
                    "INVALID_ARGUMENT", f"Requested signature not found in model graph: {signature_name}"
                )
            kind = {CLASSIFY_METHOD: CLASSIFY, REGRESS_METHOD: REGRESS}.get(task.method_name)
            if kind is None:
                raise StatusError("UNIMPLEMENTED", f"Unsupported signature method_name: {task.method_name}")
            outputs = kind.outputs(signature, check_method=self._check_methods)
            tasks[signature_name] = _Task(signature_name=signature_name, kind=kind, outputs=outputs)
        return servable, list(tasks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One task of a MultiInference request; outputs: names of those to ask for."""

    signature_name: str
    kind: Kind
    outputs: tuple[str, ...]


class _TaskJoin:
    """Collects the outputs of a MultiInference call's tasks; ends the call with the last, or an error."""

    def __init__(self, servable: Servable, tasks: Iterable[_Task], running: PendingCall[GrpcCall]) -> None:
        self._servable = servable
        self._tasks = list(tasks)
        self._running = running
        self._results: dict[int, Outputs] = {}

    def done(self, index: int, outputs: Outputs | None, error: StatusError | None) -> None:
        """Accept the outputs of task number `index`, or its error, which ends the call."""
        if outputs is None:
            self.fail(error or StatusError("INTERNAL", "the model gave no outputs"))
            return
        self._results[index] = outputs
        if len(self._results) == len(self._tasks):
            self._running.done({}, None)

    def fail(self, error: StatusError) -> None:
        """End the call with the error of one task."""
        self._running.fail(error)

    def note(self, queued: Queued | None, submitted_ns: int) -> None:
        """Make a task's queued request the call's; the call's deadline error says whether it still waits.

        A call that has ended keeps none: call and request would refer to each other for ever.
        """
        if not self._running.ended:
            self._running.queued = queued
            self._running.submitted_ns = submitted_ns

    def encode(self, examples: int) -> bytes:
        """Return the bytes of the MultiInferenceResponse; examples: number of Examples of the request."""
        response = MultiInferenceResponse()
        for index, task in enumerate(self._tasks):
            result = response.results.add(model_spec=_spec(self._servable, task.signature_name))
            getattr(result, task.kind.result_field).CopyFrom(task.kind.result(self._results[index], examples))
        return bytes(response.SerializeToString())


class _Part:
    """One task of a MultiInference call as a `Submitted`; passes everything on to the `_TaskJoin`."""

    __slots__ = ("_index", "_join", "submitted_ns")

    def __init__(self, join: _TaskJoin, index: int) -> None:
        self._join = join
        self._index = index
        self.submitted_ns = 0

    @property
    def queued(self) -> Queued | None:
        return None

    @queued.setter
    def queued(self, queued: Queued | None) -> None:
        self._join.note(queued, self.submitted_ns)

    def done(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Accept the outputs of the task, or its error."""
        self._join.done(self._index, outputs, error)

    def fail(self, error: StatusError) -> None:
        """End the call because this task is refused."""
        self._join.fail(error)


def _spec(servable: Servable, signature_name: str) -> Any:
    spec = ModelSpec(name=servable.name, signature_name=signature_name)
    spec.version.value = servable.version
    return spec
