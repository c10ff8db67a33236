"""Simulates a server, its scheduler and the device that runs its batches, under given traffic; returns figures, or
every request and batch.

The scheduler is the bundled server's default one (TensorFlow's SharedBatchScheduler with one queue, or one for each
length bucket): a batch runs as soon as a thread is free and the batch is full, closed or timed out; while all threads
are busy it is filled further. The first run loads the compiled kernels, or compiles them, which takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import (
    AUTO_BUCKETS,
    LENGTH_BUCKETS,
    Boundaries,
    Configuration,
    parse_length_buckets,
)

if TYPE_CHECKING:
    from batchtune.twin.simulator.event_kernel import PlainPlan, PlainRun, World

TRITONS_AHEAD: Final = "Triton forms batches ahead of a free instance, which the simulator does not"

Routing = Literal["round_robin", "random", "least_loaded"]
Rows = int | NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """The scheduler of one replica.

    max_batch_size: rows; None: batching is off, each request runs alone on one of `batch_threads`.
    batch_timeout_s: from the first request of the open batch; 0: as soon as a thread is free.
    max_enqueued_batches: waiting batches, the open one included; None: no limit, 0 counts as 1.
    allowed_batch_sizes: ascending; a batch is padded to the first of them that is large enough.
    max_execution_batch_size: rows of a batch with enable_large_batch_splitting; None: splitting is off.
    length_buckets: greatest length of each queue, ascending; (): one queue; "auto": the server chooses.
    """

    max_batch_size: int | None
    batch_timeout_s: float = 0.0
    batch_threads: int = 1
    max_enqueued_batches: int | None = None
    allowed_batch_sizes: tuple[int, ...] = ()
    max_execution_batch_size: int | None = None
    length_buckets: Boundaries = ()

    def __post_init__(self) -> None:
        if self.batch_threads < 1:
            raise ValueError(f"batch_threads must be positive; was {self.batch_threads}")
        if not 0.0 <= self.batch_timeout_s < math.inf:
            raise ValueError(f"batch_timeout_s must be non-negative and finite; was {self.batch_timeout_s}")
        for name in ("max_batch_size", "max_execution_batch_size"):
            rows = getattr(self, name)
            if rows is not None and rows < 1:
                raise ValueError(f"{name} must be positive; was {rows}")

    @property
    def batch_rows_max(self) -> int | None:
        """Most rows of an executed batch before padding; None: batching is off."""
        return self.max_batch_size if self.max_execution_batch_size is None else self.max_execution_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one replica: how long batches take, and the time that requests spend outside batches.

    tau_s: [rows_max + 1], seconds of a batch of b rows that is alone on the device; tau_s[0] is unused, and a larger
    batch takes tau_s[-1] in proportion to its rows.
    length_s, usual_length: [rows_max + 1]; seconds that each unit of length adds by which the longest request of a
    batch exceeds the usual length of the longest (shorter ones subtract). None: lengths do not matter.
    contention: κ; each of c batches at once runs at 1 / (1 + κ(c-1)) of its speed. 0: they do not slow each other down;
    1: they share one device.
    serial: batches of several threads run one after another, first come first served; `contention` is then unused.
    jitter_ratio: standard deviation over mean of the log-normal factor of each execution.
    delay_s: constant time outside queue and execution, added to each latency.
    front_end_s: serial time of the replica's event loop per request, half on arrival, half on completion.
    """

    tau_s: NDArray[np.float64]
    contention: float = 0.0
    serial: bool = False
    jitter_ratio: float = 0.0
    delay_s: float = 0.0
    front_end_s: float = 0.0
    length_s: NDArray[np.float64] | None = None
    usual_length: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if len(self.tau_s) < 2 or not np.all(np.isfinite(self.tau_s[1:])) or not np.all(self.tau_s[1:] > 0.0):
            raise ValueError("tau_s must hold a positive time for each batch from 1 row on")
        for name in ("contention", "jitter_ratio", "delay_s", "front_end_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be non-negative and finite; was {getattr(self, name)}")


