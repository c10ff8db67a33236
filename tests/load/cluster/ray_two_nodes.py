"""A Ray cluster of two nodes on this machine, and a fleet on it; prints what came of it as JSON.

    python tests/load/cluster/ray_two_nodes.py [RUNS]

Side by side with two local processes, both against a server that does nothing: so many fleets in turn, then one whose
second node is killed under its load. In a process of its own: Ray keeps threads and handlers until its process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

from batchtune.errors import UsageError
from batchtune.load.calibration import null_server
from batchtune.load.cluster import ray_actors
from batchtune.load.cluster.cluster_fleet import AnyFleet, ClusterFleet, WorkerLostError, fleet_of
from batchtune.load.fleet import LiveAggregate, LoadFleet, LoadJob
from batchtune.load.samples import Samples
from batchtune.scenario.arrivals import draw
from batchtune.scenario.spec.workload import LoadSpec
from tests.load.load_servers import a_job, requests_for
from tests.ray_script import errors_in

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
QUICK_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 20,
}
RATE_RPS = 2000
TRIES = 3


def main(runs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    port = _free_port()
    head = {**NODE, "_system_config": QUICK_DEATH, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(**NODE)
    load = LoadSpec(
        arrivals="poisson",
        rate=RATE_RPS,
        seed=3,
        fleet={"ray": cluster.address, "workers": 2},  # type: ignore[arg-type]
    )
    schedule = draw(load, duration_s=2.0)
    try:
        with null_server() as endpoint:
            job = replace(a_job("grpc", 1, schedule, requests=requests_for("grpc")), endpoint=endpoint)
            found["connecting"] = _of_one(load, job)  # connects, and disconnects
            found["client"] = _of_a_client(_at(load, f"ray://127.0.0.1:{port}"), job)
            ray.init(address=cluster.address, log_to_driver=False, namespace="batchtune")
            with LoadFleet(processes=2) as local:
                found["local"] = [_figures(local, job) for _ in range(runs)]
            found["ray"] = [_of_one(load, job) for _ in range(runs)]
            found["too_many"] = _refused(load)
            found["killed"] = _killed(load, job, cluster, other)
        found["left"] = _left()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


def _refused(load: LoadSpec) -> str:
    assert load.fleet is not None
    many = load.model_copy(update={"fleet": load.fleet.model_copy(update={"workers": 9})})
    try:
        with patch.object(ray_actors, "JOIN_LIMIT_S", 1.0), fleet_of(many):
            return ""
    except UsageError as error:
        return error.message


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _at(load: LoadSpec, address: str) -> LoadSpec:
    assert load.fleet is not None
    return load.model_copy(update={"fleet": load.fleet.model_copy(update={"ray": address})})


def _of_one(load: LoadSpec, job: LoadJob) -> dict[str, Any]:
    begun_s = time.monotonic()
    with fleet_of(load) as fleet:
        started_s = time.monotonic() - begun_s
        assert isinstance(fleet, ClusterFleet)
        figures = _figures(fleet, job)
        return {**figures, "started_s": started_s, "nodes": len({w.place.node for w in fleet._workers})}


def _of_a_client(load: LoadSpec, job: LoadJob) -> dict[str, Any]:
    """As `_of_one`; where the cluster answers that Ray's server for this client has not started, that."""
    for _ in range(TRIES):
        try:
            return _of_one(load, job)
        except UsageError as error:
            if "Starting Ray client server failed" not in error.message:
                raise
            answer = {"not_started": f"{error.message}\n{errors_in(os.environ['RAY_TMPDIR'])}"}
    return answer


def _figures(fleet: AnyFleet, job: LoadJob) -> dict[str, Any]:
    begun_s, cpu_s = time.monotonic(), time.process_time()
    samples = fleet.run(job)
    p50, p95 = np.quantile(samples.latency_ns, (0.5, 0.95)) / 1e3
    return {
        "same_schedule": samples.due_ns.tolist() == job.arrivals.due_ns.tolist(),  # type: ignore[union-attr]
        "errors": samples.errors(),
        "rate_rps": len(samples) / job.arrivals.duration_s,
        "p50_micros": round(p50, 1),
        "p95_micros": round(p95, 1),
        "cpu_micros_a_request": round(samples.client_cpu_s / len(samples) * 1e6, 2),
        "run_s": round(time.monotonic() - begun_s, 2),
        "head_cpu_s": round(time.process_time() - cpu_s, 3),
        "notes": _clocks(samples),
    }


def _clocks(samples: Samples) -> list[str]:
    return [note for note in samples.notes if "clock" in note]


def _killed(load: LoadSpec, job: LoadJob, cluster: Cluster, other: Any) -> dict[str, Any]:
    long_job = replace(job, arrivals=draw(load, duration_s=40.0))
    killers: list[threading.Thread] = []
    times_s: list[float] = []
    events: list[str] = []

    def kill(live: LiveAggregate) -> None:
        if live.sent and not killers:
            times_s.append(time.monotonic())
            killers.append(threading.Thread(target=cluster.remove_node, args=(other, False)))
            killers[0].start()

    with fleet_of(load, on_event=events.append) as fleet:
        try:
            fleet.run(long_job, on_progress=kill)
        except WorkerLostError as error:
            noticed_s = time.monotonic() - times_s[0]
            killers[0].join()
            after = fleet.run(job)
            return {
                "message": error.message,
                "left": error.left,
                "noticed_s": round(noticed_s, 2),
                "same_schedule": after.due_ns.tolist() == job.arrivals.due_ns.tolist(),  # type: ignore[union-attr]
                "errors": after.errors(),
                "events": events,
            }
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
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
