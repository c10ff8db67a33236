"""A real tritonserver on core 0 whose Python model takes a known time for each batch: τ(b) = 20 ms + 0.5 ms · b."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.target.triton.triton_server import PACKAGES, PYTHON_VARIABLE, TritonServer, executable

SERVER_CORE, CLIENT_CORE = 0, 1
BASE_S, PER_ROW_S = 0.020, 0.0005
CLIENTS = 64
SIZES = [1, 2, 4, 8, 16]
DELAYS_MICROS = [0, 2000]
INSTANCES = [1, 2]

MODEL = """
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        time.sleep(BASE_S + PER_ROW_S * sum(len(array) for array in arrays))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in arrays]
"""
CONFIG = """
backend: "python" max_batch_size: %d
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }]
instance_group [{ count: %d kind: KIND_CPU }]
dynamic_batching { }
"""


def limit_rps(size: int, instances: int, *, base_s: float = BASE_S, per_row_s: float = PER_ROW_S) -> float:
    """What the model can do at most: every instance always busy with a full batch of requests of one row."""
    return instances * size / (base_s + per_row_s * size)


def model(base_s: float = BASE_S, per_row_s: float = PER_ROW_S) -> str:
    """The code of a model that sleeps so long."""
    return MODEL.replace("PER_ROW_S", str(per_row_s)).replace("BASE_S", str(base_s))


def packages() -> Path:
    if PACKAGES is None:
        sys.exit(f"needs nvidia-pytriton: name a Python that has it in {PYTHON_VARIABLE}")
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two CPUs: one for the client, one for the server")
    return PACKAGES


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile runs on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def serving(
    folder: Path,
    *,
    size: int = 4,
    instances: int = 1,
    base_s: float = BASE_S,
    per_row_s: float = PER_ROW_S,
) -> Iterator[TritonServer]:
    """The model `m`, in explicit model control, on the server's core."""
    flags = ("--model-control-mode=explicit", "--load-model=m", "--disable-auto-complete-config")
    wheel = packages()
    with on_core(SERVER_CORE):
        models = {"m": (CONFIG % (size, instances), model(base_s, per_row_s))}
        server = TritonServer(models, folder, wheel, *flags)
    with server:
        yield server


def launchable(folder: Path) -> tuple[Path, Path]:
    """A program that runs tritonserver, and the model's folder in a repository; for whoever launches it."""
    repository = folder / "models"
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "config.pbtxt").write_text(CONFIG % (4, 1))
    (repository / "m" / "1" / "model.py").write_text(model())
    return executable(folder, packages()), repository / "m"


def url(server: TritonServer) -> str:
    return f"http://127.0.0.1:{server.rest_port}"


def config_of(server: TritonServer) -> dict[str, Any]:
    return dict(httpx.get(f"{url(server)}/v2/models/m/config").json())
