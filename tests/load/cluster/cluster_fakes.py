"""Hosts of a cluster without machines: each has a clock of its own, and may be slow, fall silent or die.

Time passes only as the fake says. A request takes LATENCY_NS of true time; a host times it by its own clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from batchtune.errors import MeasurementInvalidError
from batchtune.load.cluster.cluster_fleet import ClusterFleet
from batchtune.load.cluster.host import Host, Place, this_place
from batchtune.load.fleet import LiveAggregate, rows_of
from batchtune.load.samples import Samples
from batchtune.load.worker_process import WorkerJob
from batchtune.scenario.arrivals import Schedule
from batchtune.scenario.payloads import RequestSet
from tests.measure.measure_streams import make_samples

LATENCY_NS = 5_000_000


@dataclass
class FakeTime:
    now_ns: int = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@dataclass(eq=False)
class FakeHost:
    """`asymmetry`: the part of a round trip that a message takes to get here. `dies_after_s` from the start of its part.

    `dies_at`: the call before the start that it does not survive. `jump_ns`: its clock is set by so much in the middle of its part. `silent`: its part never ends.
    """

    time: FakeTime
    machine: str = ""
    node: str = "node"
    cpus: tuple[int, ...] = (0, 1, 2, 3)
    offset_ns: int = 0
    drift_ppm: float = 0.0
    round_trip_ns: int = 300_000
    asymmetry: float = 0.5
    dies_after_s: float | None = None
    jump_ns: int = 0
    silent: bool = False
    niceness: int = 0
    dies_at: str = ""
    cpu: int = -1
    closed: bool = False
    stopped: bool = False
    parts: list[WorkerJob] = field(default_factory=list)
    asked_rows: list[tuple[int, int]] = field(default_factory=list)
    start_ns: int = 0
    _epoch_ns: int = 0
    _started_at_ns: int | None = None

    def __post_init__(self) -> None:
        self._epoch_ns = self.time.now_ns

    def place(self) -> Place:
        self._must_live("place")
        machine = self.machine or this_place().machine
        return Place(node=self.node, machine=machine, cpus=self.cpus, niceness=self.niceness)

    def open(self, cpu: int) -> None:
        self._must_live("open")
        self.cpu = cpu

    def clock_ns(self) -> int:
        self.time.now_ns += round(self.round_trip_ns * self.asymmetry)
        own_ns = self.own_ns(self.time.now_ns)
        self.time.now_ns += round(self.round_trip_ns * (1.0 - self.asymmetry))
        self._must_live()
        return own_ns

    def own_ns(self, true_ns: int) -> int:
        passed_ns = true_ns - self._epoch_ns
        jumped_ns = self.jump_ns if self._started_at_ns is not None else 0
        return true_ns + self.offset_ns + round(passed_ns * self.drift_ppm * 1e-6) + jumped_ns

    def true_ns(self, own_ns: int) -> float:
        return (own_ns - self.offset_ns - self._epoch_ns) / (1.0 + self.drift_ppm * 1e-6) + self._epoch_ns

    def prepare(self, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        self._must_live("prepare")
        (part,) = parts
        self.parts.append(part)
        self._started_at_ns = None
        self.stopped = False

    def ready(self) -> bool:
        self._must_live("ready")
        return True

    def start(self, start_ns: int) -> None:
        self._must_live()
        self.start_ns, self._started_at_ns = start_ns, self.time.now_ns

    def stop(self) -> None:
        self._must_live()
        self.stopped = True

    def look(self) -> tuple[LiveAggregate, bool]:
        self._must_live()
        elapsed_s = (self.own_ns(self.time.now_ns) - self.jump_ns - self.start_ns) / 1e9
        sent = int(np.count_nonzero(self._due_ns() <= elapsed_s * 1e9))
        told = dict.fromkeys(("errors", "late", "in_flight", "overdue"), 0)
        told |= {"sent": sent, "done": sent, "throughput_rps": float(sent)}
        latency_s = LATENCY_NS / 1e9
        live = LiveAggregate(elapsed_s=elapsed_s, p50_s=latency_s, p95_s=latency_s, **told)
        over = self.stopped or elapsed_s > self.parts[-1].arrivals.duration_s
        return live, over and not self.silent

    def count(self) -> int:
        return len(self._due_ns())

    def rows(self, first: int, last: int, one_in: int) -> Samples:
        self._must_live()
        self.asked_rows.append((first, last))
        due_ns = self._due_ns()
        latency_s = round(LATENCY_NS * (1.0 + self.drift_ppm * 1e-6)) / 1e9
        whole = replace(
            make_samples(due_ns / 1e9, np.full(len(due_ns), latency_s), client_cpu_ratio=0.0),
            rows=rows_of(self.parts[-1], len(due_ns)),
            started_ns=self.start_ns,
            wall_s=self.parts[-1].arrivals.duration_s,
            client_cpu_s=0.1,
        )
        return whole.between(first, last).thinned(one_in)

    def client_max_rps(self, requests: RequestSet) -> float:
        self._must_live("client_max_rps")
        return 1000.0

    def close(self) -> None:
        self.closed = True

    def _due_ns(self) -> np.ndarray:
        arrivals = self.parts[-1].arrivals
        assert isinstance(arrivals, Schedule)
        return arrivals.due_ns

    def _must_live(self, call: str = "") -> None:
        if call and call == self.dies_at:
            raise MeasurementInvalidError("its node is gone")
        started_ns, limit_s = self._started_at_ns, self.dies_after_s
        if started_ns is not None and limit_s is not None and self.time.now_ns > started_ns + limit_s * 1e9:
            raise MeasurementInvalidError("its node is gone")


@contextlib.contextmanager
def cluster_of(hosts: Sequence[Host]) -> Iterator[list[Host]]:
    yield list(hosts)


def fleet_of_fakes(hosts: Sequence[FakeHost], **changes: object) -> ClusterFleet:
    time = hosts[0].time
    return ClusterFleet(cluster_of(hosts), now_ns=time, sleep=time.sleep, **changes)  # type: ignore[arg-type]
