"""A capacity search on a fake server and client: what its probes watch, and what they are told."""

from __future__ import annotations

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.measure.capacity import CapacityPlan
from batchtune.measure.slo import Limit
from batchtune.tune.capacity_search import capacity_plan, search_capacity
from batchtune.tune.loader import Figures, Loader, LoadRun
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, scenario_of

SIXTEEN = Configuration(
    batching=BatchingParameters(max_batch_size=16, batch_timeout_micros=0, num_batch_threads=1)
)
SCENARIO = scenario_of(
    load={"arrivals": "poisson", "warm_up": "100ms", "duration": "2s"},
    objective="capacity",
    slo={"p95": "20ms"},
)


def searched(plan: CapacityPlan) -> tuple[list[LoadRun], object]:
    """The loads that a search sent, and what it found."""
    clock = FakeClock()
    target = FakeTarget(clock)
    target.apply(SIXTEEN)
    loader = Loader(SCENARIO, target, FakeFleet(target), sleep=clock.sleep)
    sent: list[LoadRun] = []

    def run_load(load: LoadRun) -> Figures:
        sent.append(load)
        return loader.run(load, on_live=lambda _live: None)

    return sent, search_capacity(run_load, plan, scenario=SCENARIO)


def test_a_plan_knows_how_many_requests_fill_a_batch() -> None:
    def full(configuration: Configuration, **request: object) -> int:
        scenario = scenario_of(
            load={"arrivals": "poisson"},
            objective="capacity",
            slo={"p95": "20ms"},
            request={"protocol": "grpc", **request},
        )
        plan = capacity_plan(scenario, configuration, source="rule", hint_rps=None, seed=1)
        return plan.batch_requests_max

    assert full(SIXTEEN) == 16
    assert full(SIXTEEN, rows=5) == 3
    assert full(SIXTEEN, rows=50) == 1
    assert full(Configuration(batching=None)) == 1


@pytest.mark.parametrize(("budget", "seconds"), [("20s", 8.0), ("100s", 20.0), ("1h", 45.0)])
def test_one_search_leaves_most_of_the_time_to_the_others(budget: str, seconds: float) -> None:
    scenario = scenario_of(
        load={"arrivals": "poisson"},
        objective="capacity",
        slo={"p95": "20ms"},
        search={"strategy": "rule", "budget": {"time": budget}, "space": {"max_batch_size": [1, 16]}},
    )
    plan = capacity_plan(scenario, SIXTEEN, source="no_batching", hint_rps=None, seed=1)
    assert plan.seconds_max == seconds


def test_every_probe_at_a_rate_is_watched_for_batches() -> None:
    limit = Limit(name="p95", quantile=0.95, seconds=0.02)
    plan = CapacityPlan(limit=limit, concurrency=64, lone_s=0.03, batch_requests_max=16)
    sent, found = searched(plan)
    watches = [load.should_stop for load in sent]
    kinds = [each.probe.kind for each in found.capacity.evidence]
    assert {"idle", "burst", "rate"} == set(kinds)
    for kind, watch in zip(kinds, watches, strict=True):
        assert (watch is None) == (kind in {"idle", "burst"})
    assert {watch.plan.batch_rows_max for watch in watches if watch is not None} == {16}
    first, *later = [watch.plan.requests_per_batch for watch in watches if watch is not None]
    assert first == 8.0
    assert all(1.0 < held <= 16.0 for held in later)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_capacity_found_is_near_what_the_law_says(seed: int) -> None:
    """tau(b) = 0.9 ms + 0.4 ms × b: batches of 16 end 2,192 requests a second, and 20 ms leave room for a queue."""
    plan = capacity_plan(SCENARIO, SIXTEEN, source="rule", hint_rps=None, seed=seed)
    _, found = searched(plan)
    assert 0.85 * 2192 < found.capacity.crossing_rps < 2192
    assert found.probes
