"""Reaches a server that somebody else runs: nothing is launched, stopped or reconfigured."""

from __future__ import annotations

from batchtune.batching.parameters import (
    LENGTH_BUCKETS,
    Configuration,
    format_length_buckets,
    from_dict,
    parse_length_buckets,
)
from batchtune.batching.triton_config import configuration_as_found, found_batching
from batchtune.errors import BatchingParametersError, TargetError
from batchtune.target.endpoint import (
    Endpoint,
    answer_of,
    control_channel,
    grpc_words,
    no_such_signature,
    read_signature,
)
from batchtune.target.kserve import TritonRepository, read_kserve_counters, read_kserve_signature
from batchtune.target.telemetry import Counters, read_counters
from batchtune.target.tfserving import TUNING_PATH
from batchtune.wire.signature import Signature
from batchtune.wire.tfserving.messages import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    SignatureDefMap,
)
from batchtune.wire.tfserving.tensors import signature_from_def


def external_signature(endpoint: Endpoint, name: str) -> Signature:
    """Read the model's signature from a server that speaks TensorFlow Serving's API, by REST where there is a
    REST port, else by gRPC.

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
    """Read the configuration in force from a batchtune server's tuning API; None: there is no such API or no REST port,
    or its answer is not understood."""
    if endpoint.rest_port is None:
        return None
    try:
        answer = answer_of(endpoint, TUNING_PATH)
        parameters = answer.json() if answer.status_code == 200 else {}
        enabled = parameters.pop("enable_batching")
        parameters.pop("batch_scheduler", None)
        own = parameters.pop("models", {}).get(endpoint.model_name)
        if own is not None:
            of_all = ("num_batch_threads", "thread_pool_name", LENGTH_BUCKETS)
            parameters = {name: parameters[name] for name in of_all if name in parameters} | own
        buckets = parse_length_buckets(parameters.pop(LENGTH_BUCKETS, ()))
        flags = ((LENGTH_BUCKETS, format_length_buckets(buckets)),) if buckets else ()
        return Configuration(batching=from_dict(parameters) if enabled else None, flags=flags)
    except (TargetError, ValueError, KeyError, TypeError, AttributeError, BatchingParametersError):
        return None


def read_tritons_parameters(endpoint: Endpoint) -> Configuration | None:
    """Read the configuration in force from a Triton's model configuration.

    None: no Configuration can express its batching, there is no REST port, or the server does not answer.
    """
    if endpoint.rest_port is None:
        return None
    try:
        batching = found_batching(TritonRepository(endpoint).config())
    except (TargetError, BatchingParametersError, ValueError, TypeError, AttributeError):
        return None
    return configuration_as_found(batching, batching=False)


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
            answer = call(request, timeout=5.0)
        except grpc.RpcError as error:
            raise TargetError(f"{endpoint.grpc_authority}: {grpc_words(error)}") from error
    definitions = SignatureDefMap()
    if not answer.metadata["signature_def"].Unpack(definitions):
        raise TargetError(f"{endpoint.grpc_authority}: the metadata contain no signature_def")
    return definitions


class ExternalTarget:
    """A running server that is loaded as it is, with the methods of the other targets.

    `in_force`: the configuration that the server reports; None: it reports none. `kserve`: it speaks KServe v2 instead
    of TensorFlow Serving's APIs.
    """

    def __init__(self, endpoint: Endpoint, *, kserve: bool = False) -> None:
        self.endpoint = endpoint
        self.in_force: Configuration | None = None
        self._kserve = kserve

    def apply(self, _configuration: Configuration) -> None:
        """Change nothing, whatever the configuration; read the one in force if the server reports it."""
        read = read_tritons_parameters if self._kserve else read_parameters
        self.in_force = read(self.endpoint)

    def counters(self) -> Counters:
        """Read the server's metrics once; without a REST port the reading has no series, unless the server speaks
        KServe v2, which reports by gRPC too.

        Raises:
            TargetError: the server does not answer.
        """
        return read_kserve_counters(self.endpoint) if self._kserve else read_counters(self.endpoint)

    def signature(self, name: str) -> Signature:
        """Read the signature called `name`; raises TargetError where there is none, or the server does not answer."""
        if self._kserve:
            return read_kserve_signature(self.endpoint, name)
        return external_signature(self.endpoint, name)

    def alive(self) -> bool:
        """Return True: only a request can show whether the server still runs."""
        return True

    def log_tail(self) -> str:
        """Return a line that says that the log is with the server's owner."""
        return "  (its log is with its owner)"

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""
