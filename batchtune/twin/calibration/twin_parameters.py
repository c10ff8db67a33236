"""The numbers that describe a server, and their values before any run is simulated.

A law is a reading of the server's parameters as a vector, with a prior for each: what the least squares of `fit`
move. Times are on the log scale; the service time is a first curve with a factor at each of a few sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.target.telemetry import ServerActivity
from batchtune.twin.model.reading import Fitted, crowding
from batchtune.twin.model.service_time import LengthCost, ServiceTime, fit_service_time, linear_service_time
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher

THROUGHPUT_BETWEEN_SD = 0.03
LATENCY_BETWEEN_SD = {"p50": 0.04, "p95": 0.06}

FEWEST_BATCHES = 3


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
        """Rate of an open loop, requests/s; 0 for a closed loop."""
        return 0.0 if self.traffic.closed else self.traffic.rate_rps or 0.0


def fit_run_of(
    batcher: Batcher, traffic: Traffic, measured: Measurement, *, length: LengthCost | None = None
) -> FitRun:
    """Turn a measurement into what the fit uses; `length` is the cost of lengths that all measurements show."""
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
    run = FitRun(
        batcher=batcher,
        traffic=traffic,
        targets=targets,
        sds=sds,
        rows_seen=_rows_guessed(batcher, traffic, server),
        threads_seen=threads_most,
        length=length,
    )
    if server is None or not timed:
        return run
    executing, waits_s = _executing(server, timed, threads_most)
    often = tuple(int(rows) for rows, _, count in timed if count >= FEWEST_BATCHES)
    return replace(
        run,
        timed=timed,
        executing=executing,
        waits_s=waits_s,
        overhead_s=measured.overhead_mean_s if batcher.max_batch_size is not None else None,
        rows_seen=often or (int(timed[-1][0]),),
        threads_seen=min(threads_most, max(1, math.ceil(2.0 * executing - 1.0 - 0.1))),
    )


def merged(runs: Sequence[FitRun]) -> FitRun:
    """Merge repeats of one configuration under one load into one run, with smaller standard deviations."""
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
    fewest_for_p95 = 20  # Of fewer requests the 95th percentile is the slowest of them.
    for name, between in LATENCY_BETWEEN_SD.items():
        latency = measured.latency_s.get(name)
        if name == "p95" and measured.requests < fewest_for_p95:
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
    # Spread of logarithms between two runs of one configuration, before any repeat is seen.
    batch_rows_sd = 0.10
    if batch_rows:
        targets["batch_rows"] = math.log(batch_rows)
        sds["batch_rows"] = batch_rows_sd
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


DELAY, FRONT_END, WAKE, JITTER, BATCH_HOST, ROW_HOST, CROWDING, CONTENTION = range(8)
SCALARS: Final = 8

_STARTS_S: Final = {FRONT_END: 2e-5, WAKE: 5e-5, BATCH_HOST: 8e-5, ROW_HOST: 2e-6}
_SPREAD: Final = 1.0

_CROWDINGS_S: Final = np.geomspace(2e-6, 2e-3, 31)


ALONE: Final = 1.1
"""Up to so many batches at once an execution time counts as that of a batch alone on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A family of readings: `first` is τ before corrections, factors apply at `anchors` (log2 of rows).

    `start` and `sd` describe the prior of the vector, shape (SCALARS + anchors,).
    """

    serial: bool
    first: ServiceTime
    anchors: NDArray[np.float64]
    start: NDArray[np.float64]
    sd: NDArray[np.float64]
    length: LengthCost | None = None

    def reading(self, theta: NDArray[np.float64]) -> Fitted:
        """Turn a vector of parameters, shape (SCALARS + anchors,), into a reading of the server."""
        sizes = np.log2(np.maximum(np.array(self.first.rows), 1.0))
        factors = np.exp(np.interp(sizes, self.anchors, theta[SCALARS:]))
        host_s, row_host_s = np.exp(theta[[BATCH_HOST, ROW_HOST]])
        return Fitted(
            service_time=self.first.scaled(factors, fixed_s=float(host_s), per_row_s=float(row_host_s)),
            contention=float(np.clip(theta[CONTENTION], 0.0, 2.0)),
            serial=self.serial,
            jitter_ratio=float(np.clip(np.exp(theta[JITTER]), 1e-4, 2.0)),
            delay_s=float(np.exp(theta[DELAY])),
            front_end_s=float(np.exp(theta[FRONT_END])),
            wake_s=float(np.exp(theta[WAKE])),
            crowding_s=float(np.exp(theta[CROWDING])),
            length=self.length,
        )


def with_load(runs: Sequence[FitRun]) -> list[FitRun]:
    """Widen the standard deviations of latencies by the load: near saturation a small difference in speed makes a large
    one in wait.

    A queue's wait grows as 1 / (1 - ρ): where runs differ in speed by some per cent, it differs ρ / (1 - ρ) times as
    much. The load ρ is by what the server's execution times alone say, before anything is simulated.
    """
    tried = [law.reading(law.start) for law in laws(runs)]
    loaded = []
    load_most = 0.97  # Of the saturation: beyond, a latency tells no more than that the server is near it.
    for run in runs:
        saturation_rps = min(reading.saturation_rps(run.batcher, run.traffic) for reading in tried)
        load = min(run.rate_rps / saturation_rps, load_most)
        spread = THROUGHPUT_BETWEEN_SD * load / (1.0 - load)
        sds = {
            name: math.hypot(sd, spread) if name in LATENCY_BETWEEN_SD else sd for name, sd in run.sds.items()
        }
        loaded.append(replace(run, sds=sds))
    return loaded


def laws(runs: Sequence[FitRun]) -> list[Law]:
    """List the laws to fit: a device shared by its batches, and where several threads were busy also one that runs them
    in turn."""
    several = any(run.threads_seen > 1 for run in runs)
    return [law_of(runs, serial=serial) for serial in ((False, True) if several else (False,))]


def law_of(runs: Sequence[FitRun], *, serial: bool, anchors: NDArray[np.float64] | None = None) -> Law:
    """Make the law that these measurements start from; `anchors`, if given, are kept from another fit."""
    timed = any(run.timed for run in runs)
    contention, contention_sd = (1.0, 1e-3) if serial else _contention(runs)
    crowding_s = _crowding_s(runs, serial=serial, contention=contention)
    first = _guessed_times(runs)
    if timed:
        first = _told_times(runs, _Slower(serial=serial, contention=contention, crowding_s=crowding_s))
    anchors_max = 6
    if anchors is None:
        low, high = math.log2(max(first.rows[0], 1.0)), math.log2(max(first.rows[-1], 1.0))
        count = min(anchors_max, len(first.rows), 1 + round(high - low)) if high > low else 1
        anchors = np.linspace(low, high, max(count, 1))
    overheads = [run.overhead_s for run in runs if run.overhead_s is not None and run.overhead_s > 0.0]
    smallest_s = min((math.exp(run.targets["p50"]) for run in runs if "p50" in run.targets), default=1e-3)
    delay_s = 0.6 * min(overheads) if overheads else 0.1 * smallest_s
    start = np.zeros(SCALARS + len(anchors))
    start[DELAY], start[JITTER], start[CONTENTION] = (
        math.log(max(delay_s, 2e-5)),
        math.log(0.08),
        contention,
    )
    start[CROWDING] = math.log(crowding_s)
    for at, seconds in _STARTS_S.items():
        start[at] = math.log(seconds)
    sd = np.full(len(start), _SPREAD)
    sd[CONTENTION] = contention_sd
    told_sd = 0.04
    guessed_sd = 0.4
    sd[SCALARS:] = told_sd if timed else guessed_sd
    return Law(serial=serial, first=first, anchors=anchors, start=start, sd=sd, length=runs[0].length)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slower:
    """By what an execution takes longer than alone on the device."""

    serial: bool
    contention: float
    crowding_s: float

    def alone(self, run: FitRun) -> list[tuple[float, float, float]]:
        """Execution times as they would be alone on the device: (rows, seconds, batches)."""
        crowded = crowding(self.crowding_s, run.rate_rps)
        if self.serial:
            times = (
                (rows, max(seconds - run.waits_s, 0.3 * seconds), count) for rows, seconds, count in run.timed
            )
        else:
            slower = 1.0 + self.contention * (run.executing - 1.0)
            times = ((rows, seconds / slower, count) for rows, seconds, count in run.timed)
        return [(rows, seconds / crowded, count) for rows, seconds, count in times]


def _contention(runs: Sequence[FitRun]) -> tuple[float, float]:
    """κ from execution times with several batches at once against those with one, by least squares over κ."""
    crowded = [run for run in runs if run.timed and run.executing > ALONE]
    unknown_contention = (0.7, 0.35)
    if not crowded:
        return unknown_contention
    judged = [run for run in crowded if run.traffic.closed] or crowded
    alone = [run for run in runs if run.timed and run.executing <= ALONE]
    alone = [run for run in alone if run.traffic.closed] or alone
    candidates = np.linspace(0.0, 1.5, 31)
    off = [
        _disagreement(alone, judged, _Slower(serial=False, contention=float(contention), crowding_s=0.0))
        for contention in candidates
    ]
    known_contention_sd = 0.3
    return float(candidates[np.argmin(off)]), known_contention_sd


def _crowding_s(runs: Sequence[FitRun], *, serial: bool, contention: float) -> float:
    """From execution times in open loops against those in closed ones; what runs differ by anyway is no evidence."""
    opened = [run for run in runs if run.timed and not run.traffic.closed]
    closed = [run for run in runs if run.timed and run.traffic.closed]
    crowding_start_s = 3e-6
    if not opened or not closed:
        return crowding_start_s
    off = [
        _disagreement(
            closed, opened, _Slower(serial=serial, contention=contention, crowding_s=float(crowding_s))
        )
        / THROUGHPUT_BETWEEN_SD**2
        + (math.log(crowding_s / crowding_start_s) / _SPREAD) ** 2
        for crowding_s in _CROWDINGS_S
    ]
    return float(_CROWDINGS_S[np.argmin(off)])


def _disagreement(witnesses: Sequence[FitRun], judged: Sequence[FitRun], slower: _Slower) -> float:
    """Squared logs between execution times, as if alone, and the curve of the witnesses (none: their own)."""
    curve = fit_service_time([entry for run in witnesses or judged for entry in slower.alone(run)])
    total = 0.0
    for run in judged:
        rows, times, counts = np.array(slower.alone(run)).T
        expected = curve.tau_s(int(rows.max()))[rows.astype(np.intp)]
        total += float(np.average(np.log(times / expected), weights=counts)) ** 2
    return total


def _told_times(runs: Sequence[FitRun], slower: _Slower) -> ServiceTime:
    """From the server's histograms, the plainest witnesses first.

    Those are closed loops with one batch at a time; then come open loops, whose requests crowd the execution; then
    runs with several batches at once. The later ones count only for sizes far from those that are known already, the
    last only for sizes outside their range.
    """
    tiers: list[list[tuple[float, float, float]]] = [[], [], []]
    witnesses: list[list[tuple[float, float, float]]] = [[], [], []]
    for run in runs:
        place = 2 if run.executing > ALONE else 0 if run.traffic.closed else 1
        entries = slower.alone(run)
        tiers[place] += entries
        witnesses[place] += _witnesses(entries)
    known = witnesses[0] or tiers[0]
    far_octaves = 0.9
    for at in range(1, len(tiers)):
        tier = witnesses[at] if known else tiers[at]
        sizes = np.log2([entry[0] for entry in known]) if known else np.array([-math.inf])
        far = [entry for entry in tier if np.min(np.abs(math.log2(entry[0]) - sizes)) >= far_octaves]
        if at == len(tiers) - 1 and known:
            far = [entry for entry in far if not sizes.min() <= math.log2(entry[0]) <= sizes.max()]
        known = known + far
    return fit_service_time(known)


def _witnesses(entries: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """The sizes of one run that were executed often enough to say how long they take."""
    batches = math.fsum(count for _, _, count in entries)
    # unless it is this share of a run's batches: a slow model runs few of them, and each is timed well.
    witnessed_share = 0.2
    few = max(FEWEST_BATCHES, witnessed_share * batches)
    witnessed = 20  # A size that was run fewer times is no witness of its execution time,
    return [entry for entry in entries if entry[2] >= min(witnessed, few)]


def _guessed_times(runs: Sequence[FitRun]) -> ServiceTime:
    """A line through rough guesses: in a closed loop batches follow each other, so τ ≈ rows of a batch / rows per s."""
    guesses = [_guess(run) for run in runs]
    rows, seconds = np.array(guesses).T
    fixed_s, per_row_s = float(seconds.min()), 0.0
    if rows.max() > rows.min():
        design = np.stack([np.ones_like(rows), rows], axis=1) / seconds[:, None]
        solved = np.linalg.lstsq(design, np.ones_like(rows), rcond=None)[0]
        fixed_s, per_row_s = max(float(solved[0]), 0.1 * fixed_s), max(float(solved[1]), 0.0)
    return linear_service_time(fixed_s, per_row_s, [1.0, *rows.tolist()])


def _guess(run: FitRun) -> tuple[float, float]:
    traffic, batcher = run.traffic, run.batcher
    p50_s = math.exp(run.targets["p50"])
    if traffic.clients is None:
        return traffic.mean_rows, max(p50_s - batcher.batch_timeout_s, 0.3 * p50_s)
    waiting = traffic.clients * traffic.mean_rows
    together = waiting if batcher.batch_timeout_s > 0.0 or traffic.clients == 1 else 0.5 * waiting
    rows = traffic.mean_rows if batcher.max_batch_size is None else min(batcher.max_batch_size, together)
    rows = (
        math.exp(run.targets["batch_rows"]) if "batch_rows" in run.targets else max(rows, traffic.mean_rows)
    )
    return rows, rows / (math.exp(run.targets["throughput"]) * traffic.mean_rows)
