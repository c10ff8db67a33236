"""Finds the highest rate that keeps every limit, and how many replicas a rate needs, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import TwinError
from batchtune.measure.quantiles import QUANTILES, Estimate
from batchtune.measure.slo import Limit
from batchtune.plain_values import Coded, coded, fields_to_plain
from batchtune.twin.service_time import Fitted, rows_needed, timed
from batchtune.twin.simulator.simulate import Batcher, Routing
from batchtune.twin.traffic import Traffic
from batchtune.twin.twin import (
    MOST_REQUESTS,
    NEAR_SATURATION,
    Prediction,
    Twin,
    enough_requests,
    estimate_of,
    play,
    shown_quantiles,
)
from batchtune.units import rounded_duration

# The highest rate of one server, or of a pool, that keeps every limit; and a prediction of what exceeds it.


def long_run(prediction: Prediction, twin: Twin, batcher: Batcher, traffic: Traffic) -> Prediction:
    """Return the prediction with the figures of a long overload, for the readings whose saturation is below the rate.

    A simulation is short: one of a million requests/s for 40 ms ends before the first large batch does. In the long run
    a server answers at its saturation. Further requests are refused once the queue of batches is full, and those
    accepted wait for the whole queue. A queue without a limit, as of a server without batching, refuses none, and the
    latency is inf.
    """
    rate_rps = traffic.rate_rps
    if traffic.closed or rate_rps is None:
        return prediction
    saturations = np.array([fit.saturation_rps(batcher, traffic) for fit in twin.fits])
    over = saturations < rate_rps
    if not over.any():
        return prediction
    bounded = batcher.max_batch_size is not None and batcher.max_enqueued_batches is not None
    refused = 1.0 - saturations / rate_rps if bounded else np.zeros_like(saturations)
    waits_s = np.array([_full_queue_s(batcher, traffic, fit) for fit in twin.fits])
    latency_s = {
        name: np.where(over, np.where(refused > 1.0 - QUANTILES[name], math.inf, waits_s), simulated_s)
        for name, simulated_s in prediction.latency_s.items()
    }
    return replace(
        prediction,
        throughput_rps=np.where(over, saturations, prediction.throughput_rps),
        error_ratio=np.where(over, refused, prediction.error_ratio),
        busy_ratio=np.where(over, 1.0, prediction.busy_ratio),
        latency_s=latency_s,
    )


def _full_queue_s(batcher: Batcher, traffic: Traffic, fit: Fitted) -> float:
    """Latency in seconds of a request that gets the last place in a full queue; inf: the queue has no bound."""
    if batcher.max_batch_size is None or batcher.max_enqueued_batches is None:
        return math.inf
    batches = max(batcher.max_enqueued_batches, 1) + batcher.batch_threads
    rows_per_s = fit.saturation_rps(batcher, traffic) * traffic.mean_rows
    return batches * (batcher.batch_rows_max or 1) / rows_per_s + fit.delay_s


PRECISION = 0.01
"""A search ends where the rate is known this well, or the latency is this near to its limit (natural logs)."""


_DOWN = (1.0, 0.9, 0.75, 0.55, 0.35, 0.18, 0.08, 0.03, 0.01)
"""Shares of the saturation at which a search downwards looks."""

Margin = Callable[[float], float]
"""A function from the natural log of a rate (requests/s) to the least log(limit / latency) of all limits: at least 0
where every limit is kept."""


def highest_rates(
    batcher: Batcher,
    traffic: Traffic,
    readings: Sequence[Fitted],
    *,
    limits: Sequence[Limit],
    error_ratio: float,
    replicas: int = 1,
    routing: Routing = "round_robin",
) -> NDArray[np.float64]:
    """Search the highest rate that keeps all limits, by each reading.

    Returns requests/s of all `replicas` together, shape (readings,); 0 where no rate keeps the limits.
    `error_ratio`: the share of requests, 0 to 1, that may be refused. For the first reading the search goes
    down from the saturation; for the others it starts at the share of the saturation that the first reading
    had. All use the same arrivals. Rates above the saturation count as missed: there a simulation ends before
    the queue has grown.
    """
    rows_max = rows_needed(batcher, traffic)
    # Twice what a prediction takes: near saturation a queue needs long to grow to its usual length. On 24 points
    # each of ten emulated devices capacities are then -1 to +3 % off; by half a prediction's they were -4 to +9 %.
    requests = min(2 * enough_requests(batcher, traffic), MOST_REQUESTS) if replicas == 1 else None

    least_served = 0.98  # A server that answers less than this share of what is offered falls behind.

    far = 3.0  # Margins are cut here: a server that falls behind shows no more than that it does.

    def margin_of(reading: Fitted) -> Margin:
        @cache
        def margin(log_rate: float) -> float:
            rate_rps = math.exp(log_rate)
            played = play(
                timed(batcher, reading.wake_s, traffic),
                traffic.at(rate_rps),
                [reading.device(rows_max, rate_rps=rate_rps / replicas)],
                quantiles=tuple(limit.quantile for limit in limits),
                requests=requests,
                replicas=replicas,
                routing=routing,
            )
            errors = float(played.error_ratio[0])
            if errors > error_ratio or played.throughput_rps[0] < least_served * rate_rps * (1.0 - errors):
                return -far
            kept = zip(limits, played.latency_s[0], strict=True)
            least = min(
                (_log_ratio(limit.seconds, float(latency_s)) for limit, latency_s in kept), default=far
            )
            return 0.0 if abs(least) < PRECISION else float(np.clip(least, -far, far))

        return margin

    margins = [margin_of(reading) for reading in readings]
    saturations = [math.log(replicas * reading.saturation_rps(batcher, traffic)) for reading in readings]
    first = _downwards(margins[0], saturations[0])
    rest = [
        _around(margin, saturation + first - saturations[0], saturation)
        if math.isfinite(first)
        else _downwards(margin, saturation)
        for margin, saturation in zip(margins[1:], saturations[1:], strict=True)
    ]
    return np.exp([first, *rest])


def _downwards(margin: Margin, saturation: float) -> float:
    """Search downwards from the saturation. Returns the log of the highest rate that keeps the limits; -inf: none."""
    above = saturation
    for share in _DOWN:
        here = saturation + math.log(share)
        if margin(here) >= 0.0:
            return here if here == above else _crossing(margin, here, above)
        above = here
    return -math.inf


def _around(margin: Margin, expected: float, saturation: float) -> float:
    """Search in widening steps from the expected log rate. Returns the log of the highest rate that keeps the limits;
    -inf: none does."""
    here, step = expected, 0.07
    upwards = margin(here) >= 0.0
    while here < saturation if upwards else here > saturation + math.log(_DOWN[-1]):
        there = min(here + (step if upwards else -step), saturation)
        if (margin(there) >= 0.0) != upwards:
            return _crossing(margin, min(here, there), max(here, there))
        here, step = there, 2.0 * step
    return here if upwards else -math.inf


def _crossing(margin: Margin, kept: float, missed: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(margin, kept, missed, xtol=PRECISION))


def _log_ratio(limit_s: float, latency_s: float) -> float:
    """log(limit / latency); -inf for a latency of inf, as of a quantile within the failed requests."""
    if math.isinf(latency_s):
        return -math.inf
    return math.log(limit_s / latency_s) if latency_s > 0.0 else math.inf


# Corrects the twin by the rates that a configuration held and missed when it was measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """The measured bracket of one server, requests/s: the highest rate that met the SLO (0: none) and the lowest that
    missed it (None: none). `is_share`: `held_rps` is only a share of that highest rate, which no confirmation run met.
    `is_bound`: no run missed at `missed_rps` itself. `doubtful_rps`: the lowest rate that a run missed, where it does
    not count as missed; None: none. `missed_runs`: confirmation runs that missed `held_rps` or a higher rate.
    """

    held_rps: float
    missed_rps: float | None
    is_share: bool = False
    is_bound: bool = False
    doubtful_rps: float | None = None
    missed_runs: int = 0

    @property
    def most_rps(self) -> float:
        """Lowest rate that missed the SLO, requests/s; inf: none did."""
        return math.inf if self.missed_rps is None else self.missed_rps

    def hold(self, rate_rps: float) -> bool:
        """Whether a rate (requests/s) lies in the bracket, or outside by at most PRECISION, a share of the end."""
        return self.held_rps * (1.0 - PRECISION) <= rate_rps <= self.most_rps * (1.0 + PRECISION)

    def clipped(self, rates_rps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the rates (requests/s), those outside the bracket moved to its nearer end."""
        return np.clip(rates_rps, self.held_rps, self.most_rps)


