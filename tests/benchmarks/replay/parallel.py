"""Is a search on several nodes at once as good, in how much less time? Replays recorded tables; no server.

    python tests/benchmarks/replay/parallel.py --seeds 20
    python tests/benchmarks/replay/parallel.py --tables imdb_transformer --seeds 50 --nodes 4 --speeds 1,1,0.8,1.1

Whole guided sweeps, confirmation included, under a budget of time that binds (a sweep to which nothing is open ends
before): on one server with `--budget`, on N nodes with `--wall` of that. A node answers from the table
as one server does (`replay_guided`), `--speeds` times as fast, and is busy for as long as was asked for; each has a
clock of its own, and a sweep's time is that of the node that ends last. What the tuner itself thinks does not count,
and is printed beside it.

`regret`: what is lost to the best feasible cell of the table by what is recommended at the end, mean and median over the
seeds, where a choice that misses the SLO in truth (`false feasible`) counts as a loss of all. `wall`: the time that the
sweeps took, in recorded seconds; `of one`: over that of one server. `against the first server`: the mean difference of
the regrets, seed by seed, with its standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import optuna

from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import Space
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import FinishedTrial, Trial
from tests.benchmarks.replay.record_table import indices_of
from tests.benchmarks.replay.replay import Table, read_table
from tests.benchmarks.replay.replay_guided import RecordedBench
from tests.tune.node_fakes import End, side_by_side


class RecordedNodes:
    """Nodes that answer from a table, each at its speed and by its own clock; `now_s` is the head's."""

    def __init__(self, table: Table, *, seed: int, speeds: Sequence[float]) -> None:
        self.names = [f"node {number}" for number in range(1, len(speeds) + 1)]
        self._benches = {
            name: RecordedBench(table, seed=1000 * seed + at, exact=True)
            for at, name in enumerate(self.names)
        }
        self._speeds = dict(zip(self.names, speeds, strict=True))
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        for end_s, _, _, done in side_by_side(plans, self.names, self._run):
            self._now_s = end_s
            yield done

    def _run(self, plan: Plan, name: str) -> End:
        done = self._benches[name].run(plan)
        speed, trial = self._speeds[name], done.trial
        if trial.measurement is not None and speed != 1.0:
            objective = None if trial.objective is None else _times(trial.objective, speed)
            trial = replace(trial, measurement=_at_speed(trial.measurement, speed), objective=objective)
        done = replace(done, trial=replace(trial, node=name))
        return self._now_s + trial.seconds, plan.number, name, done


