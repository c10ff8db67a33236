"""Does a load test keep absolute limits: so much latency or CPU at most, so many requests/s at least?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal

from batchtune.check.gate import listed
from batchtune.check.paired import run_figures
from batchtune.errors import UsageError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.plain_values import to_plain
from batchtune.scenario.spec.check import Metric
from batchtune.scenario.units import (
    parse_duration_s,
    parse_rate_rps,
    parse_ratio,
    percentage,
    rounded,
    rounded_duration,
)
from batchtune.tune.trials.trial import Trial

State = Literal["kept", "missed", "open", "not measured"]

LIMITED: Final[tuple[Metric, ...]] = ("throughput", "p50", "p95", "p99", "errors", "cpu", "gpu")
_AT_LEAST: Final = frozenset({"throughput"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most so much of a figure, in its own unit; of throughput at least."""

    metric: Metric
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFinding:
    """What a load test says of a limit; `open`: the interval of its figure holds it."""

    limit: Limit
    figure: Estimate
    state: State

    @property
    def text(self) -> str:
        """`p95 21 ms [20, 23]: at most 20 ms: open`."""
        metric, figure = self.limit.metric, self.figure
        least = "at least" if metric in _AT_LEAST else "at most"
        shown = _shown(metric, figure.value)
        if figure.low != figure.high:
            shown = f"{shown} [{_shown(metric, figure.low)}, {_shown(metric, figure.high)}]"
        return f"{metric} {shown}: {least} {_shown(metric, self.limit.value)}: {self.state}"

    def to_dict(self) -> dict[str, Any]:
        """`figure` in the unit of `limit`: seconds, requests/s, a share of all requests."""
        return {
            "metric": self.limit.metric,
            "limit": self.limit.value,
            "figure": to_plain(self.figure),
            "state": self.state,
        }


def parse_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """`p95=20ms,throughput=500/s,errors=1%,cpu=200us`, in one text or several.

    Raises:
        UsageError: no such figure, or a limit that its unit does not allow.
    """
    try:
        return tuple(map(_parsed, listed(texts)))
    except UsageError as error:
        raise UsageError(f"--gate: {error.message}", hint=error.hint) from error


def judge_limits(limits: Sequence[Limit], trial: Trial) -> list[LimitFinding]:
    """Each limit against the figure of one load test, with its interval where it has one."""
    figures = run_figures(trial)
    return [_judged(limit, _estimate(limit.metric, trial, figures[limit.metric])) for limit in limits]


def _judged(limit: Limit, figure: Estimate) -> LimitFinding:
    sign = -1.0 if limit.metric in _AT_LEAST else 1.0
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
    measured = trial.measurement
    if measured is not None and metric == "throughput":
        return measured.throughput_rps
    if measured is not None and metric in measured.latency_s:
        return measured.latency_s[metric]
    return Estimate(value=value, low=value, high=value)


def _parsed(item: str) -> Limit:
    name, equals, text = (part.strip() for part in item.partition("="))
    if not equals:
        raise UsageError(f"expected FIGURE=LIMIT, such as p95=20ms; was {item!r}")
    for metric in LIMITED:
        if metric == name:
            match metric:
                case "throughput":
                    return Limit(metric=metric, value=parse_rate_rps(text))
                case "errors":
                    return Limit(metric=metric, value=_share(text))
                case _:
                    return Limit(metric=metric, value=parse_duration_s(text))
    near = get_close_matches(name, LIMITED, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"figures: {', '.join(LIMITED)}"
    raise UsageError(f"no figure with a limit is called {name!r}", hint=hint)


def _share(text: str) -> float:
    """Of all requests, so that a limit of all of them or more would never be missed."""
    share = parse_ratio(text)
    if share < 1.0:
        return share
    percent = text if not text.endswith("%") and share < 100.0 else "1"
    raise UsageError(
        f"errors: at most {rounded(share * 100)} % of all requests is always met",
        hint=f"write errors={percent}%",
    )


def _shown(metric: Metric, value: float) -> str:
    if metric == "throughput":
        return f"{rounded(value)}/s"
    return percentage(value, 2) if metric == "errors" else rounded_duration(value)
