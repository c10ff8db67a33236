"""Gates: the figure that is guarded, which way is worse, and from which change on it counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np

from batchtune.batching.parameters import did_you_mean
from batchtune.errors import UsageError
from batchtune.measure.quantiles import (
    Estimate,
    hodges_lehmann,
    signed_rank_bound,
    signed_rank_distribution,
    t_quantile,
)
from batchtune.plain_values import to_plain
from batchtune.scenario.spec.check import METRICS, Metric
from batchtune.units import parse_ratio, rounded

# When the blocks are looked at, and which share of the error rate each look may spend.
#
# A group-sequential test: the looks and what each may spend are fixed beforehand by the number of blocks, whatever the
# blocks say, so that the union bound holds over all looks and tests (Jennison & Turnbull, "Group Sequential Methods",
# chapter 7). Two kinds of test share the error rate. The signed-rank test assumes nothing on the noise, and needs many
# blocks. Student's t takes the noise from the blocks that there are, so that three blocks decide what lies an order of
# magnitude beyond it (tests/benchmarks/check/simulated_check.py).

LOOKS: Final = (3, 4, 6, 8, 10, 16, 24, 36, 54)
"""Blocks at which a check may end."""

RANK_FIRST: Final = 6
"""The first look of the signed-rank test is after this many blocks: fewer never reach the 5 % level."""


ONE_LAUNCH: Final = 8
"""Up to this many blocks both servers are launched once; from then on they are launched anew after each look.

