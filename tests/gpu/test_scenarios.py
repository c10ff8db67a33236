"""The scenarios for a GPU ask what they say they ask, and run on a CPU with a few keys changed."""

from __future__ import annotations

import json
import subprocess
import sys
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


def batchtune(*arguments: str, cwd: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "batchtune", *arguments, "--json", "--quiet"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def changed(*overrides: str) -> list[str]:
    return [f"--set={one}" for one in overrides]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text_recognition with 16 channels in place of 512: the same form, a thousandth of the work."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("small") / "text_recognition"
    script = ROOT / "tests" / "benchmarks" / "gpu" / "gpu_models.py"
    subprocess.run([sys.executable, str(script), "text_recognition", str(path)], check=True, cwd=ROOT)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_scenario_serves_torch_on_cuda_in_batches_padded_to_few_sizes(name: str) -> None:
    scenario = read_scenario(SCENARIOS / f"{name}.yaml")
    assert (scenario.target.framework, scenario.target.device) == ("torch", "cuda")
    point = (
        {key: space.values[-1] for key, space in scenario.search.space.items()}
        if not scenario.variants
        else {}
    )
    batching = scenario.configuration(point).batching
    assert batching is not None
    sizes = batching.allowed_batch_sizes
    assert sizes[-1] == batching.max_batch_size
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
    assert len(sizes) <= 7  # one CUDA graph each, for each thread


def test_the_recognisers_baseline_is_one_request_at_a_time() -> None:
    variants = read_variants(SCENARIOS / "text-recognition-gpu.yaml")
    first = next(iter(variants.values()))
    batching = first.configuration({}).batching
    assert batching is not None
    assert (batching.max_batch_size, batching.num_batch_threads) == (first.request.rows, 1)
    both = variants["dynamic_batching_two_threads"].configuration({}).batching
    assert both is not None
    assert (both.max_batch_size, both.num_batch_threads) == (8, 2)


def test_one_request_at_a_time_is_not_called_batching() -> None:
    variants = chosen_variants(read_variants(SCENARIOS / "text-recognition-gpu.yaml"))
    told = summarise([], variants).answers
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
        assert one.load.model_copy(update={"warm_up_s": 0.0}) == other.load.model_copy(
            update={"warm_up_s": 0.0}
        )
        ours = {"allowed_batch_sizes", "num_batch_threads"}
        plain = [{key: fixed[key] for key in fixed if key not in ours} for fixed in (one.fixed, other.fixed)]
        assert plain[0] == plain[1]


@pytest.mark.slow
def test_on_a_cpu_batches_of_the_transformer_fill_and_are_padded_to_allowed_sizes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    overrides = changed(
        *QUICK, "request.protocol=grpc", "request.rows=5", "load.requests=null", "load.concurrency=24",
        "fixed.max_batch_size=64", "fixed.allowed_batch_sizes=powers_of_two", "fixed.num_batch_threads=2",
    )  # fmt: skip
    told = batchtune("load", str(SCENARIOS / "imdb-benchmark-gpu.yaml"), *overrides, cwd=tmp_path)
    (point,) = told["points"]
    server = point["measurement"]["server"]
    assert point["failure"] is None
    assert point["measurement"]["error_ratio"] == 0.0
    assert server["mean_batch_rows"] > 5
    assert {int(rows) for rows in server["batches_by_rows"]} <= {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.slow
def test_on_a_cpu_the_recognisers_variants_are_compared(small: Path, tmp_path: Path) -> None:
    overrides = changed(*QUICK, f"target.model={small}", "target.framework=null")
    file = str(SCENARIOS / "text-recognition-gpu.yaml")
    told = batchtune("compare", file, "--blocks", "1", *overrides, cwd=tmp_path)
    by_name = {one["name"]: one for one in told["variants"]}
    assert not [one["failure"] for one in told["variants"] if one["failure"]]
    assert by_name["one_request_at_a_time"]["mean_batch_rows"] == 2
    assert by_name["dynamic_batching"]["mean_batch_rows"] > 4
    assert by_name["dynamic_batching_two_threads"]["configuration"]["batching"]["num_batch_threads"] == 2


@pytest.mark.slow
def test_on_a_cpu_the_published_tables_loads_run(small: Path, tmp_path: Path) -> None:
    overrides = changed(*QUICK, f"target.model={small}", "target.framework=null")
    file = str(SCENARIOS / "text-recognition-gpu.yaml")
    told = batchtune("load", file, "--concurrency", "2:16:14", *overrides, cwd=tmp_path)
    few, many = told["points"]
    assert (few["concurrency"], many["concurrency"]) == (2, 16)
    assert few["measurement"]["server"]["mean_batch_rows"] < many["measurement"]["server"]["mean_batch_rows"]
