"""The gRPC services of tensorflow_model_server: model service, health, reflection; a table of methods."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from batchtune.server.calls.pending_call import PendingCalls
from batchtune.server.grpc_api.classify_regress import InferenceCalls, parse_message
from batchtune.server.grpc_api.predict import PredictCalls, read_model_spec
from batchtune.server.metrics import Metrics
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream, dispatcher
from batchtune.wire.status import FAULT, GRPC_CODES, StatusError
from batchtune.wire.tfserving.messages import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelVersionStatus,
    ReloadConfigRequest,
    ReloadConfigResponse,
    SignatureDefMap,
    new_pool,
)

REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def reflection(services: Sequence[str]) -> Callable[[GrpcStream], None]:
    """Return a function that serves ServerReflectionInfo (v1 and v1alpha, which differ only in name) on a stream.

    It gives one answer for each message, until the client ends the stream; an unknown symbol is an error inside the
    answer. services: full names of the services to list.
    """
    from grpc_reflection.v1alpha.reflection import ReflectionServicer  # brings grpcio along

    servicer: Any = ReflectionServicer(services, _described_pool())

    def serve(stream: GrpcStream) -> None:
        def answer(message: bytes) -> None:
            try:
                request = parse_message(ServerReflectionRequest, message)
            except StatusError as error:
                stream.finish(error.code, error.message)
                return
            response = next(servicer.ServerReflectionInfo([request], None))
            response.valid_host = request.host
            stream.send(response.SerializeToString())

        stream.on_message = answer
        stream.on_end = stream.finish
        stream.on_cancel = lambda: stream.finish("CANCELLED")

    return serve


def _described_pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptors of TensorFlow Serving, the health service and both versions of reflection."""
    pool = new_pool()
    health, reflection = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    HealthCheckRequest.DESCRIPTOR.file.CopyToProto(health)
    ServerReflectionRequest.DESCRIPTOR.file.CopyToProto(reflection)
    version_1 = text_format.Parse(
        str(reflection).replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto()
    )
    for file in (health, reflection, version_1):
        pool.Add(file)
    return pool


# grpc.health.v1.Health, as grpc's own service answers.
#
# "" asks for the whole server, and so do TensorFlow Serving's services, by their full names and by the short ones under
# which it registers them (server.cc); a model's name asks for that model.

_POLL_S = 0.5


class HealthCalls:
    """Answers Check and Watch of the health service; services: full names, each of which means the whole server."""

    def __init__(self, models: ModelRepository, services: Iterable[str]) -> None:
        self._models = models
        full = tuple(services)
        self._services = frozenset(["", *full, *(name.rpartition(".")[2] for name in full)])
        self._stopping = False
        self._watchers: dict[GrpcStream, tuple[str, str]] = {}
        self._polling = False

    def stop(self) -> None:
        """From now on answer NOT_SERVING, and end every watch with that status: a drain waits for all streams."""
        self._stopping = True
        self._tell_watchers()
        for stream in list(self._watchers):
            self._end(stream)

    def check(self, call: GrpcCall) -> None:
        """Answer Check: SERVING or NOT_SERVING, or the error NOT_FOUND for an unknown service."""
        try:
            status = self._status(parse_message(HealthCheckRequest, call.message).service)
            if status == "SERVICE_UNKNOWN":
                raise StatusError("NOT_FOUND", "unknown service")
        except StatusError as error:
            call.refuse(error)
            return
        call.reply(_response(status))

    def watch(self, stream: GrpcStream) -> None:
        """Serve Watch: send the status now and after each change; the status is read every _POLL_S seconds."""

        unknown_name_bytes_max = 256  # Of a name that is watched before it exists; a client may send 64 MiB.

        def start(message: bytes) -> None:
            stream.on_message = None  # a watch has one request
            try:
                service = parse_message(HealthCheckRequest, message).service
            except StatusError as error:
                stream.finish(error.code, error.message)
                return
            status = self._status(service)
            if status == "SERVICE_UNKNOWN":
                service = service.encode()[:unknown_name_bytes_max].decode(errors="ignore")
            self._watchers[stream] = (service, status)
            self._tell(stream, status)
            if self._stopping:
                self._end(stream)
            elif not self._polling:
                self._polling = True
                asyncio.get_running_loop().call_later(_POLL_S, self._poll)

        stream.on_message = start
        stream.on_cancel = lambda: self._forget(stream)

    def _forget(self, stream: GrpcStream) -> None:
        self._watchers.pop(stream, None)
        stream.finish("CANCELLED")

    def _end(self, stream: GrpcStream) -> None:
        self._watchers.pop(stream, None)
        stream.finish("UNAVAILABLE", "The server is shutting down")

    def _poll(self) -> None:
        self._tell_watchers()
        self._polling = bool(self._watchers)
        if self._polling:
            asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def _tell_watchers(self) -> None:
        statuses: dict[str, str] = {}
        for stream, (service, last) in list(self._watchers.items()):
            if stream.answered:
                del self._watchers[stream]
                continue
            status = statuses.get(service)
            if status is None:
                status = statuses[service] = self._status(service)
            if status != last:
                self._watchers[stream] = (service, status)
                self._tell(stream, status)

    def _tell(self, stream: GrpcStream, status: str) -> None:
        """Send a status; stop watching where the connection has ended the stream, unread for too long."""
        stream.send(_response(status))
        if stream.answered:
            self._watchers.pop(stream, None)

    def _status(self, service: str) -> str:
        names = self._models.names()
        if service in self._services:
            serving = all(self._is_available(name) for name in names)
        elif service in names:
            serving = self._is_available(service)
        else:
            return "SERVICE_UNKNOWN"
        return "SERVING" if serving and not self._stopping else "NOT_SERVING"

    def _is_available(self, name: str) -> bool:
        try:
            self._models.find(name)
        except StatusError:
            return False
        return True


