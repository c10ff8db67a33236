"""Encodes and decodes protobuf's numbers and fields, reads TFRecords, and remembers decoded values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Memo(dict[_Key, _Value]):
    """A dict of at most `entries_max` entries; `keep` empties it when it is full: clients choose the keys, so it must
    be bounded."""

    __slots__ = ("_entries_max",)

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Store a value under its key and return the value."""
        if len(self) >= self._entries_max:
            self.clear()
        self[key] = value
        return value


@contextmanager
def bounded_depth() -> Iterator[None]:
    """Raise ValueError in place of a RecursionError; decorates what reads a stranger's JSON."""
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error


def varint(value: int) -> bytes:
    """Encode a number, which must not be negative, as protobuf's varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(message: bytes | FileBytes, position: int) -> tuple[int, int]:
    """Decode the varint at `position`; return (number, position after it).

    Raises:
        IndexError: the message ends within the varint.
        ValueError: it has more than 10 bytes.
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
    """Return all numbers of a packed repeated field.

    Raises:
        IndexError: the bytes end within a number.
        ValueError: a number has more than 10 bytes.
    """
    numbers, position = [], 0
    while position < len(packed):
        number, position = read_varint(packed, position)
        numbers.append(number)
    return numbers


VARINT, LENGTH_DELIMITED = 0, 2
"""protobuf's wire types: whole numbers; bytes, texts, messages and packed numbers."""


def length_delimited(number: int, size: int) -> bytes:
    """Return the tag and the length that precede the `size` bytes of a field."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(size)


def read_fields(message: bytes | FileBytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, begin, end) of each field in message[position:end].

    The value of a field is message[begin:end].

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


class FileBytes:
    """The bytes of an open file, of which only those are read that are asked for: `file[3]`, `file[3:9]`."""

    def __init__(self, file: BinaryIO) -> None:
        self._number = file.fileno()

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return os.pread(self._number, place.stop - place.start, place.start)
        return os.pread(self._number, 1, place)[0]


def tfrecords(content: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: each is its length (8 bytes), a checksum (4), the data, a checksum (4).

    The checksums are not compared, which in Python would take many seconds for 100 MB.

    Raises ValueError where the file ends within a record, as one does that contains no TFRecords.
    """
    at = number = 0
    while at < len(content):
        number += 1
        begin = at + 12
        end = begin + int.from_bytes(content[at : at + 8], "little")
        at = end + 4
        if at > len(content):
            raise ValueError(f"the file ends within record {number}")
        yield content[begin:end]
