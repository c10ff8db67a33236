"""When are the blocks looked at, and which share of the error rate may each look spend?

A group-sequential test: the looks and what each may spend are fixed beforehand by the number of blocks, whatever the
blocks say, so that the union bound holds over all looks (Jennison & Turnbull, "Group Sequential Methods", chapter 7,
with a spending function of the power family). The signed-rank test has steps: what a look cannot use goes to
the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from batchtune.measure.statistics.paired import signed_rank_distribution, walsh_averages

LOOKS: Final = (6, 10, 16, 24, 36, 54)
"""Blocks at which a check may end: the fewest that can say anything at 5 %, then half as many again."""

ERROR_RATE: Final = 0.05
"""Of the screen over all gates and looks; and once more of the confirmation over the gates that it confirms."""

_SPENDING: Final = 0.75
"""Power of the share of the blocks: below 1, so that the first look can clear, and no smaller, so that the last can."""

_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """After so many blocks; `flag_level` is what one gate may spend to be flagged, `clear_level` to be cleared."""

    blocks: int
    flag_level: float
    clear_level: float


def looks_up_to(blocks_max: int) -> tuple[int, ...]:
    """The looks of a check of at most so many blocks the last at its end."""
    return (*(look for look in LOOKS if look < blocks_max), blocks_max)


@lru_cache(maxsize=64)
def planned_looks(blocks: tuple[int, ...], *, gates: int, error_rate: float = ERROR_RATE) -> tuple[Look, ...]:
    """What each look may spend: for a flag the error rate over all gates (Bonferroni), so that one false flag among all
    of them is as rare as stated; to clear a gate the whole, because all gates must be cleared for the verdict OK."""
    flags = _spent(blocks, error_rate / max(gates, 1))
    clears = _spent(blocks, error_rate)
    return tuple(
        Look(blocks=count, flag_level=flag, clear_level=clear)
        for count, flag, clear in zip(blocks, flags, clears, strict=True)
    )


def fewest_blocks(*, gates: int) -> int:
    """The fewest blocks of a check of so many gates under which some look can flag one."""
    blocks = LOOKS[0]
    while not any(look.flag_level for look in planned_looks(looks_up_to(blocks), gates=gates)):
        blocks += 1
    return blocks


def bounds(
    differences: Sequence[float], *, low_level: float, high_level: float
) -> tuple[float, float, float]:
    """The Hodges-Lehmann median of the differences with its one-sided bounds; ±inf where the level allows none."""
    averages = walsh_averages(differences)
    if not len(averages):
        return math.nan, -math.inf, math.inf
    low, high = _rank(len(differences), low_level), _rank(len(differences), high_level)
    return (
        float(np.median(averages)),
        float(averages[low - 1]) if low else -math.inf,
        float(averages[-high]) if high else math.inf,
    )


def _spent(blocks: Sequence[int], error_rate: float) -> list[float]:
    """What the test can use, at each look, of what may be spent until then."""
    levels: list[float] = []
    for count in blocks:
        allowed = error_rate * (count / blocks[-1]) ** _SPENDING - sum(levels)
        levels.append(_attained(count, allowed))
    return levels


def _attained(count: int, level: float) -> float:
    rank = _rank(count, level)
    return float(np.cumsum(signed_rank_distribution(count))[rank - 1]) if rank else 0.0


@lru_cache(maxsize=512)
def _rank(count: int, level: float) -> int:
    """k such that the k-th smallest Walsh average is a lower bound at this one-sided level; 0: there is none."""
    below = np.cumsum(signed_rank_distribution(count))
    return int(np.searchsorted(below, level * (1.0 + _ROUNDING), side="right"))
