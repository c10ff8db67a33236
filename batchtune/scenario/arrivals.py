"""Draws when each request is due: the whole schedule, once, from one seed, before anything is sent.

Every kind of arrivals takes three steps: positions between 0 and 1 (random or even), the rate over time, and
the inverse of its integral. The number of requests is exact, so the mean rate is too; given their number, the
times of a Poisson process are uniform order statistics, here as normalised sums of exponentials. One seed
thus makes one pattern for every configuration, and nearly the same, stretched, for every rate.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.places import json_lines
from batchtune.scenario.spec.workload import LoadSpec, OnOffSpec

Trace: TypeAlias = tuple[NDArray[np.float64], NDArray[np.int32] | None, NDArray[np.int32] | None]
"""Recorded arrivals in the order of time: their times (s) since an origin of the file's own, indices of the recorded
requests to send, and rows of the requests, each of shape (n,); None: the file has no such column."""


def read_trace(file: str) -> Trace:
    """Read a trace of arrivals: a .csv file with a header, or a .jsonl file with one object a line.

    Columns: one of `offset_s`, `offset_ms`, `offset_us`, `offset_ns`; optional `request`, the index of the
    recorded request to send, and `rows`. Others are ignored. Lines may be in any order of time.

    Raises:
        ScenarioError: the file cannot be read, is empty or has no column for the time; `file:line: …` for a
            line that lacks a number.
    """
    path = Path(file)
    lines = list(_objects(path) if path.suffix in {".jsonl", ".ndjson"} else _csv_lines(path))
    if not lines:
        raise ScenarioError(f"{file}: the trace is empty")
    first = lines[0][1]
    offset_units = {"offset_s": 1.0, "offset_ms": 1e-3, "offset_us": 1e-6, "offset_ns": 1e-9}
    unit = next((name for name in offset_units if name in first), None)
    if unit is None:
        raise ScenarioError(
            f"{file}:{lines[0][0]}: no column for the time; found {', '.join(map(str, first)) or 'nothing'}",
            hint=f"name it one of: {', '.join(offset_units)}",
        )
    columns = {name: _column(lines, name, file) for name in (unit, "request", "rows") if name in first}
    order = np.argsort(columns[unit], kind="stable")
    return (
        columns[unit][order] * offset_units[unit],
        _whole_numbers(columns, "request", order, lowest=0, file=file),
        _whole_numbers(columns, "rows", order, lowest=1, file=file),
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


def _objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, _, record in json_lines(path):
        if not isinstance(record, dict):
            raise ScenarioError(f'{path}:{number}: expected an object such as {{"offset_s": 0.5}}')
        yield number, record


_REQUESTS_MAX = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """An open loop: request i is due `due_ns[i]` after the start, whether earlier ones are answered or not."""

    # Shape (n,), sorted, in [0, duration_s).
    due_ns: NDArray[np.int64]
    # Warm-up included.
    duration_s: float
    # Requests over duration.
    offered_rps: float
    # Index of each request's body, shape (n,); None until `with_bodies`, unless a trace names recorded requests.
    request_index: NDArray[np.int32] | None = None
    # Rows of each request, shape (n,), where a trace says so.
    trace_rows: NDArray[np.int32] | None = None

    def slice(self, worker: int, workers: int) -> Schedule:
        """Return the schedule of one of several workers: every `workers`-th request from number `worker`
        (from 0) on. All slices together are this schedule."""
        due_ns = self.due_ns[worker::workers]
        return replace(
            self,
            due_ns=due_ns,
            offered_rps=len(due_ns) / self.duration_s,
            request_index=None if self.request_index is None else self.request_index[worker::workers],
            trace_rows=None if self.trace_rows is None else self.trace_rows[worker::workers],
        )

    def with_bodies(self, order: NDArray[np.int32], rows: Sequence[int]) -> Schedule:
        """Return the schedule with the index of each request's body in `request_index`; to be called before it is
        sliced.

        `order`, `rows`: of the bodies, as a `RequestSet` has them. An index in a trace is taken modulo the number of
        bodies. Where a trace has only rows, the bodies of that many rows come in turn. Without a trace, or where it has
        neither, bodies follow `order`.

        Raises:
            UsageError: a trace has a number of rows that no body has.
        """
        if self.request_index is not None:
            index = self.request_index % np.int32(len(rows))
        elif self.trace_rows is not None:
            index = _by_rows(self.trace_rows, np.asarray(rows))
        else:
            index = np.resize(order, len(self.due_ns))
        return replace(self, request_index=index.astype(np.int32))


def _by_rows(wanted: NDArray[np.int32], rows: NDArray[np.int_]) -> NDArray[np.int32]:
    index = np.empty(len(wanted), dtype=np.int32)
    for size in np.unique(wanted):
        bodies = np.flatnonzero(rows == size)
        if not len(bodies):
            raise UsageError(
                f"the trace asks for requests of {size} rows; there are some of {', '.join(map(str, np.unique(rows)))}",
                hint=f"add a kind to request.mix: {{rows: {size}}}",
            )
        chosen = wanted == size
        index[chosen] = np.resize(bodies, np.count_nonzero(chosen))
    return index


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """A number of clients, each of which sends its next request when the last is answered."""

    concurrency: int
    duration_s: float
    # Pause of a client between answer and next request.
    think_s: float = 0.0
    # Requests after which the loop ends; None: it ends after `duration_s` alone.
    requests_max: int | None = None
    # Times in which requests are sent, (begin, end) after the start, one after another; empty: always.
    turns_ns: tuple[tuple[int, int], ...] = ()

    def slice(self, worker: int, workers: int) -> ClosedLoop:
        """Return one worker's share of the clients and requests; the shares of all workers together are this loop.

        Shares of clients differ by one at most, and so do those of requests among workers with clients.
        """
        most = self.requests_max
        busy = min(workers, self.concurrency)  # a worker without clients sends nothing
        share = None if most is None else share_of(most, worker, busy) * (worker < busy)
        return replace(self, concurrency=share_of(self.concurrency, worker, workers), requests_max=share)


Arrivals: TypeAlias = Schedule | ClosedLoop
Seed: TypeAlias = int | np.random.Generator


def arrivals_of(
    load: LoadSpec,
    *,
    rate_rps: float | None = None,
    concurrency: int | None = None,
    duration_s: float | None = None,
    seed: Seed | None = None,
) -> Arrivals:
    """Make the schedule or the closed loop of a load; arguments given here replace the load's own.

    An open loop reads `rate_rps` (requests/s), a closed one `concurrency` (clients); the other is ignored.
    `duration_s` is the whole run: by default `load.warm_up_s + load.duration_s`. `seed` is read by an open
    loop only.

    Raises:
        UsageError: a closed loop without clients, or as `draw`.
    """
    if load.open_loop:
        return draw(load, rate_rps=rate_rps, duration_s=duration_s, seed=seed)
    clients = concurrency or load.concurrency
    if clients is None:
        raise UsageError("a closed loop needs a concurrency", hint="set load.concurrency")
    return ClosedLoop(
        concurrency=clients,
        duration_s=load.warm_up_s + load.duration_s if duration_s is None else duration_s,
        think_s=load.think_time_s,
        requests_max=load.requests,
    )


def draw(
    load: LoadSpec,
    *,
    rate_rps: float | None = None,
    duration_s: float | None = None,
    seed: Seed | None = None,
) -> Schedule:
    """Draw the schedule of an open loop, warm-up included; arguments given here replace the load's own.

    `rate_rps` is the mean rate of the whole run: ramps, steps and traces keep their shape and are scaled to
    it. `duration_s` is the whole run: by default `load.warm_up_s + load.duration_s`. Ramps and steps begin
    after the warm-up, which is sent at their first rate.

    Raises:
        UsageError: the load is a closed loop, has no rate, or makes no request or more than 200 million.
    """
    if not load.open_loop:
        raise UsageError("a closed loop has no schedule", hint="set load.arrivals to poisson")
    total_s = load.warm_up_s + load.duration_s if duration_s is None else duration_s
    rate = load.rate_rps if rate_rps is None else rate_rps
    if load.trace is not None:
        return _traced(load, rate_rps=rate, total_s=total_s)
    rng = np.random.default_rng(load.seed if seed is None else seed)
    profile = _profile(load, rate_rps=rate, total_s=total_s, rng=rng)
    count = round(profile.integral)
    if not 1 <= count <= _REQUESTS_MAX:
        raise UsageError(
            f"{profile.integral:.3g} requests in {total_s:g} s: expected 1 to {_REQUESTS_MAX:,}",
            hint="change load.rate or load.duration",
        )
    due_s = profile.times_s(_positions(load, count, rng))
    due_ns = np.minimum(np.rint(due_s * 1e9).astype(np.int64), round(total_s * 1e9) - 1)
    return Schedule(due_ns=due_ns, duration_s=total_s, offered_rps=count / total_s)


@dataclass(frozen=True, slots=True)
class _Profile:
    """A rate over time, in segments over each of which it goes linearly from one value to another; arrays
    have the shape (segments,)."""

    lengths_s: NDArray[np.float64]
    from_rps: NDArray[np.float64]
    to_rps: NDArray[np.float64]

    @property
    def integral(self) -> float:
        """The expected number of requests."""
        return float(np.sum(self._weights))

    @property
    def _weights(self) -> NDArray[np.float64]:
        weights: NDArray[np.float64] = self.lengths_s * (self.from_rps + self.to_rps) / 2
        return weights

    def scaled_to(self, rate_rps: float) -> _Profile:
        """Return the profile with this mean rate and the same shape."""
        factor = rate_rps * float(np.sum(self.lengths_s)) / self.integral
        return _Profile(self.lengths_s, self.from_rps * factor, self.to_rps * factor)

    def times_s(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the times in seconds at which the integral reaches each position, a share of the whole,
        shape (n,), sorted."""
        if len(self.lengths_s) == 1 and self.from_rps[0] == self.to_rps[0]:
            return np.multiply(positions, float(self.lengths_s[0]))
        reached = np.concatenate([[0.0], np.cumsum(self._weights)])
        begins_s = np.concatenate([[0.0], np.cumsum(self.lengths_s)])
        wanted = positions * reached[-1]
        at = np.clip(np.searchsorted(reached, wanted, side="right") - 1, 0, len(self.lengths_s) - 1)
        slope = (self.to_rps - self.from_rps) / self.lengths_s
        start, rest = self.from_rps[at], wanted - reached[at]
        # The root of start·x + slope·x²/2 = rest, in the form that does not cancel.
        root = start + np.sqrt(np.maximum(start**2 + 2 * slope[at] * rest, 0.0))
        within = np.divide(2 * rest, root, out=np.zeros_like(rest), where=root > 0)
        times_s: NDArray[np.float64] = begins_s[at] + np.minimum(within, self.lengths_s[at])
        return times_s


