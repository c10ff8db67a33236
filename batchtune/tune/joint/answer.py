"""What should several models of one server be batched with, what does each get, and what does company cost it?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.measure.validity.caveats import CLIENT_CODES, HOST_CODES
from batchtune.plain_values import fields_to_plain
from batchtune.tune.joint.nothing_holds import nothing_holds
from batchtune.scenario.spec.scenario import Objective, Scenario
from batchtune.tune.joint.load import JointLoad
from batchtune.tune.joint.space import side_by_side
from batchtune.tune.joint.standing import Standing, answer_of, standings

DECISIVE: Final = frozenset({"emulated_device"}) | CLIENT_CODES | HOST_CODES
"""Caveats that change what one would do."""

SCHEMA_VERSION = 1
"""Of joint_recommendation.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One promise to a model, and what was measured of it: the middle of the runs at the recommended rates."""

    name: str
    limit_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What was found best for a model while nobody else was loaded, of `tried` configurations.

    Its score and rate are those of one run of the search.
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
class Victim:
    """A model beside one that floods: its tightest promise."""

    name: str
    kept: bool
    latency: Latency | None
    error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """One model sent its flood, the others their stated rates. `bound` is its max_enqueued_batches, None: not given.

    `error_ratio` is of its own requests, of which `answered_rps` were answered; `p95_s` counts a failed one as
    infinitely slow. `untold` is why none of that tells what the flood does, "" where it does.
    """

    model: str
    rate_rps: float
    bound: int | None
    error_ratio: float
    answered_rps: float
    p95_s: float
    victims: tuple[Victim, ...]
    recommended: bool
    untold: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRecommendation:
    """What to deploy for all models; `established` where at least policy.CONFIRMATIONS fresh runs kept every SLO, and
    their mean keeps every latency limit at 95 %: `unsure` are those of which it is open, such as `reader's p95`.

    `unflooded` are models whose stated flood these parameters were never seen to stand: then nothing is established.

    `factor` is how many times the stated rates were sent. `rivals` are what is best for each alone, put together.
    `caveats` are those of the runs at these rates, by model.
    """

    configuration: Configuration
    objective: Objective
    score: float
    factor: float
    fresh: int
    held: int
    established: bool
    loads: int
    models: tuple[ModelShare, ...]
    rivals: tuple[Rival, ...]
    floods: tuple[Flood, ...]
    caveats: tuple[str, ...]
    unflooded: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()

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
    ranked = standings(loads, scenario.objective)
    if not ranked:
        raise nothing_holds(loads)
    chosen = answer_of(ranked)
    at_rates = _at_rates(loads, chosen)
    unflooded = _unflooded(loads, chosen.configuration, scenario)
    return JointRecommendation(
        configuration=chosen.configuration,
        objective=scenario.objective,
        score=chosen.score,
        factor=chosen.factor,
        fresh=chosen.fresh,
        held=chosen.held,
        established=chosen.is_confirmed and not unflooded,
        loads=len(loads),
        models=tuple(
            _share(name, own, loads, at_rates, chosen) for name, own in scenario.of_models().items()
        ),
        rivals=tuple(_rivals(loads, scenario, chosen)),
        floods=tuple(_floods(loads, chosen.configuration, scenario)),
        caveats=_caveats(at_rates),
        unflooded=unflooded,
        unsure=chosen.unsure,
    )


def _unflooded(loads: Sequence[JointLoad], chosen: Configuration, scenario: Scenario) -> tuple[str, ...]:
    stood = {
        load.ask.of
        for load in loads
        if (load.ask.kind, load.ask.configuration) == ("flood", chosen) and load.holds and not load.untold
    }
    return tuple(
        own.name for own in scenario.target.models if own.flood_rps is not None and own.name not in stood
    )


def _at_rates(loads: Sequence[JointLoad], chosen: Standing) -> list[JointLoad]:
    """The runs behind a standing: the fresh ones, where there are any that count."""
    alike = [
        load
        for load in loads
        if (load.ask.kind, load.ask.configuration, load.ask.factor)
        == ("together", chosen.configuration, chosen.factor)
        and load.counts
    ]
    return [load for load in alike if load.ask.source == "confirm"] or alike


def _share(
    name: str, own: Scenario, loads: Sequence[JointLoad], at_rates: Sequence[JointLoad], chosen: Standing
) -> ModelShare:
    stated_rps = own.load.rate_rps or 0.0
    ranked = standings(loads, own.objective, kind="alone", of=name)
    alone = None
    if ranked:
        best = ranked[0]
        alone = Alone(
            configuration=best.configuration.of_model(name),
            score=best.score,
            rate_rps=best.factor * stated_rps,
            tried=len(
                {load.ask.configuration for load in loads if (load.ask.kind, load.ask.of) == ("alone", name)}
            ),
        )
    latencies = tuple(
        Latency(name=quantile, limit_s=limit_s, measured_s=_middle(at_rates, name, quantile))
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


def _middle(loads: Sequence[JointLoad], name: str, quantile: str) -> float:
    values = sorted(
        measurement.latency_s[quantile].value
        for load in loads
        if (measurement := load.trials[name].measurement) is not None
    )
    return values[len(values) // 2]


def _rivals(loads: Sequence[JointLoad], scenario: Scenario, chosen: Standing) -> list[Rival]:
    best = {
        own.name: ranked[0].configuration
        for own in scenario.target.models
        if (ranked := standings(loads, scenario.objective, kind="alone", of=own.name))
    }
    if len(best) < len(scenario.target.models):
        return []
    factors = {standing.configuration: standing.factor for standing in standings(loads, scenario.objective)}
    rivals = []
    for configuration in side_by_side(best):
        if configuration == chosen.configuration:
            continue
        there = [
            load
            for load in loads
            if (load.ask.kind, load.ask.configuration, load.ask.factor)
            == ("together", configuration, chosen.factor)
            and load.tells
        ]
        rivals.append(
            Rival(
                configuration=configuration,
                kept=there[-1].holds if there else None,
                factor=factors.get(configuration),
                misses=tuple(_missing(there[-1])) if there else (),
            )
        )
    return rivals


def _missing(load: JointLoad) -> list[str]:
    return [name for name, trial in load.judged().items() if not trial.feasible]


def _floods(loads: Sequence[JointLoad], chosen: Configuration, scenario: Scenario) -> list[Flood]:
    """The last flood of each model with the recommended parameters, and with another bound of its queue.

    One that tells of the server stands before one that does not.
    """
    last: dict[tuple[str, Configuration], JointLoad] = {}
    for load in loads:
        differs = [
            name for name, own in load.ask.configuration.models if dict(chosen.models).get(name) != own
        ]
        mine = load.ask.configuration == chosen
        if load.ask.kind == "flood" and (mine or (load.ask.source == "confirm" and differs == [load.ask.of])):
            earlier = last.get((load.ask.of, load.ask.configuration))
            if earlier is None or earlier.untold or not load.untold:
                last[load.ask.of, load.ask.configuration] = load
    ordered = sorted(last.items(), key=lambda item: (item[0][0], item[0][1] != chosen))
    return [_flood(load, chosen, scenario) for _, load in ordered]


def _flood(load: JointLoad, chosen: Configuration, scenario: Scenario) -> Flood:
    (spec,) = (own for own in scenario.target.models if own.name == load.ask.of)
    own = load.ask.configuration.of_model(spec.name).batching
    measurement = load.trials[spec.name].measurement
    return Flood(
        model=spec.name,
        rate_rps=spec.flood_rps or 0.0,
        bound=None if own is None else own.max_enqueued_batches,
        error_ratio=1.0 if measurement is None else measurement.error_ratio,
        answered_rps=0.0 if measurement is None else measurement.throughput_rps.value,
        p95_s=math.inf if measurement is None else measurement.latency_s["p95"].value,
        victims=tuple(
            _victim(name, own_scenario, load)
            for name, own_scenario in scenario.of_models().items()
            if name != spec.name
        ),
        recommended=load.ask.configuration == chosen,
        untold=load.untold,
    )


def _victim(name: str, own: Scenario, load: JointLoad) -> Victim:
    trial = load.trials[name]
    measurement = trial.measurement
    latencies = [
        Latency(name=quantile, limit_s=limit_s, measured_s=measurement.latency_s[quantile].value)
        for quantile, limit_s in own.slo.limits().items()
        if measurement is not None
    ]
    return Victim(
        name=name,
        kept=trial.feasible,
        latency=max(latencies, key=lambda latency: latency.measured_s / latency.limit_s, default=None),
        error_ratio=1.0 if measurement is None else measurement.error_ratio,
    )
