"""How does one line of text become the descriptor of a protobuf message, without protoc?

A message is `Name: kind field=1, …` or `Outer.Name: …`; `kind* field` is repeated, `{kind} field` a map from strings,
`field=1@group` a member of a oneof. Kinds are protobuf's scalars, or messages of the same package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto


def varint(value: int) -> bytes:
    """Write a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends; IndexError where the message does, ValueError above 70 bits."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of too many bytes")


_Field = FieldDescriptorProto
_FIELD = re.compile(r"(\{?)([\w.]+)(\}?\*?) (\w+)=(\d+)(?:@(\w+))?$")
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}
_ENUMS = {"DataType"}


def add_messages(file: FileDescriptorProto, declarations: Sequence[str]) -> None:
    """Add the declared messages, nested ones into their outer ones; raises ValueError for a field that is no such."""
    for declaration in sorted(declarations, key=lambda text: "." in text.partition(":")[0]):
        _add_message(file, declaration)


def _add_message(file: FileDescriptorProto, declaration: str) -> None:
    full_name, _, fields = declaration.partition(":")
    outer, _, inner = full_name.partition(".")
    if inner:
        parent = next(message for message in file.message_type if message.name == outer)
        message = parent.nested_type.add(name=inner)
    else:
        message = file.message_type.add(name=outer)
    for field in filter(None, fields.strip().split(", ")):
        _add_field(message, full_name, field, file.package)


def _add_field(message: DescriptorProto, full_name: str, declaration: str, package: str) -> None:
    match = _FIELD.match(declaration)
    if match is None:
        raise ValueError(f"{full_name}: {declaration}")
    brace, kind, suffix, name, number, group = match.groups()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if brace:
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, entry.name, "string key=1", package)
        _add_field(entry, entry.name, f"{kind} value=2", package)
        kind = f"{full_name}.{entry.name}"
    if brace or suffix:
        field.label = _Field.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{package}.{kind}"
    if group:
        names = [oneof.name for oneof in message.oneof_decl]
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        field.oneof_index = names.index(group)
