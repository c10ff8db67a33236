"""When did a figure change, by the values of many checks in the order of time?

Offline: the split with the largest rank CUSUM is tested by permutation, and each side of one that is found is split on.
Without a change all orders are equally likely, so a series shows one with at most `ERROR_RATE`, whatever its law
(Bradley, "Distribution-free statistical tests", 1968; the search is binary segmentation, Scott & Knott 1974). Ranks do
not care how far an outlier lies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

ERROR_RATE: Final = 0.01
"""Of a series without a change."""

SIDE_MIN: Final = 4
"""Fewest values on either side of a change: it is told some checks after it came."""

LEAST: Final = 12
"""Values in all. Of fewer even a clear change halfway is not always found: they have too few orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """From value number `at` (counted from 0) on the median is `after`; it was `before` since the change before."""

    at: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """As a share of what it was."""
        return self.after / self.before - 1.0 if self.before else math.nan


def change_points(values: Sequence[float], *, seed: int = 1) -> list[ChangePoint]:
    """Every change that is found, in the order of time; values must be finite. Of fewer than LEAST there is none."""
    series = np.asarray(values, dtype=np.float64)
    edges = sorted(_splits(series, 0, np.random.default_rng(seed))) if len(series) >= LEAST else []
    bounds = [0, *edges, len(series)]
    medians = [statistics.median(series[start:end]) for start, end in pairwise(bounds) if start < end]
    return [
        ChangePoint(at=edge, before=float(medians[number]), after=float(medians[number + 1]))
        for number, edge in enumerate(edges)
    ]


def _splits(series: NDArray[np.float64], first: int, chance: np.random.Generator) -> list[int]:
    count = len(series)
    if count < 2 * SIDE_MIN:
        return []
    ranks = _ranks(series)
    statistic, place = _largest(ranks[np.newaxis, :])
    permutations = 999
    shuffled = chance.permuted(np.tile(ranks, (permutations, 1)), axis=1)
    as_large = int(np.count_nonzero(_largest(shuffled)[0] >= statistic[0] - 1e-9))
    if (as_large + 1) / (permutations + 1) > ERROR_RATE:
        return []
    at = int(place[0])
    return [
        first + at,
        *_splits(series[:at], first, chance),
        *_splits(series[at:], first + at, chance),
    ]


def _largest(ranks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """The largest standardised CUSUM of each row, and how many values lie before it."""
    count = ranks.shape[1]
    sizes = np.arange(SIDE_MIN, count - SIDE_MIN + 1)
    sums = np.cumsum(ranks - ranks.mean(axis=1, keepdims=True), axis=1)[:, sizes - 1]
    standardised = np.abs(sums) / np.sqrt(sizes * (count - sizes) / count)
    places = standardised.argmax(axis=1)
    return standardised[np.arange(len(ranks)), places], sizes[places]


def _ranks(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 1 on; equal values share the mean of theirs."""
    ordered = np.sort(series)
    below = np.searchsorted(ordered, series, side="left")
    up_to = np.searchsorted(ordered, series, side="right")
    ranks: NDArray[np.float64] = (below + up_to + 1) / 2.0
    return ranks