Two launches of one server may differ by more than many blocks under one launch could show.
"""

ERROR_RATE: Final = 0.05
"""Most probability of a wrong flag in the screen, over all gates and looks; the confirmation may spend as
much again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look of the group-sequential test: after how many blocks, and at which one-sided levels each test
    decides.

    `flag_level`, `clear_level`: of the signed-rank test, for calling one gate regressed and for clearing it.
    `student_flag_level`, `student_clear_level`: those of Student's t. 0: that test decides nothing at this
    look.
    """

    blocks: int
    flag_level: float
    clear_level: float
    student_flag_level: float = 0.0
    student_clear_level: float = 0.0


def looks_up_to(blocks_max: int) -> tuple[int, ...]:
    """Return the numbers of blocks after which a check of at most `blocks_max` blocks is judged; the last is
    `blocks_max`."""
    return (*(look for look in LOOKS if look < blocks_max), blocks_max)


@lru_cache(maxsize=64)
def planned_looks(
    blocks: tuple[int, ...], *, gates: int, error_rate: float = ERROR_RATE, clear_first: int = 0
) -> tuple[Look, ...]:
    """Return the looks after the given numbers of `blocks`, with the levels that each may spend.

    To flag a gate, the error rate is divided by the number of gates (Bonferroni), so that one false flag
    among all of them is as rare as `error_rate`. To clear a gate each has the whole rate, because OK needs
    all gates cleared. `clear_first`: no gate can be cleared before this number of blocks, so that earlier
    looks spend nothing on it.
    """
    flag_rate = error_rate / max(gates, 1)
    # Of the error rate, for the looks of Student's t, each as much; the rank test has the rest.
    student_share = 0.4
    flags, clears = (_spent(blocks, (1.0 - student_share) * rate) for rate in (flag_rate, error_rate))
    # Up to 10 blocks Student's t: from then on the rank test needs no more of them.
    student = [count for count in blocks if 2 < count <= 10]
    # A check that cannot end as clear before some look need spend nothing on it there.
    clearing = [count for count in student if count >= clear_first] or student
    share = student_share / max(len(student), 1)
    return tuple(
        Look(
            blocks=count,
            flag_level=flag,
            clear_level=clear,
            student_flag_level=share * flag_rate if count in student else 0.0,
            student_clear_level=student_share * error_rate / len(clearing) if count in clearing else 0.0,
        )
        for count, flag, clear in zip(blocks, flags, clears, strict=True)
    )


def student_bounds(
    pairs: Sequence[tuple[float, float]], *, low_level: float, high_level: float
) -> tuple[float, float]:
    """Return (low, high), one-sided bounds by Student's t of the mean of after − before over pairs (before,
    after).

    `low_level`, `high_level`: probability of error of each bound. -inf or inf where a level is 0, with fewer
    than 3 pairs, or where a figure is not finite. Each bound is the tighter of two, at half of its level:
    from the noise of both sides (two samples, twice as many degrees of freedom), and from that of the
    differences, in which the host's speed cancels.
    """
    count = len(pairs)
    sides = np.asarray(pairs, dtype=np.float64)
    if count < 3 or not np.isfinite(sides).all():
        return -math.inf, math.inf
    differences = sides[:, 1] - sides[:, 0]
    errors = (
        (math.sqrt(float(sides.var(axis=0, ddof=1).sum()) / count), 2 * (count - 1)),
        (float(differences.std(ddof=1)) / math.sqrt(count), count - 1),
    )
    low, high = (
        min(t_quantile(1.0 - level / 2.0, freedom) * error for error, freedom in errors)
        if level
        else math.inf
        for level in (low_level, high_level)
    )
    mean = float(differences.mean())
    return mean - low, mean + high


def _spent(blocks: Sequence[int], error_rate: float) -> list[float]:
    """Return, for each look, the level at which the rank test decides there: the largest attainable within
    what may be spent."""
    levels: list[float] = []
    for count in blocks:
        # A power below 1, so that the first look can clear, and no smaller, so that the last can.
        allowed = error_rate * (count / blocks[-1]) ** 0.75 - sum(levels)
        levels.append(_attained(count, allowed) if count >= RANK_FIRST else 0.0)
    return levels


def _attained(count: int, level: float) -> float:
    """Return the largest level, at most `level`, that the signed-rank test of `count` pairs attains; 0: none."""
    rank = signed_rank_bound(count, level)
    return float(np.cumsum(signed_rank_distribution(count))[rank - 1]) if rank else 0.0


DEFAULT_MARGINS: Final[Mapping[Metric, float]] = {
    "throughput": 0.02,
    "capacity": 0.05,
    "p50": 0.02,
    "p95": 0.05,
    "p99": 0.10,
    "errors": 0.001,
    "cpu": 0.03,
    "gpu": 0.03,
    "memory": 0.05,
    "gpu_memory": 0.05,
    "startup": 0.10,
    "ttft_p50": 0.02,
    "ttft_p95": 0.05,
    "ttft_p99": 0.10,
    "itl_p50": 0.02,
    "itl_p95": 0.05,
    "itl_p99": 0.10,
}
"""Least change for the worse that fails a check, where the user states none: a ratio; of errors a share of
all requests.

The rarer the requests that a figure is made of, the more it varies between runs of one server
(tests/benchmarks/check/simulated_check.py: what each margin lets through).
"""

OBJECTIVE_METRICS: Final[Mapping[str, tuple[Metric, ...]]] = {
    "throughput": ("throughput", "p95", "p99", "errors", "cpu"),
    "latency": ("p50", "p95", "p99", "errors", "cpu"),
    "capacity": ("capacity", "errors", "cpu"),
}
"""Figures that a check guards where the user names none, by the scenario's objective.

