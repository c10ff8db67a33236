"""How many replicas does a rate need, and how sure is that?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import TwinError
from batchtune.measure.slo import Limit
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.plain_values import fields_to_plain
from batchtune.scenario.units import rounded_duration
from batchtune.twin.model.capacity import highest_rates
from batchtune.twin.model.reading import Fitted
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.model.twin import NEAR_SATURATION, Prediction, Twin, estimate_of
from batchtune.twin.simulator.replica import Batcher, Routing

POOL_MOST: Final = 16
"""A larger fleet is simulated as a pool of so many replicas with its share of the traffic."""

SHOWN: Final = ("p50", "p95", "p99")
"""Latencies that every plan tells; those of other limits come besides."""

SURE_RATIO: Final = 0.95
REPLICAS_MOST: Final = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """How many replicas keep every limit at this rate.

    `replicas` holds the median over the twin's readings and their 95 % interval; `advised` is enough by 95 % of them.
    `per_replica_rps` is what one replica may get, at most 90 % of its saturation `saturation_rps`;
    `by_saturation_alone` is what the rate divided by 90 % of the saturation gives, whatever the latency.
    `latency_s` and `busy_ratio` are those expected with the advised number. `simulated_replicas`: how many were
    simulated together. `extrapolations` name what lies outside the calibrated range.
    """

    rate_rps: float
    limits: tuple[Limit, ...]
    error_ratio: float
    routing: Routing
    replicas: Estimate
    advised: int
    per_replica_rps: Estimate
    saturation_rps: float
    by_saturation_alone: int
    latency_s: dict[str, Estimate]
    mean_batch_rows: float
    busy_ratio: float
    simulated_replicas: int
    extrapolations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def extrapolated(self) -> bool:
        return bool(self.extrapolations)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, safe for JSON."""
        limits = [{"name": limit.name, "seconds": limit.seconds} for limit in self.limits]
        return {**fields_to_plain(self), "limits": limits, "extrapolated": self.extrapolated}


def plan_replicas(
    twin: Twin,
    batcher: Batcher,
    traffic: Traffic,
    *,
    rate_rps: float,
    limits: Sequence[Limit],
    error_ratio: float = 0.01,
    routing: Routing = "round_robin",
) -> ReplicaPlan:
    """The replicas that a rate needs, over the twin's readings.

    All replicas are alike and share the traffic's pattern. Up to POOL_MOST of them are simulated as they are, with the
    whole stream. A larger fleet is represented by a pool of POOL_MOST that gets its share of the rate. For random
    routes of Poisson arrivals that is exact, since thinning a Poisson stream leaves one. In turn (round robin) each of
    R replicas sees every R-th arrival, nearly evenly spaced from 16 on; least loaded, replicas become independent as
    their number grows. In both, a small pool is served a little less evenly than the fleet: the plan errs towards
    more replicas. Stream and rate limits of a load balancer, and its delay, are not simulated.

    Raises:
        TwinError: no rate keeps the limits, or the rate is not above 0.
    """
    if not 0.0 < rate_rps < math.inf:
        raise TwinError(f"a plan needs a rate above 0; was {rate_rps:g}", hint="give --rate 10000")
    fleet = _Fleet(twin, batcher, traffic, limits, error_ratio, routing)
    shares = fleet.shares(rate_rps)
    if not np.median(shares) > 0.0:
        promise = " and ".join(f"{limit.name} within {rounded_duration(limit.seconds)}" for limit in limits)
        raise TwinError(
            f"no rate keeps {promise} with these parameters, by the model of the server",
            hint="relax the limit, lower batch_timeout_micros, or plan with other parameters by --set",
        )
    needed = _replicas(rate_rps, np.maximum(shares, rate_rps / REPLICAS_MOST))
    advised = int(np.quantile(needed, SURE_RATIO, method="higher"))
    expected = fleet.predict(rate_rps, advised)
    saturation = twin.saturation_rps(batcher, traffic)
    notes = []
    if traffic.load is not None and traffic.load.arrivals == "trace":
        notes.append("the trace is played faster or slower to reach the rate of each replica")
    if advised > POOL_MOST:
        notes.append(f"a pool of {POOL_MOST} replicas with its share of the rate stands for all {advised:,}")
    return ReplicaPlan(
        rate_rps=rate_rps,
        limits=tuple(limits),
        error_ratio=error_ratio,
        routing=routing,
        replicas=estimate_of(needed),
        advised=advised,
        per_replica_rps=estimate_of(shares),
        saturation_rps=saturation,
        by_saturation_alone=int(_replicas(rate_rps, np.array([NEAR_SATURATION * saturation]))[0]),
        latency_s={name: expected.latency(name) for name in expected.latency_s},
        mean_batch_rows=float(np.median(expected.mean_batch_rows)),
        busy_ratio=float(np.median(expected.busy_ratio)),
        simulated_replicas=min(advised, POOL_MOST),
        extrapolations=expected.extrapolations,
        notes=tuple(notes),
    )


