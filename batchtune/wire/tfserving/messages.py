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

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from batchtune.wire.descriptors import add_messages
from batchtune.wire.status import GRPC_CODES

# TensorFlow's messages that the serving APIs travel in, where the tensorflow package is not installed.
#
# tensorflow-serving-api names them but leaves them to tensorflow's wheel (600 MB). Here the few that a server or a
# client reads are declared once more, field by field, with the names and numbers of TensorFlow's .proto files: what
# is left out of a message is kept as unknown fields, as protobuf does with every field it has not heard of.
#
# Each file of tensorflow/core: the files it needs, and its messages in the notation of `wire.descriptors`; a message
# without fields stands for one that nobody here reads.
_FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "framework/types": ((), ()),
    "protobuf/error_codes": ((), ()),
    "framework/tensor_shape": (
        (),
        (
            "TensorShapeProto.Dim: int64 size=1, string name=2",
            "TensorShapeProto: TensorShapeProto.Dim* dim=2, bool unknown_rank=3",
        ),
    ),
    "framework/tensor": (
        ("framework/tensor_shape", "framework/types"),
        (
            (
                "TensorProto: DataType dtype=1, TensorShapeProto tensor_shape=2, int32 version_number=3, "
                "bytes tensor_content=4, float* float_val=5, double* double_val=6, int32* int_val=7, "
                "bytes* string_val=8, float* scomplex_val=9, int64* int64_val=10, bool* bool_val=11, "
                "double* dcomplex_val=12, int32* half_val=13, uint32* uint32_val=16, uint64* uint64_val=17, "
                "bytes float8_val=18"
            ),
        ),
    ),
    "example/feature": (
        (),
        (
            "BytesList: bytes* value=1",
            "FloatList: float* value=1",
            "Int64List: int64* value=1",
            "Feature: BytesList bytes_list=1@kind, FloatList float_list=2@kind, Int64List int64_list=3@kind",
            "Features: {Feature} feature=1",
        ),
    ),
    "example/example": (("example/feature",), ("Example: Features features=1",)),
    "protobuf/named_tensor": (
        ("framework/tensor",),
        ("NamedTensorProto: string name=1, TensorProto tensor=2",),
    ),
    "protobuf/config": ((), ("RunOptions:", "RunMetadata:")),
    "protobuf/meta_graph": (
        ("framework/tensor", "framework/tensor_shape", "framework/types"),
        (
            (
                "TensorInfo.CooSparse: string values_tensor_name=1, string indices_tensor_name=2, "
                "string dense_shape_tensor_name=3"
            ),
            (
                "TensorInfo: string name=1@encoding, DataType dtype=2, TensorShapeProto tensor_shape=3, "
                "TensorInfo.CooSparse coo_sparse=4@encoding"
            ),
            (
                "SignatureDef: {TensorInfo} inputs=1, {TensorInfo} outputs=2, string method_name=3, "
                "{TensorProto} defaults=4"
            ),
        ),
    ),
}
_DATA_TYPES = (
    "INVALID FLOAT DOUBLE INT32 UINT8 INT16 INT8 STRING COMPLEX64 INT64 BOOL QINT8 QUINT8 QINT32 BFLOAT16 QINT16 "
    "QUINT16 UINT16 COMPLEX128 HALF RESOURCE VARIANT UINT32 UINT64 FLOAT8_E5M2 FLOAT8_E4M3FN FLOAT8_E4M3FNUZ "
    "FLOAT8_E4M3B11FNUZ FLOAT8_E5M2FNUZ INT4 UINT4"
)


@contextmanager
def declared_messages() -> Iterator[None]:
    """Let `tensorflow.core.*_pb2` be imported, with these declarations; afterwards tensorflow is absent again.

    Once the descriptors are in protobuf's default pool, a real TensorFlow cannot be imported into this process.
    """
    modules = {name: types.ModuleType(name) for name in _package_names()}
    for path, (dependencies, messages) in _FILES.items():
        name = _module_name(path)
        modules[name] = _message_module(name, _described(path, dependencies, messages))
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _package_names() -> Iterator[str]:
    yield "tensorflow"
    yield "tensorflow.core"
    yield from sorted({f"tensorflow.core.{path.partition('/')[0]}" for path in _FILES})


def _module_name(path: str) -> str:
    return f"tensorflow.core.{path.replace('/', '.')}_pb2"


def _message_module(name: str, file: descriptor_pb2.FileDescriptorProto) -> types.ModuleType:
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindFileByName(file.name)
    module = types.ModuleType(name)
    module.__dict__["DESCRIPTOR"] = descriptor
    for message_name, message in descriptor.message_types_by_name.items():
        module.__dict__[message_name] = message_factory.GetMessageClass(message)
    for enum_name, enum in descriptor.enum_types_by_name.items():
        module.__dict__[enum_name] = enum_type_wrapper.EnumTypeWrapper(enum)
    # Generated code looks here for what error_codes.proto, in TensorFlow's tree, imports publicly.
    module.__dict__["xla_dot_tsl_dot_protobuf_dot_error__codes__pb2"] = module
    return module


def _described(
    path: str, dependencies: tuple[str, ...], messages: tuple[str, ...]
) -> descriptor_pb2.FileDescriptorProto:
    package = "tensorflow.error" if path == "protobuf/error_codes" else "tensorflow"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"tensorflow/core/{path}.proto", package=package, syntax="proto3"
    )
    file.dependency.extend(f"tensorflow/core/{dependency}.proto" for dependency in dependencies)
    if path == "framework/types":
        _add_enum(file, "DataType", {f"DT_{name}": number for number, name in enumerate(_DATA_TYPES.split())})
    elif path == "protobuf/error_codes":
        _add_enum(file, "Code", GRPC_CODES)
    add_messages(file, messages)
    return file


def _add_enum(file: descriptor_pb2.FileDescriptorProto, name: str, values: dict[str, int]) -> None:
    enum = file.enum_type.add(name=name)
    for value_name, number in values.items():
        enum.value.add(name=value_name, number=number)


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
