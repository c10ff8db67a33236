"""Two Ray nodes on this machine, for the benchmarks of load workers on a cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import ray
from ray.cluster_utils import Cluster

from batchtune.scenario.spec.workload import LoadSpec
from batchtune.system import schedulable_cpus


@contextmanager
def two_nodes(cpus: int) -> Iterator[str]:
    """The address of a cluster whose nodes have so many CPUs each."""
    node = {"num_cpus": cpus, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    try:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=cluster.address, namespace="batchtune", **quiet)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def fleets(address: str, rate_rps: float, workers: int) -> dict[str, LoadSpec]:
    """As many workers here and on the cluster, on the same CPUs, at the same rate of Poisson arrivals together."""
    cpus = tuple(sorted(schedulable_cpus(), reverse=True))  # as the cluster deals them out
    fleet = {"ray": address, "workers": workers}
    asked = {"arrivals": "poisson", "rate": rate_rps}
    return {
        "local": LoadSpec.model_validate({**asked, "processes": workers, "cpus": cpus}),
        "Ray": LoadSpec.model_validate({**asked, "fleet": fleet}),
    }


def children() -> dict[psutil.Process, str]:
    """All processes that this one has started, with their command lines."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found
