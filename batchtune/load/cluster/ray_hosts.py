"""Workers on the nodes of a Ray cluster: a Ray actor holds a station, which starts the worker beside it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

from batchtune.errors import BatchtuneError
from batchtune.load.calibration import calibrate
from batchtune.load.cluster.cluster_fleet import ClusterFleet
from batchtune.load.cluster.host import Host, HostLostError, Place, Progress, at_usual_priority, this_place
from batchtune.load.cluster.ray_actors import CALL_LIMIT_S, RayActor, RayActors
from batchtune.load.fleet import LiveAggregate, LoadFleet
from batchtune.load.job import WorkerJob
from batchtune.load.samples import Samples
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.workload import FleetSpec, LoadSpec

# A station runs parts of jobs for a head on another machine, in a worker process of a local fleet.
#
# The process of the station itself (a Ray actor's) only waits and answers the head: nothing of Ray runs in the process
# that sends.

START_LIMIT_S: Final = 120.0
"""How long a part that is ready waits for the head to name the start: longer than any other host takes to connect."""
ENDING_S: Final = 5.0


class Station:
    """A Host in this process, around one worker process; `host.Host` describes the methods."""

    def __init__(self) -> None:
        at_usual_priority()
        self._fleet: LoadFleet | None = None
        self._part: _RunningPart | None = None

    def place(self) -> Place:
        return this_place()

    def open(self, cpu: int) -> None:
        fleet = LoadFleet(cpus=(cpu,), kept_max=sys.maxsize)  # the head says how many it keeps of all
        fleet.__enter__()
        self._fleet = fleet

    def clock_ns(self) -> int:
        return time.monotonic_ns()

    def prepare(self, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        self._end_part()
        self._part = _RunningPart(self._opened(), parts, overdue_after_s)

    def ready(self) -> bool:
        return self._running().ready()

    def start(self, start_ns: int) -> None:
        self._running().start(start_ns)

    def stop(self) -> None:
        if self._part is not None:
            self._part.stop()

    def look(self) -> Progress:
        return self._running().look()

    def count(self) -> int:
        return len(self._running().samples())

    def rows(self, first: int, last: int, one_in: int) -> Samples:
        return self._running().samples().between(first, last).thinned(one_in)

    def client_max_rps(self, requests: RequestSet) -> float:
        self._end_part()
        return calibrate(self._opened(), requests)

    def close(self) -> None:
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
            raise HostLostError("its worker was not started")
        return self._fleet

    def _running(self) -> _RunningPart:
        if self._part is None:
            raise HostLostError("it has no part of a job")
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

    def look(self) -> Progress:
        ended = not self._thread.is_alive()
        if ended:
            self._raise_fault()
        return Progress(live=self._live, ended=ended)

    def samples(self) -> Samples:
        self._raise_fault()
        if self._samples is None:
            raise HostLostError("its part ended without a result")
        return self._samples

    def end(self) -> None:
        """Stop the part in any state and wait for its end; raises HostLostError where it lasts longer than ENDING_S."""
        self.stop()
        self._named.set()
        self._thread.join(ENDING_S)
        if self._thread.is_alive():
            raise HostLostError(f"its last part did not end within {ENDING_S:g} s of being stopped")

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
        if not self._named.wait(START_LIMIT_S):
            raise HostLostError("the head named no start")
        return self._start_ns

    def _keep(self, live: LiveAggregate) -> None:
        self._live = live

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


@contextmanager
def ray_cluster(actors: RayActors, spec: FleetSpec, on_event: Callable[[str], None]) -> Iterator[list[Host]]:
    """Connect to a Ray cluster, start an actor for each worker, and yield the hosts; on exit all of them end.

    Raises:
        UsageError: no cluster at that address, or no room in it.
    """
    on_event(f"starting the load fleet on the Ray cluster: {spec.ray}")
    bundle = {"CPU": spec.cpus_per_worker, **spec.resources}
    with actors:
        started = actors.start(Station, bundle, spec.workers, placement=spec.placement)
        yield [cast("Host", RayHost(actor)) for actor in started]


class RayHost:
    """A Host whose methods call those of the Station in a Ray actor."""

    def __init__(self, actor: RayActor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        long_calls = {"place", "open", "prepare", "rows", "client_max_rps"}  # a worker starts, or 25 MB move
        limit_s = 60.0 if method in long_calls else CALL_LIMIT_S
        return partial(self._actor.ask, method, limit_s=limit_s)

    def close(self) -> None:
        self._actor.close()


AnyFleet = LoadFleet | ClusterFleet


def fleet_of(load: LoadSpec, *, on_event: Callable[[str], None] = lambda _text: None) -> AnyFleet:
    """Make, but do not start, the fleet of the scenario's `load` section: local processes or Ray workers.

    Raises:
        UsageError: Ray is needed and not installed.
        ScenarioError: CPUs that this machine has not.
    """
    if load.fleet is None:
        return LoadFleet(processes=load.processes, cpus=load.cpus)
    actors = RayActors(load.fleet.ray, key="load.fleet", thing="worker", on_event=on_event)
    return ClusterFleet(ray_cluster(actors, load.fleet, on_event), cpus=load.cpus, on_event=on_event)


def client_max_rps(
    fleet: AnyFleet, requests: RequestSet, *, server_cpus: Sequence[int] | None = None
) -> float:
    """Measure the highest rate (requests/s) at which the fleet can send these requests, against servers that
    do nothing.

    `server_cpus`: numbers of the CPUs for such a server on this machine; None: any.
    """
    if isinstance(fleet, ClusterFleet):
        return fleet.client_max_rps(requests)
    return calibrate(fleet, requests, server_cpus=server_cpus)
