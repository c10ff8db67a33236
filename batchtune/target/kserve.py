"""Reads and reconfigures a model on a server that speaks KServe v2: its signature, its counters, Triton's repository.

Triton's model repository extension: `load` with a whole configuration as its parameter `config` loads the model anew
with it, and requests under way are answered by the old instances. The files in the repository stay as they are. The
server must run with `--model-control-mode=explicit`. (extension_model_repository.md)
"""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from batchtune.errors import TargetError
from batchtune.target.claim import OriginalModel
from batchtune.target.endpoint import (
    Endpoint,
    answer_of,
    control_channel,
    control_client,
    grpc_words,
    in_words,
)
from batchtune.target.telemetry import Counters
from batchtune.wire.kserve_infer import (
    METADATA_PATH,
    STATISTICS_PATH,
    ModelMetadataRequest,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
    signature_from_metadata,
    signature_from_response,
)
from batchtune.wire.signature import Signature

if TYPE_CHECKING:
    import grpc

EXECUTIONS: Final = ":tensorflow:serving:batching_session:wrapped_run_count"
"""Name of the series that counts batches."""


_Series = dict[str, dict[tuple[tuple[str, str], ...], float]]


def read_kserve_signature(endpoint: Endpoint, name: str) -> Signature:
    """Read the model's inputs and outputs as a signature called `name`, by REST where there is a REST port,
    else by gRPC.

    Raises:
        TargetError: nobody answers, or the metadata list no inputs.
    """
    where = f"{endpoint.rest_url}{endpoint.kserve_path}" if endpoint.rest_port else endpoint.grpc_authority
    try:
        if endpoint.rest_port is not None:
            signature = signature_from_metadata(name, _get_json(endpoint, endpoint.kserve_path))
        else:
            signature = signature_from_response(name, _grpc_metadata(endpoint))
    except ValueError as error:
        raise TargetError(
            f"{where}: {error}", hint="is it a KServe v2 server, and has it the model?"
        ) from error
    if not signature.inputs:
        raise TargetError(f"{where}: the model's metadata list no inputs")
    return signature


def read_kserve_counters(endpoint: Endpoint) -> Counters:
    """Read Triton's statistics of the model, under the names that `telemetry.activity` reads.

    By REST where there is a REST port, else by gRPC. The reading has no series when the server keeps no statistics,
    which are an extension of the protocol.

    Raises:
        TargetError: the server does not answer.
    """
    try:
        if endpoint.rest_port is not None:
            series = _series(_get_json(endpoint, f"{endpoint.kserve_path}/stats"))
        else:
            series = _series(_grpc_statistics(endpoint))
    except (ValueError, KeyError, TypeError, AttributeError):
        series = {}
    return Counters(monotonic_s=time.monotonic(), server_cpu_s=None, series=series)


def _series(document: Any) -> _Series:
    """Return the series of a statistics document: rows are what Triton calls inferences; a batch takes from
    reading its inputs to writing its outputs.

    A number may be a text, as JSON writes the 64-bit numbers of protocol buffers.
    """
    series: _Series = defaultdict(lambda: defaultdict(float))

    def add(name: str, value: str | float, **labels: str) -> None:
        series[name][tuple(labels.items())] += float(value)

    for model in document["model_stats"]:
        totals = model["inference_stats"]
        add(":tensorflow:serving:request_count", totals["success"]["count"], status="OK")
        add(":tensorflow:serving:request_count", totals["fail"]["count"], status="FAILED")
        add(EXECUTIONS, model["execution_count"])
        add(":tensorflow:serving:batching_session:processed_batch_size_sum", model["inference_count"])
        add(":tensorflow:serving:batching_session:queuing_latency_sum", float(totals["queue"]["ns"]) / 1e3)
        add(":tensorflow:serving:batching_session:queuing_latency_count", totals["queue"]["count"])
        for batch in model["batch_stats"]:
            rows = str(batch["batch_size"])
            parts = (batch[f"compute_{part}"]["ns"] for part in ("input", "infer", "output"))
            micros = sum(map(float, parts)) / 1e3
            add(":batchtune:serving:batch_execution_count", batch["compute_infer"]["count"], batch_size=rows)
            add(":batchtune:serving:batch_execution_micros_total", micros, batch_size=rows)
            add(":batchtune:serving:device_busy_micros_total", micros)
    return series


