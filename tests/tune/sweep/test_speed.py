"""Any speed: from 50 µs to seconds a batch a sweep ends with a recommendation, or says truly that it could not tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.recommend.recommendation import recommend
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune import policy
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.capacity_search import capacity_plan
from batchtune.tune.sweep.progress import Watcher
from batchtune.tune.sweep.sweep import sweep
from batchtune.tune.sweep.time_budget import plan_text
from batchtune.tune.trials.pace import Pace, pace_of, times_of
from batchtune.tune.trials.trial import Trial
from batchtune.twin.simulator.replica import Device
from tests.tune.tune_fakes import planted, scenario_of
from tests.twin.simulated_fleet import simulated_server

SPEEDS = {
    "50 µs": (0.00004, 0.00001),
    "2 ms": (0.0015, 0.0005),
    "40 ms": (0.035, 0.005),
    "400 ms": (0.35, 0.05),
    "250 ms a row": (0.1, 0.15),
    "5 s a batch": (4.5, 0.5),
}
QUICK = (("40 ms", "throughput"),)
"""Capacities are sought in tests/tune/guided too, and all speeds in the slow run."""
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
    return Scenario.model_validate(
        {
            "name": "speed",
            "target": {"model": "."},
            "load": load,
            "objective": objective,
            "slo": slo,
            "search": {"space": SPACE, **search},
        }
    )


@pytest.mark.parametrize(("speed", "objective"), ASKED)
def test_the_default_sweep_ends_with_a_recommendation_at_any_speed(speed, objective):
    asked = scenario(objective, *SPEEDS[speed])
    clock, target, fleet = simulated_server(device(*SPEEDS[speed]), noise=0.01)
    told, plans = [], []
    watcher = Watcher(on_summary=told.append, on_plan=plans.append)
    started_s = clock()
    budgets_s: list[float | None] = []
    watcher = replace(
        watcher, on_progress=lambda progress: budgets_s.append(progress.budget_s if plans else None)
    )
    trials = [done.trial for done in sweep(asked, target, fleet, watcher=watcher, now_s=clock)]
    chosen = recommend(trials, scenario=asked, search=told[0])
    assert chosen.throughput_rps.value > 0.0
    assert not any(trial.state == "failed" for trial in trials)
    (told_s,) = set(budgets_s) - {None}
    assert clock() - started_s <= 1.35 * told_s
    assert len(plans) == 1
    assert told[0].plan == plans[0]


def test_what_a_budget_can_do_is_said_once_a_batch_was_seen():
    asked = scenario("throughput", 0.1, 0.15, budget={"time": "60s"})
    clock, target, fleet = simulated_server(device(0.1, 0.15))
    plans: list[str] = []
    for _ in sweep(asked, target, fleet, watcher=Watcher(on_plan=plans.append), now_s=clock):
        pass
    assert plans[0].startswith("a full batch (32 rows) takes about 4.9")
    assert "60s are enough for about" in plans[0]
    assert "for a sure answer give" in plans[0]
    assert clock() - 1000.0 <= 80.0


def test_times_that_the_scenario_sets_stay_and_are_said_to_be_short():
    asked = scenario_of(
        load={"arrivals": "closed", "concurrency": 32, "duration": "2s"},
        request={"timeout": "3s"},
        search={"space": SPACE},
    )
    pace = Pace(lone_s=0.25, batch_s_by_rows={4: 0.7, 16: 2.5})
    configuration = asked.configuration({"max_batch_size": 16})
    times = times_of(pace, asked, configuration)
    assert (times.duration_s, times.timeout_s) == (2.0, 3.0)
    text = plan_text(asked, pace)
    assert "load.duration 2 s holds few batches: give 25s" in text
    assert "request.timeout 3 s ends while batches run: give 15s" in text


def test_a_batch_not_seen_yet_takes_what_its_rows_would_alone_then_what_the_slope_says():
    assert Pace().batch_s(8) == 0.0
    assert Pace(lone_s=0.2).batch_s(8) == pytest.approx(1.6)
    known = Pace(lone_s=0.25, batch_s_by_rows={4: 0.7, 16: 2.5})
    assert known.batch_s(10) == pytest.approx(1.6)
    assert known.batch_s(32) == pytest.approx(4.9)
    assert known.turn_s(40, 16) == pytest.approx(7.5)


def test_a_run_of_a_few_batches_has_an_exact_rate():
    """Batches of 16 in 2.5 s: in 10 s there are 3 to 5 of them, and between their ends always 6.4 requests/s."""
    clock, target, fleet = simulated_server(device(0.1, 0.15))
    asked = scenario("throughput", 0.1, 0.15, budget={"trials": 1})
    for warm_up_s in (3.0, 4.1, 5.2):
        load = asked.load.model_copy(update={"warm_up_s": warm_up_s, "duration_s": 10.0})
        bench = Bench(
            asked.model_copy(update={"load": load}),
            target,
            fleet,
            on_live=lambda _plan, _live: None,
            now_s=clock,
            sleep=clock.sleep,
        )
        sixteen = asked.configuration(
            {"max_batch_size": 16, "num_batch_threads": 1, "batch_timeout_micros": 0}
        )
        plan = Plan(number=1, configuration=sixteen, source="sampler", reason="", seed=1)
        measured = bench.run(plan).trial.measurement
        assert measured.throughput_rps.value == pytest.approx(6.4, rel=0.01)


def test_batches_that_share_the_device_with_others_do_not_slow_the_pace():
    asked = scenario("throughput", 0.1, 0.15)

    def calibration(number: int, threads: int, seconds: float) -> Trial:
        server = ServerActivity(
            duration_s=5.0, batches=5, batches_by_rows={4: 5}, execution_s_by_rows={4: seconds}
        )
        size = {"max_batch_size": 4, "num_batch_threads": threads}
        return planted(number, throughput=5, p95_s=1, batching=size, source="calibration", server=server)

    pace = pace_of([calibration(1, 1, 0.7), calibration(2, 4, 2.8)], asked)
    assert pace.batch_s(4) == pytest.approx(0.7)


def test_a_fresh_run_at_a_capacity_lasts_as_long_as_a_slow_queue_takes_to_show():
    pace = Pace(lone_s=0.042, lone_rows=1, batch_s_by_rows={16: 0.072, 64: 0.168})
    asked = scenario_of(
        load={"arrivals": "poisson", "warm_up": "500ms", "duration": "2s"},
        objective="capacity",
        slo={"p95": "400ms"},
        search={"budget": {"time": "120s"}},
    )
    configuration = Configuration(batching=from_dict({"max_batch_size": 64}))
    searched = times_of(pace, asked, configuration, rate_rps=380.0)
    fresh = times_of(pace, asked, configuration, rate_rps=380.0, fresh=True)
    assert searched.duration_s == 2.0
    assert fresh.duration_s == pytest.approx(10.0)  # of 100 batches, 16.8 s, what the budget allows
    quick = Pace(lone_s=0.009, lone_rows=1, batch_s_by_rows={16: 0.018, 64: 0.046})
    fresh = times_of(quick, asked, configuration, rate_rps=1150.0, fresh=True)
    assert fresh.duration_s == pytest.approx(policy.FRESH_BATCHES * 0.046)
    brief = asked.model_copy(
        update={
            "search": asked.search.model_copy(
                update={"budget": asked.search.budget.model_copy(update={"time_s": 30.0})}
            )
        }
    )
    assert times_of(pace, brief, configuration, rate_rps=380.0, fresh=True).duration_s == pytest.approx(2.5)


def test_batches_that_shared_the_device_do_not_slow_the_pace():
    def calibration(number: int, times_s: dict[int, float]) -> Trial:
        counts = dict.fromkeys(times_s, 5)
        server = ServerActivity(
            duration_s=5.0, batches=10, batches_by_rows=counts, execution_s_by_rows=times_s
        )
        return planted(number, throughput=5, p95_s=1, batching={}, source="calibration", server=server)

    trials = [calibration(1, {16: 0.55, 64: 1.04}), calibration(2, {5: 2.9, 63: 4.1})]
    pace = pace_of(trials, scenario("capacity", 0.4, 0.01))
    assert dict(pace.batch_s_by_rows) == {5: 0.55, 16: 0.55, 63: 1.04, 64: 1.04}


def test_a_fresh_run_is_given_its_share_of_the_budget_that_was_told():
    """Nobody gave a budget, and the sweep plans 20 minutes: 120 s are not what is shared."""
    pace = Pace(lone_s=1.0, lone_rows=1, batch_s_by_rows={4: 1.5, 8: 2.0})
    asked = scenario_of(
        load={"arrivals": "poisson", "warm_up": "500ms"}, objective="capacity", slo={"p95": "9s"}, search={}
    )
    configuration = Configuration(batching=from_dict({"max_batch_size": 8}))
    times = times_of(pace, asked, configuration, rate_rps=3.0, fresh=True, budget_s=1200.0)
    share_s = policy.RESERVE_SHARE / policy.CONFIRMATIONS * 1200.0
    assert times.duration_s == pytest.approx(min(policy.FRESH_BATCHES * 2.0, share_s))
    assert times_of(pace, asked, configuration, rate_rps=3.0, fresh=True).duration_s > times.duration_s
    plan = capacity_plan(asked, configuration, source="sampler", hint_rps=None, seed=1)
    told = capacity_plan(asked, configuration, source="sampler", hint_rps=None, seed=1, budget_s=100.0)
    assert (plan.seconds_max, told.seconds_max) == (policy.CAPACITY_SEARCH_S[1], 20.0)