class _Fleet:
    """Asks the simulator about pools of replicas."""

    def __init__(
        self,
        twin: Twin,
        batcher: Batcher,
        traffic: Traffic,
        limits: Sequence[Limit],
        error_ratio: float,
        routing: Routing,
    ) -> None:
        self._twin, self._batcher, self._traffic = twin, batcher, traffic.at(1.0)
        self._limits, self._error_ratio, self._routing = limits, error_ratio, routing

    def shares(self, rate_rps: float) -> NDArray[np.float64]:
        """What one replica may get by each reading, in requests/s: 0 where no rate is feasible.

        Every reading is asked about one replica alone, which tells how many there will be about. What a pool of that
        size (at most POOL_MOST) gains over one alone is asked of the best reading only.
        """
        readings = [self._twin.best_fit, *self._twin.fits]
        alone = self._highest(readings, 1)
        if self._routing == "random" and self._poisson:
            return self._below_ceiling(alone)
        usual = float(alone[0])
        pool = POOL_MOST if usual <= 0.0 else int(min(max(math.ceil(rate_rps / usual), 1), POOL_MOST))
        if pool > 1:
            together = float(self._highest(readings[:1], pool)[0])
            alone = alone * (together / usual) if usual > 0.0 else np.full(len(alone), together)
        return self._below_ceiling(alone)

    def predict(self, rate_rps: float, replicas: int) -> Prediction:
        pool = min(replicas, POOL_MOST)
        return self._twin.predict(
            self._batcher,
            self._traffic.at(rate_rps * pool / replicas),
            quantiles=tuple(dict.fromkeys((*SHOWN, *(limit.name for limit in self._limits)))),
            replicas=pool,
            routing=self._routing,
        )

    @property
    def _poisson(self) -> bool:
        return self._traffic.load is None or self._traffic.load.arrivals == "poisson"

    def _highest(self, readings: Sequence[Fitted], pool: int) -> NDArray[np.float64]:
        """The highest rate of each replica in such a pool, by each reading."""
        rates = highest_rates(
            self._batcher,
            self._traffic,
            readings,
            limits=self._limits,
            error_ratio=self._error_ratio,
            replicas=pool,
            routing=self._routing,
        )
        return np.asarray(rates / pool)

    def _below_ceiling(self, rates: NDArray[np.float64]) -> NDArray[np.float64]:
        """At most 90 % of the saturation; without the best reading, which comes first."""
        ceilings = [
            NEAR_SATURATION * fit.saturation_rps(self._batcher, self._traffic) for fit in self._twin.fits
        ]
        return np.minimum(rates[1:], ceilings)


def _replicas(rate_rps: float, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    replicas: NDArray[np.float64] = np.maximum(np.ceil(rate_rps / shares - 1e-9), 1.0)
    return replicas
