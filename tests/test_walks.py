"""How many files execute one request and one trial? Ratchets: the numbers only fall (DESIGN.md: 12 and 30)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.server_process import free_ports, write_emulated
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
OF_A_PREDICT = 12
"""Of the bundled server, from the frames of a gRPC Predict to those of its answer."""
OF_A_TRIAL = 30
"""From one line of trials.jsonl to the next, in the process of the sweep: the median of 30 s."""


def executed(parts: Path) -> list[set[str]]:
    return [set(line.split()) for line in parts.read_text().splitlines()]


def program(parts: Path, module: str, mark: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "executed_files.py"), str(parts), module, mark, *arguments]


def test_files_of_one_predict(tmp_path: Path) -> None:
    grpc_port, rest_port = free_ports(2)
    parts, model = tmp_path / "parts.txt", write_emulated(tmp_path / "m")
    command = program(
        *(parts, "batchtune.server", "begin"),
        *(f"--model_base_path={model}", "--model_name=m", f"--port={grpc_port}"),
        *(f"--rest_api_port={rest_port}", "--enable_batching"),
    )
    request = encode_predict_request("m", "serving_default", {"x": np.zeros((1, 2), np.float32)})
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT) as server:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
                wait_until(lambda: is_answered(predict, request), limit_s=60)
                for _ in range(30):
                    predict(request, timeout=30)
        finally:
            server.terminate()
            server.wait(30)
    walks = executed(parts)[10:]
    print(sorted(walks[-1]))
    assert min(map(len, walks)) > 5
    assert sorted(map(len, walks))[len(walks) // 2] <= OF_A_PREDICT


def is_answered(predict: Callable[..., bytes], request: bytes) -> bool:
    """False while the server starts, or loads its model."""
    try:
        return bool(predict(request, timeout=30, wait_for_ready=True))
    except grpc.RpcError:
        return False


@pytest.mark.slow
def test_files_of_one_trial(tmp_path: Path) -> None:
    parts, model = tmp_path / "parts.txt", write_emulated(tmp_path / "m", base_ms=2.0)
    command = program(
        *(parts, "batchtune", "append_trial", "sweep", str(model), "--slo-p95", "50ms"),
        *("--budget", "30s", "--results", str(tmp_path), "--quiet"),
    )
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    assert done.returncode in (0, 5), done.stderr
    walks = executed(parts)[1:]
    print(sorted(walks[-1]))
    assert len(walks) >= 4
    assert sorted(map(len, walks))[len(walks) // 2] <= OF_A_TRIAL
