"""Nodes on fake clocks: a fake server and client on each, all started by one head whose time is that of the last end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Plan
from batchtune.tune.trials.trial import FinishedTrial
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, bench_of

End = tuple[float, int, str, FinishedTrial]
"""When it ended, the number of its plan, the node."""


def side_by_side(
    plans: Sequence[Plan], names: Sequence[str], begin: Callable[[Plan, str], End]
) -> Iterator[End]:
    """The ends in their order: each node begins the first plan that waits as soon as it is free."""
    waiting, free = list(plans), list(names)
    ends: list[End] = []
    while waiting or ends:
        while waiting and free:
            heapq.heappush(ends, begin(waiting.pop(0), free.pop(0)))
        end = heapq.heappop(ends)
        free.append(end[2])
        yield end


class FakeNodes:
    """One node for each law; `begun` lists what ran where, with the head's time."""

    def __init__(self, scenario: Scenario, laws: Mapping[str, Law], **target: object) -> None:
        self.names = list(laws)
        self.begun: list[tuple[float, str, Plan]] = []
        self.ended_s: dict[int, float] = {}
        self._clocks = {name: FakeClock() for name in laws}
        self._benches = {}
        for seed, (name, law) in enumerate(laws.items(), start=1):
            fake = FakeTarget(self._clocks[name], law=law, **target)  # type: ignore[arg-type]
            self._benches[name] = bench_of(scenario, fake, FakeFleet(fake, seed=seed))
        self._now_s = 1000.0

    def now_s(self) -> float:
        return self._now_s

    def run_all(self, plans: Sequence[Plan]) -> Iterator[FinishedTrial]:
        for end_s, number, name, done in side_by_side(plans, self.names, self._run):
            self._now_s = self.ended_s[number] = end_s
            yield replace(done, trial=replace(done.trial, node=name))

    def _run(self, plan: Plan, name: str) -> End:
        self.begun.append((self._now_s, name, plan))
        self._clocks[name].now_s = self._now_s
        done = self._benches[name].run(plan)
        return self._clocks[name].now_s, plan.number, name, done
