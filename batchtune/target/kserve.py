"""What does a server that speaks KServe v2 (Triton) say of its model, and what did it count?"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from batchtune.errors import TargetError
from batchtune.target.endpoint import Endpoint, control_channel, control_client, in_words
from batchtune.target.telemetry import Counters
from batchtune.wire.kserve_messages import METADATA_PATH, ModelMetadataRequest
from batchtune.wire.kserve_metadata import signature_from_metadata, signature_from_response
from batchtune.wire.tensors import Signature

_LIMIT_S = 5.0
_COMPUTE = ("compute_input", "compute_infer", "compute_output")

_Series = dict[str, dict[tuple[tuple[str, str], ...], float]]


def read_kserve_signature(endpoint: Endpoint, name: str) -> Signature:
    """The model's inputs and outputs under `name`, by REST where there is a REST port, else by gRPC.

    Raises:
        TargetError: nobody answers, or the model tells no inputs.
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
        raise TargetError(f"{where}: the model's metadata tell no inputs")
    return signature


def read_kserve_counters(endpoint: Endpoint) -> Counters:
    """Triton's statistics of the model under the names that `telemetry.activity` reads.

    A reading without series when there is no REST port, or when the server keeps no statistics (an extension).

    Raises:
        TargetError: the server does not answer.
    """
    if endpoint.rest_port is None:
        return Counters(monotonic_s=time.monotonic(), server_cpu_s=None)
    try:
        series = _series(_get_json(endpoint, f"{endpoint.kserve_path}/stats"))
    except (ValueError, KeyError, TypeError, AttributeError):
        series = {}
    return Counters(monotonic_s=time.monotonic(), server_cpu_s=None, series=series)


def _series(document: Any) -> _Series:
    """Rows are what Triton calls inferences; a batch takes from reading its inputs to writing its outputs."""
    series: _Series = defaultdict(lambda: defaultdict(float))

    def add(name: str, value: float, **labels: str) -> None:
        series[name][tuple(labels.items())] += value

    for model in document["model_stats"]:
        totals = model["inference_stats"]
        add(":tensorflow:serving:request_count", totals["success"]["count"], status="OK")
        add(":tensorflow:serving:request_count", totals["fail"]["count"], status="FAILED")
        add(":tensorflow:serving:batching_session:wrapped_run_count", model["execution_count"])
        add(":tensorflow:serving:batching_session:processed_batch_size_sum", model["inference_count"])
        add(":tensorflow:serving:batching_session:queuing_latency_sum", totals["queue"]["ns"] / 1e3)
        add(":tensorflow:serving:batching_session:queuing_latency_count", totals["queue"]["count"])
        for batch in model["batch_stats"]:
            rows = str(batch["batch_size"])
            micros = sum(batch[part]["ns"] for part in _COMPUTE) / 1e3
            add(":batchtune:serving:batch_execution_count", batch["compute_infer"]["count"], batch_size=rows)
            add(":batchtune:serving:batch_execution_micros_total", micros, batch_size=rows)
            add(":batchtune:serving:device_busy_micros_total", micros)
    return series


def _get_json(endpoint: Endpoint, path: str) -> Any:
    import httpx

    try:
        with control_client(endpoint) as client:
            answer = client.get(path)
    except httpx.HTTPError as error:
        raise TargetError(f"{endpoint.rest_url}{path}: {in_words(error)}") from error
    try:
        return answer.json()
    except ValueError as error:
        raise ValueError(f"HTTP {answer.status_code} without JSON") from error


def _grpc_metadata(endpoint: Endpoint) -> bytes:
    import grpc

    version = "" if endpoint.model_version is None else str(endpoint.model_version)
    request = ModelMetadataRequest(name=endpoint.model_name, version=version)
    with control_channel(endpoint) as channel:
        call = channel.unary_unary(
            METADATA_PATH,
            request_serializer=ModelMetadataRequest.SerializeToString,
            response_deserializer=bytes,
        )
        try:
            return bytes(call(request, timeout=_LIMIT_S))
        except grpc.RpcError as error:
            raise TargetError(f"{endpoint.grpc_authority}: {error.code().name}: {error.details()}") from error
