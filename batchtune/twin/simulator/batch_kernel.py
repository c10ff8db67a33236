"""What becomes of plain traffic: one queue of equal requests, some threads? Batch by batch instead of by events.

For open arrivals whose rows fill a batch evenly, on one replica without a front end, and on a device that is serial,
parallel or used by one thread. A batch then starts at the latest of three instants that are known at once: its
thread is free, it is full, it times out. The event loop takes 7 to 26 times as long for the same figures: 10 million
requests a second against 70 million in batches of 2, 12 against 320 in batches of 31
(tests/benchmarks/twin/simulator.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.jit import compiled

QUEUE_FULL = -1


class PlainPlan(NamedTuple):
    """`size`: requests per full batch; `batches_max`: waiting batches; `sigma`: of the log-normal jitter."""

    size: int
    batches_max: int
    threads: int
    serial: bool
    timeout_s: float
    sigma: float
    delay_s: float
    count_from_s: float


class PlainRun(NamedTuple):
    """What a run writes, [requests] each: latency and batch of each request, requests and start of each batch.

    `totals`: seconds that the device was busy from `count_from_s` on; when the last answer came. `free_s` [threads]:
    from when on each thread is free, -inf at first.
    """

    latency_s: NDArray[np.float64]
    batch: NDArray[np.int32]
    batch_requests: NDArray[np.int32]
    batch_start_s: NDArray[np.float64]
    totals: NDArray[np.float64]
    free_s: NDArray[np.float64]


@compiled
def simulate_plain(
    due_s: NDArray[np.float64],
    cost_s: NDArray[np.float64],
    normals: NDArray[np.float64],
    plan: PlainPlan,
    run: PlainRun,
) -> int:
    """The number of batches, or QUEUE_FULL as soon as a request would be refused.

    `due_s` [requests] ascending; `cost_s` [size + 1]: execution of so many requests. The order of events at one
    instant is the general simulator's.
    """
    requests = len(due_s)
    free_s = run.free_s
    device_free_s = covered_s = last_done_s = -math.inf
    busy_s = 0.0
    first = arrived = batches = thread = 0
    while first < requests:
        for other in range(plan.threads):
            if free_s[other] < free_s[thread]:
                thread = other
        timed_out_s = due_s[first] + plan.timeout_s
        full_s = due_s[first + plan.size - 1] if first + plan.size <= requests else math.inf
        start_s = max(free_s[thread], min(timed_out_s, full_s))
        if start_s == full_s and full_s < timed_out_s:
            taken = plan.size
        else:
            while arrived < requests and due_s[arrived] < start_s:
                arrived += 1
            taken = max(1, min(plan.size, arrived - first))
            if arrived - first > plan.size * plan.batches_max:
                return QUEUE_FULL
        work_s = cost_s[taken]
        if plan.sigma > 0.0:
            draw = normals[batches % len(normals)]
            work_s *= math.exp(plan.sigma * draw - 0.5 * plan.sigma * plan.sigma)
        finish_s = start_s + work_s
        if plan.serial:
            finish_s = max(start_s, device_free_s) + work_s
            device_free_s = finish_s
        free_s[thread] = finish_s
        busy_s += max(finish_s - max(start_s, covered_s, plan.count_from_s), 0.0)
        covered_s = max(covered_s, finish_s)
        done_s = finish_s + plan.delay_s
        last_done_s = max(last_done_s, done_s)
        for request in range(first, first + taken):
            run.latency_s[request] = done_s - due_s[request]
            run.batch[request] = batches
        run.batch_requests[batches] = taken
        run.batch_start_s[batches] = start_s
        batches += 1
        first += taken
        arrived = max(arrived, first)
    run.totals[0] = busy_s
    run.totals[1] = last_done_s
    return batches
