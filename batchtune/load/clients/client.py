"""Makes the client of a job and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import UsageError
from batchtune.load.clients.source import Client, Source
from batchtune.load.samples import Recorder
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.workload import Protocol, transport_of
from batchtune.target.endpoint import Endpoint
from batchtune.wire.kserve_infer import INFER_PATH, JSON_LENGTH_HEADER, json_length

if TYPE_CHECKING:
    from batchtune.wire.grpc.client_connection import PreparedCall

PREDICT_PATH = "/tensorflow.serving.PredictionService/Predict"


def make_client(
    endpoint: Endpoint,
    requests: RequestSet,
    request_order: NDArray[np.int32],
    recorder: Recorder,
    source: Source,
    *,
    in_flight_max: int,
    timeout_s: float,
) -> Client:
    """Make the client for the set's transport; the i-th request is number `request_order[i % len(request_order)]` of
    the set.

    `in_flight_max`: connections of a REST client, streams of a gRPC one. `timeout_s`: to open a connection.

    Raises:
        UsageError: the endpoint has no port for the protocol.
    """
    if transport_of(requests.protocol) == "grpc":
        from batchtune.load.clients.grpc import GrpcClient

        _require(endpoint.grpc_port, "gRPC")
        calls = grpc_calls(endpoint, requests)
        return GrpcClient(
            endpoint,
            [calls[which] for which in request_order.tolist()],
            recorder,
            source,
            streams_max=in_flight_max,
            timeout_s=timeout_s,
        )
    from batchtune.load.clients.rest import RestClient, StreamReader

    _require(endpoint.rest_port, "REST")
    posts = http_posts(endpoint, requests)
    return RestClient(
        endpoint,
        [posts[which] for which in request_order.tolist()],
        recorder,
        source,
        connections_max=in_flight_max,
        timeout_s=timeout_s,
        ok=requests.ok if requests.protocol == "http" else None,
        streams=StreamReader(recorder.columns) if requests.protocol == "openai" else None,
    )


def http_posts(endpoint: Endpoint, requests: RequestSet) -> list[bytes]:
    """Encode each request of the set as a whole HTTP/1.1 request, head and body."""
    extra = "".join(f"{name}: {value}\r\n" for name, value in requests.headers)
    path = requests.path or http_path(endpoint, requests.protocol)
    return [
        (
            f"{requests.method} {path} HTTP/1.1\r\nHost: {endpoint.rest_authority}\r\n"
            f"{_header_lines(requests.protocol, body)}{extra}Content-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        + body
        for body in requests.bodies
    ]


def grpc_calls(endpoint: Endpoint, requests: RequestSet) -> Sequence[PreparedCall]:
    """Encode each request of the set as a prepared gRPC call."""
    from batchtune.wire.grpc.client_connection import prepare_call

    return [
        prepare_call(
            grpc_path(requests.protocol),
            endpoint.grpc_authority,
            body,
            metadata=requests.headers,
            timeout_s=requests.timeout_s,
            scheme="https" if endpoint.tls else "http",
        )
        for body in requests.bodies
    ]


def http_path(endpoint: Endpoint, protocol: Protocol) -> str:
    """Return the URL path that a request of this protocol is posted to: `/v1/models/NAME:predict`,
    `/v2/models/NAME/infer`, or for http that of the endpoint."""
    if protocol == "http":
        return endpoint.path
    return f"{endpoint.model_path}:predict" if protocol == "rest" else f"{endpoint.kserve_path}/infer"


def grpc_path(protocol: Protocol) -> str:
    """Return the gRPC method that a request of this protocol calls, as "/package.Service/Method"."""
    return PREDICT_PATH if protocol == "grpc" else INFER_PATH


def content_headers(protocol: Protocol, body: bytes) -> dict[str, str]:
    """Return the HTTP headers that describe `body` as a request of this protocol, without Content-Length:
    `{"Content-Type": "application/json"}`, for kserve_rest_binary `application/octet-stream` and the length of the
    JSON."""
    if protocol == "kserve_rest_binary":
        return {"Content-Type": "application/octet-stream", JSON_LENGTH_HEADER: str(json_length(body))}
    return {"Content-Type": "application/json"}


def _header_lines(protocol: Protocol, body: bytes) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in content_headers(protocol, body).items())


def _require(port: int | None, protocol: str) -> None:
    if port is None:
        raise UsageError(f"the target does not answer {protocol}", hint="choose the other request.protocol")
