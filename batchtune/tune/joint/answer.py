"""What several models of one server should be batched with, what each gets, and what company costs it.

Every figure is of loads that were made: the highest factor held and the lowest missed, anything else the median and the
range of the loads behind the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.errors import (
    BatchtuneError,
    InconclusiveError,
    MeasurementInvalidError,
    NoFeasibleConfigurationError,
    TargetError,
)
from batchtune.measure.quantiles import Estimate
from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES
from batchtune.plain_values import fields_to_plain
from batchtune.scenario.spec.scenario import Objective, Scenario
from batchtune.tune.answer.recommendation import OpenQuestion, range_of
from batchtune.tune.joint.search import Contender, contenders, untried_beside
from batchtune.tune.joint.space import JointLoad, JointSpace, side_by_side
from batchtune.tune.search.capacity import WIDEST
from batchtune.units import counted


def nothing_holds(loads: Sequence[JointLoad]) -> BatchtuneError:
    """The error to raise where no load of all models kept every SLO."""
    together = [load for load in loads if not load.alone]
    if loads and all(load.failure is not None for load in loads):
        return TargetError(f"every load failed; the last: {loads[-1].failure}")
    if not together:
        return InconclusiveError(
            "nothing was measured with all models loaded", hint="give it more time: --budget 10m"
        )
    telling = [load for load in together if load.tells]
    if not telling:
        return _nothing_told(together)
    refuted = next((load for load in telling if load.holds), None)
    if refuted is not None:
        return NoFeasibleConfigurationError(
            f"all models met their SLOs together at {refuted.asked.scale:.3g} times the stated rates, but not in most "
            "of the confirmation runs",
            hint="lower the rates, loosen an SLO, or give the sweep more time (--budget) to try others",
        )
    tightest = min(telling, key=lambda load: load.tightness)
    if math.isinf(tightest.tightness):
        return NoFeasibleConfigurationError(
            f"all models never met their SLOs together: in each of {counted(len(telling), 'load')} too many requests "
            "failed",
            hint="lower the rates, raise slo.errors, or give search.space larger values of max_enqueued_batches",
        )
    return NoFeasibleConfigurationError(
        f"all models never met their SLOs together; the nearest used {tightest.tightness:.3g} times a limit at "
        f"{tightest.asked.scale:.3g} times the stated rates",
        hint="lower the rates, loosen an SLO, or widen search.space",
    )


def _nothing_told(together: Sequence[JointLoad]) -> BatchtuneError:
    failures = [load.failure for load in together if load.failure is not None]
    if failures:
        return TargetError(f"no load of all models worked; the last: {failures[-1]}")
    return MeasurementInvalidError(
        "the client was the limit in every load of all models: no figure is of the server",
        hint="lower the rates, or give the client more: load.processes, load.cpus",
    )


DECISIVE: Final = frozenset({"emulated_device"}) | CLIENT_CODES | HOST_CODES
"""Caveats that change what one would do."""

SCHEMA_VERSION = 2
"""Of joint_recommendation.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One promise to a model, and what was measured of it: median and range of the loads behind the answer."""

    name: str
    limit_s: float
    measured_s: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What was found best for a model while nobody else was loaded, of `tried` configurations.

    Its score and rate are those of the search alone: what it held, or the mean room that its limits left.
    """

    configuration: Configuration
    score: float
    rate_rps: float
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShare:
    """What one model gets beside the others: so many requests/s within these limits. `alone` None: never found."""

    name: str
    stated_rps: float
    rate_rps: float
    latencies: tuple[Latency, ...]
    alone: Alone | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What is best for each model alone, put together and measured under the recommended rates.

    `kept` None: nothing was measured there that tells of the server.
    `factor` is what it held in the search, None where it held nothing.
    """

    configuration: Configuration
    kept: bool | None
    factor: float | None
    misses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRecommendation:
    """What to deploy for all models.

    `factor`: the highest multiple of the stated rates that was held, `missed_factor` the lowest that was missed (None:
    none was, or the objective is a latency). `score`: the factor, or the limit over what the tightest of all used.
    `fresh`: loads made after the choice at these rates, of which `held` kept every SLO; 0: figures of the search.
    `established`; else `open_questions`.
    `rivals`: what is best for each model alone, put together. `caveats`: those of the loads behind, by model.
    """

    configuration: Configuration
    objective: Objective
    score: float
    factor: float
    missed_factor: float | None
    fresh: int
    held: int
    established: bool
    loads: int
    models: tuple[ModelShare, ...]
    rivals: tuple[Rival, ...]
    caveats: tuple[str, ...]
    open_questions: tuple[OpenQuestion, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain types, safe for JSON."""
        return {"schema_version": SCHEMA_VERSION, **fields_to_plain(self)}


