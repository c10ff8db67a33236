"""Reads small YAML files beside a model, with the line of each key, and checks their values.

The size of a file, with every alias expanded, is checked before any object is made of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError

_DTYPES = (
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "string",
)  # fmt: skip


class FaultError(Exception):
    """What is wrong in a YAML file, with the text `key: what; expected …`; `DeclaredFile.fault` makes a StatusError
    with path and line of it."""


def tensor_specs(
    document: Mapping[str, Any], section: str, *, wildcard_allowed: bool
) -> tuple[TensorSpec, ...]:
    """Return the tensors of a section `{name: {dtype: float32, shape: [200]}}`, in the file's order.

    Left out, dtype is float32 and shape [], one value for each row; the dtype string becomes numpy's object. The shapes
    returned begin with None, for the batch dimension. wildcard_allowed: sizes may be -1 or null, for any.

    Raises:
        FaultError: naming the key that is missing or wrong.
    """
    tensors = document.get(section)
    if not isinstance(tensors, Mapping) or not tensors:
        raise FaultError(
            f"{section}: missing; expected a table such as {{x: {{dtype: float32, shape: [200]}}}}"
        )
    specs = []
    for name, tensor in tensors.items():
        key = f"{section}.{name}"
        check_keys(tensor, key, ("dtype", "shape"))
        dtype = tensor.get("dtype", "float32")
        if dtype not in _DTYPES:
            raise FaultError(
                f"{key}.dtype: {dtype!r}{did_you_mean(dtype, _DTYPES)}; expected {', '.join(_DTYPES)}"
            )
        shape = tensor.get("shape", [])
        if not isinstance(shape, list):
            raise FaultError(
                f"{key}.shape: {shape!r}; expected a list without the batch dimension, such as [200]"
            )
        sizes = (_size(size, f"{key}.shape", wildcard_allowed=wildcard_allowed) for size in shape)
        name_of_numpy = "object" if dtype == "string" else dtype
        specs.append(TensorSpec(name=str(name), dtype=name_of_numpy, shape=(None, *sizes)))
    return tuple(specs)


def _size(size: Any, key: str, *, wildcard_allowed: bool) -> int | None:
    if wildcard_allowed and size in (-1, None):
        return None
    return whole_number(size, key, least=0)


def check_keys(section: Any, key: str, known: Iterable[str]) -> dict[str, Any]:
    """Check that a section is a table with known keys only, and return it; raises FaultError otherwise.

    key: dotted path of the section, "": the whole file.
    """
    if not isinstance(section, dict):
        raise FaultError(f"{key or 'the file'}: {section!r}; expected a table with {', '.join(known)}")
    for name in section:
        if name not in known:
            prefix = f"{key}." if key else ""
            raise FaultError(
                f"{prefix}{name}: unknown key{did_you_mean(str(name), known)}; expected {', '.join(known)}"
            )
    return section


def number(value: Any, key: str) -> float:
    """Return a value as float; raises FaultError unless it is a finite number of at least 0. key: its dotted
    path, for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise FaultError(f"{key}: {value!r}; expected a number ≥ 0")
    return float(value)


def whole_number(value: Any, key: str, *, least: int, most: int | None = None) -> int:
    """Return a value if it is a whole number from `least` to `most` (None: no limit); raises FaultError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FaultError(f"{key}: {value!r}; expected a whole number ≥ {least}")
    if most is not None and value > most:
        raise FaultError(f"{key}: {value!r}; expected {most} at most")
    return value


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """Return `, did you mean X?` with the known word nearest to `word`; "" where none is near."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredFile:
    """The content of a YAML file, and the line of each key by its dotted path, such as lookup.redis.url."""

    path: Path
    data: Any
    lines: Mapping[str, int]

    def fault(self, what: str, *, code: str = "INVALID_ARGUMENT") -> StatusError:
        """Return an error `<path>:<line>: <what>`; the line is that of the key with which `what` begins, else line
        1."""
        named = [key for key in self.lines if what.startswith(key) and what[len(key) : len(key) + 1] in ".:["]
        line = self.lines[max(named, key=len)] if named else 1
        return _fault(self.path, line, what, code)