def _profile(load: LoadSpec, *, rate_rps: float | None, total_s: float, rng: np.random.Generator) -> _Profile:
    before_s = min(load.warm_up_s, total_s)
    if load.ramp is not None:
        first = load.ramp.from_rps
        shape = _segments([(before_s, first, first), (total_s - before_s, first, load.ramp.to_rps)])
    elif load.steps is not None:
        first = load.steps[0].rate_rps
        steps = [(step.duration_s, step.rate_rps, step.rate_rps) for step in load.steps]
        shape = _segments([(before_s, first, first), *_repeated(steps, total_s - before_s)])
    else:
        if rate_rps is None:
            raise UsageError(
                f"arrivals {load.arrivals} need a rate", hint="set load.rate, for instance 500/s"
            )
        phases = [(total_s, 1.0, 1.0)] if load.on_off is None else _phases(load.on_off, total_s, rng)
        return _segments(phases).scaled_to(rate_rps)
    return shape if rate_rps is None or not shape.integral else shape.scaled_to(rate_rps)


_Segment: TypeAlias = tuple[float, float, float]


def _segments(segments: list[_Segment]) -> _Profile:
    columns = np.array([segment for segment in segments if segment[0] > 0], dtype=np.float64).reshape(-1, 3)
    return _Profile(columns[:, 0], columns[:, 1], columns[:, 2])


