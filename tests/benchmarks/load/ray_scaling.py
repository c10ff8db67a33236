"""What does a worker on a Ray cluster cost, and its head? Beside local processes, with 1, 2 and 4 of them.

    RAY_TMPDIR=/tmp/r python tests/benchmarks/load/ray_scaling.py [--workers 1,2,4] [--seconds 4] [--rate 2000] [--runs 20]

Two nodes on this machine, each worker at the same open-loop rate of gRPC requests against a server that does nothing.
One line a fleet: CPU of the workers a request, p50 and p95, CPU of the head a second and worker, what a load takes beyond
its own duration, how well the clocks are known. Then a closed loop at full speed: what its rows take to come back. At
last so many fleets in a row, and what they leave: actors, worker processes, references to objects.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace

import numpy as np
import ray

from batchtune.load.calibration import null_server
from batchtune.load.cluster.cluster_fleet import AnyFleet, fleet_of
from batchtune.load.fleet import LoadJob
from batchtune.scenario.arrivals import ClosedLoop, draw
from tests.benchmarks.load.ray_cluster import children, fleets, two_nodes
from tests.load.load_servers import a_job, requests_for


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 4]
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--runs", type=int, default=20)
    asked = parser.parse_args()
    with two_nodes(2) as address, null_server() as endpoint:
        for workers in asked.workers:
            specs = fleets(address, asked.rate * workers, workers)
            schedule = draw(specs["local"], duration_s=asked.seconds)
            job = replace(a_job("grpc", 1, schedule, requests=requests_for("grpc")), endpoint=endpoint)
            for name, spec in specs.items():
                with fleet_of(spec) as fleet:
                    _tell(f"{workers} {name}", fleet, job)
                    if workers == 2:
                        closed = ClosedLoop(concurrency=64, duration_s=asked.seconds)
                        _tell(f"{workers} {name}, closed", fleet, replace(job, arrivals=closed))
        _leave_nothing(address, job, asked.runs)


def _tell(name: str, fleet: AnyFleet, job: LoadJob) -> None:
    fleet.run(replace(job, arrivals=ClosedLoop(concurrency=8, duration_s=0.3)))
    begun_s, head_cpu_s = time.monotonic(), time.process_time()
    samples = fleet.run(job)
    run_s, head_cpu_s = time.monotonic() - begun_s, time.process_time() - head_cpu_s
    p50, p95 = np.quantile(samples.latency_ns, (0.5, 0.95)) / 1e3
    clocks = [note.partition("± ")[2].partition(" ")[0] for note in samples.notes if "clock" in note]
    print(
        f"{name:16} {len(samples) / samples.wall_s:9,.0f}/s  {samples.client_cpu_s / len(samples) * 1e6:6.2f} µs a "
        f"request  p50 {p50:7.0f} µs  p95 {p95:7.0f} µs  head {head_cpu_s / run_s / fleet.processes * 1e3:6.2f} ms/s a "
        f"worker  {run_s - job.arrivals.duration_s:5.2f} s beyond  clocks ± {', '.join(clocks) or '–'} ms",
        flush=True,
    )


def _leave_nothing(address: str, job: LoadJob, runs: int) -> None:
    starts_s = []
    short = replace(job, arrivals=ClosedLoop(concurrency=8, duration_s=0.2))
    for _ in range(runs):
        begun_s = time.monotonic()
        with fleet_of(fleets(address, 200.0, 2)["Ray"]) as fleet:
            starts_s.append(time.monotonic() - begun_s)
            fleet.run(short)
    give_up_s = time.monotonic() + 10.0
    while (left := _left()) != (0, 0, 0) and time.monotonic() < give_up_s:
        time.sleep(0.1)
    print(
        f"{runs} fleets of 2 workers, each started in {np.median(starts_s):.2f} s, left: "
        f"{left[0]} actors, {left[1]} worker processes, {left[2]} references to objects"
    )


def _left() -> tuple[int, int, int]:
    gc.collect()
    lines = children().values()
    references = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    actors = sum("ray::_Actor" in line for line in lines)
    workers = sum("spawn_main" in line for line in lines) - 1  # 1: the null server
    return actors, max(0, workers), len(references)


if __name__ == "__main__":
    main()
