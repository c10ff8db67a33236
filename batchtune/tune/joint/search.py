"""Which loads find the best parameters of several models together?

First each model alone, with its own and the shared parameters: what is best for it shows what company costs, and all
of that put together is where the joint search begins. From there a descent: points near the best one, a step of one
parameter at a time, then of two, then anywhere. Of a capacity a point is asked whether it holds a little more than the
best one does, so that most points cost one load; one that does is followed up until it breaks. A point that leads must
keep the others' SLOs under each stated flood. Then the leader is measured again under fresh seeds, and gives way where
it does not hold. Where it led by luck the descent goes on from what fresh runs held, and points that broke only above
that are asked again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.joint.descent import Descent, Goal
from batchtune.tune.joint.load import JointAsk, JointLoad
from batchtune.tune.joint.space import Indices, JointSpace, Moves
from batchtune.tune.joint.standing import Standing, answer_of, score_of, standings
from batchtune.tune.trials.trial import Source

MORE: Final = 1.015
"""What a point must hold to take the lead, as a factor of what the best one holds: below that nobody can tell."""

CLIMB: Final = 1.1
"""How fast the rates of a point that leads rise until it breaks."""

RESOLUTION: Final = 1.02
"""How near the highest factor that holds and the lowest that breaks are brought to each other."""

RESOLUTION_ALONE: Final = 1.1
"""The same of a model alone, which is nothing that anybody deploys."""

WORST_TIGHTNESS: Final = 10.0
"""How far a limit was broken tells where to go next, up to here."""

SMALLEST_FACTOR: Final = 1.0 / 64.0
LARGEST_FACTOR: Final = 1024.0

ALONE_SHARE: Final = 0.2
"""Of the budget, for all models alone together."""

FIRST_SHARE: Final = 0.65
"""Of the budget, for everything before the first fresh runs."""

SEARCH_SHARE: Final = 0.85
"""Of the budget, for everything before the last fresh runs."""

STARTS: Final = 3
"""Random points that are tried beside the middle before the descent."""

BLOCKS_MAX: Final = 18
"""Fresh runs at most: each point that leads by luck costs one."""

STEP_BACK: Final = 0.95
"""Of a factor that fresh runs refute: what is claimed instead, and measured."""

Loads = Generator[JointAsk, JointLoad, None]


class JointSearch:
    """The strategy; `spent` says which share of the budget is gone. Its asks depend on the answers alone."""

    def __init__(self, space: JointSpace, scenario: Scenario, *, spent: Callable[[], float]) -> None:
        self._space = space
        self._objective = scenario.objective
        self._floods = [own.name for own in scenario.target.models if own.flood_rps is not None]
        self._names = [own.name for own in scenario.target.models]
        self._seed = scenario.search.seed
        self._spent = spent
        self._loads: list[JointLoad] = []
        self._flooded: set[Configuration] = set()
        self._points: dict[Configuration, Indices] = {}
        self._blocks = 0

    def loads(self) -> Loads:
        """Every load, in order, until the budget is spent; it is sent what came of each."""
        first: list[Indices] = []
        if len(self._names) > 1:
            for at, name in enumerate(self._names, 1):
                share = ALONE_SHARE * at / len(self._names)
                yield from self._descend(Goal(kind="alone", of=name, share=share))
            first = self._side_by_side()
        led = yield from self._descend(Goal(kind="together", of="", share=FIRST_SHARE), first=first)
        while True:
            yield from self._confirm()
            ranked = standings(self._loads, self._objective)
            if not ranked or not self._led_by_luck(answer_of(ranked), led):
                break
            answer = answer_of(ranked)
            goal = Goal(kind="together", of="", share=SEARCH_SHARE)
            led = yield from self._descend(goal, incumbent=(answer.score, self._points[answer.configuration]))
        yield from self._compare()

    def _led_by_luck(self, answer: Standing, led: float) -> bool:
        """Whether fresh runs held less than what points had to beat, and time is left to ask them again."""
        is_fresh = self._objective == "capacity" and answer.held >= policy.CONFIRMATIONS
        return is_fresh and answer.score * MORE <= led and self._spent() < SEARCH_SHARE

    def _side_by_side(self) -> list[Indices]:
        """What is best for each model alone, put together; none where some model never kept its SLO alone."""
        best = {
            name: self._points[ranked[0].configuration]
            for name in self._names
            if (ranked := standings(self._loads, self._objective, kind="alone", of=name))
        }
        return self._space.side_by_side(best) if len(best) == len(self._names) else []

    def _ask(self, ask: JointAsk) -> Generator[JointAsk, JointLoad, JointLoad]:
        load = yield ask
        self._loads.append(load)
        return load

    def _descend(
        self,
        goal: Goal,
        first: Sequence[Indices] = (),
        incumbent: tuple[float, Indices | None] = (0.0, None),
    ) -> Generator[JointAsk, JointLoad, float]:
        """The score of the best point, from the `incumbent` on or from the `first` and some more."""
        descent = Descent(
            goal=goal,
            axes=self._space.axes_of(goal.of),
            chance=random.Random(f"{self._seed} {goal.of}"),
            score=incumbent[0],
            point=incumbent[1],
        )
        if descent.point is None:
            randoms = [self._space.random_point(descent.chance) for _ in range(STARTS)]
            for point in (*first, self._space.middle(), *randoms):
                yield from self._try(descent, (), point)
        improving = True
        while improving:
            improving = False
            for moves, point in self._next_points(descent):
                if self._spent() >= goal.share:
                    break
                if (yield from self._try(descent, moves, point)):
                    improving = True
                    break
        return descent.score

    def _try(self, descent: Descent, moves: Moves, point: Indices) -> Generator[JointAsk, JointLoad, bool]:
        """Whether a point takes the lead; one that cannot is not asked."""
        if self._spent() >= descent.goal.share:
            return False
        point = self._only(point, descent.axes)
        configuration = self._configuration(point)
        tried = configuration is None or configuration in descent.tried
        if configuration is None or tried or self._is_worse(configuration, descent.goal, descent.score):
            return False
        descent.tried.add(configuration)
        self._points.setdefault(configuration, point)
        score = yield from self._score(configuration, descent.goal, descent.score)
        if score <= descent.score:
            descent.failed[moves] = min(self._loads[-1].tightness, WORST_TIGHTNESS)
            return False
        descent.score, descent.point, descent.last = score, point, moves
        return True

    def _next_points(self, descent: Descent) -> Iterator[tuple[Moves, Indices]]:
        """The way that led to the best once more, then those near it, then any: the budget ends them."""
        if descent.point is not None:
            further = self._space.moved(descent.point, descent.last)
            if descent.last and further is not None:
                yield descent.last, further
            yield from self._space.around(descent.point, descent.axes, descent.chance, failed=descent.failed)
        for _ in range(min(self._space.size, 1000)):
            yield (), self._space.random_point(descent.chance)

    def _is_worse(self, configuration: Configuration, goal: Goal, than: float) -> bool:
        """Whether it broke under a flood, or under rates that it would have to hold."""
        if configuration in self._flooded:
            return True
        return self._objective == "capacity" and any(
            load.ask.factor <= than * MORE and not load.holds
            for load in self._loads
            if (load.ask.configuration, load.ask.kind, load.ask.of) == (configuration, goal.kind, goal.of)
        )

    def _only(self, point: Indices, axes: Sequence[int]) -> Indices:
        """The point with the axes of other models in the middle, so that equals are not tried twice."""
        middle = self._space.middle()
        return tuple(index if at in axes else middle[at] for at, index in enumerate(point))

    def _configuration(self, point: Indices) -> Configuration | None:
        try:
            return self._space.configuration(point)
        except BatchingParametersError:
            return None

    def _score(
        self, configuration: Configuration, goal: Goal, than: float
    ) -> Generator[JointAsk, JointLoad, float]:
        """A point's score; 0.0 where it is not better than `than`, or breaks an SLO under a flood."""
        ask = JointAsk(configuration=configuration, factor=1.0, kind=goal.kind, of=goal.of)
        if self._objective == "capacity":
            ask = replace(ask, factor=than * MORE if than else self._first_factor(goal))
        load = yield from self._ask(ask)
        score = score_of(load, self._objective)
        leads = load.holds and score > than
        if not leads and (than or self._objective != "capacity"):
            return score if self._objective != "capacity" else 0.0
        if goal.kind == "together" and not (yield from self._stands_floods(configuration)):
            return 0.0
        if self._objective != "capacity":
            return score
        return (yield from self._highest(ask, load, growth=CLIMB if than else 2.0))

    def _first_factor(self, goal: Goal) -> float:
        """Where the first point of a descent is asked: together no model gets more than it held alone."""
        if goal.kind == "alone":
            return 1.0
        alone = [standings(self._loads, "capacity", kind="alone", of=name) for name in self._names]
        return min((0.5 * ranked[0].factor for ranked in alone if ranked), default=1.0)

    def _highest(
        self, ask: JointAsk, load: JointLoad, *, growth: float
    ) -> Generator[JointAsk, JointLoad, float]:
        """The highest factor that holds, from the first load on."""
        low, high = (ask.factor, math.inf) if load.holds else (0.0, ask.factor)
        resolution = RESOLUTION_ALONE if ask.kind == "alone" else RESOLUTION
        while high > low * resolution and self._spent() < 1.0:
            factor = low * growth if high == math.inf else high / 2.0 if low == 0.0 else math.sqrt(low * high)
            if not SMALLEST_FACTOR <= factor <= LARGEST_FACTOR:
                break
            load = yield from self._ask(replace(ask, factor=factor))
            low, high = (factor, high) if load.holds else (low, factor)
        return low

    def _stands_floods(
        self, configuration: Configuration, *, source: Source = "sampler", block: int | None = None
    ) -> Generator[JointAsk, JointLoad, bool]:
        """Whether under the flood of each model the others keep their SLOs; where not, the point is no answer."""
        for name in self._floods:
            ask = JointAsk(
                configuration=configuration, factor=1.0, kind="flood", of=name, source=source, block=block
            )
            load = yield from self._ask(ask)
            if not load.holds:
                self._flooded.add(configuration)
                return False
        return True

    def _confirm(self) -> Loads:
        """Fresh runs of the leader at what it is said to hold, until it did often enough; else less is claimed."""
        claims: dict[Configuration, float] = {}
        for _ in range(BLOCKS_MAX):
            self._blocks += 1
            block = self._blocks
            leader = self._claimant(claims)
            if leader is None or self._spent() >= 1.0:
                return
            if leader.held >= policy.CONFIRMATIONS:
                if (yield from self._stands_floods(leader.configuration, source="confirm", block=block)):
                    return
                continue
            ask = JointAsk(
                configuration=leader.configuration, factor=leader.factor, source="confirm", block=block
            )
            yield from self._ask(ask)
            if self._objective == "capacity":
                self._step_back(leader, claims)

    def _claimant(self, claims: dict[Configuration, float]) -> Standing | None:
        """The leader; where what it held is refuted, a lower claim counts for it."""
        known = standings(self._loads, self._objective)
        named = {standing.configuration: standing for standing in known}
        for configuration, factor in claims.items():
            held = named.get(configuration)
            if configuration not in self._flooded and (held is None or held.factor < factor):
                named[configuration] = Standing(configuration=configuration, score=factor, factor=factor)
        return max(named.values(), key=lambda standing: standing.score, default=None)

    def _step_back(self, leader: Standing, claims: dict[Configuration, float]) -> None:
        fresh = [
            load.holds
            for load in self._loads
            if (load.ask.configuration, load.ask.factor, load.ask.source)
            == (leader.configuration, leader.factor, "confirm")
            and load.ask.kind == "together"
        ]
        if 2 * sum(fresh) <= len(fresh):
            claims[leader.configuration] = leader.factor * STEP_BACK
        else:
            claims.pop(leader.configuration, None)

    def _compare(self) -> Loads:
        """What shows why: the winner's rates with what is best for each alone, and the floods with longer queues."""
        ranked = standings(self._loads, self._objective)
        if not ranked:
            return
        winner = answer_of(ranked)
        for configuration in map(self._space.configuration, self._side_by_side()):
            if configuration != winner.configuration:
                ask = JointAsk(configuration=configuration, factor=winner.factor, source="confirm", block=1)
                yield from self._ask(ask)
        for name in self._floods:
            for configuration in self._space.other_bounds(winner.configuration, name):
                ask = JointAsk(
                    configuration=configuration, factor=1.0, kind="flood", of=name, source="confirm", block=1
                )
                yield from self._ask(ask)
