"""gRPC closed loop side by side with h2load, both recording every request, and grpc.aio for reference.

python tests/benchmarks/load/load_grpc.py
1 KB messages, 32 streams in flight, nghttpd answers; one core each. Bars: our CPU per request is at most h2load's
(with --log-file), and at most a tenth of grpc.aio's.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.benchmarks.load.load_rivals import (
    Run,
    alternate,
    nghttpd,
    print_table,
    require,
    run_ours,
    run_tool,
    seconds,
)

ROUNDS = 3
RUN_S = 2
STREAMS = 32
MESSAGE = b"x" * 1024
LAYOUTS = (4, 1)  # connections


def ours(port: int, path: str, connections: int) -> Run:
    import numpy as np

    from batchtune.load.clients import client as clients
    from batchtune.scenario.arrivals import ClosedLoop
    from tests.load.load_servers import a_job, requests_for, run_here

    clients.PREDICT_PATH = path  # nghttpd serves files
    loop = ClosedLoop(concurrency=STREAMS, duration_s=RUN_S)
    requests = requests_for("grpc", bodies=(MESSAGE,))
    samples = run_here(a_job("grpc", port, loop, requests=requests, connections=connections, check_every=0))
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


def h2load(port: int, path: str, connections: int) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        body, log = Path(directory) / "body", Path(directory) / "log"
        body.write_bytes(b"\0" + len(MESSAGE).to_bytes(4) + MESSAGE)
        command = [
            "h2load",
            "-D",
            f"{RUN_S}",
            f"-c{connections}",
            f"-m{STREAMS // connections}",
            "-d",
            str(body),
        ]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"--log-file={log}"]
        output, cpu_s = run_tool([*command, f"http://127.0.0.1:{port}{path}"])
        latencies = sorted(int(line.rpartition("\t")[2]) for line in log.read_text().splitlines())
    answered = int(re.search(r"(\d+) succeeded", output)[1])  # type: ignore[index]
    wall_s = seconds(re.search(r"finished in ([\d.]+\w+),", output)[1])  # type: ignore[index]
    p50, p99 = (latencies[int(len(latencies) * quantile)] / 1e6 for quantile in (0.5, 0.99))
    return Run(answered=answered, wall_s=wall_s, cpu_s=cpu_s, p50_s=p50, p99_s=p99)


def grpc_aio(port: int, path: str) -> Run:
    import grpc
    import uvloop

    async def run() -> Run:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(path)
            await call(MESSAGE)
            answered = 0
            end = time.monotonic() + RUN_S

            async def user() -> None:
                nonlocal answered
                while time.monotonic() < end:
                    await call(MESSAGE)
                    answered += 1

            cpu_s = time.process_time()
            await asyncio.gather(*(user() for _ in range(STREAMS)))
            return Run(answered=answered, wall_s=RUN_S, cpu_s=time.process_time() - cpu_s)

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())


def main() -> None:
    require("h2load", "nghttpd", "taskset")
    with nghttpd() as (port, path):
        contestants = {}
        for connections in LAYOUTS:
            layout = f"{connections} connections of {STREAMS // connections}"
            contestants[f"h2load, {layout}"] = lambda count=connections: h2load(port, path, count)
            contestants[f"batchtune, {layout}"] = lambda count=connections: run_ours(ours, port, path, count)
        contestants["grpc.aio"] = lambda: run_ours(grpc_aio, port, path)
        runs = alternate(ROUNDS, contestants)
    print_table(runs)
    names = list(runs)
    for rival, mine in ((names[0], names[1]), (names[2], names[3]), (names[4], names[1])):
        ratios = [a.cpu_micros / b.cpu_micros for a, b in zip(runs[mine], runs[rival], strict=True)]
        bar = "0.10" if rival == "grpc.aio" else "1.00"
        print(f"{mine} / {rival}: {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}); bar {bar}")


if __name__ == "__main__":
    main()
