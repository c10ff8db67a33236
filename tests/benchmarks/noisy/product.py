"""The product's own search on a simulated device and a noisy host. Nothing else here knows the search.

To follow a search that has moved, change `new_users_scenario` (what `batchtune sweep ./m --slo-p95 …` makes of a model)
and `swept`; what it returns is read by `judge.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation
from batchtune.tune.bench import Bench
from batchtune.tune.sweep.sweep import OneServer, sweep_nodes
from batchtune.tune.trials.pace import proposed, tried_pace
from batchtune.tune.trials.trial import SearchSummary, Trial
from tests.benchmarks.noisy.devices import CPUS, DELAY_S, SimulatedDevice
from tests.benchmarks.noisy.hosts import Guard, Host, VirtualClock
from tests.benchmarks.noisy.virtual_fleet import VirtualFleet, VirtualTarget
from tests.tune.tune_fakes import heard


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """The trials of a sweep, its recommendation, and its clock."""

    trials: list[Trial]
    recommended: Recommendation
    clock: VirtualClock


def swept(device: SimulatedDevice, host: Host, scenario: Scenario, *, key: str = "") -> Swept:
    """One sweep of a server on this device on this host; chance is drawn by the search's seed, device, host and `key`.

    Raises:
        BatchtuneError: there is no answer.
    """
    named = f"{device.name} {host.name}{key}".encode()
    chances = np.random.default_rng([scenario.search.seed, crc32(named)]).spawn(2)
    clock = VirtualClock()
    target = VirtualTarget(clock)
    fleet, most_rps = VirtualFleet(target, device, host, chances[0]), device.client_max_rps
    summaries: list[SearchSummary] = []
    bench = Bench(
        scenario,
        target,
        fleet,
        on_live=lambda _plan, _live: None,
        now_s=clock,
        sleep=clock.sleep,
        guard=Guard(host, chances[1]),  # type: ignore[arg-type]
        client_max_rps=None if most_rps is None else lambda _requests: most_rps,
    )
    on_event = heard(on_summary=summaries.append)
    trials = [
        done.trial
        for done in sweep_nodes(scenario, lambda _report: OneServer(bench), on_event=on_event, now_s=clock)
    ]
    recommended = recommend(trials, scenario=scenario, search=summaries[0] if summaries else None)
    return Swept(trials=trials, recommended=recommended, clock=clock)
