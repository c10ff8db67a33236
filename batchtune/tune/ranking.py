"""Which configuration leads, and which are too close to it to be told apart?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from batchtune.batching import DEFAULT_BATCH_TIMEOUT_MICROS, DEFAULT_MAX_BATCH_SIZE, Configuration
from batchtune.measure.distributions import Z_95
from batchtune.measure.quantiles import Estimate
from batchtune.scenario.spec import Scenario
from batchtune.tune.noise import spread
from batchtune.tune.pool import Pooled, RunFigures, run_noise

INDIFFERENCE = 0.05
"""Objectives closer than this may be called equal; whether they are depends on the noise measured."""


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
        return merit(one.value, scenario) - curse

    best = max(feasible, key=score)
    least = score(best) - _tie(best, feasible, scenario=scenario)
    tied = [one for one in feasible if score(one) >= least]
    rest = [one for one in feasible if score(one) < least]
    return [
        *sorted(tied, key=lambda one: (one.confirmations == 0, _fragility(one))),
        *sorted(rest, key=score, reverse=True),
    ]


def indistinct(one: Pooled, other: Pooled, *, pooled: Sequence[Pooled], scenario: Scenario) -> bool:
    """Whether the two objectives lie within two standard deviations of their difference, assumed noise included."""
    noise = run_noise(pooled, scenario=scenario)
    gap = abs(merit(one.value, scenario) - merit(other.value, scenario))
    return gap <= 2.0 * math.sqrt(2.0) * noise.sd


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


def _tie(best: Pooled, feasible: Sequence[Pooled], *, scenario: Scenario) -> float:
    """How far, in logs, a value may fall short of the best and still be called equal.

    One standard deviation of a difference by the noise that was measured (between repeats; before there are any,
    within the runs), not by the noise assumed: a better configuration is not given away to caution.
    """
    groups = [[run.value for run in one.runs] for one in feasible]
    measured = spread(groups, prior_sd=0.0, prior_degrees=0)
    if measured.degrees >= 2:
        sd = measured.sd
    else:
        sd = statistics.median(_within_sd(run, scenario) for one in feasible for run in one.runs)
    return min(INDIFFERENCE, math.sqrt(2.0 / max(best.confirmations, 1)) * sd)


def _within_sd(run: RunFigures, scenario: Scenario) -> float:
    """Standard deviation, in logs, that the run's own interval stands for; INDIFFERENCE where it has none."""
    shown: Estimate = run.latency_s["p95"] if scenario.objective == "latency" else run.throughput_rps
    if not (shown.low > 0.0 and math.isfinite(shown.high)):
        return INDIFFERENCE
    return 0.5 * math.log(shown.high / shown.low) / Z_95


def _fragility(one: Pooled) -> tuple[float, tuple[float, float, float]]:
    """Margins within a tenth (in logs) count as equal; without an SLO on latency a smaller p95 is the margin."""
    missed = [value for name, value in one.constraints.items() if name != "errors"]
    p95 = one.latency_s.get("p95", math.nan)
    ratio = 1.0 + max(missed) if missed else p95
    usable = math.isfinite(ratio) and ratio > 0
    return (round(math.log(ratio) / 0.1) if usable else math.inf, simplicity(one.configuration))
