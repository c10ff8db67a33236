"""The product's own search on a target and a fleet of the noisy bench. Nothing else here knows the search.

To follow a search that has moved, change `new_users_scenario` (what `batchtune sweep ./m --slo-p95 …` makes of a model)
and `run_product`; what they return is read by `judge.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.bench import Bench
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.pace import proposed, tried_pace
from batchtune.tune.trials.trial import SearchSummary, Trial
from tests.benchmarks.noisy.devices import CPUS, DELAY_S, SimulatedDevice
from tests.benchmarks.noisy.hosts import Guard, VirtualClock
from tests.benchmarks.noisy.judge import Answered, Tried
from tests.benchmarks.noisy.virtual_fleet import VirtualFleet, VirtualTarget
from tests.tune.tune_fakes import heard

ANSWERED_RATIO = 0.97
"""Of the rate, that a run which held it answered."""


def new_users_scenario(device: SimulatedDevice, *, seed: int, budget_s: float, **changes: Any) -> Scenario:
    """What `batchtune sweep ./m --slo-p95 … --budget …` makes of this device, first looked at without noise.

    `changes` replace whole sections: another load, another objective.
    """
    rows = device.rows
    document: dict[str, Any] = {
        "name": device.name,
        "target": {"model": "fake", "cpus": list(CPUS)},
        "request": {"protocol": "grpc", "rows": rows},
        "load": {"arrivals": "poisson", "seed": seed},
        "slo": {"p95": f"{device.p95_ms:g}ms"},
        "objective": "capacity",
        "search": {"budget": {"time": f"{budget_s:g}s"}, "seed": seed},
        **changes,
    }
    bare = Scenario.model_validate(document)
    lone_s, larger_s = (float(device.tau_ms[size]) / 1e3 + DELAY_S for size in (rows, 8 * rows))
    parts = proposed(bare, tried_pace(bare, lone_s=lone_s, larger_s=larger_s, larger_rows=8 * rows))
    # Sizes from 1 to 128 requests, six timeouts at most, a queue of 100. The devices run two batches at once at most:
    # no more threads are proposed, as on a machine of two CPUs, of which the client has one.
    parts["search"]["space"]["num_batch_threads"] = [1, 2]
    merged = {
        **document,
        "fixed": parts["fixed"],
        "load": {**document["load"], **parts["load"]},
        "search": {**document["search"], **parts["search"]},
    }
    return Scenario.model_validate(merged)


def answer(
    scenario: Scenario, target: VirtualTarget, fleet: VirtualFleet, *, guard: Guard, clock: VirtualClock
) -> tuple[list[Trial], Recommendation]:
    """The trials of one sweep, and its recommendation.

    Raises:
        BatchtuneError: there is no answer.
    """
    summaries: list[SearchSummary] = []
    most_rps = fleet.client_max_rps
    bench = Bench(
        scenario,
        target,
        fleet,
        on_live=lambda _plan, _live: None,
        now_s=clock,
        sleep=clock.sleep,
        guard=guard,  # type: ignore[arg-type]
        client_max_rps=None if most_rps is None else lambda _requests: most_rps,
    )
    on_event = heard(on_summary=summaries.append)
    trials = [
        done.trial
        for done in sweep_nodes(scenario, lambda _report: OneServer(bench), on_event=on_event, now_s=clock)
    ]
    return trials, recommend(trials, scenario=scenario, search=summaries[0] if summaries else None)


def run_product(
    scenario: Scenario, target: VirtualTarget, fleet: VirtualFleet, *, guard: Guard, clock: VirtualClock
) -> Answered:
    """One sweep and its recommendation.

    Raises:
        BatchtuneError: there is no answer.
    """
    trials, recommended = answer(scenario, target, fleet, guard=guard, clock=clock)
    capacity = recommended.capacity
    assert capacity is not None
    return Answered(
        configuration=recommended.configuration,
        stated_rps=capacity.held_rps,
        low_rps=capacity.held_rps,
        high_rps=math.inf if capacity.missed_rps is None else capacity.missed_rps,
        established=recommended.established,
        runs=sum(max(len(trial.probes), 1) for trial in trials),
        seconds=clock(),
        thinking_s=clock.thinking_s,
        trials=tuple(tried for trial in trials for tried in _tried(trial)),
    )


def _tried(trial: Trial) -> Iterator[Tried]:
    """The rates of a search for a capacity, or the one load that it was."""
    measured = trial.measurement
    if trial.probes:
        for probe in trial.probes:
            yield Tried(configuration=trial.configuration, rate_rps=probe.rate_rps, held=probe.met)
    elif measured is not None:
        rate_rps, answered_rps = trial.request.rate_rps, measured.throughput_rps.value
        held = trial.feasible and answered_rps >= ANSWERED_RATIO * (rate_rps or 0.0)
        yield Tried(configuration=trial.configuration, rate_rps=rate_rps or answered_rps, held=held)
