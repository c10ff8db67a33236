"""Runs a strategy against the fake server of `tune_fakes`, without the sweep around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import reference_points
from batchtune.tune.trials.out_of_memory import memory_ceiling_rows
from batchtune.tune.trials.pace import Pace, pace_of
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Ask, Trial
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law


class Driver:
    """An `Outlook` whose trials are run on a fake target; `trials_max` of the strategy's own trials are allowed."""

    def __init__(
        self, scenario: Scenario, *, law: Law | None = None, trials_max: float = math.inf, **target: Any
    ) -> None:
        self.scenario, self.space = scenario, Space(scenario)
        self.trials: list[Trial] = []
        self.asks: list[Ask] = []
        self._trials_max = trials_max
        clock = FakeClock()
        fake = FakeTarget(clock, law=law or Law(), **target)
        fleet = FakeFleet(fake)
        self.fleet = fleet
        self._bench = Bench(
            scenario, fake, fleet, on_live=lambda _plan, _live: None, now_s=clock, sleep=clock.sleep
        )

    @property
    def pace(self) -> Pace:
        return pace_of(self.trials, self.scenario)

    @property
    def nodes(self) -> tuple[str, ...]:
        return ()

    def ahead(self, _asks: Sequence[Ask]) -> None:
        pass

    def may_propose(self, _seconds: float | None = None, *, beside: int = 0) -> bool:
        return len(self.asks) + beside < self._trials_max

    def remaining_s(self) -> float:
        return math.inf

    def left_s(self) -> float:
        return math.inf

    def fresh_run_s(self) -> float:
        return 1.0

    def at_end(self, _conclude: Callable[[], None]) -> None:
        pass

    def thinking(self, _text: str) -> None:
        pass

    def refer(self) -> Driver:
        """Measure the reference points, as a sweep does before any strategy."""
        self._drive(reference_points(self), kept=[])
        return self

    def run(self, strategy: Callable[[Outlook], Strategy]) -> list[Trial]:
        """The trials that the strategy asked for."""
        before = len(self.trials)
        self._drive(strategy(self), kept=self.asks)
        return self.trials[before:]

    def _drive(self, asking: Strategy, *, kept: list[Ask]) -> None:
        try:
            ask = next(asking)
            while True:
                kept.append(ask)
                ask = asking.send(self._measured(ask))
        except StopIteration:
            return

    def _measured(self, ask: Ask) -> Trial:
        plan = Plan(
            number=len(self.trials) + 1,
            configuration=ask.configuration,
            source=ask.source,
            reason=ask.reason,
            seed=self.scenario.load.seed + (ask.block or 0),
            point=ask.point,
            block=ask.block,
            concurrency=ask.concurrency,
            duration_s=ask.duration_s,
            rate_rps=ask.rate_rps,
            hint_rps=ask.hint_rps,
            pace=self.pace,
        )
        trial = self._bench.run(plan).trial
        self.trials.append(trial)
        self.space.bar(memory_ceiling_rows(self.trials))
        return trial


def reasons(trials: Iterable[Trial]) -> list[str]:
    return [one.reason for one in trials]