Under capacity no latency: latencies at two different rates say nothing about each other.
"""


OF_A_LAUNCH: Final[frozenset[Metric]] = frozenset({"startup", "memory", "gpu_memory"})
"""Figures that a launch decides: under one launch all runs repeat one value, so that every run needs its own.
"""

_LOWER_IS_WORSE: Final = frozenset({"throughput", "capacity"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One guarded figure, and the change for the worse from which on it counts.

    `margin`: that change, above 0, as a ratio; of errors a share of all requests. `is_default`: the user did
    not ask for this gate, so that it may stay unmeasured. `model`: whose figure it is where the server has
    several; "": there is one.
    """

    metric: Metric
    margin: float
    is_default: bool = False
    model: str = ""

    @property
    def name(self) -> str:
        """The figure's name, such as `p95`; with several models `ranker:p95`."""
        return figure_name(self.model, self.metric)

    @property
    def is_absolute(self) -> bool:
        """Whether changes of this figure are differences, as of errors; else they are ratios."""
        return self.metric == "errors"

    @property
    def limit(self) -> float:
        """The gate's margin in the unit of `worsening`: a natural log ratio; of errors a difference of
        shares."""
        return self.limit_of(self.margin)

    def limit_of(self, margin: float) -> float:
        """Return a margin, a share, in the unit of `worsening`: the natural log ratio of getting that much
        worse; of errors the margin itself."""
        if self.is_absolute:
            return margin
        return -math.log1p(-margin) if self.metric in _LOWER_IS_WORSE else math.log1p(margin)

    def worsening(self, before: float, after: float) -> float:
        """Return how much worse `after` is than `before`, two values of the figure; above 0 is worse.

        The natural log(after / before), with the sign flipped where higher is better; of errors after −
        before. A factor above 1000, a rate of 0 and an infinite latency on one side count as a factor of 1000.
        nan where a side is nan, both are infinite, or there is no logarithm.
        """
        # The log ratio of a change without a finite one: a latency beyond the last good answer, or a
        # capacity of 0.
        farthest = math.log(1000.0)
        if math.isnan(before) or math.isnan(after):
            return math.nan
        if self.is_absolute:
            return after - before
        if self.metric in _LOWER_IS_WORSE and (before == 0.0) != (after == 0.0):
            return farthest if after == 0.0 else -farthest
        if before <= 0.0 or after <= 0.0 or (math.isinf(before) and math.isinf(after)):
            return math.nan
        log_ratio = math.log(after) - math.log(before)
        worse = -log_ratio if self.metric in _LOWER_IS_WORSE else log_ratio
        return max(-farthest, min(worse, farthest))

    def change(self, worsening: float) -> float:
        """Return the relative change of the figure for a worsening, the result of `worsening`: 0.05 is 5 %
        more; of errors the difference.

        Infinite stays infinite.
        """
        if self.is_absolute:
            return worsening
        if math.isinf(worsening):
            return -worsening if self.metric in _LOWER_IS_WORSE else worsening
        return math.expm1(-worsening if self.metric in _LOWER_IS_WORSE else worsening)

    def worsening_of(self, change: float) -> float:
        """Return the worsening, a natural log ratio, of a relative change of the figure (0.05: 5 % more); the
        inverse of `change`."""
        if math.isinf(change):
            return -change if self.metric in _LOWER_IS_WORSE else change
        if change <= -1.0 and not self.is_absolute:  # a loss of all
            return math.inf if self.metric in _LOWER_IS_WORSE else -math.inf
        return self.limit_of(-change if self.metric in _LOWER_IS_WORSE else change)


def figure_name(model: str, metric: Metric) -> str:
    """Return the name of a figure: `p95`, or `ranker:p95` where `model` is one of several."""
    return f"{model}:{metric}" if model else metric


def default_gates(objective: str, *, streams: bool = False) -> tuple[Gate, ...]:
    """Return the gates that guard an objective where the user names none, with their default margins; of `streams` of
    tokens also those on first tokens and gaps."""
    of_streams: tuple[Metric, ...] = ("ttft_p95", "itl_p99") if streams and objective != "capacity" else ()
    return tuple(
        Gate(metric=metric, margin=DEFAULT_MARGINS[metric], is_default=True)
        for metric in (*OBJECTIVE_METRICS[objective], *of_streams)
    )


