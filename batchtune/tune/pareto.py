"""Which other configurations trade throughput against p95?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.batching import Configuration
from batchtune.scenario.units import percentage
from batchtune.tune import policy
from batchtune.tune.noise import geometric_mean
from batchtune.tune.pool import Pooled, RunFigures


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
        return {
            "configuration": self.configuration.to_dict(),
            "throughput_rps": self.throughput_rps,
            "p95_s": self.p95_s,
            "throughput_ratio": self.throughput_ratio,
            "p95_ratio": self.p95_ratio,
            "confirmations": self.confirmations,
            "trade": self.trade,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Alternative:
        given = {name: value for name, value in values.items() if name != "trade"}
        return cls(**{**given, "configuration": Configuration.from_dict(values["configuration"])})


def alternatives_to(chosen: Pooled, pooled: Sequence[Pooled]) -> tuple[Alternative, ...]:
    """The Pareto front around the chosen configuration, smallest p95 first, without what is too close to it.

    Like is compared with like: fresh runs with fresh runs, else search with search, for machines drift in between.
    """
    found = [_compared(one, chosen) for one in pooled if one.feasible and one is not chosen]
    defined = [one for one in found if math.isfinite(one.throughput_ratio) and math.isfinite(one.p95_ratio)]
    places = [(1.0, 1.0), *((one.throughput_ratio, one.p95_ratio) for one in defined)]
    front = [
        one
        for one in defined
        if not any(
            place != (one.throughput_ratio, one.p95_ratio)
            and place[0] >= one.throughput_ratio
            and place[1] <= one.p95_ratio
            for place in places
        )
        and (
            one.throughput_ratio >= 1.0 + policy.ALTERNATIVE_GAIN
            or one.p95_ratio <= 1.0 - policy.ALTERNATIVE_GAIN
        )
    ]
    return tuple(sorted(front, key=lambda one: one.p95_s))


def _compared(one: Pooled, chosen: Pooled) -> Alternative:
    fresh = one.confirmations > 0 and chosen.confirmations > 0
    theirs, ours = (_figures(of.runs if fresh else of.searched or of.runs) for of in (one, chosen))
    return Alternative(
        configuration=one.configuration,
        throughput_rps=theirs[0],
        p95_s=theirs[1],
        throughput_ratio=theirs[0] / ours[0],
        p95_ratio=theirs[1] / ours[1],
        confirmations=one.confirmations,
    )


def _figures(runs: Sequence[RunFigures]) -> tuple[float, float]:
    p95s = (run.latency_s["p95"].value if "p95" in run.latency_s else math.nan for run in runs)
    return geometric_mean(run.throughput_rps.value for run in runs), geometric_mean(p95s)
