"""Finds the highest rate that keeps every limit, by simulation, and corrects predictions of overload."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.quantiles import QUANTILES
from batchtune.measure.slo import Limit
from batchtune.twin.model.fitted import Fitted, rows_needed, timed
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.model.twin import MOST_REQUESTS, Prediction, Twin, enough_requests, play
from batchtune.twin.simulator.replica import Batcher, Routing


def long_run(prediction: Prediction, twin: Twin, batcher: Batcher, traffic: Traffic) -> Prediction:
    """Return the prediction with the figures of a long overload, for the readings whose saturation is below the rate.

    A simulation is short: one of a million requests/s for 40 ms ends before the first large batch does. In the long run
    a server answers at its saturation. Further requests are refused once the queue of batches is full, and those
    accepted wait for the whole queue. Without batching no queue has a bound, and the wait is inf.
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
_STEP = 0.07

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
    `error_ratio`: the share of requests, 0 to 1, that may be refused. The search goes down from the
    saturation of the first reading; for the other readings it starts at the share of the saturation that was
    found for the first. All use the same arrivals. Rates above the saturation count as missed: there a
    simulation ends before the queue has grown.
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
    here, step = expected, _STEP
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