def gates_of(
    margins: Mapping[str, float], *, objective: str, models: Sequence[str] = (), streams: bool = False
) -> tuple[Gate, ...]:
    """Return a gate for each figure in `margins`, in their order; where that is empty, those of the
    objective.

    With several `models`, each has every gate, apart from the default ones on figures of the whole server.
    `streams`: answers are streams of tokens.

    Raises:
        UsageError: no such figure, a margin outside of 0 to 1, `capacity` under another objective, a figure of streams
            where answers come whole, or one of the whole server, such as cpu, with several models.
    """
    # What is not any model's own.
    of_the_server = frozenset({"cpu", "gpu", "memory", "gpu_memory", "startup"})
    if models:
        shared = of_the_server & margins.keys()
        if shared:
            raise UsageError(
                f"{min(shared)}: with several models the server reports it for all together",
                hint=f"use a gate that each model has: {', '.join(METRICS[:1] + METRICS[2:6])}",
            )
        gates = [
            gate
            for gate in gates_of(margins, objective=objective, streams=streams)
            if gate.metric not in of_the_server
        ]
        return tuple(replace(gate, model=model) for model in models for gate in gates)
    if not margins:
        return default_gates(objective, streams=streams)
    of_streams = [name for name in margins if name.startswith(("ttft_", "itl_"))]
    if of_streams and not streams:
        raise UsageError(
            f"{of_streams[0]}: only of streamed answers, and these come whole",
            hint=f"gate {of_streams[0].rpartition('_')[2]}, which is of whole answers",
        )
    if "capacity" in margins and objective != "capacity":
        raise UsageError(
            f"capacity: no run searches it under objective: {objective}",
            hint="add --set objective=capacity (the scenario needs an slo and arrivals at a rate), or gate throughput",
        )
    return tuple(_gate(name, margin) for name, margin in margins.items())


def parse_margins(texts: Sequence[str]) -> dict[str, float]:
    """Parse texts such as `p95=5%,throughput=3%` into figure -> margin, a share; the last one of a figure
    counts.

    Raises:
        UsageError: a text that is no such list, an unknown figure, or a margin outside of 0 to 1.
    """
    margins: dict[str, float] = {}
    for item in listed(texts):
        name, equals, margin = item.partition("=")
        if not equals:
            raise UsageError(
                f"expected FIGURE=MARGIN, such as p95=5%; was {item!r}", hint=f"figures: {', '.join(METRICS)}"
            )
        try:
            margins[name.strip()] = parse_ratio(margin)
        except UsageError as error:
            what = f"--max-regress {item}: {error.message}"
            raise UsageError(
                what, hint="write how much worse the figure may be, without a sign: p95=5%"
            ) from error
        _gate(name.strip(), margins[name.strip()])
    return margins


def margin_text(gate: Gate, margin: float) -> str:
    """Write a margin, such as `5 %`, or `0.1 points` of errors."""
    return f"{rounded(margin * 100)} {'points' if gate.is_absolute else '%'}"


def _gate(name: str, margin: float) -> Gate:
    for metric in METRICS:
        if metric == name:
            if not 0.0 < margin < 1.0:
                raise UsageError(
                    f"{name}: a margin must be above 0 and below 100 %; was {rounded(margin * 100)} %",
                    hint=f"write {name}={rounded(DEFAULT_MARGINS[metric] * 100)}%",
                )
            return Gate(metric=metric, margin=margin)
    raise UsageError(f"no figure is called {name!r}", hint=did_you_mean(name, METRICS, otherwise="figures"))


def listed(texts: Iterable[str]) -> list[str]:
    """Split comma-separated lists into their items, without surrounding spaces.

    An empty text counts as one empty item, so that the caller reports a shell variable that is not set.
    """
    return [
        item.strip() for text in texts for item in text.split(",") if item.strip() or not text.strip(" ,")
    ]


# What do the blocks say of one gate?

State = Literal["regressed", "improved", "ok", "open", "not measured"]
"""What the blocks say of one gate: worse than its margin, better by more than it, neither, not decided yet,
no figures."""