def _get_json(endpoint: Endpoint, path: str) -> Any:
    answer = answer_of(endpoint, path)
    try:
        return answer.json()
    except ValueError as error:
        raise ValueError(f"HTTP {answer.status_code} without JSON") from error


def _grpc_metadata(endpoint: Endpoint) -> bytes:
    import grpc

    try:
        return _call(endpoint, METADATA_PATH, ModelMetadataRequest)
    except grpc.RpcError as error:
        raise _target_error(endpoint, error) from error


def _grpc_statistics(endpoint: Endpoint) -> dict[str, Any]:
    """Return a ModelStatisticsResponse as the JSON of REST; raises ValueError where the server keeps no
    statistics."""
    import grpc

    try:
        message = _call(endpoint, STATISTICS_PATH, ModelStatisticsRequest)
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise _target_error(endpoint, error) from error
        raise ValueError(f"no statistics: {error.code().name}") from error
    try:
        response = ModelStatisticsResponse.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not a ModelStatisticsResponse: {error}") from error
    document: dict[str, Any] = json_format.MessageToDict(
        response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


def _call(endpoint: Endpoint, path: str, request_class: Any) -> bytes:
    """Return the answer to a request that names the model and its version; raises grpc.RpcError."""
    version = "" if endpoint.model_version is None else str(endpoint.model_version)
    with control_channel(endpoint) as channel:
        call = channel.unary_unary(
            path, request_serializer=request_class.SerializeToString, response_deserializer=bytes
        )
        return bytes(call(request_class(name=endpoint.model_name, version=version), timeout=5.0))


def _target_error(endpoint: Endpoint, error: grpc.RpcError) -> TargetError:
    return TargetError(f"{endpoint.grpc_authority}: {grpc_words(error)}")


# The model repository of a Triton.

EXPLICIT: Final = "start the server with --model-control-mode=explicit and --load-model=MODEL"
"""Hint of the error of a server that takes no orders, so that nothing was changed."""
ADDED: Final = (
    "where the model's backend adds dynamic_batching by itself, start Triton with --disable-auto-complete-config: one "
    "that is launched here by target.flags"
)
"""Hint of the error of a model that batches although it was not requested."""
_ASKING_S: Final = 5.0


MARK: Final = "batchtune_trial"
"""Name of a parameter in a model's configuration that says which process applied a trial's configuration."""


def marked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's configuration with this process and machine noted in its parameter MARK, for a reader who
    finds a trial's configuration on the server."""
    who = f"process {os.getpid()} on {platform.node()}"
    return {**config, "parameters": {**(config.get("parameters") or {}), MARK: {"string_value": who}}}


def is_marked(config: Mapping[str, Any]) -> bool:
    """Whether the configuration has MARK: a sweep gave it to the model for a trial."""
    return MARK in (config.get("parameters") or {})


def require_unmarked(config: Mapping[str, Any], *, model: str) -> None:
    """Check that no sweep gave the model this configuration for a trial.

    Raises:
        TargetError: one did, which still runs or was killed; the message names its process and machine, where the
            original is saved.
    """
    mark = (config.get("parameters") or {}).get(MARK)
    if mark is not None:
        who = mark.get("string_value") if isinstance(mark, Mapping) else mark
        raise TargetError(
            f"{model} has a configuration that a sweep gave it for a trial: {who}",
            hint="wait until that has ended; if it was killed, run `batchtune restore RUN` there, or load the model "
            f"from its files: POST /v2/repository/models/{model}/load",
        )


class TritonRepository:
    """The model repository API of a Triton, for one model; each call returns when the server has done it.

    `limit_s`: seconds after which a load or unload without an answer raises TargetError.
    """

    def __init__(self, endpoint: Endpoint, *, limit_s: float = 120.0) -> None:
        self._endpoint = endpoint
        self._limit_s = limit_s
        self._model = endpoint.model_name

    def states(self) -> dict[str, str]:
        """Return model name -> state, such as READY or UNAVAILABLE, for the whole repository; READY if one version of
        the model is.

        Raises:
            TargetError: nobody answers, or what answers is no Triton.
        """
        status, document = self._call("POST", "/v2/repository/index", {}, limit_s=_ASKING_S)
        is_index = isinstance(document, list) and all(isinstance(model, dict) for model in document)
        if status != 200 or not is_index:
            raise TargetError(
                f"{self._endpoint.rest_url} has no model repository API: {_reason(status, document)}",
                hint="kind triton needs Triton's REST port (8000 unless configured otherwise)",
            )
        states: dict[str, str] = {}
        for model in document:
            name, state = str(model.get("name")), str(model.get("state", "UNAVAILABLE"))
            if states.get(name) != "READY":
                states[name] = state
        return states

    def require_model(self) -> bool:
        """Check that the repository has the model; return whether it is loaded.

        Raises:
            TargetError: nobody answers, or the model is not in the repository; the hint lists the models that are.
        """
        states = self.states()
        if self._model not in states:
            raise TargetError(
                f"{self._endpoint.rest_url} has no model {self._model!r} in its repository",
                hint=f"set target.model to one of: {', '.join(sorted(states)) or 'none'}",
            )
        return states[self._model] == "READY"

    def config(self) -> dict[str, Any]:
        """Read the configuration that the loaded model runs with; Triton spells out all fields.

        Raises:
            TargetError: nobody answers, or the model is not loaded.
        """
        return self._config_of(self._model)

    def ensembles(self) -> list[str]:
        """List the served ensembles that have the model as a step, among the first 100 models of the
        repository.

        Raises:
            TargetError: nobody answers.
        """
        served = [name for name, state in self.states().items() if state == "READY" and name != self._model]
        asked = served[:100]  # of thousands, perhaps; to read each takes some milliseconds
        return [name for name in asked if self._model in _steps(self._config_of(name))]

    def _config_of(self, model: str) -> dict[str, Any]:
        path = f"/v2/models/{quote(model, safe='')}/config"
        status, document = self._call("GET", path, limit_s=_ASKING_S)
        if status != 200 or not isinstance(document, dict):
            raise TargetError(f"{self._endpoint.rest_url}{path}: {_reason(status, document)}")
        return document

    def load(self, config: Mapping[str, Any] | None = None) -> None:
        """Load the model with this configuration, in the form of Triton's JSON; None: with the one in the model's own
        files.

        Raises:
            TargetError: the server does not answer, refused it, or does not allow models to be loaded by request.
        """
        import orjson

        parameters = {} if config is None else {"config": orjson.dumps(config).decode()}
        self._order("load", {"parameters": parameters} if parameters else {})

    def unload(self) -> None:
        """Take the model out of service.

        Raises:
            TargetError: the server refused, or does not answer.
        """
        self._order("unload", {})

    def _order(self, what: str, body: Mapping[str, Any]) -> None:
        path = f"/v2/repository/models/{quote(self._model, safe='')}/{what}"
        status, document = self._call("POST", path, body, limit_s=self._limit_s)
        if status != 200:
            reason = _reason(status, document)
            unread = "its configuration, or its folder, is wrong: the server's log says why"
            hint = EXPLICIT if "not allowed" in reason else unread if "failed to poll" in reason else ""
            raise TargetError(f"the server did not {what} {self._model}: {reason}", hint=hint)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float
    ) -> tuple[int, Any]:
        import httpx

        try:
            with control_client(self._endpoint, timeout_s=limit_s) as client:
                answer = client.request(method, path, json=body)
        except httpx.ReadTimeout as error:
            raise TargetError(
                f"{self._endpoint.rest_url}{path}: no answer within {limit_s:g} s",
                hint="a big model may need a longer target.ready_timeout",
            ) from error
        except httpx.HTTPError as error:
            raise TargetError(
                f"{self._endpoint.rest_url}{path}: {in_words(error)}",
                hint="is the server up, and is this its port?",
            ) from error
        try:
            return answer.status_code, answer.json() if answer.content else None
        except ValueError:
            return answer.status_code, answer.text[:300]


def put_back(repository: TritonRepository, original: OriginalModel) -> None:
    """Load the model with the configuration that it had before the sweep; unload it if it was not served then.

    Raises:
        TargetError: the server is gone, refuses, or then reports another configuration.
    """
    if not original.loaded:
        repository.unload()
        return
    repository.load(original.config)
    now = repository.config()
    if now != original.config:
        differing = sorted(
            name for name in {*now, *original.config} if now.get(name) != original.config.get(name)
        )
        raise TargetError(
            f"{original.model} was loaded with what it had, but now differs in: {', '.join(differing)}"
        )


def _steps(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the models that an ensemble calls."""
    steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
    return {str(step.get("model_name")) for step in steps}


def _reason(status: int, document: Any) -> str:
    if isinstance(document, dict) and "error" in document:
        return str(document["error"])
    return f"HTTP {status}" + (f": {document}" if isinstance(document, str) and document else "")
