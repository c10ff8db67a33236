"""What will a fresh run of a configuration show, will it keep the SLO, and how much better is it than another one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.measurement import Measurement
from batchtune.measure.statistics.distributions import Z_95
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import Caveat
from batchtune.plain_values import fields_to_plain, from_plain, to_plain
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.evidence.bottleneck_of import usual_bottleneck
from batchtune.tune.evidence.claimed_capacity import Claim
from batchtune.tune.evidence.host_drift import drift_of
from batchtune.tune.evidence.pooled import Pooled, RunFigures
from batchtune.tune.evidence.run_noise import Noise, paired_ratio, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a server gives without tuning; `name` is "no_batching" or "defaults". Intervals are for a fresh run.

    `capacity_rps`: the highest rate within the SLO, for that objective; None where none is claimed.
    """

    name: str
    configuration: Configuration
    throughput_rps: Estimate
    latency_s: dict[str, Estimate]
    runs: int
    capacity_rps: Estimate | None = None
    mean_batch_rows: float | None = None
    bottleneck: Bottleneck | None = None
    caveats: tuple[Caveat, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A latency limit of the SLO and what stands against it: the quantile and its upper bound for a fresh run.

    The bound is the upper end of a 95 % interval. `spare_ratio` is how far the bound stays below the limit, as a share
    of the limit; negative: a fresh run may miss it.
    """

    name: str
    limit_s: float
    value_s: float
    upper_bound_s: float

    @property
    def spare_ratio(self) -> float:
        return 1.0 - self.upper_bound_s / self.limit_s

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_plain(self), "spare_ratio": to_plain(self.spare_ratio)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Promise:
        return from_plain(cls, values)


def promises_of(latency_s: Mapping[str, Estimate], slo: SloSpec) -> tuple[Promise, ...]:
    """One for each limit of the SLO whose quantile was measured."""
    return tuple(
        Promise(name=name, limit_s=limit_s, value_s=latency_s[name].value, upper_bound_s=latency_s[name].high)
        for name, limit_s in slo.limits().items()
        if name in latency_s
    )


def reference_of(
    name: str,
    candidate: Pooled,
    pooled: Sequence[Pooled],
    *,
    beside: Pooled,
    ahead_sd: float,
    scenario: Scenario,
) -> Reference:
    """A reference point's figures as they are stated `beside` the recommended ones, on a host that drifts as it did."""
    measured, drift = measurements_of(candidate), drift_of(candidate, ahead_sd, scenario=scenario)
    return Reference(
        name=name,
        configuration=candidate.configuration,
        throughput_rps=predicted(candidate, pooled, lambda run: run.throughput_rps, drift_sd=drift.rate_sd),
        latency_s=predicted_latency(candidate, pooled, drift_sd=drift.latency_sd),
        runs=len(candidate.runs),
        capacity_rps=None
        if candidate.claim is None or not candidate.claim.rps > 0.0
        else predicted_capacity(
            replace(candidate, value=_compared_rps(candidate, candidate.claim, ours=beside)),
            drift_sd=drift.capacity_sd,
        ),
        mean_batch_rows=mean_batch_rows(measured),
        bottleneck=usual_bottleneck(candidate.configuration, measured, scenario=scenario),
        caveats=caveats_of(measured),
    )


def predicted(
    candidate: Pooled,
    pooled: Sequence[Pooled],
    figure: Callable[[RunFigures], Estimate],
    *,
    drift_sd: float = 0.0,
) -> Estimate:
    """A rate that a fresh run will show; `drift_sd`: of the rate, with the host (see `host_drift`)."""
    spreads = [[figure(run).value for run in other.repeats] for other in pooled]
    return predict(
        [figure(run) for run in candidate.runs],
        repeats=spreads,
        prior_sd=policy.FRESH_THROUGHPUT_PRIOR_SD,
        drift_sd=drift_sd,
    )


def predicted_latency(
    candidate: Pooled, pooled: Sequence[Pooled], *, drift_sd: float = 0.0
) -> dict[str, Estimate]:
    """Each latency quantile that a fresh run will show."""

    def figures(runs: Sequence[RunFigures], quantile: str) -> list[Estimate]:
        return [run.latency_s[quantile] for run in runs if quantile in run.latency_s]

    return {
        quantile: predict(
            figures(candidate.runs, quantile),
            repeats=[[run.value for run in figures(other.repeats, quantile)] for other in pooled],
            prior_sd=policy.FRESH_LATENCY_PRIOR_SD,
            drift_sd=drift_sd,
        )
        for quantile in candidate.latency_s
    }


def predicted_capacity(candidate: Pooled, *, drift_sd: float = 0.0) -> Estimate:
    """The capacity claimed, and a 95 % interval of where the limit is crossed, by all rates that were tried.

    Which rates were asked does not matter, but how near to the crossing they lie. Where the limit was kept easily and
    never missed the interval has no upper end, where nothing is known no ends at all. What fresh runs refuted bounds
    a claim that they do not establish.
    """
    located = None if candidate.claim is None else candidate.claim.located
    if candidate.claim is None or located is None:
        return Estimate(value=candidate.value, low=math.nan, high=math.nan)
    half = Z_95 * math.hypot(located.sd, policy.CROSSING_RUN_SD, drift_sd)
    low, high = located.crossing_rps * math.exp(-half), located.crossing_rps * math.exp(half)
    high = math.inf if located.says == "at least" else max(high, candidate.value)
    if not candidate.claim.established:
        high = min(high, candidate.claim.refuted_rps)
    return Estimate(value=candidate.value, low=min(low, candidate.value), high=high)


def gain_over(ours: Pooled, other: Pooled | None, *, noise: Noise, scenario: Scenario) -> Estimate | None:
    """How many times better our objective is; pairs from the same block, else search with search.

    Of a capacity the two claims; over one of which no rate held the gain is at least that over its lowest rate, an
    estimate without an upper end.
    """
    if other is None:
        return None
    if other.claim is not None and ours.claim is not None:
        return _capacity_gain(ours, other, noise=noise)
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


def _capacity_gain(ours: Pooled, other: Pooled, *, noise: Noise) -> Estimate | None:
    """By the values that are stated; None unless ours has a claim: what missed everywhere gains nothing."""
    if ours.claim is None or other.claim is None or not ours.feasible:
        return None
    if ours.configuration == other.configuration:
        return Estimate(value=1.0, low=1.0, high=1.0)
    theirs_rps = _compared_rps(other, other.claim, ours=ours)
    if not theirs_rps > 0.0:
        return None
    sds = [
        side.claim.located.sd
        for side in (ours, other)
        if side.claim is not None and side.claim.located is not None
    ]
    half = Z_95 * math.hypot(*sds, math.sqrt(2.0) * noise.sd)
    gain = ours.value / theirs_rps
    if not other.feasible:
        return Estimate(value=gain, low=gain * math.exp(-Z_95 * math.sqrt(2.0) * noise.sd), high=math.inf)
    return Estimate(value=gain, low=gain * math.exp(-half), high=gain * math.exp(half))


def _compared_rps(other: Pooled, claim: Claim, *, ours: Pooled) -> float:
    """What `other` claims, or the lowest rate that it missed.

    Unconfirmed it is discounted as ours is, or not where ours is confirmed: the gain over it is none too high.
    """
    theirs_rps = claim.rps or claim.missed_rps
    is_confirmed = ours.claim is not None and ours.claim.established
    return theirs_rps if is_confirmed else min(theirs_rps, other.value)


def measurements_of(candidate: Pooled) -> list[Measurement]:
    """Those behind its figures."""
    return [run.trial.measurement for run in candidate.runs if run.trial.measurement is not None]


def caveats_of(measured: Sequence[Measurement]) -> tuple[Caveat, ...]:
    """One of each code that any of the runs has, as the last of these has it."""
    return tuple({caveat.code: caveat for measurement in measured for caveat in measurement.caveats}.values())


def mean_batch_rows(measured: Sequence[Measurement]) -> float | None:
    """Over the runs whose server tells; None: none does."""
    batch_rows = [
        measurement.server.mean_batch_rows for measurement in measured if measurement.server is not None
    ]
    known = [rows for rows in batch_rows if rows is not None]
    return sum(known) / len(known) if known else None
