"""What is known of a server's speed, and how long a load of it lasts."""

from __future__ import annotations

import pytest

from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trials.pace import (
    RUN_BATCHES,
    RUN_BATCHES_MIN,
    WARM_UP_BATCHES,
    Pace,
    pace_of,
    times_of,
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
