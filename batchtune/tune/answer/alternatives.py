"""Which other configurations trade throughput against p95?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.measure.statistics.distributions import Z_95
from batchtune.plain_values import fields_to_plain, from_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import percentage
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, RunFigures, is_inside
from batchtune.tune.evidence.run_noise import geometric_mean, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another feasible configuration on the Pareto front of throughput and p95, relative to the recommended one.

    `trade` says it in words: `12 % less throughput buys 30 % lower p95`.
    """

    configuration: Configuration
    throughput_rps: float
    p95_s: float
    throughput_ratio: float
    p95_ratio: float
    confirmations: int

    @property
    def trade(self) -> str:
        throughput, p95 = self.throughput_ratio - 1.0, self.p95_ratio - 1.0
        more = f"{percentage(abs(throughput))} {'more' if throughput > 0 else 'less'} throughput"
        slower = f"{percentage(abs(p95))} {'higher' if p95 > 0 else 'lower'} p95"
        if abs(throughput) < policy.SAME_RATIO:
            return f"{slower} at the same throughput"
        if abs(p95) < policy.SAME_RATIO:
            return f"{more} at the same p95"
        if throughput > 0 and p95 < 0:
            return f"{more} and {slower}"
        return f"{more} buys {slower}" if throughput < 0 else f"{slower} buys {more}"

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_plain(self), "trade": self.trade}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Alternative:
        return from_plain(cls, values)


def alternatives_to(
    chosen: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario
) -> tuple[tuple[Alternative, ...], tuple[Alternative, ...]]:
    """What trades throughput against p95 beyond the noise of both, smallest p95 first; and what seems better in both.

    Like is compared with like: fresh runs with fresh runs, else search with search, for machines drift in between. What
    is not worse in either is no trade. Of a capacity there are none: each holds at a rate of its own.
    """
    if scenario.objective == "capacity":
        return (), ()
    noise = _noise(pooled)
    compared = [
        (candidate, _compared(candidate, chosen))
        for candidate in pooled
        if candidate.feasible and candidate is not chosen and is_inside(candidate, scenario)
    ]
    beyond = [
        (other, _beyond(other, candidate, chosen, noise))
        for candidate, other in compared
        if math.isfinite(other.throughput_ratio) and math.isfinite(other.p95_ratio)
    ]
    better = tuple(
        other for other, (faster, sooner) in beyond if max(faster, sooner) > 0 and min(faster, sooner) >= 0
    )
    trades = [other for other, (faster, sooner) in beyond if faster * sooner < 0]
    front = [
        other
        for other in trades
        if not any(
            rival.throughput_ratio >= other.throughput_ratio and rival.p95_ratio <= other.p95_ratio
            for rival in trades
            if rival is not other
        )
    ]
    return tuple(sorted(front, key=lambda other: other.p95_s)), better


def _beyond(
    other: Alternative, candidate: Pooled, chosen: Pooled, noise: tuple[float, float]
) -> tuple[int, int]:
    """Whether throughput and p95 are better (1), worse (-1), or not to be told apart (0)."""
    fresh = candidate.confirmations > 0 and chosen.confirmations > 0
    ours, theirs = (len(of.runs if fresh else of.searched or of.runs) for of in (chosen, candidate))
    error = math.sqrt(1.0 / ours + 1.0 / theirs)
    signs = []
    for ahead, sd in ((math.log(other.throughput_ratio), noise[0]), (-math.log(other.p95_ratio), noise[1])):
        least = max(math.log1p(policy.ALTERNATIVE_GAIN), Z_95 * sd * error)
        signs.append(0 if abs(ahead) < least else 1 if ahead > 0.0 else -1)
    return signs[0], signs[1]


def _noise(pooled: Sequence[Pooled]) -> tuple[float, float]:
    """Standard deviations between runs of log throughput and log p95."""
    rates = [[run.throughput_rps.value for run in candidate.repeats] for candidate in pooled]
    p95s = [
        [run.latency_s["p95"].value for run in candidate.repeats if "p95" in run.latency_s]
        for candidate in pooled
    ]
    return (
        spread(rates, prior_sd=policy.THROUGHPUT_PRIOR_SD).sd,
        spread(p95s, prior_sd=policy.LATENCY_PRIOR_SD).sd,
    )


def _compared(candidate: Pooled, chosen: Pooled) -> Alternative:
    fresh = candidate.confirmations > 0 and chosen.confirmations > 0
    theirs, ours = (_figures(of.runs if fresh else of.searched or of.runs) for of in (candidate, chosen))
    return Alternative(
        configuration=candidate.configuration,
        throughput_rps=theirs[0],
        p95_s=theirs[1],
        throughput_ratio=theirs[0] / ours[0],
        p95_ratio=theirs[1] / ours[1],
        confirmations=candidate.confirmations,
    )


def _figures(runs: Sequence[RunFigures]) -> tuple[float, float]:
    p95s = (run.latency_s["p95"].value if "p95" in run.latency_s else math.nan for run in runs)
    return geometric_mean(run.throughput_rps.value for run in runs), geometric_mean(p95s)
