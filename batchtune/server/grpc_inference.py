"""How are Classify, Regress and MultiInference answered? Texts and order are TensorFlow Serving's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from batchtune.server.classification import (
    CLASSIFY_METHOD,
    REGRESS_METHOD,
    classification_outputs,
    classification_result,
    example_inputs,
    regression_outputs,
    regression_result,
)
from batchtune.server.deadlines import Deadlines
from batchtune.server.grpc_predict import DEFAULT_SIGNATURE
from batchtune.server.model_call import ModelCall, fail_call
from batchtune.server.predict_requests import read_model_spec
from batchtune.server.request_counts import RequestCounts
from batchtune.server.served_models import Models, Outputs, Servable, find_servable
from batchtune.wire.grpc_call import GrpcCall
from batchtune.wire.protos import (
    ClassificationRequest,
    ClassificationResponse,
    ModelSpec,
    MultiInferenceRequest,
    MultiInferenceResponse,
    RegressionRequest,
    RegressionResponse,
)
from batchtune.wire.status import StatusError


def parse_message(kind: Any, message: bytes) -> Any:
    """Parse a request; raises StatusError INTERNAL, as a gRPC server answers, when it is none."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise StatusError("INTERNAL", f"Failed to parse the {kind.DESCRIPTOR.name}: {error}") from error


class InferenceCalls:
    """Answers Classify, Regress and MultiInference; `check_methods` is --enable_signature_method_name_check."""

    def __init__(
        self, models: Models, counts: RequestCounts, deadlines: Deadlines, *, check_methods: bool = False
    ) -> None:
        self._models = models
        self._counts = counts
        self._deadlines = deadlines
        self._check_methods = check_methods

    def classify(self, call: GrpcCall) -> None:
        """Start a Classify call."""
        self._start_single(call, _CLASSIFY)

    def regress(self, call: GrpcCall) -> None:
        """Start a Regress call."""
        self._start_single(call, _REGRESS)

    def multi_inference(self, call: GrpcCall) -> None:
        """Start a MultiInference call: its tasks run as requests of their own, its answer waits for all."""
        name = ""
        try:
            request = parse_message(MultiInferenceRequest, call.message)
            name = request.tasks[0].model_spec.name if request.tasks else ""
            servable, tasks = self._tasks(request)
            inputs = example_inputs(request.input)
        except StatusError as error:
            self._refuse(call, name, error)
            return
        examples = len(inputs["inputs"])
        self._counts.examples(name, examples)
        running = self._running(call, name, "MultiInference", lambda _: join.encode(examples))
        join = _Join(servable, tasks, running)
        try:
            for index, task in enumerate(tasks):
                servable.submit(
                    task.signature_name, inputs, task.outputs, call.deadline_ns, partial(join.done, index)
                )
        except StatusError as error:
            running.fail(error)

    def _start_single(self, call: GrpcCall, kind: _Kind) -> None:
        name = ""
        try:
            request = parse_message(kind.request, call.message)
            if not request.HasField("model_spec"):
                raise StatusError("INVALID_ARGUMENT", "Missing ModelSpec")
            name, version, label, given = read_model_spec(request.model_spec)
            servable = find_servable(self._models, name, version, label)
            signature = servable.signatures.get(given or DEFAULT_SIGNATURE)
            if signature is None:
                raise StatusError(
                    "INVALID_ARGUMENT", f"No signature was found with the name: {given or DEFAULT_SIGNATURE}"
                )
            outputs = kind.outputs(signature, check_method=self._check_methods)
            inputs = example_inputs(request.input)
        except StatusError as error:
            self._refuse(call, name, error)
            return
        examples = len(inputs["inputs"])
        self._counts.examples(name, examples)

        def encode(results: Outputs) -> bytes:
            response = kind.response(
                result=kind.result(results, examples), model_spec=_spec(servable, signature.name)
            )
            return bytes(response.SerializeToString())

        running = self._running(call, name, kind.api, encode)
        try:
            servable.submit(signature.name, inputs, outputs, call.deadline_ns, running.done)
        except StatusError as error:
            running.fail(error)

    def _tasks(self, request: Any) -> tuple[Servable, list[_Task]]:
        """Check the tasks of a MultiInference request against their common model."""
        specs = [read_model_spec(task.model_spec) for task in request.tasks]
        name, version, label, _ = specs[0] if specs else ("", None, None, "")
        servable = find_servable(self._models, name, version, label)
        tasks: dict[str, _Task] = {}
        for (own_name, _, _, given), task in zip(specs, request.tasks, strict=True):
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
            kind = _KINDS.get(task.method_name)
            if kind is None:
                raise StatusError("UNIMPLEMENTED", f"Unsupported signature method_name: {task.method_name}")
            outputs = kind.outputs(signature, check_method=self._check_methods)
            tasks[signature_name] = _Task(signature_name=signature_name, kind=kind, outputs=outputs)
        return servable, list(tasks.values())

    def _running(self, call: GrpcCall, name: str, api: str, encode: Callable[[Outputs], bytes]) -> ModelCall:
        return ModelCall(call, self._counts, self._deadlines, model_name=name, api=api, encode=encode)

    def _refuse(self, call: GrpcCall, name: str, error: StatusError) -> None:
        self._counts.failed(name, error.code)
        fail_call(call, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What tells Classify from Regress."""

    api: str
    request: Any
    response: Any
    result_field: str
    outputs: Callable[..., tuple[str, ...]]
    result: Callable[[Outputs, int], Any]


_CLASSIFY = _Kind(
    api="Classify",
    request=ClassificationRequest,
    response=ClassificationResponse,
    result_field="classification_result",
    outputs=classification_outputs,
    result=classification_result,
)
_REGRESS = _Kind(
    api="Regress",
    request=RegressionRequest,
    response=RegressionResponse,
    result_field="regression_result",
    outputs=regression_outputs,
    result=regression_result,
)
_KINDS = {CLASSIFY_METHOD: _CLASSIFY, REGRESS_METHOD: _REGRESS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One task of a MultiInference request."""

    signature_name: str
    kind: _Kind
    outputs: tuple[str, ...]


class _Join:
    """Waits for all tasks of a MultiInference call."""

    def __init__(self, servable: Servable, tasks: Iterable[_Task], running: ModelCall) -> None:
        self._servable = servable
        self._tasks = list(tasks)
        self._running = running
        self._results: dict[int, Outputs] = {}

    def done(self, index: int, outputs: Outputs | None, error: StatusError | None) -> None:
        """Take the answer to one task."""
        if outputs is None:
            self._running.fail(error or StatusError("INTERNAL", "the model gave no outputs"))
            return
        self._results[index] = outputs
        if len(self._results) == len(self._tasks):
            self._running.done({}, None)

    def encode(self, examples: int) -> bytes:
        """Write the MultiInferenceResponse once all answers are there."""
        response = MultiInferenceResponse()
        for index, task in enumerate(self._tasks):
            result = response.results.add(model_spec=_spec(self._servable, task.signature_name))
            getattr(result, task.kind.result_field).CopyFrom(task.kind.result(self._results[index], examples))
        return bytes(response.SerializeToString())


def _spec(servable: Servable, signature_name: str) -> Any:
    spec = ModelSpec(name=servable.name, signature_name=signature_name)
    spec.version.value = servable.version
    return spec