BlockFigures = Mapping[str, tuple[float, float]]
"""Figures of one block: name of the gate -> (before, after); nan where one was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The state of one gate after the first `blocks` blocks that have both figures.

    `worsening`: how much worse the figure got, as `Gate.worsening`, with bounds at the levels of the look.
    `before`, `after`: medians. `margin`: the change against which the gate was judged: for regressed and
    improved that of the gate; for ok and open it may be more, where noise hides smaller changes. `confirmed`:
    whether the confirmation flags what the screen flagged; None where the screen did not, or nothing was
    confirmed.
    """

    gate: Gate
    state: State
    blocks: int
    worsening: Estimate
    margin: float
    before: float
    after: float
    confirmed: bool | None = None

    @property
    def change(self) -> Estimate:
        """The relative change of the figure with its interval, lower end first: 0.05 is 5 % more (of errors:
        5 points).

        An end is infinite where there are too few blocks for a bound.
        """
        ends = sorted((self.gate.change(self.worsening.low), self.gate.change(self.worsening.high)))
        return Estimate(value=self.gate.change(self.worsening.value), low=ends[0], high=ends[1])

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON takes; null for a missing bound and for a figure that was not measured."""
        change = {name: _known(getattr(self.change, name)) for name in ("value", "low", "high")}
        return {
            "metric": self.gate.metric,
            "model": self.gate.model,
            "margin_asked": self.gate.margin,
            "is_default": self.gate.is_default,
            "change": change,
            "state": self.state,
            "blocks": self.blocks,
            "margin": _known(self.margin),
            "before": None if math.isnan(self.before) else to_plain(self.before),
            "after": None if math.isnan(self.after) else to_plain(self.after),
            "confirmed": self.confirmed,
        }


def find(gate: Gate, blocks: Sequence[BlockFigures], look: Look, *, blocks_max: int) -> Finding:
    """Judge one gate by the blocks so far, at the levels of `look`; a phase has at most `blocks_max` blocks."""
    pairs = [figures[gate.name] for figures in blocks if gate.name in figures]
    known = [
        worse for worse in (gate.worsening(before, after) for before, after in pairs) if not math.isnan(worse)
    ]
    ranked = hodges_lehmann(known, low_level=look.flag_level, high_level=look.clear_level)
    student_low, student_high = student_bounds(
        _sides(gate, pairs), low_level=look.student_flag_level, high_level=look.student_clear_level
    )
    # In this order of arguments a gate that no block measured, whose ranks give nan, has bounds of ±inf.
    low = min(max(student_low, ranked.low), ranked.value)
    high = max(min(student_high, ranked.high), ranked.value)
    # The noise may raise that margin to 2.5 times the requested one; beyond it the gate stays open.
    clear_limit = max(gate.limit, min(_floor(known, blocks_max), 2.5 * gate.limit))
    state = _state(known, low=low, high=high, limit=gate.limit, clear_limit=clear_limit)
    return Finding(
        gate=gate,
        state=state,
        blocks=len(known),
        worsening=Estimate(value=ranked.value, low=low, high=high),
        margin=gate.margin if state in ("regressed", "improved") else abs(gate.change(clear_limit)),
        before=_median(before for before, _ in pairs),
        after=_median(after for _, after in pairs),
    )


def _sides(gate: Gate, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (before, after) of each pair as worsenings from the first pair's `before`, the unit of
    `Gate.worsening`.

    Empty where a figure has no logarithm.
    """
    known = [pair for pair in pairs if not math.isnan(gate.worsening(*pair))]
    if not gate.is_absolute and not all(0.0 < value < math.inf for pair in known for value in pair):
        return []
    origin = known[0][0] if known else 0.0
    return [(gate.worsening(origin, before), gate.worsening(origin, after)) for before, after in known]


def _state(known: Sequence[float], *, low: float, high: float, limit: float, clear_limit: float) -> State:
    if not known:
        return "not measured"
    if low > limit:
        return "regressed"
    if high < -limit:
        return "improved"
    return "ok" if high < clear_limit else "open"


def _floor(worsenings: Sequence[float], blocks_max: int) -> float:
    """Return the smallest worsening that `blocks_max` blocks could clear, given the spread of those measured;
    0: too few."""
    one_error = 0.1587  # The level of a bound that lies one standard error away.
    centre = hodges_lehmann(worsenings, low_level=one_error, high_level=one_error)
    if not math.isfinite(centre.high):
        return 0.0
    # A gate is cleared against no less than 4.3 standard errors of the last look: 2.3 of its interval, and
    # 2 so that 19 of 20 unchanged pairs are cleared (tests/benchmarks/check/simulated_check.py).
    return 4.3 * (centre.high - centre.value) * math.sqrt(len(worsenings) / blocks_max)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
