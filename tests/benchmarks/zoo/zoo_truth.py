"""How good is each configuration of a target in truth, and how much does one lose to the best?

Of an emulated device exactly, by the simulator with the true device and the server's overheads (zoo_models); of a real
model from a grid that was recorded once, on the CPUs that a sweep gives it, cell by cell in random order, a whole
pass after another.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.measure.slo import primary_limit
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import Space, reference_configurations
from batchtune.twin.simulator.simulate import Device, batcher_of, closed_traffic, run_simulation
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.replay.record_table import ZOO, recorded
from tests.benchmarks.zoo.zoo_models import simulated_device
from tests.benchmarks.zoo.zoo_table import ZooTarget
from tests.twin.simulated_run import SimulatedRun, run_of, simulate_open

REQUESTS = 30_000
"""Of one simulated run: p95 is then known within 2 %, throughput and capacity within 1 %."""

STARTS = (0.01, 0.1, 0.3, 1.0)
"""The clients of a closed loop begin within such a share of a lone request's time: at one instant they never do."""

LIMIT_SLACK = 0.02
"""A latency so close to its limit may lie on either side: no search is blamed for it, or measured by it."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Runs of each configuration as (objective, p95 over its limit - 1); several where they were measured.

    `candidates`: the points of the space and no batching, the only ones that may be the best.
    """

    runs: Mapping[Configuration, Sequence[tuple[float, float]]]
    candidates: frozenset[Configuration]
    lower_is_better: bool

    def regret(self, configuration: Configuration) -> float:
        """The share lost to the best, at least 0; inf: misses the SLO; nan: nothing is known of it.

        The best of noisy figures flatters itself: each pass names its best, the other passes say what that is worth.
        """
        if configuration not in self.runs:
            return math.nan
        if self._excess(configuration) > LIMIT_SLACK:
            return math.inf
        own, best = self._logs(configuration, skip=None), self._best_log()
        return max(0.0, math.expm1(own - best) if self.lower_is_better else -math.expm1(own - best))

    def noise(self) -> float:
        """Standard deviation between runs (simulated ones: starts) of a configuration that meets the SLO, relative."""
        spreads = [
            statistics.variance(math.log(value) for value, _ in runs)
            for runs in (self.runs[candidate] for candidate in self._within(LIMIT_SLACK))
            if len(runs) > 1 and all(value > 0.0 for value, _ in runs)
        ]
        return math.sqrt(statistics.fmean(spreads)) if spreads else 0.0

    def anything_meets(self) -> bool:
        return bool(self._within(LIMIT_SLACK))

    def _best_log(self) -> float:
        within = self._within(-LIMIT_SLACK) or self._within(LIMIT_SLACK)
        passes = max(map(len, self.runs.values()))
        if passes == 1:
            return self._logs(self._first(within, skip=None), skip=None)
        return statistics.fmean(
            self._run_log(self._first(within, skip=number), number) for number in range(passes)
        )

    def _first(self, within: Sequence[Configuration], *, skip: int | None) -> Configuration:
        sign = -1 if self.lower_is_better else 1
        return max(within, key=lambda configuration: sign * self._logs(configuration, skip=skip))

    def _within(self, slack: float) -> list[Configuration]:
        return [
            candidate
            for candidate in self.runs
            if candidate in self.candidates and self._excess(candidate) <= slack
        ]

    def _excess(self, configuration: Configuration) -> float:
        return statistics.median(excess for _, excess in self.runs[configuration])

    def _logs(self, configuration: Configuration, *, skip: int | None) -> float:
        runs = self.runs[configuration]
        return statistics.fmean(
            self._run_log(configuration, number) for number in range(len(runs)) if number != skip
        )

    def _run_log(self, configuration: Configuration, number: int) -> float:
        value = self.runs[configuration][number][0]
        return math.log(value) if value > 0.0 else -math.inf


