"""What do all runs of one configuration say together?

One figure per configuration, from its confirmation runs when it has any: the best of many noisy search values is
too good to be true (the winner's curse), fresh runs are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.evidence.claimed_capacity import Claim, claim_of
from batchtune.tune.evidence.rates import asked_rps, locate, rungs_of
from batchtune.tune.evidence.run_noise import Noise, geometric_mean, spread
from batchtune.tune.trials.ledger import SAME_RATE, without_superseded
from batchtune.tune.trials.space import lies_inside
from batchtune.tune.trials.trial import NO_CANDIDATES, Trial, is_feasible, violations


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What one run says under the SLO in question; `value` is the objective's, NaN when undefined."""

    trial: Trial
    value: float
    throughput_rps: Estimate
    throughput_rows_per_s: Estimate
    latency_s: Mapping[str, Estimate]
    error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """One configuration: `value` is the geometric mean of the objective over `runs`, NaN when undefined.

    `runs` are those behind the figures: confirmation runs when there are any, else those `searched`. `latency_s`
    are geometric means of each quantile. A configuration with `failures`, runs in which the server refused, died or
    answered nothing, is not feasible whatever its other runs show. `search_value` is the objective over the runs of the
    search alone (over all, without any): hours or neighbours may have changed between search and confirmation.

    Of a capacity `value` is the one claimed (`claim` says on what grounds), where none is the lowest rate missed;
    `runs` are the fresh runs at the claimed rate, else the one that held at the highest rate, and `confirmations`
    counts the fresh ones.
    """

    configuration: Configuration
    runs: tuple[RunFigures, ...]
    confirmations: int
    failures: int
    value: float
    search_value: float
    searched: tuple[RunFigures, ...]
    latency_s: dict[str, float]
    constraints: dict[str, float]
    point: dict[str, Any] | None
    claim: Claim | None = None

    @property
    def repeats(self) -> tuple[RunFigures, ...]:
        """Runs that differ by nothing but time and chance; a capacity's search and its fresh runs are not alike."""
        alike = self.runs == self.searched or not any(run.trial.probes for run in self.searched)
        return (
            (*self.searched, *(run for run in self.runs if run not in self.searched)) if alike else self.runs
        )

    @property
    def feasible(self) -> bool:
        return self.failures == 0 and math.isfinite(self.value) and is_feasible(self.constraints)

    @property
    def violation(self) -> float:
        """The worst relative violation; at most 0 when feasible."""
        return max(self.constraints.values())


def pool(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None) -> list[Pooled]:
    """One entry per configuration measured, in order of first appearance; probes and failures are left out.

    With another `slo` than the scenario's the constraints are computed anew from the measurements, and the capacity is
    read from the same runs.
    """
    limits = slo or scenario.slo
    by_configuration: dict[Configuration, list[RunFigures]] = {}
    trials = without_superseded(trials)
    for trial in trials:
        run = _run_of(trial, scenario=scenario, slo=limits)
        if run is not None:
            by_configuration.setdefault(trial.configuration, []).append(run)
    candidates = (trial for trial in trials if trial.source not in NO_CANDIDATES)
    failed = Counter(trial.configuration for trial in candidates if trial.state == "failed")
    return [
        _pooled(runs, failures=failed[key], slo=limits, scenario=scenario)
        for key, runs in by_configuration.items()
    ]


def is_inside(candidate: Pooled, scenario: Scenario) -> bool:
    """Whether it may be recommended: it was measured as a point of the search space, or its values lie in it."""
    return candidate.point is not None or lies_inside(candidate.configuration, scenario)


def run_noise(pooled: Sequence[Pooled], *, scenario: Scenario) -> Noise:
    """The between-run noise of the objective over the repeats of all configurations, drift in between included.

    Fresh runs at a claimed capacity repeat the claim, not the search for it: of a capacity the noise is assumed.
    """
    prior_sd = policy.LATENCY_PRIOR_SD if scenario.objective == "latency" else policy.THROUGHPUT_PRIOR_SD
    groups = (
        []
        if scenario.objective == "capacity"
        else [[run.value for run in candidate.repeats] for candidate in pooled]
    )
    return spread(groups, prior_sd=prior_sd)


def _run_of(trial: Trial, *, scenario: Scenario, slo: SloSpec) -> RunFigures | None:
    measurement = trial.measurement
    if trial.state != "complete" or trial.source in NO_CANDIDATES or measurement is None:
        return None
    if trial.probes and slo != scenario.slo:
        return _capacity_under(trial, slo)
    return RunFigures(
        trial=trial,
        value=math.nan if trial.objective is None else trial.objective.value,
        throughput_rps=measurement.throughput_rps,
        throughput_rows_per_s=measurement.throughput_rows_per_s,
        latency_s=measurement.latency_s,
        error_ratio=measurement.error_ratio,
    )


