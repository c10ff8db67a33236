"""The simulator's front door: a scheduler, devices and traffic in, figures out.

Semantics: the bundled server's default scheduler (TensorFlow's SharedBatchScheduler with one queue, or one for each
length bucket): a batch runs as soon as a thread is free and it is full, closed or timed out; it goes on filling while
all threads are busy. Compiled code is loaded at the first run; without a cache from an earlier process that takes
seconds.
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
    """Simulate requests that come when they are due, whatever the server does, on each device.

    due_s: [requests] ascending; rows, lengths: of each request. `seed` draws jitter and random routes, the same for
    each device. Raises ValueError for due times out of order and for requests without rows.
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
    """Simulate clients that send again each time they are answered, `requests` in all, on each device.

    They begin one after another over `spread_s`. A refused client sends again after the front end and the delay, at
    the earliest after 0.1 ms.
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
