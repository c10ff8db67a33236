"""Replicas are planned with an interval, never above what one can do, and quickly for a very large fleet."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.batching.parameters import Configuration
from batchtune.errors import TwinError
from batchtune.measure.slo import Limit
from batchtune.report.findings import text_of
from batchtune.report.twin_text import print_plan
from batchtune.scenario.payloads import build_requests
from batchtune.scenario.spec.workload import LoadSpec
from batchtune.twin.replicas import (
    POOL_MOST,
    Failing,
    MeasuredRates,
    ReplicaPlan,
    Replicas,
    held_to,
    highest_rates,
)
from batchtune.twin.service_time import Fitted, linear_service_time
from batchtune.twin.simulator.simulate import Batcher, Routing
from batchtune.twin.traffic import LONGEST_REQUESTS, Traffic, traffic_of
from batchtune.twin.twin import FitError, Twin, play
from batchtune.units import percentage
from tests.scenario.test_payloads import TOKENS, schedule
from tests.tune.tune_fakes import scenario_of
from tests.twin.twin_fakes import P95, POISSON, batcher_of, fitted_of, limit_of, plan_replicas

SURE = FitError(p95_ratio=0.03, throughput_ratio=0.02, mape=0.04, left_out=8)


def twin_of(*, spread: float = 0.05, readings: int = 6) -> Twin:
    """A known device, and readings of it that are faster or slower as a whole."""

    def fitted(factor: float) -> Fitted:
        times = linear_service_time(0.002 * factor, 0.00005 * factor, [1.0, 8.0, 64.0])
        return fitted_of(times, contention=1.0, serial=False, wake_s=5e-5)

    factors = np.exp(spread * np.linspace(-2.0, 2.0, readings))
    fits = tuple(fitted(float(one)) for one in factors)
    return Twin(best_fit=fitted(1.0), fits=fits, rows_max=64, threads_max=1, error=SURE, observations=8)


@pytest.fixture(scope="module")
def twin() -> Twin:
    return twin_of()


def test_one_replica_is_enough_for_a_little(twin: Twin) -> None:
    plan = plan_replicas(twin, 500.0)
    assert (plan.advised, plan.replicas.low, plan.replicas.high, plan.extrapolated) == (1, 1.0, 1.0, False)


def test_replicas_grow_with_the_rate(twin: Twin) -> None:
    plans = [plan_replicas(twin, rate, routing="random") for rate in (1e4, 1e5, 1e6)]
    assert plans[0].advised < plans[1].advised < plans[2].advised
    assert plans[2].replicas.value == pytest.approx(10.0 * plans[1].replicas.value, rel=0.1)
    for plan in plans:
        assert plan.replicas.low <= plan.replicas.value <= plan.advised <= plan.replicas.high


def test_no_replica_is_planned_above_nine_tenths_of_its_saturation(twin: Twin) -> None:
    plan = plan_replicas(twin, 1e6, limit_of(10.0), routing="random")
    assert plan.per_replica_rps.value <= 0.91 * plan.saturation_rps
    assert plan.by_saturation_alone == plan.advised  # as sure as that, so that the two may be compared
    assert not plan.extrapolated


def test_the_fleet_that_is_advised_keeps_the_limit(twin: Twin) -> None:
    plan = plan_replicas(twin, 60_000.0, limit_of(0.006))
    assert plan.latency_s["p95"].value <= 0.006
    pool = min(plan.advised, POOL_MOST)
    fewer = max(1, round(0.6 * plan.advised))
    rate_rps, replicas = 60_000.0 * min(fewer, pool) / fewer, min(fewer, pool)
    crowded = twin.predict(batcher_of(64), Traffic(rate_rps=rate_rps), replicas=replicas)
    assert crowded.latency("p95").value > 0.006


def test_a_pool_stands_for_a_large_fleet(twin: Twin) -> None:
    plan = plan_replicas(twin, 1e6, limit_of(0.006), routing="least_loaded")
    assert plan.advised > POOL_MOST == plan.simulated_replicas
    assert any(f"a pool of {POOL_MOST} replicas" in text_of(note) for note in plan.notes)
    assert plan.latency_s["p95"].value <= 0.0062


def test_even_turns_need_no_more_replicas_than_chance(twin: Twin) -> None:
    even, chance = (
        plan_replicas(twin, 30_000.0, limit_of(0.0045), batcher=batcher_of(8), routing=routing).replicas.value
        for routing in ("round_robin", "random")
    )
    assert even <= chance * 1.02


def test_a_wider_twin_gives_a_wider_interval() -> None:
    narrow, wide = (plan_replicas(twin_of(spread=spread), 1e6, routing="random") for spread in (0.01, 0.15))
    assert wide.replicas.high / wide.replicas.low > narrow.replicas.high / narrow.replicas.low
    assert wide.advised > narrow.advised


def test_more_threads_than_were_measured_are_labelled(twin: Twin) -> None:
    plan = plan_replicas(twin, 1e4, batcher=batcher_of(64, 0.0, 4), routing="random")
    assert plan.extrapolated
    assert any("batch threads" in text_of(reason) for reason in plan.extrapolations)
    document = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert document["advised"] == plan.advised
    assert document["limits"] == [{"name": "p95", "seconds": 0.02}]


@pytest.mark.parametrize(
    ("rate_rps", "limit", "told", "hint"),
    [
        (1e4, limit_of(0.001), "no rate that meets p95 within 1 ms", "--set"),
        (1e13, P95, "10,000,000 replicas are not enough for", ""),
        *((rate_rps, P95, "rate above 0", "") for rate_rps in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_what_cannot_be_planned_is_an_error(
    twin: Twin, rate_rps: float, limit: Limit, told: str, hint: str
) -> None:
    with pytest.raises(TwinError, match=told) as failure:
        plan_replicas(twin, rate_rps, limit, routing="random")
    assert hint in failure.value.hint


def test_a_plan_keeps_every_limit(twin: Twin) -> None:
    p50 = Limit(name="p50", quantile=0.5, seconds=0.0035)
    alone, both = plan_replicas(twin, 60_000.0), plan_replicas(twin, 60_000.0, p50, P95)
    assert alone.latency_s["p50"].value > 0.0035 >= both.latency_s["p50"].value * 0.99
    assert both.advised > alone.advised


# -- of a fleet that may lose replicas --


@given(needed=st.integers(1, 100_000), share=st.floats(0.001, 0.95))
def test_of_a_fleet_that_loses_its_share_enough_are_left_and_no_smaller_one_would_do(
    needed: int, share: float
) -> None:
    failing = Failing(share=share)
    fleet = failing.fleet(needed)
    assert fleet - failing.down(fleet) >= needed
    assert failing.down(fleet) >= 1
    assert fleet - 1 - failing.down(fleet - 1) < needed


def test_a_plan_spares_as_many_as_may_be_down() -> None:
    assert [Failing(count=2).fleet(7), Failing(share=0.05).fleet(19), Failing(share=0.05).fleet(20)] == [
        9,
        20,
        22,
    ]
    few = twin_of(readings=3)
    plain, spared = (plan_replicas(few, 40_000.0, failing=failing) for failing in (None, Failing(count=2)))
    assert spared.advised == plain.advised + 2
    assert spared.failure is not None
    assert P95.seconds >= spared.failure.latency_s["p95"].value > spared.latency_s["p95"].value
    assert plain.failure is None
    assert json.loads(json.dumps(spared.to_dict(), allow_nan=False))["failure"]["down"] == 2


# -- held to what was measured --


BATCHER = batcher_of(64)


def own_rate(twin: Twin) -> float:
    return float(highest_rates(BATCHER, POISSON, [twin.best_fit], limits=(P95,), error_ratio=0.01)[0])


def planned(
    twin: Twin, rate_rps: float, measured: MeasuredRates | None, *, routing: Routing = "random"
) -> ReplicaPlan:
    return Replicas(twin, BATCHER, POISSON, (P95,), 0.01, routing, measured=measured).plan(rate_rps)


def test_a_twin_that_agrees_is_left_as_it_is(twin: Twin) -> None:
    own = own_rate(twin)
    measured = MeasuredRates(held_rps=0.9 * own, missed_rps=None)
    held, said = held_to(twin, BATCHER, POISSON, (P95,), 0.01, measured)
    assert held is twin
    assert said == own


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0])
def test_a_twin_outside_is_made_slower_or_faster_until_it_agrees(twin: Twin, factor: float) -> None:
    """A server ten times as slow as the twin thinks, twice as slow, or twice as fast."""
    own = own_rate(twin)
    measured = MeasuredRates(held_rps=0.9 * factor * own, missed_rps=1.1 * factor * own)
    held, said = held_to(twin, BATCHER, POISSON, (P95,), 0.01, measured)
    assert said == own
    nearer = measured.missed_rps if factor < 1.0 else measured.held_rps
    assert own_rate(held) == pytest.approx(nearer, rel=0.04)


def test_a_plan_lies_within_the_bracket_and_says_what_the_twin_says(twin: Twin) -> None:
    own = own_rate(twin)
    inside = MeasuredRates(held_rps=0.97 * own, missed_rps=1.05 * own)
    plan = planned(twin, 50.0 * own, inside)
    assert not plan.contradicted
    share = plan.per_replica_rps
    assert inside.held_rps <= share.low <= share.value <= share.high <= inside.most_rps
    assert plan.twin_rps == own
    assert plan.measured == inside


def test_what_a_pool_gains_does_not_leave_the_bracket(twin: Twin) -> None:
    own = own_rate(twin)
    bracket = MeasuredRates(held_rps=0.99 * own, missed_rps=1.01 * own)
    share = planned(twin, 3.0 * own, bracket, routing="least_loaded").per_replica_rps
    assert bracket.held_rps <= share.low <= share.value <= share.high <= bracket.most_rps


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_where_the_twin_lies_outside_the_measured_rate_counts(twin: Twin, factor: float) -> None:
    own = own_rate(twin)
    measured = MeasuredRates(held_rps=factor * own, missed_rps=1.2 * factor * own)
    plan = planned(twin, 40.0 * factor * own, measured)
    assert plan.contradicted
    assert plan.per_replica_rps.value == measured.held_rps
    assert plan.advised == 40
    assert plan.latency_s["p95"].value <= 1.1 * P95.seconds
    held, missed = measured.held_rps, measured.missed_rps
    assert plan.to_dict()["measured"] == asdict(MeasuredRates(held_rps=held, missed_rps=missed))


def test_of_rates_that_all_missed_the_twin_names_none(twin: Twin) -> None:
    own = own_rate(twin)
    plan = planned(twin, 10.0 * own, MeasuredRates(held_rps=0.0, missed_rps=0.5 * own))
    assert plan.contradicted
    assert plan.per_replica_rps.high <= 0.5 * own
    assert not planned(twin, 10.0 * own, MeasuredRates(held_rps=0.0, missed_rps=2.0 * own)).contradicted


def test_what_was_not_measured_is_what_the_twin_says(twin: Twin) -> None:
    plan = planned(twin, 10_000.0, None)
    assert (plan.measured, plan.twin_rps, plan.contradicted) == (None, None, False)


def test_the_ends_of_a_bracket_clip(twin: Twin) -> None:
    measured = MeasuredRates(held_rps=10.0, missed_rps=20.0)
    assert measured.clipped(np.array([5.0, 15.0, 25.0])).tolist() == [10.0, 15.0, 20.0]
    assert MeasuredRates(held_rps=10.0, missed_rps=None).clipped(np.array([5.0, 1e9])).tolist() == [10.0, 1e9]


def test_where_the_readings_disagree_the_capacity_is_not_above_the_saturation(twin: Twin) -> None:
    torn = replace(twin, best_fit=twin.best_fit.slower(1.5))
    plan = planned(torn, 40.0 * own_rate(torn), None)
    assert plan.per_replica_rps.value <= plan.saturation_rps


def printed(plan: ReplicaPlan, twin: Twin, capsys: pytest.CaptureFixture[str]) -> str:
    print_plan(plan, twin, configuration=Configuration(batching=None), run=Path("results/fake"))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("mape", "first"), [(1.99, "The simulator is too inaccurate to rely on"), (0.05, "6 replicas for 5")]
)
def test_a_plan_of_an_inaccurate_twin_begins_by_saying_so(
    twin: Twin, mape: float, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = replace(twin, error=replace(twin.error, mape=mape, left_out=12))
    said = printed(planned(judged, 4.5 * own_rate(judged), None), judged, capsys)
    assert said.startswith(first)
    assert ("100 % of the simulator's" in said) is judged.reliable


def test_a_plan_says_in_how_many_fits_the_figures_beside_it_keep_the_limits(
    twin: Twin, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each replica gets all that one was measured to serve, more than the two slowest of six readings can."""
    measured = MeasuredRates(held_rps=1.02 * own_rate(twin), missed_rps=None)
    plan = planned(twin, 2.0 * measured.held_rps, measured)
    assert (plan.advised, plan.replicas.high) == (2, 2.0)
    assert plan.latency_s["p95"].high > P95.seconds
    assert 0.0 < plan.kept_ratio < 0.95
    said = printed(plan, twin, capsys)
    assert f"2 are enough in {percentage(plan.kept_ratio)} of the simulator's fits" in said