def _repeated(segments: list[_Segment], total_s: float) -> list[_Segment]:
    """Repeat the segments until they last `total_s`; the last one is cut."""
    filled: list[_Segment] = []
    left_s = total_s
    while left_s > 1e-12:
        length_s, start, end = segments[len(filled) % len(segments)]
        filled.append((min(length_s, left_s), start, end))
        left_s -= length_s
    return filled


def _phases(on_off: OnOffSpec, total_s: float, rng: np.random.Generator) -> list[_Segment]:
    """Return busy and quiet phases in turn, beginning with a busy one, at rates relative to the busy
    one's."""
    pair = [(on_off.on_s, 1.0, 1.0), (on_off.off_s, on_off.off_rate_ratio, on_off.off_rate_ratio)]
    if on_off.phases == "fixed":
        return _repeated(pair, total_s)
    pairs = math.ceil(total_s / (on_off.on_s + on_off.off_s)) + 10
    lengths = rng.standard_exponential((pairs, 2)) * (on_off.on_s, on_off.off_s)
    while lengths.sum() < total_s:
        lengths = np.concatenate(
            [lengths, rng.standard_exponential((pairs, 2)) * (on_off.on_s, on_off.off_s)]
        )
    drawn = [
        (float(length_s), pair[at % 2][1], pair[at % 2][2]) for at, length_s in enumerate(lengths.ravel())
    ]
    return _repeated(drawn, total_s)


