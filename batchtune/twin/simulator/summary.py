"""What do the columns of a simulated run sum up to?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a kernel has written: every request and batch of one run.

    due_s, latency_s [requests]: seconds; the latency of a refused request is inf.
    batch [requests]: number of the batch that served it (its first part when it was split), -1 refused.
    batch_rows, batch_start_s [batches]: rows before padding; when a thread began to run it (it may still have waited
    for a serial device). Batches are numbered by when they were opened, with several replicas within each.
    busy_s: over all replicas, from `count_from_s` on.
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


def summarise(outcomes: Iterable[Outcome], *, warm_up_s: float, quantiles: Sequence[float]) -> Summary:
    """The figures of each outcome; see Summary for what counts."""
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
    """The values at ranks ceil(n·p), [probabilities]; nan without values."""
    count = len(values)
    if count == 0:
        return np.full(len(probabilities), math.nan)
    ranks = [min(max(math.ceil(count * p - 1e-9), 1), count) - 1 for p in probabilities]
    return np.asarray(np.partition(values, sorted(set(ranks)))[ranks])
