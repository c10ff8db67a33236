"""Which search finds a good configuration with the fewest measurements? Replays a recorded table; no server.

    python tests/benchmarks/replay/replay.py emulated --seeds 100
    python tests/benchmarks/replay/replay.py imdb_transformer --seeds 100 --searches tpe,guided
    python tests/benchmarks/replay/replay.py zoo-string-input-rest --seeds 20 --searches guided --shares 1.1

Each search pays, in recorded seconds, for every run that it asks for, and is shown one of the recorded runs of that
cell, drawn at random. A table of the zoo has no probes: the nearest runs of its grid answer them. Tables are of closed
loops and their throughput. The truth of a cell is the geometric mean of its runs. A search is judged by what it would
recommend when time is up: `within 5 %` is the share of seeds whose choice meets the SLO and loses at most 5 % to the
best feasible cell; `false feasible` the share whose choice does not meet it in truth; `optimism` the reported value over
the true one; `duplicates` runs of a cell that had been run before. 100 % is one pass over the grid, each cell once.
`guided` is the whole of `batchtune sweep`, references and confirmation included, ended by a budget of that much time;
`leader` is what that sweep would have recommended had it ended sooner, as the others, which confirm nothing, are judged.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import optuna

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.trial import Trial
from tests.benchmarks.replay.record_table import TABLES, indices_of, scenario_of
from tests.benchmarks.replay.replay_guided import Choice, guided_choices
from tests.benchmarks.replay.rivals import Indices, Rival, Shown, optuna_rival, quick_search

SHARES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
GUIDED_SHARES = (0.1, 0.2)
LOOKS = (0.04, 0.05, 0.06, 0.07, 0.08)
NEAR = 0.05
ENOUGH = 0.90
RIVALS: dict[str, Callable[[Sequence[int], int], Rival]] = {
    "random": optuna_rival(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "qmc": optuna_rival(lambda seed: optuna.samplers.QMCSampler(seed=seed, scramble=True)),
    "tpe": optuna_rival(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "gp": optuna_rival(lambda seed: optuna.samplers.GPSampler(seed=seed)),
    "quick": quick_search,
}
GUIDED = "guided"


@dataclass(frozen=True, slots=True)
class Table:
    """Recorded runs by cell, and what they mean together."""

    scenario: Scenario
    shape: tuple[int, ...]
    trials: tuple[Trial, ...]
    by_cell: dict[Indices, list[Trial]]
    value: dict[Indices, float]
    violation: dict[Indices, float]

    @property
    def best(self) -> float:
        return max(value for cell, value in self.value.items() if self.violation[cell] <= 0.0)

    @property
    def pass_s(self) -> float:
        return sum(float(np.mean([trial.seconds for trial in trials])) for trials in self.by_cell.values())

    def regret(self, cell: Indices) -> float:
        """How much is lost to the best feasible cell; inf for a cell that misses the SLO."""
        return 1.0 - self.value[cell] / self.best if self.violation[cell] <= 0.0 else math.inf


def read_table(name: str) -> Table:
    lines = gzip.decompress((TABLES / f"{name}.jsonl.gz").read_bytes()).decode().splitlines()
    trials = tuple(Trial.from_dict(json.loads(line)) for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        scenario = scenario_of(name, Path(folder))
    if scenario.objective != "throughput" or scenario.load.open_loop:
        sys.exit(f"{name}: only tables of closed loops and their throughput are replayed")
    by_cell: dict[Indices, list[Trial]] = {}
    for trial in trials:
        if trial.point is not None and trial.source == "grid":
            by_cell.setdefault(indices_of(trial.point, scenario), []).append(trial)
    value = {cell: _mean([trial.objective.value for trial in runs]) for cell, runs in by_cell.items()}
    violation = {cell: _violation(scenario, runs) for cell, runs in by_cell.items()}
    return Table(
        scenario=scenario,
        shape=tuple(len(knob.values) for knob in scenario.search.space.values()),
        trials=trials,
        by_cell=by_cell,
        value=value,
        violation=violation,
    )


def rival_choices(
    table: Table, name: str, shares: Sequence[float], seed: int
) -> tuple[list[Choice], int, int]:
    """The choice at each share of a pass, the runs made by the end, and how many of them were duplicates."""
    chance = random.Random(seed)
    search = RIVALS[name](table.shape, seed)
    spent_s, runs, duplicates, best = 0.0, 0, 0, None
    seen: set[Indices] = set()
    choices: list[Choice] = []
    cell: Indices | None = next(search)
    while len(choices) < len(shares):
        trial = None if cell is None else chance.choice(table.by_cell[cell])
        after_s = math.inf if trial is None else spent_s + trial.seconds
        while len(choices) < len(shares) and after_s > shares[len(choices)] * table.pass_s:
            choices.append(best or Choice(cell=None, reported=math.nan, seconds=spent_s))
        if trial is None or cell is None:
            break
        spent_s, runs, duplicates = after_s, runs + 1, duplicates + (cell in seen)
        seen.add(cell)
        shown = Shown(value=trial.objective.value, violation=_violation(table.scenario, [trial]))
        if shown.feasible and (best is None or shown.value > best.reported):
            best = Choice(cell=cell, reported=shown.value, seconds=spent_s)
        try:
            cell = search.send(shown)
        except StopIteration:
            cell = None
    return choices, runs, duplicates


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
    parser.add_argument("--searches", default=",".join([*RIVALS, GUIDED]))
    parser.add_argument("--shares", help="budgets, as shares of one pass, rising: 0.1,0.2")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    shares = tuple(map(float, asked.shares.split(","))) if asked.shares else ()
    table = read_table(asked.table)
    near = sum(table.regret(cell) <= NEAR for cell in table.by_cell)
    feasible = sum(violation <= 0.0 for violation in table.violation.values())
    print(
        f"{asked.table}: {len(table.by_cell)} cells, {len(table.trials)} runs, one pass {table.pass_s:.0f} s; best "
        f"{table.best:.0f} requests/s; {feasible} cells meet the SLO, {near} lie within 5 % of the best"
    )
    with ProcessPoolExecutor(asked.processes) as pool:
        for name in asked.searches.split(","):
            started_s = time.monotonic()
            if name in RIVALS:
                work = partial(rival_choices, table, name, shares or SHARES)
                found = list(pool.map(work, range(asked.seeds)))
                for at, share in enumerate(shares or SHARES):
                    print(f"{name:>12} at {share:6.1%}  {judge(table, [one[0][at] for one in found])}")
                again = sum(one[2] for one in found) / sum(one[1] for one in found)
                print(
                    f"{'':>12} duplicates {again:.2f} of the runs; {time.monotonic() - started_s:.0f} s",
                    flush=True,
                )
                continue
            for share in shares or GUIDED_SHARES:
                looks = [look for look in LOOKS if look < share]
                sweeping = partial(guided_choices, table, share * table.pass_s, looks)
                swept = list(pool.map(sweeping, range(asked.seeds)))
                choices = [one[-1] for one in swept]
                spent = np.median([one.seconds for one in choices]) / table.pass_s
                trials = np.median([one.trials for one in choices])
                print(f"{name:>12} at {share:6.1%}  {judge(table, choices)}")
                for at, look in enumerate(looks):
                    print(f"{'leader':>12} at {look:6.1%}  {judge(table, [one[at] for one in swept])}")
                print(
                    f"{'':>12} used {spent:.1%}, {trials:.0f} trials; {time.monotonic() - started_s:.0f} s of tuner "
                    f"for {asked.seeds} seeds",
                    flush=True,
                )


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _violation(scenario: Scenario, runs: Sequence[Trial]) -> float:
    (limit_s,) = scenario.slo.limits().values()
    return _mean([run.measurement.latency_s["p95"].value for run in runs if run.measurement]) / limit_s - 1.0


if __name__ == "__main__":
    main()
