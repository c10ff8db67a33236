"""Fits how long a batch takes by its rows and by its longest request, and defines a reading of a server, which has it.

The time by rows is a nondecreasing piecewise line through the measured sizes, with straight lines beyond them. A
reading (`Fitted`) is one set of a server's parameters; it makes the simulator's device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchtune.target.telemetry import ServerActivity
from batchtune.twin.simulator.simulate import Batcher, Device
from batchtune.twin.traffic import Traffic

CROWDED_MOST = 0.3
"""By what share a batch takes longer in an open loop at most (`crowding`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTime:
    """The service time τ(b): `seconds[i]` is that of a batch of `rows[i]` rows; `rows` increase, `seconds` do not
    decrease."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def tau_s(self, rows_max: int) -> NDArray[np.float64]:
        """Compute τ, seconds of a batch, for 0 to `rows_max` rows, shape (rows_max + 1,); the entry for 0 rows is
        unused.

        Above the last knot τ is a line with the slope of the last octave, below the first knot one with that of the
        first octave, but nowhere less than a fifth of the first knot's time.
        """
        least_share = 0.2
        sizes = np.arange(rows_max + 1, dtype=np.float64)
        knots, seconds = np.array(self.rows), np.array(self.seconds)
        tau: NDArray[np.float64] = np.interp(sizes, knots, seconds)
        above = sizes > knots[-1]
        tau[above] = seconds[-1] + (sizes[above] - knots[-1]) * self._slope(knots[-1] / 2.0, knots[-1])
        below = sizes < knots[0]
        line = seconds[0] - (knots[0] - sizes[below]) * self._slope(knots[0], 2.0 * knots[0])
        tau[below] = np.maximum(line, least_share * seconds[0])
        return tau

    def scaled(
        self, factors: NDArray[np.float64], *, fixed_s: float = 0.0, per_row_s: float = 0.0
    ) -> ServiceTime:
        """Return τ multiplied by `factors`, one for each of `rows`, plus `fixed_s` for each batch and `per_row_s` for
        each row; a time below that of fewer rows is raised to it."""
        seconds = np.array(self.seconds) * factors + fixed_s + per_row_s * np.array(self.rows)
        return ServiceTime(rows=self.rows, seconds=tuple(np.maximum.accumulate(seconds).tolist()))

    def _slope(self, low: float, high: float) -> float:
        """Mean slope of τ from `low` to `high` rows, seconds per row; with a single size half of its time counts as
        fixed."""
        if len(self.rows) == 1:
            return 0.5 * self.seconds[0] / self.rows[0]
        knots, seconds = np.array(self.rows), np.array(self.seconds)
        low, high = max(low, knots[0]), min(high, knots[-1])
        if high <= low:
            low, high = (knots[0], knots[1]) if high <= knots[0] else (knots[-2], knots[-1])
        rise = np.interp([low, high], knots, seconds)
        return max(float(rise[1] - rise[0]), 0.0) / (high - low)


def fit_service_time(timed: Sequence[tuple[float, float, float]]) -> ServiceTime:
    """Fit a nondecreasing service time to measured (rows, mean seconds, number of batches).

    Sizes within a third of an octave are pooled; then isotonic regression, weighted by the batches.

    Raises:
        ValueError: there is no batch with a time.
    """
    # A size that was run fewer times than this is no evidence, unless no size was run more often.
    fewest_batches = 3
    counted = [size for size in timed if size[1] > 0.0 and size[2] >= fewest_batches]
    counted = counted or [size for size in timed if size[1] > 0.0 and size[2] > 0.0]
    if not counted:
        raise ValueError("no batch was timed")
    from scipy.optimize import isotonic_regression

    bins: dict[int, list[tuple[float, float, float]]] = {}
    knots_per_octave = 3  # Batch sizes nearer to each other than this are pooled into one knot.
    for size in counted:
        bins.setdefault(round(knots_per_octave * math.log2(max(size[0], 1.0))), []).append(size)
    points = []
    for members in bins.values():
        weight = sum(batches for _, _, batches in members)
        rows = sum(rows * batches for rows, _, batches in members) / weight
        points.append((rows, sum(seconds * batches for _, seconds, batches in members) / weight, weight))
    sizes, times, weights = (np.array(column) for column in zip(*sorted(points), strict=True))
    fit = isotonic_regression(times, weights=weights)
    ends = [at for start, stop in pairwise(fit.blocks) for at in dict.fromkeys((start, stop - 1))]
    return ServiceTime(rows=tuple(sizes[ends].tolist()), seconds=tuple(fit.x[ends].tolist()))


def linear_service_time(fixed_s: float, per_row_s: float, sizes: Sequence[float]) -> ServiceTime:
    """Return τ(b) = fixed_s + per_row_s · b with knots at these sizes; for a server that does not count times."""
    rows = sorted(set(sizes))
    return ServiceTime(rows=tuple(rows), seconds=tuple(fixed_s + per_row_s * size for size in rows))


# The effect of the longest request on the time of a batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCost:
    """How the time of a batch depends on the length L of its longest request: fixed + b · (per row + per element · L).

    Only the shares of these three count; a `ServiceTime` has the time of batches from one queue of all lengths.
    `longest`: mean length of the longest request in such batches of 1, 2, 4, … rows.
    """

    fixed_s: float
    per_row_s: float
    per_element_s: float
    longest: tuple[float, ...]

    def usual(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean length of the longest request in batches of these row counts, shape as `rows`."""
        return np.interp(np.log2(np.maximum(rows, 1.0)), np.arange(len(self.longest)), self.longest)

    def share(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of a batch's usual time that each unit of length adds, by row count, shape as `rows`."""
        per_length_s = rows * self.per_element_s
        whole_s = self.fixed_s + rows * self.per_row_s + per_length_s * self.usual(rows)
        return np.asarray(per_length_s / np.maximum(whole_s, 1e-12))

    def slower(self, rows: float, longest: float) -> float:
        """Return the time of a batch of `rows` rows whose longest request has length `longest`, divided by the usual
        time of such a batch."""
        sizes = np.array([rows])
        return float(1.0 + self.share(sizes)[0] * (longest - self.usual(sizes)[0]))


def fit_length_cost(servers: Sequence[ServerActivity], traffic: Traffic) -> LengthCost | None:
    """Fit the effect of lengths to the server's counters by length bucket (batches, rows, elements, execution time).

    None: the server has no such counters, or the longest requests of all batches had about the same length. Batches
    that ran beside others can be used if all did, since only shares of the time count.
    """
    points = np.array([point for server in servers for point in _told(server)])
    if not len(points) or not traffic.lengths:
        return None
    rows, elements, sent, seconds, batches = points.T
    # A unit of length may be several elements: of several inputs, or of vectors.
    per_length = max(
        round(float(np.sum(sent * batches) / np.sum(rows * batches) / np.mean(traffic.lengths))), 1
    )
    elements = elements / per_length
    longest = elements / rows
    # The longest requests of some batches must be this many times as long as those of others, on the mean.
    told_apart = 1.2
    if longest.max() < told_apart * longest.min():
        return None
    design = np.stack([np.ones_like(rows), rows, elements], axis=1)
    weights = np.sqrt(batches) / seconds
    from scipy.optimize import nnls

    fixed_s, per_row_s, per_element_s = nnls(design * weights[:, np.newaxis], seconds * weights)[0].tolist()
    octaves = 13
    return LengthCost(
        fixed_s=fixed_s,
        per_row_s=per_row_s,
        per_element_s=per_element_s,
        longest=tuple(traffic.mean_longest((), float(1 << octave)) for octave in range(octaves)),
    )


def _told(server: ServerActivity) -> list[tuple[float, ...]]:
    """(rows, elements with padding, elements sent, seconds, number of batches) of each length bucket that had at least
    ten batches; all but the last are means over its batches."""
    points = []
    fewest_batches = 10
    for bucket, batches in server.bucket_batches.items():
        rows, micros = server.bucket_rows.get(bucket, 0), server.bucket_execution_micros.get(bucket, 0)
        sent = server.bucket_sent_elements.get(bucket, 0)
        padding = server.bucket_padding_elements.get(bucket, 0)
        if batches >= fewest_batches and rows and sent and micros:
            whole = (rows, sent + padding, sent, micros / 1e6)
            points.append((*(value / batches for value in whole), float(batches)))
    return points


def crowding(crowding_s: float, rate_rps: float) -> float:
    """Compute the factor by which a batch takes longer in an open loop at this rate: with x = crowding_s · λ,
    1 + x / (1 + x / CROWDED_MOST), which is 1 + x at low rates and below 1 + CROWDED_MOST.

    Measured with a CPU model on two cores shared with the client: 10-15 % longer at 1,000 requests/s, 18-24 % from
    1,800 to 4,800.
    """
    share = crowding_s * rate_rps
    return 1.0 + share / (1.0 + share / CROWDED_MOST)


def _crowded_rps(alone_rps: float, crowding_s: float) -> float:
    """Solve x · crowding(x) = alone_rps for the rate x, a quadratic equation: the saturation with crowding."""
    a = crowding_s * (1.0 + 1.0 / CROWDED_MOST)
    b = 1.0 - alone_rps * crowding_s / CROWDED_MOST
    return 2.0 * alone_rps / (b + math.sqrt(b * b + 4.0 * a * alone_rps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A reading: one set of parameters of a server that fits its measurements.

    `service_time`: execution time of a batch alone, by its rows. `length`: how that time depends on the longest request
    of the batch; None: not at all, or unknown.
    `contention`, `serial`, `jitter_ratio`, `delay_s`, `front_end_s`: as in the simulator's `Device`.
    `wake_s`: seconds that an idle batch thread takes to wake up for a request.
    `crowding_s`: CPU seconds that each request of an open loop takes from the execution, where they share cores;
    `crowding` computes by which factor that slows batches. Requests of a closed loop take none: they come and go with
    the batches.
    """

    service_time: ServiceTime
    contention: float
    serial: bool
    jitter_ratio: float
    delay_s: float
    front_end_s: float
    wake_s: float
    crowding_s: float = 0.0
    length: LengthCost | None = None

    def device(self, rows_max: int, *, rate_rps: float = 0.0) -> Device:
        """Make the simulator's device of this reading, with τ for 0 to `rows_max` rows.

        `rate_rps`: of an open loop, which slows execution down (`crowding`); 0: a closed loop.
        """
        device = _device(self, rows_max)
        slower = crowding(self.crowding_s, rate_rps)
        if slower == 1.0:
            return device
        length_s = None if device.length_s is None else device.length_s * slower
        return replace(device, tau_s=device.tau_s * slower, length_s=length_s)

    def slower(self, factor: float) -> Fitted:
        """Return a copy of this reading with all execution times of batches multiplied by `factor`; the times outside
        the execution are unchanged."""
        factors = np.full(len(self.service_time.rows), factor)
        return replace(self, service_time=self.service_time.scaled(factors))

    def saturation_rps(self, batcher: Batcher, traffic: Traffic) -> float:
        """Compute the saturation in an open loop, requests/s: the rate answered when every batch is full and every
        thread busy, at most the rate that the front end can pass on."""
        rows = batcher.batch_rows_max or traffic.rows_most
        tau_s = float(_device(self, rows_needed(batcher, traffic)).tau_s[rows])
        if self.length is not None and traffic.lengths:
            tau_s *= self.length.slower(rows, traffic.mean_longest(batcher.length_buckets, rows))
        threads = 1 if self.serial else batcher.batch_threads
        alone = threads / (1.0 + self.contention * (threads - 1)) * rows / tau_s / traffic.mean_rows
        crowded = _crowded_rps(alone, self.crowding_s)
        return min(crowded, 1.0 / self.front_end_s) if self.front_end_s > 0.0 else crowded


def timed(batcher: Batcher, wake_s: float, traffic: Traffic) -> Batcher:
    """Return the batcher as the simulator needs it; without batching unchanged.

    Its timeout is longer by `wake_s`, the seconds that an idle batch thread takes to wake up: requests that arrive
    meanwhile join the batch. Length buckets "auto" become those that the server would choose for `traffic`.
    """
    if batcher.max_batch_size is None:
        return batcher
    boundaries = traffic.boundaries_of(batcher.length_buckets)
    return replace(batcher, batch_timeout_s=batcher.batch_timeout_s + wake_s, length_buckets=boundaries)


def rows_needed(batcher: Batcher, traffic: Traffic) -> int:
    """Return the number of rows of the largest batch that can be executed, padding included: up to it τ must be
    known."""
    return max(batcher.max_batch_size or 1, traffic.rows_most, *batcher.allowed_batch_sizes, 1)


@lru_cache(maxsize=4096)
def _device(fit: Fitted, rows_max: int) -> Device:
    tau_s, length, rows = fit.service_time.tau_s(rows_max), fit.length, np.arange(rows_max + 1.0)
    return Device(
        tau_s=tau_s,
        length_s=None if length is None else tau_s * length.share(rows),
        usual_length=None if length is None else length.usual(rows),
        contention=fit.contention,
        serial=fit.serial,
        jitter_ratio=fit.jitter_ratio,
        delay_s=fit.delay_s,
        front_end_s=fit.front_end_s,
    )
