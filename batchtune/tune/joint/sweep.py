"""How is a joint search carried through: its budget, its loads, and those of an interrupted sweep?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from batchtune.errors import TargetError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.joint.bench import Finished
from batchtune.tune.joint.load import JointAsk, JointLoad
from batchtune.tune.joint.search import SEARCH_SHARE, JointSearch
from batchtune.tune.joint.space import JointSpace

LOADS: Final = 100
"""For so many loads is time where the scenario gives no budget."""

APPLY_S: Final = 0.5
"""What a load takes beside its warm-up and its measured part."""

Run = Callable[[JointAsk, int, int], Finished]
"""Sends a load: the ask, the load's number, and that of its first trial."""


class JointBudget:
    """Which share of the budget is spent: of the time, and of the points tried."""

    def __init__(self, scenario: Scenario, *, now_s: Callable[[], float]) -> None:
        search, load = scenario.search, scenario.load
        usual_s = LOADS * (load.warm_up_s + load.duration_s + APPLY_S)
        self.seconds = search.time_budget_s if search.budget_is_given else usual_s
        self._points_most = search.trials
        self._points: set[tuple[object, ...]] = set()
        self._now_s = now_s
        self._started_s = now_s()

    def add_earlier(self, load: JointLoad) -> None:
        """Count the time that an interrupted sweep had spent."""
        self._started_s -= load.seconds + APPLY_S

    def count(self, ask: JointAsk) -> None:
        if ask.source != "confirm" and ask.kind != "flood":
            self._points.add((ask.configuration, ask.kind, ask.of))

    def spent(self) -> float:
        """1 or more: nothing is left. Points count up to where the fresh runs begin."""
        of_time = 0.0 if self.seconds is None else (self._now_s() - self._started_s) / self.seconds
        of_points = 0.0 if self._points_most is None else SEARCH_SHARE * len(self._points) / self._points_most
        return max(of_time, of_points)


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
    """Search, and yield each load as it ends. Asks that `earlier` loads answer are not sent again.

    `on_ask` is told each load that is about to be sent, and the share of the budget that is spent.

    Raises:
        TargetError: the first loads all failed.
    """
    budget = JointBudget(scenario, now_s=now_s)
    kept = _Kept(earlier)
    loads = JointSearch(JointSpace(scenario), scenario, spent=budget.spent).loads()
    number = max([first_load - 1, *(load.number for load in earlier)])
    failures, worked = 0, bool(earlier)
    load: JointLoad | None = None
    while True:
        try:
            ask = next(loads) if load is None else loads.send(load)
        except StopIteration:
            return
        budget.count(ask)
        load = kept.answer(ask)
        if load is not None:
            budget.add_earlier(load)
            continue
        repeated = False
        while load is None or (load.spoilt and not repeated):
            repeated = load is not None
            number += 1
            on_ask(ask, budget.spent())
            finished = run(ask, number, first_trial)
            first_trial += len(finished.trials)
            load = finished.load
            yield finished
        failures = 0 if load.failure is None else failures + 1
        worked = worked or load.failure is None
        if failures >= policy.FAILURES_MAX and not worked:
            raise TargetError(
                f"{policy.FAILURES_MAX} loads in a row failed; the last: {load.failure}",
                hint="the failed trials are in the ledger; see whether the server works by hand",
            )


class _Kept:
    """The loads of an interrupted sweep, each of which answers one ask; of repeated ones the last counts."""

    def __init__(self, loads: Sequence[JointLoad]) -> None:
        self._loads: dict[JointAsk, JointLoad] = {load.ask: load for load in loads}

    def answer(self, ask: JointAsk) -> JointLoad | None:
        return self._loads.pop(ask, None)
