"""The zoo's own judgement: what is the best, what is lost to it, and is an exit code true?"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.scenario.spec.scenario import Scenario
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.fresh_loads import Fresh
from tests.benchmarks.zoo.zoo import _holds, judge
from tests.benchmarks.zoo.zoo_models import simulated_device
from tests.benchmarks.zoo.zoo_table import TARGETS, ZooTarget
from tests.benchmarks.zoo.zoo_truth import Truth, simulated

SMALL, MIDDLE, LARGE = (
    Configuration(
        batching=BatchingParameters(max_batch_size=size, batch_timeout_micros=0, num_batch_threads=1)
    )
    for size in (4, 16, 64)
)


def truth(*, lower_is_better: bool = False, **runs: list[tuple[float, float]]) -> Truth:
    named = {"small": SMALL, "middle": MIDDLE, "large": LARGE}
    return Truth(
        runs={named[name]: found for name, found in runs.items()},
        candidates=frozenset({SMALL, MIDDLE}),
        lower_is_better=lower_is_better,
    )


def test_regret_is_the_share_lost_to_the_best_of_the_space() -> None:
    known = truth(small=[(90.0, -0.5)], middle=[(100.0, -0.5)], large=[(200.0, -0.5)])
    assert known.regret(SMALL) == pytest.approx(0.1)
    assert known.regret(MIDDLE) == 0.0
    assert known.regret(LARGE) == 0.0


def test_of_a_latency_less_is_better() -> None:
    known = truth(lower_is_better=True, small=[(0.011, -0.5)], middle=[(0.010, -0.5)])
    assert known.regret(SMALL) == pytest.approx(0.1)


def test_what_misses_the_slo_is_lost_but_within_the_slack_nobody_is_blamed() -> None:
    known = truth(small=[(100.0, 0.01)], middle=[(90.0, -0.5)], large=[(100.0, 0.1)])
    assert known.regret(SMALL) == 0.0
    assert known.regret(MIDDLE) == 0.0
    assert known.regret(LARGE) == math.inf


def test_the_best_of_noisy_runs_is_valued_by_the_other_runs() -> None:
    """Each pass flatters another configuration; by its other run each is worth 100."""
    known = truth(small=[(120.0, -0.5), (100.0, -0.5)], middle=[(100.0, -0.5), (120.0, -0.5)])
    assert known.regret(SMALL) == pytest.approx(0.0, abs=1e-9)
    assert known.noise() == pytest.approx(math.log(1.2) / math.sqrt(2))


def test_what_nobody_measured_has_no_regret() -> None:
    assert math.isnan(truth(small=[(1.0, -0.5)]).regret(MIDDLE))


def scenario(objective: str, load: dict[str, object]) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "zoo",
            "target": {"model": "m"},
            "load": load,
            "slo": {"p95": "50ms"},
            "objective": objective,
        }
    )


def test_a_closed_loop_that_fills_every_batch_runs_at_the_devices_rate() -> None:
    device = simulated_device(Emulated(base_ms=4.0, per_row_ms=0.5), "grpc")
    starts = simulated(
        scenario("throughput", {"arrivals": "closed", "concurrency": 64}), MIDDLE, device, rows_max=None
    )
    for served_rps, excess in starts:
        assert served_rps == pytest.approx(16 / float(device.tau_s[16]), rel=0.015)
        assert excess == pytest.approx(4 * float(device.tau_s[16]) / 0.05 - 1.0, abs=0.02)


def test_batches_that_do_not_fit_the_memory_miss_the_slo() -> None:
    device = simulated_device(Emulated(base_ms=4.0, per_row_ms=0.1), "grpc")
    closed = scenario("throughput", {"arrivals": "closed", "concurrency": 64})
    assert all(excess == math.inf for _, excess in simulated(closed, LARGE, device, rows_max=24))
    assert all(excess < 0.0 for _, excess in simulated(closed, MIDDLE, device, rows_max=24))


def test_a_capacity_lies_below_saturation_and_keeps_the_limit() -> None:
    device = simulated_device(Emulated(base_ms=4.0, per_row_ms=0.5), "grpc")
    ((capacity_rps, excess),) = simulated(
        scenario("capacity", {"arrivals": "poisson"}), MIDDLE, device, rows_max=None
    )
    assert 0.8 < capacity_rps * float(device.tau_s[16]) / 16 < 1.0
    assert excess == 0.0


def test_a_device_of_steps_costs_what_its_file_says() -> None:
    tau_s = simulated_device(Emulated(steps=((8, 4.0), (16, 6.0))), "grpc").tau_s
    alone_ms = 1e3 * (tau_s - tau_s[0]) + 4.0
    np.testing.assert_allclose(alone_ms[[1, 8, 9, 16, 32]], [4.0, 4.0, 6.0, 6.0, 12.0])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_target_is_a_scenario_with_a_way_to_judge_it(target: ZooTarget) -> None:
    Scenario.model_validate(target.document("model", seed=1))
    assert target.truth != "exact" or isinstance(target.model, Emulated)
    assert (target.truth == "none") == bool(target.exits)


def test_load_tests_that_the_host_spoilt_do_not_count() -> None:
    def holds(*loads: tuple[float, str | None]) -> bool | None:
        fresh = [
            Fresh(throughput_rps=100.0, p95_s=p95_s, error_ratio=0.0, spoilt_by=spoilt_by)
            for p95_s, spoilt_by in loads
        ]
        return _holds(fresh, p95_limit_s=0.05, error_ratio=0.01)

    assert holds((0.04, None), (0.9, "host"), (0.9, "host"))
    assert holds((0.06, None)) is False
    assert holds((0.9, "host")) is None


@pytest.mark.slow
def test_a_model_that_cannot_load_is_judged_by_a_real_sweep(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    monkeypatch.setattr("tests.benchmarks.zoo.zoo_models.CACHE", tmp_path / "cache")
    judged = judge(TARGETS["forest-zipmap"], 1, budget_s=10.0, fresh=0, folder=tmp_path)
    assert (judged.swept.code, judged.why) == (7, "")
