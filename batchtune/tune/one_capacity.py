"""Searches the capacity of one configuration: the highest rate that it holds within the SLO.

A closed loop that fills its batches says about how much is answered. Loads at one rate then close the bracket: down
until a rate is held, then as a sweep closes that of its leader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import Bracket, BracketRun, next_rate, runs_of
from batchtune.tune.loader import Figures
from batchtune.tune.trials.pace import Pace, times_of
from batchtune.tune.trials.space import clients_to_fill
from batchtune.tune.trials.trial import Probe, Trial, TrialRequest

BURST_S, CLIENTS_MAX = 1.0, 256
"""Measured part of the closed loop, at least, and its clients at most: where more fill a batch it bounds nothing."""


DOWN, LEAST = (0.7, 0.5), 0.05
"""Steps down until a rate is held; the share of the first rate at which they end."""

CLOSED = 1.1
"""Missed over held rate that ends the search."""

RUN_S, REQUESTS, RUN_SHARE = 2.0, 1000, 1 / 12
"""A load at one rate lasts so long (less where the scenario's own are shorter) and holds so many requests, within this
share of the search;"""

BATCHES_MIN, REQUESTS_MIN = 4, 4
"""and so many in any case: fewer show no queue."""

SEARCH_S, SEARCH_LOOPS = 45.0, 6
"""A search ends after this time, or so many closed loops of a slow server: fewer loads bracket nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCapacity:
    """What a search ends with: every rate tried, and the figures at the highest that held, else at the lowest."""

    bracket: Bracket
    figures: Figures

    @property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(
            Probe(rate_rps=run.rate_rps, met=run.held, latency_s=run.latency_s, error_ratio=run.error_ratio)
            for run in self.bracket.open_runs
            if run.rate_rps is not None
        )


def find_capacity(
    load: Callable[[TrialRequest, int], Figures],
    scenario: Scenario,
    plain: TrialRequest,
    *,
    pace: Pace,
    now_s: Callable[[], float],
) -> FoundCapacity:
    """Search the highest rate for the trial `plain`, which names no load.

    `load` sends what is asked as the load of this number, from 0 on; whatever it raises ends the search.
    """
    configuration = plain.configuration
    search_s = search_seconds(scenario, configuration, pace)
    ends_s = now_s() + search_s
    ask = replace(plain, concurrency=_burst_clients(scenario, configuration), duration_s=BURST_S)
    tried: list[tuple[BracketRun, Figures]] = []
    while True:
        figures = load(ask, len(tried))
        tried.append((_judged(ask, figures, scenario), figures))
        bracket = Bracket(tuple(run for run, _ in tried))
        rate_rps = probed_rate(bracket, scenario.slo.limits())
        if rate_rps is None or (bracket.open_runs and now_s() >= ends_s):
            return FoundCapacity(bracket=bracket, figures=_telling(tried, bracket))
        batch_s = times_of(pace, scenario, configuration, rate_rps=rate_rps).batch_s
        usual_s = max(min(scenario.load.duration_s, RUN_S), REQUESTS / rate_rps)
        seconds = max(min(usual_s, RUN_SHARE * search_s), BATCHES_MIN * batch_s, REQUESTS_MIN / rate_rps)
        ask = replace(plain, rate_rps=rate_rps, duration_s=seconds)


def search_seconds(scenario: Scenario, configuration: Configuration, pace: Pace) -> float:
    """Compute the seconds that a search takes at most, without the load in which its time ends."""
    clients = _burst_clients(scenario, configuration)
    loop = times_of(pace, scenario, configuration, clients=clients, short_s=BURST_S)
    return max(SEARCH_S, SEARCH_LOOPS * loop.run_s)


def probed_rate(bracket: Bracket, limits: Mapping[str, float]) -> float | None:
    """Choose the rate to try after these runs, given latency limits in seconds; None: the bracket is closed, or
    nothing holds."""
    # Of what the closed loop answers, the first rate.
    first_rps = 0.7 * max((run.answered_rps for run in bracket.runs if run.clients), default=0.0) or 1.0
    tried = [run.rate_rps for run in bracket.open_runs if run.rate_rps is not None]
    if not tried:
        return first_rps
    if not bracket.held_rps:
        lower_rps = DOWN[min(len(tried), len(DOWN)) - 1] * min(tried)
        return lower_rps if lower_rps >= LEAST * first_rps else None
    is_closed = bracket.missed_rps <= 1.001 * CLOSED * bracket.held_rps
    return None if is_closed else next_rate(bracket, limits)


def _burst_clients(scenario: Scenario, configuration: Configuration) -> int:
    return min(clients_to_fill(configuration, scenario), CLIENTS_MAX)


def _judged(ask: TrialRequest, figures: Figures, scenario: Scenario) -> BracketRun:
    """A load as every trial is judged."""
    trial = Trial(
        number=0,
        state="complete",
        seconds=figures.samples.wall_s,
        started_utc="",
        seed=0,
        measurement=figures.measurement,
        request=ask,
    )
    return runs_of([trial], scenario.slo, scenario)[0]


def _telling(tried: Sequence[tuple[BracketRun, Figures]], bracket: Bracket) -> Figures:
    """Of the run that held nearest to what the bracket says (of several the longest), else of the lowest rate."""

    def rank(run: BracketRun) -> tuple[bool, float, int]:
        rate_rps = run.rate_rps or math.inf
        apart = abs(math.log(rate_rps / bracket.held_rps)) if run.held else rate_rps
        return not run.held, apart, -run.requests

    return min(((run, figures) for run, figures in tried if run.rate_rps), key=lambda pair: rank(pair[0]))[1]
