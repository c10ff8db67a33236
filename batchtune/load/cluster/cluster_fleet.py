"""Sends the load from several machines: hosts, each with its part of every job.

The job is split here, once, as for the processes of one machine; each host gets the start by its own clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Self, cast

from batchtune.errors import MeasurementInvalidError, UsageError
from batchtune.load.calibration import calibrate
from batchtune.load.cluster.host import (
    ClockReading,
    Host,
    Place,
    read_clock,
    this_place,
)
from batchtune.load.cluster.ray_actors import RayActors
from batchtune.load.fleet import (
    GRACE_S,
    LIVE_INTERVAL_S,
    LiveAggregate,
    LoadFleet,
    LoadInterrupted,
    LoadJob,
    OnProgress,
    ShouldStop,
    split,
    summed_up,
    together,
)
from batchtune.load.samples import KEPT_MAX, Samples, joined, kept_one_in
from batchtune.load.worker_process import WorkerJob
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.section import cpu_list
from batchtune.scenario.spec.workload import FleetSpec, LoadSpec
from batchtune.system import interrupts_noted, is_loopback
from batchtune.target.endpoint import Endpoint
from batchtune.units import counted


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A worker of the fleet: its host, where that is, the number of the CPU that it is pinned to, and its name in
    messages."""

    host: Host
    place: Place
    cpu: int
    name: str


def placed_workers(hosts: Sequence[Host], cpus: Sequence[int] | None) -> list[Worker]:
    """Give each host a worker's name and a CPU: from `cpus` in turn; None: from the CPUs of its machine, the highest
    number first.

    Raises:
        MeasurementInvalidError: a host does not say where it is.
    """
    ranks: Counter[str] = Counter()
    workers = []
    for number, host in enumerate(hosts):
        try:
            place = host.place()
        except MeasurementInvalidError as error:
            raise MeasurementInvalidError(
                f"load worker {number}: {error.message}", hint="see the log of Ray on the cluster's nodes"
            ) from error
        usable = place.cpus[::-1] if cpus is None else cpus
        cpu = usable[ranks[place.machine] % len(usable)]
        ranks[place.machine] += 1
        workers.append(Worker(host=host, place=place, cpu=cpu, name=f"worker {number} on {place.node}"))
    return workers


def placement(workers: Sequence[Worker]) -> str:
    """Describe where the workers are, such as "3 workers: 2 on node-a (CPUs 6-7), 1 on node-b (CPU 3)"."""
    nodes = Counter(worker.place.node for worker in workers)
    cpus = {node: cpu_list(worker.cpu for worker in workers if worker.place.node == node) for node in nodes}
    places = ", ".join(f"{count} on {node} ({cpus[node]})" for node, count in nodes.items())
    return f"{counted(len(workers), 'worker')}: {places}"


def require_reachable(workers: Sequence[Worker], endpoint: Endpoint) -> None:
    """Raise UsageError if the endpoint is on our loopback and a worker runs on another machine."""
    if not is_loopback(endpoint.host):
        return
    ours = this_place().machine
    elsewhere = next((worker for worker in workers if worker.place.machine != ours), None)
    if elsewhere is not None:
        raise UsageError(
            f"load.fleet: {elsewhere.name} cannot reach {endpoint.host}, which is local to each machine",
            hint="load a running server by a host name that the nodes can reach (batchtune load HOST:PORT/MODEL "
            "--set load.fleet.ray=…), or restrict the workers to this machine by load.fleet.resources",
        )


_LOST_HINT: Final = "see the node's own log; what was measured before is saved"


class WorkerLostError(MeasurementInvalidError):
    """A worker was lost during a job, whose samples are void.

    `left`: number of workers for the next job, 0 where they are too few. `left_ratio`: `left` divided by the number
    before the loss.
    """

    def __init__(self, message: str, *, left: int, before: int) -> None:
        super().__init__(message, hint=_LOST_HINT)
        self.left = left
        self.left_ratio = left / before


