"""Reads binomial and Student t quantiles from scipy.

`scipy.special` is imported at the first use: it takes 0.2 s, which commands that measure nothing need not wait for.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

Z_95 = NormalDist().inv_cdf(0.975)


def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """P(X ≤ successes), X ~ Binomial(trials, probability)."""
    from scipy.special import bdtr

    if successes < 0 or successes >= trials:
        return float(successes >= trials)
    return float(bdtr(successes, trials, probability))


@lru_cache(maxsize=512)
def binomial_quantile_ranks(count: int, quantile: float, confidence: float = 0.95) -> tuple[int, int]:
    """1-based ranks (l, u) such that [x(l), x(u)] of `count` sorted values holds the quantile.

    l = max{l : B(l-1) ≤ α/2} and u = min{u : B(u-1) ≥ 1-α/2}; l = 0 or u = count + 1: that end is undefined.
    Source: order statistics, David & Nagaraja, "Order Statistics", section 7.1.
    """
    if count <= 0:
        return 0, count + 1
    alpha = 1.0 - confidence
    lower = _binomial_quantile(alpha / 2.0, count, quantile)
    upper = _binomial_quantile(1.0 - alpha / 2.0, count, quantile) + 1
    return lower, min(upper, count + 1)


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def _binomial_quantile(level: float, trials: int, probability: float) -> int:
    """The fewest successes whose distribution function reaches this level."""
    from scipy.special import bdtrik

    successes = max(math.ceil(float(bdtrik(level, trials, probability))), 0)
    # The inverse is continuous and rounded: the whole number below may reach the level too.
    return successes - 1 if binomial_cdf(successes - 1, trials, probability) >= level else successes