# -- the highest rate within a limit is that of a server that runs for long, by each reading alike --


P95_60 = limit_of(0.06)


def changing(**load: object) -> Traffic:
    return Traffic(load=LoadSpec.model_validate({"warm_up": "0s", **load}))


STEPS = [{"rate": "100/s", "duration": "10s"}, {"rate": "300/s", "duration": "10s"}]


def test_steps_that_are_cut_to_some_requests_are_all_played_and_as_much_faster() -> None:
    due_s = changing(arrivals="steps", steps=STEPS).at(100_000.0).due_s(1_000)
    assert (len(due_s), math.ceil(due_s[-1])) == (LONGEST_REQUESTS, 4)
    assert np.count_nonzero(due_s < 2.0) == pytest.approx(LONGEST_REQUESTS / 4, rel=0.01)


def test_of_bursts_as_many_are_played_as_are_asked_for() -> None:
    bursts = changing(arrivals="on_off", on_off={"on": "1s", "off": "1s"}, rate="1/s")
    assert len(bursts.at(10_000.0).due_s(600_000)) == 600_000


def test_steps_without_a_rate_offer_their_mean() -> None:
    traffic = changing(arrivals="steps", steps=STEPS)
    assert (traffic.rate_rps, traffic.offered_rps) == (None, pytest.approx(200.0))
    assert changing(arrivals="poisson", rate="5/s").offered_rps is None
    assert Traffic(clients=4).offered_rps is None


