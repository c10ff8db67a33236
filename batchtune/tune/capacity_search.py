"""How is the capacity of one configuration searched, probe by probe?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchtune.batching.parameters import Configuration
from batchtune.measure.capacity import CapacityPlan, find_capacity
from batchtune.measure.capacity_probes import Capacity, CapacityProbe, ProbeOutcome, probe_outcome
from batchtune.measure.sequential import SloWatch, WatchPlan
from batchtune.measure.slo import Limit, limits_of, primary_limit
from batchtune.measure.verdict import counted_requests
from batchtune.scenario.arrivals import ClosedLoop, arrivals_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune import policy
from batchtune.tune.loader import Figures, LoadRun
from batchtune.tune.trials.pace import Pace, most_budget_s, times_of
from batchtune.tune.trials.space import in_force
from batchtune.tune.trials.trial import Probe, Source

_Tried = tuple[CapacityProbe, ProbeOutcome, Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityTrial:
    """The capacity, every rate tried, and the figures at the highest that held (else at the lowest tried)."""

    capacity: Capacity
    figures: Figures
    probes: tuple[Probe, ...]


def capacity_plan(
    scenario: Scenario,
    configuration: Configuration,
    *,
    source: Source,
    hint_rps: float | None,
    seed: int,
    pace: Pace | None = None,
    budget_s: float | None = None,
) -> CapacityPlan:
    """How much effort: reference points from a burst, proposals from the incumbent's rate.

    `hint_rps` is where to begin; None: a closed-loop burst finds out. By the `pace` of a slow server its probes are
    longer, and so is the search. `budget_s` is what the sweep may take in all; None: the scenario's.
    """
    limit = primary_limit(scenario.slo)
    if limit is None:
        raise ValueError("a capacity needs a latency limit")
    pace = pace or Pace()
    quick = source == "sampler"
    duration_s, budget_s = scenario.load.duration_s, budget_s or most_budget_s(scenario)
    clients = _burst_clients(scenario, configuration, pace)
    burst = times_of(pace, scenario, configuration, clients=clients, short_s=min(duration_s, 1.0))
    seconds_max = min(
        max(policy.CAPACITY_SHARE * budget_s, policy.CAPACITY_SEARCH_S[0]), policy.CAPACITY_SEARCH_S[1]
    )
    return CapacityPlan(
        limit=limit,
        concurrency=clients,
        first_rate_rps=hint_rps,
        width_ratio=0.1 if quick else 0.05,
        lone_s=pace.lone_s,
        probe_s=min(duration_s, 2.0),
        probe_max_s=max(policy.CAPACITY_PROBE_MAX_S, burst.duration_s),
        burst_s=burst.duration_s,
        probes_max=5 if quick else 8,
        seconds_max=max(seconds_max, policy.CAPACITY_SEARCH_RUNS * burst.run_s),
        seed=seed,
        batch_requests_max=_batch_requests_max(scenario, configuration),
    )


def search_capacity(
    run_load: Callable[[LoadRun], Figures],
    plan: CapacityPlan,
    *,
    scenario: Scenario,
    timeout_s: float | None = None,
) -> CapacityTrial:
    """Run the search; whatever `run_load` raises ends it. `timeout_s` replaces the scenario's."""
    tried: list[_Tried] = []

    def run_trial(probe: CapacityProbe) -> ProbeOutcome:
        watch = _watch(probe, plan, scenario, requests_per_batch=_requests_per_batch(probe, plan, tried))
        figures = run_load(replace(_load_run(probe, plan.limit, scenario, watch), timeout_s=timeout_s))
        outcome = probe_outcome(
            figures.measurement,
            limit=plan.limit,
            others=[limit for limit in limits_of(scenario.slo) if limit.name != plan.limit.name],
            seconds=figures.samples.wall_s,
            decision="UNSURE" if watch is None else watch.decision,
        )
        tried.append((probe, outcome, figures))
        return outcome

    capacity = find_capacity(run_trial, plan)
    paced = [step for step in tried if step[0].rate_rps is not None] or tried
    held = [step for step in paced if step[0].rate_rps == capacity.rate_rps.value]
    longest = max(held, key=lambda step: step[2].measurement.requests, default=None)
    lowest = min(paced, key=lambda step: step[0].rate_rps or math.inf)
    return CapacityTrial(
        capacity=capacity,
        figures=(longest or lowest)[2],
        probes=tuple(_probe(probe, outcome, figures) for probe, outcome, figures in paced if probe.rate_rps),
    )