def recommend_joint(loads: Sequence[JointLoad], scenario: Scenario) -> JointRecommendation:
    """Choose from what was measured.

    Raises:
        NoFeasibleConfigurationError: under no parameters tried did every model keep its SLO.
        MeasurementInvalidError: the client was the limit in every load of all models.
        InconclusiveError: nothing was measured with all models loaded.
        TargetError: every load failed.
    """
    counted = [load for load in loads if load.counts]
    ranked = contenders(counted, scenario.objective)
    if not ranked or not ranked[0].keeps:
        raise nothing_holds(loads)
    chosen, *others = ranked
    behind = _behind(chosen)
    rivals = sorted((rival for rival in others if rival.is_open(chosen)), key=lambda rival: -rival.high)
    tried = [load.asked.configuration for load in loads if not load.alone]
    untried = untried_beside(JointSpace(scenario), chosen.configuration, tried)
    questions = _questions(chosen, rivals, untried)
    missed = chosen.bracket.stated_missed_rps if scenario.objective == "capacity" else math.inf
    return JointRecommendation(
        configuration=chosen.configuration,
        objective=scenario.objective,
        score=chosen.score,
        factor=chosen.factor,
        missed_factor=missed if math.isfinite(missed) else None,
        fresh=chosen.bracket.held(chosen.factor, fresh=True)
        + chosen.bracket.missed(chosen.factor, fresh=True),
        held=chosen.bracket.held(chosen.factor, fresh=True),
        established=not questions,
        loads=len(loads),
        models=tuple(_share(name, own, loads, behind, chosen) for name, own in scenario.of_models().items()),
        rivals=tuple(_rivals(loads, scenario, chosen)),
        caveats=_caveats(behind),
        open_questions=questions,
    )


def _behind(chosen: Contender) -> list[JointLoad]:
    """The loads behind the answer: the fresh ones at its factor, else those that held the highest one."""
    fresh = [load for load in chosen.fresh if math.isclose(load.asked.scale, chosen.factor, rel_tol=1e-3)]
    held = [load for load in chosen.loads if load.holds]
    highest = max(load.asked.scale for load in held)
    return fresh or [load for load in held if load.asked.scale >= 0.999 * highest]


def _questions(
    chosen: Contender, rivals: Sequence[Contender], untried: Sequence[Configuration]
) -> tuple[OpenQuestion, ...]:
    """What is open; a step of one parameter that was not tried may give anything."""
    bracket, questions = chosen.bracket, []
    if not chosen.is_confirmed:
        held = sum(load.holds for load in chosen.fresh)
        questions.append(OpenQuestion(code="unconfirmed", held=held, missed=len(chosen.fresh) - held))
    width = bracket.stated_missed_rps / chosen.score if chosen.objective == "capacity" else 1.0
    if width > WIDEST:
        questions.append(OpenQuestion(code="wide", high=width if math.isfinite(width) else None))
    high = max((rival.high / chosen.score for rival in rivals), default=math.inf) if not untried else math.inf
    labels = (*(rival.configuration.label() for rival in rivals), *(beside.label() for beside in untried))
    if labels:
        questions.append(
            OpenQuestion(code="rivals", labels=labels, high=high if math.isfinite(high) else None)
        )
    return tuple(questions)


def _share(
    name: str, own: Scenario, loads: Sequence[JointLoad], behind: Sequence[JointLoad], chosen: Contender
) -> ModelShare:
    stated_rps = own.load.rate_rps or 0.0
    ranked = contenders([load for load in loads if load.counts], chosen.objective, alone=name)
    alone = None
    if ranked and ranked[0].keeps:
        best = ranked[0]
        factor = best.bracket.held_rps if chosen.objective == "capacity" else 1.0
        alone = Alone(
            configuration=best.configuration.of_model(name),
            score=factor if chosen.objective == "capacity" else best.score,
            rate_rps=factor * stated_rps,
            tried=len(ranked),
        )
    latencies = tuple(
        Latency(name=quantile, limit_s=limit_s, measured_s=_measured(behind, name, quantile))
        for quantile, limit_s in own.slo.limits().items()
    )
    return ModelShare(
        name=name,
        stated_rps=stated_rps,
        rate_rps=chosen.factor * stated_rps,
        latencies=latencies,
        alone=alone,
    )


def _caveats(loads: Sequence[JointLoad]) -> tuple[str, ...]:
    """What the client, the host or an emulated device did to these figures, once for all models that it touched."""
    names: dict[str, dict[str, None]] = {}
    texts: dict[str, str] = {}
    for load in loads:
        for name, trial in load.trials.items():
            for caveat in trial.measurement.caveats if trial.measurement is not None else ():
                if caveat.code in DECISIVE:
                    names.setdefault(caveat.code, {})[name] = None
                    texts.setdefault(caveat.code, caveat.text)
    return tuple(f"{' and '.join(names[code])}: {text}" for code, text in texts.items())


def _measured(loads: Sequence[JointLoad], name: str, quantile: str) -> Estimate:
    measured = (load.trials[name].measurement for load in loads)
    return range_of([run.latency_s[quantile].value for run in measured if run is not None])


def _rivals(loads: Sequence[JointLoad], scenario: Scenario, chosen: Contender) -> list[Rival]:
    counted = [load for load in loads if load.counts]
    best = {
        own.name: ranked[0].configuration
        for own in scenario.target.models
        if (ranked := contenders(counted, scenario.objective, alone=own.name)) and ranked[0].keeps
    }
    if len(best) < len(scenario.target.models):
        return []
    known = {rival.configuration: rival for rival in contenders(counted, scenario.objective)}
    rivals = []
    for configuration in side_by_side(best):
        if configuration == chosen.configuration:
            continue
        there = [
            load
            for load in loads
            if not load.alone
            and load.asked.configuration == configuration
            and math.isclose(load.asked.scale, chosen.factor, rel_tol=1e-3)
            and load.tells
        ]
        rival = known.get(configuration)
        rivals.append(
            Rival(
                configuration=configuration,
                kept=there[-1].holds if there else None,
                factor=rival.bracket.held_rps if rival is not None and rival.keeps else None,
                misses=tuple(_missing(there[-1])) if there else (),
            )
        )
    return rivals


def _missing(load: JointLoad) -> list[str]:
    return [name for name, trial in load.trials.items() if not trial.feasible]
