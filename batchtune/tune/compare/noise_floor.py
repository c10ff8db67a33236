"""How small a change can be told on this machine? One configuration against itself (A/A), block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from batchtune.measure.statistics.paired import (
    detectable_shift,
    log_ratios,
    ratio_estimate,
    spread_about_zero,
)
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import Caveat
from batchtune.plain_values import fields_to_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.compare.result import block_pairs
from batchtune.tune.compare.variant import (
    QUANTILES,
    figure_of,
    figures_of,
    latency_of,
    noise_repeats,
    runs_of,
)
from batchtune.tune.trials.trial import Trial

ARMS: Final = ("A", "A again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One figure: `spread` is the standard deviation of log ratios within a block, about zero, with its interval.

    `ratio` is A again over A and should not differ from 1. `smallest` maps a number of blocks to the smallest
    relative change that as many blocks find in 4 of 5 comparisons.
    """

    spread: Estimate
    ratio: Estimate
    smallest: dict[int, float]

    @property
    def differs(self) -> bool:
        """Whether one configuration seems to differ from itself: 1 in 20 does by chance, more say drift."""
        return not self.ratio.low <= 1.0 <= self.ratio.high

    def to_dict(self) -> dict[str, Any]:
        plain = fields_to_plain(self)
        return {"smallest_change": plain.pop("smallest"), **plain}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """The floor of each figure, the objective's first. `noisy` runs were disturbed by the host after all repeats."""

    floors: dict[str, Floor]
    pairs: int
    runs: int
    noisy: int
    repeats: int
    client_limited: bool
    failure: str | None
    caveats: tuple[Caveat, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Safe for JSON."""
        plain = fields_to_plain(self)
        schema_version = 1
        return {"schema_version": schema_version, "figures": plain.pop("floors"), **plain}


def arms_of(scenario: Scenario) -> list[Variant]:
    """The scenario's own configuration, twice."""
    return [Variant(name=name, scenario=scenario) for name in ARMS]


def noise_floor(trials: Sequence[Trial], arms: Sequence[Variant]) -> NoiseFloor:
    """Sum up the trials of `compare` over `arms_of` a scenario."""
    first, second = (runs_of(trials, arm.name) for arm in arms)
    figures = [figures_of(arm, trials) for arm in arms]
    objective = arms[0].scenario.objective
    values = {"throughput": figure_of("throughput"), **{name: latency_of(name) for name in QUANTILES}}
    if objective == "capacity":
        values = {"capacity": figure_of("capacity"), **values}
    elif objective == "latency":
        values = {"p95": latency_of("p95"), **values}
    floors = {name: _floor(block_pairs(first, second, value)) for name, value in values.items()}
    return NoiseFloor(
        floors={name: floor for name, floor in floors.items() if floor is not None},
        pairs=len(first.keys() & second.keys()),
        runs=len(first) + len(second),
        noisy=sum(half.noisy for half in figures),
        repeats=noise_repeats(trials),
        client_limited=any(half.client_limited for half in figures),
        failure=next((half.failure for half in figures if half.failure is not None), None),
        caveats=tuple({caveat.code: caveat for half in figures for caveat in half.caveats}.values()),
    )


def _floor(pairs: list[tuple[float, float]]) -> Floor | None:
    ratio = ratio_estimate(pairs)
    if ratio is None:
        return None
    spread = spread_about_zero(log_ratios(pairs))
    blocks_shown = (6, 10, 20)
    smallest = {blocks: math.expm1(detectable_shift(blocks) * spread.value) for blocks in blocks_shown}
    return Floor(spread=spread, ratio=ratio, smallest=smallest)
