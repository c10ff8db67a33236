"""Searches what several models of one server are batched with: brackets decide, as for one model.

A contender is a configuration of all models. A load sends each model `scale` times its stated rate, and holds where
every model kept its SLO: a bracket is of scales. For a latency every load is at the stated rates, and a contender's
mean counts: how much room the tightest of all limits left.

1. Alone: each model by itself; what is best for each, put together, is the first contender of all.
2. Compare: the leader's bracket is closed, then others must hold a little more than it: the middle of the space, a few
   points at random, the leader's neighbours, whom Optuna names.
3. Confirm: fresh loads of the leader at a little less, stepping down until three held and three times as many as
   missed.
4. Settle: with the time left, who may hold a tenth more? A new leader is confirmed.
5. Show why: the answer's rates with what is best for each alone.

The loads are the only state: after the same loads the same is asked. `sweep` drives it as it drives the search of one
model.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Objective, Scenario
from batchtune.tune.evidence.bracket import FRESH, Bracket
from batchtune.tune.joint.space import Indices, JointLoad, JointSpace, loads_of
from batchtune.tune.search.capacity import (
    BEAT,
    CLOSED,
    LEVEL,
    NEIGHBOUR,
    OPEN,
    SAFE,
    STEADYING_MAX,
    STEP_DOWN,
    WIDEST,
)
from batchtune.tune.search.fixed_load import LATENCY_FACTOR, SPREAD, SPREAD_LEAST, SURE, TRUSTED_SPREAD
from batchtune.tune.search.optuna_proposals import proposed_points
from batchtune.tune.trials.pace import TIME_BUDGET_MAX_S
from batchtune.tune.trials.trial import Source, Trial, TrialRequest

ALONE_SHARE, COMPARE_SHARE = 0.2, 0.7
"""Of the budget: for all models alone together, and for everything before the first fresh loads."""

LOADS = 100
"""For so many loads is time where the scenario gives no budget."""

APPLY_S = 0.5
"""What a load takes beside its warm-up and its measured part."""

RANDOM_POINTS = 3
"""Contenders from the beginning, beside what is best for each alone and the middle of the space."""

ROUGHLY = 1.4
"""Missed over held factor of a leader that is known well enough while one of these is untried (joint_search.py: the
search finds 78 % of the best in 40 loads where 75 % without)."""

CLIMB, ROOM = 3.0, 0.7
"""The next factor of a leader that held: times the room that the limits left, to this power, by so much at most."""

FACTOR_MIN, FACTOR_MAX = 1.0 / 64.0, 1024.0
"""Nothing lower and nothing higher is asked."""

HALVINGS = 3
"""Loads that the first contender may miss before another is tried."""

FRESH_MAX = 18
"""Fresh loads of the leaders, all together."""

TIGHT_MAX, NEARNESS = 10.0, 0.25
"""A factor at which so much of a limit was used, to this power, is about a capacity: that tells where to go next."""

SIMPLE, FADES = 0.3, 0.5
"""Of the hopes: weight of a parameter that changes nothing; of a point, by its steps from the leader."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A configuration, and the loads that say something of it; `spread`: of the room between loads alike, in logs."""

    configuration: Configuration
    objective: Objective
    loads: tuple[JointLoad, ...]
    spread: float

    @cached_property
    def bracket(self) -> Bracket:
        return Bracket(tuple(load.run for load in self.loads))

    @cached_property
    def fresh(self) -> tuple[JointLoad, ...]:
        return tuple(load for load in self.loads if load.asked.source == "confirm")

    @cached_property
    def keeps(self) -> bool:
        """Whether every model kept its SLO, by the votes of the loads."""
        if self.objective == "capacity":
            return self.bracket.held_rps > 0.0
        return self.bracket.held(1.0) > self.bracket.missed(1.0)

    @cached_property
    def worth(self) -> float:
        """What it is ranked by: the factor held or the mean room left, less where too few fresh loads say so."""
        if self.objective == "capacity":
            return max(self.bracket.confirmed_rps, SAFE * self.bracket.held_rps)
        return self.score if len(self.fresh) >= FRESH else SAFE * self.score

    @property
    def score(self) -> float:
        """What is stated: the factor, or the limit over what the tightest of all used; 2: half of it."""
        return self.bracket.stated_rps if self.objective == "capacity" else math.exp(self._mean)

    @property
    def factor(self) -> float:
        return self.score if self.objective == "capacity" else 1.0

    @property
    def high(self) -> float:
        """The upper end of its bracket."""
        if self.objective == "capacity":
            return self.bracket.missed_rps
        return math.exp(self._mean + SURE * self.spread / math.sqrt(len(self._counted)))

    @property
    def is_confirmed(self) -> bool:
        if self.objective == "capacity":
            return self.bracket.confirmed_rps >= 0.999 * self.worth > 0.0
        return self.bracket.held(1.0, fresh=True) >= max(FRESH, 3 * self.bracket.missed(1.0, fresh=True))

    def is_open(self, top: Contender) -> bool:
        """Whether it may be better than the answer by more than a tenth."""
        if self.objective != "capacity":
            return self.keeps and self.high > OPEN * top.score
        return self.high > OPEN * top.score and self.high > LEVEL * top.bracket.held_rps

    @property
    def _counted(self) -> tuple[JointLoad, ...]:
        return self.fresh if len(self.fresh) >= FRESH else self.loads

    @cached_property
    def _mean(self) -> float:
        return statistics.fmean(_room(load) for load in self._counted)


