"""Space, trials and budget follow from how fast the model answered and from what was promised."""

from __future__ import annotations

from typing import Any

import pytest

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.trials.pace import proposed, tried_pace


def scenario_of(**changes: Any) -> Scenario:
    given = {"name": "m", "target": {"model": "m"}, "load": {"arrivals": "poisson"}, "slo": {"p95": "20ms"}}
    return Scenario.model_validate({**given, "objective": "capacity", **changes})


def proposal(scenario: Scenario, *, lone_s: float = 1e-3, larger_s: float = 2e-3) -> dict[str, Any]:
    rows = 8 * scenario.request.rows
    return proposed(scenario, tried_pace(scenario, lone_s=lone_s, larger_s=larger_s, larger_rows=rows))


def test_a_quick_model_gets_ninety_seconds_and_short_trials() -> None:
    parts = proposal(scenario_of())
    assert parts["search"]["budget"] == {"time": "90s"}
    assert parts["load"] == {"warm_up": "500ms", "duration": "2s"}
    assert parts["fixed"] == {"max_enqueued_batches": 100}
    assert parts["search"]["grow"] is True


def test_a_slow_model_gets_the_time_that_a_sure_answer_takes() -> None:
    parts = proposal(scenario_of(slo={"p95": "3s"}), lone_s=0.25, larger_s=2.0)
    assert parts["load"] == {}
    assert parts["search"]["budget"] == {"time": "150s"}


def test_sizes_end_where_two_batches_take_longer_than_the_limit_and_timeouts_at_a_quarter_of_it() -> None:
    space = proposal(scenario_of(slo={"p95": "40ms"}), lone_s=1e-3, larger_s=8e-3)["search"]["space"]
    assert space["max_batch_size"] == [1, 2, 4, 8, 16]
    assert space["batch_timeout_micros"] == [0, 500, 1000, 2000, 5000, 10_000]
    hopeless = proposal(scenario_of(slo={"p95": "1ms"}), lone_s=5e-3, larger_s=40e-3)["search"]["space"]
    assert hopeless["max_batch_size"] == [1, 2, 4, 8]
    assert hopeless["batch_timeout_micros"] == [0]


@pytest.mark.parametrize(("clients", "rows", "most"), [(32, 1, 32), (4, 1, 4), (32, 4, 128), (1, 3, 3)])
def test_sizes_are_those_that_the_clients_can_fill(clients: int, rows: int, most: int) -> None:
    load = {"arrivals": "closed", "concurrency": clients}
    scenario = scenario_of(load=load, request={"rows": rows}, objective="throughput", slo={})
    assert proposal(scenario)["search"]["space"]["max_batch_size"][-1] == most


@pytest.mark.parametrize(("cpus", "threads"), [(1, [1, 2]), (8, [1, 2, 4, 8])])
def test_threads_are_at_most_twice_the_cpus_of_the_server(cpus: int, threads: list[int]) -> None:
    parts = proposal(scenario_of(target={"model": "m", "cpus": list(range(cpus))}))
    assert parts["search"]["space"]["num_batch_threads"] == threads


def test_what_somebody_gave_is_not_proposed() -> None:
    given = scenario_of(
        load={"arrivals": "poisson", "duration": "3s"},
        search={"budget": {"time": "30s"}, "space": {"max_batch_size": [1, 8]}},
        fixed={"max_enqueued_batches": 7},
    )
    assert proposal(given) == {"load": {}, "search": {}, "fixed": {}}
    fixed = proposal(scenario_of(fixed={"num_batch_threads": 1}))
    assert set(fixed["search"]["space"]) == {"max_batch_size", "batch_timeout_micros"}


def test_a_low_rate_gets_trials_as_long_as_its_requests_need() -> None:
    slow = scenario_of(load={"arrivals": "poisson", "rate": "10/s"}, objective="latency")
    assert proposal(slow)["load"] == {}
