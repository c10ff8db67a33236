"""Answers Classify, Regress and MultiInference calls; texts and order of checks are TensorFlow Serving's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from batchtune.server.backends.model import example_inputs
from batchtune.server.calls.classification import CLASSIFY, CLASSIFY_METHOD, REGRESS, REGRESS_METHOD, Kind
from batchtune.server.calls.pending_call import Outputs, PendingCall, PendingCalls
from batchtune.server.grpc_api.predict import read_model_spec
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
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
        """Start a Classify call; `call` gets its answer or error later, a refused request its error at once."""
        self._start_single(call, CLASSIFY)

    def regress(self, call: GrpcCall) -> None:
        """Start a Regress call; `call` gets its answer or error later, a refused request its error at once."""
        self._start_single(call, REGRESS)

    def multi_inference(self, call: GrpcCall) -> None:
        """Start a MultiInference call: each task runs as its own request, the answer waits for all.

        `call` gets its answer or error later, a refused request its error at once.
        """
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
        results: dict[str, Outputs] = {}

        def encode(_: Outputs) -> bytes:
            return _encoded(servable, tasks, results, examples)

        def take(signature_name: str, outputs: Outputs | None, error: StatusError | None) -> None:
            if outputs is None:
                running.fail(error or StatusError("INTERNAL", "the model gave no outputs"))
                return
            results[signature_name] = outputs
            if len(results) == len(tasks):
                running.done({}, None)

        running = PendingCall(self._pending, times, call, started_ns, call.deadline_ns, encode, examples)
        for signature_name, (_, outputs) in tasks.items():
            running.submit(servable, signature_name, inputs, outputs, partial(take, signature_name))

    def _start_single(self, call: GrpcCall, kind: Kind) -> None:
        name, started_ns = "", time.monotonic_ns()
        try:
            request = parse_message(kind.request, call.message)
            if not request.HasField("model_spec"):
                raise StatusError("INVALID_ARGUMENT", "Missing ModelSpec")
            name, version, label, given = read_model_spec(request.model_spec)
            servable = self._models.find(name, version=version, label=label)
            signature, outputs = kind.called(servable.signatures, given, check_method=self._check_methods)
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

    def _tasks(self, request: Any) -> tuple[Servable, dict[str, tuple[Kind, tuple[str, ...]]]]:
        """Check a MultiInference request; returns the servable that its tasks all run on, and the tasks: signature
        name -> (kind, names of the outputs to ask for).

        Raises StatusError for a model or signature that is unknown, differs between tasks or does not fit the
        task.
        """
        first = request.tasks[0].model_spec if request.tasks else ModelSpec()
        name, version, label, _ = read_model_spec(first)
        servable = self._models.find(name, version=version, label=label)
        tasks: dict[str, tuple[Kind, tuple[str, ...]]] = {}
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
            tasks[signature_name] = kind, outputs
        return servable, tasks


def _encoded(
    servable: Servable,
    tasks: Mapping[str, tuple[Kind, tuple[str, ...]]],
    results: Mapping[str, Outputs],
    examples: int,
) -> bytes:
    """Return the bytes of a MultiInferenceResponse; results: by signature name; examples: of the request."""
    response = MultiInferenceResponse()
    for signature_name, (kind, _) in tasks.items():
        result = response.results.add(model_spec=_spec(servable, signature_name))
        getattr(result, kind.result_field).CopyFrom(kind.result(results[signature_name], examples))
    return bytes(response.SerializeToString())


def _spec(servable: Servable, signature_name: str) -> Any:
    spec = ModelSpec(name=servable.name, signature_name=signature_name)
    spec.version.value = servable.version
    return spec
