"""What does a timeout cost when there is only half the load that it was tuned for?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchtuneError
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import counted, rounded_duration
from batchtune.tune.trials.space import in_force
from batchtune.twin.model.traffic import Traffic, traffic_of
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import batcher_of


def at_half_load(
    configuration: Configuration,
    scenario: Scenario,
    twin: Mapping[str, Any] | None,
    *,
    rate_rps: float | None,
) -> str | None:
    """By the twin: p95 with the timeout and without.

    None where there is no timeout, no twin, no half of the load (one client, or no rate), or the twin cannot tell, or
    tells no difference.
    """
    batching = configuration.batching
    timeout_micros = in_force(configuration, "batch_timeout_micros")
    if batching is None or twin is None or not timeout_micros:
        return None
    unwaiting = replace(configuration, batching=replace(batching, batch_timeout_micros=0))
    try:
        half = _half(scenario, rate_rps=rate_rps)
        if half is None:
            return None
        reading = Twin.from_dict(twin)
        with_s, without_s = (
            float(
                np.median(
                    reading.predict(
                        batcher_of(tried, cpus=scenario.target.cpus), half, only_best=True
                    ).latency_s["p95"]
                )
            )
            for tried in (configuration, unwaiting)
        )
    except (BatchtuneError, ArithmeticError, OSError, ValueError, KeyError, TypeError):
        return None
    if not (np.isfinite(with_s) and np.isfinite(without_s)):
        return None
    if rounded_duration(with_s) == rounded_duration(without_s):
        return None
    load = "half the rate" if half.clients is None else counted(half.clients, "client")
    return (
        f"at half the load ({load}) the twin expects p95 {rounded_duration(with_s)}, with a timeout of 0 "
        f"{rounded_duration(without_s)}"
    )


def _half(scenario: Scenario, *, rate_rps: float | None) -> Traffic | None:
    """Half the clients, or the scenario's pattern at half the rate; None for one client, and without a mean rate."""
    traffic = traffic_of(scenario, rate_rps=rate_rps) if scenario.load.open_loop else traffic_of(scenario)
    if traffic.clients is not None:
        return replace(traffic, clients=traffic.clients // 2) if traffic.clients > 1 else None
    return traffic.at(0.5 * traffic.rate_rps) if traffic.rate_rps else None
