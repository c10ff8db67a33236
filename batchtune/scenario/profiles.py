"""How does the rate change over a day, by a file of rates or by a load of steps, a ramp or a trace?"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from batchtune.errors import UsageError
from batchtune.scenario.arrivals import unscaled_rps
from batchtune.scenario.spec.load import LoadSpec, RampSpec
from batchtune.scenario.traces import read_trace
from batchtune.scenario.units import parse_rate_rps, rounded_duration

RATE_COLUMNS: Final = ("rate", "requests/s", "requests_per_s", "rate_rps", "rps")
RELATIVE: Final = "relative"
DAY_S: Final = 86_400.0
PARTS: Final = 24
"""A ramp and a trace are cut into so many intervals."""

_MOST_ROWS: Final = 100_000
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_EXAMPLE: Final = (
    "a profile is CSV such as: hour,rate (next lines: 0,1200 and 1,900), or time,relative (00:00,0.4)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A rate that holds for a while; `name` as the file writes its beginning."""

    name: str
    length_s: float
    rate_rps: float


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    name: str
    start_s: float
    value: float


def read_profile(path: Path, *, peak_rps: float | None = None) -> tuple[Interval, ...]:
    """The intervals of a CSV file with a header; each holds until the next begins.

    Columns: `hour` (a number) or `time` (14:30, or 2026-11-23T14:30), and `rate` (requests/s, or 1.2k/s) or `relative`
    (of any unit: the highest becomes `peak_rps`). Others are ignored. The last one of a day of hours or clock times
    lasts until the first comes again; else as long as the one before.

    Raises:
        UsageError: `file:line: column: …` for what is no time or no rate; a relative column without a peak, or a peak
            beside rates.
    """
    lines = _lines(path)
    if not lines:
        raise UsageError(f"{path}: the profile is empty", hint=_EXAMPLE)
    time_column, rate_column = _columns(path, lines[0][1], peak_rps)
    rows = [
        _Row(
            number,
            str(line[time_column]).strip(),
            _start_s(path, number, time_column, line[time_column]),
            _value(path, number, rate_column, line[rate_column]),
        )
        for number, line in lines
    ]
    if len(rows) < 2:
        raise UsageError(f"{path}: one line is no profile", hint=_EXAMPLE)
    for before, row in pairwise(rows):
        if not row.start_s > before.start_s:
            raise UsageError(
                f"{path}:{row.line}: {time_column}: {row.name} does not come after {before.name} of line {before.line}",
                hint="put the lines in the order of time; past midnight, write dates: 2026-11-23T00:00",
            )
    highest = max(row.value for row in rows)
    if not highest > 0.0:
        raise UsageError(f"{path}: {rate_column}: no line has more than 0", hint=_EXAMPLE)
    factor = 1.0 if peak_rps is None else peak_rps / highest
    return tuple(
        Interval(name=row.name, length_s=length_s, rate_rps=factor * row.value)
        for row, length_s in zip(rows, _lengths_s(rows), strict=True)
    )


def profile_of_load(load: LoadSpec) -> tuple[Interval, ...]:
    """The rates of a scenario's steps, ramp or trace, as `load.rate` scales them; empty for other loads.

    Raises:
        ScenarioError: a trace that cannot be read.
    """
    if load.steps is not None:
        lengths_s = [step.duration_s for step in load.steps]
        rates_rps = [step.rate_rps for step in load.steps]
    elif load.ramp is not None:
        lengths_s = [load.duration_s / PARTS] * PARTS
        rates_rps = _ramp_rps(load.ramp)
    elif load.trace is not None:
        offsets_s = read_trace(load.trace.file).offsets_s / load.trace.speed
        length_s = float(offsets_s[-1] - offsets_s[0])
        if not length_s > 0.0:
            return ()
        counts, _ = np.histogram(offsets_s - offsets_s[0], bins=PARTS, range=(0.0, length_s))
        lengths_s = [length_s / PARTS] * PARTS
        rates_rps = (counts / (length_s / PARTS)).tolist()
    else:
        return ()
    unscaled = 0.0 if load.rate_rps is None else unscaled_rps(load)
    factor = load.rate_rps / unscaled if load.rate_rps is not None and unscaled > 0.0 else 1.0
    if load.trace is not None:  # played faster or slower, where steps and a ramp keep their time
        lengths_s = [length_s / factor for length_s in lengths_s]
    starts_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    return tuple(
        Interval(name=rounded_duration(float(start_s)), length_s=length_s, rate_rps=factor * rate_rps)
        for start_s, length_s, rate_rps in zip(starts_s, lengths_s, rates_rps, strict=False)
    )


