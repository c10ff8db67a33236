"""Latency quantiles, rates and differences, each with its interval.

Intervals are distribution-free: order statistics (David & Nagaraja, "Order Statistics", section 7.1), widened by the
design effect (Kish, "Survey Sampling") because requests that share a batch finish together. No shape of the latency
distribution is assumed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

# Binomial and Student t quantiles.
#
# `scipy.special` is imported at the first use: it takes 0.2 s, which commands that measure nothing need not wait for.

Z_95 = NormalDist().inv_cdf(0.975)


def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """Return P(X ≤ successes) for X ~ Binomial(trials, probability)."""
    from scipy.special import bdtr

    if successes < 0 or successes >= trials:
        return float(successes >= trials)
    return float(bdtr(successes, trials, probability))


@lru_cache(maxsize=512)
def binomial_quantile_ranks(count: int, quantile: float, confidence: float = 0.95) -> tuple[int, int]:
    """Return the 1-based ranks (l, u) such that [x(l), x(u)] of `count` sorted values contains the quantile with
    `confidence`.

    l = max{l : B(l-1) ≤ α/2} and u = min{u : B(u-1) ≥ 1-α/2}; l = 0 or u = count + 1: that end is undefined. Source:
    order statistics, David & Nagaraja, "Order Statistics", section 7.1.
    """
    if count <= 0:
        return 0, count + 1
    alpha = 1.0 - confidence
    lower = _binomial_quantile(alpha / 2.0, count, quantile)
    upper = _binomial_quantile(1.0 - alpha / 2.0, count, quantile) + 1
    return lower, min(upper, count + 1)


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile at `probability` (0 to 1) of Student's t distribution with `degrees` of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _binomial_quantile(level: float, trials: int, probability: float) -> int:
    """Return the fewest successes k for which P(X ≤ k) is at least `level`, X ~ Binomial(trials,
    probability)."""
    from scipy.special import bdtrik

    successes = max(math.ceil(float(bdtrik(level, trials, probability))), 0)
    # The inverse is continuous and rounded: the whole number below may reach the level too.
    return successes - 1 if binomial_cdf(successes - 1, trials, probability) >= level else successes


QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
SHOWN = ("p50", "p95", "p99")
"""Quantiles of latency that every prediction and comparison shows."""
SLICES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its 95 % interval; an end that cannot be computed is ±inf; without samples all three fields are nan
    (`UNDEFINED`)."""

    value: float
    low: float
    high: float

    @property
    def half_width_ratio(self) -> float:
        """Half the interval's width divided by the value; inf where an end is undefined or the value is 0."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)) or not self.value:
            return math.inf
        return 0.5 * (self.high - self.low) / abs(self.value)


UNDEFINED = Estimate(value=math.nan, low=math.nan, high=math.nan)


def quantile_estimate(
    sorted_values: NDArray[np.float64],
    quantile: float,
    *,
    design_effect: float = 1.0,
) -> Estimate:
    """Estimate a quantile of ascending values, shape (n,), with its order-statistic interval; UNDEFINED without values.

    `quantile`: 0 to 1. `design_effect`, at least 1: its square root is the factor by which both ranks move away from
    n·quantile. Ends outside the sample are ±inf.
    """
    count = len(sorted_values)
    if count == 0:
        return UNDEFINED
    expected = count * quantile
    lower, upper = binomial_quantile_ranks(count, quantile)
    widening = math.sqrt(design_effect)
    if widening > 1.0:
        lower = math.floor(expected - (expected - lower) * widening)
        upper = math.ceil(expected + (upper - expected) * widening)
    rank = min(max(math.ceil(expected - 1e-9), 1), count)
    return Estimate(
        value=float(sorted_values[rank - 1]),
        low=float(sorted_values[lower - 1]) if lower >= 1 else -math.inf,
        high=float(sorted_values[upper - 1]) if upper <= count else math.inf,
    )


def design_effect(over: NDArray[np.bool_], slice_of: NDArray[np.intp]) -> float:
    """Return the design effect of a share of requests: the factor, at least 1, by which its variance exceeds that for
    as many independent requests; 1.14 where all or none of them belong to the share.

    `over` (n,): which requests belong to the share. `slice_of` (n,): number of the time slice of each request, 0 to
    SLICES-1; slices are equally long.
    """
    return effect_of_slices(*_counts(over, slice_of))


def effect_of_slices(requests: NDArray[Any], misses: NDArray[Any]) -> float:
    """Return the design effect, at least 1, of the share of misses, from the counts of requests and misses in
    consecutive slices of time, shape (slices,) each.

    Busy spells may outlast a slice: it is the largest of four estimates, from single, two and four merged slices and
    extrapolated from the first two, and widened by Student's t, since they are estimates
    (tests/benchmarks/twin/measure_coverage.py compares).
    """
    ones, twos, fours = _variance_ratios(requests, misses)
    unsure = (t_quantile(0.975, len(requests) - 1) / Z_95) ** 2
    return max(1.0, unsure * max(ones, twos, fours, 2.0 * twos - ones))


def _counts(over: NDArray[np.bool_], slice_of: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the requests and those of the share `over` in each slice, shape (SLICES,) each."""
    return np.bincount(slice_of, minlength=SLICES), np.bincount(slice_of[over], minlength=SLICES)