def batcher_of(configuration: Configuration, *, cpus: Collection[int] | None = None) -> Batcher:
    """Make the scheduler that a server builds from a configuration; parameters left out have the server's defaults.

    Servers of other dialects than tfserving have a queue without a limit, and neither pad nor split batches.
    `cpus`: those that the server may run on (`target.cpus`); None: those of this process.
    """
    parameters, threads = configuration.batching, configuration.threads(cpus)
    if parameters is None:
        return Batcher(max_batch_size=None, batch_threads=threads)
    batcher = Batcher(
        max_batch_size=configuration.in_force("max_batch_size"),
        batch_timeout_s=configuration.in_force("batch_timeout_micros") / 1e6,
        batch_threads=threads,
    )
    if configuration.dialect != "tfserving":  # their queue has no limit
        return batcher
    split_rows = parameters.max_execution_batch_size or batcher.max_batch_size
    return replace(
        batcher,
        max_enqueued_batches=configuration.in_force("max_enqueued_batches"),
        allowed_batch_sizes=parameters.allowed_batch_sizes,
        max_execution_batch_size=split_rows if parameters.enable_large_batch_splitting else None,
        length_buckets=parse_length_buckets(configuration.in_force(LENGTH_BUCKETS)),
    )


def left_out(configuration: Configuration) -> tuple[str, ...]:
    """Return a text for each thing that a server does with this configuration and the simulator does not, such as `the
    streaming scheduler is simulated as the shared one`; () if none."""
    if configuration.batching is None:
        return ()
    if configuration.dialect != "triton":
        scheduler = dict(configuration.flags).get("batch_scheduler", "shared")
        return () if scheduler == "shared" else (f"the {scheduler} scheduler is simulated as the shared one",)
    named = [name for name, _ in configuration.flags if configuration.flag_word(name) == name]
    return (TRITONS_AHEAD, *(f"{name} is not simulated" for name in named))


def summary_of(
    traffic: SimulatedTraffic,
    batcher: Batcher,
    devices: Sequence[Device],
    *,
    warm_up_s: float,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
) -> Summary:
    """Simulate traffic on each device; returns figures of shape (devices,).

    Requests due before `warm_up_s` do not count. Jitter and random routes are equal for all devices.
    """
    outcomes = (run_simulation(traffic, batcher, device, count_from_s=warm_up_s) for device in devices)
    return summarise(outcomes, warm_up_s=warm_up_s, quantiles=quantiles)


