"""Defines a simulated server, its scheduler and the device that runs its batches, and sums up the results of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.length_buckets import LENGTH_BUCKETS, NO_BUCKETS, Boundaries, parse_length_buckets
from batchtune.batching.parameters import (
    DEFAULT_BATCH_TIMEOUT_MICROS,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    Configuration,
    default_num_batch_threads,
)

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

    `cpus`: those that the server may run on (`target.cpus`); None: those of this process.
    """
    parameters = configuration.batching
    if configuration.dialect == "triton" or (configuration.instances_flag and parameters is None):
        return _tritons_batcher(configuration)
    if parameters is None:
        return Batcher(max_batch_size=None, batch_threads=4 * default_num_batch_threads(cpus))
    size, timeout_micros = parameters.max_batch_size, parameters.batch_timeout_micros
    waiting, threads = parameters.max_enqueued_batches, parameters.num_batch_threads
    boundaries = parse_length_buckets(dict(configuration.flags).get(LENGTH_BUCKETS, NO_BUCKETS))
    rows_max = DEFAULT_MAX_BATCH_SIZE if size is None else size
    split_rows = parameters.max_execution_batch_size or rows_max
    return Batcher(
        max_batch_size=rows_max,
        batch_timeout_s=(DEFAULT_BATCH_TIMEOUT_MICROS if timeout_micros is None else timeout_micros) / 1e6,
        batch_threads=default_num_batch_threads(cpus) if threads is None else threads,
        max_enqueued_batches=DEFAULT_MAX_ENQUEUED_BATCHES if waiting is None else waiting,
        allowed_batch_sizes=parameters.allowed_batch_sizes,
        max_execution_batch_size=split_rows if parameters.enable_large_batch_splitting else None,
        length_buckets=boundaries,
    )


def left_out(configuration: Configuration) -> tuple[str, ...]:
    """Return a text for each thing that a server does with this configuration and the simulator does not; () if
    none."""
    if configuration.batching is None:
        return ()
    if configuration.dialect != "triton":
        scheduler = dict(configuration.flags).get("batch_scheduler", "shared")
        return () if scheduler == "shared" else (f"the {scheduler} scheduler is simulated as the shared one",)
    named = [name for name, _ in configuration.flags if configuration.flag_word(name) == name]
    return (TRITONS_AHEAD, *(f"{name} is not simulated" for name in named))


def _tritons_batcher(configuration: Configuration) -> Batcher:
    """Make Triton's scheduler: its queue has no limit, and without batching each instance runs one request."""
    parameters = configuration.batching
    if parameters is None:
        instances = int(dict(configuration.flags).get(configuration.instances_flag, 1))
        return Batcher(max_batch_size=None, batch_threads=instances)
    return Batcher(
        max_batch_size=parameters.max_batch_size,
        batch_timeout_s=(parameters.batch_timeout_micros or 0) / 1e6,
        batch_threads=parameters.num_batch_threads or 1,
    )


# The results of a simulated run, and their figures.


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Every request and batch of one simulated run.

    due_s, latency_s: [requests], seconds; the latency of a refused request is inf.
    batch: [requests], number of the batch of each request (of its first part if it was split); -1: refused.
    batch_rows, batch_start_s: [batches], rows before padding, and when a thread took the batch (on a serial device it
    may have waited then). Batches are numbered in the order in which they were opened, with several replicas replica by
    replica where these run apart.
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
    """Figures of one traffic on several devices, each of shape (devices,), from the end of the warm-up on.

    throughput_rps: answers per second up to the last due time.
    latency_s: [devices, quantiles], seconds, of the requests due from then on; refused ones count as inf.
    mean_latency_s: of the answered ones of them. error_ratio: share of them that is refused.
    mean_batch_rows: before padding, of the batches that start from then on; nan: none does.
    busy_ratio: share of the time up to the last answer in which a replica's device runs a batch.
    batch_rows_max: largest batch of the whole run, before padding.
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
