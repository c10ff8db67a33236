"""Which protobuf messages do TensorFlow Serving's APIs speak, without starting the TensorFlow runtime?

`tensorflow_serving.apis` imports `tensorflow.core.*`, and so runs `tensorflow/__init__.py`: 1.9 s and 540 MB.
Here the parent package is entered as a bare namespace while the message modules load (0.04 s, 15 MB) and then
taken out again, so that a later `import tensorflow` is a real one and shares these message classes. Where there is
no tensorflow, its part of the messages comes from `wire.tensorflow_messages`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from batchtune.wire.tensorflow_messages import declared_messages


@contextmanager
def _tensorflow_as_bare_namespace() -> Iterator[None]:
    """Let `tensorflow.core` be imported without running `tensorflow/__init__.py`, or without tensorflow."""
    if "tensorflow" in sys.modules:
        yield
        return
    try:
        spec = importlib.util.find_spec("tensorflow")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.submodule_search_locations is None:
        with declared_messages():
            yield
        return
    namespace = types.ModuleType("tensorflow")
    namespace.__path__ = list(spec.submodule_search_locations)
    sys.modules["tensorflow"] = namespace
    try:
        yield
    finally:
        del sys.modules["tensorflow"]


with _tensorflow_as_bare_namespace():
    from tensorflow.core.example.example_pb2 import Example
    from tensorflow.core.example.feature_pb2 import Feature, Features
    from tensorflow.core.framework.tensor_pb2 import TensorProto
    from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
    from tensorflow.core.framework.types_pb2 import DataType
    from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef, TensorInfo
    from tensorflow_serving.apis.classification_pb2 import (
        Class,
        ClassificationRequest,
        ClassificationResponse,
        ClassificationResult,
        Classifications,
    )
    from tensorflow_serving.apis.get_model_metadata_pb2 import (
        GetModelMetadataRequest,
        GetModelMetadataResponse,
        SignatureDefMap,
    )
    from tensorflow_serving.apis.get_model_status_pb2 import (
        GetModelStatusRequest,
        GetModelStatusResponse,
        ModelVersionStatus,
    )
    from tensorflow_serving.apis.inference_pb2 import (
        InferenceResult,
        InferenceTask,
        MultiInferenceRequest,
        MultiInferenceResponse,
    )
    from tensorflow_serving.apis.input_pb2 import ExampleList, ExampleListWithContext, Input
    from tensorflow_serving.apis.model_management_pb2 import ReloadConfigRequest, ReloadConfigResponse
    from tensorflow_serving.apis.model_pb2 import ModelSpec
    from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse
    from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog
    from tensorflow_serving.apis.regression_pb2 import (
        Regression,
        RegressionRequest,
        RegressionResponse,
        RegressionResult,
    )
    from tensorflow_serving.apis.status_pb2 import StatusProto
    from tensorflow_serving.config.model_server_config_pb2 import (
        ModelConfig,
        ModelConfigList,
        ModelServerConfig,
    )


def _health_file() -> descriptor_pb2.FileDescriptorProto:
    """Describe grpc/health/v1/health.proto, which no wheel we depend on carries."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
    response = file.message_type.add(name="HealthCheckResponse")
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        status.value.add(name=name, number=number)
    response.field.add(
        name="status",
        number=1,
        label=field.LABEL_OPTIONAL,
        type=field.TYPE_ENUM,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )
    service = file.service.add(name="Health")
    for method, streams in (("Check", False), ("Watch", True)):
        service.method.add(
            name=method,
            input_type=".grpc.health.v1.HealthCheckRequest",
            output_type=".grpc.health.v1.HealthCheckResponse",
            server_streaming=streams,
        )
    return file


# A pool of its own: grpcio-health-checking may register the same file in the default one.
HEALTH_POOL = descriptor_pool.DescriptorPool()
HEALTH_POOL.Add(_health_file())


def _health_class(name: str) -> Any:
    return message_factory.GetMessageClass(HEALTH_POOL.FindMessageTypeByName(f"grpc.health.v1.{name}"))


HealthCheckRequest = _health_class("HealthCheckRequest")
HealthCheckResponse = _health_class("HealthCheckResponse")

__all__ = [
    "HEALTH_POOL",
    "Class",
    "ClassificationRequest",
    "ClassificationResponse",
    "ClassificationResult",
    "Classifications",
    "DataType",
    "Example",
    "ExampleList",
    "ExampleListWithContext",
    "Feature",
    "Features",
    "GetModelMetadataRequest",
    "GetModelMetadataResponse",
    "GetModelStatusRequest",
    "GetModelStatusResponse",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "InferenceResult",
    "InferenceTask",
    "Input",
    "ModelConfig",
    "ModelConfigList",
    "ModelServerConfig",
    "ModelSpec",
    "ModelVersionStatus",
    "MultiInferenceRequest",
    "MultiInferenceResponse",
    "PredictRequest",
    "PredictResponse",
    "PredictionLog",
    "Regression",
    "RegressionRequest",
    "RegressionResponse",
    "RegressionResult",
    "ReloadConfigRequest",
    "ReloadConfigResponse",
    "SignatureDef",
    "SignatureDefMap",
    "StatusProto",
    "TensorInfo",
    "TensorProto",
    "TensorShapeProto",
]