def held_to(
    twin: Twin,
    batcher: Batcher,
    traffic: Traffic,
    limits: Sequence[Limit],
    error_ratio: float,
    measured: MeasuredRates,
) -> tuple[Twin, float]:
    """Scale the twin's batch times so that its highest rate within the limits lies in the measured bracket.

    Returns (scaled twin, the highest rate that it predicted before, requests/s). `error_ratio`: share of
    requests, 0 to 1, that may fail. A prediction outside the bracket is moved to the nearer end, by one
    factor from 1/30 to 30 on all batch times; where no such factor does that, the twin is returned unchanged.
    """

    def highest(factor: float) -> float:
        reading = twin.slower(factor).best_fit
        return float(highest_rates(batcher, traffic, [reading], limits=limits, error_ratio=error_ratio)[0])

    twin_rps = highest(1.0)
    if measured.hold(twin_rps):
        return twin, twin_rps
    wanted_rps = float(measured.clipped(np.array([twin_rps]))[0])

    most_factor = 30.0  # A twin is made at most so many times slower or faster.

    def off(log_factor: float) -> float:
        rate_rps = highest(math.exp(log_factor))
        return math.log(rate_rps / wanted_rps) if rate_rps > 0.0 else -math.log(most_factor)

    ends = (0.0, math.log(most_factor)) if twin_rps > wanted_rps else (-math.log(most_factor), 0.0)
    if off(ends[0]) < 0.0 or off(ends[1]) > 0.0:
        return twin, twin_rps  # what limits the twin is not its batches
    from scipy.optimize import brentq

    factor = math.exp(brentq(off, *ends, xtol=PRECISION))
    return twin.slower(factor), twin_rps


