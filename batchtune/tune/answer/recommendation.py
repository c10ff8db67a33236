"""Which configuration to deploy, what its runs gave, what it was compared with, and whether that is established.

Every figure is of runs that were made: a capacity is the highest rate held and the lowest missed, anything else the
median and the range of the runs behind it. Nothing is stated that no run says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchtune.batching.parameters import Configuration
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, check_version, coded, fields_to_plain, from_plain, to_plain
from batchtune.scenario.spec.check import SloSpec, limit_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import BACK, UNCONFIRMED, Bracket, crossing_rps, runs_of
from batchtune.tune.search.capacity import LOOP_SHARE
from batchtune.tune.trials.space import Space
from batchtune.tune.trials.trial import SearchSummary, Trial, without_superseded
from batchtune.units import percentage

SCHEMA_VERSION = 3
"""Of recommendation.json; an older one is made anew from the trials."""

Helps = Literal["yes", "no", "not distinguishable"]

Question = Literal["no_run", "unconfirmed", "wide", "rivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another configuration that keeps the SLO, on the Pareto front of throughput and p95, relative to the recommended
    one.

    `trade` reads as `12 % less throughput buys 30 % lower p95`.
    """

    configuration: Configuration
    throughput_rps: float
    p95_s: float
    throughput_ratio: float
    p95_ratio: float
    confirmations: int

    @property
    def trade(self) -> Coded:
        """What the alternative gives up against the recommended one, and for what."""
        throughput, p95 = self.throughput_ratio - 1.0, self.p95_ratio - 1.0
        same_ratio = 0.005  # Ratios closer to 1 than this round to the same per cent.
        more = coded("more_throughput" if throughput > 0 else "less_throughput", change_ratio=abs(throughput))
        slower = coded("higher_p95" if p95 > 0 else "lower_p95", change_ratio=abs(p95))
        if abs(throughput) < same_ratio:
            return coded("at_same_throughput", change=slower)
        if abs(p95) < same_ratio:
            return coded("at_same_p95", change=more)
        if throughput > 0 and p95 < 0:
            return coded("both", one=more, other=slower)
        price, gained = (more, slower) if throughput < 0 else (slower, more)
        return coded("buys", price=price, gained=gained)

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_plain(self), "trade": to_plain(self.trade)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest rate that held the SLO, in requests/s, and the lowest that missed it (None: none did).

    `held`, `missed`: fresh runs at that rate or above it, and at that rate or below it. `confirmed`: three fresh runs
    held it, and three times as many as missed it; else the search alone did, and less is stated than it held.
    `by_loops`: no run at a rate held, closed loops alone did: a share of what they answered. `is_bound`: no run missed
    at just `missed_rps`; by what a full load answered, and by how far runs differ, it holds no more. `crossing_rps`: of
    streams, between the two, where the latencies of its runs cross the nearest limit.
    """

    held_rps: float
    missed_rps: float | None
    held: int
    missed: int
    confirmed: bool
    by_loops: bool = False
    is_bound: bool = False
    crossing_rps: float | None = None

    @property
    def likely_rps(self) -> float:
        return self.held_rps if self.crossing_rps is None else self.crossing_rps


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A configuration that was tried, beside the recommended one.

    `names`: who named it ("present", "no_batching", "defaults", "rule", "guide", …). Estimates are median and range of
    `runs` runs, of which `fresh` were made after the choice; of a capacity those at the rate held. `behind` are the
    numbers of their trials. `gain` is that of the recommended configuration over this one, as a ratio of brackets;
    `high` inf: this one never held. `open`: it may still be better. `outside`: it lies outside the space that the
    user wrote, and is no candidate.
    """

    names: tuple[str, ...]
    configuration: Configuration
    throughput_rps: Estimate | None
    latency_s: dict[str, Estimate]
    runs: int
    fresh: int
    keeps: bool
    open: bool = False
    outside: bool = False
    capacity: Capacity | None = None
    gain: Estimate | None = None
    mean_batch_rows: float | None = None
    bottleneck: Bottleneck | None = None
    behind: tuple[int, ...] = ()
    caveats: tuple[Coded, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A limit of the SLO, and what the runs behind the answer did: the median and the worst of them, and how many kept
    it."""

    name: str
    limit_s: float
    value_s: float
    worst_s: float
    kept: int
    runs: int

    @property
    def spare_ratio(self) -> float:
        """How far the worst run stays below the limit, as a share of the limit; negative: it missed."""
        return 1.0 - self.worst_s / self.limit_s

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_plain(self), "spare_ratio": to_plain(self.spare_ratio)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What was best for one of several models by itself, of `tried` configurations: the rate that it held, or the
    largest share of a limit that it took at the stated one."""

    configuration: Configuration
    rate_rps: float
    of_limit: float | None
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """What one of several models gets beside the others; its promises stand among all. `alone` None: not searched."""

    name: str
    stated_rps: float
    rate_rps: float
    alone: Alone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestion:
    """What keeps an answer from being established.

    `no_run`: no run at one rate held, closed loops alone. `unconfirmed`: `held` fresh runs held and `missed` missed.
    `wide`: the bracket ends at `high` (None: nowhere) times what is stated. `rivals`: these `labels` may be better by
    more than a tenth, the first by up to `high` (None: without bound).
    """

    code: Question
    held: int = 0
    missed: int = 0
    high: float | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer. As JSON every field stands under its own name, estimates as `{value, low, high}`.

    `configuration`, `names`, `objective`: what to deploy, who named it, and what was asked to be best.
    `capacity`: for that objective; `capacity_rps` is the same as an estimate, from the rate held to the rate missed; of
    streams its value is where the limit is crossed.
    `throughput_rps`, `throughput_rows_per_s`, `latency_s` (by quantile): median and range of the `runs` behind them, in
    seconds and per second; `behind` are the numbers of their trials. `interval` "prediction": there are five or more,
    and the ends hold 95 % of further runs.
    `slo`: the limits by quantile, and the share of requests that may fail as "errors". `promises`: what became of them.
    `references`: what runs now ("present"), no batching, the server's defaults, as far as they were tried; `contenders`
    everything else that was. `failed_references`: why one has no figures.
    `batching_gain`: of the best configuration with batching over none, at equal instances. `batching_helps`, `reason`,
    `cannot_pay`: whether it does, why, and the finding that no batch can pay.
    `level_with`: the simplest reference that does as well, as far as was measured; None: it is better than all.
    `established`; else `open_questions`. `may_find_more`: untried neighbours are left.
    `rule`: the throughput × interval rule's arithmetic. `bottleneck`: what limits it now, by those runs.
    `trials`, `seconds`: all that were run. `confirmations`: fresh runs behind the figures; 0: those of the search.
    `rate_rps`, `concurrency`, `rows_per_request`: the load. `alternatives`: trades of throughput against p95.
    `caveats`: reasons for distrust of these figures. `notes`: what qualifies the answer. `drops`: what runs now and is
    neither kept nor was searched, as `name value`. `ignored`: why the server seems to ignore its parameters: "batches"
    are larger than allowed, "answers" are as many whatever the size.
    `models`: of several, what each gets. A rate is then of all of them together, in the mix that their stated rates
    are, and the limits and latencies of each are named `MODEL:p95`.
    """

    configuration: Configuration
    names: tuple[str, ...]
    objective: str
    throughput_rps: Estimate
    throughput_rows_per_s: Estimate
    latency_s: dict[str, Estimate]
    slo: dict[str, float]
    batching_helps: Helps
    reason: Coded
    trials: int
    seconds: float
    runs: int
    confirmations: int
    rate_rps: float | None
    concurrency: int | None
    rows_per_request: int
    interval: Literal["range", "prediction"] = "range"
    established: bool = False
    open_questions: tuple[OpenQuestion, ...] = ()
    may_find_more: bool = False
    level_with: str | None = None
    capacity: Capacity | None = None
    capacity_rps: Estimate | None = None
    batching_gain: Estimate | None = None
    mean_batch_rows: float | None = None
    promises: tuple[Promise, ...] = ()
    cannot_pay: Coded | None = None
    rule: Coded | None = None
    bottleneck: Bottleneck | None = None
    search: SearchSummary | None = None
    references: tuple[Compared, ...] = ()
    contenders: tuple[Compared, ...] = ()
    behind: tuple[int, ...] = ()
    failed_references: Mapping[str, str] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    caveats: tuple[Coded, ...] = ()
    notes: tuple[Coded, ...] = field(default=())
    drops: tuple[str, ...] = ()
    ignored: Literal["batches", "answers"] | None = None
    models: tuple[ModelResult, ...] = ()

    @property
    def of_limit(self) -> Estimate:
        """The share of its limit that the tightest latency takes."""
        return tightest(self.latency_s, self.slo)

    @property
    def scale(self) -> float:
        """Of several models, the factor on the stated rates that was held."""
        return self.models[0].rate_rps / self.models[0].stated_rps if self.models else 1.0

    @property
    def gains(self) -> dict[str, Estimate | None]:
        """Gain over each reference, by the reference's name."""
        return {reference.name: reference.gain for reference in self.references}

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, safe for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "label": self.configuration.label(),
            **fields_to_plain(self),
            "gain_over_present": to_plain(self.gains.get("present")),
            "gain_over_no_batching": to_plain(self.gains.get("no_batching")),
            "gain_over_defaults": to_plain(self.gains.get("defaults")),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recommendation:
        """Make a recommendation from what `to_dict` returns.

        Raises:
            ValueError: another schema version.
            KeyError, TypeError: not a recommendation.
        """
        check_version(values, SCHEMA_VERSION)
        return from_plain(cls, values)


def tightest(latency_s: Mapping[str, Estimate], slo: Mapping[str, float]) -> Estimate:
    """Return the latency that takes the largest share of its limit."""
    shares = [(latency_s[name], limit) for name, limit in slo.items() if name in latency_s]
    return Estimate(
        value=max((latency.value / limit for latency, limit in shares), default=math.nan),
        low=max((latency.low / limit for latency, limit in shares), default=math.nan),
        high=max((latency.high / limit for latency, limit in shares), default=math.nan),
    )


def range_of(values: Sequence[float]) -> Estimate:
    """Return median, least and most of these values; of five or more the ends of a 95 % prediction interval, on a log
    scale.

    Source of the interval: mean ± t(n-1) · s · sqrt(1 + 1/n) of the logarithms.
    """
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    middle = len(known) // 2
    median = known[middle] if len(known) % 2 else 0.5 * (known[middle - 1] + known[middle])
    if len(known) < PREDICTION_RUNS or not (known[0] > 0.0 and math.isfinite(known[-1])):
        return Estimate(value=median, low=known[0], high=known[-1])
    from scipy.special import stdtrit

    logs = [math.log(value) for value in known]
    mean = math.fsum(logs) / len(logs)
    sd = math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1))
    half = float(stdtrit(len(logs) - 1, 0.975)) * sd * math.sqrt(1.0 + 1.0 / len(logs))
    return Estimate(
        value=median, low=min(math.exp(mean - half), median), high=max(math.exp(mean + half), median)
    )