def _capacity_under(trial: Trial, slo: SloSpec) -> RunFigures:
    """The highest rate tried that meets this SLO; else the lowest rate tried, and by how much it misses."""
    by_rate = sorted(trial.probes, key=lambda probe: probe.rate_rps)
    chosen = by_rate[0]
    for probe in by_rate:
        missed = violations(
            probe.latency_s, probe.error_ratio, limits=slo.limits(), error_limit=slo.error_ratio
        )
        if not is_feasible(missed):
            break
        chosen = probe
    measured = trial.measurement
    answered = measured is not None and measured.throughput_rps.value > 0.0
    rows = (
        measured.throughput_rows_per_s.value / measured.throughput_rps.value if measured and answered else 1.0
    )
    return RunFigures(
        trial=trial,
        value=chosen.rate_rps,
        throughput_rps=_exactly(chosen.rate_rps),
        throughput_rows_per_s=_exactly(chosen.rate_rps * rows),
        latency_s={name: _exactly(value) for name, value in chosen.latency_s.items()},
        error_ratio=chosen.error_ratio,
    )


def _exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def _pooled(runs: list[RunFigures], *, failures: int, slo: SloSpec, scenario: Scenario) -> Pooled:
    confirmed = [run for run in runs if run.trial.source == "confirm"]
    searched = [run for run in runs if run.trial.source != "confirm"]
    if scenario.objective == "capacity" and rungs_of((run.trial for run in runs), slo):
        return _capacity(searched, confirmed, failures=failures, slo=slo)
    return _alike(searched, confirmed, failures=failures, slo=slo)


def _capacity(
    searched: list[RunFigures], confirmed: list[RunFigures], *, failures: int, slo: SloSpec
) -> Pooled:
    """What all rates tried say together, fresh runs first; the figures are those of the runs at the rate claimed."""
    runs = [*searched, *confirmed]
    claim = claim_of(rungs_of((run.trial for run in runs), slo))
    shown, fresh = _shown(claim, searched, confirmed)
    pooled = _alike(shown, fresh, failures=failures, slo=slo)
    constraints = dict(pooled.constraints)
    if claim.rps > 0.0:
        constraints = {name: min(missed, 0.0) for name, missed in constraints.items()}
    elif claim.located is not None and is_feasible(constraints):
        # It held in a run that fresh runs refute, and nowhere below them.
        constraints[next(iter(constraints))] = math.expm1(policy.ERRORS_LEAST_MARGIN)
    located = locate(rungs_of((run.trial for run in searched), slo))
    held_rps = claim.rps if located is None else located.claim_rps
    return replace(
        pooled,
        value=claim.rps or claim.missed_rps,
        search_value=held_rps or claim.rps or claim.missed_rps,
        searched=tuple(searched),
        constraints=constraints,
        point=_point(runs),
        claim=claim,
    )


def _shown(
    claim: Claim, searched: list[RunFigures], confirmed: list[RunFigures]
) -> tuple[list[RunFigures], list[RunFigures]]:
    """The runs whose figures stand for the claim: of the search, and fresh."""
    if claim.established:
        return [], [run for run in confirmed if _at(run, claim.rps)]
    if claim.held is not None:
        return [run for run in (*searched, *confirmed) if run.trial.number == claim.held.trial], []
    return (searched, []) if searched else ([], confirmed)


def _at(run: RunFigures, rate_rps: float) -> bool:
    asked = asked_rps(run.trial)
    return asked is not None and math.isclose(asked, rate_rps, rel_tol=SAME_RATE)


def _alike(searched: list[RunFigures], confirmed: list[RunFigures], *, failures: int, slo: SloSpec) -> Pooled:
    used = confirmed or searched
    names = dict.fromkeys(name for run in used for name in run.latency_s)
    latency_s = {name: geometric_mean(_value(run, name) for run in used) for name in names}
    error_ratio = sum(run.error_ratio for run in used) / len(used)
    constraints = violations(latency_s, error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)
    runs = [*searched, *confirmed]
    return Pooled(
        configuration=runs[0].trial.configuration,
        runs=tuple(used),
        confirmations=len(confirmed),
        failures=failures,
        value=geometric_mean(run.value for run in used),
        searched=tuple(searched),
        search_value=geometric_mean(run.value for run in searched or used),
        latency_s=latency_s,
        constraints=constraints,
        point=_point(runs),
    )


def _point(runs: Sequence[RunFigures]) -> dict[str, Any] | None:
    return next((run.trial.point for run in runs if run.trial.point is not None), None)


def _value(run: RunFigures, quantile: str) -> float:
    return run.latency_s[quantile].value if quantile in run.latency_s else math.nan
