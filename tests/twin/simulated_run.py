"""One run of the simulator, request by request: what tests and benchmarks look at."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    Outcome,
    Rows,
    SimulatedTraffic,
    closed_traffic,
    order_statistics,
    run_simulation,
)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun(Outcome):
    @property
    def duration_s(self) -> float:
        """From the first due time to the last answer."""
        return max(self.last_done_s, float(self.due_s[-1])) - float(self.due_s[0])

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


def run_of(outcome: Outcome) -> SimulatedRun:
    return SimulatedRun(**{field.name: getattr(outcome, field.name) for field in fields(Outcome)})


def simulate_open(
    due_s: NDArray[np.float64], rows: Rows, batcher: Batcher, device: Device, **more: Any
) -> SimulatedRun:
    """Requests that come when they are due, whatever the server does; `more`: as SimulatedTraffic."""
    return run_of(run_simulation(SimulatedTraffic(due_s=due_s, rows=rows, **more), batcher, device))


def simulate_closed(
    clients: int, requests: int, rows: Rows, batcher: Batcher, device: Device, **more: Any
) -> SimulatedRun:
    """Clients that send at 0 and then each time they are answered, until `requests` were sent."""
    return run_of(run_simulation(closed_traffic(clients, requests, rows, **more), batcher, device))
