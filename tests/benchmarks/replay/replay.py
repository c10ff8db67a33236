"""How few measurements does a sweep need to find a good configuration? Replays a recorded table; no server.

    python tests/benchmarks/replay/replay.py emulated --seeds 100
    python tests/benchmarks/replay/replay.py zoo-string-input-rest --seeds 20 --shares 1.1

The sweep is the real one, with references and confirmation, on a bench that answers from the table and a clock that
runs by recorded seconds: each run is one of the recorded ones of its cell, drawn at random. A load that was not
recorded is answered by the nearest one that was (the rule's batch size lies between two of the grid; a table of the
zoo has no probes), and costs as much time as it asks for, also where the recorded run was shorter. Tables are of
closed loops and their throughput. The truth of a cell is the geometric mean of its runs. A sweep is judged by what it
recommends when its budget is spent: `within 5 %` is the share of seeds whose choice meets the SLO and loses at most
5 % to the best feasible cell; `false feasible` the share whose choice does not meet it in truth; `optimism` the
reported value over the true one. 100 % is one pass over the grid, each cell once.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from batchtune.batching.parameters import Configuration
from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import Space
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import FinishedTrial, Trial
from tests.benchmarks.replay.record_table import clients_of, indices_of, recorded, scenario_of

SHARES = (0.1, 0.2)
NEAR = 0.05
SHORTEST_S = 0.1
"""Of a run."""
KNOBS = ("max_batch_size", "batch_timeout_micros", "num_batch_threads")
Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Recorded runs, and what they mean together by cell; `pass_s`: of one run of each cell."""

    scenario: Scenario
    trials: Sequence[Trial]
    value: dict[Indices, float]
    violation: dict[Indices, float]
    pass_s: float

    @property
    def best(self) -> float:
        return max(value for cell, value in self.value.items() if self.violation[cell] <= 0.0)

    def regret(self, cell: Indices) -> float:
        """How much is lost to the best feasible cell; inf for a cell that misses the SLO."""
        return 1.0 - self.value[cell] / self.best if self.violation[cell] <= 0.0 else math.inf


