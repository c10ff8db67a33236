"""Does an `emulated.yaml` say what an emulated device needs to know? Every fault is named by file and key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from batchtune.wire.status import StatusError

_DTYPES = (
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "string",
)  # fmt: skip
_SERVICE_TIME_KEYS = ("base_ms", "per_row_ms", "steps", "jitter_ratio", "seed", "concurrency")

Declared = tuple[str, tuple[int | None, ...]]


class EmulatedFile(TypedDict):
    """The checked content: numbers in range, shapes without the batch dimension (None: any size)."""

    service_time: dict[str, Any]
    memory: dict[str, int]
    inputs: dict[str, Declared]
    outputs: dict[str, Declared]


def read_emulated_file(path: Path) -> EmulatedFile:
    """Read and check the file.

    Raises:
        StatusError: INVALID_ARGUMENT `<path>: <key>: <what>; expected …`.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StatusError("INVALID_ARGUMENT", f"{path}: cannot be read: {error}") from error
    try:
        _check_keys(document, "", ("service_time", "memory", "inputs", "outputs"))
        memory = _check_keys(document.get("memory", {}), "memory", ("rows_max",))
        if "rows_max" in memory:
            _whole_number(memory["rows_max"], "memory.rows_max", least=1)
        return EmulatedFile(
            service_time=_service_time(document.get("service_time", {})),
            memory=memory,
            inputs=_declared_tensors(document, "inputs", wildcard_allowed=True),
            outputs=_declared_tensors(document, "outputs", wildcard_allowed=False),
        )
    except _FaultError as fault:
        raise StatusError("INVALID_ARGUMENT", f"{path}: {fault}") from fault


class _FaultError(Exception):
    """`key: what; expected …`, before the path is known."""


def _service_time(section: Any) -> dict[str, Any]:
    _check_keys(section, "service_time", _SERVICE_TIME_KEYS)
    checked = dict(section)
    for key in ("base_ms", "per_row_ms", "jitter_ratio"):
        if key in section:
            checked[key] = _number(section[key], f"service_time.{key}")
    if "seed" in section:
        _whole_number(section["seed"], "service_time.seed", least=0)
    if section.get("concurrency", "serial") not in ("serial", "parallel"):
        raise _FaultError(
            f"service_time.concurrency: {section['concurrency']!r}; expected serial or parallel"
        )
    if "steps" in section:
        checked["steps"] = _steps(section["steps"])
    return checked


def _steps(table: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(table, Mapping) or not table:
        raise _FaultError(
            "service_time.steps: expected a table of rows: milliseconds, such as {1: 2.1, 8: 2.5}"
        )
    checked = {
        _whole_number(rows, "service_time.steps", least=1): _number(
            milliseconds, f"service_time.steps.{rows}"
        )
        for rows, milliseconds in table.items()
    }
    return tuple(sorted(checked.items()))


def _declared_tensors(
    document: Mapping[str, Any], section: str, *, wildcard_allowed: bool
) -> dict[str, Declared]:
    tensors = document.get(section)
    if not isinstance(tensors, Mapping) or not tensors:
        raise _FaultError(
            f"{section}: missing; expected a table such as {{x: {{dtype: float32, shape: [200]}}}}"
        )
    declared = {}
    for name, one in tensors.items():
        key = f"{section}.{name}"
        _check_keys(one, key, ("dtype", "shape"))
        dtype = one.get("dtype", "float32")
        if dtype not in _DTYPES:
            raise _FaultError(
                f"{key}.dtype: {dtype!r}{_did_you_mean(dtype, _DTYPES)}; expected {', '.join(_DTYPES)}"
            )
        shape = one.get("shape", [])
        if not isinstance(shape, list):
            raise _FaultError(
                f"{key}.shape: {shape!r}; expected a list without the batch dimension, such as [200]"
            )
        sizes = tuple(_size(size, f"{key}.shape", wildcard_allowed=wildcard_allowed) for size in shape)
        declared[str(name)] = ("object" if dtype == "string" else dtype, sizes)
    return declared


def _size(size: Any, key: str, *, wildcard_allowed: bool) -> int | None:
    if wildcard_allowed and size in (-1, None):
        return None
    return _whole_number(size, key, least=0)


def _check_keys(section: Any, key: str, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise _FaultError(f"{key or 'the file'}: {section!r}; expected a table with {', '.join(known)}")
    for name in section:
        if name not in known:
            prefix = f"{key}." if key else ""
            raise _FaultError(
                f"{prefix}{name}: unknown key{_did_you_mean(str(name), known)}; expected {', '.join(known)}"
            )
    return section


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise _FaultError(f"{key}: {value!r}; expected a number ≥ 0")
    return float(value)


def _whole_number(value: Any, key: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _FaultError(f"{key}: {value!r}; expected a whole number ≥ {least}")
    return value


def _did_you_mean(word: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
