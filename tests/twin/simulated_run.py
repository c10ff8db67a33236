"""One run of the simulator, request by request: what tests and benchmarks look at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    Outcome,
    Routing,
    Rows,
    SimulatedTraffic,
    closed_traffic,
    order_statistics,
    run_simulation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Columns as in `Outcome`; duration_s: from the first due time to the last answer."""

    due_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    batch: NDArray[np.int32]
    batch_rows: NDArray[np.int32]
    batch_start_s: NDArray[np.float64]
    duration_s: float

    @property
    def throughput_rps(self) -> float:
        """Answered requests per second of the whole run, its ramp and tail included."""
        return float(np.count_nonzero(np.isfinite(self.latency_s)) / self.duration_s)

    @property
    def error_ratio(self) -> float:
        return float(np.mean(np.isinf(self.latency_s)))

    @property
    def mean_batch_rows(self) -> float:
        return float(np.mean(self.batch_rows)) if len(self.batch_rows) else math.nan

    @property
    def mean_latency_s(self) -> float:
        """Of the answered requests."""
        answered = self.latency_s[np.isfinite(self.latency_s)]
        return float(np.mean(answered)) if len(answered) else math.nan

    def quantile(self, probability: float) -> float:
        """Latency at rank ceil(n·p); refused requests count as inf, as in a measurement."""
        return float(order_statistics(self.latency_s, (probability,))[0])


def simulate_open(
    due_s: NDArray[np.float64],
    rows: Rows,
    batcher: Batcher,
    device: Device,
    *,
    replicas: int = 1,
    routing: Routing = "round_robin",
    seed: int = 1,
) -> SimulatedRun:
    """Requests that come when they are due, whatever the server does.

    due_s: [requests] ascending; rows: of each request. `seed` draws jitter and random routes. Raises ValueError for
    due times out of order and for requests without rows.
    """
    traffic = SimulatedTraffic(due_s=due_s, rows=rows, replicas=replicas, routing=routing, seed=seed)
    return run_of(run_simulation(traffic, batcher, device))


def simulate_closed(
    clients: int,
    requests: int,
    rows: Rows,
    batcher: Batcher,
    device: Device,
    *,
    replicas: int = 1,
    routing: Routing = "round_robin",
    seed: int = 1,
    lengths: NDArray[np.int32] | None = None,
) -> SimulatedRun:
    """Clients that send at 0 and then each time they are answered, until `requests` were sent.

    A refused client sends again after the front end and the delay, at the earliest after 0.1 ms.
    """
    traffic = closed_traffic(
        clients=clients,
        requests=requests,
        rows=rows,
        lengths=lengths,
        replicas=replicas,
        routing=routing,
        seed=seed,
    )
    return run_of(run_simulation(traffic, batcher, device))


def run_of(outcome: Outcome) -> SimulatedRun:
    return SimulatedRun(
        due_s=outcome.due_s,
        latency_s=outcome.latency_s,
        batch=outcome.batch,
        batch_rows=outcome.batch_rows,
        batch_start_s=outcome.batch_start_s,
        duration_s=max(outcome.last_done_s, float(outcome.due_s[-1])) - float(outcome.due_s[0]),
    )