PREDICTION_RUNS = 5
"""Fresh runs from which a prediction interval is stated."""


def limit_text(limits: Mapping[str, float], error_ratio: float) -> str:
    """Write the limits of an SLO: `p95 ≤ 20 ms, errors ≤ 1 %`."""
    wanted = [limit_words(name, limit) for name, limit in limits.items()]
    return ", ".join([*wanted, f"errors ≤ {percentage(error_ratio)}"])


# The capacity of a configuration under an SLO, from the ledger alone.
#
# Every command reads it here: what is recommended, planned or simulated cannot differ. A looser SLO never gives less.


def capacity_of(
    configuration: Configuration, trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None
) -> Capacity | None:
    """Compute the capacity of a configuration from all of its trials, for the scenario's SLO or another one; None: no
    run of it says anything.

    None: no run of it says anything.
    """
    space = Space(scenario)
    asked = space.filled(configuration)
    own = (
        trial
        for trial in without_superseded(trials)
        if space.filled(trial.configuration) == asked and not _is_foreign(trial)
    )
    judged_by = slo or scenario.slo
    return stated_capacity(Bracket(tuple(runs_of(own, judged_by, scenario))), judged_by.stream_limits())


def stated_capacity(bracket: Bracket, stream_limits_s: Mapping[str, float]) -> Capacity | None:
    """Return the rate that is stated as held, and the lowest that was missed, requests/s; held 0: only misses are
    known."""
    held_rps, missed_rps = bracket.stated_rps, bracket.stated_missed_rps
    by_loops = not held_rps and bracket.loop_rps > 0.0
    if not held_rps:
        # What closed loops kept is believed as far as no open loop missed: where one held instead, no less is stated.
        missed = (run.rate_rps or 0.0 for run in bracket.open_runs)
        # Multiplied in the order in which a bracket does it: else a looser SLO gives less by a rounding.
        held_rps = min(LOOP_SHARE * bracket.loop_rps, UNCONFIRMED * (BACK * min(missed, default=math.inf)))
        missed_rps = max(bracket.missed_rps, held_rps)
    if not held_rps and not math.isfinite(missed_rps):
        return None
    crossing = crossing_rps(bracket, stream_limits_s) if bracket.stated_rps else None
    return Capacity(
        crossing_rps=None if crossing is None else min(max(crossing, held_rps), missed_rps),
        held_rps=held_rps,
        missed_rps=missed_rps if math.isfinite(missed_rps) else None,
        held=bracket.held(held_rps, fresh=True),
        missed=bracket.missed(held_rps, fresh=True) if held_rps else len(bracket.open_runs),
        confirmed=0.0 < bracket.confirmed_rps == bracket.stated_rps,
        by_loops=by_loops,
        is_bound=not any(
            not run.held and math.isclose(run.rate_rps or 0.0, missed_rps, rel_tol=1e-3)
            for run in bracket.open_runs
        ),
    )


def _is_foreign(trial: Trial) -> bool:
    """Whether it says nothing of its configuration: a lone request, or a load that compares nodes."""
    return trial.source == "node" or (trial.source == "probe" and trial.request.concurrency == 1)
