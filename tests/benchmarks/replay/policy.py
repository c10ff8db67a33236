"""Which hand-set numbers of the search matter, and are they set well? Moves each by 30 %; no server.

    python tests/benchmarks/replay/policy.py --seeds 4
    python tests/benchmarks/replay/policy.py --only RUNG,SURVIVORS --seeds 20

Each number of `batchtune.tune.policy` is multiplied by 0.7 and by 1.3 (whole numbers move by at least 1, shares stay below
1), everything else as it is, and whole guided sweeps are run again under the same seeds: on the two recorded tables of
`replay.py` (throughput, a tenth of one pass over the grid) and on two simulated servers (capacity, 60 virtual seconds).
`other` counts the sweeps that asked for other trials or stated something else than with the number as it stands; `regret`
is the mean change of the loss to the best configuration, in points of per cent, with the standard error of the pairs, where
a choice that misses the SLO counts as a loss of all. A number that changes nothing in any sweep is named at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import optuna

from batchtune.errors import BatchtuneError
from batchtune.recommend.recommendation import Recommendation, recommend
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.sweep.progress import Watcher
from batchtune.tune.sweep.sweep import run_sweep, sweep
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Trial
from batchtune.twin.simulator.replica import Device
from tests.benchmarks.replay.replay import Table, read_table
from tests.benchmarks.replay.replay_guided import RecordedBench
from tests.tune.tune_fakes import scenario_of
from tests.twin.simulated_fleet import simulated_server, true_capacities

FACTORS = (0.7, 1.3)
PASS_SHARE = 0.1
NOISE = 0.03
OTHER_STRATEGIES = (
    "GUIDE_",
    "RULE_ROUNDS",
    "RULE_RE",
    "RULE_B",
    "RULE_SAME",
    "NSGA2_",
    "COMPARE_",
    "HARDLY",
    "PROBE_CLIENTS",
)
DEVICES = {
    "serial": Device(tau_s=0.006 + 0.0006 * np.arange(1025), delay_s=0.0003, serial=True),
    "parallel": Device(tau_s=0.012 + 0.0012 * np.arange(1025), delay_s=0.0003, contention=0.3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one sweep ended: what is lost to the best configuration (1: all), and a digest of asks and statement."""

    regret: float
    digest: str


def ending(workload: str, seed: int, settings: Mapping[str, Any] = MappingProxyType({})) -> Ending:
    """One sweep of a workload, with these numbers of the policy replaced."""
    before = {name: vars(policy)[name] for name in settings}
    vars(policy).update(settings)
    try:
        return WORKLOADS[workload](workload, seed)
    finally:
        vars(policy).update(before)


def on_table(name: str, seed: int) -> Ending:
    table = _table(name)
    budget = table.scenario.search.budget.model_copy(update={"time_s": PASS_SHARE * table.pass_s})
    search = table.scenario.search.model_copy(
        update={"strategy": "guided", "budget": budget, "seed": seed + 1}
    )
    scenario = table.scenario.model_copy(update={"search": search})
    bench = RecordedBench(table, seed=seed, error=1.0)
    told: list[Any] = []
    watcher = Watcher(on_summary=told.append)
    trials = [done.trial for done in run_sweep(scenario, bench, watcher=watcher, now_s=bench.now_s)]
    space = Space(table.scenario)

    def loss(chosen: Recommendation) -> float:
        point = space.locate(bench.nearest(chosen.configuration))
        return 1.0 if point is None else min(table.regret(space.indices(point)), 1.0)

    return _judged(trials, scenario, told, loss)


def on_simulator(name: str, seed: int) -> Ending:
    scenario = _capacity_scenario(seed)
    clock, target, fleet = simulated_server(DEVICES[name], seed=seed, noise=NOISE)
    told: list[Any] = []
    watcher = Watcher(on_summary=told.append)
    trials = [done.trial for done in sweep(scenario, target, fleet, watcher=watcher, now_s=clock)]
    truth = _truth(name)

    def loss(chosen: Recommendation) -> float:
        return 1.0 - truth.get(chosen.configuration, 0.0) / max(truth.values())

    return _judged(trials, scenario, told, loss)


WORKLOADS: Mapping[str, Callable[[str, int], Ending]] = {
    "emulated": on_table,
    "imdb_transformer": on_table,
    "serial": on_simulator,
    "parallel": on_simulator,
}


def _judged(
    trials: list[Trial], scenario: Scenario, told: list[Any], loss: Callable[[Recommendation], float]
) -> Ending:
    asked = [
        (one.configuration.label(), one.source, one.asked_rate_rps, one.asked_duration_s) for one in trials
    ]
    try:
        chosen = recommend(trials, scenario=scenario, search=told[-1])
    except BatchtuneError as error:
        return Ending(regret=1.0, digest=_digest([asked, error.message]))
    return Ending(regret=loss(chosen), digest=_digest([asked, chosen.to_dict()]))


def _digest(stated: Any) -> str:
    return hashlib.sha256(json.dumps(stated, default=str, sort_keys=True).encode()).hexdigest()


@cache
def _table(name: str) -> Table:
    return read_table(name)


@cache
def _truth(name: str) -> dict[Any, float]:
    return true_capacities(_capacity_scenario(0), DEVICES[name])


def _capacity_scenario(seed: int) -> Scenario:
    return scenario_of(
        load={"arrivals": "poisson", "warm_up": "300ms", "duration": "2s", "seed": seed + 1},
        objective="capacity",
        slo={"p95": "60ms"},
        search={
            "strategy": "guided",
            "budget": {"time": "60s"},
            "seed": seed + 1,
            "space": {
                "max_batch_size": [1, 4, 8, 16, 32, 64],
                "batch_timeout_micros": [0, 2000, 10000],
                "num_batch_threads": [1, 2, 4],
            },
        },
    )


def moved(value: Any, factor: float) -> Any:
    """The number, or the numbers of a tuple or a mapping, times the factor; whole ones move by at least 1."""
    if isinstance(value, Mapping):
        return {key: moved(each, factor) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(each, factor) for each in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return max(
            1,
            min(round(value * factor), value - 1) if factor < 1.0 else max(round(value * factor), value + 1),
        )
    if isinstance(value, float):
        return min(value * factor, 0.99) if 0.0 < value < 1.0 else _beyond_one(value, factor)
    return value


def _beyond_one(value: float, factor: float) -> float:
    """A factor a little above 1 (a step of 1.05) moves by the part above 1."""
    return 1.0 + (value - 1.0) * factor if 1.0 < value < 2.0 else value * factor


def numbers() -> Iterator[tuple[str, Any]]:
    for name, value in vars(policy).items():
        if name.isupper() and moved(value, FACTORS[1]) != value and not name.startswith(OTHER_STRATEGIES):
            yield name, value


def main() -> None:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    only = {name for name in asked.only.split(",") if name}
    runs = [(workload, seed) for workload in asked.workloads.split(",") for seed in range(asked.seeds)]
    started_s = time.monotonic()
    silent: list[str] = []
    with ProcessPoolExecutor(asked.processes, initializer=be_quiet) as pool:
        usual = list(pool.map(ending, *zip(*runs, strict=True)))
        mean = 100.0 * float(np.mean([one.regret for one in usual]))
        print(
            f"as it stands: mean regret {mean:.2f} % over {len(runs)} sweeps, {time.monotonic() - started_s:.0f} s"
        )
        for name, value in numbers():
            if only and name not in only:
                continue
            parts, changed = [], 0
            for factor in FACTORS:
                setting = moved(value, factor)
                moves = [(*run, {name: setting}) for run in runs]
                after = list(pool.map(ending, *zip(*moves, strict=True)))
                other = sum(one.digest != was.digest for one, was in zip(after, usual, strict=True))
                changes = [one.regret - was.regret for one, was in zip(after, usual, strict=True)]
                error = (
                    float(np.std(changes, ddof=1)) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
                )
                parts.append(
                    f"×{factor:.1f}: other {other:2d}, regret {100 * np.mean(changes):+6.2f} ± {100 * error:4.2f}"
                )
                changed += other
            print(f"{name:28} {value!s:>32.32}   {'   '.join(parts)}", flush=True)
            if not changed:
                silent.append(name)
    print(f"{len(silent)} change nothing in these sweeps: {', '.join(silent) or 'none'}")
    print(f"{time.monotonic() - started_s:.0f} s")


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random.seed(0)


if __name__ == "__main__":
    main()
