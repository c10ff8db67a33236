"""Finds the call that a REST path names, and answers predict, classify, regress, status and metadata.

Predict, classify and regress are started on the event loop and answered through a callback. `rest_api`
decides which requests come here; `connection` speaks HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import unquote

from numpy.typing import NDArray

from batchtune.server.backends.model import example_inputs
from batchtune.server.calls.classification import CLASSIFY, REGRESS
from batchtune.server.calls.pending_call import (
    PREDICT_METHODS,
    TIMED_OUT,
    ModelTimes,
    Outputs,
    PendingCall,
    PendingCalls,
    check_predict_method,
)
from batchtune.server.metrics import Metrics
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
from batchtune.server.rest.json.answers import error_answer, predict_answer
from batchtune.server.rest.json.parsing_process import (
    EXAMPLES_ON_LOOP_BYTES_MAX,
    PREDICT_ON_LOOP_BYTES_MAX,
    LargeBodies,
    find_signature,
)
from batchtune.server.rest.json.predict_request import (
    classification_answer,
    float_rows_reader,
    parse_examples,
    parse_request_object,
    read_inputs,
    regression_answer,
    signature_name,
    takes_float_rows,
)
from batchtune.wire.encoding import Memo
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import FAULT, HTTP_CODES, StatusError
from batchtune.wire.tfserving.messages import SignatureDefMap

# The routes of TensorFlow Serving's REST API, to the letter.
#
# http_rest_api_util.cc matches the raw path with its query, if any, in full and without regard to case.

TUNING_PATH = b"/v1/tuning/batching_parameters"

_CALL = re.compile(
    rb"/v1/models/([^/:]+)(?:(?:/versions/([0-9]+))|(?:/labels/([^/:]+)))?:(classify|regress|predict)",
    re.IGNORECASE,
)
_STATUS = re.compile(
    rb"/v1/models(?:/([^/:]+))?(?:(?:/versions/([0-9]+))|(?:/labels/([^/:]+)))?(?:/(metadata))?",
    re.IGNORECASE,
)

Action = Literal["classify", "regress", "predict", "status", "metadata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A call of the API on a model.

    model_name "": the path has no name; version and label None: not given, and the highest AVAILABLE version is meant.
    """

    action: Action
    model_name: str
    version: int | None = None
    label: str | None = None


def is_api_path(raw_path: bytes) -> bool:
    """Whether a path begins with /v1/, so that the API answers it, perhaps with an error."""
    return raw_path[:4].lower() == b"/v1/"


def find_route(method: str, raw_path: bytes) -> Route:
    """Return the call that a request's method and path mean.

    Raises:
        StatusError: INVALID_ARGUMENT for a path or method without a call, and for a version beyond int64.
    """
    if method == "POST" and (match := _CALL.fullmatch(raw_path)):
        name, version, label, action = match.groups()
        return _route(action.lower().decode(), name, version, label)
    if method == "GET" and (match := _STATUS.fullmatch(raw_path)):
        name, version, label, metadata = match.groups()
        return _route("status" if metadata is None else "metadata", name, version, label)
    raise StatusError(
        "INVALID_ARGUMENT", f"Malformed request: {method} {raw_path.decode('utf-8', 'replace')}"
    )


def _route(action: str, name: bytes | None, version: bytes | None, label: bytes | None) -> Route:
    version_max = 2**63 - 1
    if version is not None and (len(version) > 19 or int(version) > version_max):
        raise StatusError("INVALID_ARGUMENT", f"Failed to convert version: {version.decode()} to numeric.")
    return Route(
        action=cast("Action", action),
        model_name="" if name is None else unquote(name.decode("latin-1")),
        version=None if version is None else int(version),
        label=None if label is None else unquote(label.decode("latin-1")),
    )


