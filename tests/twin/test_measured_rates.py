"""The twin is held to what was measured: no plan names a rate outside, and none is changed where nothing was."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from batchtune.batching.parameters import Configuration
from batchtune.report.twin_text import print_plan
from batchtune.twin.replicas import MeasuredRates, ReplicaPlan, Replicas, held_to, highest_rates
from batchtune.twin.simulator.simulate import Routing
from batchtune.twin.twin import Twin
from batchtune.units import percentage
from tests.twin.test_replicas import twin_of
from tests.twin.twin_fakes import P95, POISSON, batcher_of

BATCHER = batcher_of(64)


@pytest.fixture(scope="module")
def twin() -> Twin:
    return twin_of()


def highest(twin: Twin) -> float:
    return float(highest_rates(BATCHER, POISSON, [twin.best_fit], limits=(P95,), error_ratio=0.01)[0])


def planned(
    twin: Twin, rate_rps: float, measured: MeasuredRates | None, *, routing: Routing = "random"
) -> ReplicaPlan:
    return Replicas(twin, BATCHER, POISSON, (P95,), 0.01, routing, measured=measured).plan(rate_rps)


def test_a_twin_that_agrees_is_left_as_it_is(twin: Twin) -> None:
    own = highest(twin)
    measured = MeasuredRates(held_rps=0.9 * own, missed_rps=None)
    held, said = held_to(twin, BATCHER, POISSON, (P95,), 0.01, measured)
    assert held is twin
    assert said == own


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0])
def test_a_twin_outside_is_made_slower_or_faster_until_it_agrees(twin: Twin, factor: float) -> None:
    """A server ten times as slow as the twin thinks, twice as slow, or twice as fast."""
    own = highest(twin)
    measured = MeasuredRates(held_rps=0.9 * factor * own, missed_rps=1.1 * factor * own)
    held, said = held_to(twin, BATCHER, POISSON, (P95,), 0.01, measured)
    assert said == own
    nearer = measured.missed_rps if factor < 1.0 else measured.held_rps
    assert highest(held) == pytest.approx(nearer, rel=0.04)


def test_a_plan_lies_within_the_bracket_and_says_what_the_twin_says(twin: Twin) -> None:
    own = highest(twin)
    inside = MeasuredRates(held_rps=0.97 * own, missed_rps=1.05 * own)
    plan = planned(twin, 50.0 * own, inside)
    assert not plan.contradicted
    share = plan.per_replica_rps
    assert inside.held_rps <= share.low <= share.value <= share.high <= inside.most_rps
    assert plan.twin_rps == own
    assert plan.measured == inside


def test_what_a_pool_gains_does_not_leave_the_bracket(twin: Twin) -> None:
    own = highest(twin)
    bracket = MeasuredRates(held_rps=0.99 * own, missed_rps=1.01 * own)
    share = planned(twin, 3.0 * own, bracket, routing="least_loaded").per_replica_rps
    assert bracket.held_rps <= share.low <= share.value <= share.high <= bracket.most_rps


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_where_the_twin_lies_outside_the_measured_rate_counts(twin: Twin, factor: float) -> None:
    own = highest(twin)
    measured = MeasuredRates(held_rps=factor * own, missed_rps=1.2 * factor * own)
    plan = planned(twin, 40.0 * factor * own, measured)
    assert plan.contradicted
    assert plan.per_replica_rps.value == measured.held_rps
    assert plan.advised == 40
    assert plan.latency_s["p95"].value <= 1.1 * P95.seconds
    held, missed = measured.held_rps, measured.missed_rps
    assert plan.to_dict()["measured"] == asdict(MeasuredRates(held_rps=held, missed_rps=missed))


def test_of_rates_that_all_missed_the_twin_names_none(twin: Twin) -> None:
    own = highest(twin)
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
    plan = planned(torn, 40.0 * highest(torn), None)
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
    said = printed(planned(judged, 4.5 * highest(judged), None), judged, capsys)
    assert said.startswith(first)
    assert ("100 % of the simulator's" in said) is judged.reliable


def test_a_plan_says_in_how_many_fits_the_figures_beside_it_keep_the_limits(
    twin: Twin, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each replica gets all that one was measured to serve, more than the two slowest of six readings can."""
    measured = MeasuredRates(held_rps=1.02 * highest(twin), missed_rps=None)
    plan = planned(twin, 2.0 * measured.held_rps, measured)
    assert (plan.advised, plan.replicas.high) == (2, 2.0)
    assert plan.latency_s["p95"].high > P95.seconds
    assert 0.0 < plan.kept_ratio < 0.95
    said = printed(plan, twin, capsys)
    assert f"2 are enough in {percentage(plan.kept_ratio)} of the simulator's fits" in said
