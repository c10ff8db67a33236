"""How fast is a server of which nothing was measured yet, and how long will its loads be?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import rounded_duration
from batchtune.tune.bench import Plan
from batchtune.tune.compare.blocks import Variant
from batchtune.tune.one_capacity import search_seconds
from batchtune.tune.trials.pace import RUN_BATCHES, WARM_UP_BATCHES, Pace, pace_of, times_of
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import FinishedTrial, Source

PACE_PROBE_S = 0.3
"""Length of the probe of a lone client; a slower answer is waited for."""

FILLING_CLIENTS = (4, 256)
"""Fewest and most clients of the probe that fills a batch."""


class TrialBench(Protocol):
    """Whatever can run a trial."""

    def run(self, plan: Plan) -> FinishedTrial: ...


def probed_pace(
    bench: TrialBench, scenario: Scenario, configuration: Configuration, *, clients: int | None = None
) -> Pace:
    """By a lone client and, where batches may be slow or a number of requests is asked for, by so many clients (None:
    as the scenario's load has, or fill a batch).

    The pace stays unknown where nothing was answered: the loads that follow say why.
    """
    clients = clients or scenario.load.concurrency or _filling_clients(scenario, configuration)
    lone = bench.run(_plan(scenario, configuration, "probe", clients=1, duration_s=PACE_PROBE_S))
    pace = pace_of([lone.trial], scenario)
    batch_s = times_of(pace, scenario, configuration, clients=clients).batch_s
    may_be_slow = configuration.batching is not None and RUN_BATCHES * batch_s > scenario.load.duration_s
    if not may_be_slow and (not _counts_requests(scenario) or math.isnan(pace.lone_s)):
        return pace
    long_s = max(PACE_PROBE_S, WARM_UP_BATCHES * pace.lone_s)
    full = bench.run(_plan(scenario, configuration, "calibration", clients=clients, duration_s=long_s))
    pace = pace_of([lone.trial, full.trial], scenario)
    measured = full.trial.measurement
    return pace if measured is None else replace(pace, full_rps=measured.throughput_rps.value)


def leaves_duration_open(scenario: Scenario) -> bool:
    """Whether nobody said how long a load is to last, by its time or by its requests."""
    return "duration_s" not in scenario.load.model_fields_set and scenario.load.requests is None


def probed_paces(
    variants: Sequence[Variant], *, bench_of: Callable[[Variant], TrialBench]
) -> dict[str, Pace]:
    """The pace of each variant by its name; those that differ in nothing but the name are probed once, those of several
    models never: their loads last as long as the scenario says."""
    by_scenario: dict[str, Pace] = {}
    for variant in variants:
        if variant.scenario.target.models:
            by_scenario[variant.scenario.model_dump_json()] = Pace()
            continue
        key = variant.scenario.model_dump_json()
        if key not in by_scenario:
            by_scenario[key] = probed_pace(bench_of(variant), variant.scenario, variant.configuration)
    return {variant.name: by_scenario[variant.scenario.model_dump_json()] for variant in variants}


def pace_text(variant: Variant, pace: Pace) -> str:
    """`large: a batch takes 2.1 s, each run 12 s`: what its loads will take, before they are begun."""
    if variant.scenario.target.models:
        takes = rounded_duration(run_seconds(variant, pace))
        return f"{variant.name}: all models at once, at their stated loads, each run {takes}"
    if math.isnan(pace.lone_s):
        return f"{variant.name}: a lone request was not answered"
    times = times_of(pace, variant.scenario, variant.configuration)
    what = "a request" if variant.configuration.batching is None else "a batch"
    run_s = rounded_duration(run_seconds(variant, pace))
    most = "at most " if _is_most(variant, pace) else ""
    return f"{variant.name}: {what} takes about {rounded_duration(times.batch_s)}, each run {most}{run_s}"


def comparison_text(variants: Sequence[Variant], paces: Mapping[str, Pace], *, blocks: int) -> str:
    """`in all about 7 min 05 s, …`, or at most so long, where that is all that is known of a variant."""
    most = any(_is_most(variant, paces[variant.name]) for variant in variants)
    takes = rounded_duration(comparison_seconds(variants, paces, blocks=blocks))
    return f"in all {'at most' if most else 'about'} {takes}, repeats on a noisy host left out"


def comparison_seconds(variants: Sequence[Variant], paces: Mapping[str, Pace], *, blocks: int) -> float:
    """What so many blocks take, repeats left out."""
    return blocks * sum(run_seconds(variant, paces[variant.name]) for variant in variants)


def run_seconds(variant: Variant, pace: Pace) -> float:
    """What one run of a variant takes; of a capacity the whole search, at most, and of a number of requests at most
    what its duration allows."""
    scenario, configuration = variant.scenario, variant.configuration
    if scenario.target.models:
        return scenario.load.warm_up_s + scenario.load.duration_s
    if scenario.objective == "capacity":
        return search_seconds(scenario, configuration, pace)
    times = times_of(pace, scenario, configuration)
    load = scenario.load
    if load.requests is None:
        return times.run_s
    if _is_most(variant, pace):
        return load.warm_up_s + load.duration_s + times.turn_s
    clients = load.concurrency or 1
    rate_rps = min(pace.full_rps, clients / (load.think_time_s + pace.lone_s))
    return load.warm_up_s + clients / rate_rps + min(load.requests / rate_rps, load.duration_s)


def _is_most(variant: Variant, pace: Pace) -> bool:
    """Whether a run of it may end long before `run_seconds`."""
    if variant.scenario.objective == "capacity":
        return not variant.scenario.target.models
    return _counts_requests(variant.scenario) and not pace.full_rps > 0.0


def _counts_requests(scenario: Scenario) -> bool:
    return scenario.load.requests is not None and scenario.objective != "capacity"


def _filling_clients(scenario: Scenario, configuration: Configuration) -> int:
    fewest, most = FILLING_CLIENTS
    if configuration.batching is None:
        return fewest
    requests = int(in_force(configuration, "max_batch_size")) // scenario.request.rows_most
    return min(max(2 * requests, fewest), most)


def _plan(
    scenario: Scenario, configuration: Configuration, source: Source, *, clients: int, duration_s: float
) -> Plan:
    """A short closed loop whose answers are waited for as those of a server of unknown speed."""
    return Plan(
        number=0,
        configuration=configuration,
        source=source,
        reason="how fast the server is",
        seed=scenario.load.seed,
        concurrency=clients,
        duration_s=duration_s,
        pace=Pace(),
    )
