"""What a host's drift does to the intervals of a fresh run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from batchtune.recommend.recommendation import recommend
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.evidence.host_drift import NO_DRIFT, drift_of, speed_ahead_sd
from batchtune.tune.evidence.host_speed import ahead_sd
from batchtune.tune.evidence.pooled import pool
from tests.benchmarks.twin.drifting_host import P95_PER_SPEED, coverage
from tests.tune.tune_fakes import planted, scenario_of

pytestmark = pytest.mark.smoke

ON_CPU = ServerActivity(
    duration_s=1.0,
    batches=100,
    rows=800,
    mean_batch_rows=8.0,
    batches_by_rows={8: 100},
    execution_s_by_rows={8: 0.007},
    server_cpu_s=0.7,
)
SCENARIO = scenario_of()
OPEN = scenario_of(load={"arrivals": "poisson", "rate": 500}, objective="latency")
CAPACITY = scenario_of(load={"arrivals": "poisson"}, objective="capacity")
BATCH_8 = {"max_batch_size": 8, "batch_timeout_micros": 0}


def ledger(server=ON_CPU, *, moves=0.1, canaries=True):
    """Twelve trials on a host whose canary is up by `moves` (in logs) for six of them, then down."""
    for number in range(1, 13):
        source = "confirm" if number > 9 else "sampler"
        trial = planted(number, batching=BATCH_8, throughput=1000, p95_s=0.01, source=source, server=server)
        canary_s = 0.003 * math.exp(moves if number < 7 else -moves) if canaries else None
        yield replace(
            trial,
            started_utc=f"2026-01-01T00:00:{4 * number:02}.000+00:00",
            measurement=replace(trial.measurement, canary_s=canary_s),
        )


def drift(trials, scenario=SCENARIO):
    trials = list(trials)
    return drift_of(pool(trials, scenario=scenario)[0], speed_ahead_sd(trials), scenario=scenario)


def half_width(estimate):
    return 0.5 * math.log(estimate.high / estimate.low)


def readings(*logs, every_s=2.6):
    return ahead_sd([every_s * number for number in range(len(logs))], logs)


def test_a_host_whose_canary_moved_may_move_again():
    assert speed_ahead_sd(list(ledger(moves=0.0))) < 0.05
    assert speed_ahead_sd(list(ledger(moves=0.1))) > 0.1


def test_too_few_canaries_and_a_moments_preemption_are_no_drift():
    assert speed_ahead_sd(list(ledger(canaries=False))) == 0.0
    assert speed_ahead_sd(list(ledger())[:7]) == 0.0
    steady = [0.01 * math.sin(7.0 * number) for number in range(32)]
    spiky = [value + (0.4 if number in (3, 11, 12, 20) else 0.0) for number, value in enumerate(steady)]
    assert readings(*spiky) < 0.03
    lasting = [value + (0.4 if number > 24 else 0.0) for number, value in enumerate(steady)]
    assert readings(*lasting) > 0.1


def test_what_differs_from_one_reading_to_the_next_is_the_loops_own_noise():
    assert readings(*[0.03, -0.03] * 16) < 0.03


def test_of_a_drift_that_comes_and_goes_little_more_is_allowed_than_was_seen():
    back_and_forth = [0.1 * math.sin(number / 2.0) for number in range(40)]
    assert 0.1 < readings(*back_and_forth) < 0.25


def test_readings_hours_apart_and_at_one_instant_are_borne():
    assert ahead_sd([0.0, 0.0, 1.0, 7200.0, 7201.0, 7202.0, 7203.0, 7204.0], [0.0] * 8) < 0.3


def test_a_model_on_the_cpu_drifts_with_the_host():
    rate = drift(ledger())
    assert rate.rate_sd == speed_ahead_sd(list(ledger()))
    assert rate.latency_sd > rate.rate_sd


@pytest.mark.parametrize(
    "server",
    [
        None,
        replace(ON_CPU, emulated=True),
        replace(ON_CPU, gpu_busy_ratio=0.9),
        replace(ON_CPU, server_cpu_s=0.1),
        replace(ON_CPU, server_cpu_s=None),
        replace(ON_CPU, server_cpu_s=0.1, execution_s_by_rows={}),
    ],
)
def test_a_device_that_sleeps_or_computes_by_itself_does_not_drift(server):
    assert drift(ledger(server)) == NO_DRIFT


@pytest.mark.parametrize(
    "server",
    [
        replace(ON_CPU, server_cpu_s=0.1, gpu_busy_ratio=0.0),
        replace(ON_CPU, server_cpu_s=0.4, device_busy_ratio=0.5),
        ServerActivity(duration_s=1.0, server_cpu_s=0.99),
    ],
)
def test_by_a_sleeping_gpu_the_servers_cpu_time_or_cpus_used_up_a_model_is_known_to_run_on_the_cpu(server):
    assert drift(ledger(server), scenario_of(target={"model": "fake", "cpus": [0]})).rate_sd > 0.0


@pytest.mark.parametrize(
    ("target", "drifts"),
    [
        ({"kind": "external", "rest_url": "http://127.0.0.1:8501"}, True),
        ({"kind": "external", "grpc_url": "localhost:8500"}, True),
        ({"kind": "external", "grpc_url": "[::1]:8500"}, True),
        ({"kind": "external", "rest_url": "http://10.0.0.7:8501"}, False),
        ({"kind": "external", "grpc_url": "gpu-box:8500"}, False),
        ({"kind": "external", "rest_url": "http://127.0.0.1:1", "endpoints": ["10.0.0.7:1"]}, False),
    ],
)
def test_the_canary_of_the_clients_machine_tells_nothing_of_a_server_on_another(target, drifts):
    scenario = scenario_of(target={"model": "fake", **target})
    assert (drift(ledger(), scenario) != NO_DRIFT) is drifts


def test_an_emulated_device_drifts_where_the_front_ends_cpu_is_the_limit():
    busy = replace(ON_CPU, emulated=True, server_cpu_s=0.99, device_busy_ratio=0.3)
    scenario = scenario_of(target={"model": "fake", "cpus": [0]})
    assert drift(ledger(busy), scenario).rate_sd > 0.0


def test_a_rate_that_arrivals_set_does_not_drift_and_a_capacity_does():
    assert drift(ledger(), OPEN).rate_sd == 0.0
    assert drift(ledger(), OPEN).latency_sd > 0.0
    near = drift(ledger(), CAPACITY)
    assert near.capacity_sd == speed_ahead_sd(list(ledger()))
    assert near.latency_sd > near.capacity_sd


def test_intervals_allow_for_a_host_that_drifts_and_say_so():
    steady = recommend(list(ledger(moves=0.0)), scenario=SCENARIO)
    drifting = recommend(list(ledger(moves=0.1)), scenario=SCENARIO)
    unknown = recommend(list(ledger(canaries=False)), scenario=SCENARIO)
    assert half_width(unknown.throughput_rps) <= half_width(steady.throughput_rps)
    assert half_width(drifting.throughput_rps) > 1.5 * half_width(steady.throughput_rps)
    assert half_width(drifting.latency_s["p95"]) > 1.5 * half_width(steady.latency_s["p95"])
    assert not any("host drifts" in note for note in steady.notes)
    (note,) = [note for note in drifting.notes if "host drifts" in note]
    assert "its speed minutes later may differ by" in note


def test_gains_of_runs_side_by_side_do_not_widen():
    def gains(moves):
        off = [
            replace(
                trial, number=20 + trial.number, configuration=replace(trial.configuration, batching=None)
            )
            for trial in ledger(moves=moves)
        ]
        off[0] = replace(off[0], source="no_batching")
        return recommend([*ledger(moves=moves), *off], scenario=SCENARIO).gain_over_no_batching

    assert gains(0.1) == gains(0.0)


@pytest.mark.parametrize("p95_per_speed", P95_PER_SPEED.values())
@pytest.mark.parametrize(("sd", "memory_s"), [(0.05, 180.0), (0.1, 180.0), (0.2, 180.0)])
def test_on_a_drifting_host_nine_fresh_runs_in_ten_fall_inside(sd, memory_s, p95_per_speed):
    """False alarm: of 60 sweeps with 3 correlated runs each, 1 in 20 seeds at the bar; the seed is fixed."""
    without, allowed = coverage(sd, memory_s, sweeps=60, seed=3, p95_per_speed=p95_per_speed)
    assert allowed.inside_ratio >= 0.9
    assert allowed.inside_ratio >= without.inside_ratio


@pytest.mark.parametrize("p95_per_speed", P95_PER_SPEED.values())
def test_on_a_steady_host_intervals_hardly_widen(p95_per_speed):
    without, allowed = coverage(0.0, 180.0, sweeps=60, seed=3, p95_per_speed=p95_per_speed)
    assert allowed.inside_ratio >= 0.95
    assert allowed.throughput_half <= 1.15 * without.throughput_half
    assert allowed.p95_half <= 1.15 * without.p95_half
