"""How is one traffic played against several devices, and for how long?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher, Device, Routing
from batchtune.twin.simulator.simulate import closed_summary, open_summary
from batchtune.twin.simulator.summary import Summary

FEWEST_REQUESTS = 4_000
MOST_REQUESTS = 40_000

BATCHES = 150
"""Batches of the largest size that a simulation should see; requests of one batch are not independent."""

WARM_UP_SHARE = 0.1

_MANY_REFUSED_RATIO = 0.2
_LONGER_WHEN_REFUSED = 20
"""Clients of a closed loop that are refused come again at once, and use up a simulation's requests in no time."""

MOST_REQUESTS_OF_POOL = 100_000
"""Several replicas all count for the quantile, so that each need not see as many."""


def play(
    batcher: Batcher,
    traffic: Traffic,
    devices: Sequence[Device],
    *,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
    requests: int | None = None,
    replicas: int = 1,
    routing: Routing = "round_robin",
) -> Summary:
    """Simulate; the first tenth is warm-up. `requests` None: enough for a p95.

    A think time is played as a delay of the answer and taken off the latencies again. The clients of a closed loop
    begin while the first request runs: N of them that fit into a batch then go round in two halves for ever, as they
    do with a real server. Sent at one instant they would all join the first batch, and every one after it.
    """
    count = requests or min(replicas * enough_requests(batcher, traffic), MOST_REQUESTS_OF_POOL)
    if traffic.clients is not None:
        warm_up_s = _closed_warm_up_s(batcher, traffic, devices[0], count)
        played = _play_closed(batcher, traffic, devices, count, quantiles, warm_up_s, replicas, routing)
        if np.all(played.error_ratio < _MANY_REFUSED_RATIO):
            return played
        count *= _LONGER_WHEN_REFUSED
        return _play_closed(batcher, traffic, devices, count, quantiles, 0.0, replicas, routing)
    due_s = traffic.due_s(count)
    return open_summary(
        due_s,
        traffic.rows_of(len(due_s)),
        batcher,
        devices,
        lengths=traffic.lengths_of(len(due_s)),
        warm_up_s=WARM_UP_SHARE * float(due_s[-1]),
        quantiles=tuple(quantiles),
        replicas=replicas,
        routing=routing,
        seed=traffic.seed,
    )


def _play_closed(
    batcher: Batcher,
    traffic: Traffic,
    devices: Sequence[Device],
    count: int,
    quantiles: Sequence[float],
    warm_up_s: float,
    replicas: int,
    routing: Routing,
) -> Summary:
    if traffic.think_s:
        devices = [replace(device, delay_s=device.delay_s + traffic.think_s) for device in devices]
    summary = closed_summary(
        traffic.clients or 1,
        count,
        traffic.rows_of(count),
        batcher,
        devices,
        lengths=traffic.lengths_of(count),
        warm_up_s=warm_up_s,
        spread_s=float(devices[0].tau_s[1]),
        quantiles=tuple(quantiles),
        replicas=replicas,
        routing=routing,
        seed=traffic.seed,
    )
    return replace(
        summary,
        latency_s=summary.latency_s - traffic.think_s,
        mean_latency_s=summary.mean_latency_s - traffic.think_s,
    )


def enough_requests(batcher: Batcher, traffic: Traffic) -> int:
    """So many that p95 rests on BATCHES batches, and a closed loop goes round 40 times."""
    rows = batcher.max_batch_size or 1
    of_batches = BATCHES * rows / traffic.mean_rows
    of_clients = 40 * (traffic.clients or 0)
    if traffic.clients is not None:
        of_batches = min(of_batches, BATCHES * traffic.clients)
    return int(min(max(of_batches, of_clients, FEWEST_REQUESTS), MOST_REQUESTS))


def _closed_warm_up_s(batcher: Batcher, traffic: Traffic, device: Device, count: int) -> float:
    """A tenth of the time that so many requests take at least."""
    rows = min(batcher.max_batch_size or traffic.rows_most, len(device.tau_s) - 1)
    in_flight_rows = (traffic.clients or 1) * traffic.mean_rows
    rows = max(int(min(rows, in_flight_rows)), 1)
    per_batch_s = float(device.tau_s[rows]) / max(batcher.batch_threads, 1)
    return WARM_UP_SHARE * count * traffic.mean_rows / rows * per_batch_s
