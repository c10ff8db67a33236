"""Measures the speed of a server by short probes before a comparison, and plans how long its loads last."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.load.duet import DuetPlan
from batchtune.measure.quantiles import balanced_orders, hodges_lehmann, log_ratios
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.bench import Plan, TrialBench
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.one_capacity import CLIENTS_MAX, search_seconds
from batchtune.tune.trials.pace import RUN_BATCHES, WARM_UP_BATCHES, Pace, pace_of, times_of
from batchtune.tune.trials.space import clients_to_fill
from batchtune.tune.trials.trial import Source, Trial, TrialRequest

TURN_S: Final = 0.008
"""Shortest turn of a duet (`load.duet`): the ratio of a pair varies as much for turns of 4 as of 200 ms, so that many
short ones yield the narrowest interval (tests/benchmarks/check/duet.py)."""


PAIRS_MIN: Final = 8
"""Least pairs of turns in a duet: fewer yield a wider interval than two runs one after another."""

DUET_S: Final = 3.5
"""Length of a duet: its mean ratio then has a standard deviation of about 2 %."""


def duet_plan(variants: Sequence[Variant], trials: Sequence[Trial], *, block: int) -> DuetPlan | None:
    """Plan the duet of a block: two servers loaded in short turns, to compare the CPU time that a request costs.

    `variants`: the two variants. `trials`: their runs, whose latencies decide how long turns must be. None: the time of
    two runs is too short for PAIRS_MIN pairs of turns, nothing was measured, or the objective is capacity.
    """
    both_s = sum(variant.scenario.load.duration_s for variant in variants)
    typical_s, late_s = (_latency_s(variants, trials, name) for name in ("p50", "p95"))
    if any(variant.scenario.objective == "capacity" for variant in variants) or not math.isfinite(late_s):
        return None
    # In a turn each client sends twice: of one volley a request costs up to a quarter more than in a run, which
    # hides as much of a change.
    turn_latencies = 1.25
    turn_s = max(TURN_S, turn_latencies * typical_s, *(_filled_s(variant.scenario) for variant in variants))
    gap_latencies = 1.25  # waited for the last answers of a turn, or for a batch that nobody fills any more
    gap_rest_s = 0.002  # for what the server does behind its last answer; later answers cost the pair
    gap_s = gap_rest_s + max(gap_latencies * late_s, typical_s + max(map(_open_s, variants)))
    pair_s = 2.0 * (turn_s + gap_s)
    if both_s < PAIRS_MIN * pair_s:
        return None
    pairs = max(PAIRS_MIN, int(DUET_S / pair_s))
    orders = balanced_orders((0, 1), blocks=pairs, seed=variants[0].scenario.load.seed + block)
    return DuetPlan(
        turn_ns=round(turn_s * 1e9),
        gap_ns=round(gap_s * 1e9),
        order=tuple(server for order in orders for server in order),
    )


def request_cost(pairs: Sequence[tuple[float, float]], *, planned: int) -> tuple[float, float] | None:
    """Compute (first, second), the CPU seconds that a request costs each server; None: more than half of the `planned`
    pairs of turns have no ratio.

    `pairs`: (first, second) of each pair of turns, CPU seconds per request. The first result is the median; the second
    is the first times the Hodges-Lehmann estimate of the pairs' ratio.
    """
    ratios = log_ratios(pairs)
    if 2 * len(ratios) < planned:
        return None
    before_s = statistics.median(before for before, _ in pairs)
    return before_s, before_s * math.exp(hodges_lehmann(ratios).value)


def _latency_s(variants: Sequence[Variant], trials: Sequence[Trial], quantile: str) -> float:
    """A latency quantile of the slower variant in seconds, the median over its runs; inf: a variant has none."""
    by_variant = [
        [
            trial.measurement.latency_s[quantile].value
            for trial in trials
            if trial.reason == variant.name and trial.measurement is not None
        ]
        for variant in variants
    ]
    return max(statistics.median(values) if values else math.inf for values in by_variant)


def _filled_s(scenario: Scenario) -> float:
    """Seconds in which an open loop sends eight requests, the fewest of a turn; 0 for a closed loop."""
    rate_rps = scenario.load.rate_rps
    return 8.0 / rate_rps if scenario.load.open_loop and rate_rps else 0.0


def _open_s(variant: Variant) -> float:
    """The variant's batch timeout in seconds; 0 without batching."""
    configuration = variant.configuration
    return (
        0.0
        if configuration.batching is None
        else (configuration.in_force("batch_timeout_micros") or 0.0) / 1e6
    )


