"""Which is the highest rate that keeps a latency limit, by simulation?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.slo import Limit
from batchtune.twin.fitted import Fitted, rows_needed, timed
from batchtune.twin.playing import enough_requests, play
from batchtune.twin.simulate import Batcher, Routing
from batchtune.twin.traffic import Traffic

LEAST_SERVED = 0.98
"""A server that answers less than this share of what is offered falls behind."""

_DOWN = (1.0, 0.9, 0.75, 0.55, 0.35, 0.18, 0.08, 0.03, 0.01)
_ROUGH = (0.05, 0.3, 0.7)
_HALVINGS = 3
_AROUND = (0.87, 1.0, 1.14)


def highest_rates(
    batcher: Batcher,
    traffic: Traffic,
    readings: Sequence[Fitted],
    *,
    limit: Limit,
    error_ratio: float,
    replicas: int = 1,
    routing: Routing = "round_robin",
) -> NDArray[np.float64]:
    """Requests/s of all `replicas` together for each reading, shape (readings,); 0 where no rate tried keeps the limit.

    Looks downwards from the saturation of the first reading, then halves; the others are looked at around what
    was found for it, all with the same arrivals. Between two rates the crossing is interpolated on the logarithms.
    """
    margins = _Margins(batcher, traffic, limit, error_ratio, replicas, routing)
    first = _first(margins, readings[0])
    rest = list(readings[1:])
    if not rest:
        return np.array([first])
    if first <= 0.0:
        return np.concatenate([[first], _roughly(margins, rest)])
    rates = [first * one for one in _AROUND]
    seen = np.stack([margins.at(rate, rest) for rate in rates])
    found = np.array([_crossing(rates, seen[:, at]) for at in range(len(rest))])
    for at in np.flatnonzero(np.isnan(found)):
        found[at] = _first(margins, rest[at])
    return np.concatenate([[first], found])


class _Margins:
    """log(limit / latency) at a rate, -inf where the server falls behind or refuses too much; from 0 on it is kept."""

    def __init__(
        self,
        batcher: Batcher,
        traffic: Traffic,
        limit: Limit,
        error_ratio: float,
        replicas: int,
        routing: Routing,
    ) -> None:
        self._batcher, self._traffic, self._limit, self._errors = batcher, traffic, limit, error_ratio
        self._replicas, self._routing = replicas, routing
        self._rows_max = rows_needed(batcher, traffic)
        # Half of what a prediction takes: a search looks at some ten rates, all with the same arrivals.
        self._requests = enough_requests(batcher, traffic) // 2 if replicas == 1 else None

    def at(self, rate_rps: float, readings: Sequence[Fitted]) -> NDArray[np.float64]:
        played = play(
            timed(self._batcher, readings[0].wake_s),
            self._traffic.at(rate_rps),
            [one.device(self._rows_max, rate_rps=rate_rps / self._replicas) for one in readings],
            quantiles=(self._limit.quantile,),
            requests=self._requests,
            replicas=self._replicas,
            routing=self._routing,
        )
        with np.errstate(divide="ignore"):
            margin: NDArray[np.float64] = np.log(self._limit.seconds / played.latency_s[:, 0])
        behind = played.throughput_rps < LEAST_SERVED * rate_rps * (1.0 - played.error_ratio)
        margin[(played.error_ratio > self._errors) | behind] = -np.inf
        return margin

    def saturation_rps(self, reading: Fitted) -> float:
        return self._replicas * reading.saturation_rps(self._batcher, self._traffic)


def _first(margins: _Margins, reading: Fitted) -> float:
    saturation = margins.saturation_rps(reading)
    above, above_margin = saturation * 1.1, -np.inf
    for share in _DOWN:
        rate = saturation * share
        margin = float(margins.at(rate, [reading])[0])
        if margin >= 0.0:
            return _halved(margins, reading, (rate, margin), (above, above_margin))
        above, above_margin = rate, margin
    return 0.0


def _roughly(margins: _Margins, readings: Sequence[Fitted]) -> NDArray[np.float64]:
    """The highest of a few rates that is kept: enough where the first reading keeps none."""
    saturation = margins.saturation_rps(readings[0])
    found = np.zeros(len(readings))
    for share in _ROUGH:
        found = np.where(margins.at(saturation * share, readings) >= 0.0, saturation * share, found)
    return found


def _halved(
    margins: _Margins, reading: Fitted, below: tuple[float, float], above: tuple[float, float]
) -> float:
    """Regula falsi on log rate where both margins are finite, else the middle."""
    for _ in range(_HALVINGS):
        rate = _between(below, above)
        margin = float(margins.at(rate, [reading])[0])
        if margin >= 0.0:
            below = (rate, margin)
        else:
            above = (rate, margin)
    return _between(below, above) if np.isfinite(above[1]) else below[0]


def _between(below: tuple[float, float], above: tuple[float, float]) -> float:
    share = 0.5
    if np.isfinite(above[1]) and np.isfinite(below[1]):
        share = float(np.clip(below[1] / max(below[1] - above[1], 1e-9), 0.1, 0.9))
    return float(below[0] * (above[0] / below[0]) ** share)


def _crossing(rates: Sequence[float], margins: NDArray[np.float64]) -> float:
    """Where the margin turns negative; NaN when it does not within these rates."""
    feasible = np.flatnonzero(margins >= 0.0)
    if not len(feasible) or feasible[-1] == len(rates) - 1:
        return float("nan")
    at = int(feasible[-1])
    below, above = (rates[at], float(margins[at])), (rates[at + 1], float(margins[at + 1]))
    if not np.isfinite(above[1]):
        return float(np.sqrt(below[0] * above[0]))
    return _between(below, above)
