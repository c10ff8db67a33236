"""Which configuration should be served, what will it do, and why?

Chosen from pooled figures, confirmation runs before those of the search. The figures stated are prediction intervals:
a fresh run of the recommended parameters is to fall inside them (see `run_noise`). Gains compare runs made side by
side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import Caveat
from batchtune.plain_values import fields_to_plain, from_plain
from batchtune.recommend.alternatives import Alternative, alternatives_to
from batchtune.recommend.choice import Choice, choose, is_gain, is_told_apart
from batchtune.recommend.established import open_questions
from batchtune.recommend.near_best import NearBest, near_best_of_measured
from batchtune.recommend.notes import drift_notes, half_load_notes, may_promise, notes_of
from batchtune.recommend.prediction import (
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
from batchtune.recommend.reason import absence_of_batching, explain_gain, nothing_to_recommend, padding_note
from batchtune.recommend.worth import Helps, batching_helps, cannot_pay, is_telling
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.evidence.bottleneck_of import searched_bottleneck
from batchtune.tune.evidence.host_drift import drift_of, speed_ahead_sd
from batchtune.tune.evidence.pooled import Pooled, run_noise
from batchtune.tune.evidence.run_noise import geometric_mean
from batchtune.tune.trials.failure_texts import explain_failure
from batchtune.tune.trials.ledger import measuring_s
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Trial

SCHEMA_VERSION = 2
"""Of recommendation.json; what an older one lacks is absent when it is read."""


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
    Over a reference that never held the SLO a capacity's gain has no upper end: it is at least so much.
    `established`: fresh runs kept the SLO, and whether batching helps is known; else `open_questions` say what is not.
    `indistinct_from`: "no_batching" or "defaults", where the best cannot be told from it; None: it can.
    `little_better_than`: the same, where it can be told, but gains less than its parameters are worth, or loses.
    `batching_helps`, `reason`, `cannot_pay`: whether it does, why, and the finding that no batch can pay, in words.
    `near_best`: the probability of being within 5 % of the best, of what, and of how many; None: nothing else was
    measured.
    `noise_ratio`: standard deviation between runs of one configuration, relative; `noise_measured` False: assumed,
    because nothing was run twice.
    `bottleneck`: what limits it now, `{kind, text, advice, evidence}`, by the runs behind the figures.
    `search`: the sweep's account of itself without the twin's draws; None for a run that kept none.
    `trials`, `seconds`: all that were run. `confirmations`: the fresh runs behind the figures; 0: those of the search.
    `rate_rps`, `concurrency`, `rows_per_request`: the load. `references`, `alternatives`: what else there is.
    `failed_references`: why a reference point has no figures, by its name; one that is in neither was not tried.
    `caveats`: reasons for distrust of these figures. `notes`: what weakens the answer, or qualifies it.
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
    established: bool = False
    open_questions: tuple[str, ...] = ()
    indistinct_from: str | None = None
    little_better_than: str | None = None
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
    failed_references: Mapping[str, str] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain types, safe for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "label": self.configuration.label(),
            **fields_to_plain(self),
        }

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
        return from_plain(cls, values)


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
        InconclusiveError: none is known to meet it, but too little was tried to say that none does.
        TargetError: every trial failed.
    """
    promised = slo or scenario.slo
    choice = choose(trials, scenario=scenario, slo=promised)
    if choice.chosen is None:
        raise nothing_to_recommend(choice.inside, trials, scenario=scenario, slo=promised)
    chosen, batched, pooled = choice.chosen, choice.batched, choice.pooled
    no_batching = choice.references.get("no_batching")
    noise = run_noise(pooled, scenario=scenario)
    gain = None if batched is None else gain_over(batched, no_batching, noise=noise, scenario=scenario)
    with_batching = [candidate for candidate in choice.inside if candidate.configuration.batching is not None]
    tried = any(is_telling(candidate, no_batching, scenario=scenario) for candidate in with_batching)
    unable = (None if search is None else search.cannot_pay) or cannot_pay(trials)
    helps: Helps = "not distinguishable"
    if tried:
        helps = batching_helps(
            chosen, batched, no_batching, gain, cannot_pay=unable is not None, scenario=scenario
        )
    gains = {
        name: gain_over(chosen, reference, noise=noise, scenario=scenario)
        for name, reference in choice.references.items()
    }
    last = chosen.runs[-1].trial
    measured = measurements_of(chosen)
    ahead_sd = speed_ahead_sd(trials)
    drift = drift_of(chosen, ahead_sd, scenario=scenario)
    latency_s = predicted_latency(chosen, pooled, drift_sd=drift.latency_sd)
    promises = promises_of(latency_s, promised) if may_promise(chosen) else ()
    questions = open_questions(
        chosen,
        promises,
        batching_helps=helps,
        gain=gain,
        trials=trials,
        scenario=scenario,
        slo=promised,
    )
    indistinct, little_better = _hardly_better_than(choice, gains)
    alternatives, unconfirmed = alternatives_to(chosen, pooled, scenario=scenario)
    noise_ratio = None if search is None else search.noise_ratio
    return Recommendation(
        configuration=chosen.configuration,
        objective=scenario.objective,
        throughput_rps=predicted(chosen, pooled, lambda run: run.throughput_rps, drift_sd=drift.rate_sd),
        throughput_rows_per_s=predicted(
            chosen, pooled, lambda run: run.throughput_rows_per_s, drift_sd=drift.rate_sd
        ),
        capacity_rps=predicted_capacity(chosen, drift_sd=drift.capacity_sd)
        if scenario.objective == "capacity"
        else None,
        latency_s=latency_s,
        mean_batch_rows=mean_batch_rows(measured),
        slo={**promised.limits(), "errors": promised.error_ratio},
        promises=promises,
        gain_over_no_batching=gains.get("no_batching"),
        gain_over_defaults=gains.get("defaults"),
        established=not questions,
        open_questions=questions,
        indistinct_from=indistinct,
        little_better_than=little_better,
        batching_helps=helps,
        reason=explain_gain(
            batched,
            absence=absence_of_batching(choice.inside, pooled, trials, tried=tried),
            no_batching=no_batching,
            gain=gain,
            unbatched_rows_per_s=_unbatched_rows_per_s(no_batching, scenario=scenario),
            limits_s=promised.limits(),
        ),
        cannot_pay=None if helps == "yes" else unable,
        near_best=_near_best(
            chosen, pooled, search=search if promised == scenario.slo else None, scenario=scenario
        ),
        noise_ratio=noise.sd if noise_ratio is None else noise_ratio,
        noise_measured=noise.degrees > policy.PRIOR_DEGREES,
        bottleneck=searched_bottleneck(
            chosen.configuration,
            measured,
            tried=(candidate.configuration for candidate in choice.inside),
            scenario=scenario,
        ),
        search=None if search is None else replace(search, twin=None),
        trials=len(trials),
        seconds=measuring_s(trials),
        confirmations=chosen.confirmations,
        rate_rps=chosen.value if scenario.objective == "capacity" else last.rate_rps,
        concurrency=last.concurrency,
        rows_per_request=scenario.request.rows_most,
        references=tuple(
            reference_of(name, reference, pooled, beside=chosen, ahead_sd=ahead_sd, scenario=scenario)
            for name, reference in choice.references.items()
        ),
        failed_references=_failed_references(choice, trials),
        alternatives=alternatives,
        caveats=caveats_of(measured),
        notes=(
            *notes_of(choice, unconfirmed, trials, scenario=scenario, promised=promised),
            *half_load_notes(chosen, search, scenario=scenario),
            *drift_notes(chosen, pooled, ahead_sd, drift=drift, scenario=scenario),
            *padding_note(chosen, trials),
        ),
    )