def reading_of(fixed_s: float = 0.008, per_row_s: float = 0.0006, *, serial: bool = True) -> Fitted:
    times = linear_service_time(fixed_s, per_row_s, [1, 2, 4, 8, 16, 32, 64])
    return fitted_of(times, serial=serial, jitter_ratio=1e-4, delay_s=0.0, front_end_s=0.0)


def highest(readings: list[Fitted], batcher: Batcher, *limits: Limit, error_ratio: float = 0.01) -> Any:
    return highest_rates(batcher, POISSON, readings, limits=limits or (P95_60,), error_ratio=error_ratio)


def true_capacity(reading: Fitted, size: int, threads: int) -> float:
    """Halving, with runs of many batches."""
    batcher = batcher_of(size, threads=threads)
    low, high = 0.0, reading.saturation_rps(batcher, POISSON)
    while high - low > 0.004 * high:
        rate = 0.5 * (low + high)
        played = play(batcher, POISSON.at(rate), [reading.device(64)], quantiles=(0.95,), requests=40_000)
        low, high = (rate, high) if played.latency_s[0, 0] <= P95_60.seconds else (low, rate)
    return low


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "parallel"])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_small_and_large_batches_are_judged_alike(size: int, threads: int, serial: bool) -> None:
    reading = reading_of(serial=serial)
    found = highest([reading] * 3, batcher_of(size, threads=threads))
    truth = true_capacity(reading, size, threads)
    assert found[0] == pytest.approx(truth, rel=0.04)
    assert found[1:] == pytest.approx(np.full(2, truth), rel=0.04)


