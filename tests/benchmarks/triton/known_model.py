"""A real tritonserver on core 0 whose Python model takes a known time for each batch, and `batchtune sweep` on it.

τ(b) = 20 ms + 0.5 ms · b up to 16 rows, 3 ms for each row more; no more than two batches run at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchtune.archive.run import open_run
from batchtune.tune.trials.trial import Trial
from tests.benchmarks.commands import batchtune
from tests.benchmarks.rivals import CLIENT_CORE, SERVER_CORE
from tests.server.server_process import kept_to
from tests.target.triton.triton_server import (
    PACKAGES,
    PYTHON_VARIABLE,
    TritonServer,
    executable,
    write_models,
)

MODEL = """
import fcntl
import time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        slot = int(args["model_instance_name"].rpartition("_")[2]) % 2
        self.device = open("FOLDER/device-" + str(slot), "w")
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        rows = sum(len(array) for array in arrays)
        fcntl.flock(self.device, fcntl.LOCK_EX)
        time.sleep(0.020 + 0.0005 * min(rows, 16) + 0.003 * max(rows - 16, 0))
        fcntl.flock(self.device, fcntl.LOCK_UN)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in arrays]
"""
CONFIG = """
name: "m" backend: "python" max_batch_size: %d
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }]
instance_group [{ count: %d kind: KIND_CPU }]
dynamic_batching { }
"""
SCENARIO = """\
name: known
target: {{kind: triton, {target}}}
request: {{protocol: {protocol}}}
load: {{arrivals: closed, concurrency: {clients}, cpus: [{core}], seed: {seed}}}
objective: throughput
search:
  seed: {seed}
  budget: {{time: {budget}s}}
  space: {{max_batch_size: {sizes}, max_queue_delay_microseconds: {delays}, instance_group: {{count: {instances}}}}}
"""


def limit_rps(size: int, instances: int) -> float:
    """What the model can do at most: every instance always busy with a full batch of requests of one row."""
    tau_s = 0.020 + 0.0005 * min(size, 16) + 0.003 * max(size - 16, 0)
    return min(instances, 2) * size / tau_s


BEST_RPS = limit_rps(16, 2)
"""Of every configuration."""


def packages() -> Path:
    return PACKAGES or sys.exit(f"needs nvidia-pytriton: name a Python that has it in {PYTHON_VARIABLE}")


def files(folder: Path, size: int = 4, instances: int = 1) -> dict[str, tuple[str, str]]:
    """The model `m` of a repository; in `folder` are the locks that are its device."""
    return {"m": (CONFIG % (size, instances), MODEL.replace("FOLDER", str(folder)))}


@contextmanager
def serving(folder: Path, *, size: int = 4, instances: int = 1) -> Iterator[TritonServer]:
    """The model `m`, in explicit model control, on the server's core."""
    flags = ("--model-control-mode=explicit", "--load-model=m", "--disable-auto-complete-config")
    with kept_to(SERVER_CORE):
        server = TritonServer(files(folder, size, instances), folder, packages(), *flags)
    with server:
        yield server


def launchable(folder: Path) -> tuple[Path, Path]:
    """A program that runs tritonserver on the server's core, and the repository; for whoever launches it."""
    program = folder / "on-core"
    program.write_text(f'#!/bin/sh\nexec taskset -c {SERVER_CORE} {executable(folder, packages())} "$@"\n')
    program.chmod(0o755)
    return program, write_models(files(folder), folder)


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A sweep that has ended: what it recommends, its trials, and seconds in all."""

    size: int
    instances: int
    trials: list[Trial]
    seconds: float
    exit_code: int

    def __str__(self) -> str:
        return (
            f"size {self.size}, {self.instances} instances, {1 - self.share:.1%} below the best; {len(self.trials)} "
            f"trials in {self.seconds:.0f} s, exit code {self.exit_code}"
        )

    @property
    def share(self) -> float:
        return limit_rps(self.size, self.instances) / BEST_RPS


def sweep(folder: Path, **values: object) -> Swept:
    """`batchtune sweep` of SCENARIO with these values."""
    (folder / "known.yaml").write_text(SCENARIO.format(core=CLIENT_CORE, **values))
    done = batchtune("sweep", "known.yaml", cwd=folder)
    chosen = done.or_exit()
    batching = chosen["configuration"]["batching"] or {}  # {}: no batching
    return Swept(
        size=batching.get("max_batch_size") or 1,
        instances=batching.get("num_batch_threads") or 1,
        trials=list(open_run(folder / chosen["run"]).ledger()),
        seconds=done.seconds,
        exit_code=done.code,
    )
