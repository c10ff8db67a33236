"""Estimates the service time of a batch by its rows from a few closed loops, and predicts each configuration by it.

The predictions only choose what is tried next and at which rate; runs decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.measure.quantiles import QUANTILES
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import ANSWERED
from batchtune.tune.search.contenders import ROWS_MAX
from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    SimulatedTraffic,
    batcher_of,
    closed_traffic,
    summary_of,
)

MISLEADING = 0.2
"""A curve that misses what was measured by more than this, in natural logs, is not trusted (noisy.py, steps)."""

_ARRIVALS = 5000, 80_000


@dataclass(frozen=True, slots=True)
class _Reading:
    """A load under which the device was never idle: rows of its batches, batch threads (0: no batching), rows/s."""

    rows: float
    threads: int
    rows_per_s: float


@dataclass(frozen=True, slots=True)
class CurvePrediction:
    """A prediction for one load: requests/s answered, p95 in seconds, and the largest ratio of a latency to its limit
    (inf: more requests are refused than the SLO allows)."""

    answered_rps: float
    p95_s: float
    of_limit: float


class Curve:
    """The service-time curve τ(b) of the server under test, fitted again with each load that `learn` gets.

    `tau_s` [4097]: seconds of a batch by its rows, executed alone. `contention`: share by which each further batch at
    once slows the others down; None: batches run one at a time. `is_line`: whether τ is a straight line.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._limits_s = {float(name[1:]) / 100.0: limit for name, limit in scenario.slo.e2e_limits().items()}
        self._quantiles = tuple(sorted({QUANTILES["p95"], *self._limits_s}))
        self._error_ratio = scenario.slo.error_ratio
        self._rows = scenario.request.rows_most
        self._cpus: Collection[int] | None = scenario.target.cpus
        self._readings: list[_Reading] = []
        self._arrivals = np.cumsum(np.random.default_rng(7).exponential(1.0, _ARRIVALS[1]))
        self._batchers: dict[Configuration, Batcher] = {}
        self._cache: dict[Batcher, float] = {}
        self.tau_s: NDArray[np.float64] = np.zeros(ROWS_MAX + 1)
        self.contention: float | None = None
        self.is_line = False

    @property
    def is_known(self) -> bool:
        """Whether a load was learned, so that τ is above 0."""
        return bool(self._readings) and self.tau_s[-1] > 0.0

    @property
    def knows_threads(self) -> bool:
        """Whether loads with one batch thread and with several were learned, so that the gain by more threads is
        known."""
        threads = {reading.threads for reading in self._readings}
        return 1 in threads and max(threads) > 1

    @property
    def rows_read(self) -> set[float]:
        """The batch sizes that were measured, in rows."""
        return {reading.rows for reading in self._readings}

    def has_read(self, rows: float, *, threads: int) -> bool:
        """Whether a batch size within a tenth of `rows` was measured with `threads` batch threads."""
        read = [reading.rows for reading in self._readings if reading.threads == threads]
        return any(math.isclose(known, rows, rel_tol=0.1) for known in read)

    def readings(self) -> dict[int, float]:
        """Return rows -> seconds of a batch, for each batch size that was measured."""
        return {int(rows): self.batch_s(rows) for rows in sorted(self.rows_read)}

    def batch_s(self, rows: float) -> float:
        """Return the seconds of a batch of this many rows; 0 while nothing is known."""
        return float(self.tau_s[min(max(round(rows), 1), ROWS_MAX)])

    def learn(self, configuration: Configuration, *, rows: float, rows_per_s: float) -> None:
        """Add a load under which the device was never idle, with batches of `rows` rows; ignored where `rows_per_s` is
        0 or NaN."""
        if not rows_per_s > 0.0:
            return
        threads = 0
        if configuration.batching is not None:
            threads = batcher_of(configuration, cpus=self._cpus).batch_threads
        self._readings.append(_Reading(rows, threads, rows_per_s))
        self._fit()

    def most_rps(self, configuration: Configuration) -> float:
        """Compute the highest throughput over all batch sizes up to the maximum, requests/s, for full batches and any
        latency."""
        batcher = self._batcher(configuration)
        rows = np.arange(1, min(batcher.max_batch_size or self._rows, ROWS_MAX) + 1)
        return float(np.max(rows / self.tau_s[rows])) * self._gain_of(batcher.batch_threads) / self._rows

    @property
    def is_checked(self) -> bool:
        """Whether at least three measured sizes lie on one line, so that each confirms the others."""
        return self.is_line and self.has_three_sizes

    @property
    def has_three_sizes(self) -> bool:
        """Whether at least three batch sizes were measured by loads that the curve rests on."""
        return len({reading.rows for reading in self._counted()}) > 2

    def capacity_rps(self, configuration: Configuration) -> float:
        """Find by simulation the highest rate of Poisson arrivals within the SLO's limits, requests/s."""
        batcher = self._batcher(configuration)
        if batcher not in self._cache:
            self._cache[batcher] = self._highest(batcher, self.most_rps(configuration))
        return self._cache[batcher]

    def closed(self, configuration: Configuration, clients: int) -> CurvePrediction:
        """Predict a closed loop of this many clients, by simulation."""
        requests, turns = 600, 8
        traffic = closed_traffic(clients, max(requests, turns * clients), self._rows)
        return self._prediction(traffic, self._batcher(configuration))

    def open(self, configuration: Configuration, rate_rps: float) -> CurvePrediction:
        """Predict Poisson arrivals at `rate_rps` requests/s, by simulation."""
        return self._open(self._batcher(configuration), rate_rps)

    def _highest(self, batcher: Batcher, most_rps: float) -> float:
        low, high = 0.0, most_rps
        bisections = 8
        for _ in range(bisections):
            rate = (low + high) / 2
            said = self._open(batcher, rate)
            kept = said.of_limit <= 1.0 and said.answered_rps >= ANSWERED * rate
            low, high = (rate, high) if kept else (low, rate)
        return low

    def _open(self, batcher: Batcher, rate_rps: float) -> CurvePrediction:
        batches = 60  # Requests of a simulated run, at least and at most: so many full batches between.
        requests = batches * (batcher.max_batch_size or 1) // self._rows
        arrivals = self._arrivals[: min(max(requests, _ARRIVALS[0]), _ARRIVALS[1])]
        traffic = SimulatedTraffic(due_s=arrivals / rate_rps, rows=self._rows)
        return self._prediction(traffic, batcher, warm_up_s=0.1 * len(arrivals) / rate_rps)

    def _prediction(
        self, traffic: SimulatedTraffic, batcher: Batcher, *, warm_up_s: float = 0.0
    ) -> CurvePrediction:
        device, quantiles = self._device(), self._quantiles
        summary = summary_of(traffic, batcher, [device], warm_up_s=warm_up_s, quantiles=quantiles)
        latency_s = dict(zip(self._quantiles, map(float, summary.latency_s[0]), strict=True))
        shares = [latency_s[quantile] / limit for quantile, limit in self._limits_s.items()]
        too_many = float(summary.error_ratio[0]) > max(self._error_ratio, 0.01)
        return CurvePrediction(
            answered_rps=float(summary.throughput_rps[0]),
            p95_s=latency_s[QUANTILES["p95"]],
            of_limit=math.inf if too_many else max(shares, default=0.0),
        )

    def _batcher(self, configuration: Configuration) -> Batcher:
        if configuration not in self._batchers:
            batcher = batcher_of(configuration, cpus=self._cpus)
            self._batchers[configuration] = replace(batcher, length_buckets=())
        return self._batchers[configuration]

    def _device(self) -> Device:
        delay_s = 0.0003  # From the client to the queue and back.
        if self.contention is None:
            return Device(tau_s=self.tau_s, serial=True, delay_s=delay_s)
        return Device(tau_s=self.tau_s, contention=self.contention, delay_s=delay_s)

    def _gain_of(self, threads: int) -> float:
        """Throughput of this many batch threads over that of one."""
        if self.contention is None or threads < 2:
            return 1.0
        return threads / (1.0 + self.contention * (threads - 1))

    def _fit(self) -> None:
        self._cache.clear()
        self.contention = self._contended()
        readings = [
            (reading.rows, reading.rows * self._gain_of(reading.threads) / reading.rows_per_s)
            for reading in self._counted()
        ]
        if readings:
            rows, seconds = _medians(readings)
            self.tau_s = np.concatenate(([1.0], curve_through(rows, seconds)))
            self.is_line = bool(np.ptp(np.diff(self.tau_s[1:])) < 1e-9 * self.tau_s[-1])

    def _counted(self) -> list[_Reading]:
        # How many run at once without batching is not known where threads gain: then such a load is no use.
        return [reading for reading in self._readings if reading.threads or self.contention is None]

    def _contended(self) -> float | None:
        """The contention κ: with n threads a batch takes 1 + κ·(n - 1) times as long as with one (0: threads do not
        slow each other down). The median over loads with several threads.

        None: unknown, or a second thread gains less than a quarter, so that batches run one at a time.
        """
        single = [(r.rows, r.rows / r.rows_per_s) for r in self._readings if r.threads == 1]
        if not single:
            return None
        rows, seconds = _medians(single)
        tau_s = np.concatenate(([1.0], curve_through(rows, seconds)))
        contended = []
        for reading in self._readings:
            beside = np.min(np.abs(np.log(rows / reading.rows)))
            if reading.threads > 1 and (beside < 0.1 or len(rows) > 1):
                alone_s = float(tau_s[min(max(round(reading.rows), 1), ROWS_MAX)])
                gain = reading.rows_per_s * alone_s / reading.rows
                contended.append((reading.threads / gain - 1.0) / (reading.threads - 1))
        contention = max(float(np.median(contended)), 0.0) if contended else math.inf
        # A second thread that answers less than this factor more shares the device with the first.
        parallel = 1.25
        return contention if 2.0 / (1.0 + contention) >= parallel else None


