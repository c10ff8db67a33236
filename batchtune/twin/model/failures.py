"""Which replicas may be down at once, and what do clients see in the minute in which they die?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.slo import Limit
from batchtune.measure.statistics.quantiles import QUANTILES, Estimate
from batchtune.twin.model.reading import Fitted, rows_needed, timed
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.model.twin import Twin, estimate_of, shown_quantiles
from batchtune.twin.simulator.replica import Batcher, Routing
from batchtune.twin.simulator.summary import order_statistics

DETECT_S: Final = 5.0
"""Until nothing is sent to a dead replica: HAProxy's check, every 2 s and 3 times in vain, takes 4 to 6 s. A readiness
probe of Kubernetes with its defaults (every 10 s, 3 times) takes 20 to 30 s."""

MINUTE_S: Final = 60.0
SETTLE_S: Final = 10.0
"""Simulated before the death, so that queues have their usual length by then."""

READINGS: Final = 10
SURVIVORS_MOST: Final = 16
DEAD_USUAL: Final = 4
DEAD_MOST: Final = 2_000
LOST_LEAST: Final = 100
"""Requests that the simulated dead are sent until they are forgotten, where there are so many: the share that is lost
is then known to a tenth, with a thousand replicas or a hundred thousand."""
REQUESTS_MOST: Final = 1_000_000
"""Of one reading: so many tell a p99 in each of 60 seconds; ten readings of them take about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """So many replicas, or this share of the fleet, may be down at once, and are sent requests for `detect_s` more."""

    count: int = 0
    share: float = 0.0
    detect_s: float = DETECT_S

    def down(self, replicas: int) -> int:
        """Of a fleet of so many; of a share, that rounded up."""
        return self.count or math.ceil(self.share * replicas - 1e-9)

    def fleet(self, needed: int) -> int:
        """The least fleet of which `needed` are left."""
        if self.count:
            return needed + self.count
        replicas = math.floor(needed / (1.0 - self.share))
        while replicas - self.down(replicas) < needed:
            replicas += 1
        return replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """`died` of `replicas` die at once under this rate, and are sent their share for `detect_s` more."""

    rate_rps: float
    replicas: int
    died: int
    detect_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMinute:
    """The minute from the death on. `latency_s`: of the requests that are answered; `error_ratio`: of those due in it
    and those under way at the death, what is lost or refused; `seconds_missed`: of 60, those in which a limit or the
    share of errors was missed (median of the readings). `simulated_replicas`: how many stood for the fleet.
    """

    detect_s: float
    latency_s: dict[str, Estimate]
    error_ratio: Estimate
    seconds_missed: int
    simulated_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What `down` replicas fewer mean: latencies and busy devices without them, and the minute of their death."""

    down: int
    latency_s: dict[str, Estimate]
    busy_ratio: float
    minute: FailureMinute


def failure_minute(
    twin: Twin,
    batcher: Batcher,
    traffic: Traffic,
    outage: Outage,
    *,
    limits: Sequence[Limit],
    error_ratio: float,
    routing: Routing,
) -> FailureMinute:
    """Simulate the outage by some of the twin's readings.

    Of a large fleet some survivors and some dead are simulated, each at the rate of one; their requests count by how
    many they stand for. Under ramp, steps and trace arrivals the rate is steady (Poisson). Nobody sends a lost request
    again.
    """
    from batchtune.twin.simulator.failing import Death, run_failing
    from batchtune.twin.simulator.run import OpenTraffic

    pool = _pool_of(outage)
    due_s = _due_s(traffic, outage, pool, routing)
    death = Death(replicas=pool.dead, at_s=SETTLE_S, forgotten_s=SETTLE_S + outage.detect_s)
    requests = OpenTraffic(
        due_s=due_s,
        rows=traffic.rows_of(len(due_s)),
        lengths=traffic.lengths_of(len(due_s)),
        replicas=pool.survivors + pool.dead,
        routing=routing,
        seed=traffic.seed,
    )
    names = shown_quantiles(limits)

    def played(fit: Fitted) -> list[float]:
        share_rps = outage.rate_rps / outage.replicas
        device = fit.device(rows_needed(batcher, traffic), rate_rps=share_rps)
        latency_s = run_failing(requests, timed(batcher, twin.best_fit.wake_s, traffic), device, death)
        minute = _Minute(due_s, latency_s, pool)
        return [
            minute.error_ratio(),
            minute.seconds_missed(limits, error_ratio),
            *minute.quantiles([QUANTILES[name] for name in names]),
        ]

    columns = np.array([played(fit) for fit in twin.fits[:READINGS]]).T
    return FailureMinute(
        detect_s=outage.detect_s,
        latency_s={name: estimate_of(column) for name, column in zip(names, columns[2:], strict=True)},
        error_ratio=estimate_of(columns[0]),
        seconds_missed=int(np.median(columns[1])),
        simulated_replicas=pool.survivors + pool.dead,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Replicas that are simulated; each request at a survivor, or lost with a dead one, counts `weight` times."""

    survivors: int
    dead: int
    survivor_weight: float
    dead_weight: float


