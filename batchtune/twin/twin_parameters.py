"""Defines the vector of parameters that describes a server, and its values before anything is simulated.

A law turns such a vector into a reading, and has the prior of each parameter; `calibrate` moves the vector. Times are
natural logs; the service time is a first curve, with a factor at each of a few batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.target.telemetry import ServerActivity
from batchtune.twin.service_time import (
    Fitted,
    LengthCost,
    ServiceTime,
    crowding,
    fit_service_time,
    linear_service_time,
)
from batchtune.twin.simulator.simulate import Batcher
from batchtune.twin.traffic import Traffic

THROUGHPUT_BETWEEN_SD = 0.03
LATENCY_BETWEEN_SD = {"p50": 0.04, "p95": 0.06}
"""Standard deviations between runs of one configuration, of the natural log of throughput and of latency quantiles."""

FEWEST_BATCHES = 3
"""Batches of a size that a run must have for that size to count as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRun:
    """One measurement in the form that the fit uses.

    `targets`, `sds`: natural logs of "p50", "p95", "batch_rows" (mean) and in closed loops "throughput", with their
    standard deviations.
    `timed`: (rows, mean seconds, number of batches) by the server's histograms, with `length` as if there were one
    queue; (): the server has none.
    `executing`: mean number of batches that run at once, as a running batch sees it, itself included.
    `waits_s`: mean time of a batch's execution that it waits for others, if the device is serial.
    `overhead_s`: mean latency outside queue and execution; None: unknown.
    `rows_seen`, `threads_seen`: batch sizes measured, and batch threads that were busy at once.
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
    """Make the fit's form of a measurement; `length`: the effect of request lengths, fitted to all measurements."""
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
        rows_seen=_rows_seen(batcher, traffic, measured),
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
    """Merge runs of one configuration under one load into one run: means, and standard deviations over √n."""
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
    """Standard deviation of the natural log of an estimate, from its 95 % interval; at most 0.1."""
    return min(estimate.half_width_ratio / 1.96, 0.1)


def _slower(length: LengthCost, batcher: Batcher, traffic: Traffic, rows: float) -> float:
    """Mean time of a batch of `rows` rows in these length buckets, over that of a batch from one queue."""
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
    """(mean number of batches that run at once as a batch sees it, mean seconds that it waits on a serial device).

    The seconds spent in batches over the seconds in which any ran are m, the mean number n while busy. A batch sees
    E[n²]/E[n] of them, which lies between m (n is constant) and the value where n is either 1 or all threads; the
    middle of these two is returned.
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


def _rows_seen(batcher: Batcher, traffic: Traffic, measured: Measurement) -> tuple[int, ...]:
    """Rows of the largest batch that a server without execution times has surely run, as a tuple of one."""
    server = measured.server
    if server is not None and server.batches_by_rows:
        return (max(server.batches_by_rows),)
    most = math.inf if batcher.max_batch_size is None else batcher.max_batch_size
    p50_s = measured.latency_s["p50"].value
    together = _rows_together(batcher, traffic, traffic.rows_most, p50_s=p50_s)
    return (max(int(min(most, together)), 1),)


def _rows_together(batcher: Batcher, traffic: Traffic, rows: float, *, p50_s: float) -> float:
    """Return how many rows at least wait together for a batch, where a request has `rows` rows.

    In a closed loop some of the clients wait while the others' batches run. A batch with half of the requests holds all
    that it may hold where the timeout is longer than their median latency `p50_s`.
    """
    if batcher.max_batch_size is None or traffic.clients is None:
        return rows
    groups = 1 if traffic.clients == 1 or batcher.batch_timeout_s >= p50_s else batcher.batch_threads + 1
    return max(math.ceil(traffic.clients / groups) * rows, rows)


DELAY, FRONT_END, WAKE, JITTER, BATCH_HOST, ROW_HOST, CROWDING, CONTENTION = range(8)
SCALARS: Final = 8
"""Positions of the parameters in a law's vector, and their number; one factor of τ for each anchor follows them."""

_SPREAD: Final = 1.0
"""Standard deviation of the priors of all times, of the natural log."""

