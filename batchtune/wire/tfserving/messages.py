"""Which protobuf messages do TensorFlow Serving's APIs speak, without starting the TensorFlow runtime?

`tensorflow_serving.apis` imports `tensorflow.core.*`, and so runs `tensorflow/__init__.py`: 1.9 s and 540 MB.
Here the parent package is entered as a bare namespace while the message modules load (0.04 s, 15 MB) and then
taken out again, so that a later `import tensorflow` is a real one and shares these message classes. Where there is
no tensorflow, its part of the messages comes from `declared_messages`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from batchtune.wire.tfserving.declared_messages import declared_messages


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


__all__ = [
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
