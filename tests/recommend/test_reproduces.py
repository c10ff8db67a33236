"""Does a fresh run fall inside the recommended intervals?"""

from __future__ import annotations

import pytest

from batchtune.recommend.recommendation import recommend
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.sweep.sweep import sweep
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, scenario_of


def reproduced(seed: int, *, noise: float) -> bool:
    """One sweep, then one load test of what it recommends, from cold; both figures within their intervals."""
    scenario = scenario_of(
        search={
            "budget": {"trials": 7},
            "seed": seed,
            "space": {"max_batch_size": [2, 8, 16], "batch_timeout_micros": [0, 2000]},
        },
        load={"arrivals": "closed", "concurrency": 16, "warm_up": "100ms", "duration": "500ms"},
    )
    clock = FakeClock()
    target = FakeTarget(clock, law=Law(noise=noise))
    fleet = FakeFleet(target, seed=seed)
    trials = [one.trial for one in sweep(scenario, target, fleet, now_s=clock)]
    found = recommend(trials, scenario=scenario)
    bench = Bench(scenario, target, fleet, on_live=lambda _plan, _live: None, now_s=clock)
    plan = Plan(number=1, configuration=found.configuration, source="probe", reason="again", seed=99)
    fresh = bench.run(plan).trial.measurement
    throughput, p95 = found.throughput_rps, found.latency_s["p95"]
    inside = throughput.low <= fresh.throughput_rps.value <= throughput.high
    return inside and p95.low <= fresh.latency_s["p95"].value <= p95.high


@pytest.mark.parametrize(("sweeps", "least"), [(8, 6), pytest.param(25, 22, marks=pytest.mark.slow)])
def test_fresh_runs_reproduce_the_recommendation_on_a_noisy_machine(sweeps: int, least: int) -> None:
    """So many of the sweeps at 5 % noise, more than was assumed.

    False alarm: with a true share of 0.95 for both figures together, 1 and 3 in 100 seeds; the seeds are fixed.
    """
    assert sum(reproduced(seed, noise=0.05) for seed in range(sweeps)) >= least