def _ramp_rps(ramp: RampSpec) -> list[float]:
    """The highest rate of each part."""
    edges = np.linspace(ramp.from_rps, ramp.to_rps, PARTS + 1)
    return np.maximum(edges[:-1], edges[1:]).tolist()  # type: ignore[no-any-return]


def _lines(path: Path) -> list[tuple[int, Mapping[str, str | None]]]:
    lines: list[tuple[int, Mapping[str, str | None]]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            for line in reader:
                if len(lines) >= _MOST_ROWS:
                    raise UsageError(
                        f"{path}: more than {_MOST_ROWS:,} lines", hint="a line an hour or a minute is enough"
                    )
                lines.append((reader.line_num, {(key or "").strip(): line[key] for key in line}))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as a profile: {error}", hint=_EXAMPLE) from error
    return lines


def _columns(path: Path, line: Mapping[str, object], peak_rps: float | None) -> tuple[str, str]:
    times = [name for name in ("hour", "time") if name in line]
    rates = [name for name in (*RATE_COLUMNS, RELATIVE) if name in line]
    names = ", ".join(name for name in line if name) or "nothing"
    if len(times) != 1:
        raise UsageError(f"{path}:1: expected a column hour or time; the header has {names}", hint=_EXAMPLE)
    if len(rates) != 1:
        raise UsageError(
            f"{path}:1: expected one column rate or relative; the header has {names}", hint=_EXAMPLE
        )
    if rates[0] == RELATIVE and peak_rps is None:
        raise UsageError(
            f"{path}:1: {RELATIVE}: needs the rate of the peak", hint="give --rate 10k/s as well"
        )
    if rates[0] != RELATIVE and peak_rps is not None:
        raise UsageError(
            f"{path}:1: {rates[0]}: these are requests/s, and so is --rate",
            hint=f"leave --rate out, or name the column {RELATIVE} to scale it to that peak",
        )
    return times[0], rates[0]


def _start_s(path: Path, number: int, column: str, text: object) -> float:
    written = str(text or "").strip()
    try:
        if column == "hour":
            return _finite(3600.0 * float(written))
        clock = _CLOCK.fullmatch(written)
        if clock is None:
            moment = datetime.fromisoformat(written)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        hours, minutes, seconds = int(clock[1]), int(clock[2]), int(clock[3] or 0)
        if hours > 24 or minutes > 59 or seconds > 59:
            raise ValueError(written)
        return 3600.0 * hours + 60.0 * minutes + seconds
    except (ValueError, OverflowError) as error:
        expected = "a number of hours" if column == "hour" else "a time such as 14:30 or 2026-11-23T14:30"
        raise UsageError(f"{path}:{number}: {column}: expected {expected}; was {written!r}") from error


def _value(path: Path, number: int, column: str, text: object) -> float:
    written = str(text or "").strip()
    try:
        value = _finite(float(written)) if column == RELATIVE else _finite(parse_rate_rps(written))
        if value < 0.0:
            raise ValueError(written)
    except (ValueError, UsageError) as error:
        expected = "a number from 0" if column == RELATIVE else "requests/s from 0, such as 1200 or 1.2k/s"
        raise UsageError(f"{path}:{number}: {column}: expected {expected}; was {written!r}") from error
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _lengths_s(rows: Sequence[_Row]) -> list[float]:
    lengths_s = [after.start_s - row.start_s for row, after in pairwise(rows)]
    left_s = DAY_S - (rows[-1].start_s - rows[0].start_s)
    of_a_day = rows[-1].start_s < DAY_S and left_s > 0.0
    return [*lengths_s, left_s if of_a_day else lengths_s[-1]]
