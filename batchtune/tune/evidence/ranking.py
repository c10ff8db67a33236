"""Which configuration leads, and which are too close to it to be told apart?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from batchtune.batching.parameters import DEFAULT_BATCH_TIMEOUT_MICROS, DEFAULT_MAX_BATCH_SIZE, Configuration
from batchtune.measure.statistics.distributions import Z_95
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import Pooled, RunFigures, run_noise
from batchtune.tune.evidence.run_noise import spread


def leaders(pooled: Sequence[Pooled], *, scenario: Scenario) -> list[Pooled]:
    """The feasible configurations, the one to recommend first.

    Confirmed ones come before the others: the best of many search values is too good to be true, and the machine may
    have changed since. An unconfirmed one leads only if the search, like with like, put it ahead of all that are
    confirmed. Those whose objectives cannot be told apart from the best are ordered by robustness: larger SLO margin,
    smaller batch, shorter timeout, fewer threads; the rest by objective.
    """
    feasible = [candidate for candidate in pooled if candidate.feasible]
    confirmed = [candidate for candidate in feasible if candidate.confirmations]
    others = [candidate for candidate in feasible if not candidate.confirmations]
    if not confirmed:
        return simplest_first(others, scenario=scenario)
    bar = max(merit(candidate.search_value, scenario) for candidate in confirmed) + policy.INDIFFERENCE
    ahead = [candidate for candidate in others if merit(candidate.value, scenario) > bar]
    behind = [candidate for candidate in others if merit(candidate.value, scenario) <= bar]
    return [part for group in (ahead, confirmed, behind) for part in simplest_first(group, scenario=scenario)]


def indistinct(candidate: Pooled, other: Pooled, *, pooled: Sequence[Pooled], scenario: Scenario) -> bool:
    """Whether the two objectives lie within two standard deviations of their difference, assumed noise included.

    Fresh runs are compared with fresh runs, else search with search.
    """
    fresh = candidate.confirmations > 0 and other.confirmations > 0
    values = (candidate.value, other.value) if fresh else (candidate.search_value, other.search_value)
    noise = run_noise(pooled, scenario=scenario)
    return abs(merit(values[0], scenario) - merit(values[1], scenario)) <= 2.0 * math.sqrt(2.0) * noise.sd


def merit(value: float, scenario: Scenario) -> float:
    """The logarithm of the objective, turned so that more is better; -inf for what is not positive."""
    if not value > 0.0:
        return -math.inf
    return -math.log(value) if scenario.objective == "latency" else math.log(value)


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


def simplest_first(feasible: Sequence[Pooled], *, scenario: Scenario) -> list[Pooled]:
    """By objective, but of those that cannot be told from the best the most robust first.

    Of two that differ in the timeout alone the shorter one goes before the longer unless it costs AS_GOOD or more: a
    timeout tuned to a number of clients is paid in full when there is one less.
    """
    if not feasible:
        return []
    ranked = sorted(feasible, key=lambda candidate: merit(candidate.value, scenario), reverse=True)
    least = merit(ranked[0].value, scenario) - _tie(ranked[0], feasible, scenario=scenario)
    tied = [candidate for candidate in ranked if merit(candidate.value, scenario) >= least]
    ordered = [*sorted(tied, key=_fragility), *ranked[len(tied) :]]
    first = ordered[0]
    least = merit(first.value, scenario) - policy.AS_GOOD
    shorter = [
        candidate
        for candidate in ordered
        if _waits_less(candidate, first) and merit(candidate.value, scenario) >= least
    ]
    if not shorter:
        return ordered
    simplest = min(shorter, key=lambda candidate: simplicity(candidate.configuration))
    return [simplest, *(candidate for candidate in ordered if candidate is not simplest)]


def _waits_less(candidate: Pooled, other: Pooled) -> bool:
    mine, theirs = candidate.configuration.batching, other.configuration.batching
    if mine is None or theirs is None or candidate.confirmations < other.confirmations:
        return False
    alike = replace(mine, batch_timeout_micros=theirs.batch_timeout_micros) == theirs
    return alike and simplicity(candidate.configuration)[1] < simplicity(other.configuration)[1]


def _tie(best: Pooled, feasible: Sequence[Pooled], *, scenario: Scenario) -> float:
    """How far, in logs, a value may fall short of the best and still be called equal.

    One standard deviation of a difference by the noise that was measured (between repeats; before there are any,
    within the runs), not by the noise assumed: a better configuration is not given away to caution.
    """
    groups = [[run.value for run in candidate.runs] for candidate in feasible]
    measured = spread(groups, prior_sd=0.0, prior_degrees=0)
    if measured.degrees >= 2:
        sd = measured.sd
    else:
        sd = statistics.median(_within_sd(run, scenario) for candidate in feasible for run in candidate.runs)
    return min(policy.INDIFFERENCE, math.sqrt(2.0 / max(best.confirmations, 1)) * sd)


def _within_sd(run: RunFigures, scenario: Scenario) -> float:
    """Standard deviation, in logs, that the run's own interval stands for; INDIFFERENCE where it has none."""
    shown: Estimate = run.latency_s["p95"] if scenario.objective == "latency" else run.throughput_rps
    if not (shown.low > 0.0 and math.isfinite(shown.high)):
        return policy.INDIFFERENCE
    return 0.5 * math.log(shown.high / shown.low) / Z_95


def _fragility(candidate: Pooled) -> tuple[float, tuple[float, float, float]]:
    """Margins within a tenth (in logs) count as equal; without an SLO on latency a smaller p95 is the margin."""
    missed = [value for name, value in candidate.constraints.items() if name != "errors"]
    p95 = candidate.latency_s.get("p95", math.nan)
    ratio = 1.0 + max(missed) if missed else p95
    usable = math.isfinite(ratio) and ratio > 0
    return (round(math.log(ratio) / 0.1) if usable else math.inf, simplicity(candidate.configuration))
