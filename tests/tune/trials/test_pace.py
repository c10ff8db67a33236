"""What is known of a server's speed, how long a load of it lasts, and what space, trials and budget follow."""

from __future__ import annotations

from typing import Any

import pytest

from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.pace import (
    RUN_BATCHES,
    RUN_BATCHES_MIN,
    WARM_UP_BATCHES,
    Pace,
    pace_of,
    proposed,
    times_of,
    tried_pace,
)
from batchtune.tune.trials.trial import Trial
from tests.tune.tune_fakes import asked, planted, scenario_of


def calibration(number: int, times_s: dict[int, float], threads: int = 1) -> Trial:
    counted = {"batches_by_rows": dict.fromkeys(times_s, 5), "execution_s_by_rows": times_s}
    server = ServerActivity(duration_s=5.0, batches=10, **counted)
    size = {"max_batch_size": max(times_s), "num_batch_threads": threads}
    return planted(number, throughput=5, batching=size, source="calibration", server=server)


def test_a_batch_not_seen_yet_takes_what_its_rows_would_alone_then_what_the_slope_says():
    assert Pace().batch_s(8) == 0.0
    assert Pace(lone_s=0.2).batch_s(8) == pytest.approx(1.6)
    known = Pace(lone_s=0.25, batch_s_by_rows={4: 0.7, 16: 2.5})
    assert known.batch_s(10) == pytest.approx(1.6)
    assert known.batch_s(32) == pytest.approx(4.9)
    assert known.turn_s(40, 16) == pytest.approx(7.5)


def test_batches_that_share_the_device_with_others_do_not_slow_the_pace():
    pace = pace_of([calibration(1, {4: 0.7}), calibration(2, {4: 2.8}, threads=4)], scenario_of())
    assert pace.batch_s(4) == pytest.approx(0.7)
    pace = pace_of([calibration(1, {16: 0.55, 64: 1.04}), calibration(2, {5: 2.9, 63: 4.1})], scenario_of())
    assert dict(pace.batch_s_by_rows) == {5: 0.55, 16: 0.55, 63: 1.04, 64: 1.04}


def test_a_slow_server_that_counts_no_batches_has_the_pace_at_which_its_rows_are_answered():
    trial = planted(1, throughput=100, p95_s=0.4, batching={"max_batch_size": 32}, source="calibration")
    assert pace_of([asked(trial, concurrency=8)], scenario_of()).batch_s(8) == pytest.approx(0.08)


SLOW = Pace(lone_s=0.25, batch_s_by_rows={4: 0.7, 16: 2.5})


def test_times_that_the_scenario_sets_stay():
    load = {"arrivals": "closed", "concurrency": 32, "duration": "2s"}
    scenario = scenario_of(load=load, request={"timeout": "3s"})
    times = times_of(SLOW, scenario, scenario.configuration({"max_batch_size": 16}))
    assert (times.duration_s, times.timeout_s) == (2.0, 3.0)


def test_a_load_of_a_slow_server_holds_batches_enough_and_its_answers_are_waited_for():
    scenario = scenario_of(load={"arrivals": "closed", "concurrency": 32})
    configuration = scenario.configuration({"max_batch_size": 16})
    times = times_of(SLOW, scenario, configuration)
    assert times.duration_s >= RUN_BATCHES_MIN * 2.5
    assert times.timeout_s >= 2.0 * times.turn_s > 0.0
    short = times_of(SLOW, scenario, configuration, short_s=1.0)
    assert short.duration_s == pytest.approx(RUN_BATCHES * 2.5)
    assert short.warm_up_s == pytest.approx(WARM_UP_BATCHES * 2.5)


def open_loop(**changes: Any) -> Scenario:
    given = {"name": "m", "target": {"model": "m"}, "load": {"arrivals": "poisson"}, "slo": {"p95": "20ms"}}
    return Scenario.model_validate({**given, "objective": "capacity", **changes})


def proposal(scenario: Scenario, *, lone_s: float = 1e-3, larger_s: float = 2e-3) -> dict[str, Any]:
    rows = 8 * scenario.request.rows
    return proposed(scenario, tried_pace(scenario, lone_s=lone_s, larger_s=larger_s, larger_rows=rows))


QUICK = {"warm_up": "500ms", "duration": "2s"}


@pytest.mark.parametrize(
    ("p95", "lone_s", "larger_s", "budget", "load"),
    [("20ms", 1e-3, 2e-3, "90s", QUICK), ("3s", 0.25, 2.0, "150s", {})],
)
def test_a_slow_model_gets_the_time_that_a_sure_answer_takes_and_a_quick_one_short_trials(
    p95: str, lone_s: float, larger_s: float, budget: str, load: dict[str, str]
) -> None:
    parts = proposal(open_loop(slo={"p95": p95}), lone_s=lone_s, larger_s=larger_s)
    assert (parts["search"]["budget"], parts["load"]) == ({"time": budget}, load)
    assert (parts["fixed"], parts["search"]["grow"]) == ({"max_enqueued_batches": 100}, True)


def test_sizes_end_where_two_batches_take_longer_than_the_limit_and_timeouts_at_a_quarter_of_it() -> None:
    space = proposal(open_loop(slo={"p95": "40ms"}), lone_s=1e-3, larger_s=8e-3)["search"]["space"]
    assert space["max_batch_size"] == [1, 2, 4, 8, 16]
    assert space["batch_timeout_micros"] == [0, 500, 1000, 2000, 5000, 10_000]
    hopeless = proposal(open_loop(slo={"p95": "1ms"}), lone_s=5e-3, larger_s=40e-3)["search"]["space"]
    assert hopeless["max_batch_size"] == [1, 2, 4, 8]
    assert hopeless["batch_timeout_micros"] == [0]


@pytest.mark.parametrize(("clients", "rows", "most"), [(32, 1, 32), (4, 1, 4), (32, 4, 128), (1, 3, 3)])
def test_sizes_are_those_that_the_clients_can_fill(clients: int, rows: int, most: int) -> None:
    load = {"arrivals": "closed", "concurrency": clients}
    scenario = open_loop(load=load, request={"rows": rows}, objective="throughput", slo={})
    assert proposal(scenario)["search"]["space"]["max_batch_size"][-1] == most


@pytest.mark.parametrize(("cpus", "threads"), [(1, [1, 2]), (8, [1, 2, 4, 8])])
def test_threads_are_at_most_twice_the_cpus_of_the_server(cpus: int, threads: list[int]) -> None:
    parts = proposal(open_loop(target={"model": "m", "cpus": list(range(cpus))}))
    assert parts["search"]["space"]["num_batch_threads"] == threads


def test_what_somebody_gave_is_not_proposed() -> None:
    given = open_loop(
        load={"arrivals": "poisson", "duration": "3s"},
        search={"budget": {"time": "30s"}, "space": {"max_batch_size": [1, 8]}},
        fixed={"max_enqueued_batches": 7},
    )
    assert proposal(given) == {"load": {}, "search": {}, "fixed": {}}
    fixed = proposal(open_loop(fixed={"num_batch_threads": 1}))
    assert set(fixed["search"]["space"]) == {"max_batch_size", "batch_timeout_micros"}


def test_a_low_rate_gets_trials_as_long_as_its_requests_need() -> None:
    slow = open_loop(load={"arrivals": "poisson", "rate": "10/s"}, objective="latency")
    assert proposal(slow)["load"] == {}
