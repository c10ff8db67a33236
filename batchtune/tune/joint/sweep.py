"""Carries a joint search through: its budget, its loads, and those of an interrupted sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from batchtune.errors import TargetError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.joint.bench import Finished
from batchtune.tune.joint.load import JointAsk, JointLoad
from batchtune.tune.joint.search import COMPARE_SHARE, JointSearch
from batchtune.tune.joint.space import JointSpace
from batchtune.tune.sweep.sweep import FAILURES_MAX

LOADS = 100
"""For so many loads is time where the scenario gives no budget."""

APPLY_S = 0.5
"""What a load takes beside its warm-up and its measured part."""

Run = Callable[[JointAsk, int, int], Finished]
"""Sends a load: the ask, the load's number, and that of its first trial."""


def joint_sweep(
    scenario: Scenario,
    run: Run,
    *,
    earlier: Sequence[JointLoad] = (),
    first_load: int = 1,
    first_trial: int = 1,
    on_ask: Callable[[JointAsk, float], None] = lambda _ask, _spent: None,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[Finished]:
    """Search, and yield each load as it ends; go on from the `earlier` loads of an interrupted sweep.

    `on_ask` is told each load that is about to be sent, and the share of the budget that is spent.

    Raises:
        TargetError: the first loads all failed.
    """
    loads = list(earlier)
    started_s = now_s() - sum(load.seconds + APPLY_S for load in loads)
    search = JointSearch(JointSpace(scenario), scenario)
    number = max([first_load, *(load.number + 1 for load in loads)])
    while True:
        spent = spent_share(scenario, loads, seconds=now_s() - started_s)
        ask = search.next_ask(loads, spent=spent)
        if ask is None:
            return
        on_ask(ask, spent)
        finished = run(ask, number, first_trial)
        first_trial += len(finished.trials)
        number += 1
        loads.append(finished.load)
        yield finished
        if len(loads) >= FAILURES_MAX and all(load.failure is not None for load in loads):
            raise TargetError(
                f"{FAILURES_MAX} loads in a row failed; the last: {finished.load.failure}",
                hint="the failed trials are in the ledger; see whether the server works by hand",
            )


def spent_share(scenario: Scenario, loads: Sequence[JointLoad], *, seconds: float) -> float:
    """Of the budget: of its time, and of its trials, which are loads of the search and end where fresh ones begin."""
    search, load = scenario.search, scenario.load
    budget_s = (
        search.time_budget_s
        if search.budget_is_given
        else LOADS * (load.warm_up_s + load.duration_s + APPLY_S)
    )
    of_time = seconds / budget_s if budget_s else 0.0
    searched = sum(load.ask.source != "confirm" for load in loads)
    of_trials = COMPARE_SHARE * searched / search.trials if search.trials else 0.0
    return max(of_time, of_trials)
