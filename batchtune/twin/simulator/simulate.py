"""Simulates a scheduler and several devices under given traffic, and returns figures, or every request and batch.

The scheduler is the bundled server's default one (TensorFlow's SharedBatchScheduler with one queue, or one for each
length bucket): a batch runs as soon as a thread is free and the batch is full, closed or timed out; while all threads
are busy it is filled further. The first run loads the compiled kernels, or compiles them, which takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.length_buckets import AUTO_BUCKETS
from batchtune.twin.simulator.replica import Batcher, Device, Outcome, Routing, Rows, Summary, summarise

if TYPE_CHECKING:
    from batchtune.twin.simulator.event_kernel import PlainPlan, PlainRun, World


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
    traffic = SimulatedTraffic(
        due_s=due_s, rows=rows, lengths=lengths, replicas=replicas, routing=routing, seed=seed
    )
    outcomes = (run_simulation(traffic, batcher, device, count_from_s=warm_up_s) for device in devices)
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
    traffic = SimulatedTraffic(
        due_s=spread_s * np.arange(min(clients, requests)) / clients,
        rows=rows,
        requests=requests,
        lengths=lengths,
        replicas=replicas,
        routing=routing,
        seed=seed,
    )
    outcomes = (run_simulation(traffic, batcher, device, count_from_s=warm_up_s) for device in devices)
    return summarise(outcomes, warm_up_s=warm_up_s, quantiles=quantiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraffic:
    """Requests to `replicas` servers: those with a due time in seconds, and in a closed loop further ones.

    `requests`: how many in all; None: as many as `due_s`. Those without a due time are sent one by one, each when one
    is answered. `rows`, `lengths`: of all requests; `lengths` None: they do not matter.

    Raises:
        ValueError: due times are not finite and ascending, a request has no row, or there is no request or replica.
    """

    due_s: NDArray[np.float64]
    rows: Rows
    requests: int | None = None
    lengths: NDArray[np.int32] | None = None
    replicas: int = 1
    routing: Routing = "round_robin"
    seed: int = 1

    def __post_init__(self) -> None:
        if not len(self.due_s):
            raise ValueError("there is no request to simulate: no due time, or no client")
        if self.replicas < 1:
            raise ValueError(f"replicas must be positive; was {self.replicas}")
        if not isinstance(self.rows, int) and len(self.rows) != self.count:
            raise ValueError(
                f"rows must be one number or one for each of {self.count} requests; were {len(self.rows)}"
            )
        if np.min(self.rows) < 1:
            raise ValueError("a request must have at least one row")
        if not np.all(np.isfinite(self.due_s)) or np.any(self.due_s[1:] < self.due_s[:-1]):
            raise ValueError("due times must be finite and ascending")

    @property
    def count(self) -> int:
        """Number of requests in all."""
        return len(self.due_s) if self.requests is None else self.requests


def run_simulation(
    traffic: SimulatedTraffic, batcher: Batcher, device: Device, *, count_from_s: float = -math.inf
) -> Outcome:
    """Simulate by the plain kernel where traffic and device allow it, else by the event loop.

    `count_from_s`: when the devices' busy time begins to count.
    """
    if _is_plain(traffic, batcher, device):
        outcome = _run_plain(traffic, batcher, device, count_from_s)
        if outcome is not None:
            return outcome
    return run_by_events(traffic, batcher, device, count_from_s=count_from_s)


def run_by_events(
    traffic: SimulatedTraffic, batcher: Batcher, device: Device, *, count_from_s: float = -math.inf
) -> Outcome:
    """Simulate by the event loop, which handles all traffic."""
    from batchtune.twin.simulator.event_kernel import BATCHES, simulate

    world = new_world(traffic, batcher, device, count_from_s)
    simulate(world)
    batches = int(world.counts[BATCHES])
    return Outcome(
        due_s=world.requests["due_s"].copy(),
        latency_s=world.requests["latency_s"].copy(),
        batch=world.requests["batch"].copy(),
        batch_rows=world.batches["rows"][:batches].copy(),
        batch_start_s=world.batches["start_s"][:batches].copy(),
        busy_s=float(world.replicas["busy_s"].sum()),
        last_done_s=float(world.replicas["last_done_s"].max()),
        replicas=traffic.replicas,
    )


def costs_s(batcher: Batcher, tau_s: NDArray[np.float64], rows_max: int) -> NDArray[np.float64]:
    """Compute the seconds of batches of 0 to `rows_max` rows, padded to the allowed sizes, shape (rows_max + 1,).

    Beyond the end of `tau_s` the time grows in proportion to the rows.
    """
    rows = np.arange(rows_max + 1)
    if batcher.max_batch_size is not None and batcher.allowed_batch_sizes:
        allowed = np.array(batcher.allowed_batch_sizes)
        place = np.searchsorted(allowed, rows)
        rows = np.where(place < len(allowed), allowed[np.minimum(place, len(allowed) - 1)], rows)
    known = len(tau_s) - 1
    beyond = np.maximum(rows / known, 1.0)
    return np.asarray(np.asarray(tau_s, dtype=np.float64)[np.minimum(rows, known)] * beyond)


def _is_plain(traffic: SimulatedTraffic, batcher: Batcher, device: Device) -> bool:
    limit = batcher.batch_rows_max
    return (
        traffic.requests is None
        and isinstance(traffic.rows, int)
        and traffic.lengths is None
        and (traffic.replicas == 1 or traffic.routing != "least_loaded")
        and device.front_end_s == 0.0
        and (device.serial or device.contention == 0.0 or batcher.batch_threads == 1)
        and (limit is None or (traffic.rows <= limit and limit % traffic.rows == 0))
    )


def plain_plan(batcher: Batcher, device: Device, size: int, count_from_s: float) -> PlainPlan:
    """Make the parameters of the plain kernel; `size`: requests of a full batch."""
    from batchtune.twin.simulator.event_kernel import PlainPlan

    return PlainPlan(
        size=size,
        batches_max=_batches_max(batcher),
        threads=batcher.batch_threads,
        serial=device.serial,
        timeout_s=0.0 if batcher.max_batch_size is None else batcher.batch_timeout_s,
        sigma=_sigma(device),
        delay_s=device.delay_s,
        count_from_s=count_from_s,
    )


def _run_plain(
    traffic: SimulatedTraffic, batcher: Batcher, device: Device, count_from_s: float
) -> Outcome | None:
    """Simulate each replica by itself, since its arrivals do not depend on the others, by the plain kernel.

    None: a queue gets full, which that kernel cannot simulate.
    """
    from batchtune.twin.simulator.event_kernel import QUEUE_FULL, simulate_plain

    rows, count = int(np.max(traffic.rows)), len(traffic.due_s)
    limit = batcher.batch_rows_max
    size = 1 if limit is None else min(limit // rows, count)
    plan = plain_plan(batcher, device, size, count_from_s)
    cost_s = np.ascontiguousarray(costs_s(batcher, device.tau_s, size * rows)[::rows])
    whole, normals = new_plain_run(count, plan.threads), normals_of(traffic.seed)
    route = _route(traffic, count)
    batches_before = 0
    for index in range(traffic.replicas):
        mine = np.flatnonzero(route == index) if traffic.replicas > 1 else slice(None)
        due_s = np.ascontiguousarray(traffic.due_s[mine], np.float64)
        if not len(due_s):
            continue
        run = new_plain_run(len(due_s), plan.threads)
        jitter = np.roll(normals, index) if index else normals
        batches = simulate_plain(due_s, cost_s, jitter, plan, run)
        if batches == QUEUE_FULL:
            return None
        whole.latency_s[mine] = run.latency_s
        whole.batch[mine] = run.batch + batches_before
        here = slice(batches_before, batches_before + batches)
        whole.batch_requests[here] = run.batch_requests[:batches]
        whole.batch_start_s[here] = run.batch_start_s[:batches]
        whole.totals[0] += run.totals[0]
        whole.totals[1] = max(whole.totals[1], run.totals[1])
        batches_before += batches
    return plain_outcome(traffic, whole, batches_before, rows)


def new_plain_run(count: int, threads: int) -> PlainRun:
    """Make the arrays that the plain kernel writes, for `count` requests."""
    from batchtune.twin.simulator.event_kernel import PlainRun

    return PlainRun(
        latency_s=np.empty(count),
        batch=np.empty(count, dtype=np.int32),
        batch_requests=np.empty(count, dtype=np.int32),
        batch_start_s=np.empty(count),
        totals=np.zeros(2),
        free_s=np.full(threads, -math.inf),
    )


def plain_outcome(traffic: SimulatedTraffic, run: PlainRun, batches: int, rows: int) -> Outcome:
    """Make the outcome of a run of the plain kernel; `rows`: of each request."""
    return Outcome(
        due_s=traffic.due_s,
        latency_s=run.latency_s,
        batch=run.batch,
        batch_rows=run.batch_requests[:batches] * np.int32(rows),
        batch_start_s=run.batch_start_s[:batches],
        busy_s=float(run.totals[0]),
        last_done_s=float(run.totals[1]),
        replicas=traffic.replicas,
    )


def new_world(traffic: SimulatedTraffic, batcher: Batcher, device: Device, count_from_s: float) -> World:
    """Make the state in which the event loop starts."""
    from batchtune.twin.simulator.event_kernel import (
        BATCH,
        NONE,
        PART,
        QUEUE,
        REPLICA,
        REQUEST,
        RUNNING,
        World,
    )

    planned = len(traffic.due_s)
    requests = np.zeros(traffic.count, dtype=REQUEST)
    requests["rows"] = traffic.rows
    requests["batch"] = NONE
    requests["due_s"][:planned] = traffic.due_s
    lone = batcher.max_batch_size is None
    splits = batcher.max_execution_batch_size is not None and not lone
    limit = batcher.batch_rows_max or int(requests["rows"].max())
    parts = int((requests["rows"] // limit + 2).sum()) if splits else len(requests)
    replicas = np.zeros(traffic.replicas, dtype=REPLICA)
    for name in ("front_first", "client_first"):
        replicas[name] = NONE
    replicas["idle_threads"] = batcher.batch_threads
    replicas["times_out_s"] = math.inf
    replicas["device_free_s"] = replicas["front_free_s"] = replicas["last_done_s"] = -math.inf
    boundaries = (
        () if batcher.length_buckets == AUTO_BUCKETS or traffic.lengths is None else batcher.length_buckets
    )
    queues = np.zeros(traffic.replicas * (len(boundaries) + 1), dtype=QUEUE)
    queues["open_batch"] = NONE
    if traffic.lengths is not None:
        requests["length"] = traffic.lengths
        requests["queue"] = np.searchsorted(boundaries, traffic.lengths)
    rows_max = min(limit, int(requests["rows"].sum(dtype=np.int64)))
    tau_s, length_s = device.tau_s, np.zeros_like(device.tau_s)
    if device.length_s is not None and device.usual_length is not None and traffic.lengths is not None:
        tau_s, length_s = tau_s - device.usual_length * device.length_s, device.length_s
    leaves = 1 << (traffic.replicas - 1).bit_length()
    return World(
        requests=requests,
        parts=np.zeros(parts, dtype=PART),
        batches=np.zeros(parts, dtype=BATCH),
        replicas=replicas,
        queues=queues,
        buckets=len(boundaries) + 1,
        running=np.zeros((traffic.replicas, batcher.batch_threads), dtype=RUNNING),
        counts=np.zeros(5, dtype=np.int64),
        next_s=np.full(2 * leaves, math.inf),
        route=_route(traffic, len(requests)),
        cost_s=costs_s(batcher, tau_s, rows_max),
        length_cost_s=costs_s(batcher, length_s, rows_max),
        normals=normals_of(traffic.seed),
        planned=planned,
        lone=lone,
        splits=splits,
        serial=device.serial,
        batch_rows_max=limit,
        task_rows_max=batcher.max_batch_size or limit,
        batches_max=_batches_max(batcher),
        timeout_s=batcher.batch_timeout_s,
        contention=float(device.contention),
        sigma=_sigma(device),
        half_front_s=device.front_end_s / 2.0,
        delay_s=float(device.delay_s),
        count_from_s=float(count_from_s),
    )


def _route(traffic: SimulatedTraffic, requests: int) -> NDArray[np.int32]:
    if traffic.routing == "least_loaded" and traffic.replicas > 1:
        return np.zeros(0, dtype=np.int32)
    if traffic.replicas == 1:
        return np.zeros(requests, dtype=np.int32)
    if traffic.routing == "random":
        return np.random.default_rng(traffic.seed).integers(traffic.replicas, size=requests, dtype=np.int32)
    return np.asarray(np.arange(requests) % traffic.replicas, dtype=np.int32)


def _batches_max(batcher: Batcher) -> int:
    return 2**31 if batcher.max_enqueued_batches is None else max(batcher.max_enqueued_batches, 1)


def _sigma(device: Device) -> float:
    return math.sqrt(math.log1p(device.jitter_ratio**2))


@lru_cache(maxsize=16)
def normals_of(seed: int) -> NDArray[np.float64]:
    """Draw the standard normal numbers for the jitter, shape (65536,); one seed makes the same for each device."""
    return np.random.default_rng(seed).standard_normal(2**16)
