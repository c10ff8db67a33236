"""What are the true capacities of the simulated servers of `capacity_coverage.py`?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.twin.simulator.simulate import Device, SimulatedTraffic, summary_of
from tests.tune.tune_fakes import scenario_of
from tests.twin.simulated_fleet import batcher, true_capacities

SPACE = {
    "max_batch_size": [1, 2, 4, 8, 16, 32, 64],
    "batch_timeout_micros": [0, 1000, 5000],
    "num_batch_threads": [1, 2, 4],
}
TRUTH_REQUESTS = 200_000
TRUTH_SEEDS = (11, 12, 13)
"""The truth is the median of so many long simulations; their capacities differ by less than 1 %."""


@dataclass(frozen=True)
class Case:
    """A device with τ(b) = base + per_row · b, and a limit on p95."""

    base_ms: float
    per_row_ms: float
    p95_ms: float
    serial: bool = True
    contention: float = 0.0
    jitter: float = 0.0

    def device(self) -> Device:
        rows = np.arange(DEFAULT_MAX_BATCH_SIZE + 1)
        return Device(
            tau_s=(self.base_ms + self.per_row_ms * rows) / 1e3,
            serial=self.serial,
            contention=self.contention,
            jitter_ratio=self.jitter,
            delay_s=0.0003,
        )

    def scenario(self, *, seed: int, budget_s: float) -> Scenario:
        return scenario_of(
            load={"arrivals": "poisson", "warm_up": "500ms", "duration": "2s", "seed": seed},
            objective="capacity",
            slo={"p95": f"{self.p95_ms}ms"},
            fixed={"max_enqueued_batches": 1000},
            search={"strategy": "guided", "budget": {"time": f"{budget_s}s"}, "seed": seed, "space": SPACE},
        )

    def __str__(self) -> str:
        kind = "serial" if self.serial else f"contention {self.contention:g}"
        return f"{self.base_ms:g} + {self.per_row_ms:g}·b ms {kind}, p95 {self.p95_ms:g} ms"


CASES = (
    Case(2.0, 0.1, 20.0),
    Case(8.0, 0.6, 60.0, jitter=0.05),
    Case(12.0, 1.2, 60.0, serial=False),
    Case(4.0, 0.3, 30.0, serial=False, contention=0.5),
    Case(40.0, 2.0, 400.0),
)


@lru_cache(maxsize=1000)
def true_capacity_rps(case: Case, configuration: Configuration, factor: float) -> float:
    """Halving until it is known within 0.2 %, the median over some long Poisson streams."""
    limit_s = factor * case.p95_ms / 1e3
    device, scheduler = case.device(), batcher(configuration)
    size = scheduler.batch_rows_max or 1
    threads = 1 if case.serial else scheduler.batch_threads
    most_rps = threads * size / float(device.tau_s[size])
    found = []
    for seed in TRUTH_SEEDS:
        arrivals_s = np.cumsum(np.random.default_rng(seed).exponential(1.0, TRUTH_REQUESTS))

        def keeps(rate_rps: float, arrivals_s: np.ndarray = arrivals_s) -> bool:
            warm_up_s = 0.02 * TRUTH_REQUESTS / rate_rps
            traffic = SimulatedTraffic(due_s=arrivals_s / rate_rps, rows=1)
            run = summary_of(traffic, scheduler, [device], warm_up_s=warm_up_s)
            return bool(run.latency_s[0, 1] <= limit_s and run.error_ratio[0] <= 0.01)

        found.append(_highest(keeps, most_rps))
    return statistics.median(found)


@cache
def best_rps(case: Case, factor: float) -> float:
    """Of the space and no batching; the contenders again in long simulations."""
    stricter = replace(case, p95_ms=factor * case.p95_ms)
    rough = true_capacities(stricter.scenario(seed=1, budget_s=90.0), case.device())
    if factor != 1.0:  # only whether anything meets it is asked
        return max(rough.values())
    contenders = [
        contender for contender, rate_rps in rough.items() if rate_rps >= 0.97 * max(rough.values())
    ]
    return max(true_capacity_rps(case, contender, factor) for contender in contenders)


def _highest(keeps: Callable[[float], bool], most_rps: float) -> float:
    low, high = 0.0, most_rps
    while high - low > 0.002 * high and high > 1e-3 * most_rps:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
