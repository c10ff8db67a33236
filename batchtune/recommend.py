"""Which configuration should be served, what will it do, and why?

Chosen from pooled figures, confirmation runs before those of the search. The figures stated are prediction intervals:
a fresh run of the recommended parameters is to fall inside them (see `tune.noise`). Gains compare runs made side by
side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchtune.batching import Configuration
from batchtune.errors import NoFeasibleConfigurationError
from batchtune.measure.caveats import Caveat
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.spec import Scenario, SloSpec
from batchtune.tune.noise import (
    FRESH_LATENCY_PRIOR_SD,
    FRESH_THROUGHPUT_PRIOR_SD,
    Noise,
    geometric_mean,
    paired_ratio,
    predict,
)
from batchtune.tune.pareto import Alternative, alternatives_to
from batchtune.tune.pool import Pooled, RunFigures, pool, run_noise
from batchtune.tune.ranking import leaders
from batchtune.tune.reason import count, explain_gain, explain_miss
from batchtune.tune.trial import Trial

__all__ = ["Alternative", "Helps", "Recommendation", "recommend"]

SCHEMA_VERSION = 1

GAIN_WANTED = 0.05
"""Batching that gains less than this is not worth its parameters."""

Helps = Literal["yes", "no", "not distinguishable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a server gives without tuning; `name` is "no_batching" or "defaults". Intervals are for a fresh run."""

    name: str
    configuration: Configuration
    throughput_rps: Estimate
    latency_s: dict[str, Estimate]
    runs: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "configuration": self.configuration.to_dict(),
            "throughput_rps": self.throughput_rps.to_dict(),
            "latency_s": {name: one.to_dict() for name, one in self.latency_s.items()},
            "runs": self.runs,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reference:
        return cls(
            name=values["name"],
            configuration=Configuration.from_dict(values["configuration"]),
            throughput_rps=Estimate.from_dict(values["throughput_rps"]),
            latency_s={name: Estimate.from_dict(one) for name, one in values["latency_s"].items()},
            runs=values["runs"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer. Estimates of throughput, rows and latency hold the 95 % interval of a fresh run.

    Gains say how many times better the objective is (throughput or capacity ratio; p95 of the other over ours), with
    the 95 % interval of the mean; None when there is nothing to compare with. `trials` counts all that were run,
    `confirmations` the fresh runs behind the figures; 0: the figures are those of the search. `notes` say what weakens
    the answer.
    """

    configuration: Configuration
    objective: str
    throughput_rps: Estimate
    throughput_rows_per_s: Estimate
    latency_s: dict[str, Estimate]
    slo: dict[str, float]
    gain_over_no_batching: Estimate | None
    gain_over_defaults: Estimate | None
    batching_helps: Helps
    reason: str
    trials: int
    seconds: float
    confirmations: int
    rate_rps: float | None
    concurrency: int | None
    rows_per_request: int
    references: tuple[Reference, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain types, safe for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "configuration": self.configuration.to_dict(),
            "label": self.configuration.label(),
            "objective": self.objective,
            "throughput_rps": self.throughput_rps.to_dict(),
            "throughput_rows_per_s": self.throughput_rows_per_s.to_dict(),
            "latency_s": {name: one.to_dict() for name, one in self.latency_s.items()},
            "slo": self.slo,
            "gain_over_no_batching": _estimate_dict(self.gain_over_no_batching),
            "gain_over_defaults": _estimate_dict(self.gain_over_defaults),
            "batching_helps": self.batching_helps,
            "reason": self.reason,
            "trials": self.trials,
            "seconds": self.seconds,
            "confirmations": self.confirmations,
            "rate_rps": self.rate_rps,
            "concurrency": self.concurrency,
            "rows_per_request": self.rows_per_request,
            "references": [one.to_dict() for one in self.references],
            "alternatives": [one.to_dict() for one in self.alternatives],
            "caveats": [one.to_dict() for one in self.caveats],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recommendation:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another schema version.
            KeyError, TypeError: not a recommendation.
        """
        if values.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {values.get('schema_version')!r} where {SCHEMA_VERSION} is read"
            )
        fields = {name: value for name, value in values.items() if name not in ("schema_version", "label")}
        fields["configuration"] = Configuration.from_dict(values["configuration"])
        for name in (
            "throughput_rps",
            "throughput_rows_per_s",
            "gain_over_no_batching",
            "gain_over_defaults",
        ):
            fields[name] = None if values[name] is None else Estimate.from_dict(values[name])
        fields["latency_s"] = {name: Estimate.from_dict(one) for name, one in values["latency_s"].items()}
        fields["references"] = tuple(Reference.from_dict(one) for one in values["references"])
        fields["alternatives"] = tuple(Alternative.from_dict(one) for one in values["alternatives"])
        fields["caveats"] = tuple(Caveat.from_dict(one) for one in values["caveats"])
        fields["notes"] = tuple(values["notes"])
        return cls(**fields)


def recommend(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None) -> Recommendation:
    """Choose among the configurations measured, for the scenario's SLO or another one given later.

    Raises:
        NoFeasibleConfigurationError: none meets the SLO; the message names the nearest and by how much it misses.
    """
    promised = slo or scenario.slo
    pooled = pool(trials, scenario=scenario, slo=promised)
    ranked = leaders(pooled, scenario=scenario)
    if not ranked:
        raise NoFeasibleConfigurationError(
            explain_miss(pooled, trials, promised),
            hint="relax the SLO, lower the load, or widen the search space",
        )
    references = _references(trials, pooled)
    no_batching = references.get("no_batching")
    batched = next((one for one in ranked if one.configuration.batching is not None), None)
    noise = run_noise(pooled, scenario=scenario)
    gain = None if batched is None else _gain(batched, no_batching, noise=noise, scenario=scenario)
    helps = _helps(batched, no_batching, gain)
    chosen = _chosen(ranked, batched, no_batching, helps=helps, gain=gain)
    last = chosen.runs[-1].trial
    behind = [run.trial.measurement for run in chosen.runs]
    caveats = {one.code: one for measurement in behind if measurement for one in measurement.caveats}
    latency_s = _predicted_latency(chosen, pooled)
    return Recommendation(
        configuration=chosen.configuration,
        objective=scenario.objective,
        throughput_rps=_predicted(chosen, pooled, lambda run: run.throughput_rps),
        throughput_rows_per_s=_predicted(chosen, pooled, lambda run: run.throughput_rows_per_s),
        latency_s=latency_s,
        slo={**promised.limits(), "errors": promised.error_ratio},
        gain_over_no_batching=_gain(chosen, no_batching, noise=noise, scenario=scenario),
        gain_over_defaults=_gain(chosen, references.get("defaults"), noise=noise, scenario=scenario),
        batching_helps=helps,
        reason=explain_gain(
            batched,
            no_batching=no_batching,
            gain=gain,
            unbatched_rows_per_s=_unbatched_rows_per_s(no_batching, scenario=scenario),
            limits_s=promised.limits(),
        ),
        trials=len(trials),
        seconds=sum(trial.seconds for trial in trials),
        confirmations=chosen.confirmations,
        rate_rps=chosen.value if scenario.objective == "capacity" else last.rate_rps,
        concurrency=last.concurrency,
        rows_per_request=max(kind.rows or 1 for kind in scenario.request.kinds()),
        references=tuple(_reference(name, one, pooled) for name, one in references.items()),
        alternatives=alternatives_to(chosen, pooled),
        caveats=tuple(caveats.values()),
        notes=_notes(chosen, latency_s, scenario=scenario, promised=promised),
    )


def _chosen(
    ranked: Sequence[Pooled],
    batched: Pooled | None,
    no_batching: Pooled | None,
    *,
    helps: Helps,
    gain: Estimate | None,
) -> Pooled:
    """The best with batching where that helps; else no batching, if feasible: idle parameters are not worth having."""
    if batched is None or no_batching is None or not no_batching.feasible:
        return ranked[0]
    likely = helps == "not distinguishable" and gain is not None and gain.value >= 1.0 + GAIN_WANTED
    return batched if helps == "yes" or likely else no_batching


def _helps(batched: Pooled | None, no_batching: Pooled | None, gain: Estimate | None) -> Helps:
    """By the interval of the gain and the margin GAIN_WANTED; meeting an SLO that no batching misses counts too."""
    if no_batching is None or no_batching.failures:
        return "not distinguishable"
    if batched is None:
        return "no"
    if not no_batching.feasible:
        return "yes"
    if gain is None:
        return "not distinguishable"
    if gain.low > 1.0 and gain.value >= 1.0 + GAIN_WANTED:
        return "yes"
    return "no" if gain.high < 1.0 + GAIN_WANTED else "not distinguishable"


def _gain(ours: Pooled, other: Pooled | None, *, noise: Noise, scenario: Scenario) -> Estimate | None:
    """How many times better our objective is; pairs from the same block, else search with search."""
    if other is None:
        return None
    theirs = {run.trial.block: run.value for run in other.runs}
    pairs = [
        (run.value, theirs[run.trial.block])
        for run in ours.runs
        if run.trial.block is not None and run.trial.block in theirs
    ]
    pairs = pairs or [(ours.search_value, other.search_value)]
    if scenario.objective == "latency":
        pairs = [(b, a) for a, b in pairs]
    return paired_ratio(pairs, run_sd=noise.sd)


def _references(trials: Sequence[Trial], pooled: Sequence[Pooled]) -> dict[str, Pooled]:
    by_configuration = {one.configuration: one for one in pooled}
    return {
        trial.source: by_configuration[trial.configuration]
        for trial in trials
        if trial.source in ("no_batching", "defaults") and trial.configuration in by_configuration
    }


def _reference(name: str, one: Pooled, pooled: Sequence[Pooled]) -> Reference:
    return Reference(
        name=name,
        configuration=one.configuration,
        throughput_rps=_predicted(one, pooled, lambda run: run.throughput_rps),
        latency_s=_predicted_latency(one, pooled),
        runs=len(one.runs),
    )


def _unbatched_rows_per_s(no_batching: Pooled | None, *, scenario: Scenario) -> float:
    """What the server does without batching in the closed loop; NaN in an open one, which leaves it idle at times."""
    if scenario.load.open_loop or no_batching is None:
        return math.nan
    return geometric_mean(run.throughput_rows_per_s.value for run in no_batching.runs)


def _predicted(
    chosen: Pooled, pooled: Sequence[Pooled], figure: Callable[[RunFigures], Estimate]
) -> Estimate:
    spreads = [[figure(run).value for run in one.repeats] for one in pooled]
    return predict([figure(run) for run in chosen.runs], repeats=spreads, prior_sd=FRESH_THROUGHPUT_PRIOR_SD)


def _predicted_latency(chosen: Pooled, pooled: Sequence[Pooled]) -> dict[str, Estimate]:
    def figures(runs: Sequence[RunFigures], quantile: str) -> list[Estimate]:
        return [run.latency_s[quantile] for run in runs if quantile in run.latency_s]

    return {
        quantile: predict(
            figures(chosen.runs, quantile),
            repeats=[[run.value for run in figures(one.repeats, quantile)] for one in pooled],
            prior_sd=FRESH_LATENCY_PRIOR_SD,
        )
        for quantile in chosen.latency_s
    }


def _notes(
    chosen: Pooled, latency_s: Mapping[str, Estimate], *, scenario: Scenario, promised: SloSpec
) -> tuple[str, ...]:
    notes = []
    if chosen.confirmations == 0:
        notes.append(
            f"not confirmed by fresh runs: the figures are from {count(len(chosen.runs), 'run')} of the search, "
            "and the best of many such is often too good"
        )
    elif chosen.confirmations < 3:
        notes.append(f"only {count(chosen.confirmations, 'fresh run')} behind these figures")
    for name, limit_s in promised.limits().items():
        if name in latency_s and latency_s[name].high > limit_s:
            notes.append(
                f"a fresh run's {name} may reach {latency_s[name].high * 1e3:.3g} ms, "
                f"above the SLO's {limit_s * 1e3:.3g} ms"
            )
    if scenario.objective == "capacity" and promised != scenario.slo:
        notes.append("capacity for an SLO that was not searched: the highest rate tried that meets it")
    return tuple(notes)


def _estimate_dict(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_dict()