def _medians(readings: list[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ascending sizes and the median time of each, from (rows, seconds); sizes within a tenth count as one."""
    groups: list[list[tuple[float, float]]] = []
    for rows, seconds in sorted(readings):
        if groups and rows <= 1.1 * groups[-1][0][0]:
            groups[-1].append((rows, seconds))
        else:
            groups.append([(rows, seconds)])
    sizes = [float(np.median([rows for rows, _ in group])) for group in groups]
    return np.array(sizes), np.array(
        [float(np.median([seconds for _, seconds in group])) for group in groups]
    )


def curve_through(rows: NDArray[np.float64], tau_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute τ in seconds at 1 to 4,096 rows, shape (4096,), from measured sizes `rows` and their times `tau_s`, both
    shape (n,).

    A straight line without negative coefficients, if it misses no size by more than MISLEADING; else linear from size
    to size. With one size only, each further row is guessed to add an eighth of the time of one row.
    """
    every = np.arange(1, ROWS_MAX + 1, dtype=np.float64)
    # What a further request adds to a batch of one, as a share, before a larger one was seen: for lengths only.
    row_guess = 0.125
    if len(rows) < 2:
        guess = 1.0 + row_guess * np.maximum(every / rows[0] - 1.0, 0.0)
        return np.asarray(float(tau_s[0]) * guess, dtype=np.float64)
    from scipy.optimize import nnls

    fixed_s, per_row_s = map(float, nnls(np.column_stack([1.0 / tau_s, rows / tau_s]), np.ones(len(rows)))[0])
    line = fixed_s + per_row_s * every
    misses = np.abs(np.log((fixed_s + per_row_s * rows) / tau_s))
    if np.max(misses) < MISLEADING:
        return np.asarray(line, dtype=np.float64)
    tau_s = np.maximum.accumulate(tau_s)
    slope = (tau_s[-1] - tau_s[-2]) / (rows[-1] - rows[-2])
    beyond = tau_s[-1] + slope * (every - rows[-1])
    return np.where(every <= rows[-1], np.interp(every, rows, tau_s), beyond)


def plane_through(
    points: Sequence[tuple[int, ...]], values: Sequence[float]
) -> Callable[[tuple[int, ...]], float]:
    """Fit a plane to `values` at these points, by ridge regression in which those near the first point weigh most.

    Returns a function from a point to the plane's value. Points are indices of parameter values.
    """
    # The ridge penalty on each slope, and the decay of a point's weight per step from the first.
    simple, fades = 0.3, 0.5
    away = np.array(points, float) - points[0]
    weights = np.exp(-fades * np.abs(away).sum(axis=1))
    terms = np.column_stack([np.ones(len(points)), away])
    ridge = np.diag([1e-6, *([simple] * away.shape[1])])
    weighted = (terms * weights[:, None]).T
    slopes = np.linalg.solve(weighted @ terms + ridge, weighted @ np.array(values))
    return lambda point: float(slopes[0] + (np.array(point) - points[0]) @ slopes[1:])