def _response(status: str) -> bytes:
    number = HealthCheckResponse.ServingStatus.Value(status)
    return bytes(HealthCheckResponse(status=number).SerializeToString())


def make_grpc_api(
    repository: ModelRepository, metrics: Metrics, flags: ServerFlags
) -> tuple[Callable[[GrpcCall], None], Mapping[str, Callable[[GrpcStream], None]], Callable[[], None]]:
    """Make the services of a repository, as functions to be called on the event loop.

    Returns (a function that starts a unary call, path of a method -> function that serves a stream, a function that
    makes the health service answer NOT_SERVING, before the server drains).
    """
    pending: PendingCalls[GrpcCall] = PendingCalls(
        *(metrics, "GRPC", repository),
        reply=GrpcCall.reply,
        refuse=GrpcCall.refuse,
        is_gone=attrgetter("cancelled"),
    )
    check = flags.enable_signature_method_name_check
    as_content = flags.enable_serialization_as_tensor_content
    predict = PredictCalls(repository, pending, as_content=as_content, check_methods=check)
    inference = InferenceCalls(repository, pending, check_methods=check)
    models = ModelServiceCalls(repository, metrics.first_values)
    prediction_service = "tensorflow.serving.PredictionService"
    model_service = "tensorflow.serving.ModelService"
    health = HealthCalls(repository, (prediction_service, model_service))
    handlers: dict[str, Callable[[GrpcCall], None]] = {
        f"/{prediction_service}/Predict": predict.start,
        f"/{prediction_service}/Classify": inference.classify,
        f"/{prediction_service}/Regress": inference.regress,
        f"/{prediction_service}/MultiInference": inference.multi_inference,
        f"/{prediction_service}/GetModelMetadata": models.metadata,
        f"/{model_service}/GetModelStatus": models.status,
        f"/{model_service}/HandleReloadConfigRequest": models.reload_config,
    }
    streams: dict[str, Callable[[GrpcStream], None]] = {}
    services = [prediction_service, model_service]
    health_service = "grpc.health.v1.Health"
    if flags.enable_grpc_healthcheck_service:
        services.append(health_service)
        handlers[f"/{health_service}/Check"] = health.check
        streams[f"/{health_service}/Watch"] = health.watch
    if flags.enable_grpc_reflection:
        services.extend(REFLECTION_SERVICES)
        serve_reflection = reflection(services)
        for name in REFLECTION_SERVICES:
            streams[f"/{name}/ServerReflectionInfo"] = serve_reflection
    return dispatcher(handlers), streams, health.stop


