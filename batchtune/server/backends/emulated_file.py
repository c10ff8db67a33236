"""Does an `emulated.yaml` say what an emulated device needs to know? Every fault is named by file, line and key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from batchtune.server.backends.declared_file import read_declared
from batchtune.server.backends.declared_tensors import (
    FaultError,
    check_keys,
    number,
    tensor_specs,
    whole_number,
)
from batchtune.wire.signature import TensorSpec

_SERVICE_TIME_KEYS = (
    "base_ms",
    "per_row_ms",
    "per_element_ms",
    "steps",
    "jitter_ratio",
    "seed",
    "slow_ratio",
    "slow_factor",
    "cpu_ms",
    "cpu_ratio",
    "concurrency",
    "contention_ratio",
)

_NUMBERS = (
    "base_ms", "per_row_ms", "per_element_ms", "jitter_ratio", "slow_ratio", "slow_factor", "cpu_ms",
    "cpu_ratio", "contention_ratio",
)  # fmt: skip


class EmulatedFile(TypedDict):
    """The checked content: numbers in range, tensors in the file's order."""

    service_time: dict[str, Any]
    memory: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def read_emulated_file(path: Path) -> EmulatedFile:
    """Read and check the file.

    Raises:
        StatusError: INVALID_ARGUMENT `<path>:<line>: <key>: <what>; expected …`.
    """
    file = read_declared(path)
    document = file.data
    try:
        check_keys(document, "", ("service_time", "memory", "inputs", "outputs"))
        memory = check_keys(document.get("memory", {}), "memory", ("rows_max",))
        if "rows_max" in memory:
            whole_number(memory["rows_max"], "memory.rows_max", least=1)
        return EmulatedFile(
            service_time=_service_time(document.get("service_time", {})),
            memory=memory,
            inputs=tensor_specs(document, "inputs", wildcard_allowed=True),
            outputs=tensor_specs(document, "outputs", wildcard_allowed=False),
        )
    except FaultError as fault:
        raise file.fault(str(fault)) from fault


def _service_time(section: Any) -> dict[str, Any]:
    check_keys(section, "service_time", _SERVICE_TIME_KEYS)
    checked = dict(section)
    for key in _NUMBERS:
        if key in section:
            checked[key] = number(section[key], f"service_time.{key}")
    if "seed" in section:
        whole_number(section["seed"], "service_time.seed", least=0)
    if section.get("concurrency", "serial") not in ("serial", "parallel"):
        raise FaultError(f"service_time.concurrency: {section['concurrency']!r}; expected serial or parallel")
    if "contention_ratio" in section and section.get("concurrency") != "parallel":
        raise FaultError("service_time.contention_ratio: read only with concurrency: parallel")
    if "steps" in section:
        checked["steps"] = _steps(section["steps"])
    return checked


def _steps(table: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(table, Mapping) or not table:
        raise FaultError(
            "service_time.steps: expected a table of rows: milliseconds, such as {1: 2.1, 8: 2.5}"
        )
    checked = {
        whole_number(rows, "service_time.steps", least=1): number(milliseconds, f"service_time.steps.{rows}")
        for rows, milliseconds in table.items()
    }
    return tuple(sorted(checked.items()))
