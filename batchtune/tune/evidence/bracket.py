"""Brackets what a configuration gives under an SLO: what its runs held, and what they missed.

A run at one rate holds the SLO or misses it. On a noisy host one run is one vote: a rate is held where more runs held
it (or more) than missed it (or less), and missed by two misses, or by one that is far. Nothing here weighs, fits or
assumes: a bracket is a pure function of the runs, and a looser SLO never gives a lower one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.space import clients_to_fill
from batchtune.tune.trials.trial import Trial

FAR_ANSWERED = 0.8
"""A run that answers less than this share of the rate missed by far: once is enough (noisy.py, host harsh)."""

FAR_OVER = 2.0
"""Of several models, whose rates no curve foretells, one that used so many times a limit missed by far."""

ANSWERED = 0.97
"""Share of the requests that must be answered in time for a rate to be held, less a Poisson count's own noise."""

FRESH = 3
"""Fresh runs that must hold, and three times as many as miss: fewer, and stated rates are 2-50 % too high."""


BACK = 0.85
"""Of the lowest missed rate: what is believed where runs held, but no rate won its vote."""

UNCONFIRMED = 0.9
"""Of a rate that the search held, what is stated before fresh runs held it: the best of many is too good."""

STEP_DOWN = 0.95
"""The next rate of a leader that failed its fresh runs."""

WIDTH, UNSTEADY = 1.14, 1.35
"""No stated bracket is narrower; nor than the second where runs differ (noisy.py, harsh)."""

WIDEST = 1.15
"""Missed over held rate of an answer that is established."""

RIVAL = 1.03
"""Rates within this factor are not told apart: what a rival must hope for, times the leader's, to be tried before the
leader's bracket is closed; closed loops that fill every batch and answer alike agree."""

LEVEL = 1.05
"""What is no better than this, times another, changes nothing for the user. No rate above this, times what agreeing
loops answer, is believed."""

CLIMB, STEP = 2.0, 1.06
"""The next rate above one that was held, times that: at most, and at least."""

TINY_S = 1e-6
"""Below this a latency says nothing: tokens that came together are 0 s apart."""

INVERTED, CONTRADICTIONS = 0.95, 2
"""So many runs that missed less than this share of a rate that another held: runs differ."""

CROSSING_RUNS, CROSSING_NEAR, SLOPES = 3, 0.4, (2.0, 20.0)
"""Runs at a rate that tell where latencies cross a limit; how far from it (in logs) a run counts half; what slopes of
latency over rate, in logs, are believed. Half or twice these state 37-40 of 40 sweeps within 5 % (virtual_llm.py)."""

SATURATED = 1.3
"""Times what a closed loop that fills every batch answered: no rate above that is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketRun:
    """One load of one configuration, judged by an SLO.

    `rate_rps`: that of an open loop; None: a closed loop of `clients`. `full`: its clients fill every batch, so that
    `answered_rps` is what the configuration can answer at most. `kept`: within the limits, be it that less was answered
    than offered. `far`: missed by so much that one run is enough.
    `fresh`: made after the choice, under a seed of its own.
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
    requests: int = 1000


