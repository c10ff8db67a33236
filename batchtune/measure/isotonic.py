"""Where does a noisy relation that must increase cross zero?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def isotonic_root(points: Sequence[tuple[float, float, float]], *, default: float) -> float:
    """Where the weighted increasing fit of (x, y, weight) crosses 0, by a straight line; `default` if nowhere.

    Source: pool adjacent violators, Ayer et al. 1955.
    """
    blocks: list[list[float]] = []
    for x, y, weight in sorted(points):
        blocks.append([x, x, y, weight])
        while len(blocks) > 1 and blocks[-2][2] >= blocks[-1][2]:
            right = blocks.pop()
            left = blocks[-1]
            total = left[3] + right[3]
            blocks[-1] = [left[0], right[1], (left[2] * left[3] + right[2] * right[3]) / total, total]
    for below, above in pairwise(blocks):
        if below[2] <= 0.0 < above[2]:
            return below[1] + (above[0] - below[1]) * -below[2] / (above[2] - below[2])
    return default
