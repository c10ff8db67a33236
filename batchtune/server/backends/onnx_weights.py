"""How are the large tables of an ONNX file held once while it is loaded?

ONNX Runtime reads the whole file and then copies each initializer, so that a load holds all weights twice. Here tables
that are only looked up in (Gather) are cut out of the graph and read into arrays that the session uses as they are:
100 MB take 100 MB. Other weights stay: ONNX Runtime packs them anew and then lets go of its own, but not of ours. (To
map the file would do too, until somebody truncates it.) The fields are those of onnx.proto.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.varint import read_varint, varint

WEIGHT_BYTES_MIN = 1 << 16
"""Smaller initializers stay where they are."""
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_HEAD_BYTES_MAX = 20  # a tag and a length
_GRAPH, _NODE, _INITIALIZER = 7, 1, 5
_NODE_INPUT, _OP_TYPE = 1, 4
_LOOK_UP = "Gather"
_WITH_GRAPHS = {"If", "Loop", "Scan"}
"""What their graphs read of ours is not among their inputs."""
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 9, 13, 14
_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
"""By TensorProto.DataType: all but strings, complex numbers and what packs several values in a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """An initializer whose values lie in the file at `position`; `data_type` is TensorProto's."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    position: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A ModelProto whose large tables say only where in the file their values lie."""

    proto: bytes
    weights: tuple[Weight, ...]


class _Field(NamedTuple):
    """Of a message in the file: from its tag to its end; `value` is a varint's, or 0."""

    number: int
    begin: int
    content: int
    end: int
    value: int


class _NotPlainError(Exception):
    """The file is no model, or has weights in other files."""


def cut_weights(path: Path) -> CutModel | None:
    """Cut the large tables out of a model; None where ONNX Runtime had better read the file itself: it has none,
    has some in other files, or is no model.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        weights: list[Weight] = []
        try:
            pieces = []
            for field in _fields(file, 0, size):
                if field.number == _GRAPH:
                    graph = _cut_graph(file, field, path.name, weights)
                    pieces += [_length_delimited(_GRAPH, graph)]
                else:
                    pieces.append(_read(file, field.begin, field.end))
        except (_NotPlainError, ValueError, IndexError):
            return None
    return CutModel(proto=b"".join(pieces), weights=tuple(weights)) if weights else None


def read_weights(path: Path, weights: tuple[Weight, ...]) -> list[NDArray[Any]]:
    """The values, as arrays of unsigned integers of their size.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    values = []
    with path.open("rb") as file:
        for weight in weights:
            value = np.empty(weight.shape, f"u{_ELEMENT_BYTES[weight.data_type]}")
            file.seek(weight.position)
            if file.readinto(value.data.cast("B")) != weight.size:
                raise OSError(f"{path} has become shorter while it was read")
            values.append(value)
    return values


def _cut_graph(file: BinaryIO, graph: _Field, file_name: str, weights: list[Weight]) -> bytes:
    fields = list(_fields(file, graph.content, graph.end))
    tables = _looked_up(file, fields)
    pieces = []
    for field in fields:
        weight = _weight(file, field, tables) if field.number == _INITIALIZER else None
        if weight is None:
            pieces.append(_read(file, field.begin, field.end))
        else:
            weights.append(weight)
            pieces.append(_length_delimited(_INITIALIZER, _elsewhere(weight, file_name)))
    return b"".join(pieces)


def _looked_up(file: BinaryIO, fields: list[_Field]) -> set[str]:
    """The names that only nodes of look-ups read."""
    looked_up: set[str] = set()
    others: set[str] = set()
    for node in fields:
        if node.number != _NODE:
            continue
        inputs, operation = [], ""
        for field in _fields(file, node.content, node.end):
            if field.number == _NODE_INPUT:
                inputs.append(_read(file, field.content, field.end).decode())
            elif field.number == _OP_TYPE:
                operation = _read(file, field.content, field.end).decode()
        if operation in _WITH_GRAPHS:
            raise _NotPlainError
        (looked_up if operation == _LOOK_UP else others).update(inputs)
    return looked_up - others


def _weight(file: BinaryIO, initializer: _Field, tables: set[str]) -> Weight | None:
    """What is cut out, if the initializer is a large and plain one of `tables`."""
    name, data_type, shape, raw = "", 0, [], None
    for field in _fields(file, initializer.content, initializer.end):
        if field.number == _DIMS:
            shape += _numbers(file, field)
        elif field.number == _DATA_TYPE:
            data_type = field.value
        elif field.number == _NAME:
            name = _read(file, field.content, field.end).decode()
        elif field.number == _RAW_DATA:
            raw = field
        elif field.number == _EXTERNAL_DATA or (field.number == _DATA_LOCATION and field.value):
            raise _NotPlainError
    if raw is None or raw.end - raw.content < WEIGHT_BYTES_MIN or name not in tables:
        return None
    size = raw.end - raw.content
    if size != int(np.prod(shape, dtype=object)) * _ELEMENT_BYTES.get(data_type, 0):
        return None
    return Weight(name=name, data_type=data_type, shape=tuple(shape), position=raw.content, size=size)


def _elsewhere(weight: Weight, file_name: str) -> bytes:
    """A TensorProto of external data, at a place that exists, or ONNX Runtime refuses the model."""
    place = {"location": file_name, "offset": str(weight.position), "length": str(weight.size)}
    pieces = [varint(_DIMS << 3 | _VARINT) + varint(dimension) for dimension in weight.shape]
    pieces.append(varint(_DATA_TYPE << 3 | _VARINT) + varint(weight.data_type))
    pieces.append(_length_delimited(_NAME, weight.name.encode()))
    for key, value in place.items():
        entry = _length_delimited(1, key.encode()) + _length_delimited(2, value.encode())
        pieces.append(_length_delimited(_EXTERNAL_DATA, entry))
    pieces.append(varint(_DATA_LOCATION << 3 | _VARINT) + varint(1))
    return b"".join(pieces)


def _fields(file: BinaryIO, begin: int, end: int) -> Iterator[_Field]:
    """The fields of a message, without their contents; raises ValueError or IndexError where it is none."""
    position = begin
    while position < end:
        head = _read(file, position, position + _HEAD_BYTES_MAX)
        tag, used = read_varint(head, 0)
        kind, value = tag & 7, 0
        if kind == _VARINT:
            value, used = read_varint(head, used)
            size = 0
        elif kind == _LENGTH_DELIMITED:
            size, used = read_varint(head, used)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        content = position + used
        if content + size > end:
            raise ValueError("a field ends beyond its message")
        yield _Field(tag >> 3, position, content, content + size, value)
        position = content + size


def _numbers(file: BinaryIO, field: _Field) -> list[int]:
    """Whole numbers, packed or a single one."""
    packed = _read(file, field.content, field.end)
    if not packed:
        return [field.value]
    numbers, position = [], 0
    while position < len(packed):
        number, position = read_varint(packed, position)
        numbers.append(number)
    return numbers


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    return os.pread(file.fileno(), end - begin, begin)


def _length_delimited(number: int, content: bytes) -> bytes:
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(content)) + content
