"""Searches the capacity of one configuration: the highest rate that it holds within the SLO.

A closed loop that fills the batches shows roughly how many requests/s are answered. Loads at one rate each follow:
ever lower until a rate is held, then between the held and the missed rate, as a sweep does for its leader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import LOOP_SHARE, OPEN, Bracket, BracketRun, exceeds, next_rate, runs_of
from batchtune.tune.loader import Figures
from batchtune.tune.trials.pace import LONG_SHARE, REQUESTS, RUN_BATCHES, Pace, clients_to_fill, times_of
from batchtune.tune.trials.trial import Trial, TrialRequest

BURST_S, CLIENTS_MAX = 1.0, 256
"""Measured part of the closed loop, at least, and its clients, at most: where a full batch needs more, its throughput
is no upper end of the bracket (tests/tune/test_one_capacity.py)."""


LEAST = 0.05
"""Share of the first rate below which the search ends, though none was held (live_capacity.py)."""

SEARCH_S = 45.0
"""A search ends after this time, of a slow server after that of six closed loops: sooner there are too few loads for a
bracket (live_capacity.py)."""


def find_capacity(
    load: Callable[[TrialRequest, int], Figures],
    scenario: Scenario,
    plain: TrialRequest,
    *,
    pace: Pace,
    now_s: Callable[[], float],
) -> tuple[Bracket, Figures]:
    """Search the highest rate that the configuration of `plain` holds; `plain` is a request without a rate and clients.

    `load(request, number)` runs one load and returns its figures; `number` counts the loads from 0. An exception of
    `load` ends the search and passes through. Returns the bracket of all loads, and the figures of the load at the
    highest rate held, or at the lowest rate tried where none was held. `pace`: the server's speed, for the length of
    loads. `now_s`: a monotonic clock, seconds.
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
        rate_rps = probed_rate(bracket, scenario.slo.limits(), streams=scenario.streams)
        if rate_rps is None or (bracket.open_runs and now_s() >= ends_s):
            return bracket, _telling(tried, bracket)
        batch_s = times_of(pace, scenario, configuration, rate_rps=rate_rps).batch_s
        # REQUESTS within a share of the search; in any case so many batches and requests that a queue shows.
        usual_s = max(min(scenario.load.duration_s, 2.0), REQUESTS / rate_rps)
        seconds = max(min(usual_s, LONG_SHARE * search_s), RUN_BATCHES * max(batch_s, 1 / rate_rps))
        ask = replace(plain, rate_rps=rate_rps, duration_s=seconds)


def search_seconds(scenario: Scenario, configuration: Configuration, pace: Pace) -> float:
    """Compute the seconds after which a search begins no further load; the one under way then still ends."""
    clients = _burst_clients(scenario, configuration)
    loop = times_of(pace, scenario, configuration, clients=clients, short_s=BURST_S)
    return max(SEARCH_S, 6 * loop.run_s)


def probed_rate(bracket: Bracket, limits: Mapping[str, float], *, streams: bool = False) -> float | None:
    """Choose the next rate to try, requests/s; None: the bracket is closed, or even the lowest rate worth trying was
    missed.

    `limits`: quantile name -> the latency limit in seconds. `streams`: the server batches continuously (`next_rate`).
    """
    first_rps = (
        LOOP_SHARE * max((run.answered_rps for run in bracket.runs if run.clients), default=0.0) or 1.0
    )
    tried = [run.rate_rps for run in bracket.open_runs if run.rate_rps is not None]
    if not tried:
        return first_rps
    if not bracket.held_rps:
        lower_rps = min(tried) / 2.0
        return lower_rps if lower_rps >= LEAST * first_rps else None
    is_open = exceeds(bracket.missed_rps, OPEN * bracket.held_rps)
    return next_rate(bracket, limits, streams=streams) if is_open else None


def _burst_clients(scenario: Scenario, configuration: Configuration) -> int:
    return min(clients_to_fill(configuration, scenario), CLIENTS_MAX)


def _judged(ask: TrialRequest, figures: Figures, scenario: Scenario) -> BracketRun:
    """Judge one load by the scenario's SLO, by way of the rules for trials."""
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
    """Figures of the held run whose rate is nearest to the bracket's (the longest of several), else of the lowest
    rate."""

    def rank(run: BracketRun) -> tuple[bool, float, int]:
        rate_rps = run.rate_rps or math.inf
        apart = abs(math.log(rate_rps / bracket.held_rps)) if run.held else rate_rps
        return not run.held, apart, -run.requests

    return min(((run, figures) for run, figures in tried if run.rate_rps), key=lambda pair: rank(pair[0]))[1]