def _batch_requests_max(scenario: Scenario, configuration: Configuration) -> int:
    """The requests of a full batch; 1 without batching."""
    if configuration.batching is None:
        return 1
    return int(max(1, in_force(configuration, "max_batch_size") // scenario.request.rows_most))


def _burst_clients(scenario: Scenario, configuration: Configuration, pace: Pace) -> int:
    """Four full batches for each thread, within reason: fewer where the last client would wait too long."""
    fewest, most = policy.BURST_CLIENTS
    if configuration.batching is None:
        return fewest
    requests = _batch_requests_max(scenario, configuration)
    threads = in_force(configuration, "num_batch_threads", cpus=scenario.target.cpus)
    clients = int(min(max(4 * requests * threads, fewest), most))
    rows, size = scenario.request.rows_most, in_force(configuration, "max_batch_size")
    while clients > fewest and pace.turn_s(clients * rows, size) > policy.SATURATING_TURN_S:
        clients //= 2
    return max(clients, fewest)


def _requests_per_batch(probe: CapacityProbe, plan: CapacityPlan, tried: Sequence[_Tried]) -> float:
    """What a batch will hold: as at the nearest rate tried, in proportion; before any, half of a full one."""
    known = [
        (
            earlier.rate_rps,
            counted_requests(figures.samples, figures.window, figures.measurement.server).requests_per_batch,
        )
        for earlier, _, figures in tried
        if earlier.rate_rps is not None
    ]
    if probe.rate_rps is None or not known:
        return max(1.0, 0.5 * plan.batch_requests_max)
    wanted_rps = probe.rate_rps
    rate_rps, held = min(known, key=lambda pair: abs(math.log(wanted_rps / pair[0])))
    return min(max(1.0, held * wanted_rps / rate_rps), float(plan.batch_requests_max))


def _load_run(probe: CapacityProbe, limit: Limit, scenario: Scenario, watch: SloWatch | None) -> LoadRun:
    load = scenario.load
    warm_up_s = min(load.warm_up_s, policy.CAPACITY_WARM_UP_MAX_S)
    duration_s = warm_up_s + probe.duration_s
    if probe.rate_rps is None:
        return LoadRun(
            arrivals=ClosedLoop(concurrency=probe.concurrency or 1, duration_s=duration_s),
            warm_up_s=warm_up_s,
        )
    return LoadRun(
        arrivals=arrivals_of(
            load, rate_rps=probe.rate_rps, duration_s=duration_s, seed=load.seed + probe.seed
        ),
        warm_up_s=warm_up_s,
        overdue_after_s=limit.seconds,
        should_stop=watch,
    )


def _watch(
    probe: CapacityProbe, plan: CapacityPlan, scenario: Scenario, *, requests_per_batch: float
) -> SloWatch | None:
    """Ends a probe as soon as its verdict is known; a burst and the idle probe have none."""
    if probe.rate_rps is None:
        return None
    return SloWatch(
        WatchPlan(
            limit=plan.limit,
            error_ratio=scenario.slo.error_ratio,
            warm_up_s=min(scenario.load.warm_up_s, policy.CAPACITY_WARM_UP_MAX_S),
            rate_rps=probe.rate_rps,
            requests_per_batch=requests_per_batch,
            batch_rows_max=plan.batch_requests_max,
        )
    )


def _probe(probe: CapacityProbe, outcome: ProbeOutcome, figures: Figures) -> Probe:
    return Probe(
        rate_rps=probe.rate_rps or 0.0,
        met=outcome.verdict == "PASS",
        latency_s={name: estimate.value for name, estimate in figures.measurement.latency_s.items()},
        error_ratio=figures.measurement.error_ratio,
    )
