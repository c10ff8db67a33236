"""Blocks of a paired check as a machine might give them: two servers, run by run, on a host of some kind.

A run's figure is a typical one times the host's speed at that moment, the luck of its server's launch, a change that was
planted in the second server, and noise. `sd` is the standard deviation of the log ratio of one block's throughput.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from batchtune.check.gate import LOOKS, ONE_LAUNCH, BlockFigures, Gate
from batchtune.check.paired_check import Phase
from batchtune.measure.quantiles import balanced_orders
from batchtune.scenario.spec.check import Metric

Host = Literal["steady", "drifting", "two-speed", "lumpy"]

TYPICAL: Mapping[Metric, float] = {"throughput": 2000.0, "p95": 0.012, "p99": 0.015, "cpu": 0.0002}
NOISE: Mapping[Metric, float] = {"throughput": 1.0, "p95": 1.5, "p99": 3.0, "cpu": 1.0}
FURTHER: Mapping[Metric, float] = {
    "capacity": 1800.0,
    "p50": 0.008,
    "gpu": 0.0001,
    "memory": 3e8,
    "gpu_memory": 2e9,
    "startup": 1.5,
    **{f"ttft_{name}": 0.2 for name in ("p50", "p95", "p99")},
    **{f"itl_{name}": 0.01 for name in ("p50", "p95", "p99")},
}
"""What no objective guards of itself, drawn apart: as noisy as throughput, and the host's speed has no part in it."""

ERRORS = 0.05
"""Standard deviations relative to that of throughput."""

HOST_SHARE: Mapping[Metric, float] = {"throughput": -1.0, "p95": 1.0, "p99": 1.0, "cpu": 0.5}
DRIFT = 0.2
"""Log slowdown from the first to the last of 48 runs."""

SLOW_SPELL = math.log(1.25)
SWITCH_PROBABILITY = 0.1
BLOCKS_MOST = 54
LAUNCHES = tuple(look for look in LOOKS if look >= ONE_LAUNCH)
"""Blocks after which the servers are launched anew."""

SLOWER_5: Mapping[Metric, float] = {"throughput": 1 / 1.05, "p95": 1.05, "p99": 1.05}
SLOWER_20: Mapping[Metric, float] = {"throughput": 1 / 1.2, "p95": 1.2, "p99": 1.2}
TWICE: Mapping[Metric, float] = {"throughput": 0.5, "p95": 2.0, "p99": 2.0}
SLOWER_10: Mapping[Metric, float] = {"throughput": 1 / 1.1, "p95": 1.1, "p99": 1.1}
P99_ONLY: Mapping[Metric, float] = {"p99": 2.0}
MORE_CPU: Mapping[Metric, float] = {"cpu": 1.05}
FASTER_10: Mapping[Metric, float] = {"throughput": 1.1, "p95": 1 / 1.1, "p99": 1 / 1.1}


@dataclass
class SimulatedPair:
    """The blocks of both phases of one check; those of each look have servers that were launched anew."""

    seed: int
    sd: float
    host: Host = "steady"
    change: Mapping[Metric, float] = field(default_factory=dict)
    launch_sd: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._phases: dict[Phase, list[BlockFigures]] = {}

    def measure(self, phase: Phase, blocks: int, _guarded: Collection[Gate] = ()) -> Sequence[BlockFigures]:
        if phase not in self._phases:
            self._phases[phase] = self._drawn_blocks(phase)
        return self._phases[phase][:blocks]

    def _drawn_blocks(self, phase: Phase) -> list[BlockFigures]:
        orders = balanced_orders((0, 1), blocks=BLOCKS_MOST, seed=self.seed + (phase == "confirmation"))
        slowness = self._slowness(2 * BLOCKS_MOST)
        launches = {metric: self._random.normal(0.0, self.launch_sd, (len(LOOKS), 2)) for metric in TYPICAL}
        noise = {
            metric: self._random.normal(0.0, self.sd * NOISE[metric] / math.sqrt(2.0), 2 * BLOCKS_MOST)
            for metric in TYPICAL
        }
        blocks: list[BlockFigures] = []
        chance = np.random.default_rng([self.seed, phase == "confirmation"])
        for block, order in enumerate(orders):
            figures: dict[Metric, list[float]] = {metric: [0.0, 0.0] for metric in TYPICAL}
            launch = bisect_right(LAUNCHES, block)
            for place, arm in enumerate(order):
                run = 2 * block + place
                for metric, typical in TYPICAL.items():
                    log = (
                        HOST_SHARE[metric] * slowness[run]
                        + launches[metric][launch, arm]
                        + noise[metric][run]
                    )
                    planted = self.change.get(metric, 1.0) if arm else 1.0
                    figures[metric][arm] = typical * planted * math.exp(log)
            pairs: dict[Metric, tuple[float, float]] = {
                metric: (values[0], values[1]) for metric, values in figures.items()
            }
            blocks.append({**pairs, **self._further(chance)})
        return blocks

    def _further(self, chance: np.random.Generator) -> dict[Metric, tuple[float, float]]:
        planted = self.change.get
        errors = ERRORS if "errors" in self.change else 0.0
        figures: dict[Metric, tuple[float, float]] = {"errors": (errors, errors * planted("errors", 1.0))}
        for metric, typical in FURTHER.items():
            before, after = typical * np.exp(chance.normal(0.0, self.sd / math.sqrt(2.0), 2))
            figures[metric] = (float(before), float(after) * planted(metric, 1.0))
        return figures

    def _slowness(self, runs: int) -> np.ndarray:
        match self.host:
            case "steady":
                return np.zeros(runs)
            case "drifting":
                return DRIFT * np.arange(runs) / 48.0
            case "lumpy":  # a run is fast or slow by itself, and in nothing else does it vary
                return SLOW_SPELL * self._random.integers(0, 2, runs)
            case "two-speed":
                switches = self._random.random(runs) < SWITCH_PROBABILITY
                return SLOW_SPELL * (np.cumsum(switches) % 2)
