"""What does a timeout cost when there is only half the load that it was tuned for?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from batchtune.batching import Configuration
from batchtune.errors import TwinError
from batchtune.scenario.spec import Scenario
from batchtune.scenario.units import rounded_duration
from batchtune.tune.space import in_force
from batchtune.twin.model import Twin
from batchtune.twin.simulate import batcher_of
from batchtune.twin.traffic import traffic_of


def at_half_load(
    configuration: Configuration,
    scenario: Scenario,
    twin: Mapping[str, Any] | None,
    *,
    rate_rps: float | None,
) -> str | None:
    """By the twin: p95 with the timeout and without; None where there is no timeout, no twin, or it cannot tell."""
    batching = configuration.batching
    timeout_micros = in_force(configuration, "batch_timeout_micros")
    if batching is None or twin is None or not timeout_micros:
        return None
    traffic = traffic_of(scenario, rate_rps=rate_rps) if scenario.load.open_loop else traffic_of(scenario)
    if traffic.closed:
        half = replace(traffic, clients=max(1, (traffic.clients or 2) // 2))
        load = f"{half.clients} clients"
    else:
        half = traffic.at(0.5 * (traffic.rate_rps or 0.0))
        load = "half the rate"
    unwaiting = replace(configuration, batching=replace(batching, batch_timeout_micros=0))
    try:
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
    except (TwinError, ValueError, KeyError, TypeError):
        return None
    if not (np.isfinite(with_s) and np.isfinite(without_s)):
        return None
    return (
        f"at half the load ({load}) the twin expects p95 {rounded_duration(with_s)}, with a timeout of 0 "
        f"{rounded_duration(without_s)}"
    )
