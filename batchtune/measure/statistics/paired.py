"""By which factor do two arms differ, when each block ran both side by side?

One difference a block, the logarithm of a ratio. The estimate is the Hodges-Lehmann median of the averages of all
pairs of differences (Walsh averages), its interval the exact inversion of Wilcoxon's signed-rank test: no shape is
assumed but symmetry, which interleaving in mirrored orders gives (measurement.md 2.7; Hollander, Wolfe & Chicken,
"Nonparametric Statistical Methods", section 3.3).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.statistics.quantiles import UNDEFINED, Estimate

BLOCKS_NEEDED: Final = 6
"""Fewest differences with a finite 95 % interval: 2 / 2^6 = 3.1 %."""

POWER: Final = 0.8

Arm = TypeVar("Arm")


def balanced_orders(arms: Sequence[Arm], *, blocks: int, seed: int) -> list[tuple[Arm, ...]]:
    """The order of the arms in each block: drawn at random for every other block, mirrored in the next.

    Two blocks of two arms are ABBA or BAAB. Over an even number of blocks each arm comes before each other as often
    as after it, so that neither a steady drift nor the place within a block favours one; an odd last block stays
    without its mirror.
    """
    chance = random.Random(seed)
    orders: list[tuple[Arm, ...]] = []
    while len(orders) < blocks:
        drawn = tuple(chance.sample(arms, len(arms)))
        orders += [drawn, drawn[::-1]]
    return orders[:blocks]


def hodges_lehmann(differences: Sequence[float]) -> Estimate:
    """The median of the Walsh averages and its 95 % interval; ends are ±inf below `BLOCKS_NEEDED` differences."""
    if not differences:
        return UNDEFINED
    averages = walsh_averages(differences)
    rank = signed_rank_interval_rank(len(differences))
    return Estimate(
        value=float(np.median(averages)),
        low=float(averages[rank - 1]) if rank else -math.inf,
        high=float(averages[-rank]) if rank else math.inf,
    )


def ratio_estimate(pairs: Iterable[tuple[float, float]]) -> Estimate | None:
    """The factor after / before over pairs (before, after) of one block each.

    Pairs without two positive finite values are left out; None when none is left. Ends are 0 and inf below
    `BLOCKS_NEEDED` pairs.
    """
    logs = log_ratios(pairs)
    return _exponential(hodges_lehmann(logs)) if logs else None


def typical(values: Iterable[float]) -> Estimate | None:
    """The same for the figure of one arm over its blocks: its centre, and how well the blocks tell it."""
    return ratio_estimate((1.0, value) for value in values)


def log_ratios(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """log(after / before) of each pair with two positive finite values."""
    return [
        math.log(after / before)
        for before, after in pairs
        if math.isfinite(before) and math.isfinite(after) and before > 0.0 and after > 0.0
    ]


@lru_cache(maxsize=256)
def signed_rank_interval_rank(count: int, *, confidence: float = 0.95) -> int:
    """k such that the k-th smallest and k-th largest Walsh average bound the 95 % interval; 0: too few.

    The largest k with P(W < k) ≤ α/2, W the sum of the ranks of the positive differences.
    """
    below = np.cumsum(signed_rank_distribution(count))
    return int(np.searchsorted(below, 0.5 * (1.0 - confidence) * (1.0 + 1e-12), side="right"))


def signed_rank_distribution(count: int) -> NDArray[np.float64]:
    """P(W = 0), P(W = 1), … up to count·(count+1)/2 when each sign is a fair coin: exact, by adding rank on rank."""
    weights = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(len(weights) + rank)
        longer[: len(weights)] += weights
        longer[rank:] += weights
        weights = longer / 2.0
    return weights


@lru_cache(maxsize=64)
def detectable_shift(count: int) -> float:
    """The shift, in standard deviations of a difference, found in `POWER` of all comparisons of so many blocks.

    Found: the 95 % interval excludes zero. For normal differences, by simulation with a fixed seed (within 2 %); inf
    below `BLOCKS_NEEDED`.
    """
    rank = signed_rank_interval_rank(count)
    if not rank:
        return math.inf
    draws = np.random.default_rng(count).standard_normal((4000, count))
    needed = -_walsh_rows(draws)[:, rank - 1]
    return float(np.quantile(needed, POWER))


def spread_about_zero(differences: Sequence[float]) -> Estimate:
    """The standard deviation of differences whose true mean is zero (A/A), with its 95 % chi-square interval."""
    from scipy.special import chdtri

    count = len(differences)
    if not count:
        return UNDEFINED
    squares = math.fsum(difference * difference for difference in differences)
    return Estimate(
        value=math.sqrt(squares / count),
        low=math.sqrt(squares / chdtri(count, 0.025)),
        high=math.sqrt(squares / chdtri(count, 0.975)),
    )


def walsh_averages(differences: Sequence[float]) -> NDArray[np.float64]:
    """All averages of two differences, each with itself too, ascending; empty without any."""
    averages: NDArray[np.float64] = _walsh_rows(np.asarray([differences], dtype=np.float64))[0]
    return averages


def _walsh_rows(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """All (d_i + d_j) / 2 with i ≤ j of each row, ascending: shape (rows, count·(count+1)/2)."""
    first, second = np.triu_indices(differences.shape[1])
    return np.sort((differences[:, first] + differences[:, second]) / 2.0, axis=1)


def _exponential(estimate: Estimate) -> Estimate:
    return Estimate(value=math.exp(estimate.value), low=math.exp(estimate.low), high=math.exp(estimate.high))
