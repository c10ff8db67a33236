"""Other configurations that trade throughput against p95."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from batchtune.batching.parameters import Configuration
from batchtune.tune.answer.recommendation import Alternative, Compared

TRADE = 0.05
"""An alternative has this much more throughput, or this much less p95."""


def trades(
    configuration: Configuration, figures: Mapping[str, float], others: Sequence[Compared], *, spread: float
) -> tuple[Alternative, ...]:
    """Those of `others` that trade throughput against p95 beyond the noise of both, smallest p95 first.

    figures: `throughput_rps` and `p95_s` of the recommended configuration. spread: standard deviation between runs, in
    logs.
    """
    trading = []
    for other in others:
        p95 = other.latency_s.get("p95")
        if (
            not other.keeps
            or other.outside
            or other.configuration == configuration
            or p95 is None
            or other.throughput_rps is None
        ):
            continue
        alternative = Alternative(
            configuration=other.configuration,
            throughput_rps=other.throughput_rps.value,
            p95_s=p95.value,
            throughput_ratio=other.throughput_rps.value / figures["throughput_rps"],
            p95_ratio=p95.value / figures["p95_s"],
            confirmations=other.fresh,
        )
        least = max(math.log1p(TRADE), 2.0 * spread)
        if _signs(alternative, least) in ((1, -1), (-1, 1)):
            trading.append(alternative)
    front = [
        candidate
        for candidate in trading
        if not any(
            rival.throughput_ratio >= candidate.throughput_ratio and rival.p95_ratio <= candidate.p95_ratio
            for rival in trading
            if rival is not candidate
        )
    ]
    return tuple(sorted(front, key=lambda alternative: alternative.p95_s))


def _signs(other: Alternative, least: float) -> tuple[int, int]:
    """Whether throughput and p95 are better (1), worse (-1), or not to be distinguished (0)."""
    ratios = other.throughput_ratio, 1.0 / other.p95_ratio if other.p95_ratio > 0.0 else math.inf
    logs = [math.log(ratio) if ratio > 0.0 else -math.inf for ratio in ratios]
    signs = [0 if abs(log) < least else 1 if log > 0.0 else -1 for log in logs]
    return signs[0], signs[1]