ALONE: Final = 1.1
"""Mean number of batches at once up to which an execution time counts as that of a batch alone on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A family of readings over a vector of parameters, shape (SCALARS + anchors,).

    `serial`: whether batches run one after another. `first`: τ before corrections; the vector's factors multiply it at
    `anchors` (log2 of rows) and, interpolated, between them.
    `start`, `sd`: mean and standard deviation of the vector's normal prior. `length`: as in `Fitted`.
    """

    serial: bool
    first: ServiceTime
    anchors: NDArray[np.float64]
    start: NDArray[np.float64]
    sd: NDArray[np.float64]
    length: LengthCost | None = None

    def reading(self, theta: NDArray[np.float64]) -> Fitted:
        """Return the reading of a vector of parameters, shape (SCALARS + anchors,)."""
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
    """Return the runs with larger standard deviations of latencies where the server was near its saturation.

    A queue's wait grows as 1 / (1 - ρ): where the speed of two runs differs by some per cent, their waits differ by
    ρ / (1 - ρ) times as much. The load ρ follows from the first guess of each law, before anything is simulated.
    """
    tried = [law.reading(law.start) for law in laws(runs)]
    loaded = []
    load_most = 0.97  # Of the saturation: beyond, a latency shows no more than that the server is near it.
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
    """Return the laws to fit: a device that batches share, and where several threads were busy at once also one that
    runs batches one after another."""
    several = any(run.threads_seen > 1 for run in runs)
    return [law_of(runs, serial=serial) for serial in ((False, True) if several else (False,))]


def law_of(runs: Sequence[FitRun], *, serial: bool, anchors: NDArray[np.float64] | None = None) -> Law:
    """Make the law, with its prior, that the fit to these runs starts from; `anchors` None: chosen by the sizes of
    their batches."""
    timed = any(run.timed for run in runs)
    contention, contention_sd = (1.0, 1e-3) if serial else _contention(runs)
    crowding_s = _crowding_s(runs, serial=serial, contention=contention)
    first = _guessed_times(runs)
    if timed:
        first = _told_times(runs, _times_alone(serial=serial, contention=contention, crowding_s=crowding_s))
    anchors_max = 6
    if anchors is None:
        low, high = math.log2(max(first.rows[0], 1.0)), math.log2(max(first.rows[-1], 1.0))
        count = min(anchors_max, len(first.rows), 1 + round(high - low)) if high > low else 1
        anchors = np.linspace(low, high, max(count, 1))
    overheads = [run.overhead_s for run in runs if run.overhead_s is not None and run.overhead_s > 0.0]
    smallest_s = min((math.exp(run.targets["p50"]) for run in runs if "p50" in run.targets), default=1e-3)
    delay_s = 0.6 * min(overheads) if overheads else 0.1 * smallest_s
    start = np.zeros(SCALARS + len(anchors))
    start[CONTENTION], start[CROWDING] = contention, math.log(crowding_s)
    start[DELAY], start[JITTER] = math.log(max(delay_s, 2e-5)), math.log(0.08)
    starts_s = {FRONT_END: 2e-5, WAKE: 5e-5, BATCH_HOST: 8e-5, ROW_HOST: 2e-6}
    for at, seconds in starts_s.items():
        start[at] = math.log(seconds)
    sd = np.full(len(start), _SPREAD)
    sd[CONTENTION] = contention_sd
    told_sd = 0.04
    guessed_sd = 0.4
    sd[SCALARS:] = told_sd if timed else guessed_sd
    return Law(serial=serial, first=first, anchors=anchors, start=start, sd=sd, length=runs[0].length)


_Alone = Callable[[FitRun], list[tuple[float, float, float]]]


def _times_alone(*, serial: bool, contention: float, crowding_s: float) -> _Alone:
    """Return a function that gives a run's execution times as they would be alone on the device: (rows, seconds, number
    of batches).

    Other batches there make them longer, by `contention` or one by one (`serial`); so do requests of an open loop.
    """

    def alone(run: FitRun) -> list[tuple[float, float, float]]:
        crowded = crowding(crowding_s, run.rate_rps)
        if serial:
            times = (
                (rows, max(seconds - run.waits_s, 0.3 * seconds), count) for rows, seconds, count in run.timed
            )
        else:
            slower = 1.0 + contention * (run.executing - 1.0)
            times = ((rows, seconds / slower, count) for rows, seconds, count in run.timed)
        return [(rows, seconds / crowded, count) for rows, seconds, count in times]

    return alone


