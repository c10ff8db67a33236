"""The scenarios for a GPU ask what they say they ask, and run on a CPU with a few keys changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchtune.scenario.reader import read_scenario, read_variants
from batchtune.tune.compare.blocks import chosen_variants
from batchtune.tune.compare.result import summarise

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "scenarios"
NAMES = ("gpu-quickstart", "imdb-benchmark-gpu", "resnet50-gpu", "text-recognition-gpu")
QUICK = ("target.device=cpu", "load.warm_up=100ms", "load.duration=500ms")


def batchtune(*arguments: str, overrides: Sequence[str], cwd: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "batchtune", *arguments, *(f"--set={one}" for one in overrides)]
    command += ["--json", "--quiet"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_scenario_serves_torch_on_cuda_in_batches_padded_to_few_sizes(name: str) -> None:
    scenario = read_scenario(SCENARIOS / f"{name}.yaml")
    assert (scenario.target.framework, scenario.target.device) == ("torch", "cuda")
    space = {} if scenario.variants else scenario.search.space
    batching = scenario.configuration({key: one.values[-1] for key, one in space.items()}).batching
    assert batching is not None
    sizes = batching.allowed_batch_sizes
    assert sizes[-1] == batching.max_batch_size
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
    assert len(sizes) <= 7  # one CUDA graph each, for each thread


def test_the_recognisers_baseline_is_one_request_at_a_time_which_is_not_called_batching() -> None:
    variants = read_variants(SCENARIOS / "text-recognition-gpu.yaml")
    first = next(iter(variants.values()))
    batching = [one.configuration({}).batching for one in (first, variants["dynamic_batching_two_threads"])]
    sizes = [one and (one.max_batch_size, one.num_batch_threads) for one in batching]
    assert sizes == [(first.request.rows, 1), (8, 2)]
    told = summarise([], chosen_variants(variants)).answers
    assert {(one.pair.baseline, one.pair.variant) for one in told} == {
        ("batching_off", "dynamic_batching"),
        ("batching_off", "dynamic_batching_two_threads"),
    }


def test_the_imdb_experiment_is_the_one_of_the_cpu_but_for_sizes_threads_and_device() -> None:
    cpu = read_variants(SCENARIOS / "imdb-benchmark.yaml")
    gpu = read_variants(SCENARIOS / "imdb-benchmark-gpu.yaml")
    assert list(cpu) == list(gpu)
    for name, one in cpu.items():
        other = gpu[name]
        assert one.request == other.request
        same_warm_up = {"warm_up_s": other.load.warm_up_s}
        assert one.load.model_copy(update=same_warm_up) == other.load
        ours = {"allowed_batch_sizes", "num_batch_threads"}
        assert {key for key in one.fixed | other.fixed if one.fixed.get(key) != other.fixed.get(key)} <= ours


@pytest.mark.slow
def test_on_a_cpu_batches_of_the_transformer_fill_and_are_padded_to_allowed_sizes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    load = "request.protocol=grpc request.rows=5 load.requests=null load.concurrency=24"
    fixed = "fixed.max_batch_size=64 fixed.allowed_batch_sizes=powers_of_two fixed.num_batch_threads=2"
    overrides = [*QUICK, *load.split(), *fixed.split()]
    told = batchtune("load", str(SCENARIOS / "imdb-benchmark-gpu.yaml"), overrides=overrides, cwd=tmp_path)
    (point,) = told["points"]
    server = point["measurement"]["server"]
    assert point["failure"] is None
    assert point["measurement"]["error_ratio"] == 0.0
    assert server["mean_batch_rows"] > 5
    assert {int(rows) for rows in server["batches_by_rows"]} <= {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.slow
def test_on_a_cpu_the_recognisers_variants_are_compared(tmp_path: Path) -> None:
    """With 16 channels in place of 512: the same form, a thousandth of the work."""
    pytest.importorskip("torch")
    script, small = ROOT / "tests" / "benchmarks" / "gpu" / "gpu_models.py", tmp_path / "text_recognition"
    subprocess.run([sys.executable, str(script), "text_recognition", str(small)], check=True, cwd=ROOT)
    overrides = (*QUICK, f"target.model={small}", "target.framework=null")
    file = str(SCENARIOS / "text-recognition-gpu.yaml")
    told = batchtune("compare", file, "--blocks", "1", overrides=overrides, cwd=tmp_path)
    by_name = {one["name"]: one for one in told["variants"]}
    assert not [one["failure"] for one in told["variants"] if one["failure"]]
    assert by_name["one_request_at_a_time"]["mean_batch_rows"] == 2
    assert by_name["dynamic_batching"]["mean_batch_rows"] > 4
    assert by_name["dynamic_batching_two_threads"]["configuration"]["batching"]["num_batch_threads"] == 2
