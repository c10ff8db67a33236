"""Which worker runs where, which of them is to blame, and can they reach what they are to load?"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchtune.errors import MeasurementInvalidError, UsageError
from batchtune.load.cluster.host import Host, Place, this_place
from batchtune.scenario.spec.section import cpu_list
from batchtune.scenario.units import counted
from batchtune.target.endpoint import Endpoint, is_loopback


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A host with the CPU that its worker is kept on, and the name that it is told by."""

    host: Host
    place: Place
    cpu: int
    name: str


class LostWorker(Exception):  # noqa: N818  # the fleet makes an error of it
    """A worker that cannot go on, and why."""

    def __init__(self, worker: Worker, why: str) -> None:
        super().__init__(why)
        self.worker = worker
        self.why = why


@contextlib.contextmanager
def blaming(worker: Worker) -> Iterator[None]:
    """What makes a measurement void at one host, its worker's death included, costs that host."""
    try:
        yield
    except MeasurementInvalidError as error:
        raise LostWorker(worker, error.message) from error


def placed_workers(hosts: Sequence[Host], cpus: Sequence[int] | None) -> list[Worker]:
    """Each host with a CPU of its machine, dealt in turn from the highest, and a name.

    Raises:
        MeasurementInvalidError: a host that does not say where it is.
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
    """Such as "3 workers: 2 on node-a (CPUs 6-7), 1 on node-b (CPU 3)"."""
    nodes = Counter(worker.place.node for worker in workers)
    cpus = {node: cpu_list(worker.cpu for worker in workers if worker.place.node == node) for node in nodes}
    places = ", ".join(f"{count} on {node} ({cpus[node]})" for node, count in nodes.items())
    return f"{counted(len(workers), 'worker')}: {places}"


def require_reachable(workers: Sequence[Worker], endpoint: Endpoint) -> None:
    """Refuse an endpoint on our own loopback where a host has another one."""
    if not is_loopback(endpoint.host):
        return
    ours = this_place().machine
    elsewhere = next((worker for worker in workers if worker.place.machine != ours), None)
    if elsewhere is not None:
        raise UsageError(
            f"load.fleet: {elsewhere.name} cannot reach {endpoint.host}, which is each machine's own",
            hint="load a running server by the name that the nodes know it by (batchtune load HOST:PORT/MODEL "
            "--set load.fleet.ray=…), or keep the workers on this machine by load.fleet.resources",
        )
