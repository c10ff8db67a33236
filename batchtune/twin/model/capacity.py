"""Which is the highest rate that keeps every limit, by simulation?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.slo import Limit
from batchtune.twin.model.play import MOST_REQUESTS, enough_requests, play
from batchtune.twin.model.reading import Fitted, rows_needed, timed
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher, Routing

LEAST_SERVED = 0.98
"""A server that answers less than this share of what is offered falls behind."""

PRECISION = 0.01
"""A search ends where the rate is known to this, or the latency this near to its limit (in logs)."""

_DOWN = (1.0, 0.9, 0.75, 0.55, 0.35, 0.18, 0.08, 0.03, 0.01)
_STEP = 0.07
_HALVINGS = 6


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
    """Requests/s of all `replicas` together for each reading, shape (readings,); 0 where no rate tried keeps all
    limits and the share of errors.

    Looks downwards from the saturation of the first reading; the others are looked at from the same share of theirs.
    All get the same arrivals. No rate above the saturation is kept: a run only seems to, when it ends before the queue
    has grown.
    """
    margins = _Margins(batcher, traffic, limits, error_ratio, replicas, routing)
    first = _downwards(margins, readings[0])
    share = first / margins.saturation_rps(readings[0])
    rest = [
        _around(margins, reading, share * margins.saturation_rps(reading))
        if first > 0.0
        else _downwards(margins, reading)
        for reading in readings[1:]
    ]
    return np.array([first, *rest])


class _Margins:
    """The least log(limit / latency) at a rate, -inf where the server falls behind or refuses too much.

    From 0 on every limit is kept; inf where there is none.
    """

    def __init__(
        self,
        batcher: Batcher,
        traffic: Traffic,
        limits: Sequence[Limit],
        error_ratio: float,
        replicas: int,
        routing: Routing,
    ) -> None:
        self._batcher, self._traffic, self._limits, self._errors = batcher, traffic, limits, error_ratio
        self._replicas, self._routing = replicas, routing
        self._rows_max = rows_needed(batcher, traffic)
        # Twice what a prediction takes: near saturation a queue needs long to grow to its usual length. On 24 points
        # each of ten emulated devices capacities are then -1 to +3 % off; by half a prediction's they were -4 to +9 %.
        self._requests = min(2 * enough_requests(batcher, traffic), MOST_REQUESTS) if replicas == 1 else None

    def at(self, rate_rps: float, reading: Fitted) -> float:
        played = play(
            timed(self._batcher, reading.wake_s, self._traffic),
            self._traffic.at(rate_rps),
            [reading.device(self._rows_max, rate_rps=rate_rps / self._replicas)],
            quantiles=tuple(limit.quantile for limit in self._limits),
            requests=self._requests,
            replicas=self._replicas,
            routing=self._routing,
        )
        errors = float(played.error_ratio[0])
        if errors > self._errors or played.throughput_rps[0] < LEAST_SERVED * rate_rps * (1.0 - errors):
            return -np.inf
        kept = zip(self._limits, played.latency_s[0], strict=True)
        return min((_log_ratio(limit.seconds, float(latency_s)) for limit, latency_s in kept), default=np.inf)

    def saturation_rps(self, reading: Fitted) -> float:
        return self._replicas * reading.saturation_rps(self._batcher, self._traffic)


def _downwards(margins: _Margins, reading: Fitted) -> float:
    """From the saturation, which no server keeps up for long, down to a rate that keeps the limit."""
    saturation = margins.saturation_rps(reading)
    above = (saturation, -np.inf)
    for share in _DOWN:
        here = (saturation * share, margins.at(saturation * share, reading))
        if here[1] >= 0.0:
            return _halved(margins, reading, here, above)
        above = here
    return 0.0


def _around(margins: _Margins, reading: Fitted, rate_rps: float) -> float:
    """From a rate near which the crossing is expected, in widening steps towards it."""
    saturation = margins.saturation_rps(reading)
    here, step = (rate_rps, margins.at(rate_rps, reading)), _STEP
    upwards = here[1] >= 0.0
    while here[0] < saturation if upwards else here[0] > saturation * _DOWN[-1]:
        rate = min(here[0] * math.exp(step if upwards else -step), saturation)
        there = (rate, margins.at(rate, reading))
        if (there[1] >= 0.0) != upwards:
            below, above = (here, there) if upwards else (there, here)
            return _halved(margins, reading, below, above)
        here, step = there, 2.0 * step
    return here[0] if upwards else 0.0


def _halved(
    margins: _Margins, reading: Fitted, below: tuple[float, float], above: tuple[float, float]
) -> float:
    """Regula falsi on log rate where both margins are finite, else the middle."""
    for _ in range(_HALVINGS):
        if above[0] <= below[0] * (1.0 + PRECISION):
            break
        rate = _between(below, above)
        here = (rate, margins.at(rate, reading))
        if abs(here[1]) < PRECISION:
            return rate
        below, above = (here, above) if here[1] >= 0.0 else (below, here)
    return _between(below, above) if np.isfinite(above[1]) else below[0]


def _between(below: tuple[float, float], above: tuple[float, float]) -> float:
    share = 0.5
    if np.isfinite(above[1]) and np.isfinite(below[1]):
        share = float(np.clip(below[1] / max(below[1] - above[1], 1e-9), 0.1, 0.9))
    return float(below[0] * (above[0] / below[0]) ** share)


def _log_ratio(limit_s: float, latency_s: float) -> float:
    """log(limit / latency); a latency is inf where more than its share of the requests failed."""
    if math.isinf(latency_s):
        return -math.inf
    return math.log(limit_s / latency_s) if latency_s > 0.0 else math.inf
