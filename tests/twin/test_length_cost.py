"""The twin knows that a batch takes as long as its longest request asks, and that buckets keep long ones apart."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration, boundaries_for, rounded_up
from batchtune.cli.commands.ask_twin import (
    Calibrated,
    asked_configurations,
    asked_values,
    notes_on_lengths,
)
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.scenario.reader import parse_scenario
from batchtune.target.telemetry import ServerActivity
from batchtune.twin.calibrate import Observation, calibrate
from batchtune.twin.service_time import LengthCost, ServiceTime, fit_length_cost
from batchtune.twin.simulator.simulate import Batcher, Device
from batchtune.twin.traffic import Traffic, traffic_of
from batchtune.twin.twin import FitError, Twin
from tests.scenario.test_reader import SMALL
from tests.twin.simulated_run import simulate_closed
from tests.twin.twin_fakes import batcher_of, best_alone, fitted_of, measurement_of

FIXED_S, PER_ROW_S, PER_ELEMENT_S = 0.002, 0.0001, 4e-6
DRAWN = np.rint(40 * np.exp(0.7 * np.random.default_rng(1).normal(size=256)))
LENGTHS = tuple(np.clip(DRAWN, 1, 256).astype(int).tolist())
REQUESTS = 4000
TRAFFIC = Traffic(clients=64, lengths=LENGTHS)
LOGNORMAL = "{lognormal: {median: 40, sigma: 0.7, max: 99}}"


def device() -> Device:
    rows = np.arange(65.0)
    return Device(
        tau_s=FIXED_S + rows * PER_ROW_S,
        length_s=rows * PER_ELEMENT_S,
        usual_length=np.zeros(65),
        delay_s=0.0003,
        front_end_s=0.00002,
        jitter_ratio=0.01,
    )


def observation(size: int, clients: int, boundaries: tuple[int, ...] = ()) -> Observation:
    """What such a server tells of a closed loop, by bucket too."""
    batcher = replace(batcher_of(size, 5.0), length_buckets=boundaries)
    traffic = Traffic(clients=clients, lengths=LENGTHS)
    lengths = traffic.lengths_of(REQUESTS)
    assert lengths is not None
    run = simulate_closed(clients, REQUESTS, 1, batcher, device(), seed=11, lengths=lengths)
    measured = measurement_of(run, batcher, traffic, device(), tells=True)
    told: dict[str, list[float]] = {}
    for batch, rows in enumerate(run.batch_rows):
        members = lengths[run.batch == batch]
        longest = int(members.max())
        sums = told.setdefault(str(bisect_left(boundaries, longest)), [0.0] * 5)
        seconds = FIXED_S + rows * (PER_ROW_S + PER_ELEMENT_S * longest)
        added = (1, rows, members.sum(), rows * longest - members.sum(), seconds * 1e6)
        sums[:] = [a + b for a, b in zip(sums, added, strict=True)]
    assert measured.server is not None
    server = replace(measured.server, **_by_bucket(told))
    return Observation(batcher=batcher, measurement=replace(measured, server=server), traffic=traffic)


def _by_bucket(told: dict[str, list[float]]) -> dict[str, dict[str, int]]:
    names = ("batches", "rows", "sent_elements", "padding_elements", "execution_micros")
    return {
        f"bucket_{name}": {bucket: round(sums[at]) for bucket, sums in told.items()}
        for at, name in enumerate(names)
    }


SETS = [(64,), (32, 64, 128, 192), (16, 32, 48, 64, 96, 128)]


@pytest.fixture(scope="module")
def twin() -> Twin:
    """One that knows the server."""
    longest = tuple(TRAFFIC.mean_longest((), 1 << octave) for octave in range(7))
    length = LengthCost(fixed_s=FIXED_S, per_row_s=PER_ROW_S, per_element_s=PER_ELEMENT_S, longest=longest)
    rows = np.arange(1.0, 65.0)
    seconds = FIXED_S + rows * (PER_ROW_S + PER_ELEMENT_S * length.usual(rows))
    times = ServiceTime(rows=tuple(rows.tolist()), seconds=tuple(seconds.tolist()))
    fitted = fitted_of(times, delay_s=0.0003, length=length)
    error = FitError(p95_ratio=0.01, throughput_ratio=0.01, mape=0.01, left_out=8)
    return Twin(best_fit=fitted, fits=(fitted,), rows_max=64, threads_max=1, error=error)


@pytest.mark.parametrize("boundaries", SETS)
def test_batches_by_length_take_as_long_as_their_longest(twin: Twin, boundaries: tuple[int, ...]) -> None:
    measured = observation(16, 64, boundaries)
    assert measured.traffic is not None
    expected = best_alone(twin).predict(measured.batcher, measured.traffic)
    p95_s, rps = measured.measurement.latency_s["p95"].value, measured.measurement.throughput_rps.value
    assert expected.throughput.value == pytest.approx(rps, rel=0.03)
    assert expected.latency("p95").value == pytest.approx(p95_s, rel=0.05)
    blind = replace(twin, best_fit=replace(twin.best_fit, length=None))
    unknowing = best_alone(blind).predict(measured.batcher, measured.traffic)
    assert unknowing.throughput.value < 0.9 * rps


def test_with_every_batch_full_a_server_completes_what_its_buckets_allow(twin: Twin) -> None:
    in_one, in_five = (replace(batcher_of(16), length_buckets=boundaries) for boundaries in ((), SETS[1]))
    rates = [twin.saturation_rps(batcher, TRAFFIC) for batcher in (in_one, in_five)]
    longest = [TRAFFIC.mean_longest(boundaries, 16) for boundaries in ((), SETS[1])]
    expected = [16 / (FIXED_S + 16 * (PER_ROW_S + PER_ELEMENT_S * length)) for length in longest]
    assert rates == pytest.approx(expected, rel=0.01)


def test_the_servers_own_choice_is_foretold_as_it_would_be_for_such_lengths(twin: Twin) -> None:
    chosen = TRAFFIC.boundaries_of("auto")
    assert chosen == boundaries_for(Counter(map(rounded_up, LENGTHS)))
    batchers = [replace(batcher_of(16, 5.0), length_buckets=buckets) for buckets in ("auto", chosen, ())]
    automatic, fixed, _ = batchers
    rates = [best_alone(twin).predict(batcher, TRAFFIC).throughput.value for batcher in batchers]
    assert rates[0] == rates[1] > 1.3 * rates[2]
    assert twin.saturation_rps(automatic, TRAFFIC) == twin.saturation_rps(fixed, TRAFFIC)
    unknown = Traffic(clients=64)
    assert best_alone(twin).predict(automatic, unknown).throughput.value > 0.0


@pytest.mark.slow
def test_a_twin_made_from_five_runs_foretells_boundaries_that_it_has_not_seen() -> None:
    probes = [(1, 2, ()), (4, 8, ()), (16, 64, ()), (16, 64, (48, 96)), (8, 64, (48, 96))]
    twin = calibrate([observation(*probe) for probe in probes])
    cost = twin.best_fit.length
    assert cost is not None
    long_s, short_s = (FIXED_S + 16 * (PER_ROW_S + PER_ELEMENT_S * length) for length in (200, 50))
    assert cost.slower(16, 200) / cost.slower(16, 50) == pytest.approx(long_s / short_s, rel=0.03)
    off = []
    for boundaries in SETS:
        measured = observation(16, 64, boundaries)
        assert measured.traffic is not None
        expected = best_alone(twin).predict(measured.batcher, measured.traffic)
        rps = measured.measurement.throughput_rps.value
        p95_s = measured.measurement.latency_s["p95"].value
        off.append((expected.throughput.value / rps - 1, expected.latency("p95").value / p95_s - 1))
    assert np.all(np.abs(off) <= (0.05, 0.1)), off


def told(*points: tuple[float, float, float], per_length: float = 1) -> ServerActivity:
    sent = 800.0 * float(np.mean(LENGTHS))
    buckets = {
        str(at): [100.0, 100 * rows, per_length * sent, per_length * (100 * elements - sent), 1e8 * seconds]
        for at, (rows, elements, seconds) in enumerate(points)
    }
    return ServerActivity(duration_s=1.0, **_by_bucket(buckets))  # type: ignore[arg-type]


def test_batches_that_were_about_as_long_tell_nothing_of_the_length() -> None:
    assert fit_length_cost([told((8, 400, 0.01), (16, 800, 0.02))], TRAFFIC) is None
    assert fit_length_cost([ServerActivity(duration_s=1.0)], TRAFFIC) is None
    assert fit_length_cost([told((8, 400, 0.01), (8, 800, 0.02))], Traffic()) is None


def test_a_unit_of_length_may_be_several_elements() -> None:
    activities = [told((8, 480, 0.01), (8, 800, 0.02), per_length=elements) for elements in (1, 128)]
    one, many = (fit_length_cost([activity], TRAFFIC) for activity in activities)
    assert one is not None
    assert many is not None
    assert one.slower(8, 100) == pytest.approx(many.slower(8, 100), rel=1e-3)


def test_no_term_is_negative_where_noise_would_have_it_so() -> None:
    cost = fit_length_cost([told((8, 160, 0.009), (8, 400, 0.021), (8, 800, 0.042))], TRAFFIC)
    assert cost is not None
    assert min(cost.fixed_s, cost.per_row_s, cost.per_element_s) >= 0.0
    assert cost.slower(8, 100) / cost.slower(8, 20) == pytest.approx(42 / 9, rel=0.1)


def test_the_longest_of_a_batch_is_that_of_its_bucket_on_the_mean() -> None:
    traffic = Traffic(lengths=(1, 2, 3, 10, 20, 30), rows=(2,))
    assert traffic.mean_longest((), 2) == 11.0
    assert traffic.mean_longest((3,), 2) == 11.0
    drawn = np.random.default_rng(1).choice((10, 20, 30), size=(100_000, 4)).max(axis=1).mean()
    short = np.random.default_rng(2).choice((1, 2, 3), size=(100_000, 4)).max(axis=1).mean()
    assert traffic.mean_longest((3,), 8) == pytest.approx((drawn + short) / 2, rel=0.01)
    assert traffic.mean_longest((3, 8), 8) == traffic.mean_longest((3,), 8)
    assert traffic.mean_longest((), 1e6) == 30.0


def test_a_length_that_costs_nothing_makes_no_batch_slower() -> None:
    assert LengthCost(fixed_s=1.0, per_row_s=0.0, per_element_s=0.0, longest=(9.0,)).slower(4, 100) == 1.0


def test_the_traffic_of_a_scenario_has_its_lengths() -> None:
    scenario = parse_scenario(SMALL + f"request: {{lengths: {LOGNORMAL}}}\n")
    lengths = traffic_of(scenario).lengths
    assert (len(lengths), lengths[-1]) == (256, 99)
    assert lengths[127] <= 40 <= lengths[128]
    drawn = traffic_of(scenario).lengths_of(20_000)
    assert drawn is not None
    assert float(drawn.mean()) == pytest.approx(np.mean(lengths), rel=0.02)
    assert traffic_of(parse_scenario(SMALL)).lengths == ()


def test_a_file_of_lengths_that_is_gone_leaves_the_run_readable(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("7\n")
    scenario = parse_scenario(SMALL + f"request: {{lengths: {{file: {tmp_path / 'lengths.txt'}}}}}\n")
    (tmp_path / "lengths.txt").unlink()
    assert traffic_of(scenario).lengths == ()


def test_what_is_not_known_of_lengths_is_said(twin: Twin) -> None:
    def notes(twin: Twin, request: str = "", flags: str = "") -> list[str]:
        text = SMALL.replace("{model: imdb_transformer}", f"{{model: imdb_transformer{flags}}}")
        scenario = parse_scenario(f"{text}request: {{{request}}}\n" if request else text)
        base = scenario.configuration({})
        return notes_on_lengths(
            Calibrated(run=None, scenario=scenario, trials=(), twin=twin, base=base, base_name="")
        )  # type: ignore[arg-type]

    lengths = f"lengths: {LOGNORMAL}"
    blind = replace(twin, best_fit=replace(twin.best_fit, length=None))
    assert notes(blind) == notes(twin) == notes(twin, lengths) == []
    assert "What the length of a request costs is not known" in notes(blind, lengths)[0]
    assert "all are simulated as equally long" in notes(twin, f"mix: [{{{lengths}}}, {{rows: 2}}]")[0]
    assert "target.flags are not simulated" in notes(twin, lengths, ", flags: {length_buckets: '16'}")[0]
    base = Configuration(
        batching=BatchingParameters(max_batch_size=8),
        flags=(("length_buckets", "9"), ("zero_padding", "true")),
    )
    for setting, buckets in (("32,64", [("length_buckets", "32,64")]), ("none", [])):
        (asked,) = asked_configurations(base, asked_values([f"length_buckets={setting}"]))
        assert asked == replace(base, flags=(("zero_padding", "true"), *buckets))
    (larger,) = asked_configurations(base, asked_values(["max_batch_size=16"]))
    assert larger.flags == base.flags
    with pytest.raises(BatchingParametersError, match="monotonically increasing"):
        asked_configurations(base, asked_values(["length_buckets=64,32"]))
    with pytest.raises(UsageError, match="only the bundled server"):
        asked_configurations(replace(base, dialect="triton"), asked_values(["length_buckets=32"]))
    with pytest.raises(UsageError, match="only the bundled server"):
        asked_configurations(base, asked_values(["length_buckets=32"]), by_length=False)


def test_requests_of_lengths_that_are_not_known_share_a_queue(twin: Twin) -> None:
    plain = Batcher(max_batch_size=16, batch_timeout_s=0.005, max_enqueued_batches=100)
    rates = [
        best_alone(twin).predict(batcher, Traffic(clients=64)).throughput.value
        for batcher in (plain, replace(plain, length_buckets=(32, 64)))
    ]
    assert rates[0] == pytest.approx(rates[1])
