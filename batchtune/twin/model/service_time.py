"""How long does a batch of so many rows take?

A nondecreasing piecewise line through what was measured, carried on by straight lines where nothing was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LEAST_SHARE = 0.2
"""Below the smallest size measured a batch takes at least this share of that size's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTime:
    """τ(b): `seconds[i]` for a batch of `rows[i]` rows; both increase (the seconds not strictly)."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def tau_s(self, rows_max: int) -> NDArray[np.float64]:
        """τ for 0 to `rows_max` rows, shape (rows_max + 1,); the entry for 0 rows is unused.

        Above the last knot the line goes on at the slope of the last octave, below the first one at that of the
        first octave, but not under LEAST_SHARE of the first knot.
        """
        sizes = np.arange(rows_max + 1, dtype=np.float64)
        knots, seconds = np.array(self.rows), np.array(self.seconds)
        tau: NDArray[np.float64] = np.interp(sizes, knots, seconds)
        above = sizes > knots[-1]
        tau[above] = seconds[-1] + (sizes[above] - knots[-1]) * self._slope(knots[-1] / 2.0, knots[-1])
        below = sizes < knots[0]
        line = seconds[0] - (knots[0] - sizes[below]) * self._slope(knots[0], 2.0 * knots[0])
        tau[below] = np.maximum(line, LEAST_SHARE * seconds[0])
        return tau

    def scaled(
        self, factors: NDArray[np.float64], *, fixed_s: float = 0.0, per_row_s: float = 0.0
    ) -> ServiceTime:
        """Each knot times its factor, plus a fixed time and one per row, made nondecreasing again."""
        seconds = np.array(self.seconds) * factors + fixed_s + per_row_s * np.array(self.rows)
        return ServiceTime(rows=self.rows, seconds=tuple(np.maximum.accumulate(seconds).tolist()))

    def _slope(self, low: float, high: float) -> float:
        """Mean slope of τ from `low` to `high` rows; one knot alone counts as half fixed, half per row."""
        if len(self.rows) == 1:
            return 0.5 * self.seconds[0] / self.rows[0]
        knots, seconds = np.array(self.rows), np.array(self.seconds)
        low, high = max(low, knots[0]), min(high, knots[-1])
        if high <= low:
            low, high = (knots[0], knots[1]) if high <= knots[0] else (knots[-2], knots[-1])
        rise = np.interp([low, high], knots, seconds)
        return max(float(rise[1] - rise[0]), 0.0) / (high - low)


def fit_service_time(timed: Sequence[tuple[float, float, float]]) -> ServiceTime:
    """The nondecreasing fit of (rows, seconds, batches): pooled within a third of an octave, then isotonic.

    Raises:
        ValueError: no batch was timed.
    """
    # A size that was run fewer times than this tells nothing, unless no size was run more often.
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
    """τ(b) = fixed + per row · b, with knots at these sizes: for a server that tells no times."""
    rows = sorted(set(sizes))
    return ServiceTime(rows=tuple(rows), seconds=tuple(fixed_s + per_row_s * size for size in rows))
