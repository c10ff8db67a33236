"""REST closed loop side by side with wrk: 1 KB bodies, 32 connections, nginx answers; one core each.

python tests/benchmarks/load/load_rest.py
Bar: our CPU per request, every request recorded, is at most 1.1 times wrk's.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks.load.load_rivals import (
    Run,
    alternate,
    nginx,
    print_table,
    require,
    run_ours,
    run_tool,
    seconds,
)

ROUNDS = 5
RUN_S = 2
USERS = 32
BODY_BYTES = 1024
PATH = "/v1/models/m:predict"


def ours(port: int) -> Run:
    import numpy as np

    from batchtune.scenario.arrivals import ClosedLoop
    from tests.load.load_servers import a_job, requests_for, run_here

    requests = requests_for("rest", bodies=(b"x" * BODY_BYTES,))
    loop = ClosedLoop(concurrency=USERS, duration_s=RUN_S)
    samples = run_here(a_job("rest", port, loop, requests=requests))
    if samples.errors():
        raise RuntimeError(f"{samples.errors()} {samples.error_texts}")
    p50_ns, p99_ns = np.quantile(samples.latency_ns, (0.5, 0.99))
    return Run(
        answered=len(samples),
        wall_s=RUN_S,
        cpu_s=samples.client_cpu_s,
        p50_s=p50_ns / 1e9,
        p99_s=p99_ns / 1e9,
    )


def wrk(port: int, script: Path) -> Run:
    command = ["wrk", "-t1", f"-c{USERS}", f"-d{RUN_S}", "--latency", "-s", str(script)]
    output, cpu_s = run_tool([*command, f"http://127.0.0.1:{port}{PATH}"])
    answered, wall = re.search(r"(\d+) requests in ([\d.]+\w+),", output).groups()  # type: ignore[union-attr]
    p50, p99 = (re.search(rf"{quantile}%\s+([\d.]+\w+)", output) for quantile in (50, 99))
    return Run(
        answered=int(answered),
        wall_s=seconds(wall),
        cpu_s=cpu_s,
        p50_s=seconds(p50[1]) if p50 else None,
        p99_s=seconds(p99[1]) if p99 else None,
    )


def main() -> None:
    require("wrk", "nginx", "taskset")
    with nginx() as port, tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "post.lua"
        script.write_text(f'wrk.method = "POST"; wrk.body = string.rep("x", {BODY_BYTES})')
        runs = alternate(
            ROUNDS, {"wrk": lambda: wrk(port, script), "batchtune": lambda: run_ours(ours, port)}
        )
    print_table(runs)
    ratios = [
        mine.cpu_s / mine.answered / (his.cpu_s / his.answered)
        for mine, his in zip(*_pairs(runs), strict=True)
    ]
    print(
        f"CPU per request, batchtune / wrk: {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}); bar 1.10"
    )


def _pairs(runs: dict[str, list[Run]]) -> tuple[list[Run], list[Run]]:
    return runs["batchtune"], runs["wrk"]


if __name__ == "__main__":
    main()