def truth_of(target: ZooTarget, *, asked: Sequence[Configuration] = ()) -> Truth | None:
    """The truth of the target's space, no batching and what is asked; None: none is known."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = read_scenario(target.write_scenario(Path(folder), seed=1))
    space = Space(scenario)
    points = [space.configuration(point) for point in scenario.search.grid()]
    inside = [*filter(None, points), reference_configurations(scenario)["no_batching"]]
    runs: dict[Configuration, list[tuple[float, float]]] = {}
    if target.truth == "exact" and isinstance(target.model, Emulated):
        device, rows_max = simulated_device(target.model, target.protocol), target.model.rows_max
        for one in dict.fromkeys([*inside, *asked]):
            runs[one] = simulated(scenario, one, device, rows_max=rows_max)
    elif target.truth == "recorded":
        with contextlib.suppress(FileNotFoundError):
            runs = _recorded_runs(target)
    if not runs:
        return None
    lower = target.objective == "latency"
    return Truth(runs=runs, candidates=frozenset(inside) & runs.keys(), lower_is_better=lower)


def _recorded_runs(target: ZooTarget) -> dict[Configuration, list[tuple[float, float]]]:
    """From the table; a configuration of which a run failed misses the SLO."""
    runs: dict[Configuration, list[tuple[float, float]]] = {}
    for trial in recorded(f"{ZOO}{target.name}"):
        run = (0.0, math.inf)
        if trial.measurement is not None and trial.objective is not None:
            run = (trial.objective.value, max(trial.constraints.values()))
        runs.setdefault(trial.configuration, []).append(run)
    return runs


def simulated(
    scenario: Scenario, configuration: Configuration, device: Device, *, rows_max: int | None
) -> list[tuple[float, float]]:
    """The objective and by how much p95 exceeds its limit, of each start; a batch of more than `rows_max` rows fails.

    Clients of a closed loop that start otherwise may stay in another rhythm for as long as the loop lasts.
    """
    limit = primary_limit(scenario.slo)
    assert limit is not None
    scheduler, rows = batcher_of(configuration), scenario.request.rows_most

    def judged(run: SimulatedRun) -> tuple[float, float, float]:
        """Answers per second, p95 and its excess of a run, its first tenth not counted."""
        latency_s = run.latency_s.copy()
        if rows_max is not None:
            latency_s[run.batch_rows[run.batch] > rows_max] = math.inf
        counted = slice(len(latency_s) // 10, None)
        p95_s = _p95(latency_s[counted])
        failed = float(np.mean(np.isinf(latency_s[counted]))) > scenario.slo.error_ratio
        excess = math.inf if failed else p95_s / limit.seconds - 1.0
        window_s = run.due_s[-1] - run.due_s[counted][0]
        return np.count_nonzero(np.isfinite(latency_s[counted])) / window_s, p95_s, excess

    def at_rate(rate_rps: float) -> tuple[float, float, float]:
        arrivals_s = np.cumsum(np.random.default_rng(5).exponential(1.0 / rate_rps, REQUESTS))
        return judged(simulate_open(arrivals_s, rows, scheduler, device))

    match scenario.objective:
        case "throughput":
            clients, lone_s = scenario.load.concurrency or 1, float(device.tau_s[rows])
            starts = (
                closed_traffic(
                    clients=clients,
                    requests=REQUESTS // len(STARTS),
                    rows=rows,
                    spread_s=share * lone_s,
                )
                for share in STARTS
            )
            runs = [judged(run_of(run_simulation(traffic, scheduler, device))) for traffic in starts]
            return [(served_rps, excess) for served_rps, _, excess in runs]
        case "latency":
            _, p95_s, excess = at_rate(scenario.load.rate_rps or 1.0)
            return [(p95_s, excess)]
        case "capacity":
            threads = 1 if device.serial else scheduler.batch_threads
            size = scheduler.batch_rows_max or rows
            known = min(size, len(device.tau_s) - 1)
            most_rps = 1.05 * threads * size / rows / float(device.tau_s[known])
            capacity_rps = _highest(lambda rate_rps: at_rate(rate_rps)[2] <= 0.0, most_rps)
            return [(capacity_rps, 0.0 if capacity_rps > 0.0 else math.inf)]


def _highest(kept: Callable[[float], bool], most: float) -> float:
    low, high = 0.0, most
    while high - low > 0.003 * high and high > 1e-3 * most:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def _p95(latency_s: NDArray[np.float64]) -> float:
    rank = math.ceil(0.95 * len(latency_s)) - 1
    return float(np.partition(latency_s, rank)[rank])
