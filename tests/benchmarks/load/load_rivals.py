"""Null servers that we did not write, pinned runs of ours and of the rivals, and medians with their spread."""

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SERVER_CPU, CLIENT_CPU = 0, 1
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
    """One run: requests answered, over how long, for how much CPU; latencies where the tool says them."""

    answered: int
    wall_s: float
    cpu_s: float
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


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """A server on the server's CPU, up when its port accepts."""
    child = subprocess.Popen(
        ["taskset", "-c", str(SERVER_CPU), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
        options = [
            "--no-tls",
            "-d",
            directory,
            "--mime-types-file",
            str(types),
            "--trailer",
            "grpc-status: 0",
        ]
        with serving(["nghttpd", *options, str(port)], port):
            yield port, "/predict.grpc"


def run_tool(command: Sequence[str]) -> tuple[str, float]:
    """Output and CPU seconds of a rival on the client's CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        ["taskset", "-c", str(CLIENT_CPU), *command], check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_ours(function: Callable[..., Run], *arguments: Any) -> Run:
    """Call a module-level function in a fresh process on the client's CPU."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_pin) as pool:
        return pool.submit(function, *arguments).result()


def alternate(rounds: int, contestants: dict[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    """Each contestant once per round, in turn, so that drift hits all alike."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            runs[name].append(contestant())
    return runs


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median and range."""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low}-{high})"


def print_table(runs: dict[str, list[Run]]) -> None:
    print(f"{'':34}{'CPU/request, µs':>24}{'requests/s':>28}{'p50, µs':>20}{'p99, µs':>24}")
    for name, ones in runs.items():
        p50 = [one.p50_s * 1e6 for one in ones if one.p50_s is not None]
        p99 = [one.p99_s * 1e6 for one in ones if one.p99_s is not None]
        print(
            f"{name:34}{spread([one.cpu_micros for one in ones]):>24}"
            f"{spread([one.rate_rps for one in ones], '{:.0f}'):>28}"
            f"{spread(p50, '{:.0f}') if p50 else '':>20}{spread(p99, '{:.0f}') if p99 else '':>24}"
        )
    print(
        f"load average at the end: {os.getloadavg()[0]:.2f} (anything above 2 here means others were running)"
    )


def seconds(text: str) -> float:
    """wrk's and h2load's durations: 204us, 1.02ms, 1.5s."""
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def _pin() -> None:
    os.sched_setaffinity(0, {CLIENT_CPU})