def test_no_rate_above_saturation_is_kept() -> None:
    reading, batcher = reading_of(), batcher_of(16)
    assert np.all(highest([reading] * 2, batcher, limit_of(30.0)) <= reading.saturation_rps(batcher, POISSON))


def test_each_reading_is_asked_even_where_the_first_keeps_the_limit_at_no_rate() -> None:
    slow, quick, usual = reading_of(0.08), reading_of(0.004), reading_of()
    found = highest([slow, quick, usual], batcher_of(16))
    assert found[0] == 0.0
    assert found[1] == pytest.approx(true_capacity(quick, 16, 1), rel=0.04)
    turned = highest([usual, quick, slow], batcher_of(16))
    assert turned[1] == pytest.approx(found[1], rel=0.02)
    assert turned[2] == 0.0


def test_the_highest_rate_keeps_every_limit_and_is_that_of_the_tightest() -> None:
    """A loose limit beside a tight one changes nothing; together they are kept where the first is missed."""
    p50 = Limit(name="p50", quantile=0.5, seconds=0.02)
    tight, loose, both = (
        highest([reading_of()], batcher_of(16), *ls)[0] for ls in ([p50], [P95_60], [p50, P95_60])
    )
    assert tight < 0.95 * loose
    assert both == pytest.approx(tight, rel=0.02)


