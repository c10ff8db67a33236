"""A Ray cluster of two nodes on this machine, and fleets on it; prints what came of them as JSON.

Against a server that does nothing: fleets in turn, then one whose second node is killed under its load. In a process of
its own: Ray keeps threads and handlers until its process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import socket
import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import psutil
import ray
from ray.cluster_utils import Cluster

from batchtune.errors import UsageError
from batchtune.load.calibration import null_server
from batchtune.load.cluster import ray_actors
from batchtune.load.cluster.cluster_fleet import ClusterFleet, WorkerLostError, fleet_of
from batchtune.load.fleet import LiveAggregate, LoadJob
from batchtune.scenario.arrivals import Schedule, draw
from batchtune.scenario.spec.workload import LoadSpec
from tests.load.load_servers import a_job, requests_for
from tests.ray_script import errors_in

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
QUICK_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 20,
}


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {**NODE, "_system_config": QUICK_DEATH, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(**NODE)
    fleet = {"ray": cluster.address, "workers": 2}
    load = LoadSpec(arrivals="poisson", rate=2000, seed=3, fleet=fleet)  # type: ignore[arg-type]
    try:
        with null_server() as endpoint:
            job = a_job("grpc", 1, draw(load, duration_s=2.0), requests=requests_for("grpc"))
            job = replace(job, endpoint=endpoint)
            found["connecting"] = _of_one(load, job)  # connects, and disconnects
            found["client"] = _of_a_client(_with(load, ray=f"ray://127.0.0.1:{port}"), job)
            ray.init(address=cluster.address, log_to_driver=False, namespace="batchtune")
            found["connected"] = _of_one(load, job)
            found["too_many"] = _refused(_with(load, workers=9))
            found["killed"] = _killed(load, job, cluster, other)
        found["left"] = _left()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


def _with(load: LoadSpec, **changes: Any) -> LoadSpec:
    assert load.fleet is not None
    return load.model_copy(update={"fleet": load.fleet.model_copy(update=changes)})


def _sent(fleet: ClusterFleet, job: LoadJob) -> dict[str, Any]:
    assert isinstance(job.arrivals, Schedule)
    samples = fleet.run(job)
    return {
        "same_schedule": samples.due_ns.tolist() == job.arrivals.due_ns.tolist(),
        "errors": samples.errors(),
        "clocks": [note for note in samples.notes if "clock" in note],
    }


def _refused(load: LoadSpec) -> str:
    try:
        with patch.object(ray_actors, "JOIN_LIMIT_S", 1.0), fleet_of(load):
            return ""
    except UsageError as error:
        return error.message


def _of_one(load: LoadSpec, job: LoadJob) -> dict[str, Any]:
    with fleet_of(load) as fleet:
        assert isinstance(fleet, ClusterFleet)
        return _sent(fleet, job)


def _of_a_client(load: LoadSpec, job: LoadJob) -> dict[str, Any]:
    """As `_of_one`; where the cluster answers that Ray's server for this client has not started, that."""
    for _ in range(3):
        try:
            return _of_one(load, job)
        except UsageError as error:
            if "Starting Ray client server failed" not in error.message:
                raise
            answer = {"not_started": f"{error.message}\n{errors_in(os.environ['RAY_TMPDIR'])}"}
    return answer


def _killed(load: LoadSpec, job: LoadJob, cluster: Cluster, other: Any) -> dict[str, Any]:
    """What is said of a node that dies under its load, and what the next load sends without it."""
    killers: list[threading.Thread] = []

    def kill(live: LiveAggregate) -> None:
        if live.sent and not killers:
            killers.append(threading.Thread(target=cluster.remove_node, args=(other, False)))
            killers[0].start()

    with fleet_of(load) as fleet:
        assert isinstance(fleet, ClusterFleet)
        try:
            fleet.run(replace(job, arrivals=draw(load, duration_s=40.0)), on_progress=kill)
        except WorkerLostError as error:
            killers[0].join()
            return {"message": error.message, "left": error.left, **_sent(fleet, job)}
    return {"message": "nothing was lost"}


def _left() -> dict[str, Any]:
    """What a fleet leaves behind: actors, processes that they started, references to objects, CPUs set aside."""
    give_up_s = time.monotonic() + 20.0
    while True:
        gc.collect()
        lines = [_command(process) for process in psutil.Process().children(recursive=True)]
        left = {
            "actors": [line for line in lines if "ray::_Actor" in line],
            "workers": [line for line in lines if "spawn_main" in line],
            "objects": len(ray._private.worker.global_worker.core_worker.get_all_reference_counts()),
            "cpus_taken": ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0),
        }
        if not any(left.values()) or time.monotonic() > give_up_s:
            return left
        time.sleep(0.05)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


if __name__ == "__main__":
    faulthandler.dump_traceback_later(270, exit=True)
    print(json.dumps(main()))
