"""Predicts how the server behaves with given parameters under given traffic, and how far that can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.quantiles import QUANTILES, SHOWN, Estimate
from batchtune.measure.slo import Limit
from batchtune.plain_values import Coded, coded, to_plain
from batchtune.twin.service_time import Fitted, rows_needed, timed
from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    Routing,
    SimulatedTraffic,
    Summary,
    closed_traffic,
    summary_of,
)
from batchtune.twin.traffic import Traffic

MOST_REQUESTS = 40_000


WARM_UP_SHARE = 0.1


def play(
    batcher: Batcher,
    traffic: Traffic,
    devices: Sequence[Device],
    *,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
    requests: int | None = None,
    replicas: int = 1,
    routing: Routing = "round_robin",
) -> Summary:
    """Simulate traffic on each of `devices`; the first tenth of the time is warm-up, and does not count. Returns
    figures of shape (devices,).

    In a closed loop warm-up is a tenth of the least time in which the first device can answer the requests. Where a
    fifth of them or more is refused, the loop is simulated once more, with 20 times as many and without warm-up.
    `requests`: how many to simulate; None: `enough_requests` for each replica, in all at most 100,000. A think time is
    simulated as a delay of the answer, and subtracted from the latencies. The clients of a closed loop begin one after
    another during the first execution: those that fit into one batch then alternate in two halves, as with a real
    server. If all began at one instant, they would all be in the first batch and in every further one.
    """
    # Several replicas all count for the quantile, so that each need not see as many.
    most_requests_of_pool = 100_000
    count = requests or min(replicas * enough_requests(batcher, traffic), most_requests_of_pool)
    many_refused_ratio = 0.2
    # Clients of a closed loop that are refused come again at once, and use up a simulation's requests in no
    # time.
    longer_when_refused = 20
    think_s = traffic.think_s
    answering = (
        [replace(device, delay_s=device.delay_s + think_s) for device in devices] if think_s else devices
    )

    def drawn(count: int) -> dict[str, Any]:
        """The requests of either loop, apart from when they are sent."""
        pool = {"replicas": replicas, "routing": routing, "seed": traffic.seed}
        return {"rows": traffic.rows_of(count), "lengths": traffic.lengths_of(count), **pool}

    def closed(count: int, warm_up_s: float) -> Summary:
        spread_s = float(devices[0].tau_s[1])
        loop = closed_traffic(traffic.clients or 1, count, spread_s=spread_s, **drawn(count))
        summary = summary_of(loop, batcher, answering, warm_up_s=warm_up_s, quantiles=quantiles)
        latency_s, mean_latency_s = summary.latency_s - think_s, summary.mean_latency_s - think_s
        return replace(summary, latency_s=latency_s, mean_latency_s=mean_latency_s)

    if traffic.clients is not None:
        played = closed(count, _closed_warm_up_s(batcher, traffic, devices[0], count))
        few_refused = np.all(played.error_ratio < many_refused_ratio)
        return played if few_refused else closed(count * longer_when_refused, 0.0)
    due_s = traffic.due_s(count)
    requests_due = SimulatedTraffic(due_s=due_s, **drawn(len(due_s)))
    warm_up_s = WARM_UP_SHARE * float(due_s[-1])
    return summary_of(requests_due, batcher, devices, warm_up_s=warm_up_s, quantiles=quantiles)


def enough_requests(batcher: Batcher, traffic: Traffic) -> int:
    """Return the number of requests to simulate for one replica: the largest of 4,000, 150 full batches (in a closed
    loop no more than 150 requests of each client) and 40 requests of each client; never more than MOST_REQUESTS."""
    rows = batcher.max_batch_size or 1
    batches = 150  # Requests of one batch are not independent.
    of_batches = batches * rows / traffic.mean_rows
    of_clients = 40 * (traffic.clients or 0)
    if traffic.clients is not None:
        of_batches = min(of_batches, batches * traffic.clients)
    fewest_requests = 4_000
    return int(min(max(of_batches, of_clients, fewest_requests), MOST_REQUESTS))


def _closed_warm_up_s(batcher: Batcher, traffic: Traffic, device: Device, count: int) -> float:
    """Warm-up of a closed loop, seconds: a tenth of the least time in which `count` requests can be answered."""
    rows = min(batcher.max_batch_size or traffic.rows_most, len(device.tau_s) - 1)
    in_flight_rows = (traffic.clients or 1) * traffic.mean_rows
    rows = max(int(min(rows, in_flight_rows)), 1)
    per_batch_s = float(device.tau_s[rows]) / max(batcher.batch_threads, 1)
    return WARM_UP_SHARE * count * traffic.mean_rows / rows * per_batch_s


NEAR_SATURATION: Final = 0.9
"""Share of the saturation above which latencies depend on how long the queue has grown, and are not trusted."""


def shown_quantiles(limits: Sequence[Limit]) -> tuple[str, ...]:
    """Return the names of the quantiles to show: SHOWN (`p50`, `p95`, `p99`), then those of the limits, such as `p90`,
    each once."""
    return tuple(dict.fromkeys((*SHOWN, *(limit.name for limit in limits))))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How well a fit without some trials predicts these trials.

    `p95_ratio`, `throughput_ratio`: medians of |log(predicted / measured)|, natural logs; NaN: nothing to compare.
    `mape`: mean relative error over both figures, 0.1 is 10 %. `left_out`: trials predicted so; 0: too few to leave
    any out.
    """

    p95_ratio: float
    throughput_ratio: float
    mape: float
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction: each figure an array of shape (readings,), `latency_s` by quantile name in seconds.

    `error_ratio`: share of requests refused. `busy_ratio`: share of the time in which the device runs a batch.
    `extrapolations`: more rows or threads than were measured, or a rate above or near saturation; (): nothing.
    """

    throughput_rps: NDArray[np.float64]
    latency_s: dict[str, NDArray[np.float64]]
    mean_batch_rows: NDArray[np.float64]
    error_ratio: NDArray[np.float64]
    busy_ratio: NDArray[np.float64]
    extrapolations: tuple[Coded, ...] = ()

    @property
    def extrapolated(self) -> bool:
        """Whether batches or threads are beyond those measured, or the rate is above or near saturation."""
        return bool(self.extrapolations)

    @property
    def throughput(self) -> Estimate:
        """Throughput, requests/s: the median over the readings, with the interval of 95 % of them."""
        return estimate_of(self.throughput_rps)

    def latency(self, quantile: str) -> Estimate:
        """Return a latency in seconds: the median over the readings, with the interval of 95 % of them.

        `quantile`: its name, such as `p95`; KeyError where it was not predicted.
        """
        return estimate_of(self.latency_s[quantile])

    def to_dict(self) -> dict[str, Any]:
        """Return figures by name, as values that JSON takes: each the median over the readings with its interval;
        latencies, in seconds, under `latency_s`."""
        figures = ("throughput_rps", "mean_batch_rows", "error_ratio", "busy_ratio")
        return {
            **{name: to_plain(estimate_of(getattr(self, name))) for name in figures},
            "latency_s": {name: to_plain(self.latency(name)) for name in self.latency_s},
            "extrapolated": self.extrapolated,
            "extrapolations": to_plain(self.extrapolations),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A calibrated model of one server: `best_fit`, the best reading of its parameters, and `fits`, others that fit
    about as well, whose spread is the uncertainty.

    `rows_max`, `threads_max`: the largest batch and the most batch threads that were measured. `reports`: whether the
    server reports its batches; if not, `rows_max` is the largest mean batch of a run.
    `error`: how well trials are predicted that were left out of a fit. `observations`: number of trials that can be
    used.
    """

    best_fit: Fitted
    fits: tuple[Fitted, ...]
    rows_max: int
    threads_max: int
    error: FitError
    observations: int = 0
    reports: bool = True

    @property
    def reliable(self) -> bool:
        """Whether trials that were left out of the fit are predicted with a mean error of at most 30 %; True where
        there were too few to leave any out."""
        # Mean error on trials left out, above which the twin's predictions are not to be relied on.
        reliable_below = 0.30
        return not self.error.left_out or math.isnan(self.error.mape) or self.error.mape <= reliable_below

    def predict(
        self,
        batcher: Batcher,
        traffic: Traffic,
        *,
        quantiles: Sequence[str] = SHOWN,
        replicas: int = 1,
        routing: Routing = "round_robin",
    ) -> Prediction:
        """Simulate this traffic, that of all `replicas` together, with every reading of `fits`.

        `quantiles`: names of the latencies to return, of `QUANTILES`, such as `p95`; KeyError for any other. `routing`:
        how requests are spread over the replicas.
        """
        share_rps = (traffic.offered_rps or 0.0) / replicas
        played = play(
            timed(batcher, self.best_fit.wake_s, traffic),
            traffic,
            [fit.device(rows_needed(batcher, traffic), rate_rps=share_rps) for fit in self.fits],
            quantiles=tuple(QUANTILES[name] for name in quantiles),
            replicas=replicas,
            routing=routing,
        )
        return Prediction(
            throughput_rps=played.throughput_rps,
            latency_s={name: played.latency_s[:, at] for at, name in enumerate(quantiles)},
            mean_batch_rows=played.mean_batch_rows,
            error_ratio=played.error_ratio,
            busy_ratio=played.busy_ratio,
            extrapolations=self._extrapolations(batcher, traffic, played, replicas),
        )

    def slower(self, factor: float) -> Twin:
        """Return a copy of the twin with all execution times of batches multiplied by `factor`, in every reading."""
        return replace(
            self, best_fit=self.best_fit.slower(factor), fits=tuple(fit.slower(factor) for fit in self.fits)
        )

    def saturation_rps(self, batcher: Batcher, traffic: Traffic) -> float:
        """Compute the saturation by the best reading, requests/s: every batch full and every thread busy."""
        return self.best_fit.saturation_rps(batcher, traffic)

    def _extrapolations(
        self, batcher: Batcher, traffic: Traffic, played: Summary, replicas: int
    ) -> tuple[Coded, ...]:
        extrapolations = []
        rows_most = int(played.batch_rows_max.max())
        if not self.reports:
            rows_most = round(float(np.median(np.nan_to_num(played.mean_batch_rows))))
        if rows_most > self.rows_max:
            extrapolations.append(coded("rows_beyond", most=rows_most, calibrated=self.rows_max))
        in_flight = math.inf if traffic.clients is None else traffic.clients
        threads = min(batcher.batch_threads, in_flight)
        if threads > self.threads_max:
            extrapolations.append(coded("threads_beyond", threads=threads, calibrated=self.threads_max))
        rate_rps = traffic.offered_rps
        if rate_rps is not None:
            saturation = replicas * self.saturation_rps(batcher, traffic)
            if rate_rps > saturation:
                completed = played.throughput_rps
                if traffic.rate_rps is not None:  # in the long run, as `long_run` states it
                    saturated = [fit.saturation_rps(batcher, traffic) for fit in self.fits]
                    saturations = replicas * np.array(saturated)
                    completed = np.where(saturations < rate_rps, saturations, completed)
                completed_rps = estimate_of(completed).value
                extrapolations.append(coded("overload", rate_rps=rate_rps, completed_rps=completed_rps))
            elif rate_rps > NEAR_SATURATION * saturation:
                figures = {"rate_rps": rate_rps, "near_ratio": NEAR_SATURATION, "saturation_rps": saturation}
                extrapolations.append(coded("near_saturation", **figures))
        return tuple(extrapolations)


def estimate_of(values: NDArray[np.float64]) -> Estimate:
    """Return the median of values, one for each reading, with the interval that contains 95 % of them."""
    low, middle, high = np.quantile(values, [0.025, 0.5, 0.975], method="closest_observation")
    return Estimate(value=float(middle), low=float(low), high=float(high))
