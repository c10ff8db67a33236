"""A host of a cluster, where a worker runs: the calls that its head makes, and the clocks of both."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchtune.errors import BatchtuneError, MeasurementInvalidError
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LiveAggregate, LoadFleet
from batchtune.load.samples import Samples
from batchtune.load.worker_process import WorkerJob
from batchtune.scenario.payloads import RequestSet
from batchtune.system import schedulable_cpus

# How far a host's clock is ahead of ours, and whether it runs as fast.
#
# Each machine counts its own CLOCK_MONOTONIC from its own boot. A round trip bounds the offset between two of them by
# half its length, whichever leg was the slow one (Cristian, Probabilistic clock synchronization, 1989); the shortest of
# many is the best bound. Offsets place a worker's start; a latency is the difference of two readings of one clock.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A comparison of another clock with ours: at our `at_ns` it was ahead by `offset_ns` ± `uncertainty_ns`."""

    offset_ns: int
    uncertainty_ns: int
    at_ns: int

    def drift_ppm(self, later: ClockReading) -> tuple[float, float]:
        """Return how much faster than ours the other clock ran until a later comparison, parts per million (negative:
        slower), and its uncertainty, ±."""
        elapsed_ns = max(1, later.at_ns - self.at_ns)
        uncertainty_ns = self.uncertainty_ns + later.uncertainty_ns
        return (later.offset_ns - self.offset_ns) / elapsed_ns * 1e6, uncertainty_ns / elapsed_ns * 1e6

    def is_lost(self, later: ClockReading) -> bool:
        """Whether the clock moved further until a later comparison than clocks drift, because somebody set or stopped
        it."""
        # NTP slews a clock by at most 500 ppm; two clocks by twice that against each other. Beyond it one was set or
        # held.
        drift_max_ppm = 1000.0
        drift_ppm, uncertainty_ppm = self.drift_ppm(later)
        return abs(drift_ppm) - uncertainty_ppm > drift_max_ppm

    def account(self, later: ClockReading) -> str:
        """Describe offset and drift until a later comparison, such as "clock +50.013 ± 0.110 ms against the head's,
        drift +100 ± 12 ppm"."""
        drift_ppm, uncertainty_ppm = self.drift_ppm(later)
        return (
            f"clock {self.offset_ns / 1e6:+,.3f} ± {self.uncertainty_ns / 1e6:.3f} ms "
            f"against the head's, drift {drift_ppm:+.0f} ± {uncertainty_ppm:.0f} ppm"
        )


def read_clock(theirs_ns: Callable[[], int], ours_ns: Callable[[], int], *, pings: int = 24) -> ClockReading:
    """Compare the other clock with ours `pings` times; return the reading with the least uncertainty.

    `theirs_ns`: reads the other clock by a round trip. On an idle loopback cluster the best of 24 is within 20 % of the
    best of 1,000.
    """
    readings = []
    for _ in range(pings):
        asked_ns = ours_ns()
        there_ns = theirs_ns()
        answered_ns = ours_ns()
        middle_ns = (asked_ns + answered_ns) // 2
        readings.append(
            ClockReading(
                offset_ns=there_ns - middle_ns,
                uncertainty_ns=(answered_ns - asked_ns) // 2 + 1,
                at_ns=middle_ns,
            )
        )
    return min(readings, key=lambda reading: reading.uncertainty_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host is, and the numbers of the CPUs that it may use.

    `node`: a name for people. `machine`: hosts with equal values share loopback and CPUs. `niceness`: of the host's
    process and its worker, 0 to 19; above 0 other processes there go first.
    """

    node: str
    machine: str
    cpus: tuple[int, ...]
    niceness: int = 0


def at_usual_priority() -> None:
    """Set the niceness of this process, and of what it starts, to 0 (Ray starts actors at 15), where CAP_SYS_NICE
    allows it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))


