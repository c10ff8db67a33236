"""What does the server say of its models over gRPC, and how is it told to serve others?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batchtune.server.grpc_api.classify_regress import parse_message
from batchtune.server.grpc_api.predict import read_model_spec
from batchtune.server.models.repository import ModelRepository
from batchtune.wire.grpc.server_call import GrpcCall
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
)

_SIGNATURE_DEF = "signature_def"
_ANY_PREFIX = "type.googleapis.com/"
_RELOADS_MAX = 16
"""Each holds its configuration, and one is carried out at a time."""

_logger = logging.getLogger(__name__)


class ModelServiceCalls:
    """Answers GetModelMetadata, GetModelStatus and HandleReloadConfigRequest; `metrics` gives values by name."""

    def __init__(self, models: ModelRepository, metrics: Callable[[Iterable[str]], dict[str, int]]) -> None:
        self._models = models
        self._metrics = metrics
        self._reloads: set[asyncio.Task[None]] = set()
        # Their own thread: they wait for models to load, and follow one another.
        self._reloader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")

    def metadata(self, call: GrpcCall) -> None:
        """Answer GetModelMetadata."""
        try:
            answer = self._metadata(parse_message(GetModelMetadataRequest, call.message))
        except StatusError as error:
            call.refuse(error)
            return
        call.reply(answer)

    def status(self, call: GrpcCall) -> None:
        """Answer GetModelStatus; a version label is ignored, as TensorFlow Serving does."""
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
        """Start HandleReloadConfigRequest: it is answered when the models are available or have failed."""
        try:
            request = parse_message(ReloadConfigRequest, call.message)
            if request.config.WhichOneof("config") != "model_config_list":
                raise StatusError(
                    "INVALID_ARGUMENT",
                    "ServerModelConfig type not supported by HandleReloadConfigRequest. "
                    "Only ModelConfigList is currently supported",
                )
            if len(self._reloads) >= _RELOADS_MAX:
                raise StatusError("UNAVAILABLE", f"{_RELOADS_MAX} changes of the configuration wait already")
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
        for field in request.metadata_field:
            if field != _SIGNATURE_DEF:
                raise StatusError("INVALID_ARGUMENT", f"Metadata field {field} is not supported")
        name, version, label, _ = read_model_spec(request.model_spec)
        servable = self._models.find(name, version=version, label=label)
        response = GetModelMetadataResponse()
        response.model_spec.name = servable.name
        response.model_spec.version.value = servable.version
        packed = response.metadata[_SIGNATURE_DEF]
        packed.type_url = _ANY_PREFIX + SignatureDefMap.DESCRIPTOR.full_name
        packed.value = servable.metadata
        return bytes(response.SerializeToString())