def contenders(loads: Iterable[JointLoad], objective: Objective, *, alone: str = "") -> list[Contender]:
    """Everything that was loaded so, with all models or one alone, the best first; of equals the one loaded first."""
    alike: dict[Configuration, list[JointLoad]] = {}
    for load in loads:
        if load.alone == alone:
            alike.setdefault(load.asked.configuration, []).append(load)
    spread = _spread(alike.values())
    known = [
        Contender(configuration=configuration, objective=objective, loads=tuple(own), spread=spread)
        for configuration, own in alike.items()
    ]
    return sorted(known, key=lambda contender: (contender.keeps, contender.worth), reverse=True)


def untried_beside(
    space: JointSpace, configuration: Configuration, tried: Iterable[Configuration]
) -> list[Configuration]:
    """The configurations a step of one parameter away that were not loaded."""
    point, known = space.locate(configuration), set(tried)
    steps = () if point is None else next(space.around(point, space.axes_of("")))
    beside = (space.accepted(step) for step in steps)
    return [other for other in dict.fromkeys(beside) if other is not None and other not in known]


def _room(load: JointLoad) -> float:
    """The log of the limit over what the tightest of all limits used."""
    return -math.log(min(max(load.tightness, TIGHT_MAX**-3), TIGHT_MAX))


def _spread(groups: Iterable[Sequence[JointLoad]]) -> float:
    """Standard deviation of the room between loads of one configuration, in logs; assumed while few were repeated."""
    rooms = [[_room(load) for load in group if load.asked.scale == 1.0] for group in groups]
    squares = math.fsum((room - statistics.fmean(own)) ** 2 for own in rooms for room in own)
    degrees = sum(len(own) - 1 for own in rooms if own)
    weight = min(degrees / TRUSTED_SPREAD, 1.0)
    measured = math.sqrt(squares / degrees) if degrees else 0.0
    return max(weight * measured + (1.0 - weight) * SPREAD * LATENCY_FACTOR, SPREAD_LEAST)


