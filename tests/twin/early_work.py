"""The streaming scheduler with early work, simulated: requests are worked on as they come, while their batch is open.

For the benchmark of the stages and its tests: a twin takes that scheduler for the shared one. One batch fills up after
another, so that they are played one by one, as plain traffic is.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.event_kernel import PlainPlan, PlainRun, compiled
from batchtune.twin.simulator.simulate import (
    Batcher,
    Device,
    Outcome,
    SimulatedTraffic,
    costs_s,
    new_plain_run,
    normals_of,
    plain_outcome,
    plain_plan,
)


def run_early(
    traffic: SimulatedTraffic,
    batcher: Batcher,
    device: Device,
    early_s: float,
    *,
    count_from_s: float = -math.inf,
) -> Outcome:
    """Of one server, whose device is serial or serves all batches alike; requests that are refused are among them.

    `early_s`: what preparing a row takes.
    """
    if not (0.0 <= early_s < math.inf and batcher.batch_timeout_s > 0.0):
        raise ValueError("early work takes a time, and its batches close by a timeout above 0")
    if traffic.replicas > 1 or device.front_end_s or (device.contention and not device.serial):
        raise ValueError("early work is simulated of one server without front end or contention")
    count = len(traffic.due_s)
    rows = np.ascontiguousarray(np.broadcast_to(np.asarray(traffic.rows, dtype=np.int32), count))
    rows_max = batcher.batch_rows_max or int(rows.max())
    plan = plain_plan(batcher, device, rows_max, count_from_s)
    run = new_plain_run(count, plan.threads)
    due_s = np.ascontiguousarray(traffic.due_s, np.float64)
    cost_s = costs_s(batcher, device.tau_s, rows_max)
    batches = _simulate_early(due_s, rows, cost_s, normals_of(traffic.seed), early_s, plan, run)
    return plain_outcome(traffic, run, batches, 1)


@compiled
def _simulate_early(
    due_s: NDArray[np.float64],
    rows: NDArray[np.int32],
    cost_s: NDArray[np.float64],
    normals: NDArray[np.float64],
    early_s: float,
    plan: PlainPlan,
    run: PlainRun,
) -> int:
    """The number of batches of the streaming scheduler with early work: one fills up after another.

    A batch has a thread from its first request on, which prepares each as it comes; with none free requests are refused
    (latency inf). It closes when it is full, when a request has no room, or `timeout_s` after the first; what is not
    prepared then follows, and the device part. `early_s`: what preparing a row takes, `cost_s` [size + 1]: execution of
    so many rows. Of a serial device batches take their turn in the order in which they were opened. `plan.size` and
    `run.batch_requests` count rows.
    """
    requests = len(due_s)
    free_s = run.free_s
    device_free_s = covered_s = last_done_s = -math.inf
    busy_s = 0.0
    request = batches = thread = 0
    no_batch = -1
    while request < requests:
        for other in range(plan.threads):
            if free_s[other] < free_s[thread]:
                thread = other
        if free_s[thread] > due_s[request] or rows[request] > plan.size:
            run.latency_s[request] = math.inf
            run.batch[request] = no_batch
            request += 1
            continue
        first = request
        closes_s = due_s[first] + plan.timeout_s
        prepared_s = due_s[first]
        taken = 0
        while request < requests and taken < plan.size and due_s[request] < closes_s:
            if taken + rows[request] > plan.size:
                closes_s = due_s[request]
            else:
                prepared_s = max(prepared_s, due_s[request]) + early_s * rows[request]
                taken += rows[request]
                run.batch[request] = batches
                request += 1
        if taken == plan.size:
            closes_s = due_s[request - 1]
        start_s = max(closes_s, prepared_s)
        jitter = plan.sigma * normals[batches % len(normals)] - 0.5 * plan.sigma * plan.sigma
        began_s = max(start_s, device_free_s) if plan.serial else start_s
        finish_s = began_s + cost_s[taken] * math.exp(jitter)
        device_free_s = free_s[thread] = finish_s
        busy_s += max(finish_s - max(began_s, covered_s, plan.count_from_s), 0.0)
        covered_s = max(covered_s, finish_s)
        done_s = finish_s + plan.delay_s
        last_done_s = max(last_done_s, done_s)
        for member in range(first, request):
            run.latency_s[member] = done_s - due_s[member]
        run.batch_requests[batches] = taken
        run.batch_start_s[batches] = start_s
        batches += 1
    run.totals[0] = busy_s
    run.totals[1] = last_done_s
    return batches