def this_place() -> Place:
    """Return where this process runs; a container with a loopback of its own counts as a separate machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    machine = socket.gethostname()
    if boot.exists() and namespace.is_symlink():
        machine = f"{boot.read_text().strip()} {namespace.readlink()}"
    return Place(
        node=socket.gethostname(),
        machine=machine,
        cpus=tuple(sorted(schedulable_cpus())),
        niceness=max(0, os.getpriority(os.PRIO_PROCESS, 0)),
    )


class Host:
    """One worker process, on this machine: in the actor of a Ray node, in this process, or in a test.

    The process of the host only waits and answers the head, so that nothing of Ray runs in the process that sends.
    Every call returns soon; the worker's part of a job runs from `start` until `look` says that it has ended. Each
    method raises MeasurementInvalidError when the worker cannot run its part, or by way of Ray when the host died or
    does not answer; TargetError and UsageError when its worker raises them.
    """

    def __init__(self) -> None:
        at_usual_priority()
        self._fleet: LoadFleet | None = None
        self._part: _RunningPart | None = None

    def place(self) -> Place:
        """Return where the host runs."""
        return this_place()

    def open(self, cpu: int) -> None:
        """Start the worker, pinned to the CPU numbered `cpu`; to be called once, before every other method but
        `place`."""
        fleet = LoadFleet(cpus=(cpu,), kept_max=sys.maxsize)  # the head says how many it keeps of all
        fleet.__enter__()
        self._fleet = fleet

    def clock_ns(self) -> int:
        """Read the host's CLOCK_MONOTONIC, nanoseconds."""
        return time.monotonic_ns()

    def prepare(self, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        """Begin to connect, with one part of the job for each endpoint; an earlier part that still runs is ended.

        `overdue_after_s`: latency from which the live figures count an answer as late.
        """
        self._end_part()
        self._part = _RunningPart(self._opened(), parts, overdue_after_s)

    def ready(self) -> bool:
        """Whether all parts are connected and can start."""
        return self._running().ready()

    def start(self, start_ns: int) -> None:
        """Begin to send when the host's own CLOCK_MONOTONIC reaches `start_ns`."""
        self._running().start(start_ns)

    def stop(self) -> None:
        """Send no more requests; before the start, send none at all."""
        if self._part is not None:
            self._part.stop()

    def look(self) -> tuple[LiveAggregate | None, bool]:
        """Return (live, ended): the last live figures of the part (None: none yet), and whether the part has ended."""
        return self._running().look()

    def count(self) -> int:
        """Return the number of requests recorded in the part that has ended."""
        return len(self._running().samples())

    def rows(self, first: int, last: int, one_in: int) -> Samples:
        """Return rows `first` to `last - 1` of the part that has ended, of which only one in `one_in`, drawn at random.

        Times are offsets from the start, by the host's own clock.
        """
        return self._running().samples().between(first, last).thinned(one_in)

    def client_max_rps(self, requests: RequestSet) -> float:
        """Measure the worker's highest request rate (requests/s) against a server on its machine that does nothing."""
        self._end_part()
        return calibrate(self._opened(), requests)

    def close(self) -> None:
        """End the worker; its part of a job ends with it."""
        self._end_part()
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    def _end_part(self) -> None:
        if self._part is not None:
            self._part.end()
            self._part = None

    def _opened(self) -> LoadFleet:
        if self._fleet is None:
            raise MeasurementInvalidError("its worker was not started")
        return self._fleet

    def _running(self) -> _RunningPart:
        if self._part is None:
            raise MeasurementInvalidError("it has no part of a job")
        return self._part


class _RunningPart:
    """One host's part of a job, on a thread that waits for the worker process."""

    def __init__(self, fleet: LoadFleet, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        self._ready = threading.Event()
        self._named = threading.Event()
        self._start_ns = 0
        self._stops: list[int] = []
        self._live: LiveAggregate | None = None
        self._samples: Samples | None = None
        self._fault: BatchtuneError | None = None
        self._thread = threading.Thread(target=self._run, args=(fleet, parts, overdue_after_s), daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        self._raise_fault()
        return self._ready.is_set()

    def start(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._named.set()

    def stop(self) -> None:
        self._stops.append(0)

    def look(self) -> tuple[LiveAggregate | None, bool]:
        ended = not self._thread.is_alive()
        if ended:
            self._raise_fault()
        return self._live, ended

    def samples(self) -> Samples:
        self._raise_fault()
        if self._samples is None:
            raise MeasurementInvalidError("its part ended without a result")
        return self._samples

    def end(self) -> None:
        """Stop the part in any state and wait for its end; raises MeasurementInvalidError after 5 s."""
        ending_s = 5.0
        self.stop()
        self._named.set()
        self._thread.join(ending_s)
        if self._thread.is_alive():
            raise MeasurementInvalidError(f"its last part did not end within {ending_s:g} s of being stopped")

    def _run(self, fleet: LoadFleet, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        try:
            (self._samples,) = fleet.run_parts(
                parts,
                start_ns=self._await_start,
                stops=self._stops,
                overdue_after_s=overdue_after_s,
                on_progress=self._keep,
            )
        except BatchtuneError as error:
            self._fault = error

    def _await_start(self) -> int:
        self._ready.set()
        start_limit_s = 120.0  # longer than any other host takes to connect
        if not self._named.wait(start_limit_s):
            raise MeasurementInvalidError("the head named no start")
        return self._start_ns

    def _keep(self, live: LiveAggregate) -> None:
        self._live = live

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault
