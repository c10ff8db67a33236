"""How does the whole sweep do on a recorded table? For `replay.py`.

The sweep is the real one, on a bench that answers from the table and a clock that runs by recorded seconds. A load that
was not recorded is answered by the nearest one that was (the rule's batch size lies between two of the grid), and costs
as much time as it asks for, also where the recorded run was shorter.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchtune.batching.parameters import Configuration
from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.bench import Plan
from batchtune.tune.search.contenders import Space
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.trial import FinishedTrial, Trial
from tests.benchmarks.replay.record_table import indices_of

if TYPE_CHECKING:
    from tests.benchmarks.replay.replay import Table

SHORTEST_S = 0.1
"""Of a run."""
KNOBS = ("max_batch_size", "batch_timeout_micros", "num_batch_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What would be recommended: the cell (None: nothing), the value reported for it, and what it took."""

    cell: tuple[int, ...] | None
    reported: float
    seconds: float
    trials: int = 0


def guided_choices(table: Table, budget_s: float, shares: Sequence[float], seed: int) -> list[Choice]:
    """What one sweep with this budget would recommend after each share of a pass, and at its end."""
    budget = table.scenario.search.budget.model_copy(update={"time_s": budget_s})
    search = table.scenario.search.model_copy(
        update={"strategy": "guided", "budget": budget, "seed": seed + 1}
    )
    scenario = table.scenario.model_copy(update={"search": search})
    bench = RecordedBench(table, seed=seed)
    trials: list[Trial] = []
    ends_s: list[float] = []
    for done in sweep_nodes(scenario, lambda _report: OneServer(bench), now_s=bench.now_s):
        trials.append(done.trial)
        ends_s.append(bench.now_s())
    counts = [bisect_right(ends_s, share * table.pass_s) for share in shares]
    return [_choice(table, scenario, bench, trials[:count]) for count in (*counts, len(trials))]


def _choice(table: Table, scenario: Scenario, bench: RecordedBench, trials: Sequence[Trial]) -> Choice:
    seconds = math.fsum(one.seconds for one in trials)
    try:
        chosen = recommend(trials, scenario=scenario)
    except (NoFeasibleConfigurationError, InconclusiveError):
        return Choice(cell=None, reported=math.nan, seconds=seconds, trials=len(trials))
    space = Space(table.scenario)
    point = space.locate(bench.nearest(chosen.configuration))
    cell = None if point is None else indices_of(point, table.scenario)
    return Choice(cell=cell, reported=chosen.throughput_rps.value, seconds=seconds, trials=len(trials))


class RecordedBench:
    """Runs trials by looking them up; time passes only here. `exact`: one that is asked to be short also costs less."""

    def __init__(self, table: Table, *, seed: int, exact: bool = False) -> None:
        self._exact = exact
        self._chance = random.Random(seed)
        self._elapsed_s = 0.0
        self._recorded_s = table.scenario.load.duration_s
        self._recorded: dict[tuple[Configuration, int | None], list[Trial]] = {}
        for trial in table.trials:
            clients = trial.concurrency if trial.source == "probe" else None
            self._recorded.setdefault((trial.configuration, clients), []).append(trial)

    def now_s(self) -> float:
        return self._elapsed_s

    def run(self, plan: Plan) -> FinishedTrial:
        trial = self._chance.choice(
            self._recorded[self._key(plan.request.configuration, plan.request.concurrency)]
        )
        recorded_s = self._recorded_s if trial.request.duration_s is None else trial.request.duration_s
        asked_s = 0.0 if plan.request.duration_s is None else plan.request.duration_s - recorded_s
        seconds = max(trial.seconds + (asked_s if self._exact else max(asked_s, 0.0)), SHORTEST_S)
        self._elapsed_s += seconds
        return FinishedTrial(
            trial=replace(
                trial,
                number=plan.number,
                request=plan.request,
                seed=plan.seed,
                seconds=seconds,
            ),
            samples=None,
        )

    def nearest(self, configuration: Configuration) -> Configuration:
        return self._key(configuration, None)[0]

    def _key(self, configuration: Configuration, clients: int | None) -> tuple[Configuration, int | None]:
        if (configuration, clients) in self._recorded:
            return configuration, clients
        alike = [
            key
            for key in self._recorded
            if (key[1] is None) == (clients is None)
            and (key[0].batching is None) == (configuration.batching is None)
        ] or [
            (key, None)
            for key, _ in self._recorded
            if (key.batching is None) == (configuration.batching is None)
        ]
        return min(alike, key=lambda key: _distance(key, (configuration, clients)))


def _distance(one: tuple[Configuration, int | None], other: tuple[Configuration, int | None]) -> float:
    """Of the logarithms, the timeout's counted from half a millisecond."""
    places = [list(_place(configuration, clients)) for configuration, clients in (one, other)]
    return math.dist(*places)


def _place(configuration: Configuration, clients: int | None) -> Iterable[float]:
    yield math.log(clients or 1)
    if configuration.batching is None:
        return
    values: list[Any] = [configuration.in_force(name) for name in KNOBS]
    yield from (math.log(values[0]), math.log1p(values[1] / 500), math.log(values[2]))