def read_table(name: str) -> Table:
    trials = recorded(name)
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(name, Path(folder))
    if scenario.objective != "throughput" or scenario.load.open_loop:
        sys.exit(f"{name}: only tables of closed loops and their throughput are replayed")
    by_cell: dict[Indices, list[Trial]] = {}
    for trial in trials:
        if trial.point is not None and trial.source == "grid":
            by_cell.setdefault(indices_of(trial.point, scenario), []).append(trial)
    (limit_s,) = scenario.slo.limits().values()
    p95_s = {
        cell: _mean(run.measurement.latency_s["p95"].value for run in runs if run.measurement)
        for cell, runs in by_cell.items()
    }
    return Table(
        scenario=scenario,
        trials=trials,
        value={
            cell: _mean(run.objective.value for run in runs if run.objective)
            for cell, runs in by_cell.items()
        },
        violation={cell: seconds / limit_s - 1.0 for cell, seconds in p95_s.items()},
        pass_s=sum(float(np.mean([run.seconds for run in runs])) for runs in by_cell.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What would be recommended: the cell (None: nothing), the value reported for it, and what it took."""

    cell: Indices | None
    reported: float
    seconds: float
    trials: int


def guided_choice(table: Table, budget_s: float, seed: int) -> Choice:
    """What one sweep with this budget recommends."""
    budget = table.scenario.search.budget.model_copy(update={"time_s": budget_s})
    search = table.scenario.search.model_copy(
        update={"strategy": "guided", "budget": budget, "seed": seed + 1}
    )
    scenario = table.scenario.model_copy(update={"search": search})
    bench = RecordedBench(table, seed=seed)
    nodes = sweep_nodes(scenario, lambda _report: OneServer(bench), now_s=bench.now_s)
    trials = [done.trial for done in nodes]
    cell, reported = None, math.nan
    with contextlib.suppress(NoFeasibleConfigurationError, InconclusiveError):
        chosen = recommend(trials, scenario=scenario)
        nearest, _ = bench.nearest(chosen.configuration, None)
        point = Space(table.scenario).locate(nearest)
        cell = None if point is None else indices_of(point, table.scenario)
        reported = chosen.throughput_rps.value
    return Choice(cell=cell, reported=reported, seconds=bench.now_s(), trials=len(trials))


class RecordedBench:
    """Runs trials by looking them up; time passes only here."""

    def __init__(self, table: Table, *, seed: int) -> None:
        self._chance = random.Random(seed)
        self._elapsed_s = 0.0
        self._recorded_s = table.scenario.load.duration_s
        self._recorded: dict[tuple[Configuration, int | None], list[Trial]] = {}
        for trial in table.trials:
            self._recorded.setdefault((trial.configuration, clients_of(trial)), []).append(trial)

    def now_s(self) -> float:
        return self._elapsed_s

    def run(self, plan: Plan) -> FinishedTrial:
        key = self.nearest(plan.request.configuration, plan.request.concurrency)
        trial = self._chance.choice(self._recorded[key])
        recorded_s = self._recorded_s if trial.request.duration_s is None else trial.request.duration_s
        asked_s = 0.0 if plan.request.duration_s is None else plan.request.duration_s - recorded_s
        seconds = max(trial.seconds + max(asked_s, 0.0), SHORTEST_S)
        self._elapsed_s += seconds
        asked = replace(trial, number=plan.number, request=plan.request, seed=plan.seed, seconds=seconds)
        return FinishedTrial(trial=asked, samples=None)

    def nearest(self, configuration: Configuration, clients: int | None) -> tuple[Configuration, int | None]:
        """What was recorded that is most like this, batched or not; clients of a probe beside those of another."""
        if (configuration, clients) in self._recorded:
            return configuration, clients
        alike = [
            key for key in self._recorded if (key[0].batching is None) == (configuration.batching is None)
        ]
        of_kind = [key for key in alike if (key[1] is None) == (clients is None)]
        return min(
            of_kind or [(key, None) for key, _ in alike],
            key=lambda key: math.dist(list(_place(*key)), list(_place(configuration, clients))),
        )


def _place(configuration: Configuration, clients: int | None) -> Iterable[float]:
    """Logarithms, the timeout's counted from half a millisecond."""
    yield math.log(clients or 1)
    if configuration.batching is None:
        return
    values: list[Any] = [configuration.in_force(name) for name in KNOBS]
    yield from (math.log(values[0]), math.log1p(values[1] / 500), math.log(values[2]))


def judge(table: Table, choices: Sequence[Choice]) -> str:
    regrets = [math.inf if one.cell is None else table.regret(one.cell) for one in choices]
    finite = [regret for regret in regrets if math.isfinite(regret)]
    wrong = sum(one.cell is not None and table.violation[one.cell] > 0.0 for one in choices) / len(choices)
    optimism = [one.reported / table.value[one.cell] - 1.0 for one in choices if one.cell is not None]
    near = sum(regret <= NEAR for regret in regrets) / len(regrets)
    return (
        f"within 5 %: {near:5.2f}  median regret {np.median(finite) if finite else math.nan:6.3f}  "
        f"false feasible {wrong:5.2f}  optimism {np.median(optimism) if optimism else math.nan:+.3f}"
    )


def main() -> None:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--shares", help="budgets, as shares of one pass, rising: 0.1,0.2")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    shares = tuple(map(float, asked.shares.split(","))) if asked.shares else SHARES
    table = read_table(asked.table)
    near = sum(table.regret(cell) <= NEAR for cell in table.value)
    feasible = sum(violation <= 0.0 for violation in table.violation.values())
    print(
        f"{asked.table}: {len(table.value)} cells, {len(table.trials)} runs, one pass {table.pass_s:.0f} s; best "
        f"{table.best:.0f} requests/s; {feasible} cells meet the SLO, {near} lie within 5 % of the best"
    )
    with ProcessPoolExecutor(asked.processes) as pool:
        for share in shares:
            started_s = time.monotonic()
            sweeping = partial(guided_choice, table, share * table.pass_s)
            choices = list(pool.map(sweeping, range(asked.seeds)))
            spent = np.median([one.seconds for one in choices]) / table.pass_s
            trials = np.median([one.trials for one in choices])
            print(f"{'guided':>12} at {share:6.1%}  {judge(table, choices)}")
            print(
                f"{'':>12} used {spent:.1%}, {trials:.0f} trials; {time.monotonic() - started_s:.0f} s of tuner "
                f"for {asked.seeds} seeds",
                flush=True,
            )


def _mean(values: Iterable[float]) -> float:
    return math.exp(float(np.mean([math.log(value) for value in values])))


if __name__ == "__main__":
    main()
