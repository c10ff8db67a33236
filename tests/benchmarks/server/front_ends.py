"""CPU per request of the whole server, REST and gRPC, and the share of the device's limit that it reaches.

python tests/benchmarks/server/front_ends.py [--seconds 3] [--only echo] [--beside OTHER_CHECKOUT --rounds 4]
The server (its real process, an emulated device, one batch thread) on core 0, h2load or wrk on core 1; requests of one
row of 200 float32, answers of 2. Bars: echo ≥ 110,000/s gRPC and ≥ 50,000/s REST; CPU ≤ 14 µs gRPC, ≤ 25 µs REST; where
a batch of b rows takes 2.0 ms + 0.05 ms × b, ≥ 95 % of b/τ(b); one client: p50 ≤ τ(1) + 0.2 ms.
One gRPC answer of each case is read: h2load counts those with a failure's status too.
With --beside this checkout and the other one take turns, and the medians of each are printed with their ranges; "n/o" is
the ratio new/old of the two runs of one round, which what else runs on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

sys.path += [str(Path(__file__).parents[3])]

from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.benchmarks.server.checked_clients import GrpcChannel

SERVER_CORE, CLIENT_CORE = 0, 1
PREDICT_PATHS = {"gRPC": "/tensorflow.serving.PredictionService/Predict", "REST": "/v1/models/m:predict"}
EMULATED = """
service_time: {{base_ms: {base_ms}, per_row_ms: {per_row_ms}}}
inputs: {{x: {{dtype: float32, shape: [200]}}}}
outputs: {{y: {{dtype: float32, shape: [2]}}}}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load on one configuration; the limit is in requests per second, 0 for none."""

    name: str
    base_ms: float
    per_row_ms: float
    max_batch_size: int
    clients: int

    @property
    def limit_rps(self) -> float:
        batch_ms = self.base_ms + self.per_row_ms * self.max_batch_size
        return 1000 * self.max_batch_size / batch_ms if batch_ms else 0.0


CASES = [
    Case(name="echo", base_ms=0, per_row_ms=0, max_batch_size=64, clients=128),
    Case(name="few", base_ms=0, per_row_ms=0, max_batch_size=64, clients=32),
    Case(name="b32", base_ms=2.0, per_row_ms=0.05, max_batch_size=32, clients=128),
    Case(name="b64", base_ms=2.0, per_row_ms=0.05, max_batch_size=64, clients=256),
    Case(name="one", base_ms=2.0, per_row_ms=0.05, max_batch_size=32, clients=1),
]


HERE = Path(__file__).parents[3]
FIGURES = {"requests/s": 2, "CPU µs/request": -4, "p50 ms": -3}  # and their places in a row


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=int, default=3)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--beside", type=Path)
    arguments.add_argument("--rounds", type=int, default=4)
    options = arguments.parse_args()
    cases = [case for case in CASES if options.only in {"", case.name}]
    if options.beside is not None:
        compare(cases, options.seconds, options.rounds, (options.beside.resolve(), HERE))
        return
    print(
        f"{'case':6}{'':6}{'requests/s':>12}{'of limit':>10}{'CPU µs/request':>16}{'p50 ms':>9}{'p99 ms':>9}  failed"
    )
    for case in cases:
        for row in run_case(case, options.seconds, HERE):
            print(row, flush=True)


def run_case(case: Case, seconds: int, checkout: Path) -> list[str]:
    with served(case, checkout) as (ports, pid, base):
        rows = []
        for protocol, port in ports.items():
            load(case, protocol, port, pid, 1, base)  # warms up
            if protocol == "gRPC":
                check_grpc(port)
            rows.append(load(case, protocol, port, pid, seconds, base))
        return rows


def compare(cases: list[Case], seconds: int, rounds: int, checkouts: tuple[Path, Path]) -> None:
    """Print the medians of both checkouts, each with its range; their turns are mirrored from round to round."""
    print(f"{'case':6}{'':6}{'':6}" + "".join(f"{name:>28}" for name in FIGURES) + "  failed")
    for case in cases:
        rows: dict[tuple[str, str], list[list[str]]] = {}
        for number in range(rounds):
            turns = list(zip(("old", "new"), checkouts, strict=True))
            for name, checkout in turns if number % 2 == 0 else turns[::-1]:
                for row in run_case(case, seconds, checkout):
                    rows.setdefault((row.split()[1], name), []).append(row.split())
        print_compared(case.name, rows)


def print_compared(case: str, rows: dict[tuple[str, str], list[list[str]]]) -> None:
    for protocol in PREDICT_PATHS:
        runs = {name: rows[protocol, name] for name in ("old", "new")}
        columns = {name: [figures(run) for run in of_checkout] for name, of_checkout in runs.items()}
        columns["n/o"] = [
            [after / before for before, after in zip(old, new, strict=True)]
            for old, new in zip(columns["old"], columns["new"], strict=True)
        ]
        for name, rounds in columns.items():
            shown = "".join(f"{spread(column):>28}" for column in zip(*rounds, strict=True))
            failed = sum(int(run[-1]) for run in runs.get(name, []))
            print(f"{case:6}{protocol:6}{name:6}{shown}  {failed}", flush=True)


def figures(row: list[str]) -> list[float]:
    return [float(row[place].replace(",", "")) for place in FIGURES.values()]


def spread(values: Sequence[float]) -> str:
    digits = 0 if values[0] >= 1000 else 2
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} [{low:,.{digits}f}-{high:,.{digits}f}]"


@contextmanager
def served(case: Case, checkout: Path = HERE) -> Iterator[tuple[dict[str, int], int, Path]]:
    """The server of a checkout for a case: its port for each protocol, its process id, a scratch directory."""
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "model" / "1").mkdir(parents=True)
        emulated = EMULATED.format(base_ms=case.base_ms, per_row_ms=case.per_row_ms)
        (base / "model" / "1" / "emulated.yaml").write_text(emulated)
        (base / "batching.txt").write_text(
            f"max_batch_size {{ value: {case.max_batch_size} }} batch_timeout_micros {{ value: 0 }} "
            "max_enqueued_batches { value: 1000000 } num_batch_threads { value: 1 }"
        )
        ports = dict(zip(PREDICT_PATHS, free_ports(2), strict=True))
        command = [
            "taskset",
            "-c",
            str(SERVER_CORE),
            sys.executable,
            "-m",
            "batchtune.server",
            "--model_name=m",
        ]
        command += [f"--model_base_path={base / 'model'}", "--enable_batching"]
        command += [f"--batching_parameters_file={base / 'batching.txt'}"]
        command += [f"--port={ports['gRPC']}", f"--rest_api_port={ports['REST']}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        server = subprocess.Popen(command, env=environment, cwd=directory, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(ports["REST"])
            yield ports, server.pid, base
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)


def request_inputs() -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(1).random((1, 200), dtype=np.float32)}


def check_grpc(port: int) -> None:
    """Raises RuntimeError unless a Predict is answered with one row of y."""

    async def answer() -> tuple[int, bytes, str]:
        channel = GrpcChannel(port)
        try:
            return await channel.ask(
                "PredictionService/Predict", encode_predict_request("m", "", request_inputs())
            )
        finally:
            channel.close()

    status, message, text = asyncio.run(answer())
    if status or decode_predict_response(message)["y"].shape != (1, 2):
        raise RuntimeError(f"a Predict over gRPC was answered by status {status} {text!r}, {message!r}")


def load(case: Case, protocol: str, port: int, pid: int, seconds: int, base: Path) -> str:
    inputs = request_inputs()
    url = f"http://127.0.0.1:{port}{PREDICT_PATHS[protocol]}"
    if protocol == "gRPC":
        command = h2load_command(case, encode_predict_request("m", "", inputs), url, seconds, base)
    else:
        command = wrk_command(case, json.dumps({"instances": inputs["x"].tolist()}), url, seconds, base)
    cpu_s = process_cpu_s(pid)
    output = subprocess.run(
        ["taskset", "-c", str(CLIENT_CORE), *command],
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds + 30,
    ).stdout
    cpu_s = process_cpu_s(pid) - cpu_s
    done, failed, p50, p99 = (read_h2load if protocol == "gRPC" else read_wrk)(output, base)
    rate = done / seconds
    share = f"{rate / case.limit_rps:.1%}" if case.limit_rps else "-"
    cost = f"{1e6 * cpu_s / max(done, 1):.1f}"
    return f"{case.name:6}{protocol:6}{rate:12,.0f}{share:>10}{cost:>16}{p50:9.2f}{p99:9.2f}  {failed}"


def h2load_command(case: Case, message: bytes, url: str, seconds: int, base: Path) -> list[str]:
    (base / "body").write_bytes(b"\0" + len(message).to_bytes(4) + message)
    (base / "log").unlink(missing_ok=True)
    connections = min(case.clients, 8)
    command = ["h2load", "-D", str(seconds), f"-c{connections}", f"-m{case.clients // connections}"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    return [*command, "-d", str(base / "body"), f"--log-file={base / 'log'}", url]


def read_h2load(output: str, base: Path) -> tuple[int, int, float, float]:
    """Answered, failed, p50 and p99 in milliseconds."""
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", output)
    if counts is None:
        raise RuntimeError(output)
    lines = (base / "log").read_text().splitlines()
    micros = np.array([int(line.rpartition("\t")[2]) for line in lines] or [0])
    p50, p99 = np.quantile(micros, (0.5, 0.99)) / 1000
    return int(counts[1]), int(counts[2]) + int(counts[3]), p50, p99


def wrk_command(case: Case, body: str, url: str, seconds: int, base: Path) -> list[str]:
    (base / "post.lua").write_text(f"wrk.method = 'POST'\nwrk.body = '{body}'\n")
    script = str(base / "post.lua")
    return ["wrk", "-t1", f"-c{case.clients}", f"-d{seconds}s", "--latency", "-s", script, url]


def read_wrk(output: str, _base: Path) -> tuple[int, int, float, float]:
    counts = re.search(r"(\d+) requests in", output)
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    if counts is None:
        raise RuntimeError(output)
    factors = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    p50, p99 = (
        float(number) * factors[unit]
        for number, unit in re.findall(r"(?:50|99)%\s+([\d.]+)(us|ms|s)", output)
    )
    failed = int(refused[1]) if refused else 0
    return int(counts[1]) - failed, failed, p50, p99


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_ready(port: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if "AVAILABLE" in httpx.get(f"http://127.0.0.1:{port}/v1/models/m", trust_env=False).text:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready within 30 s")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    main()
