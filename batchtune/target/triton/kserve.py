"""Reads the signature of a model from a server that speaks KServe v2 (Triton), and what the server
counted."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from batchtune.errors import TargetError
from batchtune.target.endpoint import Endpoint, answer_of, control_channel, grpc_words
from batchtune.target.telemetry import Counters
from batchtune.wire.kserve.infer import (
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

    By REST where there is a REST port, else by gRPC. A reading without series when the server keeps no statistics: they
    are an extension.

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
