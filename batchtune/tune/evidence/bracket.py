"""Computes the bracket of a configuration under an SLO: the highest rate that its runs held, the lowest they missed.

A run at one rate holds the SLO or misses it. On a noisy host one run is one vote: a rate is held if more runs held it
or a higher one than missed it or a lower one, and it is missed by two misses, or by one miss by far. A bracket depends
on nothing but the runs, and a looser SLO never has a lower one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from batchtune.measure.caveats import HOST_CODES, has_short_client
from batchtune.measure.measurement import Measurement
from batchtune.measure.slo import keeps
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.pace import clients_to_fill
from batchtune.tune.trials.trial import Trial

ANSWERED = 0.97
"""A rate is held if at least this share of it is answered, less what the number of Poisson arrivals varies by."""

FRESH = 3
"""Confirmation runs that must hold a rate, and so many times as many as miss it: with fewer, stated rates are 2-50 %
too high (noisy.py)."""
PREDICTION_RUNS = 5
"""Runs from which on a prediction interval is stated instead of the range."""


BACK = 0.85
"""Rate taken as held, as a share of the lowest missed one, where runs held but each rate has as many misses."""

UNCONFIRMED = 0.87
"""Rate stated before confirmation runs, as a share of what the search held: the best of many runs was also lucky. Below
1 / WIDTH, so that a run that holds WIDTH times the confirmed rate does not put an unconfirmed one in its place."""

STEP_DOWN = 0.95
"""Factor to the next lower rate of a leader whose confirmation runs failed."""

WIDTH, UNSTEADY = 1.14, 1.35
"""Least upper over lower end of a stated bracket; UNSTEADY where runs contradict each other (noisy.py, harsh)."""

WIDEST = 1.15
"""Largest missed over held rate of an established answer."""

OPEN = 1.1
"""A bracket is open while its missed rate is above this many times its held one; a rival, while its upper end is above
this many times the rate stated for the leader."""

RIVAL = 1.03
"""Rates within this factor count as equal: a rival is tried before the leader's bracket is closed if its hope is this
many times the leader's, at this many times what the leader held, and closed loops agree whose rates are within it."""

LEVEL = 1.05
"""A gain of less than this factor is none to the user. No rate above this many times what agreeing closed loops answer
is expected to be held."""

CLIMB, STEP = 2.0, 1.06
"""Largest and least factor from a rate held to the next rate tried."""

TINY_S = 1e-6
"""Times count as at least this, in seconds: tokens that came together are 0 s apart (virtual_llm.py)."""


LOOP_SHARE = 0.8
"""Rate that is expected to be held, as a share of what a closed loop answered within the limits (noisy.py)."""