class JointSearch:
    """The strategy; see the module.

    Raises:
        ScenarioError: a combination of values that no server would accept.
    """

    lone_s = math.nan
    """No request is sent one by one, so no budget follows from that."""

    def __init__(self, scenario: Scenario) -> None:
        self._space = JointSpace(scenario)
        self._scenario = scenario
        self._objective = scenario.objective
        self._is_capacity = scenario.objective == "capacity"
        self._names = [own.name for own in scenario.target.models]
        self._seed = scenario.search.seed
        self._loads: list[JointLoad] = []
        load_s = scenario.load.warm_up_s + scenario.load.duration_s + APPLY_S
        given_s = scenario.search.time_budget_s or TIME_BUDGET_MAX_S
        self.budget_s = given_s if scenario.search.budget_is_given else LOADS * load_s
        self.space_size = self._space.size
        self.readings: Mapping[int, float] = {}

    def observe(self, trials: Iterable[Trial]) -> None:
        """Take in trials that ended."""
        self._loads += loads_of(trials)

    def pace(self) -> None:
        """The scenario's own times hold."""

    def best_trial(self) -> None:
        """No trial is better than another: a bracket is of several."""

    def plan_text(self) -> str:
        return ""

    def next_asks(self, count: int, *, left_s: float) -> list[TrialRequest]:  # noqa: ARG002
        """The next load, one at a time; none: nothing is open, or the budget is spent."""
        asked = self._next(max(1.0 - left_s / self.budget_s, self._spent_of_trials()))
        return [] if asked is None else [asked]

    def _spent_of_trials(self) -> float:
        """Of the budget of trials, which are loads of the search and end where fresh ones begin."""
        searched = sum(load.asked.source != "confirm" for load in self._loads)
        most = self._scenario.search.trials
        return COMPARE_SHARE * searched / most if most else 0.0

    def _next(self, spent: float) -> TrialRequest | None:
        loads = self._loads
        for at, name in enumerate(self._names, 1) if len(self._names) > 1 else ():
            if spent < ALONE_SHARE * at / len(self._names) and (ask := self._compared(name)):
                return ask
        is_confirming = any(not load.alone and load.asked.source == "confirm" for load in loads)
        if not is_confirming and spent < COMPARE_SHARE and (ask := self._compared("")):
            return ask
        ranked = self._ranked("")
        if not ranked or not ranked[0].keeps:
            return None
        shown, load_share = list(self._shown(ranked[0])), spent / max(len(loads), 1)
        if spent < 1.0 and (ask := self._confirmed(ranked[0])):
            return ask
        left = (1.0 - spent) / load_share - len(shown) if load_share else math.inf
        if left > 0.0 and (ask := self._settled(ranked, left)):
            return ask
        return next(iter(shown), None)

    def _ranked(self, alone: str) -> list[Contender]:
        return contenders(self._loads, self._objective, alone=alone)

    def _ask(
        self, asked: Configuration, scale: float, alone: str = "", source: Source = "sampler"
    ) -> TrialRequest:
        """Under the seed of its turn: the first load of each contender has the arrivals of every other's first."""
        wanted = (asked, alone)
        turn = sum((load.asked.configuration, load.alone) == wanted for load in self._loads)
        models = (alone,) if alone else ()
        return TrialRequest(
            configuration=asked, source=source, reason="", scale=scale, models=models, block=turn
        )

    # 1. and 2. Alone, and together.

    def _compared(self, alone: str) -> TrialRequest | None:
        ranked = self._ranked(alone)
        first = next(self._untried(self._first_points(alone), alone), None)
        top = ranked[0] if ranked and ranked[0].keeps else None
        factor = 1.0
        if self._is_capacity and top is None:
            last, factor = self._lowered(alone)
            if last is not None:
                return self._ask(last, factor, alone)
        elif self._is_capacity and top is not None:
            climb = self._climb(top, CLOSED if first is None else ROUGHLY)
            if climb is not None:
                return self._ask(top.configuration, climb, alone)
            factor = NEIGHBOUR * top.bracket.held_rps
        untried = first or next(self._untried(self._near(ranked, alone), alone), None)
        return None if untried is None else self._ask(untried, factor, alone)

    def _lowered(self, alone: str) -> tuple[Configuration | None, float]:
        """While nothing held: the last one at half of what it missed, a few times, then another (None)."""
        mine = [load for load in self._loads if load.alone == alone]
        if not mine:
            return None, self._first_factor(alone)
        last, factor = mine[-1].asked.configuration, mine[-1].asked.scale
        misses = sum(load.asked.configuration == last for load in mine)
        if mine[-1].failure is not None or misses > HALVINGS or factor <= FACTOR_MIN:
            return None, factor
        return last, max(factor / 2.0, FACTOR_MIN)

    def _first_factor(self, alone: str) -> float:
        """Together each model gets a share of what it held alone, as if they took turns."""
        apart = [] if alone else [self._ranked(name) for name in self._names]
        held = [ranked[0].worth for ranked in apart if ranked and ranked[0].keeps]
        return 1.0 / sum(1.0 / factor for factor in held) if held else 1.0

    def _climb(self, top: Contender, closed: float) -> float | None:
        """The next factor of a leader of which it is not known how much more it holds."""
        lo = top.bracket.held_rps
        missed = [load.asked.scale for load in top.loads if not load.holds and load.asked.scale > lo]
        if min(missed, default=math.inf) <= closed * lo or lo >= FACTOR_MAX:
            return None
        if missed:
            return math.sqrt(lo * min(missed))
        room = max(
            math.exp(_room(load)) for load in top.loads if load.asked.scale >= 0.999 * lo or load.holds
        )
        return min(lo * min(max(math.pow(room, ROOM), 1.06), CLIMB), FACTOR_MAX)

    # Whom to try.

    def _untried(self, points: Iterable[Indices], alone: str) -> Iterator[Configuration]:
        tried = {load.asked.configuration for load in self._loads if load.alone == alone}
        axes = self._space.axes_of(alone)
        for point in points:
            configuration = self._space.accepted(self._space.only(point, axes))
            if configuration is not None and configuration not in tried:
                yield configuration

    def _first_points(self, alone: str) -> Iterator[Indices]:
        if not alone:
            yield from self._side_by_side()
        yield self._space.middle()
        chance = random.Random(f"{self._seed} {'alone' if alone else 'together'}")
        yield from (self._space.random_point(chance) for _ in range(RANDOM_POINTS))

    def _near(self, ranked: Sequence[Contender], alone: str) -> Iterator[Indices]:
        """The leader's neighbours, whom Optuna names, what lies further away, anything."""
        located = (
            (self._space.locate(contender.configuration), self._guess(contender)) for contender in ranked
        )
        known = [(point, value) for point, value in located if point is not None]
        axes = self._space.axes_of(alone)
        if known:
            single, double, pairs = self._space.around(known[0][0], axes)
            hope = _hopes(known)
            yield from sorted(single, key=hope, reverse=True)
            yield from self._named_by_optuna(known, axes)
            yield from sorted([*double, *pairs], key=hope, reverse=True)
        chance = random.Random(f"{self._seed} {alone} {len(self._loads)}")
        yield from (self._space.random_point(chance) for _ in range(min(self._space.size, 1000)))

    def _named_by_optuna(
        self, known: Sequence[tuple[Indices, float]], axes: Sequence[int]
    ) -> Iterator[Indices]:
        """In spaces of more than two parameters: there neighbours alone are blind."""
        values = {str(at): self._space.axes[at].values for at in axes if self._space.shape[at] > 1}
        if len(values) < 3:
            return
        points = [({at: own[point[int(at)]] for at, own in values.items()}, value) for point, value in known]
        for named in proposed_points(values, points, seed=self._seed + len(self._loads)):
            indices = {int(at): own.index(named[at]) for at, own in values.items()}
            yield tuple(indices.get(at, index) for at, index in enumerate(self._space.middle()))

    def _guess(self, contender: Contender) -> float:
        """The log of what it may hold, or of the room that it leaves."""
        if not self._is_capacity:
            return math.log(contender.score)
        if contender.keeps:
            return math.log(contender.bracket.held_rps)
        return min(math.log(load.asked.scale) + NEARNESS * _room(load) for load in contender.loads)

    def _side_by_side(self) -> list[Indices]:
        """What is best for each model alone, put together; none where some model never kept its SLO alone."""
        best = {
            name: point
            for name in self._names
            if (ranked := self._ranked(name))
            and ranked[0].keeps
            and (point := self._space.locate(ranked[0].configuration)) is not None
        }
        return self._space.side_by_side(best) if len(best) == len(self._names) else []

    # 3. Fresh loads.

    def _confirmed(self, top: Contender) -> TrialRequest | None:
        is_unsteady = self._is_capacity and top.bracket.has_fresh_misses and len(top.fresh) < STEADYING_MAX
        if top.is_confirmed and is_unsteady:
            return self._ask(top.configuration, top.score, source="confirm")
        if top.is_confirmed:
            return None
        made = sum(not load.alone and load.asked.source == "confirm" for load in self._loads)
        factor = self._fresh_factor(top) if self._is_capacity else 1.0
        return self._ask(top.configuration, factor, source="confirm") if made < FRESH_MAX else None

    def _fresh_factor(self, top: Contender) -> float:
        """A little less than what was found; lower where fresh loads missed."""
        factor = SAFE * top.bracket.held_rps
        tried = sorted({load.asked.scale for load in top.fresh})
        while factor > FACTOR_MIN:
            factor = next((known for known in tried if abs(math.log(known / factor)) < 0.03), factor)
            missed = top.bracket.missed(factor, fresh=True)
            if missed < 2 or missed <= top.bracket.held(factor, fresh=True) / 3:
                break
            factor *= STEP_DOWN
        return factor

    # 4. and 5. What is left to be settled, and shown.

    def _settled(self, ranked: Sequence[Contender], left: float) -> TrialRequest | None:
        """Who may be better by a tenth? `left`: loads that there is time for; who is new must be confirmed, too."""
        top, *others = ranked
        rivals = [rival for rival in others if rival.is_open(top)]
        factor = 1.0
        if self._is_capacity:
            factor = max(BEAT * top.score, NEIGHBOUR * top.bracket.held_rps)
            if top.bracket.missed_above(top.score) > WIDEST * top.score and top.score < FACTOR_MAX:
                return self._ask(top.configuration, 1.14 * top.score)
            if rivals:
                return self._ask(max(rivals, key=self._guess).configuration, factor)
        else:
            for rival in rivals:
                if len(rival.fresh) < FRESH:
                    return self._ask(rival.configuration, 1.0, source="confirm")
        if left < 1 + FRESH:
            return None
        untried = next(self._untried(self._near(ranked, ""), ""), None)
        return None if untried is None else self._ask(untried, factor)

    def _shown(self, winner: Contender) -> Iterator[TrialRequest]:
        """The winner's factor with what is best for each alone."""
        made = {(load.asked.configuration, load.asked.scale) for load in self._loads if not load.alone}
        for configuration in map(self._space.configuration, self._side_by_side()):
            wanted = (configuration, winner.factor)
            if configuration != winner.configuration and wanted not in made:
                yield self._ask(configuration, winner.factor, source="confirm")


def _hopes(known: Sequence[tuple[Indices, float]]) -> Callable[[Indices], float]:
    """What a point may give: a plane through what the others gave, those near the first of them before all."""
    points, values = np.array([point for point, _ in known], float), np.array([value for _, value in known])
    away = points - points[0]
    weights = np.exp(-FADES * np.abs(away).sum(axis=1))
    terms = np.column_stack([np.ones(len(known)), away])
    ridge = np.diag([1e-6, *([SIMPLE] * away.shape[1])])
    slopes = np.linalg.solve(
        (terms * weights[:, None]).T @ terms + ridge, (terms * weights[:, None]).T @ values
    )
    return lambda point: float(slopes[0] + (np.array(point) - points[0]) @ slopes[1:])
