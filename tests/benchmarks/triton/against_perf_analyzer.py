"""Do we measure what perf_analyzer measures? Same Triton, same closed loop, in turn, each alone on the client's core.

    python tests/benchmarks/triton/against_perf_analyzer.py --perf-analyzer PROGRAM [--clients 1,8,32,128] [--rounds 3]
        [--instances 1] [--base-ms 20] [--per-row-ms 0.5] [--later-ms 0.1,0.3]

The program comes with tritonclient 2.51 (it wants libcudart.so.12 and libb64.so.0d in LD_LIBRARY_PATH). The server: the
model of `known_model`, batches of 16. Bars: throughput and p50 within 5 %, where perf_analyzer is not itself the limit.
Beside what a tool says stands what Triton counted in 1.5 s in the middle of its run: requests/s, the mean batch, and by
/proc/PID/stat the CPU a request of the server's processes and of the client's. Where the clients are fewer than fill two
batches, those of a batch that has ended join the next one if they are back before Triton begins it: how soon a client
comes back then decides the mean batch, and the rate. `--later-ms` shows that: our clients, each back so much later.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import psutil

from batchtune.load.fleet import LoadFleet
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.endpoint import Endpoint
from batchtune.target.external import ExternalTarget
from batchtune.tune.loader import Loader, LoadRun
from tests.benchmarks.triton.known_model import (
    BASE_S,
    CLIENT_CORE,
    PER_ROW_S,
    limit_rps,
    on_core,
    packages,
    serving,
    url,
)
from tests.target.triton.triton_server import TritonServer

SIZE = 16
WARM_UP_S, DURATION_S = 1.0, 4.0
SAMPLED_AFTER_S, SAMPLED_S = 1.5, 1.5


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run; NaN where the tool gave no figure."""

    rate_rps: float
    p50_s: float
    sampled: Sampler
    words: str = ""


class Sampler(threading.Thread):
    """What Triton counted between two moments of a run, and the CPU of the client's processes; NaN: it was over."""

    def __init__(self, server: TritonServer, pids: Callable[[], Sequence[int]]) -> None:
        super().__init__(daemon=True)
        self._server, self._pids = server, pids
        self.cpu_micros = self.server_micros = self.rate_rps = self.batch = math.nan
        self.start()

    def run(self) -> None:
        time.sleep(SAMPLED_AFTER_S)
        before = self._moment()
        time.sleep(SAMPLED_S)
        after = self._moment()
        if before is None or after is None or after[-1] == before[-1]:
            return
        seconds, cpu_s, server_s, requests, batches = (b - a for a, b in zip(before, after, strict=True))
        self.cpu_micros, self.server_micros = cpu_s / requests * 1e6, server_s / requests * 1e6
        self.rate_rps, self.batch = requests / seconds, requests / batches

    def _moment(self) -> tuple[float, float, float, int, int] | None:
        page = httpx.get(f"{url(self._server)}/v2/models/m/stats").json()["model_stats"][0]
        try:
            cpu_s = cpu_of(psutil.Process(pid) for pid in self._pids())
        except psutil.NoSuchProcess:
            return None
        server = psutil.Process(self._server.pid)
        server_s = cpu_of([server, *server.children(recursive=True)])
        return time.monotonic(), cpu_s, server_s, page["inference_count"], page["execution_count"]


