"""Which fleet does a scenario ask for: processes of this machine, or workers on a cluster?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchtune.load.calibration import calibrate
from batchtune.load.cluster.fleet import ClusterFleet
from batchtune.load.cluster.ray_hosts import RayCluster
from batchtune.load.fleet import LoadFleet
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.load import LoadSpec

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
