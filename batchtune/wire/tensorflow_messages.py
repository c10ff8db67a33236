"""Which of TensorFlow's messages do the serving APIs travel in, where the tensorflow package is not installed?

tensorflow-serving-api names them but leaves them to tensorflow's wheel (600 MB). Here the few that a server or a
client reads are declared once more, field by field, with the names and numbers of TensorFlow's .proto files: what
is left out of a message is kept as unknown fields, as protobuf does with every field it has not heard of.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from batchtune.wire.status import GRPC_CODES

# Each file of tensorflow/core: the files it needs, and its messages. `Type* name` is repeated, `{Type} name` a map
# from strings, `name=1@group` a member of a oneof; a message without fields stands for one that nobody here reads.
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
_FIELD = re.compile(r"(\{?)([\w.]+)(\}?\*?) (\w+)=(\d+)(?:@(\w+))?$")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


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


def described_files() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The declarations by file name, dependencies first."""
    described = (_described(path, *declared) for path, declared in _FILES.items())
    return {file.name: file for file in described}


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
    file.dependency.extend(f"tensorflow/core/{one}.proto" for one in dependencies)
    if path == "framework/types":
        _add_enum(file, "DataType", {f"DT_{name}": number for number, name in enumerate(_DATA_TYPES.split())})
    elif path == "protobuf/error_codes":
        _add_enum(file, "Code", GRPC_CODES)
    for declaration in sorted(messages, key=lambda one: "." in one.partition(":")[0]):
        _add_message(file, declaration)
    return file


def _add_enum(file: descriptor_pb2.FileDescriptorProto, name: str, values: dict[str, int]) -> None:
    enum = file.enum_type.add(name=name)
    for value_name, number in values.items():
        enum.value.add(name=value_name, number=number)


def _add_message(file: descriptor_pb2.FileDescriptorProto, declaration: str) -> None:
    full_name, _, fields = declaration.partition(":")
    outer, _, inner = full_name.partition(".")
    if inner:
        parent = next(one for one in file.message_type if one.name == outer)
        message = parent.nested_type.add(name=inner)
    else:
        message = file.message_type.add(name=outer)
    for field in filter(None, fields.strip().split(", ")):
        _add_field(message, full_name, field)


def _add_field(message: descriptor_pb2.DescriptorProto, full_name: str, declaration: str) -> None:
    match = _FIELD.match(declaration)
    if match is None:
        raise ValueError(f"{full_name}: {declaration}")
    brace, kind, suffix, name, number, group = match.groups()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if brace:
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, entry.name, "string key=1")
        _add_field(entry, entry.name, f"{kind} value=2")
        kind = f"{full_name}.{entry.name}"
    if brace or suffix:
        field.label = _Field.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind == "DataType" else _Field.TYPE_MESSAGE
        field.type_name = f".tensorflow.{kind}"
    if group:
        names = [one.name for one in message.oneof_decl]
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        field.oneof_index = names.index(group)