def probed_pace(
    bench: TrialBench, scenario: Scenario, configuration: Configuration, *, clients: int | None = None
) -> Pace:
    """Measure a server's pace by a lone client and, where batches may be slow or the scenario sends a fixed number of
    requests, by `clients` at once (None: those of the scenario's load, else enough to fill a batch).

    Where no request is answered, the returned pace is that of an unknown server: the loads that follow report why.
    """
    clients = (
        clients or scenario.load.concurrency or min(clients_to_fill(configuration, scenario), CLIENTS_MAX)
    )
    pace_probe_s = 0.3  # Length of the probe of a lone client; a slower answer is waited for.
    lone = bench.run(_plan(scenario, configuration, "probe", clients=1, duration_s=pace_probe_s))
    pace = pace_of([lone.trial], scenario)
    batch_s = times_of(pace, scenario, configuration, clients=clients).batch_s
    may_be_slow = configuration.batching is not None and RUN_BATCHES * batch_s > scenario.load.duration_s
    if not may_be_slow and (not _counts_requests(scenario) or math.isnan(pace.lone_s)):
        return pace
    long_s = max(pace_probe_s, WARM_UP_BATCHES * pace.lone_s)
    full = bench.run(_plan(scenario, configuration, "calibration", clients=clients, duration_s=long_s))
    pace = pace_of([lone.trial, full.trial], scenario)
    measured = full.trial.measurement
    return pace if measured is None else replace(pace, full_rps=measured.throughput_rps.value)


def leaves_duration_open(scenario: Scenario) -> bool:
    """Whether the scenario's file sets neither the duration of a load nor its number of requests."""
    return "duration_s" not in scenario.load.model_fields_set and scenario.load.requests is None


def probed_paces(
    variants: Sequence[Variant], *, bench_of: Callable[[Variant], TrialBench]
) -> dict[str, Pace]:
    """Measure the pace of each variant's server; return variant name -> pace.

    Variants that differ only in their name are measured once. A server of several models is not measured: its pace is
    that of an unknown server, and its loads last as long as the scenario says.
    """
    by_scenario: dict[str, Pace] = {}
    for variant in variants:
        key = variant.scenario.model_dump_json()
        if variant.scenario.target.models:
            by_scenario[key] = Pace()
        elif key not in by_scenario:
            by_scenario[key] = probed_pace(bench_of(variant), variant.scenario, variant.configuration)
    return {variant.name: by_scenario[variant.scenario.model_dump_json()] for variant in variants}


def comparison_seconds(variants: Sequence[Variant], paces: Mapping[str, Pace], *, blocks: int) -> float:
    """Compute the seconds that `blocks` blocks take, without repeats; `paces`: variant name -> pace."""
    return blocks * sum(run_seconds(variant, paces[variant.name]) for variant in variants)


def run_seconds(variant: Variant, pace: Pace) -> float:
    """Compute the seconds that one run of a variant takes; an upper bound where `is_most` returns True.

    A run that searches a capacity may end sooner; a run of a fixed number of requests ends at the scenario's duration
    at the latest.
    """
    scenario, configuration = variant.scenario, variant.configuration
    if scenario.target.models:
        return scenario.load.warm_up_s + scenario.load.duration_s
    if scenario.objective == "capacity":
        return search_seconds(scenario, configuration, pace)
    times = times_of(pace, scenario, configuration)
    load = scenario.load
    if load.requests is None:
        return times.run_s
    if is_most(variant, pace):
        return load.warm_up_s + load.duration_s + times.turn_s
    clients = load.concurrency or 1
    rate_rps = min(pace.full_rps, clients / (load.think_time_s + pace.lone_s))
    return load.warm_up_s + clients / rate_rps + min(load.requests / rate_rps, load.duration_s)


def is_most(variant: Variant, pace: Pace) -> bool:
    """Whether `run_seconds` is an upper bound, and a run of the variant may end long before it."""
    if variant.scenario.objective == "capacity":
        return not variant.scenario.target.models
    return _counts_requests(variant.scenario) and not pace.full_rps > 0.0


def _counts_requests(scenario: Scenario) -> bool:
    return scenario.load.requests is not None and scenario.objective != "capacity"


def _plan(
    scenario: Scenario, configuration: Configuration, source: Source, *, clients: int, duration_s: float
) -> Plan:
    """Plan a short closed loop for a server of unknown speed."""
    return Plan(
        number=0,
        seed=scenario.load.seed,
        pace=Pace(),
        request=TrialRequest(
            configuration=configuration,
            source=source,
            reason="how fast the server is",
            concurrency=clients,
            duration_s=duration_s,
        ),
    )
