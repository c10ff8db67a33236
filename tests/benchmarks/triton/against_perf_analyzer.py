"""Do we measure what perf_analyzer measures? Same Triton, same closed loop, in turn, each alone on the client's core.

    python tests/benchmarks/triton/against_perf_analyzer.py --perf-analyzer PROGRAM [--clients 1,8,32,128] [--rounds 3]

The program comes with tritonclient 2.51 (it wants libcudart.so.12 and libb64.so.0d in LD_LIBRARY_PATH). The server: the
model of `known_model`, batches of 16. Bars: throughput and p50 within 5 %, where perf_analyzer is not itself the limit.
Where the clients are fewer than fill two batches, those of a batch that has ended join the next one if they are back
before Triton begins it: how soon a client comes back then decides the mean batch, and the rate.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from batchtune.load.fleet import LoadFleet
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.endpoint import Endpoint
from batchtune.target.external import ExternalTarget
from batchtune.tune.loader import Loader, LoadRun
from tests.benchmarks.rivals import CLIENT_CORE, alternate, on_core, print_host, spread
from tests.benchmarks.triton.known_model import limit_rps, serving
from tests.target.triton.triton_server import TritonServer

SIZE = 16
WARM_UP_S, DURATION_S = 1.0, 4.0
Figures = tuple[float, float]
"""Requests/s, p50 in ms."""


def loader_of(server: TritonServer, fleet: LoadFleet) -> Loader:
    scenario = Scenario.model_validate(
        {
            "name": "agreement",
            "target": {"kind": "external", "model": "m", "rest_url": f"http://127.0.0.1:{server.rest_port}"},
            "request": {"protocol": "kserve_grpc"},
            "load": {"arrivals": "closed", "concurrency": 1},
            "objective": "throughput",
        }
    )
    endpoint = Endpoint(model_name="m", rest_port=server.rest_port, grpc_port=server.grpc_port)
    return Loader(scenario, ExternalTarget(endpoint, kserve=True), fleet)


def ours(loader: Loader, clients: int) -> Figures:
    loop = ClosedLoop(concurrency=clients, duration_s=WARM_UP_S + DURATION_S)
    run = LoadRun(arrivals=loop, warm_up_s=WARM_UP_S)
    measured = loader.run(run, on_live=lambda _live: None).measurement
    return measured.throughput_rps.value, 1e3 * measured.latency_s["p50"].value


def perf_analyzers(program: str, server: TritonServer, clients: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder, on_core(CLIENT_CORE):
        report = Path(folder) / "report.csv"
        command = [program, "-m", "m", "-u", f"127.0.0.1:{server.grpc_port}", "-i", "grpc", "-f", str(report)]
        command += ["--concurrency-range", str(clients), "--measurement-interval", "1000"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, check=False)
        if not report.exists():
            raise SystemExit(done.stdout + done.stderr)
        (row,) = csv.DictReader(report.open())
    return float(row["Inferences/Second"]), float(row["p50 latency"]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--perf-analyzer", required=True, help="the program")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"at most {limit_rps(SIZE, 1):.0f}/s")
    with (
        tempfile.TemporaryDirectory() as name,
        LoadFleet(processes=1, cpus=(CLIENT_CORE,)) as fleet,
        serving(Path(name), size=SIZE) as server,
    ):
        loader = loader_of(server, fleet)
        for clients in map(int, given.clients.split(",")):
            turns = {
                "perf_analyzer": partial(perf_analyzers, given.perf_analyzer, server, clients),
                "batchtune": partial(ours, loader, clients),
            }
            rounds = alternate(given.rounds, turns)
            print(f"{clients} clients: {', '.join(turns)}, batchtune / perf_analyzer (bar 5 %)")
            for place, what in enumerate(("requests/s", "p50 ms")):
                theirs, mine = ([figures[place] for figures in rounds[who]] for who in turns)
                ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
                print(f"  {what:12}{spread(theirs):>26}{spread(mine):>26}{spread(ratios, '.3f'):>26}")
    print_host()


if __name__ == "__main__":
    main()