SATURATED = 1.3
"""Upper end of a bracket, times the most that loads with full batches answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketRun:
    """One load of one configuration, judged by an SLO.

    `trial`: number of its trial. `rate_rps`: of an open loop; None: a closed loop of `clients`.
    `answered_rps`, `latency_s` (quantile name -> seconds), `error_ratio`, `requests`: what was measured.
    `kept`: latencies and errors are within the limits. `held`: they are, and at a rate enough of it was answered.
    `far`: missed by so much that one run is enough. `fresh`: it is a confirmation run.
    `full`: a closed loop whose clients fill every batch, or an overload: the configuration cannot answer more.
    `by_client`: a miss at a rate that the client could not send in time, so that the server need not be the cause.
    `failed`: its trial has no figures: the server ended, or could not be started or set.
    `disturbed`: other programs, or a slower CPU, disturbed it (HOST_CODES).
    `scout`: a short load that shows who deserves a longer one. `fell_behind`: too little of its rate was answered to
    hold it, whatever the latencies.
    """

    trial: int
    rate_rps: float | None
    clients: int | None
    answered_rps: float
    latency_s: dict[str, float]
    error_ratio: float
    held: bool
    far: bool
    kept: bool = False
    fresh: bool = False
    full: bool = False
    by_client: bool = False
    failed: bool = False
    disturbed: bool = False
    scout: bool = False
    fell_behind: bool = False
    requests: int = 1000


@dataclass(frozen=True)
class Bracket:
    """The bracket of one configuration: the highest rate held and the lowest missed, from its runs; requests/s.

    `runs`: in their order. A run that the client made miss (`by_client`) is left out, unless an earlier one did at its
    rate or a lower one: a client that never can send so much ends a search too.
    """

    runs: tuple[BracketRun, ...]

    def __post_init__(self) -> None:
        counted, lowest_rps = [], math.inf
        for run in self.runs:
            if not run.by_client or not exceeds(lowest_rps, _rate(run)):
                counted.append(run)
            else:
                lowest_rps = _rate(run)
        object.__setattr__(self, "runs", tuple(counted))

    @cached_property
    def open_runs(self) -> tuple[BracketRun, ...]:
        """Runs at a given rate, without closed loops."""
        return tuple(run for run in self.runs if run.rate_rps is not None)

    def held(self, rate_rps: float, *, fresh: bool = False) -> int:
        """Return the number of runs that held this rate or a higher one; `fresh`: of confirmation runs only."""
        return sum(
            run.held and not exceeds(rate_rps, _rate(run)) and run.fresh >= fresh for run in self.open_runs
        )

    def missed(self, rate_rps: float, *, fresh: bool = False) -> int:
        """Return the number of runs that missed this rate or a lower one; `fresh`: of confirmation runs only."""
        return sum(
            not run.held and not exceeds(_rate(run), rate_rps) and run.fresh >= fresh
            for run in self.open_runs
        )

    def confirmations(self, rate_rps: float) -> list[BracketRun]:
        """Return the confirmation runs from which a configuration is judged at this rate: those that held it or a
        higher one, those that missed the lowest rate so held (none: this rate) or a lower one, and all that failed,
        since a server may end at a lower rate too. All of them, where they all missed a stated rate (`is_refuted`)."""
        fresh = [run for run in self.open_runs if run.fresh]
        if self.is_refuted:
            return fresh
        held = [run for run in fresh if run.held and not exceeds(rate_rps, _rate(run))]
        lowest_rps = min(map(_rate, held), default=rate_rps)
        return [
            run
            for run in fresh
            if run in held or run.failed or (not run.held and not exceeds(_rate(run), lowest_rps))
        ]

    @cached_property
    def held_rps(self) -> float:
        """Highest rate, requests/s, for which the runs that held it or a higher rate outnumber those that missed it or
        a lower rate.

        0: no run held. Where runs held, but there is no such rate, BACK times the lowest rate missed.
        """
        held = [_rate(run) for run in self.open_runs if run.held]
        won = [rate for rate in held if self.held(rate) > self.missed(rate)]
        if won or not held:
            return max(won, default=0.0)
        return BACK * self.missed_once(0.0)

    def missed_once(self, rate_rps: float) -> float:
        """Return the lowest rate above this one, requests/s, that at least one run missed; inf: none."""
        missed = (_rate(run) for run in self.open_runs if not run.held)
        return min((rate for rate in missed if rate > rate_rps), default=math.inf)

    @cached_property
    def missed_rps(self) -> float:
        """Lowest rate above `held_rps` that is missed (`missed_above`), requests/s; inf: none is known."""
        return self.missed_above(self.held_rps)

    def missed_above(self, rate_rps: float) -> float:
        """Return the lowest rate above this one, requests/s, that counts as missed: with at least two votes that are
        more than the runs that held it, or with FRESH votes that are at least half as many.

        A vote is a run that missed the rate or a lower one; a miss by far has two votes, and a closed loop with full
        batches has one at the rate that it answered. The result is at most `saturated_rps` and at least `rate_rps`.
        """
        return max(min(self.saturated_rps, self.outvoted_above(rate_rps)), rate_rps)

    def outvoted_above(self, rate_rps: float) -> float:
        """Return the lowest rate above this one, requests/s, that is missed by votes (`missed_above`), whatever
        saturated loads answered; inf: none."""
        votes = 0
        missed = [(_rate(run), 2 if run.far else 1) for run in self.open_runs if not run.held]
        missed += [(run.answered_rps, 1) for run in self.runs if run.full and run.rate_rps is None]
        for rate, count in sorted(missed):
            votes += count if rate > rate_rps else 0
            held = self.held(rate)
            if votes >= 2 and (votes > held or (votes >= FRESH and 2 * votes >= held)):
                return rate
        return math.inf

    @cached_property
    def saturated_rps(self) -> float:
        """SATURATED times the highest rate that any run answered, requests/s; inf: neither did a closed loop fill every
        batch nor was a rate missed by far."""
        if not any((run.full or run.far) and run.answered_rps > 0.0 for run in self.runs):
            return math.inf
        return SATURATED * max(run.answered_rps for run in self.runs)

    @cached_property
    def loop_rps(self) -> float:
        """Highest rate answered within the limits, requests/s, by a closed loop or by a run at a rate that was answered
        too slowly to hold it; 0: none."""
        kept = (run for run in self.runs if (run.held if run.rate_rps is None else run.kept and not run.held))
        return max((run.answered_rps for run in kept), default=0.0)

    @cached_property
    def confirmed_rps(self) -> float:
        """Highest rate, requests/s, that enough confirmation runs held: at least FRESH, three times as many as missed
        it, with 200 requests or more together; 0: none."""
        # Requests that they must hold together: of fewer, p95 is the slowest one or two (noisy.py, 250 ms a
        # row).
        confirming = 200
        return max(
            (
                _rate(run)
                for run in self.open_runs
                if run.fresh
                and run.held
                and self.held(_rate(run), fresh=True) >= FRESH * max(self.missed(_rate(run), fresh=True), 1)
                and self._requests(_rate(run)) >= confirming
            ),
            default=0.0,
        )

    def _requests(self, rate_rps: float) -> int:
        """Number of requests in the confirmation runs that held this rate or a higher one."""
        return sum(
            run.requests
            for run in self.open_runs
            if run.fresh and run.held and not exceeds(rate_rps, _rate(run))
        )

    def has_failed(self, rate_rps: float) -> bool:
        """Whether the confirmation runs that missed this rate or a lower one are more than a third of those that held
        it or a higher one."""
        return FRESH * self.missed(rate_rps, fresh=True) > self.held(rate_rps, fresh=True)

    @cached_property
    def stated_rps(self) -> float:
        """Rate that is stated as held, requests/s: the larger of `confirmed_rps` and UNCONFIRMED times `held_rps`, or
        times the lowest rate whose confirmation runs failed (`has_failed`) if that is lower; 0: none."""
        missed = (_rate(run) for run in self.open_runs if run.fresh and not run.held)
        failed_rps = min(filter(self.has_failed, missed), default=math.inf)
        return max(self.confirmed_rps, UNCONFIRMED * min(self.held_rps, failed_rps))

    @cached_property
    def is_refuted(self) -> bool:
        """Whether a rate is stated as held, though there are confirmation runs and each missed its rate."""
        fresh = [run for run in self.open_runs if run.fresh]
        return self.stated_rps > 0.0 and bool(fresh) and not any(run.held for run in fresh)

    @cached_property
    def stated_missed_rps(self) -> float:
        """Rate that is stated as missed, requests/s: the lowest missed above `stated_rps`, but at least WIDTH times
        `stated_rps` (UNSTEADY times where `is_unsteady`) and at least the highest rate held; inf: unknown."""
        stated = self.stated_rps
        width = UNSTEADY if self.is_unsteady else WIDTH
        held = (_rate(run) for run in self.open_runs if run.held)
        return max(self.missed_above(stated), width * stated, *held, 0.0)

    @cached_property
    def has_fresh_misses(self) -> bool:
        """Whether the confirmation runs that missed the stated rate are more than a quarter of those that held it."""
        stated = self.stated_rps
        return 4 * self.missed(1.02 * stated, fresh=True) > self.held(stated, fresh=True)

    @cached_property
    def is_unsteady(self) -> bool:
        """Whether runs contradict each other: `has_fresh_misses`, or, while there are fewer than 2 * FRESH confirmation
        runs at the confirmed rate, two or more runs missed a rate below STEP_DOWN times one that another run held.
        Where more than half of the misses were on a disturbed host, one run that missed a held rate is enough."""
        # Runs contradict each other when so many of them missed a rate below STEP_DOWN of one that another
        # held.
        contradictions = 2
        highest = max((_rate(run) for run in self.open_runs if run.held), default=0.0)
        missed = [run for run in self.open_runs if not run.held]
        is_disturbed = 2 * sum(run.disturbed for run in missed) > len(missed)
        return self.has_fresh_misses or (
            len(self.fresh) < 2 * FRESH
            and (
                self.missed(STEP_DOWN * highest) >= contradictions
                or (is_disturbed and self.missed(highest) > 0)
            )
        )

    @property
    def fresh(self) -> tuple[BracketRun, ...]:
        """Confirmation runs at the confirmed rate."""
        return tuple(
            run for run in self.open_runs if run.fresh and math.isclose(_rate(run), self.confirmed_rps)
        )


def crossing_rps(bracket: Bracket, limits_s: Mapping[str, float]) -> float | None:
    """Estimate the lowest rate, requests/s, at which a latency reaches its limit, by a line through log latency over
    log rate; None: each latency has fewer than three runs, or none above its limit.

    `limits_s`: quantile name -> limit in seconds. For streams, whose latencies rise so slowly with the rate that the
    rates held and missed lie far apart.
    """
    # Distance of a latency from its limit (in logs) at which a run's weight is half; least and largest slope of log
    # latency over log rate. Half or twice these, or of 3 runs, state 37-40 of 40 sweeps within 5 % (virtual_llm.py).
    near, least, most = 0.4, 2.0, 20.0
    crossings = []
    for name, limit_s in limits_s.items():
        points = [
            (math.log(_rate(run)), math.log(run.latency_s[name] / limit_s), run.requests)
            for run in bracket.open_runs
            if 0.0 < run.latency_s.get(name, 0.0) < math.inf
        ]
        if len(points) < 3 or max(y for _, y, _ in points) <= 0.0:
            continue
        weights = [requests / (1.0 + (y / near) ** 2) for _, y, requests in points]
        x_mean, y_mean = (fmean([point[at] for point in points], weights) for at in (0, 1))
        spread = fmean([(x - x_mean) ** 2 for x, _, _ in points], weights)
        together = fmean([(x - x_mean) * (y - y_mean) for x, y, _ in points], weights)
        slope = together / spread if spread > 0.0 else most
        crossings.append(math.exp(x_mean - y_mean / min(max(slope, least), most)))
    return min(crossings, default=None)


def next_rate(
    bracket: Bracket,
    limits: Mapping[str, float],
    *,
    belief_rps: float = 0.0,
    most_rps: float = math.inf,
    streams: bool = False,
) -> float:
    """Choose the next rate to try above the highest one held, requests/s.

    Once a rate was missed: the middle between the rates held and missed, or a rate missed once again if it is within
    WIDEST of the rate held. Before that: `belief_rps`, the expected capacity (0: none), if it is above the rate held;
    else a step whose size depends on how far latencies are below `limits` (quantile name -> seconds). `most_rps`: the
    highest rate that the configuration can answer; inf: unknown. `streams`: the server batches continuously, so that
    latencies hardly rise before it is full: then the step does not depend on them.
    """
    lo, hi = bracket.held_rps, bracket.missed_rps
    once = bracket.missed_once(lo)
    if exceeds(hi, once):
        return once if once < WIDEST * lo else math.sqrt(lo * once)
    if belief_rps > RIVAL * lo:
        climbed = max(0.98 * belief_rps, STEP * lo)
    else:
        most_rps = most_rps if most_rps > lo else math.inf  # else it is refuted
        room = _room(bracket, limits)
        step = CLIMB if streams and room > WIDEST else min(math.sqrt(room), CLIMB)
        climbed = max(min(lo * step, most_rps), STEP * lo)
    return min(climbed, math.sqrt(lo * hi))


def _room(bracket: Bracket, limits: Mapping[str, float]) -> float:
    """Limit over latency at the rate held, of the limit that is nearest; 1 without runs that held."""
    rooms = [
        min(
            limit_s / max(run.latency_s[name], TINY_S)
            for name, limit_s in limits.items()
            if name in run.latency_s
        )
        for run in bracket.open_runs
        if run.held and not exceeds(bracket.held_rps, _rate(run)) and run.latency_s
    ]
    return max(rooms, default=1.0)


def runs_of(trials: Iterable[Trial], slo: SloSpec, scenario: Scenario) -> list[BracketRun]:
    """Return the loads of these trials, judged by an SLO; a trial with probes gives one run for each rate tried.

    A failed trial is a miss by far at its requested rate. A trial of several models is one run at the sum of their
    rates, left out where the client limited one of them (verdict INVALID).
    """
    runs: list[BracketRun] = []
    for trial in trials:
        if trial.parts:
            verdicts = {measured.verdict for measured in trial.measurements.values()}
            runs += [] if "INVALID" in verdicts else [_run_of_models(trial, scenario)]
        elif trial.probes:
            runs += [
                BracketRun(
                    trial=trial.number,
                    rate_rps=probe.rate_rps,
                    clients=None,
                    answered_rps=probe.rate_rps if probe.met else 0.0,
                    latency_s=probe.latency_s,
                    error_ratio=probe.error_ratio,
                    held=keeps(slo, probe.latency_s, probe.error_ratio),
                    far=False,
                )
                for probe in trial.probes
            ]
        else:
            runs.append(_run_of(trial, slo, scenario))
    return runs


def _is_client_limited(measured: Measurement) -> bool:
    """Whether the client was the limit of a load, so that a miss is not the server's: verdict INVALID, or NOISY where
    the client was short of CPU too."""
    return measured.verdict == "INVALID" or (
        measured.verdict == "NOISY" and has_short_client(measured.caveats)
    )


def keeps_up(measured: Measurement, rate_rps: float, share: float = ANSWERED) -> bool:
    """Whether at least this share of a rate (requests/s) was answered, less what chance takes: a short run of Poisson
    arrivals has fewer of them now and then, and its last batch may end just after it."""
    window_s = max(measured.window_s, TINY_S)
    spare = 2.0 * math.sqrt(rate_rps * window_s) + rate_rps * (measured.compute_mean_s or 0.0)
    return measured.throughput_rps.value >= share * rate_rps - spare / window_s


def of_limit(latency_s: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """Return the largest ratio latency / limit; 1: just at a limit; inf: a limited latency is unknown; 0: no limits.

    `latency_s`, `limits`: quantile name -> seconds.
    """
    shares = [latency_s.get(name, math.inf) / limit for name, limit in limits.items()]
    return max((math.inf if math.isnan(share) else share for share in shares), default=0.0)


def _run_of(trial: Trial, slo: SloSpec, scenario: Scenario) -> BracketRun:
    # A run that answers less than this share of its rate misses by far: one is enough (noisy.py, host
    # harsh).
    far_answered = 0.8
    measured = trial.measurement
    rate_rps = trial.request.rate_rps if trial.request.concurrency is None else None
    if rate_rps is None and trial.request.concurrency is None and trial.concurrency is None:
        rate_rps = trial.rate_rps
    clients = trial.request.concurrency or (trial.concurrency if rate_rps is None else None)
    failed = measured is None or trial.state == "failed" or not math.isfinite(measured.throughput_rps.value)
    fell_behind = False
    if measured is None or failed:
        latency_s: dict[str, float] = {}
        answered_rps, error_ratio, held, kept, far, requests = 0.0, 1.0, False, False, True, 0
        by_client = False
    else:
        by_client = _is_client_limited(measured)
        latency_s = {name: quantile.value for name, quantile in measured.latency_s.items()}
        answered_rps, error_ratio = measured.throughput_rps.value, measured.error_ratio
        kept, far = keeps(slo, latency_s, error_ratio), False
        requests = measured.requests
        if rate_rps is not None:
            fell_behind = not keeps_up(measured, rate_rps)
            far = fell_behind and not keeps_up(measured, rate_rps, far_answered)
        held = kept and not fell_behind
    to_fill = clients_to_fill(trial.configuration, scenario)
    if rate_rps is None:
        # A loop too short for each client to be answered shows its beginning, not what is answered at most.
        is_full = clients is not None and requests >= clients >= to_fill
    else:  # at the end of an overload more waited than twice what fills every batch
        is_full = far and requests * (1.0 - answered_rps / rate_rps) > 2 * to_fill
    return BracketRun(
        trial=trial.number,
        rate_rps=rate_rps,
        clients=clients,
        answered_rps=answered_rps,
        latency_s=latency_s,
        error_ratio=error_ratio,
        held=held,
        far=far,
        kept=kept,
        fresh=trial.source == "confirm",
        scout=trial.source in ("calibration", "probe"),
        fell_behind=fell_behind,
        requests=requests,
        full=is_full and not by_client,
        by_client=by_client and not held and rate_rps is not None,
        failed=failed,
        disturbed=measured is not None and any(known.code in HOST_CODES for known in measured.caveats),
    )


def _run_of_models(trial: Trial, scenario: Scenario) -> BracketRun:
    """Make one run of a trial of several models: it holds where each model held its own rate, and misses by far where
    one did. Latencies are named `MODEL:QUANTILE`."""
    # With several models, a run also misses by far when a figure of a model is this many times its limit.
    far_over = 2.0
    scenarios = scenario.of_models()
    runs = {name: _run_of(part, scenarios[name].slo, scenarios[name]) for name, part in trial.parts.items()}
    rates = [trial.request.scale * (scenarios[name].load.rate_rps or 0.0) for name in runs]
    is_closed = trial.request.concurrency is not None
    verdicts = {measured.verdict for measured in trial.measurements.values()}
    over = max(
        (1.0 + value for part in trial.parts.values() for value in part.constraints.values()), default=1.0
    )
    return BracketRun(
        trial=trial.number,
        rate_rps=None if is_closed else math.fsum(rates),
        clients=trial.request.concurrency,
        answered_rps=math.fsum(run.answered_rps for run in runs.values()),
        latency_s={
            f"{model}:{name}": value for model, run in runs.items() for name, value in run.latency_s.items()
        },
        error_ratio=max(run.error_ratio for run in runs.values()),
        held=all(run.held for run in runs.values()),
        far=any(run.far for run in runs.values()) or (over >= far_over and "NOISY" not in verdicts),
        kept=all(run.kept for run in runs.values()),
        failed=any(run.failed for run in runs.values()),
        disturbed=any(run.disturbed for run in runs.values()),
        fell_behind=any(run.fell_behind for run in runs.values()),
        fresh=trial.source == "confirm",
        requests=min(run.requests for run in runs.values()),
    )


def exceeds(rate_rps: float, other_rps: float) -> bool:
    """Whether a rate is higher than another, by more than the rounding of its shares among several models."""
    return rate_rps > other_rps and not math.isclose(rate_rps, other_rps)


def _rate(run: BracketRun) -> float:
    return run.rate_rps or 0.0
