"""Simulates a scheduler and several devices under given traffic, and returns figures: the simulator's interface.

The scheduler is the bundled server's default one (TensorFlow's SharedBatchScheduler with one queue, or one for each
length bucket): a batch runs as soon as a thread is free and the batch is full, closed or timed out; while all threads
are busy it is filled further. The first call loads compiled code, or compiles it, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.replica import Batcher, Device, Routing, Rows, Summary, summarise


def open_summary(  # noqa: PLR0913 traffic, batcher, devices, and what to count
    due_s: NDArray[np.float64],
    rows: Rows,
    batcher: Batcher,
    devices: Sequence[Device],
    *,
    warm_up_s: float,
    lengths: NDArray[np.int32] | None = None,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
    replicas: int = 1,
    routing: Routing = "round_robin",
    seed: int = 1,
) -> Summary:
    """Simulate an open loop on each device; returns figures of shape (devices,).

    `due_s`: seconds, ascending, shape (requests,). `rows`, `lengths`: of each request, shape (requests,);
    `rows` may be one number. Requests due before `warm_up_s` do not count. `seed`: of the jitter and the
    random routes, which are equal for all devices.

    Raises:
        ValueError: due times are not finite and ascending, a request has no row, or there is none.
    """
    from batchtune.twin.simulator.simulation import OpenTraffic, run_open

    traffic = OpenTraffic(
        due_s=due_s, rows=rows, lengths=lengths, replicas=replicas, routing=routing, seed=seed
    )
    outcomes = (run_open(traffic, batcher, device, count_from_s=warm_up_s) for device in devices)
    return summarise(outcomes, warm_up_s=warm_up_s, quantiles=quantiles)


def closed_summary(  # noqa: PLR0913 as open_summary
    clients: int,
    requests: int,
    rows: Rows,
    batcher: Batcher,
    devices: Sequence[Device],
    *,
    warm_up_s: float,
    lengths: NDArray[np.int32] | None = None,
    spread_s: float = 0.0,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
    replicas: int = 1,
    routing: Routing = "round_robin",
    seed: int = 1,
) -> Summary:
    """Simulate a closed loop on each device, until `requests` requests were sent in all; figures as `open_summary`.

    The clients send their first requests one after another over `spread_s` seconds. A client whose request is refused
    sends again after the front end's time and the delay, but not before 0.1 ms.
    """
    from batchtune.twin.simulator.simulation import ClosedTraffic, run_closed

    traffic = ClosedTraffic(
        clients=clients,
        requests=requests,
        rows=rows,
        lengths=lengths,
        spread_s=spread_s,
        replicas=replicas,
        routing=routing,
        seed=seed,
    )
    outcomes = (run_closed(traffic, batcher, device, count_from_s=warm_up_s) for device in devices)
    return summarise(outcomes, warm_up_s=warm_up_s, quantiles=quantiles)
