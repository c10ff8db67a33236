"""What several protocols encode alike: protobuf's numbers and messages, and memos of what was decoded before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Memo(dict[_Key, _Value]):
    """Remembers `entries_max` values and then begins anew, for strangers choose the keys."""

    __slots__ = ("_entries_max",)

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Remember a value."""
        if len(self) >= self._entries_max:
            self.clear()
        self[key] = value
        return value


def varint(value: int) -> bytes:
    """Write a number that is not negative."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Read the number at `position`.

    Returns it and the position after it; IndexError where the message ends, ValueError above 70 bits.
    """
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


def read_varints(packed: bytes) -> list[int]:
    """All numbers of a packed field; raises as `read_varint`."""
    numbers, position = [], 0
    while position < len(packed):
        number, position = read_varint(packed, position)
        numbers.append(number)
    return numbers


VARINT, LENGTH_DELIMITED = 0, 2
"""protobuf's wire types of whole numbers, and of bytes, texts, messages and packed numbers."""


def read_fields(message: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, and where the value begins and ends, of each field between the two positions.

    Raises ValueError or IndexError where the bytes are no message, or one with groups.
    """
    while position < end:
        tag, position = read_varint(message, position)
        wire_type = tag & 7
        if wire_type == VARINT:
            _, stop = read_varint(message, position)
        elif wire_type == LENGTH_DELIMITED:
            size, position = read_varint(message, position)
            stop = position + size
        elif wire_type in {1, 5}:
            stop = position + (8 if wire_type == 1 else 4)
        else:
            raise ValueError("groups")
        if stop > end:
            raise ValueError("a field beyond the end")
        yield tag >> 3, wire_type, position, stop
        position = stop


_Field = FieldDescriptorProto
_FIELD = re.compile(r"([\w.]+)(\*?) (\w+)=(\d+)$")
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def add_messages(file: FileDescriptorProto, declarations: Sequence[str]) -> None:
    """Add the declared messages, without protoc; raises ValueError for a field that is not one.

    A message is `Name: kind field=1, …`; `kind* field` is repeated. Kinds are protobuf's scalars, or messages of the
    same package.
    """
    for declaration in declarations:
        name, _, fields = declaration.partition(":")
        message = file.message_type.add(name=name)
        for text in fields.strip().split(", "):
            match = _FIELD.match(text)
            if match is None:
                raise ValueError(f"{name}: {text}")
            kind, repeated, field_name, number = match.groups()
            field = message.field.add(name=field_name, number=int(number))
            field.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".{file.package}.{kind}"
