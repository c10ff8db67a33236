"""Which requests count? Those of the steady part: after the warm-up, before the schedule's end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.load.record.samples import Samples, Status

LONG_WINDOW_S = 10.0
"""From this length on, MSER-5 may lengthen the warm-up, and the halves of a window are compared."""

FEW_TURNS = 20
"""Turns of a client in a window: with so many, where the window's edges fall moves the rate by less than 5 %."""

PARTS = 20
DIFFERENT_T = 4.0
"""Beyond this Student's t two parts of a run differ. Of steady runs of 15 s, batch servers up to 90 % load and bursts
among them, up to 2 in 100 do; of runs in 2 % overload nearly all (tests/measure/test_steady_state.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A half-open stretch of a run, in ns since the run started; `steady` is False when its halves differ."""

    start_ns: int
    end_ns: int
    steady: bool = True

    @property
    def seconds(self) -> float:
        return max(self.end_ns - self.start_ns, 0) / 1e9

    def holds(self, times_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (times_ns >= self.start_ns) & (times_ns < self.end_ns)


def warm_up_needed_s(
    *,
    at_least_s: float = 1.0,
    batch_timeout_s: float = 0.0,
    batch_s: float = 0.0,
    batch_threads: int = 1,
    batch_rows: float = 1.0,
    rows_per_s: float | None = None,
) -> float:
    """How long the start of a run is thrown away (measurement.md 2.2).

    The longest of `at_least_s` (the scenario's, 1 s without), three times timeout + time of one batch, and the
    time in which each batch thread gets four batches of `batch_rows` at `rows_per_s`. `batch_rows` is what a batch
    will hold, not what it may hold: few clients never fill a batch of 1000.
    """
    four_batches_s = 4.0 * batch_threads * batch_rows / rows_per_s if rows_per_s else 0.0
    return max(at_least_s, 3.0 * (batch_timeout_s + batch_s), four_batches_s)


def window_of(samples: Samples, *, warm_up_s: float, duration_s: float | None = None) -> Window:
    """From the end of the warm-up to the end of the schedule.

    `duration_s` is the schedule's length, warm-up included; None: up to the last request due. A run that was stopped
    ends with the last request that became due. A window of `LONG_WINDOW_S` begins later where MSER-5 says so and what
    is cut differs from the rest: on its own MSER-5 also cuts the busy spells with which a steady run may begin, and
    the intervals would then hold less than they say.
    """
    start_ns = round(warm_up_s * 1e9)
    end_ns = round(duration_s * 1e9) if duration_s is not None else _last(samples.due_ns) + 1
    if samples.stopped_early:
        end_ns = min(end_ns, _last(samples.due_ns) + 1)
    window = Window(start_ns=start_ns, end_ns=max(end_ns, start_ns))
    if window.seconds < LONG_WINDOW_S:
        return window
    answered = np.flatnonzero(window.holds(samples.due_ns) & (samples.status == Status.OK))
    in_order = answered[np.argsort(samples.due_ns[answered], kind="stable")]
    latency_ns = samples.latency_ns[in_order].astype(np.float64)
    cut = mser5(latency_ns) or 0
    if cut and parts_differ(latency_ns, cut):
        start_ns, latency_ns = int(samples.due_ns[in_order[cut]]), latency_ns[cut:]
    steady = not parts_differ(latency_ns, len(latency_ns) // 2)
    return Window(start_ns=start_ns, end_ns=window.end_ns, steady=steady)


def whole_run(samples: Samples) -> Window:
    """From the start to the last answer: the window of a run of a fixed number of requests, ramp and tail included."""
    return Window(start_ns=0, end_ns=max(_last(samples.done_ns), _last(samples.due_ns)) + 1)


def between_answers(samples: Samples, window: Window) -> Window:
    """A closed loop's window, moved to where answers came in, when its clients had few turns in it.

    Answers come a batch at a time, so a window of four batches that begins and ends anywhere is a quarter of a batch
    off on average; from the end of one batch to the end of another the rate is exact. Where not even one answer came in
    it, the whole run counts: all clients were waiting until the end.
    """
    clients = samples.concurrency or 1
    done_ns = np.sort(samples.done_ns[samples.status == Status.OK])
    inside = int(np.count_nonzero(window.holds(done_ns)))
    if not len(done_ns) or inside >= FEW_TURNS * clients:
        return window
    earlier = done_ns[done_ns <= window.start_ns]
    start_ns = int(earlier[-1]) + 1 if len(earlier) else 0
    counted = done_ns[(done_ns >= start_ns) & (done_ns < window.end_ns)]
    end_ns = int(counted[-1] if len(counted) else done_ns[-1]) + 1
    if end_ns <= start_ns:
        return window
    return Window(start_ns=start_ns, end_ns=end_ns, steady=window.steady)


def mser5(values: NDArray[np.float64]) -> int | None:
    """How many leading values to cut: batch means of five, truncated where the error of the mean is smallest.

    None: the best cut lies in the second half, too few values are left to tell. Fewer than 50 values: 0.
    Source: White, Cobb & Spratt, "A comparison of five steady-state truncation heuristics" (WSC 2000).
    """
    groups = len(values) // 5
    if groups < 10:
        return 0
    means = values[: groups * 5].reshape(groups, 5).mean(axis=1)
    means = means - means.mean()
    remaining = np.arange(groups, 0, -1, dtype=np.float64)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum(means[::-1] ** 2)[::-1]
    error = (squares - sums**2 / remaining) / remaining**2
    best = int(np.argmin(error[: groups - 5]))
    return None if best > groups // 2 else best * 5


def parts_differ(values: NDArray[np.float64], cut: int) -> bool:
    """Whether the means of values[:cut] and values[cut:] differ by more than twentieths within either part spread."""
    if not 0 < cut < len(values) or len(values) < 2 * PARTS:
        return False
    size = len(values) / PARTS
    means = [
        np.array([block.mean() for block in np.array_split(part, max(1, round(len(part) / size)))])
        for part in (values[:cut], values[cut:])
    ]
    within = np.concatenate([block - block.mean() for block in means])
    error_squared = float(within @ within) / (len(within) - 2) * sum(1.0 / len(block) for block in means)
    return abs(float(means[0].mean() - means[1].mean())) > DIFFERENT_T * math.sqrt(error_squared)


def _last(times_ns: NDArray[np.int64]) -> int:
    return int(times_ns.max()) if len(times_ns) else -1