@dataclass(frozen=True)
class Bracket:
    """The capacity of one configuration: the highest rate held, and the lowest missed; requests/s."""

    runs: tuple[BracketRun, ...]

    @cached_property
    def open_runs(self) -> tuple[BracketRun, ...]:
        return tuple(run for run in self.runs if run.rate_rps is not None)

    def held(self, rate_rps: float, *, fresh: bool = False) -> int:
        """Return the runs that held this rate or a higher one."""
        return sum(
            run.held and _rate(run) >= 0.999 * rate_rps and run.fresh >= fresh for run in self.open_runs
        )

    def missed(self, rate_rps: float, *, fresh: bool = False) -> int:
        """Return the runs that missed this rate or a lower one."""
        return sum(
            not run.held and _rate(run) <= 1.001 * rate_rps and run.fresh >= fresh for run in self.open_runs
        )

    @cached_property
    def held_rps(self) -> float:
        """Highest rate with more holds at or above it than misses at or below it, requests/s.

        0: no run held. Where runs held, but no rate won its vote, a little below the lowest that was missed.
        """
        held = [_rate(run) for run in self.open_runs if run.held]
        won = [rate for rate in held if self.held(rate) > self.missed(rate)]
        if won or not held:
            return max(won, default=0.0)
        return BACK * self.missed_once(0.0)

    def missed_once(self, rate_rps: float) -> float:
        """Return the lowest rate above this one that a run missed, surely or not; inf: none."""
        missed = (_rate(run) for run in self.open_runs if not run.held)
        return min((rate for rate in missed if rate > rate_rps), default=math.inf)

    @cached_property
    def missed_rps(self) -> float:
        """Lowest rate above `held_rps` that is surely missed, requests/s; inf: none, and nothing saturated the
        server."""
        return self.missed_above(self.held_rps)

    def missed_above(self, rate_rps: float) -> float:
        """Return the lowest rate above this one missed by far, or twice and more often than held; else the
        saturation."""
        votes = 0
        missed = [(_rate(run), 2 if run.far else 1) for run in self.open_runs if not run.held]
        missed += [(run.answered_rps, 1) for run in self.runs if run.full]
        for rate, count in sorted(missed):
            votes += count if rate > rate_rps else 0
            if votes >= 2 and votes > self.held(rate):
                return max(min(self.saturated_rps, rate), rate_rps)
        return max(self.saturated_rps, rate_rps)

    @cached_property
    def saturated_rps(self) -> float:
        """Rate that the server cannot answer, by loads that fill every batch: closed loops, rates missed by far;
        inf: none did."""
        if not any((run.full or run.far) and run.answered_rps > 0.0 for run in self.runs):
            return math.inf
        return SATURATED * max(run.answered_rps for run in self.runs)

    @cached_property
    def loop_rps(self) -> float:
        """Most requests/s that were answered within the SLO's limits in a closed loop, or at a rate not answered in
        full; 0: none."""
        kept = (run for run in self.runs if (run.held if run.rate_rps is None else run.kept and not run.held))
        return max((run.answered_rps for run in kept), default=0.0)

    @cached_property
    def confirmed_rps(self) -> float:
        """Highest rate that FRESH fresh runs of enough requests held, three times as many as missed it; 0: none."""
        # Requests that they must hold together: of fewer, p95 is the slowest one or two (noisy.py, 250 ms a
        # row).
        confirming = 200
        return max(
            (
                _rate(run)
                for run in self.open_runs
                if run.fresh
                and run.held
                and self.held(_rate(run), fresh=True) >= max(FRESH, 3 * self.missed(_rate(run), fresh=True))
                and self._requests(_rate(run)) >= confirming
            ),
            default=0.0,
        )

    def _requests(self, rate_rps: float) -> int:
        """Of the fresh runs that held this rate or a higher one."""
        return sum(
            run.requests
            for run in self.open_runs
            if run.fresh and run.held and _rate(run) >= 0.999 * rate_rps
        )

    def has_failed(self, rate_rps: float) -> bool:
        """Whether fresh runs missed a rate more than a third as often as they held it: those that held it count for a
        lower one too, so that a step down costs one run, and three times the same rate would cost more."""
        return self.missed(rate_rps, fresh=True) > self.held(rate_rps, fresh=True) / 3

    @cached_property
    def stated_rps(self) -> float:
        """Rate that is stated as held: the confirmed one, or less than what the search held."""
        missed = (_rate(run) for run in self.open_runs if run.fresh and not run.held)
        failed_rps = min(filter(self.has_failed, missed), default=math.inf)
        return max(self.confirmed_rps, min(UNCONFIRMED * self.held_rps, STEP_DOWN * failed_rps))

    @cached_property
    def stated_missed_rps(self) -> float:
        """Upper end of what is stated, requests/s; no closer to the lower than runs of one configuration differ."""
        stated = self.stated_rps
        width = UNSTEADY if self.is_unsteady else WIDTH
        held = (_rate(run) for run in self.open_runs if run.held)
        return max(self.missed_above(stated), width * stated, *held, 0.0)

    @cached_property
    def has_fresh_misses(self) -> bool:
        """Whether fresh runs at the stated rate missed it, and not a quarter as often as they held it."""
        stated = self.stated_rps
        return 4 * self.missed(1.02 * stated, fresh=True) > self.held(stated, fresh=True)

    @cached_property
    def is_unsteady(self) -> bool:
        """Whether fresh runs missed the stated rate, or several runs missed a rate below one that another held."""
        highest = max((_rate(run) for run in self.open_runs if run.held), default=0.0)
        return self.has_fresh_misses or (
            len(self.fresh) < 2 * FRESH and self.missed(INVERTED * highest) >= CONTRADICTIONS
        )

    @property
    def fresh(self) -> tuple[BracketRun, ...]:
        """Fresh runs at the stated rate."""
        return tuple(
            run
            for run in self.open_runs
            if run.fresh and math.isclose(_rate(run), self.confirmed_rps, rel_tol=1e-3)
        )


def crossing_rps(bracket: Bracket, limits_s: Mapping[str, float]) -> float | None:
    """Estimate the rate at which the latencies of a configuration's runs reach the nearest of these limits, by a line
    through their logs; None: too few runs say so, or none of them lies above it.

    Of streams latencies rise slowly with the rate, so that the rates held and missed lie far apart.
    """
    crossings = []
    for name, limit_s in limits_s.items():
        points = [
            (math.log(_rate(run)), math.log(run.latency_s[name] / limit_s), run.requests)
            for run in bracket.open_runs
            if 0.0 < run.latency_s.get(name, 0.0) < math.inf
        ]
        if len(points) < CROSSING_RUNS or max(y for _, y, _ in points) <= 0.0:
            continue
        weights = [requests / (1.0 + (y / CROSSING_NEAR) ** 2) for _, y, requests in points]
        x_mean, y_mean = (fmean([point[at] for point in points], weights) for at in (0, 1))
        spread = fmean([(x - x_mean) ** 2 for x, _, _ in points], weights)
        together = fmean([(x - x_mean) * (y - y_mean) for x, y, _ in points], weights)
        slope = together / spread if spread > 0.0 else SLOPES[1]
        crossings.append(math.exp(x_mean - y_mean / min(max(slope, SLOPES[0]), SLOPES[1])))
    return min(crossings, default=None)


