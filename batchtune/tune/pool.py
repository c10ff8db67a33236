"""What do all runs of one configuration say together, and which configuration leads?

One figure per configuration, from its confirmation runs when it has any: the best of many noisy search values is
too good to be true (the winner's curse), fresh runs are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.batching import DEFAULT_BATCH_TIMEOUT_MICROS, DEFAULT_MAX_BATCH_SIZE, Configuration
from batchtune.measure.quantiles import Estimate
from batchtune.measure.slo import primary_limit
from batchtune.scenario.spec import Scenario, SloSpec
from batchtune.tune.noise import LATENCY_PRIOR_SD, THROUGHPUT_PRIOR_SD, Noise, geometric_mean, spread
from batchtune.tune.trial import Trial, is_feasible, violations

INDIFFERENCE = 0.05
"""Objectives closer than this are never told apart; nor are those closer than the noise, if that is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What one run says under the SLO in question; `value` is the objective's, NaN when undefined.

    `holds_limit`: the search for a capacity found that the watched limit holds there, whatever the quantile of that
    probe's few requests.
    """

    trial: Trial
    value: float
    throughput_rps: Estimate
    throughput_rows_per_s: Estimate
    latency_s: Mapping[str, Estimate]
    error_ratio: float
    holds_limit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """One configuration: `value` is the geometric mean of the objective over `runs`, NaN when undefined.

    `runs` are those behind the figures: confirmation runs when there are any, else those of the search. `latency_s`
    are geometric means of each quantile. A configuration with `failures`, runs in which the server refused, died or
    answered nothing, is not feasible whatever its other runs show.
    """

    configuration: Configuration
    runs: tuple[RunFigures, ...]
    confirmations: int
    failures: int
    value: float
    latency_s: dict[str, float]
    constraints: dict[str, float]
    point: dict[str, Any] | None

    @property
    def feasible(self) -> bool:
        return self.failures == 0 and math.isfinite(self.value) and is_feasible(self.constraints)

    @property
    def violation(self) -> float:
        """The worst relative violation; at most 0 when feasible."""
        return max(self.constraints.values())


def pool(trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None) -> list[Pooled]:
    """One entry per configuration measured, in order of first appearance; probes and failures are left out.

    With another `slo` than the scenario's the constraints are computed anew from the measurements, and a capacity is
    read from the rates tried (a lower bound: rates between them were not).
    """
    limits = slo or scenario.slo
    by_configuration: dict[Configuration, list[RunFigures]] = {}
    for trial in trials:
        run = _run_of(trial, scenario=scenario, slo=limits)
        if run is not None:
            by_configuration.setdefault(trial.configuration, []).append(run)
    failed = Counter(trial.configuration for trial in trials if trial.state == "failed")
    return [_pooled(runs, failures=failed[key], slo=limits) for key, runs in by_configuration.items()]


def run_noise(pooled: Sequence[Pooled], *, scenario: Scenario) -> Noise:
    """The between-run noise of the objective over the repeats of all configurations."""
    prior_sd = LATENCY_PRIOR_SD if scenario.objective == "latency" else THROUGHPUT_PRIOR_SD
    return spread([[run.value for run in one.runs] for one in pooled], prior_sd=prior_sd)


def leaders(pooled: Sequence[Pooled], *, scenario: Scenario) -> list[Pooled]:
    """The feasible configurations, the one to recommend first.

    Those whose objectives cannot be told apart from the best are ordered: confirmed ones, then by robustness: larger
    SLO margin, smaller batch, shorter timeout, fewer threads. The rest follow by objective. Where some are confirmed,
    the others are discounted by the optimism to be expected of the best of k noisy values, sd·√(2 ln k).
    """
    feasible = [one for one in pooled if one.feasible]
    if not feasible:
        return []
    noise = run_noise(pooled, scenario=scenario)
    discount = noise.sd * math.sqrt(2.0 * math.log(len(feasible)))
    anything_confirmed = any(one.confirmations for one in feasible)

    def score(one: Pooled) -> float:
        curse = discount if anything_confirmed and not one.confirmations else 0.0
        return _higher_is_better(one.value, scenario) - curse

    best = max(score(one) for one in feasible)
    tie = min(INDIFFERENCE, math.sqrt(2.0) * noise.sd)
    tied = sorted(
        (one for one in feasible if score(one) >= best - tie),
        key=lambda one: (one.confirmations == 0, _fragility(one)),
    )
    rest = sorted((one for one in feasible if score(one) < best - tie), key=score, reverse=True)
    return [*tied, *rest]


def indistinct(leader: Pooled, other: Pooled, *, pooled: Sequence[Pooled], scenario: Scenario) -> bool:
    """Whether the two objectives lie within two standard deviations of their difference."""
    noise = run_noise(pooled, scenario=scenario)
    gap = abs(_higher_is_better(leader.value, scenario) - _higher_is_better(other.value, scenario))
    return gap <= 2.0 * math.sqrt(2.0) * noise.sd


def simplicity(configuration: Configuration) -> tuple[float, float, float]:
    """Sorts the simpler first: no batching, then smaller batches, shorter timeouts, fewer threads."""
    batching = configuration.batching
    if batching is None:
        return (0.0, 0.0, 0.0)
    size, timeout = batching.max_batch_size, batching.batch_timeout_micros
    return (
        float(DEFAULT_MAX_BATCH_SIZE if size is None else size),
        float(DEFAULT_BATCH_TIMEOUT_MICROS if timeout is None else timeout),
        math.inf if batching.num_batch_threads is None else float(batching.num_batch_threads),
    )


def _fragility(one: Pooled) -> tuple[float, tuple[float, float, float]]:
    """Margins within a tenth (in logs) count as equal; without an SLO on latency a smaller p95 is the margin."""
    missed = [value for name, value in one.constraints.items() if name != "errors"]
    p95 = one.latency_s.get("p95", math.nan)
    ratio = 1.0 + max(missed) if missed else p95
    usable = math.isfinite(ratio) and ratio > 0
    return (round(math.log(ratio) / 0.1) if usable else math.inf, simplicity(one.configuration))


def _higher_is_better(value: float, scenario: Scenario) -> float:
    """The logarithm of the objective, turned so that more is better; -inf for what is not positive."""
    if value <= 0.0:
        return -math.inf
    return -math.log(value) if scenario.objective == "latency" else math.log(value)


def _run_of(trial: Trial, *, scenario: Scenario, slo: SloSpec) -> RunFigures | None:
    measurement = trial.measurement
    if trial.state != "complete" or trial.source == "probe" or measurement is None:
        return None
    if trial.probes and slo != scenario.slo:
        rows_per_request = measurement.throughput_rows_per_s.value / measurement.throughput_rps.value
        return _capacity_under(trial, slo, rows_per_request=rows_per_request)
    return RunFigures(
        trial=trial,
        value=math.nan if trial.objective is None else trial.objective.value,
        throughput_rps=measurement.throughput_rps,
        throughput_rows_per_s=measurement.throughput_rows_per_s,
        latency_s=measurement.latency_s,
        error_ratio=measurement.error_ratio,
        holds_limit=bool(trial.probes) and trial.objective is not None,
    )


def _capacity_under(trial: Trial, slo: SloSpec, *, rows_per_request: float) -> RunFigures:
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
    return RunFigures(
        trial=trial,
        value=chosen.rate_rps,
        throughput_rps=_exactly(chosen.rate_rps),
        throughput_rows_per_s=_exactly(chosen.rate_rps * rows_per_request),
        latency_s={name: _exactly(value) for name, value in chosen.latency_s.items()},
        error_ratio=chosen.error_ratio,
    )


def _exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def _pooled(runs: list[RunFigures], *, failures: int, slo: SloSpec) -> Pooled:
    confirmed = [run for run in runs if run.trial.source == "confirm"]
    used = confirmed or runs
    names = dict.fromkeys(name for run in used for name in run.latency_s)
    latency_s = {name: geometric_mean(_value(run, name) for run in used) for name in names}
    error_ratio = sum(run.error_ratio for run in used) / len(used)
    constraints = violations(latency_s, error_ratio, limits=slo.limits(), error_limit=slo.error_ratio)
    watched = primary_limit(slo)
    if watched is not None and all(run.holds_limit for run in used):
        constraints[watched.name] = min(constraints[watched.name], 0.0)
    return Pooled(
        configuration=runs[0].trial.configuration,
        runs=tuple(used),
        confirmations=len(confirmed),
        failures=failures,
        value=geometric_mean(run.value for run in used),
        latency_s=latency_s,
        constraints=constraints,
        point=next((run.trial.point for run in runs if run.trial.point is not None), None),
    )


def _value(run: RunFigures, quantile: str) -> float:
    return run.latency_s[quantile].value if quantile in run.latency_s else math.nan
