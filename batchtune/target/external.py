"""How do we reach a server that somebody else runs? Nothing is launched, nothing is stopped, nothing reconfigured."""

from __future__ import annotations

from urllib.parse import urlsplit

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.errors import BatchingParametersError, TargetError, UsageError
from batchtune.target.endpoint import (
    Endpoint,
    TlsOptions,
    control_channel,
    control_client,
    grpc_words,
    no_such_signature,
    read_signature,
)
from batchtune.target.kserve import read_kserve_counters, read_kserve_signature
from batchtune.target.telemetry import Counters, read_counters
from batchtune.target.tfserving import TUNING_PATH, ApplyRecord
from batchtune.wire.signature import Signature
from batchtune.wire.tfserving.messages import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    SignatureDefMap,
)
from batchtune.wire.tfserving.tensors import signature_from_def

_LIMIT_S = 5.0


def external_endpoint(
    *, model_name: str, rest_url: str | None, grpc_url: str | None, tls: TlsOptions | None = None
) -> Endpoint:
    """The endpoint behind `--rest-url http[s]://HOST:PORT` and `--grpc-url HOST:PORT` (or `grpc[s]://…`).

    Raises:
        UsageError: a URL without host or port, of another scheme, or two URLs of different hosts.
    """
    hosts, ports, secure = [], {}, False
    for option, url, schemes in (
        ("--rest-url", rest_url, ("http", "https")),
        ("--grpc-url", grpc_url, ("grpc", "grpcs")),
    ):
        if url is None:
            continue
        host, port, scheme = _split(option, url if "://" in url else f"{schemes[0]}://{url}", schemes)
        hosts.append(host)
        ports[option] = port
        secure = secure or scheme == schemes[1]
    if not hosts or len(set(hosts)) > 1:
        raise UsageError("--rest-url and --grpc-url must name one host", hint="give the same host in both")
    return Endpoint(
        model_name=model_name,
        host=hosts[0],
        rest_port=ports.get("--rest-url"),
        grpc_port=ports.get("--grpc-url"),
        tls=(tls or TlsOptions()) if secure else None,
    )


def external_signature(endpoint: Endpoint, name: str) -> Signature:
    """The model's own metadata, by REST where there is a REST port, else by gRPC.

    Raises:
        TargetError: nobody answers, or there is no such model or signature.
    """
    if endpoint.rest_port is not None:
        return read_signature(endpoint, name)
    definitions = _grpc_signatures(endpoint)
    if name not in definitions.signature_def:
        raise no_such_signature(endpoint, name, definitions.signature_def)
    return signature_from_def(name, definitions.signature_def[name])


def read_parameters(endpoint: Endpoint) -> Configuration | None:
    """What is in force by a batchtune server's tuning API; None: it has none, or there is no REST port."""
    import httpx

    if endpoint.rest_port is None:
        return None
    try:
        with control_client(endpoint) as client:
            answer = client.get(TUNING_PATH)
        parameters = answer.json() if answer.status_code == 200 else {}
        enabled = parameters.pop("enable_batching")
        parameters.pop("batch_scheduler", None)
        return Configuration(batching=from_dict(parameters) if enabled else None)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, BatchingParametersError):
        return None


def _grpc_signatures(endpoint: Endpoint) -> SignatureDefMap:
    import grpc

    request = GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = endpoint.model_name
    with control_channel(endpoint) as channel:
        call = channel.unary_unary(
            "/tensorflow.serving.PredictionService/GetModelMetadata",
            request_serializer=GetModelMetadataRequest.SerializeToString,
            response_deserializer=GetModelMetadataResponse.FromString,
        )
        try:
            answer = call(request, timeout=_LIMIT_S)
        except grpc.RpcError as error:
            raise TargetError(f"{endpoint.grpc_authority}: {grpc_words(error)}") from error
    definitions = SignatureDefMap()
    if not answer.metadata["signature_def"].Unpack(definitions):
        raise TargetError(f"{endpoint.grpc_authority}: the metadata hold no signature_def")
    return definitions


def _split(option: str, url: str, schemes: tuple[str, str]) -> tuple[str, int, str]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{option}: {url!r}: {error}", hint="write HOST:PORT") from error
    if parts.scheme not in schemes or not host or port is None or parts.path not in {"", "/"}:
        raise UsageError(f"{option}: {url!r} is no address", hint=f"write {schemes[0]}://HOST:PORT")
    return host, port, parts.scheme


class ExternalTarget:
    """A running server as the rest of the house sees a target; its configuration is its owner's business.

    `in_force` None: it does not tell. `kserve`: it speaks KServe v2 instead of TensorFlow Serving's APIs.
    """

    def __init__(self, endpoint: Endpoint, *, kserve: bool = False) -> None:
        self.endpoint = endpoint
        self.in_force: Configuration | None = None
        self._kserve = kserve

    def apply(self, _configuration: Configuration) -> ApplyRecord:
        """Nothing is changed; what is in force is asked for, where the server has a way to tell."""
        self.in_force = None if self._kserve else read_parameters(self.endpoint)
        return ApplyRecord(how="unchanged", seconds=0.0)

    def counters(self) -> Counters:
        """One reading of its metrics; without a REST port a reading without series."""
        return read_kserve_counters(self.endpoint) if self._kserve else read_counters(self.endpoint)

    def signature(self, name: str) -> Signature:
        if self._kserve:
            return read_kserve_signature(self.endpoint, name)
        return external_signature(self.endpoint, name)

    def alive(self) -> bool:
        return True

    def log_tail(self) -> str:
        return "  (its log is with its owner)"

    def close(self) -> None:
        """Nothing to stop."""