def read_declared(path: Path) -> DeclaredFile:
    """Read a small YAML file, with the line of each key.

    Raises:
        StatusError: INVALID_ARGUMENT where it cannot be read, has a key twice, or is too large; with the
            line.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = _text_of(path)
        _check_size(path, yaml.parse(text, Loader=loader))
        root = yaml.compose(text, Loader=loader)
        lines = _lines_of(path, root)
        data = None if root is None else yaml.SafeLoader("").construct_document(root)
        return DeclaredFile(path=path, data=data, lines=lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise _fault(path, line, f"cannot be read: {error.problem or error.context}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8
        raise StatusError(
            "INVALID_ARGUMENT", f"{path}: cannot be read: {' '.join(str(error).split())}"
        ) from error


def _text_of(path: Path) -> str:
    bytes_max = 262_144  # Many times what a stages.yaml takes; so much is parsed in 0.2 s.
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise StatusError("INVALID_ARGUMENT", f"{path}: more than {bytes_max:,} bytes; expected a small file")
    return content.decode("utf-8")


def _check_size(path: Path, events: Iterable[Any]) -> None:
    """Raise StatusError if a file is too large or nested too deep, each alias counted as its content.

    Reads only the parser's events; faults of syntax are left to the parser.
    """
    import yaml

    counts: dict[str, int] = {}
    begun: list[
        tuple[str | None, int]
    ] = []  # of each list and table that is open: its anchor, the nodes before it
    nodes = 0
    # Keys, values, lists and tables, each as often as it stands there or an alias stands for it. Ten aliases of
    # ten aliases, nine deep, stand for 10⁹.
    nodes_max = 20_000
    depth_max = 32  # The files nest five deep; each level takes some of the 1,000 frames that Python allows.
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in begun):
                raise _fault(path, line, f"*{event.anchor}: an alias that contains itself")
            nodes += counts.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            if anchor is not None:
                counts[anchor] = nodes - before
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            if event.anchor is not None:
                counts[event.anchor] = 1
        if len(begun) > depth_max:
            raise _fault(path, line, "cannot be read: exceeded maximum nesting depth")
        if nodes > nodes_max:
            what = f"more than {nodes_max:,} keys and values, each alias counted as what it stands for"
            raise _fault(path, line, f"{what}; expected a small file")


def _lines_of(path: Path, root: Any) -> dict[str, int]:
    """Return dotted path -> line of each key; raises StatusError for a double key or an unreadable value."""
    import yaml

    lines: dict[str, int] = {}
    constructor = yaml.SafeLoader("")
    for key, line, node in _keys(root, ""):
        if key in lines:
            raise _fault(path, lines[key], f"{key}: given twice, in line {lines[key]} and in line {line}")
        lines[key] = line
        if isinstance(node, yaml.ScalarNode):
            try:
                constructor.construct_object(node)
            except ValueError as error:  # such as the date 2026-13-13
                raise _fault(path, line, f"{key}: {node.value!r} cannot be read: {error}") from error
    return lines


def _keys(node: Any, prefix: str) -> Iterator[tuple[str, int, Any]]:
    """Yield (dotted path, line, node of the value) of each key and list item, at all depths."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        below = [(f".{getattr(name, 'value', '?')}", name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = [(f"[{at}]", item, item) for at, item in enumerate(node.value)]
    else:
        return
    for step, place, value in below:
        key = f"{prefix}{step}".removeprefix(".")
        yield key, place.start_mark.line + 1, value
        yield from _keys(value, key)


def _fault(path: Path, line: int, what: str, code: str = "INVALID_ARGUMENT") -> StatusError:
    text_max = 1_000  # Of a message, which may show a value.
    shown = what if len(what) <= text_max else f"{what[:text_max]}…"
    return StatusError(code, f"{path}:{line}: {shown}")
