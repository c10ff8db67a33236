"""What does each call of the REST API answer? Routing and HTTP are rest_api's and rest_server's.

Model calls are started on the event loop and answered through a callback, so that a front end that needs no task per
request can do without.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from batchtune.server.classification import (
    classification_outputs,
    classification_result,
    example_inputs,
    regression_outputs,
    regression_result,
)
from batchtune.server.deadlines import Deadlines
from batchtune.server.json_answers import error_answer, predict_answer
from batchtune.server.json_examples import classification_answer, parse_examples, regression_answer
from batchtune.server.json_tensors import DEFAULT_SIGNATURE, parse_predict
from batchtune.server.loop_turn import LoopTurn
from batchtune.server.request_counts import RequestCounts
from batchtune.server.rest_routes import Route
from batchtune.server.served_models import Models, Outputs, Servable, find_servable
from batchtune.wire.protos import SignatureDefMap
from batchtune.wire.status import FAULT, HTTP_CODES, StatusError
from batchtune.wire.tensors import Signature

_logger = logging.getLogger(__name__)

Respond = Callable[[int, bytes], None]
"""Takes the HTTP status and the JSON body; called exactly once."""


class RestCalls:
    """The calls on models. `timeout_s` bounds each model call (0: no bound); `check_methods` is
    --enable_signature_method_name_check."""

    def __init__(
        self, models: Models, counts: RequestCounts, *, timeout_s: float, check_methods: bool = False
    ) -> None:
        self._models = models
        self._counts = counts
        self._timeout_ns = round(timeout_s * 1e9)
        self._deadlines = Deadlines()
        self._turn = LoopTurn()
        self._check_methods = check_methods

    def start(self, route: Route, body: bytes, respond: Respond) -> None:
        """Start a predict, classify or regress call."""
        call = _Call(self, route, respond)
        try:
            if route.action == "predict":
                call.predict(body)
            else:
                call.run_examples(body)
        except StatusError as error:
            call.fail(error)
        except Exception:
            _logger.exception("a %s call failed", route.action)
            call.fail(StatusError("INTERNAL", FAULT))

    def status(self, route: Route) -> bytes:
        """The states of a model's versions; a label is ignored, as TensorFlow Serving does."""
        _require_model_name(route)
        states = self._models.statuses(route.model_name, version=route.version)
        document = {
            "model_version_status": [
                {
                    "version": str(state.version),
                    "state": state.state,
                    "status": {"error_code": state.error_code, "error_message": state.error_message},
                }
                for state in states
            ]
        }
        return json.dumps(document, indent=1).encode() + b"\n"

    def metadata(self, route: Route) -> bytes:
        """The signatures of a model, as protobuf's JSON of a SignatureDefMap."""
        from google.protobuf.json_format import MessageToDict

        _require_model_name(route)
        servable = find_servable(self._models, route.model_name, route.version, route.label)
        signatures = MessageToDict(
            SignatureDefMap.FromString(servable.metadata),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        document = {
            "model_spec": {
                "name": servable.name,
                "signature_name": "",
                "version": str(servable.version),
            },
            "metadata": {"signature_def": signatures},
        }
        return json.dumps(document, indent=1).encode() + b"\n"

    def counted(self, route: Route, answer: Callable[[Route], bytes]) -> bytes:
        """Run `status` or `metadata` and count the request."""
        try:
            body = answer(route)
        except StatusError as error:
            self._counts.failed(route.model_name, error.code)
            raise
        self._counts.answered(route.model_name)
        return body


class _Call:
    """One predict, classify or regress call from its body to its answer."""

    __slots__ = (
        "_calls",
        "_deadline_ns",
        "_examples",
        "_respond",
        "_route",
        "_row_format",
        "_servable",
        "_started_ns",
    )

    def __init__(self, calls: RestCalls, route: Route, respond: Respond) -> None:
        self._calls = calls
        self._route = route
        self._respond: Respond | None = respond
        self._row_format = True
        self._examples = 0
        self._servable: Servable | None = None
        self._started_ns = time.monotonic_ns()
        self._deadline_ns = 0

    def predict(self, body: bytes) -> None:
        request = parse_predict(body, self._find_signature)
        self._row_format = request.row_format
        self._submit(request.signature.name, request.inputs, None)

    def run_examples(self, body: bytes) -> None:
        name, message = parse_examples(body)
        signatures = self._find().signatures
        signature = signatures.get(name or DEFAULT_SIGNATURE)
        if signature is None:
            raise StatusError(
                "INVALID_ARGUMENT", f"No signature was found with the name: {name or DEFAULT_SIGNATURE}"
            )
        wanted = classification_outputs if self._route.action == "classify" else regression_outputs
        outputs = wanted(signature, check_method=self._calls._check_methods)
        inputs = example_inputs(message)
        self._examples = len(inputs["inputs"])
        self._submit(signature.name, inputs, outputs)

    def fail(self, error: StatusError) -> None:
        """Answer with an error, unless there was an answer already."""
        respond, self._respond = self._respond, None
        if respond is not None:
            self._calls._deadlines.discard(self, self._deadline_ns)
            self._calls._counts.failed(self._route.model_name, error.code)
            respond(HTTP_CODES[error.code], error_answer(error.message))

    def _find(self) -> Servable:
        route = self._route
        servable = self._servable = find_servable(
            self._calls._models, route.model_name, route.version, route.label
        )
        return servable

    def _find_signature(self, name: str) -> Signature:
        signature = self._find().signatures.get(name)
        if signature is None:
            raise StatusError(
                "INVALID_ARGUMENT", f'Serving signature name: "{name}" not found in signature def'
            )
        return signature

    def _submit(self, signature_name: str, inputs: dict[str, Any], outputs: tuple[str, ...] | None) -> None:
        servable = self._servable
        if servable is not None:
            calls, deadline_ns = self._calls, None
            if calls._timeout_ns:
                deadline_ns = self._deadline_ns = self._started_ns + calls._timeout_ns
                calls._deadlines.add(self, deadline_ns)
            calls._turn.submit(self, servable, signature_name, inputs, outputs, deadline_ns)

    def done(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Take what the model gave."""
        if self._respond is None:
            return  # timed out before
        if error is None and outputs is not None:
            try:
                body = self._answer(outputs)
            except StatusError as failure:
                error = failure
            else:
                self._succeed(body)
                return
        self.fail(error or StatusError("INTERNAL", "the model gave no outputs"))

    def _answer(self, outputs: Outputs) -> bytes:
        if self._route.action == "predict":
            return predict_answer(outputs, row_format=self._row_format)
        if self._route.action == "classify":
            return classification_answer(classification_result(outputs, self._examples))
        return regression_answer(regression_result(outputs, self._examples))

    def _succeed(self, body: bytes) -> None:
        respond, self._respond = self._respond, None
        calls, name = self._calls, self._route.model_name
        calls._deadlines.discard(self, self._deadline_ns)
        calls._counts.succeeded(name, self._route.action, self._started_ns)
        if self._examples:
            calls._counts.examples(name, self._examples)
        if respond is not None:
            respond(200, body)


def _require_model_name(route: Route) -> None:
    if not route.model_name:
        raise StatusError("INVALID_ARGUMENT", "Missing model name in request.")