def _at_speed(measured: Measurement, speed: float) -> Measurement:
    """What a node so much faster would have measured of a closed loop."""
    server = measured.server
    if server is not None:
        times = {rows: mean / speed for rows, mean in server.execution_s_by_rows.items()}
        server = replace(server, execution_s_by_rows=times)
    return replace(
        measured,
        throughput_rps=_times(measured.throughput_rps, speed),
        throughput_rows_per_s=_times(measured.throughput_rows_per_s, speed),
        latency_s={name: _times(quantile, 1.0 / speed) for name, quantile in measured.latency_s.items()},
        server=server,
    )


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(value=estimate.value * factor, low=estimate.low * factor, high=estimate.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a sweep ended: what is lost (1: all), whether the choice misses the SLO in truth, what it took."""

    regret: float
    misses: bool
    wall_s: float
    trials: int
    tuner_s: float


def searched(name: str, speeds: Sequence[float], budget_s: float, seed: int) -> Ended:
    """One sweep on one server (no speeds) or on nodes of these speeds."""
    table = _table(name)
    budget = table.scenario.search.budget.model_copy(update={"time_s": budget_s})
    search = table.scenario.search.model_copy(
        update={"strategy": "guided", "budget": budget, "seed": seed + 1}
    )
    scenario = table.scenario.model_copy(update={"search": search})
    began_s = time.process_time()
    if speeds:
        nodes = RecordedNodes(table, seed=seed, speeds=speeds)
        trials = [done.trial for done in sweep_nodes(scenario, lambda _report: nodes, now_s=nodes.now_s)]
        wall_s = nodes.now_s()
    else:
        bench = RecordedBench(table, seed=1000 * seed, exact=True)
        trials = [
            done.trial for done in sweep_nodes(scenario, lambda _report: OneServer(bench), now_s=bench.now_s)
        ]
        wall_s = bench.now_s()
    return _judged(table, scenario, trials, wall_s=wall_s, tuner_s=time.process_time() - began_s)


def kept(folder: Path | None, sweep: tuple[str, tuple[float, ...], float, int]) -> Ended:
    """`searched`, read from the folder where it was run before."""
    if folder is None:
        return searched(*sweep)
    file = folder / f"{hashlib.sha256(repr(sweep).encode()).hexdigest()[:16]}.json"
    if not file.exists():
        file.write_text(json.dumps(asdict(searched(*sweep))))
    return Ended(**json.loads(file.read_text()))


def _judged(
    table: Table, scenario: Scenario, trials: Sequence[Trial], *, wall_s: float, tuner_s: float
) -> Ended:
    try:
        chosen = recommend(trials, scenario=scenario)
    except (NoFeasibleConfigurationError, InconclusiveError):
        regret = math.inf
    else:
        space = Space(table.scenario)
        nearest = RecordedBench(table, seed=0).nearest(chosen.configuration)
        point = space.locate(nearest)
        regret = math.inf if point is None else table.regret(indices_of(point, table.scenario))
    return Ended(
        regret=min(regret, 1.0),
        misses=not math.isfinite(regret),
        wall_s=wall_s,
        trials=len(trials),
        tuner_s=tuner_s,
    )


@cache
def _table(name: str) -> Table:
    return read_table(name)


def line(label: str, ended: Sequence[Ended], alone: Sequence[Ended]) -> str:
    regrets = np.array([one.regret for one in ended])
    behind = regrets - np.array([one.regret for one in alone])
    wall_s = float(np.mean([one.wall_s for one in ended]))
    of_one = wall_s / float(np.mean([one.wall_s for one in alone]))
    error = float(behind.std(ddof=1)) / math.sqrt(len(behind)) if len(behind) > 1 else math.nan
    against = f"against the first server {100 * behind.mean():+5.2f} ± {100 * error:4.2f} points"
    return (
        f"{label:>16}  regret mean {100 * regrets.mean():5.2f} %, median {100 * np.median(regrets):5.2f} %, within 5 %: "
        f"{np.mean(regrets <= 0.05):4.2f}, false feasible {np.mean([one.misses for one in ended]):4.2f}; "
        f"wall {wall_s:6.1f} s ({of_one:5.1%} of one), {np.mean([one.trials for one in ended]):.0f} trials, "
        f"tuner {np.mean([one.tuner_s for one in ended]):.1f} s{'' if ended is alone else '; ' + against}"
    )


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--tables", default="emulated,imdb_transformer", help="names, with commas between them"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--budget", type=float, default=60.0, help="of one server, in recorded seconds")
    parser.add_argument("--wall", type=float, default=0.32, help="budget of the nodes, of that of one server")
    parser.add_argument("--speeds", help="of the nodes: 1,0.9,1,1.1; default: all alike")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder of sweeps that need not be run again")
    asked = parser.parse_args()
    speeds = [float(word) for word in asked.speeds.split(",")] if asked.speeds else [1.0] * asked.nodes
    be_quiet()
    with ProcessPoolExecutor(asked.processes, initializer=be_quiet) as pool:
        for name in asked.tables.split(","):
            budget_s = asked.budget
            sweeps = [(name, (), budget_s, seed) for seed in range(asked.seeds)]
            sweeps += [(name, tuple(speeds), asked.wall * budget_s, seed) for seed in range(asked.seeds)]
            ended = list(pool.map(partial(kept, asked.keep), sweeps))
            alone, nodes = ended[: asked.seeds], ended[asked.seeds :]
            print(f"{name}: {len(_table(name).by_cell)} cells, budget of one server {budget_s:.0f} s")
            print(line("one server", alone, alone))
            print(line(f"{len(speeds)} nodes", nodes, alone), flush=True)


if __name__ == "__main__":
    main()
