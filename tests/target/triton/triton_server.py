"""A real tritonserver for tests, from the nvidia-pytriton wheel: started on free ports, stopped, never left behind."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import pytest

from tests.server.server_process import free_ports

PYTHON_VARIABLE = "BATCHTUNE_TRITON_PYTHON"
"""Names the Python of a virtual environment with nvidia-pytriton, when it is not the one that runs the tests."""


def site_packages() -> Path | None:
    """Where the wheel is installed; None: nowhere."""
    python = os.environ.get(PYTHON_VARIABLE)
    if python:
        found = sorted(Path(python).parents[1].glob("lib/python3.*/site-packages"))
        return next((one for one in found if (one / "pytriton" / "tritonserver").is_dir()), None)
    spec = importlib.util.find_spec("pytriton")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


PACKAGES = site_packages()
NEEDS_TRITON = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PACKAGES is None,
        reason=f"nvidia-pytriton is missing: pip install nvidia-pytriton, or name a Python that has it in {PYTHON_VARIABLE}",
    ),
]
"""The `pytestmark` of a file whose tests start a tritonserver."""


def executable(directory: Path, packages: Path) -> Path:
    """A program that runs the wheel's tritonserver, in this folder.

    What that needs to run outside of PyTriton: the stub of this Python's version among the backends, the bundled
    libraries, and the environment's own python in PATH (else the backend finds no numpy).
    """
    triton = packages / "pytriton" / "tritonserver"
    version = packages.parent.name.removeprefix("python")
    backends = directory / "backends"
    shutil.copytree(triton / "backends", backends)
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    python = Path(os.environ.get(PYTHON_VARIABLE) or sys.executable)
    script = directory / "tritonserver"
    script.write_text(
        "#!/bin/sh\n"
        f'export PATH={shlex.quote(str(python.parent))}:"$PATH"\n'
        f"export LD_LIBRARY_PATH={shlex.quote(str(packages / 'nvidia_pytriton.libs'))}\n"
        f"exec {shlex.quote(str(triton / 'bin' / 'tritonserver'))} "
        f'--backend-directory={shlex.quote(str(backends))} --allow-gpu-metrics=false "$@"\n'
    )
    script.chmod(0o755)
    return script


def write_models(models: dict[str, tuple[str, str]], directory: Path) -> Path:
    """A model repository of Python models: name -> (config.pbtxt, model.py)."""
    for name, (config, code) in models.items():
        (directory / "models" / name / "1").mkdir(parents=True)
        (directory / "models" / name / "config.pbtxt").write_text(config)
        (directory / "models" / name / "1" / "model.py").write_text(code)
    return directory / "models"


class TritonServer:
    """`with TritonServer({"m": (CONFIG, MODEL)}, directory) as server`: a model repository, served and ready."""

    def __init__(
        self, models: dict[str, tuple[str, str]], directory: Path, packages: Path, *flags: str
    ) -> None:
        repository = write_models(models, directory)
        self.rest_port, self.grpc_port, metrics_port = free_ports(3)
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(executable(directory, packages)),
                    f"--model-repository={repository}",
                    *flags,
                    *("--http-address=127.0.0.1", f"--http-port={self.rest_port}"),
                    *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}"),
                    *("--metrics-address=127.0.0.1", f"--metrics-port={metrics_port}"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.rest_port}/v2/health/ready").status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.05)
        self.stop()
        raise AssertionError(f"tritonserver did not become ready:\n{self._log.read_text()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it: politely, which takes it some five seconds, else by force."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