POOL_MOST: Final = 16
"""Replicas that are simulated at most: a larger fleet is simulated as a pool of this many with its share of the
traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """How many replicas of a fleet may be down at once: `count`; if that is 0, a `share` of the fleet (0 to 1)."""

    count: int = 0
    share: float = 0.0

    def down(self, replicas: int) -> int:
        """Return how many may be down at once in a fleet of `replicas`; a share is rounded up."""
        return self.count or math.ceil(self.share * replicas - 1e-9)

    def fleet(self, needed: int) -> int:
        """Return the size of the smallest fleet that still has `needed` replicas when `down` of it are down."""
        if self.count:
            return needed + self.count
        replicas = math.floor(needed / (1.0 - self.share))
        while replicas - self.down(replicas) < needed:
            replicas += 1
        return replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The prediction while `down` replicas are down: latency by quantile name in seconds, and the busy share of the
    other replicas' devices."""

    down: int
    latency_s: dict[str, Estimate]
    busy_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """How many replicas keep every limit at a rate.

    `replicas`: median over the twin's readings, with the interval of 95 % of them, each moved into the measured
    bracket. `advised`: enough by 95 % of the readings so moved, and as many more as may be down. `kept_ratio`: share of
    the readings themselves whose prediction keeps every limit with as many down.
    `per_replica_rps`: the rate that one replica may get, by the limits and at most 90 % of its `saturation_rps`.
    `by_saturation_alone`: enough by 95 % of the readings, whatever the latency, if each gets 90 % of its saturation.
    `latency_s` (quantile name -> seconds), `mean_batch_rows`, `busy_ratio`: expected with `advised` replicas.
    `simulated_replicas`: replicas in that simulation. `extrapolations`: as of a `Prediction`.
    `failure`: figures with the allowed number of replicas down; None: no replica may be down.
    `measured`: the measured bracket of one replica, and `twin_rps`: the highest rate by the twin before it was scaled
    to that bracket; None: no bracket was measured.
    """

    rate_rps: float
    limits: tuple[Limit, ...]
    error_ratio: float
    routing: Routing
    replicas: Estimate
    advised: int
    kept_ratio: float
    per_replica_rps: Estimate
    saturation_rps: float
    by_saturation_alone: int
    latency_s: dict[str, Estimate]
    mean_batch_rows: float
    busy_ratio: float
    simulated_replicas: int
    failure: Failure | None = None
    measured: MeasuredRates | None = None
    twin_rps: float | None = None
    extrapolations: tuple[Coded, ...] = ()
    notes: tuple[Coded, ...] = ()

    @property
    def extrapolated(self) -> bool:
        """Whether batches or threads are beyond those measured, or the rate is above or near saturation."""
        return bool(self.extrapolations)

    @property
    def contradicted(self) -> bool:
        """Whether the highest rate by the twin, before it was scaled, lies outside the measured bracket."""
        return self.measured is not None and not self.measured.hold(self.twin_rps or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `extrapolated` by name, as values that JSON takes; each limit as {name, seconds}."""
        limits = [{"name": limit.name, "seconds": limit.seconds} for limit in self.limits]
        return {**fields_to_plain(self), "limits": limits, "extrapolated": self.extrapolated}


class Replicas:
    """Plans and predicts a fleet of equal replicas behind a load balancer, by simulation.

    `failing`: how many replicas may be down; None: no replica. `measured`: the measured bracket of one replica, to
    which the twin is scaled; None: it is used as it is.

    Up to POOL_MOST replicas are simulated together, with all arrivals. A larger fleet is simulated as a pool of
    POOL_MOST that gets its share of the rate. For `random` routing of Poisson arrivals that is exact, since each
    replica gets Poisson arrivals in any case. With `round_robin` each of R replicas gets every R-th arrival, nearly
    evenly spaced from R = 16 on; with `least_loaded` replicas become independent as R grows. Compared with whole fleets
    of 64 and 1,000 at 0.3 to 0.9 of the saturation, the pool's p95 was -0.6 to +0.3 % off with the first two; with
    `least_loaded` it was 0.2 to 2.7 % too low, and p50 up to 10 %, so that the plan has too few replicas rather than
    too many. The simulation is also short: for a calibrated server, random, at 0.77 of its saturation, p95 was 2.4 %
    too low and p99 4.7 %. Limits and delay of the load balancer itself are not simulated.
    """

    def __init__(
        self,
        twin: Twin,
        batcher: Batcher,
        traffic: Traffic,
        limits: Sequence[Limit],
        error_ratio: float,
        routing: Routing,
        failing: Failing | None = None,
        measured: MeasuredRates | None = None,
    ) -> None:
        self._batcher, self._traffic = batcher, traffic.at(1.0)
        self._limits, self._error_ratio, self._routing = tuple(limits), error_ratio, routing
        self._failing = failing
        self._twin, self._measured, self._twin_rps = twin, measured, None
        if measured is not None:
            self._twin, self._twin_rps = held_to(
                twin, batcher, self._traffic, self._limits, error_ratio, measured
            )
        self._highest_of_pool: dict[int, NDArray[np.float64]] = {}

    def plan(self, rate_rps: float) -> ReplicaPlan:
        """Compute how many replicas this rate (requests/s) needs.

        Raises:
            TwinError: no rate keeps the limits, the rate is not above 0, or it needs more than 10 million replicas.
        """
        needed, shares = self._needed(rate_rps)
        enough = _enough(needed)
        advised = enough if self._failing is None else self._failing.fleet(enough)
        expected = fewest = self.predict(rate_rps, advised)
        failure = None
        if self._failing is not None:
            down = self._failing.down(advised)
            fewest = self.predict(rate_rps, advised - down)
            busy_ratio = float(np.median(fewest.busy_ratio))
            failure = Failure(down=down, latency_s=_estimates(fewest), busy_ratio=busy_ratio)
        in_time = [fewest.latency_s[limit.name] <= limit.seconds for limit in self._limits]
        kept = np.all([fewest.error_ratio <= self._error_ratio, *in_time], axis=0)
        share = estimate_of(shares)
        return ReplicaPlan(
            rate_rps=rate_rps,
            limits=self._limits,
            error_ratio=self._error_ratio,
            routing=self._routing,
            replicas=estimate_of(needed),
            advised=advised,
            kept_ratio=float(np.mean(kept)),
            per_replica_rps=share,
            # What runs held, or most readings allow, may be more than what saturates the best reading.
            saturation_rps=max(self._twin.saturation_rps(self._batcher, self._traffic), share.value),
            by_saturation_alone=_enough(_replicas(rate_rps, np.maximum(self._ceilings(), shares))),
            latency_s=_estimates(expected),
            mean_batch_rows=float(np.median(expected.mean_batch_rows)),
            busy_ratio=float(np.median(expected.busy_ratio)),
            simulated_replicas=min(advised, POOL_MOST),
            failure=failure,
            measured=self._measured,
            twin_rps=self._twin_rps,
            extrapolations=expected.extrapolations,
            notes=self._notes(advised),
        )

    def predict(self, rate_rps: float, replicas: int) -> Prediction:
        """Predict a fleet of this many replicas; `rate_rps`: of all of them together.

        Above POOL_MOST replicas all figures are those of the simulated pool, throughput_rps too.
        """
        pool = min(replicas, POOL_MOST)
        return self._twin.predict(
            self._batcher,
            self._traffic.at(rate_rps * pool / replicas),
            quantiles=shown_quantiles(self._limits),
            replicas=pool,
            routing=self._routing,
        )

    def _needed(self, rate_rps: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(replicas, requests/s that each may get), both of shape (readings,)."""
        if not 0.0 < rate_rps < math.inf:
            raise TwinError(f"a plan needs a rate above 0; was {rate_rps:g}", hint="give --rate 10000")
        shares = self._shares(rate_rps)
        if not np.median(shares) > 0.0:
            promise = " and ".join(
                f"{limit.name} within {rounded_duration(limit.seconds)}" for limit in self._limits
            )
            raise TwinError(
                f"the simulator predicts no rate that meets {promise} with these parameters",
                hint="relax the limit, lower batch_timeout_micros, or plan with other parameters by --set",
            )
        replicas_most = 10_000_000
        needed = _replicas(rate_rps, np.maximum(shares, rate_rps / replicas_most))
        if _enough(needed) >= replicas_most:
            raise TwinError(
                f"{replicas_most:,} replicas are not enough for {rate_rps:,.0f} requests/s, as simulated",
                hint="plan for a lower rate, or relax the limit if it is near what a single request takes",
            )
        return needed, shares

    def _notes(self, advised: int) -> tuple[Coded, ...]:
        notes = []
        if self._traffic.load is not None and self._traffic.load.arrivals == "trace":
            notes.append(coded("trace_stretched"))
        if advised > POOL_MOST:
            notes.append(coded("pool_represents", pool=POOL_MOST, replicas=advised))
        return tuple(notes)

    def _shares(self, rate_rps: float) -> NDArray[np.float64]:
        """Requests/s that one replica may get, shape (readings,); 0 where no rate keeps the limits.

        Each reading is simulated with one replica alone, and the result moved into the measured bracket. The number of
        replicas follows roughly from that; the gain of a pool of that size (at most POOL_MOST) over one alone is
        simulated with the best reading only. The result is at most 90 % of the saturation, and in the measured bracket.
        """
        usual, alone = float(self._highest(1)[0]), self._highest(1)[1:]
        held_rps = 0.0
        if self._measured is not None:
            held_rps, alone = self._measured.held_rps, self._measured.clipped(alone)
            if held_rps > 0.0 and not self._measured.hold(self._twin_rps or 0.0):
                alone = np.full_like(alone, held_rps)
        is_poisson = self._traffic.load is None or self._traffic.load.arrivals == "poisson"
        if not (self._routing == "random" and is_poisson):
            pool = POOL_MOST if usual <= 0.0 else int(min(max(math.ceil(rate_rps / usual), 1), POOL_MOST))
            if pool > 1:
                together = float(self._highest(pool)[0])
                alone = alone * (together / usual) if usual > 0.0 else np.full_like(alone, together)
        most_rps = math.inf if self._measured is None else self._measured.most_rps
        return np.clip(np.minimum(alone, self._ceilings()), held_rps, most_rps)

    def _ceilings(self) -> NDArray[np.float64]:
        """90 % of one replica's saturation, requests/s, shape (readings,)."""
        saturations = [fit.saturation_rps(self._batcher, self._traffic) for fit in self._twin.fits]
        return NEAR_SATURATION * np.array(saturations)

    def _highest(self, pool: int) -> NDArray[np.float64]:
        """Highest rate for each replica of a pool of this size, requests/s, computed once: by the best reading; for a
        pool of one also by all readings, shape (1 + readings,)."""
        if pool not in self._highest_of_pool:
            rates = highest_rates(
                self._batcher,
                self._traffic,
                [self._twin.best_fit, *(self._twin.fits if pool == 1 else ())],
                limits=self._limits,
                error_ratio=self._error_ratio,
                replicas=pool,
                routing=self._routing,
            )
            self._highest_of_pool[pool] = np.asarray(rates / pool)
        return self._highest_of_pool[pool]


def _estimates(prediction: Prediction) -> dict[str, Estimate]:
    return {name: prediction.latency(name) for name in prediction.latency_s}


def _enough(needed: NDArray[np.float64]) -> int:
    """The number of replicas that is enough by 95 % of the readings; `needed`: replicas by each reading."""
    return int(np.quantile(needed, 0.95, method="higher"))


def _replicas(rate_rps: float, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    replicas: NDArray[np.float64] = np.maximum(np.ceil(rate_rps / shares - 1e-9), 1.0)
    return replicas
