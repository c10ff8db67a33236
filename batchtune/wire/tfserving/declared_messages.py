"""Which of TensorFlow's messages do the serving APIs travel in, where the tensorflow package is not installed?

tensorflow-serving-api names them but leaves them to tensorflow's wheel (600 MB). Here the few that a server or a
client reads are declared once more, field by field, with the names and numbers of TensorFlow's .proto files: what
is left out of a message is kept as unknown fields, as protobuf does with every field it has not heard of.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from batchtune.wire.descriptors import add_messages
from batchtune.wire.status import GRPC_CODES

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
