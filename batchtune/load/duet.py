"""Measures the CPU time that a request costs two servers, which get the load alternately, in short turns.

On a shared host the CPU time of the same work changes by a fifth from second to second. Changes slower than a turn
affect both turns of a pair alike and cancel in their ratio. Standard deviations of that ratio between two equal
servers: 0.15 for a pair of 25 ms turns, 0.035 for the mean of such pairs over a second, 0.19 for two successive runs of
a second each (tests/benchmarks/check/duet.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import psutil
from numpy.typing import NDArray

from batchtune.load.fleet import START_DELAY_NS, LoadFleet, LoadJob, split
from batchtune.load.samples import NEVER_NS, Samples, merge
from batchtune.scenario.arrivals import Arrivals, ClosedLoop

CpuClock = Callable[[], float]
"""Returns a server's CPU seconds so far; raises psutil.Error once the server has ended."""

Reading = tuple[int, int, tuple[float, ...]]
"""(before, after, CPU seconds so far of each server): they were read between these instants, ns from the start of the
load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuetPlan:
    """The turns in which two servers get the load.

    In turn i, server `order[i]` (0 or 1) gets the load for `turn_ns`; then no server does for `gap_ns`, so that the
    last answer has come before the CPU clocks are read. Turns 2k and 2k + 1 are a pair.
    """

    turn_ns: int
    gap_ns: int
    order: tuple[int, ...]

    @property
    def pairs(self) -> int:
        """Number of pairs of turns."""
        return len(self.order) // 2

    @property
    def begins_ns(self) -> NDArray[np.int64]:
        """Start of each turn, nanoseconds after the start of the load, shape (turns + 1,); the last entry is where a
        further turn would begin."""
        return np.arange(len(self.order) + 1, dtype=np.int64) * (self.turn_ns + self.gap_ns)

    def arranged(self, arrivals: Arrivals, server: int) -> Arrivals:
        """Return the arrivals for server 0 or 1: clients of a closed loop pause outside the server's turns; a schedule
        is cut into pieces of a turn's length, one for each of its turns."""
        begins_ns = self.begins_ns[:-1][np.equal(self.order, server)]
        duration_s = float(self.begins_ns[-1]) / 1e9
        if isinstance(arrivals, ClosedLoop):
            turns_ns = tuple((begin_ns, begin_ns + self.turn_ns) for begin_ns in begins_ns.tolist())
            return replace(arrivals, duration_s=duration_s, requests_max=None, turns_ns=turns_ns)
        within = arrivals.due_ns < self.turn_ns * len(begins_ns)
        due_ns = arrivals.due_ns[within]
        names, rows = arrivals.request_index, arrivals.trace_rows
        return replace(
            arrivals,
            due_ns=begins_ns[due_ns // self.turn_ns] + due_ns % self.turn_ns,
            duration_s=duration_s,
            offered_rps=len(due_ns) / duration_s,
            request_index=None if names is None else names[within],
            trace_rows=None if rows is None else rows[within],
        )


def run_duet(
    fleet: LoadFleet, jobs: Sequence[LoadJob], plan: DuetPlan, clocks: Sequence[CpuClock]
) -> list[tuple[float, float]]:
    """Measure the CPU seconds per request of two servers, loaded in turns; `jobs` and `clocks` have one entry for each
    server.

    Returns (first server's, second server's) for each pair of turns that could be measured (`pair_costs`).

    Raises:
        MeasurementInvalidError: a worker died.
        TargetError, UsageError: an endpoint cannot be used at all (name, TLS files, port).
    """
    parts = [
        split(replace(job, arrivals=plan.arranged(job.arrivals, server)), fleet.processes)
        for server, job in enumerate(jobs)
    ]
    with ClockReader(clocks, plan) as reader:
        samples = fleet.run_parts(
            [part for of_worker in zip(*parts, strict=True) for part in of_worker], start_ns=reader.start
        )
    return pair_costs(merge(samples), reader.readings, plan)


def pair_costs(samples: Samples, readings: Sequence[Reading], plan: DuetPlan) -> list[tuple[float, float]]:
    """Return (first server's, second server's) CPU seconds per request for each pair of turns, in their order; a turn
    is a slice of time in which one of the servers gets the whole load (`DuetPlan`).

    A pair is left out where a turn of it had no request, a request was still under way when the clocks were read, the
    clocks were read after the next turn had begun, or a CPU clock did not advance; so are the pairs that come after a
    server ended. `samples`: the requests of both servers. `readings`: one before each turn and one after the last.
    """
    turns = len(plan.order)
    turn_of = np.searchsorted(plan.begins_ns, samples.due_ns, side="right") - 1
    requests = np.bincount(turn_of, minlength=turns)
    last_done_ns = np.zeros(turns, dtype=np.int64)
    never = np.iinfo(np.int64).max
    np.maximum.at(last_done_ns, turn_of, np.where(samples.done_ns == NEVER_NS, never, samples.done_ns))

    def cost_s(turn: int) -> float:
        """Return the CPU seconds per request of a turn; 0 where they are unknown."""
        begins_ns, next_begins_ns = plan.begins_ns[turn : turn + 2]
        (_, first_read_ns, first_s), (asked_ns, last_read_ns, last_s) = readings[turn : turn + 2]
        in_time = first_read_ns <= begins_ns and last_read_ns <= next_begins_ns
        if not in_time or not requests[turn] or last_done_ns[turn] > asked_ns:
            return 0.0
        server = plan.order[turn]
        return (last_s[server] - first_s[server]) / float(requests[turn])

    costs = []
    for pair in range(min(plan.pairs, (len(readings) - 1) // 2)):
        by_server = sorted((plan.order[turn], cost_s(turn)) for turn in (2 * pair, 2 * pair + 1))
        costs.append((by_server[0][1], by_server[1][1]))
    return [pair for pair in costs if min(pair) > 0.0]


class ClockReader:
    """A thread that reads the CPU clocks between the turns; a context manager, whose exit waits for the thread's end.

    `readings`: one before each turn and one after the last; fewer where a server ended.
    """

    def __init__(self, clocks: Sequence[CpuClock], plan: DuetPlan) -> None:
        # The clocks are read so long before the next turn begins: they have that time to be woken for it.
        read_before_ns = 1_000_000
        self.readings: list[Reading] = []
        self._clocks = clocks
        self._reads_ns = (plan.begins_ns - read_before_ns).tolist()
        self._start_ns = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="batchtune-cpu-clocks", daemon=True)

    def start(self) -> int:
        """Start the thread; return the instant at which the load is to start (CLOCK_MONOTONIC, ns)."""
        self._start_ns = time.monotonic_ns() + START_DELAY_NS
        self._thread.start()
        return self._start_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        for read_ns in self._reads_ns:
            if self._ended.wait(max(0.0, (self._start_ns + read_ns - time.monotonic_ns()) / 1e9)):
                return
            before_ns = time.monotonic_ns()
            try:
                cpu_s = tuple(clock() for clock in self._clocks)
            except psutil.Error:  # a server ended: what was read until then is kept
                return
            after_ns = time.monotonic_ns()
            self.readings.append((before_ns - self._start_ns, after_ns - self._start_ns, cpu_s))
