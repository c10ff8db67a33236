"""How do small YAML files beside a model declare tensors, and how is a fault in one named by its key?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from batchtune.wire.signature import TensorSpec

_DTYPES = (
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "string",
)  # fmt: skip


class FaultError(Exception):
    """`key: what; expected …`, before the path is known."""


def tensor_specs(
    document: Mapping[str, Any], section: str, *, wildcard_allowed: bool
) -> tuple[TensorSpec, ...]:
    """The tensors of a section `{name: {dtype: float32, shape: [200]}}`, in the file's order.

    The batch dimension is put before the shape; -1 or null stand for any size where `wildcard_allowed`.

    Raises:
        FaultError: naming the key.
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
    """A table with no keys but the known ones; raises FaultError."""
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
    """A finite number of at least 0; raises FaultError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise FaultError(f"{key}: {value!r}; expected a number ≥ 0")
    return float(value)


def whole_number(value: Any, key: str, *, least: int, most: int | None = None) -> int:
    """A whole number of at least `least`, and of at most `most`; raises FaultError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FaultError(f"{key}: {value!r}; expected a whole number ≥ {least}")
    if most is not None and value > most:
        raise FaultError(f"{key}: {value!r}; expected {most} at most")
    return value


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