class ClusterFleet:
    """A context manager around a cluster's hosts; `run` may be called any number of times, one job at a time.

    `cpus`: numbers of the CPUs that the workers of each machine may use, dealt out in turn; None: its highest ones.
    `on_event`: called with a sentence for the user at each event. `now_ns`, `sleep`: the clock of this process.
    `chunk_rows`: rows of samples that one call brings back, 25 MB; the head needs memory for one such chunk besides the
    joined samples.
    """

    def __init__(
        self,
        cluster: AbstractContextManager[Sequence[Host]],
        *,
        cpus: Sequence[int] | None = None,
        on_event: Callable[[str], None] = lambda _text: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        chunk_rows: int = 500_000,
        kept_max: int = KEPT_MAX,
    ) -> None:
        self._cluster = cluster
        self._cpus = None if cpus is None else tuple(cpus)
        self._on_event = on_event
        self._now_ns = now_ns
        self._sleep = sleep
        self._chunk_rows = chunk_rows
        self._kept_max = kept_max
        self._workers: list[Worker] = []
        self._asked = 0

    def __enter__(self) -> Self:
        hosts = self._cluster.__enter__()
        try:
            self._workers = placed_workers(hosts, self._cpus)
            self._asked = len(self._workers)
            self._open()
        except BaseException:
            self.close()
            raise
        self._on_event(f"load fleet: {placement(self._workers)}")
        if nice := [worker for worker in self._workers if worker.place.niceness]:
            niceness = max(worker.place.niceness for worker in nice)
            self._on_event(
                f"load fleet: {counted(len(nice), 'worker')} at niceness {niceness}, "
                "behind whatever else runs there; start Ray there with RAY_worker_niceness=0"
            )
        return self

    def _open(self) -> None:
        """Start every worker; raises MeasurementInvalidError for the first that is lost: nothing was measured yet."""
        for worker in self._workers:
            try:
                worker.host.open(worker.cpu)
            except MeasurementInvalidError as error:
                raise MeasurementInvalidError(
                    f"load {worker.name}: {error.message}", hint=_LOST_HINT
                ) from error

    def __exit__(self, *_fault: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and leave the cluster."""
        for worker in self._workers:
            worker.host.close()
        self._workers.clear()
        self._cluster.__exit__(None, None, None)

    @property
    def processes(self) -> int:
        """Number of workers now."""
        return len(self._workers)

    @property
    def client_cores(self) -> int:
        """Number of CPU cores that the workers can keep busy; each worker is one thread."""
        return len({(worker.place.machine, worker.cpu) for worker in self._workers})

    def client_max_rps(self, requests: RequestSet) -> float:
        """Measure the highest request rate of all workers together (requests/s); of each machine one worker is
        measured, for all workers there.

        Raises:
            WorkerLostError: one of these is gone; the next call measures the others.
        """
        by_machine: dict[str, float] = {}
        for worker in self._workers:
            if worker.place.machine not in by_machine:
                with self._blaming(worker):
                    by_machine[worker.place.machine] = worker.host.client_max_rps(requests)
        sharing = Counter((worker.place.machine, worker.cpu) for worker in self._workers)
        slowest = min(by_machine[machine] / workers for (machine, _), workers in sharing.items())
        return slowest * len(self._workers)  # each gets as many requests as the next

    def run(
        self, job: LoadJob, *, on_progress: OnProgress | None = None, should_stop: ShouldStop | None = None
    ) -> Samples:
        """Run one job and return what happened to each request. Both callbacks are called several times a second.

        Live quantiles are means of the workers' own, weighted by their throughput. Times are offsets from the worker's
        own start, by its own clock; `notes` state how each clock differs from the head's.

        Raises:
            WorkerLostError: a worker died, fell silent or lost its clock; the next `run` uses the others.
            TargetError, UsageError: the endpoint cannot be used at all.
            LoadInterrupted: Ctrl-C; it carries the partial samples.
            KeyboardInterrupt: Ctrl-C, and a worker was lost besides: nothing of the load counts.
        """
        for endpoint in job.endpoints:
            require_reachable(self._workers, endpoint)
        with interrupts_noted() as interrupts:
            try:
                samples = self._run(job, interrupts, on_progress, should_stop)
            except WorkerLostError as error:
                if interrupts:  # nobody is to measure again
                    raise KeyboardInterrupt from error
                raise
        if interrupts:
            raise LoadInterrupted(samples)
        return samples

    def retire(self, name: str, why: str) -> bool:
        """Continue without the worker called `name`; return False, and do nothing, where too few would be left."""
        worker = next((worker for worker in self._workers if worker.name == name), None)
        if worker is None or len(self._workers) - 1 < self._enough:
            return False
        self._lost(worker, why)
        return True

    @property
    def _enough(self) -> int:
        # With fewer of the workers than this left, a load is no longer the requested one, and the run ends.
        enough_ratio = 0.5
        return max(1, math.ceil(enough_ratio * self._asked))

    def _run(
        self,
        job: LoadJob,
        interrupts: Sequence[int],
        on_progress: OnProgress | None,
        should_stop: ShouldStop | None,
    ) -> Samples:
        parts = split(job, len(self._workers))
        self._prepare(parts, job)
        before = self._clocks()
        slowest_ns = max(reading.uncertainty_ns for reading in before)
        start_delay_ns = 200_000_000  # to call 100 hosts, one after another, takes 100 ms
        start_ns = self._now_ns() + start_delay_ns + 4 * len(before) * slowest_ns
        if interrupts:
            self._stop()
        for worker, clock in zip(self._workers, before, strict=True):
            with self._blaming(worker):
                worker.host.start(start_ns + clock.offset_ns)
        limit_s = parts[0].arrivals.duration_s + parts[0].drain_s + GRACE_S
        self._await_end(start_ns + int(limit_s * 1e9), interrupts, on_progress, should_stop)
        accounts = self._clock_accounts(before)
        samples = [replace(part, started_ns=start_ns) for part in self._collected()]
        names = [worker.name for worker in self._workers]
        whole = summed_up(job, samples, client_cores=self.client_cores, names=names)
        clocks = (f"{name}: {account}" for name, account in zip(names, accounts, strict=True))
        return replace(whole, notes=(*whole.notes, *clocks))

    def _prepare(self, parts: Sequence[WorkerJob], job: LoadJob) -> None:
        """Let every host connect, all at the same time, and wait until they have."""
        ready_step_s = 0.005
        overdue_after_s = parts[0].timeout_s if job.overdue_after_s is None else job.overdue_after_s
        share = len(job.endpoints)
        for number, worker in enumerate(self._workers):
            with self._blaming(worker):
                worker.host.prepare(parts[number * share : (number + 1) * share], overdue_after_s)
        give_up_ns = self._now_ns() + int((parts[0].timeout_s + GRACE_S) * 1e9)
        for worker in self._workers:
            with self._blaming(worker):
                while not worker.host.ready():
                    if self._now_ns() > give_up_ns:
                        raise MeasurementInvalidError("it does not get ready")
                    self._sleep(ready_step_s)

    def _await_end(
        self,
        give_up_ns: int,
        interrupts: Sequence[int],
        on_progress: OnProgress | None,
        should_stop: ShouldStop | None,
    ) -> None:
        stopping = False
        running = list(self._workers)
        lives: dict[str, LiveAggregate] = {}
        while running:
            for worker in tuple(running):
                with self._blaming(worker):
                    last, ended = worker.host.look()
                    if last is not None:
                        lives[worker.name] = last
                    if ended:
                        running.remove(worker)
                    elif self._now_ns() > give_up_ns:
                        raise MeasurementInvalidError("it does not report back")
            if lives:
                live = together(list(lives.values()))
                if on_progress is not None:
                    on_progress(live)
                if not stopping and (interrupts or (should_stop is not None and should_stop(live))):
                    stopping = True
                    self._stop()
            if running:
                self._sleep(LIVE_INTERVAL_S)

    def _stop(self) -> None:
        for worker in self._workers:
            with self._blaming(worker):
                worker.host.stop()

    def _clocks(self) -> list[ClockReading]:
        readings = []
        for worker in self._workers:
            with self._blaming(worker):
                readings.append(read_clock(worker.host.clock_ns, self._now_ns))
        return readings

    def _clock_accounts(self, before: Sequence[ClockReading]) -> list[str]:
        """Describe each worker's clock during a job; raises WorkerLostError where one was set or stopped."""
        accounts = []
        for worker, first, last in zip(self._workers, before, self._clocks(), strict=True):
            account = first.account(last)
            accounts.append(account)
            if first.is_lost(last):
                raise self._lost(worker, f"its clock was set or stopped under the load ({account})")
        return accounts

    def _collected(self) -> list[Samples]:
        """Fetch the samples of each worker; of more than `kept_max` requests one in n, drawn by the workers."""
        counts, parts = [], []
        for worker in self._workers:
            with self._blaming(worker):
                counts.append(worker.host.count())
        one_in = kept_one_in(sum(counts), self._kept_max)
        step = self._chunk_rows * one_in
        for worker, count in zip(self._workers, counts, strict=True):
            with self._blaming(worker):
                firsts = range(0, max(count, 1), step)
                parts.append(
                    joined([worker.host.rows(first, min(first + step, count), one_in) for first in firsts])
                )
        return parts

    @contextlib.contextmanager
    def _blaming(self, worker: Worker) -> Iterator[None]:
        """Within the block, turn a MeasurementInvalidError into the loss of this worker.

        Raises:
            WorkerLostError: the worker was removed, and the others were stopped.
        """
        try:
            yield
        except MeasurementInvalidError as error:
            raise self._lost(worker, error.message) from error

    def _lost(self, worker: Worker, why: str) -> WorkerLostError:
        """Remove a worker and stop the others; returns the error to raise."""
        before = len(self._workers)
        self._workers.remove(worker)
        worker.host.close()
        for other in self._workers:
            with contextlib.suppress(
                MeasurementInvalidError
            ):  # one more that is lost is noticed by the next job
                other.host.stop()
        left = len(self._workers) if len(self._workers) >= self._enough else 0
        message = f"load {worker.name}: {why}"
        outlook = (
            f"what it was sending is invalid, and measured again with {counted(left, 'worker')}"
            if left
            else f"{len(self._workers)} of {counted(self._asked, 'worker')} are left, too few to continue"
        )
        self._on_event(f"{message}; {outlook}")
        return WorkerLostError(f"{message}; {outlook}", left=left, before=before)


# The fleet that a scenario asks for: processes of this machine, or workers on the nodes of a Ray cluster.


@contextlib.contextmanager
def ray_cluster(actors: RayActors, spec: FleetSpec, on_event: Callable[[str], None]) -> Iterator[list[Host]]:
    """Return a context manager that connects to a Ray cluster and starts an actor for each worker; its value is the
    list of hosts, which end on exit.

    Raises:
        UsageError: no cluster at that address, or no room in it.
    """
    on_event(f"starting the load fleet on the Ray cluster: {spec.ray}")
    bundle = {"CPU": spec.cpus_per_worker, **spec.resources}
    with actors:
        long_calls = ("place", "open", "prepare", "rows", "client_max_rps")  # a worker starts, or 25 MB move
        limits_s = dict.fromkeys(long_calls, 60.0)
        started = actors.start(Host, bundle, spec.workers, placement=spec.placement, limits_s=limits_s)
        yield [cast("Host", actor) for actor in started]


AnyFleet = LoadFleet | ClusterFleet


def fleet_of(load: LoadSpec, *, on_event: Callable[[str], None] = lambda _text: None) -> AnyFleet:
    """Make the fleet of the scenario's `load` section, local processes or Ray workers; it is not started yet.

    Raises:
        UsageError: Ray is needed and not installed.
        ScenarioError: the section names CPUs that this machine does not have.
    """
    if load.fleet is None:
        return LoadFleet(processes=load.processes, cpus=load.cpus)
    actors = RayActors(load.fleet.ray, key="load.fleet", thing="worker", on_event=on_event)
    return ClusterFleet(ray_cluster(actors, load.fleet, on_event), cpus=load.cpus, on_event=on_event)


def client_max_rps(
    fleet: AnyFleet, requests: RequestSet, *, server_cpus: Sequence[int] | None = None
) -> float:
    """Measure the highest rate (requests/s) at which the fleet can send these requests, against servers that do
    nothing.

    `server_cpus`: numbers of the CPUs for such a server on this machine; None: any.

    Raises:
        MeasurementInvalidError: a request failed, none was answered, or a worker was lost.
    """
    if isinstance(fleet, ClusterFleet):
        return fleet.client_max_rps(requests)
    return calibrate(fleet, requests, server_cpus=server_cpus)