def _variance_ratios(requests: NDArray[Any], misses: NDArray[Any]) -> tuple[float, float, float]:
    """Return the variance of the share of misses by single, two and four merged slices, relative to independent
    requests; 1 where none or all miss.

    The share is taken as a ratio estimate, so slices may hold different counts or none.
    """
    count, missed = float(requests.sum()), float(misses.sum())
    if missed in (0.0, count):
        return 1.0, 1.0, 1.0
    share = missed / count
    residuals = misses - share * requests
    independent = count * share * (1.0 - share)

    def ratio(merged: int) -> float:
        sums = np.add.reduceat(residuals, np.arange(0, len(residuals), merged))
        return float(np.square(sums).sum()) * len(sums) / (len(sums) - 1) / independent

    return ratio(1), ratio(2), ratio(4)


def quantile_design_effect(
    latencies_s: NDArray[np.float64], due_ns: NDArray[np.int64], quantile: float
) -> float:
    """Return the design effect by which `latency_quantiles` widens the interval of this quantile."""
    ordered = np.sort(latencies_s)
    value_s = quantile_estimate(ordered, quantile).value
    return _quantile_effect(latencies_s, ordered, time_slices(due_ns), quantile, value_s)


def _quantile_effect(
    latencies_s: NDArray[np.float64],
    ordered: NDArray[np.float64],
    slice_of: NDArray[np.intp],
    quantile: float,
    value_s: float,
) -> float:
    """The design effect of the share beyond a quantile; where that share is thin, at least what the centre shows.

    A run of a few busy spells holds one or two of them beyond p95: whether these are typical it cannot tell, so the
    clumping at more central levels, seen in more spells, bounds it from below.
    """
    effect = design_effect(latencies_s > value_s, slice_of)
    count = len(ordered)
    levels = [level for level in (0.6, 0.7, 0.8, 0.9) if level < quantile]
    # With fewer independent requests than this beyond a quantile, their own clumping cannot be seen.
    few_clumps = 15.0
    if not count or not levels or count * (1.0 - quantile) / effect >= few_clumps:
        return effect
    central = [
        _variance_ratios(*_counts(latencies_s > ordered[math.ceil(count * level) - 1], slice_of))
        for level in levels
    ]
    typical = max(1.0, float(np.mean(central, axis=0).max()))
    spells = max(2, int(count / typical / 4.0))
    unsure = (t_quantile(0.975, spells) / Z_95) ** 2
    # Beyond the centre requests clump so much more: 1.0 to 1.4 times in the exact chain from 60 to 90 % load.
    tail_over_centre = 1.2
    return max(effect, tail_over_centre * unsure * typical)


