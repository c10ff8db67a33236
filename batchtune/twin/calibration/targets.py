"""What does one measurement say about the server's parameters?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from batchtune.measure.measurement import Measurement
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.target.telemetry import ServerActivity
from batchtune.twin.model.length_cost import LengthCost
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher

THROUGHPUT_BETWEEN_SD = 0.03
LATENCY_BETWEEN_SD = {"p50": 0.04, "p95": 0.06}
BATCH_ROWS_SD = 0.10
"""Spread of logarithms between two runs of one configuration, before any repeat is seen."""

FEWEST_BATCHES = 3
FEWEST_FOR_P95 = 20
"""Of fewer requests the 95th percentile is the slowest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRun:
    """One measurement as the fit uses it.

    `targets`: log of throughput (closed loops only), of p50 and p95, of the mean batch; with their standard
    deviations in `sds`. `timed`: (rows, mean execution time, batches) by the server's account, empty when it does
    not tell. `executing`: batches that a running batch finds running, itself included, on the mean. `waits_s`: what
    of its execution a batch waits, were the device serial. `overhead_s`: latency outside queue and execution.
    `timed` is as it would be in one queue, where `length` is known.
    """

    batcher: Batcher
    traffic: Traffic
    targets: Mapping[str, float]
    sds: Mapping[str, float]
    timed: tuple[tuple[float, float, float], ...] = ()
    executing: float = 1.0
    waits_s: float = 0.0
    overhead_s: float | None = None
    rows_seen: tuple[int, ...] = (1,)
    threads_seen: int = 1
    length: LengthCost | None = None

    @property
    def rate_rps(self) -> float:
        """Of an open loop; 0 for a closed one."""
        return 0.0 if self.traffic.closed else self.traffic.rate_rps or 0.0


def fit_run_of(
    batcher: Batcher, traffic: Traffic, measured: Measurement, *, length: LengthCost | None = None
) -> FitRun:
    """Read a measurement; `length` is what all of them say of the lengths of requests."""
    targets, sds = _targets(traffic, measured)
    server = measured.server
    timed = _timed(server)
    if length is not None:
        timed = tuple(
            (rows, seconds / _slower(length, batcher, traffic, rows), count) for rows, seconds, count in timed
        )
    threads_most = (
        batcher.batch_threads if traffic.clients is None else min(batcher.batch_threads, traffic.clients)
    )
    if server is None or not timed:
        return FitRun(
            batcher=batcher,
            traffic=traffic,
            targets=targets,
            sds=sds,
            rows_seen=_rows_guessed(batcher, traffic, server),
            threads_seen=threads_most,
            length=length,
        )
    executing, waits_s = _executing(server, timed, threads_most)
    return FitRun(
        batcher=batcher,
        traffic=traffic,
        targets=targets,
        sds=sds,
        timed=timed,
        executing=executing,
        waits_s=waits_s,
        overhead_s=measured.overhead_mean_s if batcher.max_batch_size is not None else None,
        rows_seen=tuple(int(rows) for rows, _, count in timed if count >= FEWEST_BATCHES)
        or (int(timed[-1][0]),),
        threads_seen=min(threads_most, max(1, math.ceil(2.0 * executing - 1.0 - 0.1))),
        length=length,
    )


def merged(runs: Sequence[FitRun]) -> FitRun:
    """Repeats of one configuration under one load as one measurement, the surer for their number."""
    first = runs[0]
    if len(runs) == 1:
        return first
    names = [name for name in first.targets if all(name in run.targets for run in runs)]
    return replace(
        first,
        targets={name: math.fsum(run.targets[name] for run in runs) / len(runs) for name in names},
        sds={
            name: math.fsum(run.sds[name] for run in runs) / len(runs) / math.sqrt(len(runs))
            for name in names
        },
        timed=tuple(entry for run in runs for entry in run.timed),
        executing=math.fsum(run.executing for run in runs) / len(runs),
        waits_s=math.fsum(run.waits_s for run in runs) / len(runs),
        rows_seen=tuple(rows for run in runs for rows in run.rows_seen),
        threads_seen=max(run.threads_seen for run in runs),
    )


