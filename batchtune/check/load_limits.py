"""Absolute limits of a load test: so much latency or CPU at most, so many requests/s at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from batchtune.batching.parameters import did_you_mean
from batchtune.check.gate import listed
from batchtune.check.paired_check import run_figures
from batchtune.errors import UsageError
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.spec.check import METRICS, Metric
from batchtune.tune.trials.trial import Trial
from batchtune.units import (
    parse_duration_s,
    parse_rate_rps,
    parse_ratio,
    rounded,
)

State = Literal["kept", "missed", "open", "not measured"]
"""What a load test says of a limit; "open": the figure's interval contains the limit, so it may be kept or
missed."""

AT_LEAST: Final = frozenset({"throughput"})
"""Figures of which a limit is the least, not the most."""


Limits = Sequence[tuple[Metric, float]]
"""(figure, limit) in the figure's unit (seconds, requests/s, share of requests): at most this, for throughput at least
this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFinding:
    """A limit, the `figure` that a load test measured for it, with its interval, and whether the limit is
    met; both in the unit of `Limits`."""

    metric: Metric
    limit: float
    figure: Estimate
    state: State


def parse_limits(texts: Sequence[str]) -> Limits:
    """Parse texts such as `p95=20ms,throughput=500/s,errors=1%,cpu=200us` into limits, in the order given.

    Raises:
        UsageError: no such figure, a value that cannot be parsed, or a limit of errors of 100 % or more; the message
            names --gate.
    """
    try:
        return tuple(map(_parsed, listed(texts)))
    except UsageError as error:
        raise UsageError(f"--gate: {error.message}", hint=error.hint) from error


def judge_limits(limits: Limits, trial: Trial) -> list[LimitFinding]:
    """Judge each limit by the figures of one load test, in the order of `limits`."""
    figures = run_figures(trial)
    return [
        _judged(metric, limit, _estimate(metric, trial, figures.get(metric, math.nan)))
        for metric, limit in limits
    ]


def _judged(metric: Metric, limit: float, figure: Estimate) -> LimitFinding:
    """Judge a limit by the interval of its figure: kept or missed where the whole interval lies on one side
    of the limit."""
    sign = -1.0 if metric in AT_LEAST else 1.0
    ends = sorted((sign * figure.low, sign * figure.high))
    state: State = "open"
    if math.isnan(figure.value):
        state = "not measured"
    elif ends[1] <= sign * limit:
        state = "kept"
    elif ends[0] > sign * limit:
        state = "missed"
    return LimitFinding(metric=metric, limit=limit, figure=figure, state=state)


def _estimate(metric: Metric, trial: Trial, value: float) -> Estimate:
    """Return a figure of a trial with its interval; of one that has no interval both ends are `value`."""
    measured = trial.measurement
    if measured is not None and metric == "throughput":
        return measured.throughput_rps
    if measured is not None and metric in measured.latency_s:
        return measured.latency_s[metric]
    return Estimate(value=value, low=value, high=value)


def _parsed(item: str) -> tuple[Metric, float]:
    name, equals, text = (part.strip() for part in item.partition("="))
    if not equals:
        raise UsageError(f"expected FIGURE=LIMIT, such as p95=20ms; was {item!r}")
    limited = tuple(name for name in METRICS if name not in ("capacity", "memory", "gpu_memory", "startup"))
    for metric in limited:
        if metric == name:
            match metric:
                case "throughput":
                    return metric, parse_rate_rps(text)
                case "errors":
                    return metric, _share(text)
                case _:
                    return metric, parse_duration_s(text)
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
