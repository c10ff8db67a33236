"""A twin fitted to a server whose parameters are known finds them, says how sure it is, and when it is no good."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TwinError
from batchtune.measure.quantiles import Estimate
from batchtune.report.findings import text_of
from batchtune.report.twin_text import accuracy_text
from batchtune.twin.calibrate import (
    Observation,
    calibrate,
    laws_to_try,
    readings_around,
    usable,
)
from batchtune.twin.replicas import highest_rates
from batchtune.twin.service_time import crowding, fit_service_time
from batchtune.twin.simulator.simulate import Batcher, Device
from batchtune.twin.simulator.simulate import batcher_of as configured
from batchtune.twin.traffic import Traffic
from batchtune.twin.twin import FitError, Twin
from batchtune.twin.twin_parameters import fit_run_of
from tests.twin.twin_fakes import POISSON, batcher_of, best_alone, device_of, limit_of, observed

UNTESTED = FitError(p95_ratio=math.nan, throughput_ratio=math.nan, mape=math.nan, left_out=0)


PROBED: list[tuple[int, int, Traffic, float]] = [
    (1, 1, Traffic(clients=1), 0.0),
    (4, 1, Traffic(clients=8), 0.0),
    (16, 1, Traffic(clients=32), 0.0),
    (64, 1, Traffic(clients=128), 0.0),
    (64, 2, Traffic(clients=128), 0.0),
    (16, 2, Traffic(clients=48), 0.0),
    (32, 2, Traffic(clients=24), 2.0),
    (32, 2, Traffic(rate_rps=1500.0), 2.0),
]


def probes(device: Device, *, tells: bool = True, noise: float = 0.02, seed: int = 3) -> list[Observation]:
    """Eight short probes, as a sweep makes them, of a server that runs up to two batches at once."""
    given = {"noise": noise, "tells": tells, "rng": np.random.default_rng(seed), "requests": 4000}
    return [
        observed(batcher_of(size, timeout_ms, threads), traffic, device, **given)
        for size, threads, traffic, timeout_ms in PROBED
    ]


DEVICES = {
    "serial": device_of(serial=True),
    "overlapping": device_of(contention=0.3),
    "like a CPU": device_of(0.0009, 0.0004, contention=0.6),
}


@cache
def twin_of(device: str, tells: bool = True) -> Twin:
    """Calibrated from its usual probes."""
    return calibrate(probes(DEVICES[device], tells=tells))


@pytest.fixture(scope="module")
def serial_twin() -> Twin:
    return twin_of("serial")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "tells"), [("serial", True), ("overlapping", True), ("like a CPU", False)]
)
def test_service_time_is_recovered_with_and_without_counters(device: str, tells: bool) -> None:
    found = twin_of(device, tells).best_fit.device(64).tau_s
    for rows in (4, 16, 64):
        assert found[rows] == pytest.approx(DEVICES[device].tau_s[rows], rel=0.08)


@pytest.mark.slow
def test_contention_is_recovered() -> None:
    found = twin_of("overlapping").best_fit
    assert not found.serial
    assert found.contention == pytest.approx(0.3, abs=0.15)


@pytest.mark.slow
def test_laws_that_fit_about_as_well_share_the_draws() -> None:
    seen = [fit_run_of(one.batcher, one.traffic or POISSON, one.measurement) for one in probes(device_of())]
    fitted = laws_to_try(seen)
    equal = [fitted[0], replace(fitted[1], misfit=fitted[0].misfit)]
    for solutions, least, most in ((equal, 3, 5), (fitted, 0, 0)):
        drawn = readings_around(solutions, UNTESTED, count=8, rng=np.random.default_rng(1))
        other = sum(one.serial == solutions[1].law.serial for one in drawn)
        assert least <= other <= most


def test_a_closed_loop_is_read_by_its_latency_not_by_how_many_batches_ended_in_time() -> None:
    observation = probes(device_of())[3]
    counted = observation.measurement.throughput_rps
    more = Estimate(value=1.07 * counted.value, low=counted.low, high=1.1 * counted.high)
    lucky = replace(observation, measurement=replace(observation.measurement, throughput_rps=more))
    ours, theirs = (
        fit_run_of(one.batcher, one.traffic or POISSON, one.measurement).targets["throughput"]
        for one in (observation, lucky)
    )
    assert ours == theirs
    assert ours == pytest.approx(math.log(counted.value), abs=0.02)


@pytest.mark.slow
def test_a_serial_device_is_told_from_one_that_overlaps(serial_twin: Twin) -> None:
    assert serial_twin.best_fit.serial or serial_twin.best_fit.contention == pytest.approx(1.0, abs=0.1)


def test_configurations_that_were_not_measured_are_predicted(serial_twin: Twin) -> None:
    device = device_of(serial=True)
    rng = np.random.default_rng(5)
    off_p95, off_throughput = [], []
    for number in range(12):
        batcher = batcher_of(
            int(rng.choice([2, 8, 32, 48])), float(rng.choice([0.0, 1.0, 5.0])), int(rng.integers(1, 3))
        )
        rate_rps = float(rng.uniform(0.3, 0.8)) * serial_twin.saturation_rps(batcher, POISSON)
        traffic = Traffic(clients=int(rng.choice([4, 16, 64]))) if number % 2 else Traffic(rate_rps=rate_rps)
        measured = observed(batcher, traffic, device).measurement
        expected = serial_twin.predict(batcher, traffic)
        off_p95.append(abs(math.log(expected.latency("p95").value / measured.latency_s["p95"].value)))
        off_throughput.append(abs(math.log(expected.throughput.value / measured.throughput_rps.value)))
    assert np.median(off_p95) <= 0.08
    assert np.quantile(off_p95, 0.9) <= 0.2
    assert np.median(off_throughput) <= 0.05


@pytest.mark.slow
def test_what_single_requests_cost_the_execution_is_found() -> None:
    device = device_of(0.0009, 0.0004)
    crowded = replace(device, tau_s=device.tau_s * (1.0 + 1e-4 * 1500.0))
    observations = [*probes(device)[:-1], probes(crowded)[-1]]
    found = calibrate(observations).best_fit
    assert crowding(found.crowding_s, 1500.0) == pytest.approx(1.15, abs=0.06)


def test_a_faithful_twin_is_relied_on(serial_twin: Twin) -> None:
    assert serial_twin.error.left_out >= 6
    assert serial_twin.error.mape < 0.15
    assert serial_twin.reliable
    assert "mean error was" in accuracy_text(serial_twin)


@pytest.mark.slow
def test_a_run_at_saturation_is_no_test_of_the_latency(serial_twin: Twin) -> None:
    device = device_of(serial=True)
    batcher = batcher_of(16, 0.0, 1)
    crowded = observed(batcher, Traffic(rate_rps=0.98 * serial_twin.saturation_rps(batcher, POISSON)), device)
    latency_s = {
        name: Estimate(value=20.0 * one.value, low=20.0 * one.low, high=20.0 * one.high)
        for name, one in crowded.measurement.latency_s.items()
    }
    crowded = replace(crowded, measurement=replace(crowded.measurement, latency_s=latency_s))
    assert calibrate([*probes(device), crowded]).error.mape < 0.3


def test_a_twin_of_measurements_that_no_server_explains_is_not_relied_on() -> None:
    observations = probes(device_of(serial=True))
    rng = np.random.default_rng(2)
    spoilt = [
        observed(one.batcher, one.traffic, device_of(0.002 * float(factor), 0.00005 * float(factor)))
        for one, factor in zip(observations, np.exp(rng.normal(0.0, 1.2, len(observations))), strict=True)
    ]
    assert not calibrate(spoilt).reliable


@pytest.mark.parametrize(
    ("mape", "left_out", "reliable"), [(0.30, 8, True), (0.301, 8, False), (math.nan, 0, True)]
)
def test_from_a_mean_error_of_30_percent_on_nothing_is_relied_on(
    serial_twin: Twin, mape: float, left_out: int, reliable: bool
) -> None:
    error = FitError(p95_ratio=0.1, throughput_ratio=0.1, mape=mape, left_out=left_out)
    assert replace(serial_twin, error=error).reliable is reliable


def test_of_few_different_trials_none_is_left_out() -> None:
    untested = calibrate(probes(device_of())[:3])
    assert untested.error.left_out == 0
    assert "too few different trials" in accuracy_text(untested)


def test_the_same_seed_gives_the_same_twin() -> None:
    observations = probes(device_of())[:4]
    assert calibrate(observations, seed=4) == calibrate(observations, seed=4)
    assert calibrate(observations, seed=4) != calibrate(observations, seed=5)


@pytest.mark.slow
def test_repeats_make_surer_but_never_surer_than_runs_differ() -> None:
    once = probes(device_of(serial=True), noise=0.0)
    few = calibrate(once)
    many = calibrate(once * 4)
    assert many.observations == 4 * few.observations
    spread = [np.std(np.log([fit.device(64).tau_s[16] for fit in twin.fits])) for twin in (few, many)]
    assert spread[1] <= 1.2 * spread[0]
    assert spread[1] >= 0.02


def test_measurements_that_say_nothing_are_refused_with_a_hint() -> None:
    one = probes(device_of())[0]
    failing = replace(one, measurement=replace(one.measurement, error_ratio=0.5))
    assert usable(one)
    assert not usable(failing)
    with pytest.raises(TwinError, match="no measurement of 2") as failure:
        calibrate([failing, failing])
    assert "why the requests failed" in failure.value.hint


def test_extrapolation_is_labelled(serial_twin: Twin) -> None:
    near = Traffic(rate_rps=0.95 * serial_twin.saturation_rps(batcher_of(32), POISSON))
    for batcher, traffic, word in (
        (batcher_of(256), Traffic(clients=512), "rows"),
        (batcher_of(32, 0.0, 8), Traffic(clients=256), "batch threads"),
        (batcher_of(32), near, "above 90 %"),
    ):
        reasons = serial_twin.predict(batcher, traffic).extrapolations
        assert any(word in text_of(reason) for reason in reasons)
    assert not serial_twin.predict(batcher_of(32, 1.0), Traffic(clients=32)).extrapolated


def test_the_highest_rate_is_where_the_limit_is_met(serial_twin: Twin) -> None:
    def highest(limit_s: float) -> float:
        limits = (limit_of(limit_s),)
        found = highest_rates(batcher_of(32), POISSON, serial_twin.fits, limits=limits, error_ratio=0.01)
        assert found.shape == (len(serial_twin.fits),)
        return float(np.median(found))

    at = serial_twin.predict(batcher_of(32), Traffic(rate_rps=highest(0.008))).latency("p95").value
    assert at == pytest.approx(0.008, rel=0.15)
    assert 0.0 == highest(0.001) < highest(0.005) < highest(0.008)


@pytest.mark.parametrize(("threads", "rows"), [(1, 4.0), (2, 8 / 3)])
def test_few_clients_go_round_in_parts_of_a_batch_though_threads_get_up_slowly(
    threads: int, rows: float, serial_twin: Twin
) -> None:
    """Measured with the emulated parallel device: 8 clients, batches of up to 24 and 64 rows without a timeout."""
    slow = replace(serial_twin.best_fit, serial=False, contention=0.0, wake_s=4e-4)
    twin = replace(serial_twin, best_fit=slow)
    found = best_alone(twin).predict(batcher_of(24, 0.0, threads), Traffic(clients=8))
    assert found.mean_batch_rows[0] == pytest.approx(rows, rel=0.03)


def test_think_time_slows_a_closed_loop_and_is_no_latency(serial_twin: Twin) -> None:
    batcher = batcher_of(1)
    thinking = serial_twin.predict(batcher, Traffic(clients=1, think_s=0.1))
    eager = serial_twin.predict(batcher, Traffic(clients=1))
    assert thinking.latency("p50").value == pytest.approx(eager.latency("p50").value, rel=0.05)
    assert thinking.throughput.value == pytest.approx(1 / (0.1 + eager.latency("p50").value), rel=0.05)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 512).map(float), st.floats(1e-5, 1.0), st.integers(1, 1000).map(float)),
        min_size=1,
        max_size=20,
    )
)
def test_service_time_never_falls_with_the_rows(timed: list[tuple[float, float, float]]) -> None:
    found = fit_service_time(timed)
    assert np.all(np.diff(found.seconds) >= 0.0)
    tau = found.tau_s(2 * int(found.rows[-1]) + 8)
    assert np.all(tau[1:] > 0.0)
    assert np.all(np.diff(tau[1:]) >= -1e-12)


def test_beyond_the_last_size_time_goes_on_in_a_line() -> None:
    found = fit_service_time([(rows, 0.002 + 0.0001 * rows, 100.0) for rows in (1.0, 4.0, 16.0, 64.0)])
    assert found.rows[-1] == pytest.approx(64.0)
    assert found.tau_s(256)[256] == pytest.approx(0.002 + 0.0001 * 256, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_s", "row_s"),
    [(0.02, 0.25), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((5e-5, 2e-6), (0.4, 0.01)))],
)
def test_devices_of_any_speed_calibrate_a_twin_from_few_batches(base_s: float, row_s: float) -> None:
    """Each client is answered four times: as many batches of a slow model as its budget allows."""
    overheads = {"front_end_s": min(2e-5, 0.01 * base_s), "delay_s": min(2e-4, 0.4 * base_s)}
    device = device_of(base_s, row_s, serial=True, **overheads)
    rng = np.random.default_rng(3)
    observations = []
    for size, threads, traffic, timeout_ms in PROBED:
        if traffic.clients is not None:
            batcher = batcher_of(size, 1e3 * float(device.tau_s[1]) if timeout_ms else 0.0, threads)
            told = {"noise": 0.02, "rng": rng, "requests": 4 * traffic.clients}
            observations.append(observed(batcher, traffic, device, **told))
    twin = calibrate(observations)
    assert (twin.observations, twin.reliable) == (len(observations), True)
    found, sizes = twin.best_fit.device(64).tau_s, [1, 4, 16, 64]
    assert found[sizes] == pytest.approx(device.tau_s[sizes], rel=0.1)
    for size, threads, clients in ((8, 1, 16), (32, 2, 64), (2, 1, 4)):
        batcher, traffic = batcher_of(size, 0.0, threads), Traffic(clients=clients)
        measured = observed(batcher, traffic, device).measurement.throughput_rps.value
        assert twin.predict(batcher, traffic).throughput.value == pytest.approx(measured, rel=0.1)


def test_what_is_too_short_says_what_it_needs() -> None:
    """64 clients of a model that takes 2.5 s: 4 answers within a second are no round of theirs."""
    lone = observed(batcher_of(16), Traffic(clients=32), device_of(2.5), requests=128)
    short = replace(lone, measurement=replace(lone.measurement, requests=4))
    with pytest.raises(TwinError) as caught:
        calibrate([short, short])
    assert "2 ended before every client was answered once" in caught.value.message
    assert "give a load.duration of " in caught.value.hint
    failing = replace(lone, measurement=replace(lone.measurement, error_ratio=0.2))
    with pytest.raises(TwinError, match=r"1 had errors in more than 1 % of the requests") as caught:
        calibrate([failing])
    assert "request.timeout" in caught.value.hint


def test_a_server_that_reports_no_batches_is_known_up_to_those_that_its_clients_surely_filled() -> None:
    """16 clients of a server that runs one batch at once alternate in batches of 8; 64 fill batches of 16."""
    device = device_of(0.040, 0.003)

    def batcher(size: int, wait_ms: float = 0.0) -> Batcher:
        parameters = BatchingParameters(max_batch_size=size, batch_timeout_micros=round(1e3 * wait_ms))
        return configured(Configuration(batching=parameters, dialect="http"))

    loops = [(batcher(16), 16), (batcher(3, 127.0), 16), (batcher(64), 16), (batcher(1), 1), (batcher(1), 16)]
    twin = calibrate([observed(one, Traffic(clients=clients), device, tells=False) for one, clients in loops])
    assert twin.rows_max == 8
    most_rps = 16 / float(device.tau_s[16])
    known = twin.predict(batcher(16), Traffic(clients=16))
    beyond = twin.predict(batcher(16), Traffic(clients=64))
    assert not known.extrapolated
    assert [reason.code for reason in beyond.extrapolations] == ["rows_beyond"]
    assert beyond.throughput.value == pytest.approx(most_rps, rel=0.1)
    full = observed(batcher(16), Traffic(clients=32), device, tells=False)
    assert calibrate([full]).rows_max == 16
