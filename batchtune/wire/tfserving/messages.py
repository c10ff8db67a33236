"""The protobuf messages of TensorFlow Serving's APIs, without TensorFlow.

`messages.binpb` is a FileDescriptorSet: the .proto files of the services, and all that they import, as
tensorflow-serving-api 2.21 and tensorflow 2.21 declare them (both under the Apache License 2.0).
`python -m tests.wire.declared_messages` writes it from the packages that are installed; a test compares each field with
theirs. Those packages would bring TensorFlow's runtime along: 1.9 GB, and 1.9 s at each start. The pool is our own,
since TensorFlow registers other versions of the same files in the default one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

DESCRIPTORS = Path(__file__).with_suffix(".binpb")


def new_pool() -> descriptor_pool.DescriptorPool:
    """Make a descriptor pool with the services and messages of `messages.binpb`."""
    declared = DESCRIPTORS.read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(declared).file:
        pool.Add(file)
    return pool


POOL = new_pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


DataType: Any = enum_type_wrapper.EnumTypeWrapper(POOL.FindEnumTypeByName("tensorflow.DataType"))
Class: Any = _message("tensorflow.serving.Class")
ClassificationRequest: Any = _message("tensorflow.serving.ClassificationRequest")
ClassificationResponse: Any = _message("tensorflow.serving.ClassificationResponse")
ClassificationResult: Any = _message("tensorflow.serving.ClassificationResult")
Classifications: Any = _message("tensorflow.serving.Classifications")
Example: Any = _message("tensorflow.Example")
ExampleList: Any = _message("tensorflow.serving.ExampleList")
ExampleListWithContext: Any = _message("tensorflow.serving.ExampleListWithContext")
Feature: Any = _message("tensorflow.Feature")
Features: Any = _message("tensorflow.Features")
GetModelMetadataRequest: Any = _message("tensorflow.serving.GetModelMetadataRequest")
GetModelMetadataResponse: Any = _message("tensorflow.serving.GetModelMetadataResponse")
GetModelStatusRequest: Any = _message("tensorflow.serving.GetModelStatusRequest")
GetModelStatusResponse: Any = _message("tensorflow.serving.GetModelStatusResponse")
InferenceResult: Any = _message("tensorflow.serving.InferenceResult")
InferenceTask: Any = _message("tensorflow.serving.InferenceTask")
Input: Any = _message("tensorflow.serving.Input")
ModelConfig: Any = _message("tensorflow.serving.ModelConfig")
ModelConfigList: Any = _message("tensorflow.serving.ModelConfigList")
ModelServerConfig: Any = _message("tensorflow.serving.ModelServerConfig")
ModelSpec: Any = _message("tensorflow.serving.ModelSpec")
ModelVersionStatus: Any = _message("tensorflow.serving.ModelVersionStatus")
MultiInferenceRequest: Any = _message("tensorflow.serving.MultiInferenceRequest")
MultiInferenceResponse: Any = _message("tensorflow.serving.MultiInferenceResponse")
PredictRequest: Any = _message("tensorflow.serving.PredictRequest")
PredictResponse: Any = _message("tensorflow.serving.PredictResponse")
PredictionLog: Any = _message("tensorflow.serving.PredictionLog")
Regression: Any = _message("tensorflow.serving.Regression")
RegressionRequest: Any = _message("tensorflow.serving.RegressionRequest")
RegressionResponse: Any = _message("tensorflow.serving.RegressionResponse")
RegressionResult: Any = _message("tensorflow.serving.RegressionResult")
ReloadConfigRequest: Any = _message("tensorflow.serving.ReloadConfigRequest")
ReloadConfigResponse: Any = _message("tensorflow.serving.ReloadConfigResponse")
SignatureDef: Any = _message("tensorflow.SignatureDef")
SignatureDefMap: Any = _message("tensorflow.serving.SignatureDefMap")
StatusProto: Any = _message("tensorflow.serving.StatusProto")
TensorInfo: Any = _message("tensorflow.TensorInfo")
TensorProto: Any = _message("tensorflow.TensorProto")
TensorShapeProto: Any = _message("tensorflow.TensorShapeProto")
