"""Which configuration should be served, what will it do, and why?

Chosen from pooled figures, confirmation runs before those of the search. The figures stated are prediction intervals:
a fresh run of the recommended parameters is to fall inside them (see `tune.noise`). Gains compare runs made side by
side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from batchtune.batching import Configuration
from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.caveats import Caveat
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.spec import Scenario, SloSpec
from batchtune.scenario.units import counted
from batchtune.tune import policy
from batchtune.tune.confidence import NearBest, near_best_of_measured
from batchtune.tune.failure_texts import explain_failure
from batchtune.tune.limits import usual_bottleneck
from batchtune.tune.noise import (
    geometric_mean,
)
from batchtune.tune.pareto import Alternative, alternatives_to
from batchtune.tune.pool import Pooled, pool, run_noise
from batchtune.tune.prediction import (
    Promise,
    Reference,
    caveats_of,
    gain_over,
    mean_batch_rows,
    measurements_of,
    predicted,
    predicted_capacity,
    predicted_latency,
    promises_of,
    reference_of,
)
from batchtune.tune.ranking import leaders
from batchtune.tune.reason import advise_miss, cannot_pay, explain_gain, explain_miss, is_telling
from batchtune.tune.summary import SearchSummary
from batchtune.tune.trial import Trial

__all__ = ["Alternative", "Helps", "Promise", "Recommendation", "Reference", "recommend"]

SCHEMA_VERSION = 2
"""Of recommendation.json; what an older one lacks is absent when it is read."""


Helps = Literal["yes", "no", "not distinguishable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer. Estimates of rates and latency hold the 95 % interval of a fresh run, times are in seconds.

    As JSON every field stands under its own name, estimates as `{value, low, high}`, beside `schema_version` and
    `label`, the configuration in one line:

    `configuration`, `objective`: what to serve, and what was asked to be best.
    `throughput_rps`, `throughput_rows_per_s`, `latency_s` (by quantile), `mean_batch_rows`: what it gives.
    `capacity_rps`: the highest rate within the SLO, for that objective; else None.
    `slo`: its limits by quantile, and the share of requests that may fail as "errors". `promises`: for each limit the
    quantile and its upper bound.
    `gain_over_no_batching`, `gain_over_defaults`: how many times better the objective is (throughput or capacity ratio;
    p95 of the other over ours), with the 95 % interval of the mean; None when there is nothing to compare with.
    `batching_helps`, `reason`, `cannot_pay`: whether it does, why, and the finding that no batch can pay, in words.
    `near_best`: the probability of being within 5 % of the best, of what, and of how many; None: nothing else was
    measured.
    `noise_ratio`: standard deviation between runs of one configuration, relative; `noise_measured` False: assumed,
    because nothing was run twice.
    `bottleneck`: what limits it now, `{kind, text, advice, evidence}`, by the runs behind the figures.
    `search`: the sweep's account of itself without the twin's draws; None for a run that kept none.
    `trials`, `seconds`: all that were run. `confirmations`: the fresh runs behind the figures; 0: those of the search.
    `rate_rps`, `concurrency`, `rows_per_request`: the load. `references`, `alternatives`: what else there is.
    `caveats`: reasons for distrust of these figures. `notes`: what weakens the answer.
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
    capacity_rps: Estimate | None = None
    mean_batch_rows: float | None = None
    promises: tuple[Promise, ...] = ()
    cannot_pay: str | None = None
    near_best: NearBest | None = None
    noise_ratio: float | None = None
    noise_measured: bool = False
    bottleneck: Bottleneck | None = None
    search: SearchSummary | None = None
    references: tuple[Reference, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain types, safe for JSON."""
        plain = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        return {"schema_version": SCHEMA_VERSION, "label": self.configuration.label(), **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recommendation:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a later schema version.
            KeyError, TypeError: not a recommendation.
        """
        if values.get("schema_version") not in (1, SCHEMA_VERSION):
            raise ValueError(
                f"schema_version {values.get('schema_version')!r} where {SCHEMA_VERSION} is read"
            )
        known = {each.name for each in fields(cls)}
        return cls(**{name: _read(name, value) for name, value in values.items() if name in known})


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "configuration": Configuration.from_dict,
    "throughput_rps": Estimate.from_dict,
    "throughput_rows_per_s": Estimate.from_dict,
    "capacity_rps": Estimate.from_dict,
    "gain_over_no_batching": Estimate.from_dict,
    "gain_over_defaults": Estimate.from_dict,
    "latency_s": lambda by_name: {name: Estimate.from_dict(one) for name, one in by_name.items()},
    "near_best": NearBest.from_dict,
    "bottleneck": Bottleneck.from_dict,
    "search": SearchSummary.from_dict,
    "promises": lambda many: tuple(map(Promise.from_dict, many)),
    "references": lambda many: tuple(map(Reference.from_dict, many)),
    "alternatives": lambda many: tuple(map(Alternative.from_dict, many)),
    "caveats": lambda many: tuple(map(Caveat.from_dict, many)),
    "notes": tuple,
}


def recommend(
    trials: Sequence[Trial],
    *,
    scenario: Scenario,
    slo: SloSpec | None = None,
    search: SearchSummary | None = None,
) -> Recommendation:
    """Choose among the configurations measured, for the scenario's SLO or another one given later.

    `search` is what the sweep said of itself; its probability counts only for the SLO that was searched.

    Raises:
        NoFeasibleConfigurationError: none meets the SLO; the message names the nearest and by how much it misses.
        InconclusiveError: nothing was measured that could meet it or miss it.
        TargetError: every trial failed.
    """
    promised = slo or scenario.slo
    pooled = pool(trials, scenario=scenario, slo=promised)
    ranked = leaders(pooled, scenario=scenario)
    if not ranked:
        why = explain_miss(pooled, trials, promised)
        if trials and all(one.state == "failed" for one in trials):
            raise TargetError(
                why, hint="the failed trials are in the ledger; see whether the server works by hand"
            )
        if not pooled:
            raise InconclusiveError(why, hint=advise_miss(pooled, trials))
        raise NoFeasibleConfigurationError(why, hint=advise_miss(pooled, trials))
    references = _references(trials, pooled)
    no_batching = references.get("no_batching")
    batched = next((one for one in ranked if one.configuration.batching is not None), None)
    noise = run_noise(pooled, scenario=scenario)
    gain = None if batched is None else gain_over(batched, no_batching, noise=noise, scenario=scenario)
    with_batching = [one for one in pooled if one.configuration.batching is not None]
    tried = any(is_telling(one, no_batching, scenario=scenario) for one in with_batching)
    helps = _helps(batched, no_batching, gain) if tried else "not distinguishable"
    chosen = _chosen(ranked, batched, no_batching, helps=helps, gain=gain)
    last = chosen.runs[-1].trial
    measured = measurements_of(chosen)
    latency_s = predicted_latency(chosen, pooled)
    noise_ratio = None if search is None else search.noise_ratio
    trusted = search if chosen is ranked[0] and promised == scenario.slo else None
    return Recommendation(
        configuration=chosen.configuration,
        objective=scenario.objective,
        throughput_rps=predicted(chosen, pooled, lambda run: run.throughput_rps),
        throughput_rows_per_s=predicted(chosen, pooled, lambda run: run.throughput_rows_per_s),
        capacity_rps=predicted_capacity(chosen) if scenario.objective == "capacity" else None,
        latency_s=latency_s,
        mean_batch_rows=mean_batch_rows(measured),
        slo={**promised.limits(), "errors": promised.error_ratio},
        promises=promises_of(latency_s, promised),
        gain_over_no_batching=gain_over(chosen, no_batching, noise=noise, scenario=scenario),
        gain_over_defaults=gain_over(chosen, references.get("defaults"), noise=noise, scenario=scenario),
        batching_helps=helps,
        reason=explain_gain(
            batched,
            measured=bool(with_batching),
            tried=tried,
            no_batching=no_batching,
            gain=gain,
            unbatched_rows_per_s=_unbatched_rows_per_s(no_batching, scenario=scenario),
            limits_s=promised.limits(),
            failure=explain_failure([trial for trial in trials if trial.configuration.batching is not None]),
        ),
        cannot_pay=None if helps == "yes" else _cannot_pay(trials, search),
        near_best=_near_best(chosen, pooled, search=trusted, scenario=scenario),
        noise_ratio=noise.sd if noise_ratio is None else noise_ratio,
        noise_measured=noise.degrees > policy.PRIOR_DEGREES,
        bottleneck=usual_bottleneck(chosen.configuration, measured, scenario=scenario),
        search=None if search is None else replace(search, twin=None),
        trials=len(trials),
        seconds=sum(trial.seconds for trial in trials),
        confirmations=chosen.confirmations,
        rate_rps=chosen.value if scenario.objective == "capacity" else last.rate_rps,
        concurrency=last.concurrency,
        rows_per_request=max(kind.rows or 1 for kind in scenario.request.kinds()),
        references=tuple(
            reference_of(name, one, pooled, scenario=scenario) for name, one in references.items()
        ),
        alternatives=alternatives_to(chosen, pooled),
        caveats=caveats_of(measured),
        notes=_notes(chosen, scenario=scenario, promised=promised),
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
    likely = helps == "not distinguishable" and gain is not None and gain.value >= 1.0 + policy.WORTH_GAIN
    return batched if helps == "yes" or likely else no_batching


def _helps(batched: Pooled | None, no_batching: Pooled | None, gain: Estimate | None) -> Helps:
    """By the interval of the gain and the margin WORTH_GAIN; meeting an SLO that no batching misses counts too.

    `batched` None: none that was tried meets the SLO.
    """
    if no_batching is None or no_batching.failures:
        return "not distinguishable"
    if batched is None:
        return "no"
    if not no_batching.feasible:
        return "yes"
    if gain is None:
        return "not distinguishable"
    if gain.low > 1.0 and gain.value >= 1.0 + policy.WORTH_GAIN:
        return "yes"
    return "no" if gain.high < 1.0 + policy.WORTH_GAIN else "not distinguishable"


def _references(trials: Sequence[Trial], pooled: Sequence[Pooled]) -> dict[str, Pooled]:
    by_configuration = {one.configuration: one for one in pooled}
    return {
        trial.source: by_configuration[trial.configuration]
        for trial in trials
        if trial.source in ("no_batching", "defaults") and trial.configuration in by_configuration
    }


def _unbatched_rows_per_s(no_batching: Pooled | None, *, scenario: Scenario) -> float:
    """What the server does without batching in the closed loop; NaN in an open one, which leaves it idle at times."""
    if scenario.load.open_loop or no_batching is None:
        return math.nan
    return geometric_mean(run.throughput_rows_per_s.value for run in no_batching.runs)


def _near_best(
    chosen: Pooled, pooled: Sequence[Pooled], *, search: SearchSummary | None, scenario: Scenario
) -> NearBest | None:
    """By the search's own account of its whole space where it has one, else by what was measured."""
    if search is None or search.near_best_probability is None:
        return near_best_of_measured(chosen, pooled, scenario=scenario)
    return NearBest(probability=search.near_best_probability, of="space", count=search.space_size)


def _cannot_pay(trials: Sequence[Trial], search: SearchSummary | None) -> str | None:
    found = None if search is None else search.cannot_pay
    return cannot_pay(trials) if found is None else found


def _notes(chosen: Pooled, *, scenario: Scenario, promised: SloSpec) -> tuple[str, ...]:
    notes = []
    if chosen.confirmations == 0:
        notes.append(
            f"not confirmed by fresh runs: the figures are from {counted(len(chosen.runs), 'run')} of the search, "
            "and the best of many such is often too good"
        )
    elif chosen.confirmations < 3:
        notes.append(f"only {counted(chosen.confirmations, 'fresh run')} behind these figures")
    if scenario.objective == "capacity" and promised != scenario.slo:
        notes.append("capacity for an SLO that was not searched: the highest rate tried that meets it")
    return tuple(notes)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def _read(name: str, value: Any) -> Any:
    return value if value is None or name not in _READERS else _READERS[name](value)