def _positions(load: LoadSpec, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return `count` sorted numbers in [0, 1), shape (count,)."""
    if "constant" in (load.arrivals, load.ramp and load.ramp.spacing):
        return np.arange(count) / count
    if load.gamma is not None:
        gaps = rng.standard_gamma(1 / load.gamma.cv**2, count + 1)
    else:
        gaps = rng.standard_exponential(count + 1)
    sums = np.cumsum(gaps)
    positions: NDArray[np.float64] = sums[:-1] / sums[-1]
    return positions


def _traced(load: LoadSpec, *, rate_rps: float | None, total_s: float) -> Schedule:
    """Return the schedule of a trace, shifted to begin at 0; a trace shorter than the run starts again."""
    if load.trace is None:
        raise UsageError("arrivals trace need a trace file", hint="set load.trace.file")
    offsets_s, request_index, rows = read_trace(load.trace.file)
    offsets_s = (offsets_s - offsets_s[0]) / load.trace.speed
    recorded = len(offsets_s)
    # One mean gap after the last request, so that a repetition neither doubles nor skips a beat.
    period_s = float(offsets_s[-1]) * recorded / max(recorded - 1, 1)
    if rate_rps is not None and period_s > 0:
        stretch = recorded / rate_rps / period_s
        offsets_s, period_s = offsets_s * stretch, period_s * stretch
    rounds = math.ceil(total_s / period_s) if period_s > 0 else 1
    if rounds * recorded > _REQUESTS_MAX:
        raise UsageError(f"more than {_REQUESTS_MAX:,} requests", hint="shorten load.duration")
    due_ns = np.rint((np.arange(rounds)[:, None] * period_s + offsets_s).ravel() * 1e9).astype(np.int64)
    kept = int(np.searchsorted(due_ns, round(total_s * 1e9)))
    return Schedule(
        due_ns=due_ns[:kept],
        duration_s=total_s,
        offered_rps=kept / total_s,
        request_index=None if request_index is None else np.tile(request_index, rounds)[:kept],
        trace_rows=None if rows is None else np.tile(rows, rounds)[:kept],
    )


def share_of(total: int, worker: int, workers: int) -> int:
    """Return one worker's part of `total`, divided among workers numbered from 0; the first workers get one
    more where it does not divide evenly."""
    return total // workers + (worker < total % workers)
