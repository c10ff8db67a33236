"""How likely is it that nothing is better than the chosen configuration by more than a little?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.pooled import Pooled, run_noise
from batchtune.tune.evidence.ranking import merit
from batchtune.tune.guided.posterior import NEAR
from batchtune.tune.trials.space import Space

DRAWS: Final = 20_000

_SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NearBest:
    """The probability of lying within `NEAR` of the best of `count` configurations.

    `of` "space": of all its points, those that were not measured by the twin's account; "measured": of the
    configurations that were measured, and nothing is said of the others. `space_size`: of a space too large to look at
    each point, where `count` are those that were looked at.
    """

    probability: float
    of: Literal["space", "measured"]
    count: int
    space_size: int | None = None


def near_best_of_measured(chosen: Pooled, pooled: Sequence[Pooled], *, scenario: Scenario) -> NearBest | None:
    """By the noise between runs: fresh runs compared with fresh runs, else search with search; None without a rival.

    Each configuration's objective is drawn around what was measured; rivals that miss the SLO are none. Nothing is
    taken off for the luck of the best of many, so the probability is on the low side. The seed is fixed.
    """
    if len(pooled) < 2:
        return None
    judged = {repr(candidate.point) for candidate in pooled if candidate.point is not None}
    whole = len(judged) >= Space(scenario).size
    rivals = [candidate for candidate in pooled if candidate.feasible and candidate is not chosen]
    noise = run_noise(pooled, scenario=scenario)
    generator = np.random.default_rng(_SEED)
    sd = noise.sd * np.sqrt(noise.degrees / generator.chisquare(noise.degrees, DRAWS))

    def drawn(value: float, runs: int) -> Any:
        return merit(value, scenario) + sd / math.sqrt(max(runs, 1)) * generator.standard_normal(DRAWS)

    fresh = drawn(chosen.value, chosen.confirmations)
    searched = drawn(chosen.search_value, len(chosen.searched))
    near = np.ones(DRAWS, dtype=np.bool_)
    for rival in rivals:
        if rival.confirmations and chosen.confirmations:
            ahead = drawn(rival.value, rival.confirmations) - fresh
        else:
            ahead = drawn(rival.search_value, len(rival.searched)) - searched
        near &= ahead <= -math.log1p(-NEAR)
    return NearBest(
        probability=float(near.mean()),
        of="space" if whole else "measured",
        count=Space(scenario).size if whole else len(pooled),
    )