# ModelService: what the server says of its models, and how it is told to serve others.


_logger = logging.getLogger(__name__)


class ModelServiceCalls:
    """Answers GetModelMetadata, GetModelStatus and HandleReloadConfigRequest.

    metrics: a function of names of metrics that returns name -> present value (`Metrics.first_values`).
    """

    def __init__(self, models: ModelRepository, metrics: Callable[[Iterable[str]], dict[str, int]]) -> None:
        self._models = models
        self._metrics = metrics
        self._reloads: set[asyncio.Task[None]] = set()
        # Their own thread: they wait for models to load, and follow one another.
        self._reloader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")

    def metadata(self, call: GrpcCall) -> None:
        """Answer GetModelMetadata; a wrong request, an unknown model or version fails the call with a gRPC status."""
        try:
            answer = self._metadata(parse_message(GetModelMetadataRequest, call.message))
        except StatusError as error:
            call.refuse(error)
            return
        call.reply(answer)

    def status(self, call: GrpcCall) -> None:
        """Answer GetModelStatus; a version label is ignored, as TensorFlow Serving does. A wrong request, an unknown
        model or version fails the call with a gRPC status."""
        try:
            request = parse_message(GetModelStatusRequest, call.message)
            if not request.HasField("model_spec"):
                raise StatusError("INVALID_ARGUMENT", "Missing ModelSpec")
            name, version, _, _ = read_model_spec(request.model_spec)
            states = self._models.statuses(name, version=version)
        except StatusError as error:
            call.refuse(error)
            return
        response = GetModelStatusResponse()
        for state in states:
            entry = response.model_version_status.add(
                version=state.version, state=ModelVersionStatus.State.Value(state.state)
            )
            entry.status.error_code = GRPC_CODES[state.error_code]
            entry.status.error_message = state.error_message
        call.reply(response.SerializeToString())

    def reload_config(self, call: GrpcCall) -> None:
        """Start HandleReloadConfigRequest: answered when the models are available; where one has failed, the call fails
        with the status of `ModelRepository.reload_config`, and with UNAVAILABLE while 16 others wait."""
        reloads_max = 16  # Each holds its configuration, and one is carried out at a time.
        try:
            request = parse_message(ReloadConfigRequest, call.message)
            if len(self._reloads) >= reloads_max:
                raise StatusError("UNAVAILABLE", f"{reloads_max} changes of the configuration wait already")
        except StatusError as error:
            call.refuse(error)
            return
        task = asyncio.get_running_loop().create_task(self._reload(call, request))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, call: GrpcCall, request: Any) -> None:
        before = self._metrics(request.metric_names)
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._reloader, self._models.reload_config, request.config
            )
        except StatusError as error:
            call.refuse(error)
            return
        except Exception:
            _logger.exception("a change of the configuration failed")
            call.refuse(StatusError("INTERNAL", FAULT))
            return
        response = ReloadConfigResponse()
        response.status.error_code = GRPC_CODES["OK"]
        for name, value in self._metrics(before).items():
            response.metric.add(name=name, int64_value_increase=value - before[name])
        call.reply(response.SerializeToString())

    def _metadata(self, request: Any) -> bytes:
        if not request.HasField("model_spec"):
            raise StatusError("INVALID_ARGUMENT", "Missing ModelSpec")
        if not request.metadata_field:
            raise StatusError(
                "INVALID_ARGUMENT", "GetModelMetadataRequest must specify at least one metadata_field"
            )
        signature_def = "signature_def"
        for field in request.metadata_field:
            if field != signature_def:
                raise StatusError("INVALID_ARGUMENT", f"Metadata field {field} is not supported")
        name, version, label, _ = read_model_spec(request.model_spec)
        servable = self._models.find(name, version=version, label=label)
        response = GetModelMetadataResponse()
        response.model_spec.name = servable.name
        response.model_spec.version.value = servable.version
        packed = response.metadata[signature_def]
        packed.type_url = "type.googleapis.com/" + SignatureDefMap.DESCRIPTOR.full_name
        packed.value = servable.metadata
        return bytes(response.SerializeToString())