def _failed_references(choice: Choice, trials: Sequence[Trial]) -> dict[str, str]:
    """What ended those reference points that were tried and gave no figures."""
    failed = [
        trial
        for trial in trials
        if trial.source in ("no_batching", "defaults")
        and trial.source not in choice.references
        and trial.state == "failed"
    ]
    return {trial.source: explain_failure([trial]) or "without a word" for trial in failed}


def _hardly_better_than(
    choice: Choice, gains: Mapping[str, Estimate | None]
) -> tuple[str | None, str | None]:
    """The reference from which the choice, or what gave way to it, cannot be told; and that over which it gains little.

    One of them at most.
    """
    if choice.chosen is None:
        return None, None
    name, gain = choice.yielded_to, choice.yielded_gain
    if name is None:
        rivals = {
            rival: gains.get(rival)
            for rival, reference in choice.references.items()
            if reference.configuration != choice.chosen.configuration and reference.feasible
        }
        close = (
            (rival, over)
            for rival, over in rivals.items()
            if over is not None and over.high > 1.0 and not is_gain(over)
        )
        name, gain = next(close, (None, None))
    return (None, name) if gain is not None and is_told_apart(gain) else (name, None)


def _unbatched_rows_per_s(no_batching: Pooled | None, *, scenario: Scenario) -> float:
    """What the server does without batching in the closed loop; NaN in an open one, which leaves it idle at times."""
    if scenario.load.open_loop or no_batching is None:
        return math.nan
    return geometric_mean(run.throughput_rows_per_s.value for run in no_batching.runs)


def _near_best(
    chosen: Pooled, pooled: Sequence[Pooled], *, search: SearchSummary | None, scenario: Scenario
) -> NearBest | None:
    """By the search's own account of this configuration where it has one, else by what was measured."""
    label = chosen.configuration.label()
    if search is None or label not in search.near_best:
        return near_best_of_measured(chosen, pooled, scenario=scenario)
    return NearBest(
        probability=search.near_best[label],
        of="space",
        count=search.judged,
        space_size=search.space_size if search.space_size > search.judged else None,
    )
