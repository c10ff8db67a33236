"""Where does a noisy relation that must increase cross zero?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def increasing_fit(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The weighted increasing fit of (x, y, weight): x of each point, ascending, and the fit there."""
    return [(x, y) for places, y in increasing_blocks(points) for x in places]


def increasing_blocks(points: Sequence[tuple[float, float, float]]) -> list[tuple[list[float], float]]:
    """The same, as the stretches of x over which it is level.

    Pointwise larger y give a pointwise larger fit. Source: pool adjacent violators, Ayer et al. 1955.
    """
    weights: dict[float, float] = {}
    sums: dict[float, float] = {}
    for x, y, weight in points:
        weights[x] = weights.get(x, 0.0) + weight
        sums[x] = sums.get(x, 0.0) + weight * y
    blocks: list[tuple[list[float], float, float]] = []
    for x in sorted(weights):
        block = ([x], sums[x] / weights[x], weights[x])
        while blocks and blocks[-1][1] >= block[1]:
            places, mean, total = blocks.pop()
            both = total + block[2]
            block = (places + block[0], (mean * total + block[1] * block[2]) / both, both)
        blocks.append(block)
    return [(places, mean) for places, mean, _ in blocks]


def isotonic_root(points: Sequence[tuple[float, float, float]], *, default: float) -> float:
    """Where the fit crosses 0, by a straight line between its points; `default` if nowhere."""
    for (left, below), (right, above) in pairwise(increasing_fit(points)):
        if below <= 0.0 < above:
            return left + (right - left) * -below / (above - below)
    return default
