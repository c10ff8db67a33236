"""The error to raise where nothing that was measured keeps the SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.errors import BatchtuneError, InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted, percentage, rounded, rounded_duration
from batchtune.tune.answer.reason import failure_with_batching
from batchtune.tune.answer.recommendation import limit_text
from batchtune.tune.evidence.bracket import Run, keeps, runs_of
from batchtune.tune.trials.failure_texts import explain_failure
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial

BATCHED_LEAST = 3
"""Configurations with batching; where fewer were tried and miss the SLO it is not said that none meets it."""


def nothing_to_recommend(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec) -> BatchtuneError:
    """7 where all failed, 3 where what was tried misses the SLO, 5 where that is not known."""
    if trials and all(trial.state == "failed" for trial in trials):
        return TargetError(
            _failed(trials), hint="the failed trials are in the ledger; see whether the server works by hand"
        )
    runs = [run for run in runs_of(trials, slo, scenario) if run.latency_s]
    if not runs:
        probes = f", only {counted(len(trials), 'trial')}" if trials else ""
        return InconclusiveError(
            f"nothing to recommend: no trial is finished{probes}",
            hint="go on with that sweep (--resume), with a larger search.budget where it was spent",
        )
    by_number = {trial.number: trial for trial in trials}
    missed = [run for run in runs if not run.held] or runs
    own = [run for run in missed if not _is_scout(by_number[run.trial], scenario)] or missed
    nearest = min(own, key=lambda run: _violation(run, slo))
    label = by_number[nearest.trial].configuration.label()
    tried = len({by_number[run.trial].configuration for run in runs})
    wanted = limit_text(slo.limits(), slo.error_ratio)
    why = f"no configuration of {tried} measured meets {wanted}; nearest: {label}, {_miss(nearest, slo)}"
    open_question = _open_question(trials, scenario=scenario, slo=slo)
    if open_question is not None:
        return InconclusiveError(f"{why}; {open_question}", hint="give the sweep more time")
    return NoFeasibleConfigurationError(why, hint="relax the SLO, lower the load, or widen the search space")


def _is_scout(trial: Trial, scenario: Scenario) -> bool:
    """Whether it ran under another load than that of a fixed one: what it misses is no miss of its configuration."""
    other = trial.asked_concurrency not in (None, scenario.load.concurrency)
    return scenario.objective != "capacity" and trial.source in NO_CANDIDATES and other


def _open_question(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec) -> str | None:
    """Why it is not known that nothing meets the SLO; None: it is."""
    lone = next(
        (trial for trial in trials if trial.asked_concurrency == 1 and trial.measurement is not None), None
    )
    if lone is not None and not _keeps(lone, slo):
        return None  # no configuration answers sooner than a lone request is
    batched = {trial.configuration for trial in trials if trial.configuration.batching is not None}
    if not batched and failure_with_batching(trials) is None:
        return "whether batching would meet it is not known: none was tried"
    if scenario.objective == "capacity":
        if lone is None:
            return None
        return "a lone request keeps it, so a rate low enough would: too little time to find one"
    if len(batched) < min(BATCHED_LEAST, math.prod(scenario.search.grid_shape)):
        tried = counted(len(batched), "configuration")
        return f"whether another would is not known: only {tried} with batching was tried"
    return None


def _keeps(trial: Trial, slo: SloSpec) -> bool:
    if trial.measurement is None:
        return False
    latency_s = {name: quantile.value for name, quantile in trial.measurement.latency_s.items()}
    return keeps(slo, latency_s, trial.measurement.error_ratio)


def _failed(trials: Sequence[Trial]) -> str:
    failures = [trial.failure for trial in trials if trial.failure]
    why = explain_failure([trial for trial in trials if trial.error_texts])
    cause = f": {why}" if why else f"; the last: {failures[-1] if failures else 'without a word'}"
    return f"nothing to recommend: {counted(len(failures), 'trial')} failed{cause}"


def _violation(run: Run, slo: SloSpec) -> float:
    """How far the worst limit is missed, as a ratio."""
    ratios = [run.latency_s.get(name, math.inf) / limit_s for name, limit_s in slo.limits().items()]
    errors = run.error_ratio / slo.error_ratio if slo.error_ratio > 0.0 else 1.0 + run.error_ratio
    unanswered = (run.rate_rps or 0.0) / run.answered_rps if run.answered_rps > 0.0 else math.inf
    values = [ratio if not math.isnan(ratio) else math.inf for ratio in (*ratios, errors, unanswered)]
    return max(values, default=math.inf)


def _miss(run: Run, slo: SloSpec) -> str:
    """What the nearest run missed each limit by."""
    misses = []
    for name, limit_s in slo.limits().items():
        value_s = run.latency_s.get(name, math.nan)
        if math.isnan(value_s) or math.isinf(value_s):
            misses.append(f"{name} is undefined: too many requests had no good answer")
        elif value_s > limit_s:
            shown, allowed, ratio = (
                f"{name} {rounded_duration(value_s)}",
                rounded_duration(limit_s),
                value_s / limit_s,
            )
            misses.append(
                f"{shown} misses {allowed} by {percentage(ratio - 1)}"
                if ratio < 2
                else f"{shown} is {rounded(ratio)} × {allowed}"
            )
    if run.error_ratio > slo.error_ratio:
        misses.append(
            f"{percentage(run.error_ratio, 2)} of requests fail where {percentage(slo.error_ratio, 2)} may"
        )
    if not misses and run.rate_rps is not None:
        misses.append(f"{rounded(run.answered_rps)} of {rounded(run.rate_rps)} requests/s were answered")
    return " and ".join(misses) or "which kept it in some runs and missed it in others"
