"""Which point should be measured next? The only importer of Optuna.

The ledger is the truth: the study is built anew from its pooled figures for each proposal (one entry a configuration,
every constraint of it, in one order), so a resumed sweep proposes what an uninterrupted one would have.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from batchtune.batching import Configuration
from batchtune.tune.pool import Pooled
from batchtune.tune.space import ENUMERABLE, Space
from batchtune.tune.trial import WORST_VIOLATION

optuna.logging.set_verbosity(optuna.logging.ERROR)

_STARTUP_TRIALS = 5
_ASKS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point that was never measured, its configuration, and why it."""

    point: dict[str, Any]
    configuration: Configuration
    reason: str


class Sampler:
    """Optuna's TPE over the space; seeded, and the same for the same ledger.

    `maximise` says which way the objective goes.
    """

    def __init__(self, space: Space, *, maximise: bool, seed: int) -> None:
        self._space = space
        self._maximise = maximise
        self._seed = seed
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.IntDistribution(0, count - 1) for name, count in space.shape.items()
        }

    def propose(
        self, pooled: Sequence[Pooled], *, failed: Mapping[Configuration, dict[str, Any] | None]
    ) -> Proposal | None:
        """The next point, or None when every point has been measured.

        `failed` are configurations without a figure (and their points): not proposed again, and shown to the sampler
        as bad as can be, so that it leaves their neighbourhood.
        """
        measured = [one.point for one in pooled if one.point is not None]
        places = {self._space.indices(point) for point in (*measured, *filter(None, failed.values()))}
        tried = {one.configuration for one in pooled} | set(failed)
        seed = self._seed + len(tried)
        study = self._study(pooled, failed, seed=seed)
        asked: list[dict[str, Any]] = []
        for _ in range(_ASKS_MAX):
            trial = study.ask(fixed_distributions=self._distributions)
            point = self._space.point([trial.params[name] for name in self._space.shape])
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            configuration = self._space.configuration(point)
            if (
                configuration is not None
                and configuration not in tried
                and self._space.indices(point) not in places
            ):
                startup = len(places) < _STARTUP_TRIALS
                why = (
                    "drawn at random to start with"
                    if startup
                    else f"TPE after {len(measured)} measured points"
                )
                return Proposal(point=point, configuration=configuration, reason=why)
            asked.append(point)
        return self._nearest_untried(asked[0], tried, places, random.Random(seed))

    def _study(
        self, pooled: Sequence[Pooled], failed: Mapping[Configuration, dict[str, Any] | None], *, seed: int
    ) -> optuna.Study:
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
        study = optuna.create_study(direction="maximize" if self._maximise else "minimize", sampler=sampler)
        values = [one.value for one in pooled if math.isfinite(one.value)]
        worst = (min if self._maximise else max)(values, default=0.0)
        names = list(pooled[0].constraints) if pooled else []
        for one in pooled:
            if one.point is not None:
                value = one.value if math.isfinite(one.value) else worst
                study.add_trial(self._measured(one.point, value, one.constraints))
        for point in failed.values():
            if point is not None:
                study.add_trial(self._measured(point, worst, dict.fromkeys(names, WORST_VIOLATION)))
        return study

    def _measured(
        self, point: Mapping[str, Any], value: float, constraints: dict[str, float]
    ) -> optuna.trial.FrozenTrial:
        indices = self._space.indices(point)
        return optuna.trial.create_trial(
            params=dict(zip(self._space.shape, indices, strict=True)),
            distributions=self._distributions,
            value=value,
            constraints=constraints,
        )

    def _nearest_untried(
        self,
        wanted: Mapping[str, Any],
        tried: Collection[Configuration],
        places: Collection[tuple[int, ...]],
        chance: random.Random,
    ) -> Proposal | None:
        if self._space.size > ENUMERABLE:
            return None
        untried = [
            (self._space.distance(wanted, point), chance.random(), point, configuration)
            for point in self._space.points()
            if self._space.indices(point) not in places
            and (configuration := self._space.configuration(point)) is not None
            and configuration not in tried
        ]
        if not untried:
            return None
        _, _, point, configuration = min(untried, key=lambda one: one[:2])
        return Proposal(
            point=point,
            configuration=configuration,
            reason="nearest unmeasured point to TPE's repeated proposal",
        )