def _pool_of(outage: Outage) -> _Pool:
    left = outage.replicas - outage.died
    of_each = outage.rate_rps / outage.replicas * (SETTLE_S + MINUTE_S)
    affordable = max(int(REQUESTS_MOST / of_each), 2)
    if outage.replicas <= min(SURVIVORS_MOST, affordable):
        survivors, dead = left, outage.died
    else:
        sent = of_each / (SETTLE_S + MINUTE_S) * min(outage.detect_s, MINUTE_S)
        wanted = max(DEAD_USUAL, min(math.ceil(LOST_LEAST / sent), DEAD_MOST)) if sent else DEAD_USUAL
        dead = min(outage.died, wanted, affordable // 2)
        survivors = min(left, SURVIVORS_MOST, affordable - dead)
    return _Pool(
        survivors=survivors,
        dead=dead,
        survivor_weight=left / survivors,
        dead_weight=outage.died / dead,
    )


def _due_s(traffic: Traffic, outage: Outage, pool: _Pool, routing: Routing) -> NDArray[np.float64]:
    """When requests come to the pool: at the rate of each of its replicas, which for survivors rises after the death.

    The arrivals at a steady rate, with time stretched by how the pool's rate goes on. Routing by the least load leaves
    a dead replica alone as soon as it has as much unanswered as the others, so that survivors get all of it at once.
    """
    before_rps = outage.rate_rps * (pool.survivors + pool.dead) / outage.replicas
    after_rps = outage.rate_rps * pool.survivors / (outage.replicas - outage.died)
    undetected_s = min(outage.detect_s, MINUTE_S)
    undetected_rps = after_rps if routing == "least_loaded" else before_rps
    lengths_s = np.array([SETTLE_S, undetected_s, MINUTE_S - undetected_s])
    shares = lengths_s * np.array([before_rps, undetected_rps, after_rps]) / before_rps
    kept = lengths_s > 0.0
    times_s = np.concatenate([[0.0], np.cumsum(lengths_s[kept])])
    steady_s = np.concatenate([[0.0], np.cumsum(shares[kept])])
    due_s = traffic.at(before_rps).steady().due_s(max(round(before_rps * steady_s[-1]), 1))
    return np.asarray(np.interp(due_s[due_s < steady_s[-1]], steady_s, times_s))


class _Minute:
    """The requests that are due from the death on, and those that were lost under way."""

    def __init__(self, due_s: NDArray[np.float64], latency_s: NDArray[np.float64], pool: _Pool) -> None:
        lost = np.isnan(latency_s)
        counted = (due_s >= SETTLE_S) | lost
        self._latency_s = latency_s[counted]
        self._weights = np.where(lost[counted], pool.dead_weight, pool.survivor_weight)
        self._seconds = np.maximum(due_s[counted] - SETTLE_S, 0.0).astype(np.int64)

    def error_ratio(self) -> float:
        failed = ~np.isfinite(self._latency_s)
        return float(self._weights[failed].sum() / self._weights.sum()) if len(failed) else 0.0

    def quantiles(self, probabilities: Sequence[float]) -> NDArray[np.float64]:
        """Of the answered."""
        return order_statistics(self._latency_s[np.isfinite(self._latency_s)], probabilities)

    def seconds_missed(self, limits: Sequence[Limit], error_ratio: float) -> int:
        edges = np.searchsorted(self._seconds, np.arange(1, int(MINUTE_S)))
        parts = zip(np.split(self._latency_s, edges), np.split(self._weights, edges), strict=True)
        return sum(_missed(latency_s, weights, limits, error_ratio) for latency_s, weights in parts)


def _missed(
    latency_s: NDArray[np.float64],
    weights: NDArray[np.float64],
    limits: Sequence[Limit],
    error_ratio: float,
) -> bool:
    answered = np.isfinite(latency_s)
    if weights[~answered].sum() > error_ratio * weights.sum():
        return True
    reached_s = order_statistics(latency_s[answered], [limit.quantile for limit in limits])
    return any(value > limit.seconds for value, limit in zip(reached_s, limits, strict=True))
