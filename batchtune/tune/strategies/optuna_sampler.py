"""Which point should be measured next? Optuna's samplers, asked about the ledger.

The ledger is the truth: the study is built anew from its pooled figures for each proposal (`optuna_study`), so a
resumed sweep proposes what an uninterrupted one would have.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.search import SamplerKind
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, pool
from batchtune.tune.strategies.optuna_study import build_study, check_sampler, distributions, entries
from batchtune.tune.strategies.protocol import Outlook, Strategy
from batchtune.tune.strategies.references import rule_without_waiting
from batchtune.tune.strategies.side_by_side import together
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import Ask

_ASKS_MAX: Mapping[SamplerKind, int] = {"tpe": 20, "gp": 3, "qmc": 20, "random": 20, "nsga2": 20}
"""Before the nearest unmeasured point is taken: a Gaussian process repeats itself, and each ask is a fit."""

_NAMES: Mapping[SamplerKind, str] = {
    "tpe": "TPE",
    "gp": "a Gaussian process",
    "qmc": "the Sobol sequence",
    "random": "a random draw",
    "nsga2": "NSGA-II",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point that was never measured, its configuration, who proposed it and why."""

    point: dict[str, Any]
    configuration: Configuration
    proposer: Literal["sampler", "twin"]
    reason: str


def optuna_strategy(outlook: Outlook) -> Strategy:
    """The rule's size without waiting, then what the scenario's sampler proposes until nothing or no time is left.

    Raises:
        UsageError: at once, before anything is asked for, when the sampler's packages are missing.
    """
    search = outlook.scenario.search
    sampler = Sampler(
        outlook.space,
        maximise=outlook.scenario.objective != "latency",
        seed=search.seed,
        kind=search.sampler,
    )
    return _proposals(outlook, sampler)


def _proposals(outlook: Outlook, sampler: Sampler) -> Strategy:
    unwaiting = rule_without_waiting(outlook)
    if unwaiting is not None and outlook.may_propose():
        configuration, point = unwaiting
        if configuration not in {trial.configuration for trial in outlook.trials}:
            why = "nearest to the rule's size, without waiting"
            yield Ask(configuration=configuration, source="sampler", reason=why, point=point)
    while outlook.may_propose():
        asks = _at_once(outlook, sampler)
        if not asks:
            return
        yield from together(outlook, asks)


def _at_once(outlook: Outlook, sampler: Sampler) -> list[Ask]:
    """A proposal for each node; those before count as bad as can be, so that the next lies elsewhere."""
    failed = {trial.configuration: trial.point for trial in outlook.trials if trial.state == "failed"}
    pooled = pool(outlook.trials, scenario=outlook.scenario)
    asks: list[Ask] = []
    while len(asks) < max(len(outlook.nodes), 1) and outlook.may_propose(beside=len(asks)):
        proposal = sampler.propose(pooled, failed=failed)
        if proposal is None:
            break
        failed[proposal.configuration] = proposal.point
        ask = Ask(
            configuration=proposal.configuration,
            source="sampler",
            reason=proposal.reason,
            point=proposal.point,
        )
        asks.append(ask)
    return asks


class Sampler:
    """One of Optuna's samplers over the space; seeded, and the same for the same ledger.

    `maximise` says which way the objective goes. `nsga2` seeks the Pareto front of the objective and p95.

    Raises:
        UsageError: a package that the sampler needs is not installed.
    """

    def __init__(self, space: Space, *, maximise: bool, seed: int, kind: SamplerKind = "tpe") -> None:
        check_sampler(kind)
        self._space = space
        self._maximise = maximise
        self._seed = seed
        self._kind: SamplerKind = kind

    def propose(
        self,
        pooled: Sequence[Pooled],
        *,
        failed: Mapping[Configuration, dict[str, Any] | None],
        enqueue: Sequence[Mapping[str, Any]] = (),
    ) -> Proposal | None:
        """The next point, or None when every point has been measured.

        `failed` are configurations without a figure (and their points): not proposed again, and shown to the sampler
        as bad as can be, so that it leaves their neighbourhood. `enqueue` are the twin's candidates, the best first:
        taken before the sampler's own, as far as they were not measured.
        """
        measured = [candidate.point for candidate in pooled if candidate.point is not None]
        places = {self._space.indices(point) for point in (*measured, *filter(None, failed.values()))}
        tried = {candidate.configuration for candidate in pooled} | set(failed)
        own: dict[str, Any] | None = None
        for point, proposer in self._asked(pooled, failed, enqueue, turn=len(tried), place_count=len(places)):
            configuration = self._space.configuration(point)
            if (
                configuration is not None
                and configuration not in tried
                and self._space.indices(point) not in places
            ):
                why = (
                    "the twin's candidate" if proposer == "twin" else self._reason(len(places), len(measured))
                )
                return Proposal(point=point, configuration=configuration, proposer=proposer, reason=why)
            own = point if own is None and proposer == "sampler" else own
        return None if own is None else self._nearest_untried(own, tried, places, turn=len(tried))

    def _asked(
        self,
        pooled: Sequence[Pooled],
        failed: Mapping[Configuration, dict[str, Any] | None],
        enqueue: Sequence[Mapping[str, Any]],
        *,
        turn: int,
        place_count: int,
    ) -> Iterator[tuple[dict[str, Any], Literal["sampler", "twin"]]]:
        """Points as the study gives them when asked again and again, the enqueued ones first."""
        study = build_study(
            entries(pooled, failed, space=self._space, kind=self._kind, maximise=self._maximise),
            space=self._space,
            kind=self._kind,
            maximise=self._maximise,
            seed=self._seed,
            turn=turn,
        )
        for point in enqueue:
            study.enqueue_trial(dict(zip(self._space.shape, self._space.indices(point), strict=True)))
        searched = distributions(self._space)
        asks = _ASKS_MAX[self._kind] + (place_count if self._kind == "qmc" else 0)
        for number in range(len(enqueue) + asks):
            trial = study.ask(fixed_distributions=searched)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            point = self._space.point([trial.params[name] for name in self._space.shape])
            yield point, "twin" if number < len(enqueue) else "sampler"

    def _reason(self, place_count: int, measured: int) -> str:
        name = _NAMES[self._kind]
        match self._kind:
            case "random":
                return "drawn at random"
            case "qmc":
                return f"the next point of {name}"
            case "nsga2" if place_count < policy.NSGA2_POPULATION:
                return "drawn at random to start with"
            case "tpe" | "gp" if place_count < policy.STARTUP_TRIALS:
                return "drawn at random to start with"
            case _:
                return f"{name} after {measured} measured points"

    def _nearest_untried(
        self,
        wanted: Mapping[str, Any],
        tried: Collection[Configuration],
        places: Collection[tuple[int, ...]],
        *,
        turn: int,
    ) -> Proposal | None:
        if self._space.size > policy.ENUMERABLE:
            return None
        chance = random.Random(self._seed + turn)
        untried = [
            (self._space.distance(wanted, point), chance.random(), point, configuration)
            for point in self._space.points()
            if self._space.indices(point) not in places
            and (configuration := self._space.configuration(point)) is not None
            and configuration not in tried
        ]
        if not untried:
            return None
        _, _, point, configuration = min(untried, key=lambda entry: entry[:2])
        return Proposal(
            point=point,
            configuration=configuration,
            proposer="sampler",
            reason=f"nearest unmeasured point to a repeated proposal of {_NAMES[self._kind]}",
        )
