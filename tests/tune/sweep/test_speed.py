"""Any speed: from 50 µs to seconds a batch a sweep ends in time with a recommendation."""

from __future__ import annotations

import numpy as np
import pytest

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.trials.pace import usual_budget_s
from batchtune.twin.simulator.simulate import Device
from tests.tune.tune_fakes import batches_of, bench_of, heard, planned, scenario_of
from tests.twin.simulated_fleet import simulated_server

SPEEDS = {
    "50 µs": (0.00004, 0.00001),
    "2 ms": (0.0015, 0.0005),
    "40 ms": (0.035, 0.005),
    "400 ms": (0.35, 0.05),
    "250 ms a row": (0.1, 0.15),
    "5 s a batch": (4.5, 0.5),
}
QUICK = (("40 ms", "throughput"), ("250 ms a row", "capacity"))
ASKED = [
    pytest.param(speed, objective, marks=() if (speed, objective) in QUICK else pytest.mark.slow)
    for speed in SPEEDS
    for objective in ("throughput", "capacity", "latency")
]
SPACE = {"max_batch_size": [1, 4, 16, 64], "batch_timeout_micros": [0, 2000], "num_batch_threads": [1, 2]}


def device(fixed_s: float, per_row_s: float) -> Device:
    return Device(tau_s=fixed_s + per_row_s * np.arange(1025), delay_s=0.0002, serial=True)


def scenario(objective: str, fixed_s: float, per_row_s: float, **search) -> Scenario:
    """What a user gives who knows the model: an SLO of ten lone requests, a rate of three quarters of one by one."""
    lone_s = fixed_s + per_row_s
    load = {
        "throughput": {"arrivals": "closed", "concurrency": 32},
        "capacity": {"arrivals": "poisson"},
        "latency": {"arrivals": "poisson", "rate": f"{0.75 / lone_s}/s"},
    }[objective]
    slo = {} if objective == "throughput" else {"p95": f"{1000 * 10 * lone_s:.4f}ms"}
    return scenario_of(load=load, objective=objective, slo=slo, search={"space": SPACE, **search})


@pytest.mark.parametrize(("speed", "objective"), ASKED)
def test_the_default_sweep_ends_with_a_recommendation_at_any_speed(speed, objective):
    asked = scenario(objective, *SPEEDS[speed])
    clock, target, fleet = simulated_server(device(*SPEEDS[speed]), noise=0.01)
    told, plans = [], []
    on_event = heard(on_summary=told.append, on_plan=plans.append)
    started_s = clock()
    trials = [done.trial for done in sweep(asked, target, fleet, on_event=on_event, now_s=clock)]
    chosen = recommend(trials, scenario=asked, search=told[0])
    assert chosen.throughput_rps.value > 0.0
    assert not any(trial.state == "failed" for trial in trials)
    assert len(plans) == 1
    assert told[0].plan == plans[0]
    budget_s = usual_budget_s(sum(SPEEDS[speed]))
    assert clock() - started_s <= budget_s + max(trial.seconds for trial in trials)


def test_a_run_of_a_few_batches_has_an_exact_rate():
    """Batches of 16 in 2.5 s: in 10 s there are 3 to 5 of them, and between their ends always 6.4 requests/s."""
    _, target, fleet = simulated_server(device(0.1, 0.15))
    asked = scenario("throughput", 0.1, 0.15)
    for warm_up_s in (3.0, 4.1, 5.2):
        load = asked.load.model_copy(update={"warm_up_s": warm_up_s, "duration_s": 10.0})
        bench = bench_of(asked.model_copy(update={"load": load}), target, fleet)
        measured = bench.run(planned(batches_of(16))).trial.measurement
        assert measured.throughput_rps.value == pytest.approx(6.4, rel=0.01)