def _contention(runs: Sequence[FitRun]) -> tuple[float, float]:
    """(contention κ, its standard deviation), from execution times with several batches at once and with one, by least
    squares over κ; a wide prior where no run had several."""
    crowded = [run for run in runs if run.timed and run.executing > ALONE]
    unknown_contention = (0.7, 0.35)
    if not crowded:
        return unknown_contention
    judged = [run for run in crowded if run.traffic.closed] or crowded
    alone = [run for run in runs if run.timed and run.executing <= ALONE]
    alone = [run for run in alone if run.traffic.closed] or alone
    candidates = np.linspace(0.0, 1.5, 31)
    off = [
        _disagreement(alone, judged, _times_alone(serial=False, contention=float(contention), crowding_s=0.0))
        for contention in candidates
    ]
    known_contention_sd = 0.3
    return float(candidates[np.argmin(off)]), known_contention_sd


def _crowding_s(runs: Sequence[FitRun], *, serial: bool, contention: float) -> float:
    """`Fitted.crowding_s` from execution times in open and in closed loops, by least squares with a prior; 3e-6 where
    there are not both."""
    opened = [run for run in runs if run.timed and not run.traffic.closed]
    closed = [run for run in runs if run.timed and run.traffic.closed]
    crowding_start_s, candidates_s = 3e-6, np.geomspace(2e-6, 2e-3, 31)
    if not opened or not closed:
        return crowding_start_s
    off = [
        _disagreement(
            closed, opened, _times_alone(serial=serial, contention=contention, crowding_s=float(crowding_s))
        )
        / THROUGHPUT_BETWEEN_SD**2
        + (math.log(crowding_s / crowding_start_s) / _SPREAD) ** 2
        for crowding_s in candidates_s
    ]
    return float(candidates_s[np.argmin(off)])


def _disagreement(witnesses: Sequence[FitRun], judged: Sequence[FitRun], alone: _Alone) -> float:
    """Sum over the judged runs of the squared mean log ratio of execution times, as if alone, to a curve.

    The curve is fitted to the runs `witnesses`; without any, to the judged ones.
    """
    curve = fit_service_time([entry for run in witnesses or judged for entry in alone(run)])
    total = 0.0
    for run in judged:
        rows, times, counts = np.array(alone(run)).T
        expected = curve.tau_s(int(rows.max()))[rows.astype(np.intp)]
        total += float(np.average(np.log(times / expected), weights=counts)) ** 2
    return total


def _told_times(runs: Sequence[FitRun], alone: _Alone) -> ServiceTime:
    """Fit τ to the server's histograms, the most reliable runs first.

    Closed loops with one batch at a time are most reliable; then open loops, whose requests slow the execution down;
    then runs with several batches at once. Open loops add only sizes far from those known already, and the last only
    sizes outside the range of those.
    """
    tiers: list[list[tuple[float, float, float]]] = [[], [], []]
    witnesses: list[list[tuple[float, float, float]]] = [[], [], []]
    for run in runs:
        place = 2 if run.executing > ALONE else 0 if run.traffic.closed else 1
        entries = alone(run)
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
    """The entries of one run whose size was executed often enough for its time to be reliable."""
    batches = math.fsum(count for _, _, count in entries)
    # unless it is this share of a run's batches: a slow model runs few of them, and each is timed well.
    witnessed_share = 0.2
    few = max(FEWEST_BATCHES, witnessed_share * batches)
    witnessed = 20  # A size that was run fewer times is no witness of its execution time,
    return [entry for entry in entries if entry[2] >= min(witnessed, few)]


def _guessed_times(runs: Sequence[FitRun]) -> ServiceTime:
    """Fit a line to a guess of (rows, seconds) for each run, for a server without histograms: in a closed loop batches
    follow each other, so that τ ≈ rows of a batch / rows per second."""
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
    together = _rows_together(batcher, traffic, traffic.mean_rows, p50_s=p50_s)
    rows = min(batcher.max_batch_size or together, together)
    if "batch_rows" in run.targets:
        rows = math.exp(run.targets["batch_rows"])
    rows = max(rows, traffic.mean_rows)
    return rows, rows / (math.exp(run.targets["throughput"]) * traffic.mean_rows)