def status_answer(models: ModelRepository, route: Route) -> bytes:
    """Return the states of a model's versions as JSON; a label is ignored, as in TensorFlow Serving.

    Raises StatusError: INVALID_ARGUMENT without a model's name, NOT_FOUND for an unknown model or version.
    """
    _require_model_name(route)
    document = {
        "model_version_status": [
            {
                "version": str(state.version),
                "state": state.state,
                "status": {"error_code": state.error_code, "error_message": state.error_message},
            }
            for state in models.statuses(route.model_name, version=route.version)
        ]
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def metadata_answer(models: ModelRepository, route: Route) -> bytes:
    """Return the signatures of a model as JSON (protobuf's JSON of a SignatureDefMap).

    Raises StatusError: INVALID_ARGUMENT without a model's name or for an unknown label, NOT_FOUND for a version that is
    not AVAILABLE.
    """
    from google.protobuf.json_format import MessageToDict

    _require_model_name(route)
    servable = models.find(route.model_name, version=route.version, label=route.label)
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


def _require_model_name(route: Route) -> None:
    if not route.model_name:
        raise StatusError("INVALID_ARGUMENT", "Missing model name in request.")


_logger = logging.getLogger(__name__)

Respond = Callable[[int, bytes], None]
"""Answers a request with an HTTP status and a JSON body; called exactly once."""


def _reply(respond: Respond, answer: bytes) -> None:
    respond(200, answer)


def _refuse(respond: Respond, error: StatusError) -> None:
    respond(HTTP_CODES[error.code], error_answer(error.message))


_Binding = tuple[weakref.ref[Servable], str, ModelTimes]
"""What the calls on a version share: (the version; its default signature's only input, if that is a matrix of float32,
else ""; where their times are counted)."""


class RestCalls:
    """Answers calls on models.

    timeout_s: limit of a predict, classify or regress call, 0: no limit. check_methods: whether to check the
    signatures' method names (--enable_signature_method_name_check).
    """

    def __init__(
        self, models: ModelRepository, metrics: Metrics, *, timeout_s: float, check_methods: bool = False
    ) -> None:
        self._models = models
        self._timeout_ns = round(timeout_s * 1e9)
        self._pending: PendingCalls[Respond] = PendingCalls(
            *(metrics, "REST", models),
            reply=_reply,
            refuse=_refuse,
            is_gone=lambda _: False,  # the connection drops what comes too late
        )
        self._check_methods = check_methods
        self._large_bodies = LargeBodies()
        self._reading: set[asyncio.Task[None]] = set()
        self._read_float_rows = float_rows_reader()
        self._bindings: Memo[int, _Binding] = Memo(1_024)

    def start(self, route: Route, body: bytes, respond: Respond) -> None:
        """Start a predict, classify or regress call; `respond` is called later, for an error at once."""
        started_ns = time.monotonic_ns()
        is_predict = route.action == "predict"
        if len(body) > (PREDICT_ON_LOOP_BYTES_MAX if is_predict else EXAMPLES_ON_LOOP_BYTES_MAX):
            task = asyncio.get_running_loop().create_task(self._start_large(route, body, respond, started_ns))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
            return
        try:
            if is_predict:
                if not self._predict_float_rows(route, body, respond, started_ns):
                    self._predict(route, body, respond, started_ns)
            else:
                name, message = parse_examples(body)
                self._run_examples(route, name, lambda: example_inputs(message), respond, started_ns)
        except StatusError as error:
            self._pending.refuse(respond, route.model_name, error)
        except Exception:
            _logger.exception("a %s call failed", route.action)
            self._pending.refuse(respond, route.model_name, StatusError("INTERNAL", FAULT))

    def close(self) -> None:
        """End the process that parses large bodies, if it runs."""
        self._large_bodies.close()

    async def _start_large(self, route: Route, body: bytes, respond: Respond, started_ns: int) -> None:
        try:
            async with asyncio.timeout(self._timeout_ns / 1e9 or None):
                if route.action == "predict":
                    await self._predict_large(route, body, respond, started_ns)
                else:
                    name, inputs = await self._large_bodies.examples(body)
                    self._run_examples(route, name, lambda: _unless_refused(inputs), respond, started_ns)
        except TimeoutError:
            self._pending.refuse(respond, route.model_name, StatusError("DEADLINE_EXCEEDED", TIMED_OUT))
        except StatusError as error:
            self._pending.refuse(respond, route.model_name, error)
        except Exception:
            _logger.exception("a %s call of %d bytes failed", route.action, len(body))
            self._pending.refuse(respond, route.model_name, StatusError("INTERNAL", FAULT))

    async def _predict_large(self, route: Route, body: bytes, respond: Respond, started_ns: int) -> None:
        try:
            signatures = dict(self._find(route).signatures)
        except StatusError as error:
            # What is wrong with the body is reported first, as for a small one.
            await self._large_bodies.predict(body, StatusError(error.code, error.message))
            raise
        while True:
            name, by_row, inputs = await self._large_bodies.predict(body, signatures)
            servable = self._find(route)  # the version found before may be unloaded by now
            if servable.signatures.get(name) == signatures[name]:
                break
            signatures = dict(servable.signatures)
        self._check_method(servable.signatures[name])
        self._submit_predict(route, servable, name, inputs, by_row, respond, started_ns)

    def _predict_float_rows(self, route: Route, body: bytes, respond: Respond, started_ns: int) -> bool:
        """Start a call whose body is only a matrix of numbers, as is the model's input; False: it is not."""
        try:
            servable = self._models.find(route.model_name, version=route.version, label=route.label)
        except StatusError:  # what is wrong with the body is reported first
            return False
        binding = self._bindings.get(id(servable))
        if binding is None or binding[0]() is not servable:
            binding = self._bind(servable)
        _, input_name, times = binding
        rows = self._read_float_rows(body) if input_name else None
        if rows is None:
            return False
        call = self._pending_call(times, respond, started_ns, _answer_by_row)
        call.submit(servable, DEFAULT_SIGNATURE, {input_name: rows}, None)
        return True

    def _bind(self, servable: Servable) -> _Binding:
        signature = servable.signatures.get(DEFAULT_SIGNATURE)
        input_name = ""
        if (
            signature is not None
            and takes_float_rows(signature.inputs)
            and (not self._check_methods or signature.method_name in PREDICT_METHODS)
        ):
            input_name = signature.inputs[0].name
        times = self._pending.times(servable.name, "Predict")
        return self._bindings.keep(id(servable), (weakref.ref(servable), input_name, times))

    def _predict(self, route: Route, body: bytes, respond: Respond, started_ns: int) -> None:
        document = parse_request_object(body)
        name = signature_name(document)
        servable = self._find(route)
        signature = find_signature(servable.signatures, name or DEFAULT_SIGNATURE)
        self._check_method(signature)
        by_row, inputs = read_inputs(body, document, name, signature)
        self._submit_predict(route, servable, signature.name, inputs, by_row, respond, started_ns)

    def _check_method(self, signature: Signature) -> None:
        if self._check_methods:
            check_predict_method(signature)

    def _submit_predict(
        self,
        route: Route,
        servable: Servable,
        name: str,
        inputs: dict[str, NDArray[Any]],
        by_row: bool,
        respond: Respond,
        started_ns: int,
    ) -> None:
        encode = _answer_by_row if by_row else _answer_by_column
        times = self._pending.times(route.model_name, "Predict")
        call = self._pending_call(times, respond, started_ns, encode)
        call.submit(servable, name, inputs, None)

    def _pending_call(
        self,
        times: ModelTimes,
        respond: Respond,
        started_ns: int,
        encode: Callable[[Outputs], bytes],
        examples: int = 0,
    ) -> PendingCall[Respond]:
        deadline_ns = started_ns + self._timeout_ns if self._timeout_ns else None
        return PendingCall(self._pending, times, respond, started_ns, deadline_ns, encode, examples)

    def _run_examples(
        self,
        route: Route,
        name: str,
        read: Callable[[], dict[str, NDArray[Any]]],
        respond: Respond,
        started_ns: int,
    ) -> None:
        servable = self._find(route)
        kind = CLASSIFY if route.action == "classify" else REGRESS
        write = classification_answer if kind is CLASSIFY else regression_answer
        signature, output_names = kind.called(servable.signatures, name, check_method=self._check_methods)
        inputs = read()
        count = len(inputs["inputs"])
        times = self._pending.times(route.model_name, kind.api)
        call = self._pending_call(
            times, respond, started_ns, lambda outputs: write(kind.result(outputs, count)), count
        )
        call.submit(servable, signature.name, inputs, output_names)

    def _find(self, route: Route) -> Servable:
        return self._models.find(route.model_name, version=route.version, label=route.label)

    def account(self, route: Route) -> bytes:
        """Return the answer of a status or metadata call as JSON, and count the call, by its error if it has one.

        Raises:
            StatusError: INVALID_ARGUMENT without a model's name or, for metadata, for an unknown label; NOT_FOUND for
                an unknown model or version, for metadata also for one that is not AVAILABLE.
        """
        answer = status_answer if route.action == "status" else metadata_answer
        try:
            body = answer(self._models, route)
        except StatusError as error:
            self._pending.failed(route.model_name, error.code)
            raise
        self._pending.metrics.request_count(route.model_name, "OK")
        return body


def _answer_by_row(outputs: Outputs) -> bytes:
    return predict_answer(outputs, row_format=True)


def _answer_by_column(outputs: Outputs) -> bytes:
    return predict_answer(outputs, row_format=False)


def _unless_refused(inputs: dict[str, NDArray[Any]] | StatusError) -> dict[str, NDArray[Any]]:
    if isinstance(inputs, StatusError):
        raise StatusError(inputs.code, inputs.message)
    return inputs
