"""What PyTorch's CUDA build does with our calls, on a runtime that is as strict as CUDA and late on purpose.

Marked slow: PyTorch's CUDA build is gigabytes. `pip install torch`, a C++ compiler, then `pytest -m slow tests/gpu/test_cuda_on_cpu.py`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "tests" / "gpu" / "cuda_on_cpu" / "run.py"), sys.executable]


def said(*arguments: str) -> str:
    done = subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, timeout=800, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


STRICT = """
import torch

stream, event = torch.cuda.Stream(), torch.cuda.Event(blocking=True)
x = torch.full((1 << 20,), 2.0, pin_memory=True)
y = torch.zeros(1 << 20, pin_memory=True)
late = 0
with torch.cuda.stream(stream), torch.inference_mode():
    for number in range(1, 50):
        y.copy_(x.to("cuda", non_blocking=True) * number, non_blocking=True)
        late += float(y[-1]) != 2.0 * number
        event.record()
        event.synchronize()
        assert float(y[-1]) == 2.0 * number
    kept = x.to("cuda", non_blocking=True)
    stream.synchronize()
    refused = torch.cuda.CUDAGraph()
    refused.capture_begin(capture_error_mode="thread_local")
    kept * 3
    try:
        stream.synchronize()
        raise SystemExit("a wait was recorded")
    except RuntimeError as error:
        assert "capturing" in str(error), error
    try:
        refused.capture_end()
        raise SystemExit("a broken recording was kept")
    except RuntimeError as error:
        assert "during capture" in str(error), error
print(torch.cuda.get_device_name(0), late)
"""


def test_what_is_not_awaited_is_late_and_what_cuda_forbids_fails() -> None:
    name, _, late = said("-c", STRICT).strip().rpartition(" ")
    assert name == "CUDA on the CPU (emulated)"
    assert int(late) > 10


def test_the_gpus_tests_pass() -> None:
    options = ("-q", "-p", "no:cacheprovider", "-m", "gpu")
    told = said("-m", "pytest", *options, "tests/server/backends/test_torch_cuda.py")
    assert "4 passed" in told
    assert "skipped" not in told


def test_served_models_answer_as_they_do_alone(tmp_path: Path) -> None:
    checks = str(ROOT / "tests" / "benchmarks" / "gpu" / "gpu_checks.py")
    said(checks, "run", "--tiny", "--only", "models,correctness,ceiling,server_share", "--out", str(tmp_path))
    document = json.loads((tmp_path / "gpu_checks.json").read_text())
    rows = document["sections"]["correctness"]["rows"]
    assert all(rows[name]["right"] for name in ("text_recognition", "imdb_transformer", "resnet50")), rows
    assert document["card"]["name"] == "CUDA on the CPU (emulated)"


LOST = """
import sys
from pathlib import Path

import numpy as np
import torch
from batchtune.server.server_flags import ServerFlags
from batchtune.server.backends.registry import load_model

directory = Path(sys.argv[1])
torch.jit.save(torch.jit.script(torch.nn.Embedding(10, 2)), str(directory / "model.pt"))
(directory / "signature.yaml").write_text(
    "inputs: {x: {dtype: int64, shape: []}}\\noutputs: {y: {dtype: float32, shape: [2]}}"
)
model = load_model(directory, ServerFlags(device="cuda:0"))
model.prepare((1, 2), 1)
for token in (9, 10):
    print(model.runs["serving_default"]({"x": np.array([token])})["y"].shape, flush=True)
"""


def test_a_request_that_a_kernel_refuses_ends_the_process_with_a_word(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, "-c", LOST, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == -signal.SIGABRT, done.stderr[-3000:]
    assert done.stdout == "(1, 2)\n"
    assert done.stderr.splitlines()[-1] == (
        "batchtune-model-server: error: cuda:0 is lost to this process, which ends: CUDA error: device-side assert "
        "triggered; start it again"
    )