def test_the_share_of_errors_is_a_limit_like_the_others() -> None:
    """A queue of one batch refuses long before p95 is missed; who allows no refusals gets a lower rate."""
    batcher = replace(batcher_of(16), max_enqueued_batches=1)
    lax, strict = (highest([reading_of()], batcher, error_ratio=ratio)[0] for ratio in (0.04, 0.0))
    assert strict < 0.9 * lax


# -- requests of a trace --

INDEX = np.array([0, 16, 17, 34, 40, 49, 53], np.int32)
MIX = [{"rows": 2, "weight": 98}, {"rows": 4, "inputs": "zeros"}, {"rows": 8, "weight": 1}]


def of_trace(path: Path, columns: str, *lines: object, **request: object) -> tuple[dict[int, float], Traffic]:
    """Shares of the numbers of rows, and the traffic, of a trace with such lines."""
    path.write_text("\n".join([f"offset_s,{columns}", *(f"{at},{line}" for at, line in enumerate(lines))]))
    load = {"arrivals": "trace", "trace": {"file": str(path)}}
    traffic = traffic_of(scenario_of(load=load, objective="latency", request={"mix": MIX, **request}))
    return dict(zip(traffic.rows, traffic.weights, strict=True)), traffic


def test_a_trace_says_how_many_rows_its_requests_have(tmp_path: Path) -> None:
    rows, traffic = of_trace(tmp_path / "t.csv", "rows", 8, 2, 8, 8)
    assert rows == {2: 1, 8: 3}
    assert traffic.at(100.0).mean_rows == 6.5


def test_a_trace_that_names_its_requests_has_the_rows_of_what_the_load_sends(tmp_path: Path) -> None:
    rows, _ = of_trace(tmp_path / "t.csv", "request", *INDEX)
    request = scenario_of(request={"mix": MIX}).request
    sent = build_requests(request, TOKENS, model_name="m")
    index = schedule(len(INDEX), request_index=INDEX).with_bodies(sent.order, sent.rows).request_index
    assert index is not None
    counts = np.unique(np.array(sent.rows)[index], return_counts=True)
    assert rows == dict(zip(*(column.tolist() for column in counts), strict=True))


def test_a_trace_that_does_not_say_or_is_gone_has_the_mix(tmp_path: Path) -> None:
    assert of_trace(tmp_path / "t.csv", "of", 1, 2)[0] == {2: 98, 4: 1, 8: 1}
    recorded = {"inputs": {"file": str(tmp_path / "recorded.npz")}}
    assert of_trace(tmp_path / "r.csv", "request", 1, 2, **recorded)[0] == {2: 98, 4: 1, 8: 1}
    gone = {"arrivals": "trace", "trace": {"file": str(tmp_path / "gone.csv")}}
    scenario = scenario_of(load=gone, objective="latency", request={"mix": MIX})
    assert traffic_of(scenario).rows == (2, 4, 8)
