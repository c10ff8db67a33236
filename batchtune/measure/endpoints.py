"""How does each of several replicas answer, and is one of them worse than the others?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from batchtune.load.record.samples import Samples, Status
from batchtune.measure.statistics.quantiles import Estimate, latency_quantiles
from batchtune.measure.validity.caveats import Caveat, caveat
from batchtune.measure.validity.steady_state import Window

SLOWER_RATIO: Final = 1.1
"""From which ratio a replica is worth a look: placement alone makes equal ones differ by some percent."""
FAILING_MORE: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFigures:
    """One replica over the window, as a Measurement has them of all; `requests` were due in it."""

    endpoint: str
    requests: int
    throughput_rps: float
    p50_s: Estimate
    p95_s: Estimate
    error_ratio: float


def endpoint_figures(samples: Samples, window: Window) -> tuple[EndpointFigures, ...]:
    """The figures of each endpoint, in their order; none where all requests went to one."""
    return tuple(_figures_of(samples, window, number) for number in range(len(samples.endpoints)))


def endpoint_caveats(figures: Sequence[EndpointFigures]) -> list[Caveat]:
    """Name the replica that is worse than every other: by failures, else by p50 or p95.

    Slower is one whose 95 % interval lies beyond the intervals of all others, and whose value is SLOWER_RATIO times
    the next. Two that do not overlap are a difference of 2.8 standard errors: by chance 1 in 170 pairs of equal ones.
    """
    if len(figures) < 2:
        return []
    worst, after = sorted(figures, key=lambda replica: replica.error_ratio, reverse=True)[:2]
    others = len(figures) - 1
    if worst.error_ratio - after.error_ratio > FAILING_MORE:
        ratios = {"error_ratio": worst.error_ratio, "next_ratio": after.error_ratio}
        return [caveat("endpoint_failing", endpoint=worst.endpoint, others=others, **ratios)]
    quantiles: tuple[Literal["p95", "p50"], ...] = ("p95", "p50")
    for quantile in quantiles:
        worst, after = sorted(figures, key=lambda replica: _value(replica, quantile), reverse=True)[:2]
        if _is_slower(worst, [replica for replica in figures if replica is not worst], quantile):
            times = {"endpoint_s": _value(worst, quantile), "next_s": _value(after, quantile)}
            words = {"endpoint": worst.endpoint, "others": others, "quantile": quantile}
            return [caveat("endpoint_slow", **words, **times)]
    return []


def _figures_of(samples: Samples, window: Window, number: int) -> EndpointFigures:
    own = samples.endpoint == number
    due = own & window.holds(samples.due_ns)
    good = samples.status == Status.OK
    latencies_s = np.where(good, samples.latency_ns / 1e9, math.inf)[due]
    quantiles = latency_quantiles(latencies_s, samples.due_ns[due])
    answered = int(np.count_nonzero(own & good & window.holds(samples.done_ns)))
    count = int(np.count_nonzero(due))
    return EndpointFigures(
        endpoint=samples.endpoints[number],
        requests=samples.one_in * count,
        throughput_rps=samples.one_in * answered / window.seconds if window.seconds else math.nan,
        p50_s=quantiles["p50"],
        p95_s=quantiles["p95"],
        error_ratio=int(np.count_nonzero(due & ~good)) / count if count else 0.0,
    )


def _is_slower(
    worst: EndpointFigures, others: Sequence[EndpointFigures], quantile: Literal["p50", "p95"]
) -> bool:
    highest_s = max(_estimate(replica, quantile).high for replica in others)
    next_s = max(_value(replica, quantile) for replica in others)
    own = _estimate(worst, quantile)
    return math.isfinite(own.value) and own.low > highest_s and own.value > SLOWER_RATIO * next_s


def _estimate(figures: EndpointFigures, quantile: Literal["p50", "p95"]) -> Estimate:
    return figures.p95_s if quantile == "p95" else figures.p50_s


def _value(figures: EndpointFigures, quantile: Literal["p50", "p95"]) -> float:
    """Its value; 0 where nothing was asked of it."""
    value = _estimate(figures, quantile).value
    return 0.0 if math.isnan(value) else value
