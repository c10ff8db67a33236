"""Do we measure what wrk and h2load measure? Same server, same closed loop, same requests, run in turn.

python tests/benchmarks/load/load_agreement.py
The bundled server with an emulated device (2 ms + 0.05 ms × rows, batches of 32). Bars: throughput within 2 %, p50
and p99 within 5 % of theirs.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.benchmarks.load.load_rivals import (
    SERVER_CPU,
    Run,
    alternate,
    print_table,
    require,
    run_ours,
    run_tool,
    seconds,
)

ROUNDS = 4
RUN_S = 2
USERS = 16
CONNECTIONS = 4
MODEL = """
service_time: {base_ms: 2.0, per_row_ms: 0.05}
inputs: {x: {dtype: float32, shape: [16]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
PARAMETERS = "max_batch_size {value: 32} num_batch_threads {value: 1} max_enqueued_batches {value: 100}"


def body(protocol: str) -> bytes:
    import numpy as np

    from batchtune.wire.tfserving.rest_json import encode_predict_json
    from batchtune.wire.tfserving.tensors import encode_predict_request

    rows = np.linspace(0, 1, 16, dtype=np.float32).reshape(1, -1)
    if protocol == "grpc":
        return encode_predict_request("m", "serving_default", {"x": rows})
    return encode_predict_json({"x": rows}, signature_name="serving_default")


def ours(protocol: str, port: int) -> Run:
    import numpy as np

    from batchtune.scenario.arrivals import ClosedLoop
    from tests.load.load_servers import a_job, requests_for, run_here

    requests = requests_for(protocol, bodies=(body(protocol),))
    loop = ClosedLoop(concurrency=USERS, duration_s=RUN_S)
    samples = run_here(a_job(protocol, port, loop, requests=requests, connections=CONNECTIONS))
    if samples.errors():
        raise RuntimeError(f"{samples.errors()} {samples.error_texts}")
    p50_ns, p99_ns = np.quantile(samples.latency_ns, (0.5, 0.99))
    return Run(
        answered=int(np.count_nonzero(samples.done_ns < RUN_S * 1e9)),
        wall_s=RUN_S,
        cpu_s=samples.client_cpu_s,
        p50_s=p50_ns / 1e9,
        p99_s=p99_ns / 1e9,
    )


def wrk(port: int, directory: Path) -> Run:
    script = directory / "post.lua"
    script.write_text(f"wrk.method = 'POST'; wrk.body = [==[{body('rest').decode()}]==]")
    command = ["wrk", "-t1", f"-c{USERS}", f"-d{RUN_S}", "--latency", "-s", str(script)]
    output, cpu_s = run_tool([*command, f"http://127.0.0.1:{port}/v1/models/m:predict"])
    if "Non-2xx" in output:
        raise RuntimeError(output)
    answered, wall = re.search(r"(\d+) requests in ([\d.]+\w+),", output).groups()  # type: ignore[union-attr]
    p50, p99 = (seconds(re.search(rf"{quantile}%\s+([\d.]+\w+)", output)[1]) for quantile in (50, 99))  # type: ignore[index]
    return Run(answered=int(answered), wall_s=seconds(wall), cpu_s=cpu_s, p50_s=p50, p99_s=p99)


def h2load(port: int, directory: Path) -> Run:
    message, log = directory / "message", directory / "log"
    content = body("grpc")
    message.write_bytes(b"\0" + len(content).to_bytes(4) + content)
    log.unlink(missing_ok=True)
    command = [
        "h2load",
        "-D",
        f"{RUN_S}",
        f"-c{CONNECTIONS}",
        f"-m{USERS // CONNECTIONS}",
        "-d",
        str(message),
    ]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"--log-file={log}"]
    url = f"http://127.0.0.1:{port}/tensorflow.serving.PredictionService/Predict"
    output, cpu_s = run_tool([*command, url])
    # Its own count goes on after the duration has ended, until the last answer: the log says what came in time.
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    if " 0 failed, 0 errored" not in output or not lines:
        raise RuntimeError(output)
    latencies = sorted(int(line[2]) for line in lines)
    first_micros = min(int(line[0]) for line in lines)
    answered = sum(int(line[0]) + int(line[2]) < first_micros + RUN_S * 1e6 for line in lines)
    p50, p99 = (latencies[int(len(latencies) * quantile)] / 1e6 for quantile in (0.5, 0.99))
    return Run(answered=answered, wall_s=RUN_S, cpu_s=cpu_s, p50_s=p50, p99_s=p99)


def main() -> None:
    require("wrk", "h2load", "taskset")
    from tests.server.server_process import ServerProcess

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        version = directory / "m" / "1"
        version.mkdir(parents=True)
        (version / "emulated.yaml").write_text(MODEL)
        parameters = directory / "batching.txt"
        parameters.write_text(PARAMETERS)
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {SERVER_CPU})  # the server inherits it
        server = ServerProcess(
            directory / "m", "--enable_batching", f"--batching_parameters_file={parameters}"
        )
        os.sched_setaffinity(0, before)
        with server:
            contestants: dict[str, Callable[[], Run]] = {
                "wrk": lambda: wrk(server.rest_port, directory),
                "batchtune, REST": lambda: run_ours(ours, "rest", server.rest_port),
                "h2load": lambda: h2load(server.grpc_port, directory),
                "batchtune, gRPC": lambda: run_ours(ours, "grpc", server.grpc_port),
            }
            runs = alternate(ROUNDS, contestants)
    print_table(runs)
    for rival, mine in (("wrk", "batchtune, REST"), ("h2load", "batchtune, gRPC")):
        for what, bar in (("rate_rps", "2 %"), ("p50_s", "5 %"), ("p99_s", "5 %")):
            ratio = median(getattr(run, what) for run in runs[mine]) / median(
                getattr(run, what) for run in runs[rival]
            )
            print(f"{mine} / {rival}, {what}: {ratio - 1:+.1%}; bar {bar}")


if __name__ == "__main__":
    main()
