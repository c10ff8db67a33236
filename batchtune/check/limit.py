"""Absolute limits of a load test: so much latency or CPU at most, so many requests/s at least."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from batchtune.batching.parameters import did_you_mean
from batchtune.check.gate import listed
from batchtune.check.paired_check import run_figures
from batchtune.errors import UsageError
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.measure.validity.caveats import HOST_CODES
from batchtune.plain_values import fields_to_plain, to_plain
from batchtune.scenario.spec.check import Metric
from batchtune.tune.trials.trial import Trial
from batchtune.units import (
    parse_duration_s,
    parse_rate_rps,
    parse_ratio,
    rounded,
)

# Where a change came from: the time of a batch, its size, the queue, the front end, or the host.
#
# By the server's own account of the runs of both sides, medians over the runs. What explains most of the change is
# named; the others are told where they moved.

Cause = Literal["compute", "batch size", "queue", "front end", "host", "tail", "not known"]
"""What made a side faster or slower. "tail": no median moved, so the slow requests did; "not known": no cause
was found."""

MOVED: Final = 0.02
"""A median that moved by less, as a share, counts as unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a request's way, such as `queue`: its median before and after, in seconds, of batches in
    rows."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """The relative change of this part, 0.05 for 5 % more; nan where `before` is 0."""
        return self.after / self.before - 1.0 if self.before > 0.0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Where a change comes from: `cause` explains most of it; `parts` are all parts of a request's way that
    were measured."""

    cause: Cause
    parts: tuple[Part, ...]

    @property
    def largest(self) -> list[Part]:
        """The up to three parts that moved most, the largest relative change first; empty where none moved by
        `MOVED`."""
        moved = [part for part in self.parts if _moved(part, MOVED)]
        return sorted(moved, key=lambda part: -abs(part.change))[:3]

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON takes."""
        return fields_to_plain(self)


def attribute(
    before: Sequence[Measurement], after: Sequence[Measurement], *, cpu_s: tuple[float, float] | None = None
) -> Attribution:
    """Compare the runs of two sides part by part, and name the cause of the change.

    `cpu_s`: the server's CPU seconds per request, (before, after), where they were measured by loads of their
    own; None takes them from the runs.
    """
    size = _part("rows of a batch", before, after, lambda run: _server(run, "mean_batch_rows"))
    batch = _batch_time(before, after)
    queue = _part("queue", before, after, lambda run: run.queue_mean_s)
    outside = _part("front end and wire", before, after, lambda run: run.overhead_mean_s)
    cpu = _part("server CPU", before, after, _cpu_of_request_s)
    if cpu_s is not None:
        cpu = Part(name="server CPU", before=cpu_s[0], after=cpu_s[1])
    parts = tuple(part for part in (batch, size, queue, outside, cpu) if part is not None)
    cause = _cause(batch=batch, size=size, queue=queue, outside=outside)
    host_moved = 0.25  # Where the host disturbed so many more of one side's runs, it may be the cause.
    if cause == "not known" and abs(_noisy_share(after) - _noisy_share(before)) > host_moved:
        cause = "host"
    if cause == "not known" and parts and not any(_moved(part, MOVED) for part in parts):
        cause = "tail"
    return Attribution(cause=cause, parts=parts)


def _cause(*, batch: Part | None, size: Part | None, queue: Part | None, outside: Part | None) -> Cause:
    """Return the cause, looking first at parts that change others (batch size, time of a batch), then at
    those that follow.

    CPU time is no evidence: it may be spent anywhere.
    """
    size_moved = 0.05  # Batches that hold so many more or fewer rows explain what follows from their size.
    if _moved(size, size_moved):
        return "batch size"
    if _moved(batch, MOVED):
        return "compute"
    moved_s = {
        cause: part.after - part.before
        for cause, part in (("front end", outside), ("queue", queue))
        if part is not None and _moved(part, MOVED)
    }
    if moved_s:
        return "front end" if max(moved_s, key=lambda name: abs(moved_s[name])) == "front end" else "queue"
    return "not known"


def _moved(part: Part | None, least: float) -> bool:
    return part is not None and abs(part.change) > least


def _part(
    name: str,
    before: Sequence[Measurement],
    after: Sequence[Measurement],
    value: Callable[[Measurement], float | None],
) -> Part | None:
    """Return a part with the median of `value` over the runs of each side; None where a side has no run with
    that value."""
    sides = [[figure for run in runs if (figure := value(run)) is not None] for runs in (before, after)]
    if not all(sides):
        return None
    return Part(name=name, before=statistics.median(sides[0]), after=statistics.median(sides[1]))


def _batch_time(before: Sequence[Measurement], after: Sequence[Measurement]) -> Part | None:
    """Return the mean time of a batch, over the batch sizes that both sides ran, weighted by how often both
    ran them.

    None where no size was run by both.
    """
    (left_s, left_count), (right_s, right_count) = _batches(before), _batches(after)
    common = left_s.keys() & right_s.keys()
    weights = {rows: min(left_count[rows], right_count[rows]) for rows in common}
    total = sum(weights.values())
    if not total:
        return None
    return Part(
        name="time of a batch",
        before=sum(weights[rows] * left_s[rows] for rows in common) / total,
        after=sum(weights[rows] * right_s[rows] for rows in common) / total,
    )


def _batches(runs: Sequence[Measurement]) -> tuple[dict[int, float], dict[int, int]]:
    """Return (seconds, counts) by rows of a batch: the mean time of a batch over all runs, and how many
    batches there were."""
    spent_s: dict[int, float] = {}
    counts: dict[int, int] = {}
    for run in runs:
        server = run.server
        for rows, mean_s in ({} if server is None else server.execution_s_by_rows).items():
            count = 0 if server is None else server.batches_by_rows.get(rows, 0)
            spent_s[rows] = spent_s.get(rows, 0.0) + count * mean_s
            counts[rows] = counts.get(rows, 0) + count
    return {rows: spent_s[rows] / count for rows, count in counts.items() if count}, counts


def _server(run: Measurement, name: str) -> float | None:
    value: float | None = None if run.server is None else getattr(run.server, name)
    return value


def _cpu_of_request_s(run: Measurement) -> float | None:
    server = run.server
    if server is None or not server.server_cpu_s:
        return None
    requests = sum(server.requests_by_status.values())
    return server.server_cpu_s / requests if requests else None


def _noisy_share(runs: Sequence[Measurement]) -> float:
    noisy = sum(any(caveat.code in HOST_CODES for caveat in run.caveats) for run in runs)
    return noisy / len(runs) if runs else 0.0


State = Literal["kept", "missed", "open", "not measured"]
"""What a load test says of a limit; "open": the figure's interval contains the limit, so it may be kept or
missed."""

AT_LEAST: Final = frozenset({"throughput"})
"""Figures of which a limit is the least, not the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureLimit:
    """A limit of a figure in that figure's unit (seconds, requests/s, share of requests): the most; of
    throughput the least."""

    metric: Metric
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFinding:
    """A limit, the `figure` that a load test measured for it, with its interval, and whether the limit is
    kept."""

    limit: FigureLimit
    figure: Estimate
    state: State

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON takes; `limit` and `figure` are in seconds, requests/s or a share of
        requests."""
        return {
            "metric": self.limit.metric,
            "limit": self.limit.value,
            "figure": to_plain(self.figure),
            "state": self.state,
        }


def parse_limits(texts: Sequence[str]) -> tuple[FigureLimit, ...]:
    """Parse texts such as `p95=20ms,throughput=500/s,errors=1%,cpu=200us` into limits, in the order given.

    Raises:
        UsageError: no such figure, or a value that its unit does not allow; the message names --gate.
    """
    try:
        return tuple(map(_parsed, listed(texts)))
    except UsageError as error:
        raise UsageError(f"--gate: {error.message}", hint=error.hint) from error


def judge_limits(limits: Sequence[FigureLimit], trial: Trial) -> list[LimitFinding]:
    """Judge each limit by the figures of one load test, in the order of `limits`."""
    figures = run_figures(trial)
    return [_judged(limit, _estimate(limit.metric, trial, figures[limit.metric])) for limit in limits]


def _judged(limit: FigureLimit, figure: Estimate) -> LimitFinding:
    """Judge a limit by the interval of its figure: kept or missed where the whole interval lies on one side
    of the limit."""
    sign = -1.0 if limit.metric in AT_LEAST else 1.0
    ends = sorted((sign * figure.low, sign * figure.high))
    state: State = "open"
    if math.isnan(figure.value):
        state = "not measured"
    elif ends[1] <= sign * limit.value:
        state = "kept"
    elif ends[0] > sign * limit.value:
        state = "missed"
    return LimitFinding(limit=limit, figure=figure, state=state)


def _estimate(metric: Metric, trial: Trial, value: float) -> Estimate:
    """Return a figure of a trial with its interval; of one that has no interval both ends are `value`."""
    measured = trial.measurement
    if measured is not None and metric == "throughput":
        return measured.throughput_rps
    if measured is not None and metric in measured.latency_s:
        return measured.latency_s[metric]
    return Estimate(value=value, low=value, high=value)


def _parsed(item: str) -> FigureLimit:
    name, equals, text = (part.strip() for part in item.partition("="))
    if not equals:
        raise UsageError(f"expected FIGURE=LIMIT, such as p95=20ms; was {item!r}")
    limited: tuple[Metric, ...] = ("throughput", "p50", "p95", "p99", "errors", "cpu", "gpu")
    for metric in limited:
        if metric == name:
            match metric:
                case "throughput":
                    return FigureLimit(metric=metric, value=parse_rate_rps(text))
                case "errors":
                    return FigureLimit(metric=metric, value=_share(text))
                case _:
                    return FigureLimit(metric=metric, value=parse_duration_s(text))
    hint = did_you_mean(name, limited, otherwise="figures")
    raise UsageError(f"no figure with a limit is called {name!r}", hint=hint)


def _share(text: str) -> float:
    """Parse the limit of errors, a share of requests below 1: a limit of all requests could never be missed."""
    share = parse_ratio(text)
    if share < 1.0:
        return share
    percent = text if not text.endswith("%") and share < 100.0 else "1"
    raise UsageError(
        f"errors: at most {rounded(share * 100)} % of all requests is always met",
        hint=f"write errors={percent}%",
    )
