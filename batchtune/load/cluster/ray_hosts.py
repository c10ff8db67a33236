"""How do workers run on the nodes of a Ray cluster? A Ray actor holds a station, which starts the worker beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from batchtune.load.calibration import calibrate
from batchtune.load.cluster.fleet import ClusterFleet
from batchtune.load.cluster.host import Host, Place, Progress
from batchtune.load.cluster.ray_actors import RayActor, RayActors
from batchtune.load.cluster.station import Station
from batchtune.load.fleet import LoadFleet
from batchtune.load.record.samples import Samples
from batchtune.load.worker.job import WorkerJob
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.load import FleetSpec, LoadSpec

LONG_CALL_LIMIT_S: Final = 60.0
"""Starting a worker, calibrating, and moving 25 MB."""


class RayCluster:
    """A context manager: connects to a cluster and starts an actor for each worker; all of it ends with it."""

    def __init__(self, spec: FleetSpec, *, on_event: Callable[[str], None] = lambda _text: None) -> None:
        self._spec = spec
        self._on_event = on_event
        self._actors = RayActors(spec.ray, key="load.fleet", thing="worker", on_event=on_event)

    def __enter__(self) -> list[Host]:
        """The hosts, one for each worker.

        Raises:
            UsageError: no cluster at that address, or no room in it.
        """
        spec = self._spec
        self._on_event(f"starting the load fleet on the Ray cluster: {spec.ray}")
        bundle = {"CPU": spec.cpus_per_worker, **spec.resources}
        self._actors.__enter__()
        try:
            started = self._actors.start(Station, bundle, spec.workers, placement=spec.placement)
            return [RayHost(actor) for actor in started]
        except BaseException:
            self._actors.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._actors.__exit__(kind, value, traceback)


class RayHost:
    """A Host by way of an actor's calls."""

    def __init__(self, actor: RayActor) -> None:
        self._actor = actor
        self._ask = actor.ask

    def place(self) -> Place:
        place: Place = self._ask("place", limit_s=LONG_CALL_LIMIT_S)
        return place

    def open(self, cpu: int) -> None:
        self._ask("open", cpu, limit_s=LONG_CALL_LIMIT_S)

    def clock_ns(self) -> int:
        clock_ns: int = self._ask("clock_ns")
        return clock_ns

    def prepare(self, parts: Sequence[WorkerJob], overdue_after_s: float) -> None:
        self._ask("prepare", parts, overdue_after_s, limit_s=LONG_CALL_LIMIT_S)

    def ready(self) -> bool:
        ready: bool = self._ask("ready")
        return ready

    def start(self, start_ns: int) -> None:
        self._ask("start", start_ns)

    def stop(self) -> None:
        self._ask("stop")

    def look(self) -> Progress:
        progress: Progress = self._ask("look")
        return progress

    def count(self) -> int:
        count: int = self._ask("count")
        return count

    def rows(self, first: int, last: int, one_in: int) -> Samples:
        rows: Samples = self._ask("rows", first, last, one_in, limit_s=LONG_CALL_LIMIT_S)
        return rows

    def client_max_rps(self, requests: RequestSet) -> float:
        most_rps: float = self._ask("client_max_rps", requests, limit_s=LONG_CALL_LIMIT_S)
        return most_rps

    def close(self) -> None:
        self._actor.close()


AnyFleet = LoadFleet | ClusterFleet


def fleet_of(load: LoadSpec, *, on_event: Callable[[str], None] = lambda _text: None) -> AnyFleet:
    """The fleet, not started yet.

    Raises:
        UsageError: Ray is asked for and not installed.
        ScenarioError: CPUs that this machine has not.
    """
    if load.fleet is None:
        return LoadFleet(processes=load.processes, cpus=load.cpus)
    return ClusterFleet(RayCluster(load.fleet, on_event=on_event), cpus=load.cpus, on_event=on_event)


def client_max_rps(
    fleet: AnyFleet, requests: RequestSet, *, server_cpus: Sequence[int] | None = None
) -> float:
    """What the fleet can send at most of these requests, to servers that do nothing."""
    if isinstance(fleet, ClusterFleet):
        return fleet.client_max_rps(requests)
    return calibrate(fleet, requests, server_cpus=server_cpus).client_max_rps
