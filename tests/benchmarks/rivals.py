"""A server on one core and a client on the other: ours, the tools beside it, runs in turn, medians with their spread."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from batchtune.load.clients import client as clients
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.target.process import free_port
from tests.benchmarks.commands import ROOT
from tests.load.load_servers import a_job, requests_for, run_here
from tests.server.server_process import ServerProcess, kept_to

T = TypeVar("T")
SERVER_CORE, CLIENT_CORE = 0, 1
ON_CLIENT = ["taskset", "-c", str(CLIENT_CORE)]
PREDICT_PATHS = {"grpc": "/tensorflow.serving.PredictionService/Predict", "rest": "/v1/models/m:predict"}
NGINX = """
daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr crit;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 600; client_body_buffer_size 64k;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  server {{ listen 127.0.0.1:{port}; location / {{ return 200 '{{"predictions": [[0.25, 0.75]]}}'; }} }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: requests answered, over how long, for how much CPU of the client; latencies where they are known."""

    answered: int
    wall_s: float
    cpu_s: float
    failed: int = 0
    p50_s: float | None = None
    p99_s: float | None = None

    @property
    def cpu_micros(self) -> float:
        return self.cpu_s / self.answered * 1e6

    @property
    def rate_rps(self) -> float:
        return self.answered / self.wall_s


def require(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if missing:
        sys.exit(f"needs {', '.join(missing)} (Debian: nginx-light, wrk, nghttp2-client, nghttp2-server)")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two CPUs: one for the client, one for the server")


# Servers


@contextlib.contextmanager
def served(base_path: Path | None, *flags: str, checkout: Path = ROOT) -> Iterator[ServerProcess]:
    """The bundled server of a checkout, on the server's core."""
    elsewhere = contextlib.chdir(tempfile.gettempdir())  # `python -m` looks for its module here first
    with kept_to(SERVER_CORE), elsewhere, patch.dict(os.environ, PYTHONPATH=str(checkout)):
        server = ServerProcess(base_path, *flags)
    with server:
        yield server


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """A server that we did not write, up when its port accepts."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with kept_to(SERVER_CORE):
        child = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                break
            time.sleep(0.02)
        else:
            sys.exit(f"{command[0]} does not start")
        yield
    finally:
        child.terminate()
        child.wait(5)


@contextlib.contextmanager
def nginx() -> Iterator[int]:
    """nginx with a fixed answer to anything; yields its port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        configuration = Path(directory) / "nginx.conf"
        configuration.write_text(NGINX.format(directory=directory, port=port))
        with serving(["nginx", "-c", str(configuration)], port):
            yield port


@contextlib.contextmanager
def nghttpd() -> Iterator[tuple[int, str]]:
    """nghttpd with a gRPC answer of 32 bytes in one file; yields its port and the file's path."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "predict.grpc").write_bytes(b"\0\0\0\0\x20" + b"x" * 32)
        types = Path(directory) / "mime.types"
        types.write_text("application/grpc grpc\n")
        options = ["--no-tls", "-d", directory, "--mime-types-file", str(types)]
        with serving(["nghttpd", *options, "--trailer", "grpc-status: 0", str(port)], port):
            yield port, "/predict.grpc"


# Clients


def wrk(port: int, body: str, *, clients: int, seconds: int) -> Run:
    """A closed loop of Predicts by REST."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "post.lua"
        script.write_text(f"wrk.method = 'POST'; wrk.body = [==[{body}]==]")
        command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}", "--latency", "-s", str(script)]
        output, cpu_s = run_tool([*ON_CLIENT, *command, f"http://127.0.0.1:{port}{PREDICT_PATHS['rest']}"])
    counts = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s),", output)
    if counts is None:
        raise RuntimeError(output)
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    failed = int(refused[1]) if refused else 0
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    p50, p99 = (
        float(value) * scale[unit] for value, unit in re.findall(r"(?:50|99)%\s+([\d.]+)(us|ms|s)", output)
    )
    wall_s = float(counts[2]) * scale[counts[3]]
    answered = int(counts[1]) - failed
    return Run(answered=answered, wall_s=wall_s, cpu_s=cpu_s, failed=failed, p50_s=p50, p99_s=p99)


