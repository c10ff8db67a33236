"""Reads small YAML files beside a model, with the line of each key, and checks their values.

A wrong value is a YamlError `key: what; expected …`; `DeclaredFile.fault` makes a StatusError with path and line of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.batching.parameters import did_you_mean
from batchtune.wire.signature import TensorSpec
from batchtune.wire.status import StatusError
from batchtune.yaml_lines import Path as KeyPath
from batchtune.yaml_lines import YamlError, read_yaml

_DTYPES = (
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "string",
)  # fmt: skip


def tensor_specs(
    document: Mapping[str, Any], section: str, *, wildcard_allowed: bool
) -> tuple[TensorSpec, ...]:
    """Return the tensors of a section `{name: {dtype: float32, shape: [200]}}`, in the file's order.

    Left out, dtype is float32 and shape [], one value for each row; the dtype string becomes numpy's object. The shapes
    returned begin with None, for the batch dimension. wildcard_allowed: sizes may be -1 or null, for any.

    Raises:
        YamlError: naming the key that is missing or wrong.
    """
    tensors = document.get(section)
    if not isinstance(tensors, Mapping) or not tensors:
        raise YamlError(
            f"{section}: missing; expected a table such as {{x: {{dtype: float32, shape: [200]}}}}"
        )
    specs = []
    for name, tensor in tensors.items():
        key = f"{section}.{name}"
        check_keys(tensor, key, ("dtype", "shape"))
        dtype = tensor.get("dtype", "float32")
        if dtype not in _DTYPES:
            raise YamlError(f"{key}.dtype: {dtype!r}; {did_you_mean(dtype, _DTYPES)}")
        shape = tensor.get("shape", [])
        if not isinstance(shape, list):
            raise YamlError(
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
    """Check that a section is a table with known keys only, and return it; raises YamlError otherwise.

    key: dotted path of the section, "": the whole file.
    """
    if not isinstance(section, dict):
        raise YamlError(f"{key or 'the file'}: {section!r}; expected a table with {', '.join(known)}")
    for name in section:
        if name not in known:
            prefix = f"{key}." if key else ""
            raise YamlError(f"{prefix}{name}: unknown key; {did_you_mean(name, known)}")
    return section


def number(value: Any, key: str) -> float:
    """Return a value as float; raises YamlError unless it is a finite number of at least 0. key: its dotted
    path, for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise YamlError(f"{key}: {value!r}; expected a number ≥ 0")
    return float(value)


def whole_number(value: Any, key: str, *, least: int, most: int | None = None) -> int:
    """Return a value if it is a whole number from `least` to `most` (None: no limit); raises YamlError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise YamlError(f"{key}: {value!r}; expected a whole number ≥ {least}")
    if most is not None and value > most:
        raise YamlError(f"{key}: {value!r}; expected {most} at most")
    return value


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
    nodes_max = 20_000  # Many times what a stages.yaml has.
    try:
        data, lines = read_yaml(_text_of(path), nodes_max=nodes_max)
    except YamlError as error:
        if not error.line:
            raise StatusError("INVALID_ARGUMENT", f"{path}: {error}") from error
        raise _fault(path, error.line, str(error)) from error
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        reason = " ".join(str(error).split())
        raise StatusError("INVALID_ARGUMENT", f"{path}: cannot be read: {reason}") from error
    return DeclaredFile(
        path=path, data=data, lines={_key_of(place): line for place, line in lines.items() if place}
    )


def _key_of(path: KeyPath) -> str:
    """Return the path of a key as messages name it, such as lookup.inputs or a[1]."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _text_of(path: Path) -> str:
    bytes_max = 262_144  # Many times what a stages.yaml takes; so much is parsed in 0.2 s.
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise StatusError("INVALID_ARGUMENT", f"{path}: more than {bytes_max:,} bytes; expected a small file")
    return content.decode("utf-8")


def _fault(path: Path, line: int, what: str, code: str = "INVALID_ARGUMENT") -> StatusError:
    text_max = 1_000  # Of a message, which may show a value.
    shown = what if len(what) <= text_max else f"{what[:text_max]}…"
    return StatusError(code, f"{path}:{line}: {shown}")
