"""A batchtune-model-server process for tests: started on free ports, read, stopped, never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from batchtune.target.process import free_port

EMULATED = """
service_time: {base_ms: %(base_ms)s}
inputs: {x: {dtype: float32, shape: [2]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def write_emulated(base_path: Path, *, version: int = 1, base_ms: float = 0.0) -> Path:
    directory = base_path / str(version)
    directory.mkdir(parents=True)
    (directory / "emulated.yaml").write_text(EMULATED % {"base_ms": base_ms})
    return base_path


@contextmanager
def kept_to(cpu: int) -> Iterator[None]:
    """What this thread starts meanwhile runs on that CPU alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "batchtune.server", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


class ServerProcess:
    """`with ServerProcess(base_path, "--flag") as server`: ready, unless `wait` is False."""

    def __init__(self, base_path: Path | None, *flags: str, wait: bool = True) -> None:
        self.grpc_port, self.rest_port = free_ports(2)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._wait = wait
        model = [] if base_path is None else [f"--model_base_path={base_path}", "--model_name=m"]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "batchtune.server", *model, *flags),
                *(f"--port={self.grpc_port}", f"--rest_api_port={self.rest_port}"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.rest = httpx.Client(base_url=f"http://127.0.0.1:{self.rest_port}", timeout=20, trust_env=False)

    def __enter__(self) -> Self:
        try:
            if self._wait:
                self.wait_until_ready()
        except BaseException:
            self._end()  # or a later test is blamed for what this one left
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self.rest.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stderr is not None:
            self._process.stderr.close()

    @staticmethod
    def free_ports() -> list[str]:
        """Flags for two free ports."""
        grpc_port, rest_port = free_ports(2)
        return [f"--port={grpc_port}", f"--rest_api_port={rest_port}"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> None:
        assert self._ready.wait(60), "".join(self.lines)
        assert any(line.endswith("ready\n") for line in self.lines), "".join(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal; the exit code."""
        self._process.send_signal(number)
        return self._process.wait(30)

    def predict(self, body: dict[str, Any], *, path: str = "/v1/models/m:predict") -> Any:
        return self.rest.post(path, json=body).json()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)
            if line.endswith("ready\n"):
                self._ready.set()
        self._ready.set()
