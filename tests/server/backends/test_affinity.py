"""A server that is kept to one CPU has all its threads there, and as many as one CPU can keep busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.target import TargetSpec
from batchtune.server.backends.registry import load_model
from batchtune.server.server_flags import ServerFlags
from batchtune.system import schedulable_cpus
from batchtune.target.tfserving import TfServingTarget
from tests.server.backends.model_files import onnx_graph, save_program
from tests.server.server_process import kept_to, write_emulated

pytestmark = pytest.mark.skipif(
    len(schedulable_cpus()) < 2 or not Path("/proc/self/task").is_dir(),
    reason="needs a second CPU, and Linux's /proc to see who runs there",
)

LARGE_ROW_COUNT = 20_000
"""Rows of a body so large that the server reads in a process of its own."""


def write_onnx(base_path: Path) -> Path:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    (base_path / "1").mkdir(parents=True)
    kind, product = onnx.TensorProto.FLOAT, onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = onnx.helper.make_tensor("w", kind, [2, 2], [1, 0, 0, 1])
    model = onnx_graph([product], [("x", kind, ["batch", 2])], [("y", kind, ["batch", 2])], [weights])
    onnx.save(model, base_path / "1" / "model.onnx")
    return base_path


def write_saved_model(base_path: Path) -> Path:
    tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    module = tf.Module()
    shape = tf.TensorSpec([None, 2], tf.float32, name="x")
    module.serve = tf.function(lambda x: {"y": tf.matmul(x, tf.eye(2))}, input_signature=[shape])
    tf.saved_model.save(module, str(base_path / "1"), signatures={"serving_default": module.serve})
    return base_path


def write_exported(base_path: Path) -> Path:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (base_path / "1").mkdir(parents=True)
    save_program(base_path / "1", torch.nn.Linear(2, 2).eval(), width=2)
    return base_path


def threads_of(pid: int) -> list[dict[str, str]]:
    """What /proc says of each thread of a process and of the processes that it has started."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    tasks = [task for of in pids for task in Path(f"/proc/{of}/task").iterdir()]
    lines = [(task / "status").read_text(encoding="utf-8").splitlines() for task in tasks]
    return [dict(line.split(":\t", 1) for line in status if ":\t" in line) for status in lines]


@pytest.mark.parametrize(
    "write",
    [
        write_emulated,
        write_onnx,
        *(pytest.param(write, marks=pytest.mark.slow) for write in (write_saved_model, write_exported)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_thread_of_a_server_stays_on_its_cpu(write: Callable[[Path], Path], tmp_path: Path) -> None:
    model, cpu = write(tmp_path / "m"), min(schedulable_cpus())
    with TfServingTarget(TargetSpec(model=str(model), cpus=[cpu])) as target:
        target.apply(Configuration(batching=None))
        for row_count in (1, 8, LARGE_ROW_COUNT):
            body: dict[str, Any] = {"instances": [[1.0, 2.0]] * row_count}
            url = f"{target.endpoint.rest_url}/v1/models/m:predict"
            httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
        assert target.pid is not None
        threads = threads_of(target.pid)
    assert Counter(thread["Cpus_allowed_list"] for thread in threads) == {str(cpu): len(threads)}
    # TensorFlow's threads over operations, of which it has as many as within them.
    assert sum(thread["Name"] == "tf_Compute" for thread in threads) <= 1


@pytest.mark.parametrize(("asked", "started"), [(0, 0), (3, 2)])
def test_onnx_runtime_has_threads_for_its_cpus_unless_told(asked: int, started: int, tmp_path: Path) -> None:
    """The thread that calls is the first one of them."""
    tasks = Path("/proc/self/task")
    version = write_onnx(tmp_path) / "1"
    before = set(tasks.iterdir())
    with kept_to(min(schedulable_cpus())):
        model = load_model(version, ServerFlags(device="cpu", tensorflow_intra_op_parallelism=asked))
    assert len(set(tasks.iterdir()) - before) == started
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "counts"), [([0, 0], [1, 1]), ([3, 4], [3, 4])])
@pytest.mark.filterwarnings("ignore")
def test_pytorch_has_threads_for_its_cpus_unless_told(
    flags: list[int], counts: list[int], tmp_path: Path
) -> None:
    version = write_exported(tmp_path) / "1"
    code = f"""
from pathlib import Path
from batchtune.server.server_flags import ServerFlags
from batchtune.server.backends.registry import load_model
intra, inter = {flags}
for version in (1, 2):
    load_model(Path({str(version)!r}), ServerFlags(device="cpu", tensorflow_intra_op_parallelism=intra, tensorflow_inter_op_parallelism=inter))
import torch
print([torch.get_num_threads(), torch.get_num_interop_threads()])
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    with kept_to(min(schedulable_cpus())):
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
        )
    assert done.stdout.strip() == str(counts)