def h2load(
    port: int,
    message: bytes,
    *,
    connections: int,
    streams: int,
    seconds: int,
    path: str = PREDICT_PATHS["grpc"],
) -> Run:
    """A closed loop of gRPC calls; each is recorded, and counts if it was answered in time.

    Its own count goes on until the last answer. A failure that is in the trailers only counts as answered.
    """
    with tempfile.TemporaryDirectory() as directory:
        body, log = Path(directory) / "body", Path(directory) / "log"
        body.write_bytes(b"\0" + len(message).to_bytes(4) + message)
        command = ["h2load", "-D", str(seconds), f"-c{connections}", f"-m{streams}", "-d", str(body)]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"--log-file={log}"]
        output, cpu_s = run_tool([*ON_CLIENT, *command, f"http://127.0.0.1:{port}{path}"])
        recorded = np.loadtxt(log, dtype=np.int64, ndmin=2)  # of each its start (µs), status and time (µs)
    counts = re.search(r"(\d+) failed, (\d+) errored", output)
    if counts is None or not recorded.size:
        raise RuntimeError(output)
    in_time = recorded[:, 0] + recorded[:, 2] < recorded[:, 0].min() + seconds * 1e6
    failed = int(counts[1]) + int(counts[2])
    p50, p99 = np.quantile(recorded[:, 2], (0.5, 0.99)) / 1e6
    answered = int(in_time.sum()) - failed
    return Run(answered=answered, wall_s=seconds, cpu_s=cpu_s, failed=failed, p50_s=p50, p99_s=p99)


def run_tool(command: Sequence[str]) -> tuple[str, float]:
    """Output and CPU seconds of a program, with those of all that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_ours(function: Callable[..., Run], *arguments: Any, **named: Any) -> Run:
    """Call a module-level function in a fresh process on the client's CPU."""
    spawn, pin = multiprocessing.get_context("spawn"), os.sched_setaffinity
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=pin, initargs=(0, {CLIENT_CORE})) as pool:
        return pool.submit(function, *arguments, **named).result()


def ours(
    protocol: str,
    port: int,
    body: bytes,
    *,
    users: int,
    seconds: int,
    connections: int | None = None,
    path: str = PREDICT_PATHS["grpc"],
) -> Run:
    """Our closed loop, every request recorded; `path` is that of gRPC."""
    clients.PREDICT_PATH = path
    loop = ClosedLoop(concurrency=users, duration_s=seconds)
    changes: dict[str, Any] = {} if connections is None else {"connections": connections}
    job = a_job(
        protocol, port, loop, requests=requests_for(protocol, bodies=(body,)), check_every=0, **changes
    )
    samples = run_here(job)
    if samples.errors():
        raise RuntimeError(f"{samples.errors()} {samples.error_texts}")
    p50_s, p99_s = np.quantile(samples.latency_ns, (0.5, 0.99)) / 1e9
    answered = int(np.count_nonzero(samples.done_ns < seconds * 1e9))
    return Run(answered=answered, wall_s=seconds, cpu_s=samples.client_cpu_s, p50_s=p50_s, p99_s=p99_s)


# Runs in turn


def alternate(rounds: int, contestants: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Each contestant once per round, in turns that are mirrored from round to round, so that drift hits all alike."""
    runs: dict[str, list[T]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(contestants[name]())
    return runs


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median, and the range of several."""
    if not values:
        return ""
    ends = f" ({min(values):{form}}-{max(values):{form}})" if len(values) > 1 else ""
    return f"{median(values):{form}}{ends}"


def print_table(runs: dict[str, list[Run]]) -> None:
    print(f"{'':34}{'CPU/request, µs':>24}{'requests/s':>28}{'p50, µs':>20}{'p99, µs':>24}")
    for name, ones in runs.items():
        p50 = [one.p50_s * 1e6 for one in ones if one.p50_s is not None]
        p99 = [one.p99_s * 1e6 for one in ones if one.p99_s is not None]
        print(
            f"{name:34}{spread([one.cpu_micros for one in ones]):>24}"
            f"{spread([one.rate_rps for one in ones], '.0f'):>28}{spread(p50, '.0f'):>20}{spread(p99, '.0f'):>24}"
        )


def print_ratio(runs: dict[str, list[Run]], mine: str, rival: str, what: str, bar: str) -> None:
    """Of the two runs of each round."""
    pairs = zip(runs[mine], runs[rival], strict=True)
    ratios = [getattr(one, what) / getattr(other, what) for one, other in pairs]
    print(f"{mine} / {rival}, {what}: {spread(ratios, '.3f')}; bar {bar}")


def print_host() -> None:
    print(f"load average at the end: {os.getloadavg()[0]:.2f} (above 2 others were running)")
