"""Is the recommendation established, and if not, what is open?

Established: fresh runs kept the SLO, and whether batching helps is known, if the server can be without. They keep it
with room for another run, each by its own test, or of a capacity by their mean. Whether something better exists is
another question, which `near_best` answers; a good configuration is established without being the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.recommend.choice import is_stricter
from batchtune.recommend.prediction import Promise
from batchtune.scenario.spec.batching_off import can_be_off
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.scenario.units import counted, percentage, rounded, rounded_duration
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, RunFigures
from batchtune.tune.evidence.rates import Rung
from batchtune.tune.evidence.run_noise import mean_keeps
from batchtune.tune.trials.trial import Trial


def open_questions(
    chosen: Pooled,
    promises: Sequence[Promise],
    *,
    batching_helps: str,
    gain: Estimate | None,
    trials: Sequence[Trial],
    scenario: Scenario,
    slo: SloSpec,
) -> tuple[str, ...]:
    """What keeps this recommendation from being established, in words; none: it is established."""
    questions = [*_refutation(chosen, trials, slo)]
    if not questions:
        questions += _confirmation(chosen, promises, scenario=scenario, slo=slo)
    if batching_helps == "not distinguishable" and can_be_off(scenario.target):
        questions.append(_unknown_gain(gain))
    return tuple(questions)


def _refutation(chosen: Pooled, trials: Sequence[Trial], slo: SloSpec) -> list[str]:
    """`2 fresh runs at 15,700/s missed the SLO (33 % and 71 % errors); …`: what fresh runs say against a capacity."""
    claim = chosen.claim
    if claim is None or claim.established or not claim.misses:
        return []
    lowest = [rung for rung in claim.misses if math.isclose(rung.rate_rps, claim.refuted_rps, rel_tol=1e-3)]
    by_number = {trial.number: trial for trial in trials}
    how = " and ".join(_miss(by_number[rung.trial], slo) for rung in lowest if rung.trial in by_number)
    runs = counted(len(lowest), "fresh run")
    missed = f"{runs} at {_rate(claim.refuted_rps)} missed the SLO ({how}): the capacity is not established"
    return [f"{missed}; {_held(claim.held)}"]


def _held(held: Rung | None) -> str:
    if held is None:
        return "at no lower rate was it tried and held"
    return f"below that it held at {_rate(held.rate_rps)} in trial {held.trial}"


def _miss(trial: Trial, slo: SloSpec) -> str:
    """What one run missed the SLO by."""
    measured = trial.measurement
    if measured is None:
        return "no figures"
    if measured.error_ratio > slo.error_ratio:
        return f"{percentage(measured.error_ratio)} errors"
    for name, limit_s in slo.limits().items():
        value_s = measured.latency_s[name].value if name in measured.latency_s else math.nan
        if not value_s <= limit_s:
            return f"{name} {rounded_duration(value_s) if math.isfinite(value_s) else 'without bound'}"
    return "kept in time"


def _confirmation(
    chosen: Pooled, promises: Sequence[Promise], *, scenario: Scenario, slo: SloSpec
) -> list[str]:
    """Whether enough fresh runs kept the SLO with room."""
    if chosen.confirmations == 0:
        return ["no fresh run confirms it"]
    if chosen.confirmations < policy.ESTABLISHED_RUNS:
        runs = counted(chosen.confirmations, "fresh run")
        return [f"only {runs} confirm{'s' if chosen.confirmations == 1 else ''} it"]
    if _passed(chosen.runs) and is_stricter(scenario.slo, slo):
        return []
    if chosen.claim is not None and all(
        _usually_keeps(chosen, name, limit) for name, limit in slo.limits().items()
    ):
        return []
    return [
        f"in a fresh run {promise.name} may reach {rounded_duration(promise.upper_bound_s)}, above the "
        f"{rounded_duration(promise.limit_s)} allowed"
        if math.isfinite(promise.upper_bound_s)
        else f"how high {promise.name} comes in a fresh run is not known"
        for promise in promises
        if not promise.spare_ratio >= 0.0
    ]


def _usually_keeps(chosen: Pooled, name: str, limit_s: float) -> bool:
    """Whether the mean of the fresh runs at the rate claimed lies below the limit, at 95 %.

    A capacity is sought where the limit is near, so single runs may come close to it; the rate holds if most keep it.
    """
    values = [run.latency_s[name].value for run in chosen.runs if name in run.latency_s]
    if len(values) < policy.ESTABLISHED_RUNS or not all(value <= limit_s for value in values):
        return False
    return mean_keeps(values, limit_s)


def _passed(runs: Sequence[RunFigures]) -> bool:
    """Whether so many runs passed the test of the scenario's SLO, each by itself, and none failed it."""
    verdicts = [run.trial.measurement.verdict for run in runs if run.trial.measurement is not None]
    return verdicts.count("PASS") >= policy.ESTABLISHED_RUNS and "FAIL" not in verdicts


def _unknown_gain(gain: Estimate | None) -> str:
    if gain is None:
        return "whether batching helps is not known: there are no two runs to compare"
    low, high = (rounded(end) if math.isfinite(end) else "?" for end in (gain.low, gain.high))
    return f"whether batching helps is not known: it is worth between ×{low} and ×{high}"


def _rate(rate_rps: float) -> str:
    return f"{rounded(rate_rps)}/s"
