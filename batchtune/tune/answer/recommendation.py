"""Defines the recommendation: which configuration to deploy, its figures, what it was compared with, how sure it is.

Every figure comes from runs: a capacity is the highest rate held and the lowest missed, any other figure the median and
the range of the runs behind it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchtune.batching.parameters import Configuration
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.quantiles import Estimate, t_quantile
from batchtune.plain_values import (
    Coded,
    check_version,
    coded,
    complement,
    fields_to_plain,
    from_plain,
    to_plain,
)
from batchtune.scenario.spec.check import SloSpec, limit_words
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import (
    BACK,
    LOOP_SHARE,
    PREDICTION_RUNS,
    UNCONFIRMED,
    Bracket,
    crossing_rps,
    exceeds,
    runs_of,
)
from batchtune.tune.search.contenders import Space
from batchtune.tune.trials.trial import SearchSummary, Trial, without_superseded
from batchtune.units import percentage

SCHEMA_VERSION = 4
"""Version of recommendation.json; a file of another version is computed again from the trials."""

Helps = Literal["yes", "no", "not distinguishable"]

Question = Literal["no_run", "unconfirmed", "unsteady", "wide", "rivals", "client_limited", "server_gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another configuration that keeps the SLO, with more throughput and a higher p95 than the recommended one, or less
    throughput and a lower p95.

    `throughput_ratio`, `p95_ratio`: its figure divided by the recommended one's. `confirmations`: number of its
    confirmation runs.
    """

    configuration: Configuration
    throughput_rps: float
    p95_s: float
    throughput_ratio: float
    p95_ratio: float
    confirmations: int

    @property
    def trade(self) -> Coded:
        """The finding on what the alternative costs and gains: `12 % less throughput buys 30 % lower p95`."""
        throughput, p95 = self.throughput_ratio - 1.0, self.p95_ratio - 1.0
        more = coded("more_throughput" if throughput > 0 else "less_throughput", change_ratio=abs(throughput))
        slower = coded("higher_p95" if p95 > 0 else "lower_p95", change_ratio=abs(p95))
        if not round(100.0 * throughput):
            return coded("at_same_throughput", change=slower)
        if not round(100.0 * p95):
            return coded("at_same_p95", change=more)
        if throughput > 0 and p95 < 0:
            return coded("both", one=more, other=slower)
        price, gained = (more, slower) if throughput < 0 else (slower, more)
        return coded("buys", price=price, gained=gained)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `trade` by name, as values that JSON takes."""
        return {**fields_to_plain(self), "trade": to_plain(self.trade)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The capacity of a configuration under an SLO; all rates are requests/s.

    `held_rps`, `missed_rps`: the highest rate stated as held, and the lowest missed (None: no rate counts as missed).
    `held`: number of confirmation runs that held `held_rps` or more. `missed`: number of confirmation runs that failed,
    or missed the lowest rate of those in `held` or a lower one; all, where `refuted_rps` is set; where `held_rps` is 0,
    of all runs at a rate.
    `missed_higher`: number of confirmation runs that missed only a higher rate. `fell_behind`: number of confirmation
    runs at rates that the server did not keep up with.
    `confirmed`: confirmation runs held `held_rps`; else runs of the search did, and `held_rps` is less than they held.
    `by_loops`: no run at a rate held, so that `held_rps` is a share of what closed loops answered.
    `is_bound`: no run missed at `missed_rps` itself; the rate follows from full batches and from how far runs differ.
    `crossing_rps`: for streams, the rate between `held_rps` and `missed_rps` at which a latency first reaches its
    limit; None: unknown.
    `doubtful_rps`: the lowest rate above `held_rps` that a run missed, if it is below `missed_rps`, so that it does not
    count as missed; else None.
    `search_rps`: the highest rate that runs held, if `held_rps` is a share of it; else None.
    `disputed_rps`: the lowest rate missed, if `held_rps` is a share of it, because no rate was held more often than
    missed; else None.
    `is_disputed_end`: a run held `missed_rps`, although others missed it.
    `refuted_rps`: where every confirmation run missed the SLO, the lowest of their rates, so that `held_rps` is a
    guess; else None. `least_met_rps`, `most_met_rps`: the lowest and the highest rate that a run met; None: none did.
    `lone_rps`: where no run at a rate held, what one client alone was answered within the SLO; None: no more than
    `held_rps`, or it did not run.
    """

    held_rps: float
    missed_rps: float | None
    held: int
    missed: int
    confirmed: bool
    by_loops: bool = False
    is_bound: bool = False
    crossing_rps: float | None = None
    search_rps: float | None = None
    doubtful_rps: float | None = None
    disputed_rps: float | None = None
    is_disputed_end: bool = False
    missed_higher: int = 0
    fell_behind: int = 0
    refuted_rps: float | None = None
    least_met_rps: float | None = None
    most_met_rps: float | None = None
    lone_rps: float | None = None

    @property
    def is_share(self) -> bool:
        """Whether `held_rps` was computed as a share of another rate, so that no run need have had `held_rps`
        itself."""
        return self.by_loops or self.search_rps is not None or self.disputed_rps is not None

    @property
    def is_guess(self) -> bool:
        """Whether no run shows `held_rps`: those that would missed the SLO, or none had a rate."""
        return self.by_loops or self.disputed_rps is not None or self.refuted_rps is not None

    @property
    def is_untried(self) -> bool:
        """Whether no run had a rate: only closed loops ran, and they missed the SLO."""
        return not self.held_rps and not self.missed

    @property
    def likely_rps(self) -> float:
        """Best single figure of the capacity, requests/s: the crossing rate if it is known, else the rate held."""
        return self.held_rps if self.crossing_rps is None else self.crossing_rps


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A configuration that was tried, compared with the recommended one.

    `names`: the sources that proposed it ("present", "no_batching", "defaults", "rule", "guide", …).
    `throughput_rps`, `latency_s` (quantile name -> seconds): median and range over `runs` runs, `fresh` of them
    confirmation runs; with objective capacity, runs at the rate held. `behind`: numbers of the trials of these runs.
    `keeps`: it keeps the SLO. `open`: it may be better than the recommended one. `outside`: the space that the user
    wrote excludes it. `capacity`: None with another objective.
    `gain`: the recommended configuration's figure divided by this one's; `high` inf: this one held no rate. None: it
    is not known, as where no rate was tried.
    `met`: how many of the `runs` met the SLO; None: an older answer, which does not say. `undecided`: it does not keep
    the SLO by its runs, but they do not suffice to say that it misses it.
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
    met: int | None = None
    undecided: bool = False

    @property
    def name(self) -> str:
        """The first source that proposed the configuration, such as `defaults`."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A limit of the SLO, and the recommended configuration's runs against it.

    `value_s`, `worst_s`: median and largest latency of the runs, seconds; `worst_s` is inf where a run failed. `kept`:
    how many of the `runs` kept the limit, and the rate. `missed_higher`: number of further confirmation runs, at higher
    rates than theirs, that missed one of them. `fell_behind`: in how many of both the limit was kept, but the server
    did not keep up with the rate.
    Of the limits named goodput and errors (listed only where it is the nearest), the fields in seconds are shares of
    requests: those that miss a limit, and those that fail. In JSON they are `limit_ratio`, `value_ratio` and
    `worst_ratio`, for goodput the share that meets every limit.
    """

    name: str
    limit_s: float
    value_s: float
    worst_s: float
    kept: int
    runs: int
    missed_higher: int = 0
    fell_behind: int = 0

    @property
    def spare_ratio(self) -> float:
        """1 - worst run / limit: how far the worst run stays below the limit; negative: it missed it."""
        return 1.0 - self.worst_s / self.limit_s

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `spare_ratio` by name, as values that JSON takes; for goodput and errors `…_s` is
        called `…_ratio`."""
        plain = fields_to_plain(self)
        if self.name in ("goodput", "errors"):
            for field_name in ("limit", "value", "worst"):
                share = getattr(self, f"{field_name}_s")
                plain[f"{field_name}_ratio"] = to_plain(share if self.name == "errors" else complement(share))
                del plain[f"{field_name}_s"]
        return {**plain, "spare_ratio": to_plain(self.spare_ratio)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Promise:
        """Make a promise from what `to_dict` returns.

        Raises:
            KeyError, TypeError: not a promise.
        """
        if "limit_ratio" in values:
            names = ("limit", "value", "worst")
            shares = {f"{name}_s": values[f"{name}_ratio"] for name in names}
            if values["name"] != "errors":
                shares = {name: complement(share) for name, share in shares.items()}
            values = {**values, **shares}
        return from_plain(cls, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The best of `tried` configurations of one of several models while no other model was loaded.

    `rate_rps`: with objective capacity the highest rate held, else the scenario's rate. `of_limit`: the largest latency
    divided by its limit at that rate; None with objective capacity.
    """

    configuration: Configuration
    rate_rps: float
    of_limit: float | None
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """The rate of one of several models while the others are loaded too, requests/s: `stated_rps` in the scenario,
    `rate_rps` with the recommended configuration. `alone`: its result by itself; None: it was not searched by
    itself."""

    name: str
    stated_rps: float
    rate_rps: float
    alone: Alone | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestion:
    """A reason why an answer is not established, by its `code`.

    `no_run`: no run at one rate held, only closed loops did.
    `unconfirmed`: `held` confirmation runs held the stated rate and `missed` missed it, which is not enough.
    `unsteady`: the best confirmation run is `high` times the worst, and more than a quarter lie far below the middle.
    `wide`: the rate missed is `high` times the stated one (None: no rate was missed).
    `rivals`: the configurations `labels` may be better by a factor of more than OPEN, the first up to `high` times
    (None: without bound).
    `client_limited`: the load generator was the limit of a closed loop, so that the figures are its own.
    `server_gone`: the server ended during the sweep.
    """

    code: Question
    held: int = 0
    missed: int = 0
    high: float | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer of a sweep. In JSON every field has its own name, estimates are `{value, low, high}`.

    `configuration`, `names`, `objective`: what to deploy, the sources that proposed it, and by what it is the best.
    `throughput_rps`, `throughput_rows_per_s`, `latency_s` (quantile name -> seconds): median with an interval over
    `runs` runs, `confirmations` of them confirmation runs; `behind`: numbers of the trials of these runs. `interval`:
    "range" of the runs; "prediction" where it is established, from five runs on: the interval contains 95 % of further
    runs.
    `capacity`: with objective capacity, else None.
    `slo`: quantile name -> limit in seconds, and "errors" -> the share of requests that may fail, "goodput" -> the
    share that may miss a limit (in JSON `goodput_ratio`, the share that has to meet every limit). `promises`: each
    limit with the runs against it.
    `references`: what runs now ("present"), no batching, the server's defaults, as far as they have figures.
    `defaults`: parameter -> value of the server's defaults, where these are among them and known. `failed_references`:
    name -> error text of those that failed. `contenders`: all other configurations that have figures.
    `batching_helps`, `reason`: whether batching helps, and why. `batching_gain`: the best configuration with batching
    divided by the one without that has as many model instances. `cannot_pay`: the finding that no batch can pay; None:
    not found.
    `level_with`: the simplest reference that may be as good; None: the answer is better than all.
    `established`: `open_questions`, the reasons to doubt the answer, is empty. `may_find_more`: neighbours of the
    answer are untried.
    `rule`: how the throughput × interval rule computes its batch size. `bottleneck`: what limits these runs.
    `trials`, `seconds`: number of the sweep's trials and the time that they took. `search`: the sweep's summary.
    `rate_rps`, `concurrency`, `rows_per_request`: the load of the runs that the figures come from.
    `alternatives`: configurations that trade throughput against p95. `mean_batch_rows`: None: not counted.
    `caveats`: of the runs. `notes`: what qualifies the answer. `drops`: parameters that the running server has and the
    answer does not, as `name value`. `ignored`: why the server seems to ignore its parameters: "batches" are larger
    than allowed, or "answers" are as many whatever the batch size.
    `models`: with several models the result of each. Rates are then the sum over all, shared out in proportion to their
    stated rates, and limits and latencies are named `MODEL:p95`.
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
    batching_gain: Estimate | None = None
    mean_batch_rows: float | None = None
    promises: tuple[Promise, ...] = ()
    cannot_pay: Coded | None = None
    rule: Coded | None = None
    bottleneck: Bottleneck | None = None
    search: SearchSummary | None = None
    references: tuple[Compared, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
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
    def capacity_rps(self) -> Estimate | None:
        """The capacity, requests/s: `low` the rate held, `high` the rate missed (NaN: none was), `value` the rate held
        or, for streams, the crossing rate. None with another objective."""
        if self.capacity is None:
            return None
        held_rps, missed_rps = self.capacity.held_rps, self.capacity.missed_rps
        return Estimate(value=self.capacity.likely_rps, low=held_rps, high=missed_rps or math.nan)

    @property
    def of_limit(self) -> Estimate:
        """Largest ratio latency / limit over all limits, with its interval (`tightest`); NaN without limits."""
        return tightest(self.latency_s, self.slo)

    @property
    def lost_server(self) -> bool:
        """Whether the server ended during the sweep; the user should find out why before deploying anything."""
        return any(question.code == "server_gone" for question in self.open_questions)

    @property
    def scale(self) -> float:
        """With several models, the factor on their stated rates that was held; 1 with one model."""
        return self.models[0].rate_rps / self.models[0].stated_rps if self.models else 1.0

    @property
    def gains(self) -> dict[str, Estimate | None]:
        """Name of each reference, such as `no_batching`, -> the recommended configuration's figure divided by the
        reference's; None: unknown."""
        return {reference.name: reference.gain for reference in self.references}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as values that JSON takes, with `schema_version`, `label`, `capacity_rps` and the
        gains over the references."""
        plain = fields_to_plain(self)
        if "goodput" in plain["slo"]:
            plain["slo"]["goodput_ratio"] = complement(plain["slo"].pop("goodput"))
        capacity_rps = to_plain(self.capacity_rps)
        if capacity_rps is not None and capacity_rps["high"] == "nan":
            capacity_rps["high"] = None
        return {
            "schema_version": SCHEMA_VERSION,
            "label": self.configuration.label(),
            **plain,
            "capacity_rps": capacity_rps,
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
        slo = dict(values["slo"])
        if "goodput_ratio" in slo:
            slo["goodput"] = complement(slo.pop("goodput_ratio"))
        return from_plain(cls, {**values, "slo": slo})


def tightest(latency_s: Mapping[str, Estimate], slo: Mapping[str, float]) -> Estimate:
    """Return the largest ratio latency / limit; value, low and high are each the maximum over all latencies that have a
    limit.

    `latency_s`, `slo`: quantile name -> seconds. NaN: no latency has a limit.
    """
    known = [(latency_s[name], limit) for name, limit in slo.items() if name in latency_s]
    ratios = [(own.value / limit, own.low / limit, own.high / limit) for own, limit in known]
    value, low, high = map(max, zip(*ratios, strict=True)) if ratios else (math.nan, math.nan, math.nan)
    return Estimate(value=value, low=low, high=high)


def range_of(values: Iterable[float], is_predicted: bool = False) -> Estimate:
    """Return the median of `values` with their range; with `is_predicted` and PREDICTION_RUNS values or more, all
    positive and finite, with a 95 % prediction interval for a further run. NaN values are left out; all three are NaN
    if no value remains.

    Interval: exp(mean ± t(n-1) · s · sqrt(1 + 1/n)) of the natural logs, widened to contain the median.
    """
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    median = statistics.median(known)
    if not is_predicted or len(known) < PREDICTION_RUNS or not (known[0] > 0.0 and math.isfinite(known[-1])):
        return Estimate(value=median, low=known[0], high=known[-1])
    logs = [math.log(value) for value in known]
    half = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) * math.sqrt(1.0 + 1.0 / len(logs))
    ends = [median, *(math.exp(statistics.fmean(logs) + end) for end in (-half, half))]
    return Estimate(value=median, low=min(ends), high=max(ends))


def limit_text(limits: Mapping[str, float], error_ratio: float) -> str:
    """Write the limits of an SLO as text: `p95 ≤ 20 ms, errors ≤ 1 %`.

    `limits`: quantile name -> seconds. `error_ratio`: the share of requests, 0 to 1, that may fail.
    """
    wanted = [limit_words(name, limit) for name, limit in limits.items()]
    return ", ".join([*wanted, f"errors ≤ {percentage(error_ratio)}"])


# The capacity of a configuration under an SLO, from the ledger alone.
#
# Every command reads it here: what is recommended, planned or simulated cannot differ. A looser SLO never yields less.


def capacity_of(
    configuration: Configuration, trials: Sequence[Trial], *, scenario: Scenario, slo: SloSpec | None = None
) -> Capacity | None:
    """Compute the capacity of a configuration from all of its trials, judged by `slo` (None: the scenario's).

    None: none of its runs held or missed a rate.
    """
    space = Space(scenario)
    asked = space.filled(configuration)
    own = (
        trial
        for trial in without_superseded(trials)
        # Neither a load that compares nodes nor a lone client says anything about its configuration.
        if space.filled(trial.configuration) == asked and trial.source != "node" and not trial.request.is_lone
    )
    judged_by = slo or scenario.slo
    return stated_capacity(Bracket(tuple(runs_of(own, judged_by, scenario))), judged_by.stream_limits())


def stated_capacity(bracket: Bracket, stream_limits_s: Mapping[str, float]) -> Capacity | None:
    """Return the capacity that a bracket states; its `held_rps` is 0 where only misses are known. None: neither a rate
    held nor one missed is known.

    `stream_limits_s`: name -> limit in seconds on the latencies of streams, for `crossing_rps`; {} where answers are
    not streamed.
    """
    held_rps, missed_rps = bracket.stated_rps, bracket.stated_missed_rps
    by_loops = not held_rps and bracket.loop_rps > 0.0
    if not held_rps:
        # What closed loops kept is believed as far as no open loop missed: where one held instead, no less is stated.
        missed = (run.rate_rps or 0.0 for run in bracket.open_runs)
        # Multiplied in the order in which a bracket does it: else a looser SLO yields less by a rounding.
        held_rps = min(LOOP_SHARE * bracket.loop_rps, UNCONFIRMED * (BACK * min(missed, default=math.inf)))
        missed_rps = max(bracket.missed_rps, held_rps)
    if not held_rps and not math.isfinite(missed_rps):
        return None
    is_met = bracket.stated_rps > 0.0 and not bracket.is_refuted
    crossing = crossing_rps(bracket, stream_limits_s) if is_met else None
    if crossing is not None:  # above what any run answered the line would be continued into an overload
        answered_rps = max(run.answered_rps for run in bracket.runs)
        crossing = min(max(min(crossing, answered_rps), held_rps), missed_rps)
    doubtful_rps = bracket.missed_once(held_rps)
    is_confirmed = 0.0 < bracket.confirmed_rps == bracket.stated_rps
    fresh = bracket.confirmations(held_rps)
    met = [run.rate_rps or 0.0 for run in bracket.open_runs if run.held]
    is_share = bracket.stated_rps > 0.0 and not is_confirmed
    is_disputed = is_share and bracket.held_rps not in met
    return Capacity(
        crossing_rps=crossing,
        doubtful_rps=doubtful_rps if exceeds(missed_rps, doubtful_rps) else None,
        search_rps=bracket.held_rps if is_share and not is_disputed else None,
        disputed_rps=bracket.missed_once(0.0) if is_disputed else None,
        is_disputed_end=not exceeds(missed_rps, max(met, default=0.0)),
        held_rps=held_rps,
        missed_rps=missed_rps if math.isfinite(missed_rps) else None,
        held=sum(run.held for run in fresh),
        missed=sum(not run.held for run in fresh) if held_rps else len(bracket.open_runs),
        missed_higher=sum(run.fresh and not run.held and run not in fresh for run in bracket.open_runs),
        fell_behind=sum(run.fresh and run.fell_behind for run in bracket.open_runs),
        refuted_rps=min(run.rate_rps or 0.0 for run in fresh) if bracket.is_refuted else None,
        least_met_rps=min(met, default=None),
        most_met_rps=max(met, default=None),
        confirmed=is_confirmed,
        by_loops=by_loops,
        is_bound=not any(
            not run.held and math.isclose(run.rate_rps or 0.0, missed_rps) for run in bracket.open_runs
        ),
    )
