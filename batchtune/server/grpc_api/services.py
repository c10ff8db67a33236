"""Which gRPC method does a call name, and who answers it? The services of tensorflow_model_server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batchtune.server.calls.contract import Models
from batchtune.server.calls.pending_call import PendingCalls
from batchtune.server.grpc_api.classify_regress import InferenceCalls
from batchtune.server.grpc_api.front_end import GrpcFrontEnd, fail_call
from batchtune.server.grpc_api.health import HealthCalls
from batchtune.server.grpc_api.model_service import ModelServiceCalls
from batchtune.server.grpc_api.predict import PredictCalls
from batchtune.server.grpc_api.reflection import REFLECTION_SERVICES, Reflection, load_service_descriptions
from batchtune.server.metrics.counters import Metrics
from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream
from batchtune.wire.status import FAULT, StatusError

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
HEALTH_SERVICE = "grpc.health.v1.Health"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """`serialize_as_content` is --enable_serialization_as_tensor_content, `check_methods`
    --enable_signature_method_name_check, `health` --enable_grpc_healthcheck_service, `reflection`
    --enable_grpc_reflection."""

    serialize_as_content: bool = False
    check_methods: bool = False
    health: bool = True
    reflection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcApi:
    """What the wire needs: who gets the unary calls, who serves the streams, and how to say goodbye.

    `announce_stop` makes the health service answer NOT_SERVING before the server drains.
    """

    dispatch: Callable[[GrpcCall], None]
    streams: Mapping[str, Callable[[GrpcStream], None]]
    announce_stop: Callable[[], None]


def make_grpc_api(repository: Models, metrics: Metrics, *, options: GrpcOptions | None = None) -> GrpcApi:
    """Make the services; everything is called on the event loop."""
    options = options or GrpcOptions()
    pending: PendingCalls[GrpcCall] = PendingCalls(GrpcFrontEnd(), metrics, "GRPC", repository)
    check = options.check_methods
    predict = PredictCalls(repository, pending, as_content=options.serialize_as_content, check_methods=check)
    inference = InferenceCalls(repository, pending, check_methods=check)
    models = ModelServiceCalls(repository, metrics.first_values)
    health = HealthCalls(repository, (PREDICTION_SERVICE, MODEL_SERVICE))
    handlers: dict[str, Callable[[GrpcCall], None]] = {
        f"/{PREDICTION_SERVICE}/Predict": predict.start,
        f"/{PREDICTION_SERVICE}/Classify": inference.classify,
        f"/{PREDICTION_SERVICE}/Regress": inference.regress,
        f"/{PREDICTION_SERVICE}/MultiInference": inference.multi_inference,
        f"/{PREDICTION_SERVICE}/GetModelMetadata": models.metadata,
        f"/{MODEL_SERVICE}/GetModelStatus": models.status,
        f"/{MODEL_SERVICE}/HandleReloadConfigRequest": models.reload_config,
    }
    streams: dict[str, Callable[[GrpcStream], None]] = {}
    services = [PREDICTION_SERVICE, MODEL_SERVICE]
    if options.health:
        services.append(HEALTH_SERVICE)
        handlers[f"/{HEALTH_SERVICE}/Check"] = health.check
        streams[f"/{HEALTH_SERVICE}/Watch"] = health.watch
    if options.reflection:
        load_service_descriptions()
        services.extend(REFLECTION_SERVICES)
        for name in REFLECTION_SERVICES:
            streams[f"/{name}/ServerReflectionInfo"] = Reflection(name, tuple(services)).serve

    def dispatch(call: GrpcCall) -> None:
        handler = handlers.get(call.path)
        if handler is None:
            fail_call(call, StatusError("UNIMPLEMENTED", f"unknown method {call.path}"))
            return
        try:
            handler(call)
        except Exception:
            _logger.exception("%s failed", call.path)
            fail_call(call, StatusError("INTERNAL", FAULT))

    return GrpcApi(dispatch=dispatch, streams=streams, announce_stop=health.stop)