def closed_traffic(
    clients: int, requests: int, rows: Rows, *, spread_s: float = 0.0, **more: Any
) -> SimulatedTraffic:
    """Make a closed loop of `clients` that ends when `requests` were sent in all; `more`: as `SimulatedTraffic`.

    The clients send their first requests one after another over `spread_s` seconds. A client whose request is refused
    sends again after the front end's time and the delay, but not before 0.1 ms.
    """
    due_s = spread_s * np.arange(min(clients, requests)) / clients
    return SimulatedTraffic(due_s=due_s, rows=rows, requests=requests, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraffic:
    """Requests to `replicas` servers: one at each time of `due_s`, in seconds, and in a closed loop further ones, each
    sent when an earlier one is answered.

    `requests`: how many in all; None: as many as `due_s`. `rows`, `lengths`: of each request, or `rows` one number for
    all; `lengths` None: lengths do not matter. `seed`: of the jitter and the random routes.

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

    `count_from_s`: when the devices' busy time begins to count, in seconds on the clock of `traffic.due_s`.
    """
    if _is_plain(traffic, batcher, device):
        outcome = _run_plain(traffic, batcher, device, count_from_s)
        if outcome is not None:
            return outcome
    return run_by_events(traffic, batcher, device, count_from_s=count_from_s)


def run_by_events(
    traffic: SimulatedTraffic, batcher: Batcher, device: Device, *, count_from_s: float = -math.inf
) -> Outcome:
    """Simulate by the event loop, which handles all traffic; `count_from_s`: as in `run_simulation`."""
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
        and traffic.replicas == 1
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
    """Simulate by the plain kernel; None: a queue gets full, which that kernel cannot simulate."""
    from batchtune.twin.simulator.event_kernel import QUEUE_FULL, simulate_plain

    rows, count = int(np.max(traffic.rows)), len(traffic.due_s)
    limit = batcher.batch_rows_max
    size = 1 if limit is None else min(limit // rows, count)
    plan = plain_plan(batcher, device, size, count_from_s)
    run = new_plain_run(count, plan.threads)
    cost_s = np.ascontiguousarray(costs_s(batcher, device.tau_s, size * rows)[::rows])
    due_s = np.ascontiguousarray(traffic.due_s, np.float64)
    batches = simulate_plain(due_s, cost_s, normals_of(traffic.seed), plan, run)
    return None if batches == QUEUE_FULL else plain_outcome(traffic, run, batches, rows)


def new_plain_run(count: int, threads: int) -> PlainRun:
    """Make the arrays that the plain kernel writes, for `count` requests on `threads` batch threads."""
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


# The results of a simulated run, and their figures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Every request and batch of one simulated run.

    due_s, latency_s: [requests], seconds; the latency of a refused request is inf.
    batch: [requests], number of the batch of each request (of its first part if it was split); -1: refused.
    batch_rows, batch_start_s: [batches], rows before padding, and when a thread took the batch (on a serial device it
    may have waited then). Batches are numbered in the order in which they were opened.
    busy_s: seconds in which devices were busy, summed over all replicas, from `count_from_s` on.
    last_done_s: when the last answer came.
    """

    due_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    batch: NDArray[np.int32]
    batch_rows: NDArray[np.int32]
    batch_start_s: NDArray[np.float64]
    busy_s: float
    last_done_s: float
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one traffic on several devices, each of shape (devices,), without the warm-up.

    throughput_rps: answers per second from the end of the warm-up to the last due time.
    latency_s: [devices, quantiles], seconds, of the requests due after the warm-up; refused ones count as inf.
    mean_latency_s: of those of these requests that are answered. error_ratio: the share that is refused.
    mean_batch_rows: before padding, of the batches that start after the warm-up; nan: none does.
    busy_ratio: share of the time up to the last answer in which a replica's device runs a batch.
    batch_rows_max: largest batch of the whole run, warm-up included, before padding.
    """

    throughput_rps: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    mean_latency_s: NDArray[np.float64]
    mean_batch_rows: NDArray[np.float64]
    error_ratio: NDArray[np.float64]
    busy_ratio: NDArray[np.float64]
    batch_rows_max: NDArray[np.int64]


def summarise(outcomes: Iterable[Outcome], *, warm_up_s: float, quantiles: Sequence[float]) -> Summary:
    """Compute the figures of each outcome, as described in `Summary`."""
    figures = [_figures(outcome, warm_up_s, quantiles) for outcome in outcomes]
    columns = np.array(figures, dtype=np.float64).reshape(len(figures), 6 + len(quantiles))
    return Summary(
        throughput_rps=columns[:, 0],
        mean_latency_s=columns[:, 1],
        mean_batch_rows=columns[:, 2],
        error_ratio=columns[:, 3],
        busy_ratio=columns[:, 4],
        batch_rows_max=columns[:, 5].astype(np.int64),
        latency_s=columns[:, 6:],
    )


def _figures(outcome: Outcome, warm_up_s: float, quantiles: Sequence[float]) -> list[float]:
    first = int(np.searchsorted(outcome.due_s, warm_up_s))
    latency_s = outcome.latency_s[first:]
    answered = latency_s[np.isfinite(latency_s)]
    done_s = outcome.due_s + outcome.latency_s
    end_s = float(outcome.due_s[-1])
    done = np.count_nonzero((done_s >= warm_up_s) & (done_s <= end_s))
    counted_batches = outcome.batch_rows[outcome.batch_start_s >= warm_up_s]
    device_s = outcome.replicas * (outcome.last_done_s - warm_up_s)
    return [
        done / (end_s - warm_up_s) if end_s > warm_up_s else math.nan,
        float(answered.mean()) if len(answered) else math.nan,
        float(counted_batches.mean()) if len(counted_batches) else math.nan,
        1.0 - len(answered) / len(latency_s) if len(latency_s) else math.nan,
        outcome.busy_s / device_s if device_s > 0.0 else math.nan,
        float(outcome.batch_rows.max()) if len(outcome.batch_rows) else 0.0,
        *order_statistics(latency_s, quantiles),
    ]


def order_statistics(values: NDArray[np.float64], probabilities: Sequence[float]) -> NDArray[np.float64]:
    """Return the values at ranks ceil(n·p) for each probability p, shape (probabilities,); nan without values."""
    count = len(values)
    if count == 0:
        return np.full(len(probabilities), math.nan)
    ranks = [min(max(math.ceil(count * p - 1e-9), 1), count) - 1 for p in probabilities]
    return np.asarray(np.partition(values, sorted(set(ranks)))[ranks])
