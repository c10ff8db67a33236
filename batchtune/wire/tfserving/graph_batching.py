"""With which parameters does a SavedModel batch inside its own graph?

`tf.nondifferentiable_batch_function` leaves an op BatchFunction in the graph, in a function of its library as a rule
(tensorflow/core/ops/batch_ops.cc). It is read from the file, so that nobody needs TensorFlow for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batchtune.wire.varint import read_varint

_FILE: Final = "saved_model.pb"
_OP: Final = b"BatchFunction"
_BYTES_MAX: Final = 1 << 28
"""A larger graph is not looked at: it takes a second for each 100 MB."""

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_WIDTHS: Final = {_DOUBLE: 8, _FLOAT: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBatching:
    """One batcher of a graph: the attributes of its BatchFunction, by their names there."""

    max_batch_size: int
    batch_timeout_micros: int
    num_batch_threads: int
    allowed_batch_sizes: tuple[int, ...] = ()

    def in_words(self) -> str:
        """`max_batch_size 32, batch_timeout_micros 5000, num_batch_threads 1, allowed_batch_sizes 8,32`."""
        sizes = ",".join(map(str, self.allowed_batch_sizes))
        return (
            f"max_batch_size {self.max_batch_size}, batch_timeout_micros {self.batch_timeout_micros}, "
            f"num_batch_threads {self.num_batch_threads}{f', allowed_batch_sizes {sizes}' if sizes else ''}"
        )


def read_graph_batching(version_directory: Path) -> tuple[GraphBatching, ...]:
    """The batchers inside the graph of a version; none where it has no SavedModel, or one that cannot be read."""
    path = version_directory / _FILE
    try:
        if path.stat().st_size > _BYTES_MAX:
            return ()
        saved_model = path.read_bytes()
    except OSError:
        return ()
    return graph_batching(saved_model) if _OP in saved_model else ()


def graph_batching(saved_model: bytes) -> tuple[GraphBatching, ...]:
    """Those of a serialised SavedModel, each once; of bytes that are none, those before the first fault."""
    kept: dict[GraphBatching, None] = {}
    try:
        for node in _nodes(saved_model):
            if _OP in node and _first(node, 2) == _OP:  # NodeDef.op
                kept[_batching_of(node)] = None
    except (ValueError, IndexError, TypeError):
        pass
    return tuple(kept)


def _nodes(saved_model: bytes) -> Iterator[bytes]:
    """Every node, those of the functions too: SavedModel.meta_graphs → MetaGraphDef.graph_def → …"""
    for meta_graph in _messages(saved_model, 2):
        for graph in _messages(meta_graph, 2):
            yield from _messages(graph, 1)  # GraphDef.node
            for library in _messages(graph, 2):
                for function in _messages(library, 1):
                    yield from _messages(function, 3)  # FunctionDef.node_def


def _batching_of(node: bytes) -> GraphBatching:
    """From NodeDef.attr, a map from names to AttrValue."""
    values = {_first(entry, 1): entry for entry in _messages(node, 5)}

    def number(name: bytes) -> int:
        value = _first(values.get(name, b""), 2)
        whole = _first(value, 3) if isinstance(value, bytes) else 0  # AttrValue.i
        return whole if isinstance(whole, int) else 0

    sizes: list[int] = []
    for value in _messages(values.get(b"allowed_batch_sizes", b""), 2):
        for listed in _messages(value, 1):  # AttrValue.list
            for part in _values(listed, 3):  # ListValue.i, packed or not
                sizes += [part] if isinstance(part, int) else _packed(part)
    return GraphBatching(
        max_batch_size=number(b"max_batch_size"),
        batch_timeout_micros=number(b"batch_timeout_micros"),
        num_batch_threads=number(b"num_batch_threads"),
        allowed_batch_sizes=tuple(sizes),
    )


def _messages(message: bytes, field: int) -> Iterator[bytes]:
    return (value for value in _values(message, field) if isinstance(value, bytes))


def _first(message: bytes, field: int) -> bytes | int:
    return next(_values(message, field), b"")


def _values(message: bytes, field: int) -> Iterator[bytes | int]:
    """The values of one field, as they come; ValueError or IndexError where the bytes are no message."""
    position = 0
    while position < len(message):
        key, position = read_varint(message, position)
        number, kind = key >> 3, key & 7
        value: bytes | int
        if kind == _VARINT:
            value, position = read_varint(message, position)
        elif kind == _BYTES:
            length, position = read_varint(message, position)
            value, position = message[position : position + length], position + length
        elif kind in _WIDTHS:
            value, position = b"", position + _WIDTHS[kind]
        else:
            raise ValueError(f"no wire type {kind}")
        if position > len(message):
            raise ValueError("the message is cut short")
        if number == field:
            yield value


def _packed(values: bytes) -> list[int]:
    numbers, position = [], 0
    while position < len(values):
        number, position = read_varint(values, position)
        numbers.append(number)
    return numbers
