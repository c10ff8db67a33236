"""The zoo's own judgement: what is the best, what is lost to it, and is an exit code true?"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from batchtune.scenario.spec.scenario import Scenario
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.fresh_loads import Fresh
from tests.benchmarks.zoo.zoo import _holds, judge
from tests.benchmarks.zoo.zoo_models import simulated_device
from tests.benchmarks.zoo.zoo_table import TARGETS, ZooTarget
from tests.benchmarks.zoo.zoo_truth import Truth, simulated
from tests.tune.tune_fakes import batches_of, capacity_scenario, scenario_of

SMALL, MIDDLE, LARGE = map(batches_of, (4, 16, 64))


def truth(*, lower_is_better: bool = False, **runs: list[tuple[float, float]]) -> Truth:
    named = {"small": SMALL, "middle": MIDDLE, "large": LARGE}
    return Truth(
        runs={named[name]: found for name, found in runs.items()},
        candidates=frozenset({SMALL, MIDDLE}),
        lower_is_better=lower_is_better,
    )


@pytest.mark.parametrize(
    ("known", "regrets"),
    [
        (truth(small=[(90.0, -0.5)], middle=[(100.0, -0.5)], large=[(200.0, -0.5)]), (0.1, 0.0, 0.0)),
        (truth(small=[(0.011, -0.5)], middle=[(0.010, -0.5)], lower_is_better=True), (0.1, 0.0, math.nan)),
        (truth(small=[(100.0, 0.01)], middle=[(90.0, -0.5)], large=[(100.0, 0.1)]), (0.0, 0.0, math.inf)),
    ],
    ids=[
        "outside of the space nothing is lost",
        "of a latency less is better",
        "within the slack nobody is blamed",
    ],
)
def test_regret_is_the_share_lost_to_the_best_of_the_space(known: Truth, regrets: tuple[float, ...]) -> None:
    found = [known.regret(configuration) for configuration in (SMALL, MIDDLE, LARGE)]
    np.testing.assert_allclose(found, regrets)


def test_the_best_of_noisy_runs_is_valued_by_the_other_runs() -> None:
    """Each pass flatters another configuration; by its other run each is worth 100."""
    known = truth(small=[(120.0, -0.5), (100.0, -0.5)], middle=[(100.0, -0.5), (120.0, -0.5)])
    assert known.regret(SMALL) == pytest.approx(0.0, abs=1e-9)
    assert known.noise() == pytest.approx(math.log(1.2) / math.sqrt(2))


CLOSED = scenario_of(load={"arrivals": "closed", "concurrency": 64})


def test_a_closed_loop_that_fills_every_batch_runs_at_the_devices_rate() -> None:
    device = simulated_device(Emulated(base_ms=4.0, per_row_ms=0.5), "grpc")
    for served_rps, excess in simulated(CLOSED, MIDDLE, device, rows_max=None):
        assert served_rps == pytest.approx(16 / float(device.tau_s[16]), rel=0.015)
        assert excess == pytest.approx(4 * float(device.tau_s[16]) / 0.05 - 1.0, abs=0.02)


def test_batches_that_do_not_fit_the_memory_miss_the_slo() -> None:
    device = simulated_device(Emulated(base_ms=4.0, per_row_ms=0.1), "grpc")
    assert all(excess == math.inf for _, excess in simulated(CLOSED, LARGE, device, rows_max=24))
    assert all(excess < 0.0 for _, excess in simulated(CLOSED, MIDDLE, device, rows_max=24))


def test_a_capacity_lies_below_saturation_and_keeps_the_limit() -> None:
    device = simulated_device(Emulated(base_ms=4.0, per_row_ms=0.5), "grpc")
    ((capacity_rps, excess),) = simulated(capacity_scenario("50ms"), MIDDLE, device, rows_max=None)
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