def _targets(traffic: Traffic, measured: Measurement) -> tuple[dict[str, float], dict[str, float]]:
    targets, sds = {}, {}
    for name, between in LATENCY_BETWEEN_SD.items():
        latency = measured.latency_s.get(name)
        if name == "p95" and measured.requests < FEWEST_FOR_P95:
            continue
        if latency is not None and math.isfinite(latency.value) and latency.value > 0.0:
            targets[name] = math.log(latency.value)
            sds[name] = math.hypot(between, _within(latency))
    if traffic.clients is not None:
        # Little's law: a count of answers in a short run of large batches is off by up to a batch.
        cycle_s = measured.latency_mean_s + traffic.think_s
        targets["throughput"] = math.log(traffic.clients / cycle_s)
        sds["throughput"] = math.hypot(THROUGHPUT_BETWEEN_SD, _within(measured.throughput_rps))
    batch_rows = None if measured.server is None else measured.server.mean_batch_rows
    if batch_rows:
        targets["batch_rows"] = math.log(batch_rows)
        sds["batch_rows"] = BATCH_ROWS_SD
    return targets, sds


def _within(estimate: Estimate) -> float:
    """The standard deviation of a logarithm from a 95 % interval, at most 10 %: the model is not as vague as that."""
    return min(estimate.half_width_ratio / 1.96, 0.1)


def _slower(length: LengthCost, batcher: Batcher, traffic: Traffic, rows: float) -> float:
    """How many times as long a batch of so many rows took as it would in one queue, on the mean."""
    if not traffic.lengths:
        return 1.0
    buckets = () if batcher.max_batch_size is None else batcher.length_buckets
    return length.slower(rows, traffic.mean_longest(buckets, rows))


def _timed(server: ServerActivity | None) -> tuple[tuple[float, float, float], ...]:
    if server is None:
        return ()
    return tuple(
        (float(rows), seconds, float(server.batches_by_rows.get(rows, 0)))
        for rows, seconds in sorted(server.execution_s_by_rows.items())
        if seconds > 0.0 and rows > 0 and server.batches_by_rows.get(rows, 0) > 0
    )


def _executing(
    server: ServerActivity, timed: tuple[tuple[float, float, float], ...], threads: int
) -> tuple[float, float]:
    """How many batches run at once as a batch sees it, and how long it waits on a serial device.

    The time spent in batches over the time in which any ran is the mean number while busy, m. A batch sees E[n²]/E[n]
    of them, which lies between m and the value for n being 1 or all threads; the middle of the two is taken.
    """
    batches = sum(count for _, _, count in timed)
    spent_s = sum(seconds * count for _, seconds, count in timed)
    if threads <= 1 or server.duration_s <= 0.0:
        return 1.0, 0.0
    busy_s = spent_s / threads
    if server.device_busy_ratio is not None:
        busy_s = max(server.device_busy_ratio * server.duration_s, busy_s)
    else:
        busy_s = max(min(spent_s, server.duration_s), busy_s)
    mean = max(spent_s / busy_s, 1.0)
    share = (mean - 1.0) / (threads - 1.0)
    extreme = (1.0 - share + share * threads**2) / mean
    return 0.5 * (mean + extreme), max(spent_s - busy_s, 0.0) / batches


def _rows_guessed(batcher: Batcher, traffic: Traffic, server: ServerActivity | None) -> tuple[int, ...]:
    """The largest batch that a server which tells no times may have run."""
    if server is not None and server.batches_by_rows:
        return (max(server.batches_by_rows),)
    if batcher.max_batch_size is None:
        return (traffic.rows_most,)
    if traffic.clients is None:
        return (min(batcher.max_batch_size, max(traffic.rows_most, 1)),)
    return (min(batcher.max_batch_size, traffic.clients * traffic.rows_most),)