def time_slices(times_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Divide the time from the first to the last instant into SLICES equal slices; return the number of each instant's
    slice, 0 to SLICES-1, shape (n,)."""
    if len(times_ns) == 0:
        return np.zeros(0, dtype=np.intp)
    start = times_ns.min()
    width = max(int(times_ns.max()) - int(start) + 1, 1)
    return np.asarray((times_ns - start) * np.float64(SLICES / width), dtype=np.intp)


def latency_quantiles(
    latencies_s: NDArray[np.float64],
    due_ns: NDArray[np.int64],
    quantiles: Mapping[str, float] = QUANTILES,
) -> dict[str, Estimate]:
    """Return name -> estimate of that quantile of the latencies, shape (n,), seconds, inf for requests without a good
    answer.

    `due_ns` (n,): when each request was due; in any order. Lower ends are at least 0; all UNDEFINED without latencies.
    """
    ordered = np.sort(latencies_s)
    slice_of = time_slices(due_ns)
    estimates = {}
    for name, quantile in quantiles.items():
        plain = quantile_estimate(ordered, quantile)
        effect = _quantile_effect(latencies_s, ordered, slice_of, quantile, plain.value)
        widened = quantile_estimate(ordered, quantile, design_effect=effect)
        estimates[name] = Estimate(value=widened.value, low=max(widened.low, 0.0), high=widened.high)
    return estimates


def rate_estimate(
    times_ns: NDArray[np.int64], window_ns: tuple[int, int], *, weights: NDArray[np.float64] | None = None
) -> Estimate:
    """Estimate events per second (or their `weights` per second) within `window_ns`, [start, end), with a 95 %
    interval; UNDEFINED for an empty window.

    Completions come in clumps of one batch, so plain counts per slice mostly show where the edges fell. The variance of
    the rate is taken from triangular slices, which hardly depend on the edges (1.5 restores their variance for
    independent counts); the window's own edges cut one clump each, uniformly. What varies more slowly than a slice,
    such as the host's speed, shows only in part: that is the spread between runs.
    """
    start, end = window_ns
    if end <= start:
        return UNDEFINED
    inside = (times_ns >= start) & (times_ns < end)
    window_s = (end - start) / 1e9
    mass = np.ones(np.count_nonzero(inside)) if weights is None else weights[inside].astype(np.float64)
    total = float(mass.sum())
    position = (times_ns[inside] - start) * np.float64(SLICES / (end - start))
    left = np.minimum(position.astype(np.intp), SLICES - 1)
    beyond = position - left
    triangular = np.bincount(left, weights=mass * (1.0 - beyond), minlength=SLICES + 1)
    triangular += np.bincount(left + 1, weights=mass * beyond, minlength=SLICES + 1)
    variance = (
        SLICES * 1.5 * float(np.var(triangular[1:-1], ddof=1)) + _clump(times_ns[inside], total) ** 2 / 6.0
    )
    spread = t_quantile(0.975, SLICES - 4) * math.sqrt(variance) / window_s
    rate = total / window_s
    return Estimate(value=rate, low=max(rate - spread, 0.0), high=rate + spread)


def _clump(times_ns: NDArray[np.int64], total: float) -> float:
    """Return the mean weight of a clump of events: a gap no shorter than the mean gap begins a new one."""
    if len(times_ns) < 2:
        return total
    gaps = np.diff(np.sort(times_ns))
    return total / (1 + int(np.count_nonzero(gaps >= gaps.mean())))


# By which factor do two arms differ, when each block ran both side by side?
#
# One difference a block, the logarithm of a ratio. The estimate is the Hodges-Lehmann median of the averages of all
# pairs of differences (Walsh averages), its interval the exact inversion of Wilcoxon's signed-rank test: no shape is
# assumed but symmetry, which interleaving in mirrored orders gives (Hollander, Wolfe & Chicken, "Nonparametric
# Statistical Methods", section 3.3).

BLOCKS_NEEDED: Final = 6
"""Fewest differences with a finite 95 % interval: 2 / 2^6 = 3.1 %."""

Arm = TypeVar("Arm")


def balanced_orders(arms: Sequence[Arm], *, blocks: int, seed: int) -> list[tuple[Arm, ...]]:
    """Return the order of the arms in each block: drawn at random for every other block, mirrored in the next.

    Two blocks of two arms are ABBA or BAAB. Over an even number of blocks each arm comes before each other arm as often
    as after it, so that neither a steady drift nor the place within a block favours one; an odd last block has no
    mirror.
    """
    chance = random.Random(seed)
    orders: list[tuple[Arm, ...]] = []
    while len(orders) < blocks:
        drawn = tuple(chance.sample(arms, len(arms)))
        orders += [drawn, drawn[::-1]]
    return orders[:blocks]


def hodges_lehmann(
    differences: Sequence[float], *, low_level: float = 0.025, high_level: float = 0.025
) -> Estimate:
    """Estimate the centre of differences whose distribution is symmetric: the median of the averages of all pairs
    (Walsh averages), with a bound on each side; all UNDEFINED without differences.

    `low_level`, `high_level`: probability of error of each bound. A bound is -inf or inf where so few differences allow
    none at its level, as below `BLOCKS_NEEDED` for a 95 % interval.
    """
    if not differences:
        return UNDEFINED
    averages = walsh_averages(differences)
    low, high = (signed_rank_bound(len(differences), level) for level in (low_level, high_level))
    return Estimate(
        value=float(np.median(averages)),
        low=float(averages[low - 1]) if low else -math.inf,
        high=float(averages[-high]) if high else math.inf,
    )


def ratio_estimate(pairs: Iterable[tuple[float, float]]) -> Estimate | None:
    """Estimate the factor after / before, with its 95 % interval, from pairs (before, after), each of one
    block.

    Pairs without two positive finite values are left out; None when none is left. Below `BLOCKS_NEEDED` pairs
    the interval is 0 to inf.
    """
    logs = log_ratios(pairs)
    return _exponential(hodges_lehmann(logs)) if logs else None


def typical(values: Iterable[float]) -> Estimate | None:
    """Estimate the typical value of one variant's figure over its blocks (Hodges-Lehmann, of natural logs), with its 95
    % interval; None: no value is positive and finite."""
    return ratio_estimate((1.0, value) for value in values)


def log_ratios(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """Return ln(after / before) for each pair (before, after); pairs without two positive finite values are left
    out."""
    return [
        math.log(after / before)
        for before, after in pairs
        if math.isfinite(before) and math.isfinite(after) and before > 0.0 and after > 0.0
    ]


@lru_cache(maxsize=512)
def signed_rank_bound(count: int, level: float = 0.025) -> int:
    """Return k such that the k-th smallest Walsh average of `count` differences is a lower bound, and the k-th largest
    an upper one, at this one-sided level; 0: too few differences.

    The largest k with P(W < k) ≤ `level`, where W is the sum of the ranks of the positive differences.
    """
    below, rounding = np.cumsum(signed_rank_distribution(count)), 1e-12
    return int(np.searchsorted(below, level * (1.0 + rounding), side="right"))


def signed_rank_distribution(count: int) -> NDArray[np.float64]:
    """Return P(W = 0), P(W = 1), … up to count·(count+1)/2, shape (count·(count+1)/2 + 1,): W is the sum of the ranks
    of the positive ones of `count` differences when each sign is a fair coin. Exact, by adding rank on rank."""
    weights = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(len(weights) + rank)
        longer[: len(weights)] += weights
        longer[rank:] += weights
        weights = longer / 2.0
    return weights


@lru_cache(maxsize=64)
def detectable_shift(count: int) -> float:
    """Return the smallest shift, in standard deviations of a difference, that a comparison of `count` blocks finds with
    probability 0.8; inf below `BLOCKS_NEEDED`.

    Found: the 95 % interval excludes zero. For normal differences, by simulation with a fixed seed (within 2 %).
    """
    rank = signed_rank_bound(count)
    if not rank:
        return math.inf
    draws = np.random.default_rng(count).standard_normal((4000, count))
    needed = -_walsh_rows(draws)[:, rank - 1]
    return float(np.quantile(needed, 0.8))


def spread_about_zero(differences: Sequence[float]) -> Estimate:
    """Estimate the standard deviation of differences whose true mean is zero (A/A: one configuration compared
    with itself), with its 95 % chi-square interval; UNDEFINED without differences."""
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
    """Return the averages of all pairs of differences, each also paired with itself, ascending; empty without
    differences."""
    averages: NDArray[np.float64] = _walsh_rows(np.asarray([differences], dtype=np.float64))[0]
    return averages


def _walsh_rows(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """All (d_i + d_j) / 2 with i ≤ j of each row, ascending: shape (rows, count·(count+1)/2)."""
    first, second = np.triu_indices(differences.shape[1])
    return np.sort((differences[:, first] + differences[:, second]) / 2.0, axis=1)


def _exponential(estimate: Estimate) -> Estimate:
    return Estimate(value=math.exp(estimate.value), low=math.exp(estimate.low), high=math.exp(estimate.high))