def cpu_of(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


class Ours:
    """One load process on the client's core."""

    def __init__(self, server: TritonServer, fleet: LoadFleet) -> None:
        self._server, self._fleet = server, fleet
        scenario = Scenario.model_validate(
            {
                "name": "agreement",
                "target": {"kind": "external", "model": "m", "rest_url": url(server)},
                "request": {"protocol": "kserve_grpc"},
                "load": {"arrivals": "closed", "concurrency": 1},
                "objective": "throughput",
            }
        )
        endpoint = Endpoint(model_name="m", rest_port=server.rest_port, grpc_port=server.grpc_port)
        self._loader = Loader(scenario, ExternalTarget(endpoint, kserve=True), fleet)

    def point(self, clients: int, *, later_s: float = 0.0) -> Point:
        loop = ClosedLoop(concurrency=clients, duration_s=WARM_UP_S + DURATION_S, think_s=later_s)
        sampler = Sampler(self._server, lambda: self._fleet.process_ids)
        figures = self._loader.run(LoadRun(arrivals=loop, warm_up_s=WARM_UP_S), on_live=lambda _live: None)
        sampler.join()
        measured = figures.measurement
        return Point(
            rate_rps=measured.throughput_rps.value,
            p50_s=measured.latency_s["p50"].value,
            sampled=sampler,
            words=", ".join(one.code for one in measured.caveats),
        )


def perf_analyzers(program: str, server: TritonServer, clients: int, folder: Path) -> Point:
    report = folder / "report.csv"
    report.unlink(missing_ok=True)
    command = [program, "-m", "m", "-u", f"127.0.0.1:{server.grpc_port}", "-i", "grpc", "-f", str(report)]
    command += ["--concurrency-range", str(clients), "--measurement-interval", "1000"]
    with (folder / "log").open("wb") as log, on_core(CLIENT_CORE):
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    sampler = Sampler(server, lambda: [process.pid])
    process.wait(120)
    sampler.join()
    rows = list(csv.DictReader(report.open())) if report.exists() else []
    if not rows:
        said = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
        words = next((line for line in said if "stable" in line or "rror" in line), said[-1])
        return Point(rate_rps=math.nan, p50_s=math.nan, sampled=sampler, words=words.strip())
    return Point(
        rate_rps=float(rows[0]["Inferences/Second"]),
        p50_s=float(rows[0]["p50 latency"]) / 1e6,
        sampled=sampler,
    )


def told(name: str, points: Sequence[Point]) -> None:
    def spread(values: Sequence[float], form: str) -> str:
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return "-"
        return f"{median(known):{form}} ({min(known):{form}}-{max(known):{form}})"

    words = "; ".join(dict.fromkeys(one.words for one in points if one.words))
    print(
        f"  {name:18s} {spread([one.rate_rps for one in points], '.1f'):>28s}"
        f"{spread([one.p50_s * 1e3 for one in points], '.2f'):>24s}"
        f"{spread([one.sampled.rate_rps for one in points], '.1f'):>28s}"
        f"{spread([one.sampled.batch for one in points], '.2f'):>20s}"
        f"{spread([one.sampled.server_micros for one in points], '.0f'):>18s}"
        f"{spread([one.sampled.cpu_micros for one in points], '.0f'):>18s}  {words}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--perf-analyzer", required=True, help="the program")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--base-ms", type=float, default=1e3 * BASE_S)
    parser.add_argument("--per-row-ms", type=float, default=1e3 * PER_ROW_S)
    parser.add_argument("--later-ms", default="", help="our clients again, each back so much later")
    given = parser.parse_args()
    packages()
    tau = {"base_s": given.base_ms / 1e3, "per_row_s": given.per_row_ms / 1e3}
    limit = limit_rps(SIZE, given.instances, **tau)
    print(
        f"τ(b) = {given.base_ms:g} ms + {given.per_row_ms:g} ms · b, batches of {SIZE}, instances: {given.instances}; "
        f"at most {limit:.0f}/s"
    )
    print(
        f"{'':20s} {'requests/s':>28s}{'p50, ms':>24s}{'Triton: requests/s':>28s}{'mean batch':>20s}"
        f"{'CPU, µs: server':>18s}{'client':>18s}"
    )
    with tempfile.TemporaryDirectory() as name, LoadFleet(processes=1, cpus=(CLIENT_CORE,)) as fleet:
        folder = Path(name)
        (folder / "server").mkdir()
        with serving(folder / "server", size=SIZE, instances=given.instances, **tau) as server:
            ours = Ours(server, fleet)
            for clients in map(int, given.clients.split(",")):
                mine: list[Point] = []
                theirs: list[Point] = []
                later: dict[str, list[Point]] = {text: [] for text in given.later_ms.split(",") if text}
                for _ in range(given.rounds):
                    theirs.append(perf_analyzers(given.perf_analyzer, server, clients, folder))
                    mine.append(ours.point(clients))
                    for text, points in later.items():
                        points.append(ours.point(clients, later_s=float(text) / 1e3))
                print(f"{clients} clients")
                told("perf_analyzer", theirs)
                told("batchtune", mine)
                for text, points in later.items():
                    told(f"  {text} ms later", points)
                for what in ("rate_rps", "p50_s"):
                    known = [getattr(one, what) for one in theirs if not math.isnan(getattr(one, what))]
                    if known:
                        ratio = median(getattr(one, what) for one in mine) / median(known)
                        print(f"  {what}: batchtune / perf_analyzer {ratio - 1:+.1%}; bar 5 %")
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
