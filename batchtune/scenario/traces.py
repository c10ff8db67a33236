"""At which times did recorded requests arrive, and which were they?"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import ScenarioError

_OFFSET_UNITS = {"offset_s": 1.0, "offset_ms": 1e-3, "offset_us": 1e-6, "offset_ns": 1e-9}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Arrival times in order, (n,) each; `request_index` and `rows` are None where the file has no such column."""

    offsets_s: NDArray[np.float64]
    request_index: NDArray[np.int32] | None
    rows: NDArray[np.int32] | None


def read_trace(file: str) -> Trace:
    """The trace in a .csv file with a header, or a .jsonl file with one object a line.

    Columns: one of `offset_s`, `offset_ms`, `offset_us`, `offset_ns`; if wanted `request`, the index of the
    recorded request to send, and `rows`. Others are ignored. Lines need not be in order of time.

    Raises:
        ScenarioError: `file:line: …` for a line that lacks a number.
    """
    path = Path(file)
    lines = list(_json_lines(path) if path.suffix in {".jsonl", ".ndjson"} else _csv_lines(path))
    if not lines:
        raise ScenarioError(f"{file}: the trace is empty")
    first = lines[0][1]
    unit = next((name for name in _OFFSET_UNITS if name in first), None)
    if unit is None:
        raise ScenarioError(
            f"{file}:{lines[0][0]}: no column for the time; found {', '.join(map(str, first)) or 'nothing'}",
            hint=f"name it one of: {', '.join(_OFFSET_UNITS)}",
        )
    columns = {name: _column(lines, name, file) for name in (unit, "request", "rows") if name in first}
    order = np.argsort(columns[unit], kind="stable")
    offsets_s = columns[unit][order] * _OFFSET_UNITS[unit]
    return Trace(
        offsets_s=offsets_s,
        request_index=_whole_numbers(columns, "request", order, lowest=0, file=file),
        rows=_whole_numbers(columns, "rows", order, lowest=1, file=file),
    )


def _column(lines: list[tuple[int, Mapping[str, Any]]], name: str, file: str) -> NDArray[np.float64]:
    values = np.empty(len(lines))
    for at, (number, line) in enumerate(lines):
        try:
            values[at] = float(line[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ScenarioError(
                f"{file}:{number}: {name}: expected a number; was {line.get(name)!r}"
            ) from error
        if not np.isfinite(values[at]):
            raise ScenarioError(f"{file}:{number}: {name}: expected a number; was {line[name]!r}")
    return values


def _whole_numbers(
    columns: Mapping[str, NDArray[np.float64]], name: str, order: NDArray[np.intp], *, lowest: int, file: str
) -> NDArray[np.int32] | None:
    if name not in columns:
        return None
    values = columns[name][order]
    if np.any(values < lowest) or np.any(values % 1) or np.any(values >= 2**31):
        raise ScenarioError(f"{file}: {name}: expected whole numbers from {lowest}")
    return values.astype(np.int32)


def _csv_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            for line in reader:
                yield reader.line_num, line
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScenarioError(f"{path}: cannot be read as a trace: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import orjson

    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise ScenarioError(f"{path}:{number}: not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise ScenarioError(f'{path}:{number}: expected an object such as {{"offset_s": 0.5}}')
                yield number, record
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read as a trace: {error}") from error