def next_rate(
    bracket: Bracket, limits: Mapping[str, float], *, belief_rps: float = 0.0, most_rps: float = math.inf
) -> float:
    """Choose the rate above the one held that tells most: the believed one, or as much more as the latency leaves room
    for.

    By bisection once a rate was missed; one that was missed, but not surely, is tried again where it is near.
    `most_rps`: what it can answer at most.
    """
    lo, hi = bracket.held_rps, bracket.missed_rps
    once = bracket.missed_once(lo)
    if once < 0.999 * hi:
        return once if once < WIDEST * lo else math.sqrt(lo * once)
    if belief_rps > RIVAL * lo:
        climbed = max(0.98 * belief_rps, STEP * lo)
    else:
        most_rps = most_rps if most_rps > lo else math.inf  # else it is refuted
        climbed = max(min(lo * min(math.sqrt(_room(bracket, limits)), CLIMB), most_rps), STEP * lo)
    return min(climbed, math.sqrt(lo * hi))


def _room(bracket: Bracket, limits: Mapping[str, float]) -> float:
    """How far the latency at the rate held stays below the limit, as a factor: of the limit that is nearest."""
    rooms = [
        min(
            limit_s / max(run.latency_s[name], TINY_S)
            for name, limit_s in limits.items()
            if name in run.latency_s
        )
        for run in bracket.open_runs
        if run.held and _rate(run) >= 0.999 * bracket.held_rps and run.latency_s
    ]
    return max(rooms, default=1.0)


def runs_of(trials: Iterable[Trial], slo: SloSpec, scenario: Scenario) -> list[BracketRun]:
    """Judge every load of these trials by this SLO, each rate of an older search for a capacity included.

    A trial that failed is a miss by far at the rate that was asked. One of several models is a run of all of them, at
    the sum of their rates; where the client was the limit of one it says nothing.
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


def keeps(slo: SloSpec, latency_s: dict[str, float], error_ratio: float) -> bool:
    """Whether these figures keep every limit; a quantile that is undefined or was not measured keeps none."""
    return error_ratio <= slo.error_ratio and all(
        latency_s.get(name, math.nan) <= limit_s for name, limit_s in slo.limits().items()
    )


def of_limit(latency_s: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """Return the largest share of its limit that a latency takes; inf where one is not known."""
    shares = [latency_s.get(name, math.inf) / limit for name, limit in limits.items()]
    return max((math.inf if math.isnan(share) else share for share in shares), default=0.0)


def _run_of(trial: Trial, slo: SloSpec, scenario: Scenario) -> BracketRun:
    measured = trial.measurement
    rate_rps = trial.request.rate_rps if trial.request.concurrency is None else None
    if rate_rps is None and trial.request.concurrency is None and trial.concurrency is None:
        rate_rps = trial.rate_rps
    clients = trial.request.concurrency or (trial.concurrency if rate_rps is None else None)
    if measured is None or trial.state == "failed" or not math.isfinite(measured.throughput_rps.value):
        latency_s: dict[str, float] = {}
        answered_rps, error_ratio, held, kept, far, requests = 0.0, 1.0, False, False, True, 0
    else:
        latency_s = {name: quantile.value for name, quantile in measured.latency_s.items()}
        answered_rps, error_ratio = measured.throughput_rps.value, measured.error_ratio
        held, far = keeps(slo, latency_s, error_ratio), False
        kept = held
        requests = measured.requests
        if rate_rps is not None:
            # A short run of Poisson arrivals has fewer of them now and then: that is no miss.
            spare = 2.0 * math.sqrt(rate_rps / max(measured.window_s, 1e-9))
            held = held and answered_rps >= ANSWERED * rate_rps - spare
            far = not held and answered_rps < FAR_ANSWERED * rate_rps - spare
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
        requests=requests,
        full=clients is not None and clients >= clients_to_fill(trial.configuration, scenario),
    )


def _run_of_models(trial: Trial, scenario: Scenario) -> BracketRun:
    """A rate is held where each model held its own, and missed by far where one missed its own so."""
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
        far=any(run.far for run in runs.values()) or (over >= FAR_OVER and "NOISY" not in verdicts),
        kept=all(run.kept for run in runs.values()),
        fresh=trial.source == "confirm",
        requests=min(run.requests for run in runs.values()),
    )


def _rate(run: BracketRun) -> float:
    return run.rate_rps or 0.0
