"""What would a server with this scheduler, on this device, do with this traffic? The simulator's front door.

Semantics: the bundled server's default scheduler (TensorFlow's SharedBatchScheduler with one queue): a batch runs as
soon as a thread is free and it is full, closed or timed out; it goes on filling while all threads are busy. Compiled
code is loaded at the first run; without a cache from an earlier process that takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.batching import (
    DEFAULT_BATCH_TIMEOUT_MICROS,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    Configuration,
    default_num_batch_threads,
)

Routing = Literal["round_robin", "random", "least_loaded"]
Rows = int | NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """One replica's scheduler.

    max_batch_size: rows; None: batching is off, each request runs alone on one of `batch_threads`.
    batch_timeout_s: from the first request of the open batch; 0 means as soon as a thread is free.
    max_enqueued_batches: waiting batches, the open one included; None: no limit, 0 is taken as 1.
    allowed_batch_sizes: ascending; a batch runs as the first of them that holds it.
    max_execution_batch_size: rows of a batch with splitting on (enable_large_batch_splitting); None: splitting off.
    """

    max_batch_size: int | None
    batch_timeout_s: float = 0.0
    batch_threads: int = 1
    max_enqueued_batches: int | None = None
    allowed_batch_sizes: tuple[int, ...] = ()
    max_execution_batch_size: int | None = None

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
    """What a batch costs.

    tau_s: [rows_max + 1], execution of b rows alone on the device; tau_s[0] is unused, and a batch of more rows
    takes tau_s[-1] in proportion to its rows.
    contention: κ; c batches at once each run at the rate 1/(1 + κ(c-1)): 0 parallel, 1 shares one device.
    serial: batches of several threads run one after another, first come first served; contention is then unused.
    jitter_ratio: standard deviation / mean of a log-normal factor of each execution.
    delay_s: constant time outside queue and execution, added to each latency.
    front_end_s: serial work per request of a replica's event loop, half on arrival, half on completion.
    """

    tau_s: NDArray[np.float64]
    contention: float = 0.0
    serial: bool = False
    jitter_ratio: float = 0.0
    delay_s: float = 0.0
    front_end_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.tau_s) < 2 or not np.all(np.isfinite(self.tau_s[1:])) or not np.all(self.tau_s[1:] > 0.0):
            raise ValueError("tau_s must hold a positive time for each batch from 1 row on")
        for name in ("contention", "jitter_ratio", "delay_s", "front_end_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be non-negative and finite; was {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one traffic on several devices, [draws] each; latency_s [draws, quantiles], refused ones as inf.

    Latencies and errors of the requests due from the warm-up's end on; rate of the answers from there to the last
    due time; batches (rows before padding; nan: none) that start from there on; busy_ratio: share of the time, from
    there to the last answer, in which a replica's device runs at least one batch. batch_rows_max: the largest batch
    of the run, before padding.
    """

    throughput_rps: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    mean_latency_s: NDArray[np.float64]
    mean_batch_rows: NDArray[np.float64]
    error_ratio: NDArray[np.float64]
    busy_ratio: NDArray[np.float64]
    batch_rows_max: NDArray[np.int64]


def batcher_of(configuration: Configuration, *, cpus: Collection[int] | None = None) -> Batcher:
    """The scheduler that the bundled server makes of a configuration; absent values are its defaults.

    `cpus` are those that it may run on (`target.cpus`); None: those of this process.
    """
    parameters = configuration.batching
    if parameters is None:
        return Batcher(max_batch_size=None, batch_threads=4 * default_num_batch_threads(cpus))
    size, timeout_micros = parameters.max_batch_size, parameters.batch_timeout_micros
    waiting, threads = parameters.max_enqueued_batches, parameters.num_batch_threads
    rows_max = DEFAULT_MAX_BATCH_SIZE if size is None else size
    split_rows = parameters.max_execution_batch_size or rows_max
    return Batcher(
        max_batch_size=rows_max,
        batch_timeout_s=(DEFAULT_BATCH_TIMEOUT_MICROS if timeout_micros is None else timeout_micros) / 1e6,
        batch_threads=default_num_batch_threads(cpus) if threads is None else threads,
        max_enqueued_batches=DEFAULT_MAX_ENQUEUED_BATCHES if waiting is None else waiting,
        allowed_batch_sizes=parameters.allowed_batch_sizes,
        max_execution_batch_size=split_rows if parameters.enable_large_batch_splitting else None,
    )


def open_summary(  # noqa: PLR0913 traffic, batcher, devices, and what to count
    due_s: NDArray[np.float64],
    rows: Rows,
    batcher: Batcher,
    devices: Sequence[Device],
    *,
    warm_up_s: float,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
    replicas: int = 1,
    routing: Routing = "round_robin",
    seed: int = 1,
) -> Summary:
    """Requests that come when they are due, whatever the server does, summed up for each device.

    due_s: [requests] ascending; rows: of each request. `seed` draws jitter and random routes, the same for each
    device. Raises ValueError for due times out of order and for requests without rows.
    """
    from batchtune.twin.run_summary import summarise
    from batchtune.twin.runs import OpenTraffic, run_open

    traffic = OpenTraffic(due_s=due_s, rows=rows, replicas=replicas, routing=routing, seed=seed)
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
    spread_s: float = 0.0,
    quantiles: Sequence[float] = (0.5, 0.95, 0.99),
    replicas: int = 1,
    routing: Routing = "round_robin",
    seed: int = 1,
) -> Summary:
    """Clients that send each time they are answered, until `requests` were sent, summed up for each device.

    They begin one after another over `spread_s`. A refused client sends again after the front end and the delay, at
    the earliest after 0.1 ms.
    """
    from batchtune.twin.run_summary import summarise
    from batchtune.twin.runs import ClosedTraffic, run_closed

    traffic = ClosedTraffic(
        clients=clients,
        requests=requests,
        rows=rows,
        spread_s=spread_s,
        replicas=replicas,
        routing=routing,
        seed=seed,
    )
    outcomes = (run_closed(traffic, batcher, device, count_from_s=warm_up_s) for device in devices)
    return summarise(outcomes, warm_up_s=warm_up_s, quantiles=quantiles)


def order_statistics(values: NDArray[np.float64], probabilities: Sequence[float]) -> NDArray[np.float64]:
    """The values at ranks ceil(n·p), [probabilities]; nan without values."""
    count = len(values)
    if count == 0:
        return np.full(len(probabilities), math.nan)
    ranks = [min(max(math.ceil(count * p - 1e-9), 1), count) - 1 for p in probabilities]
    return np.asarray(np.partition(values, sorted(set(ranks)))[ranks])
