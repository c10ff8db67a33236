"""What is left keeps every limit, and the minute of a death is what its few lost seconds make of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.measure.slo import Limit
from batchtune.twin.model.failures import Failing, FailureMinute, Outage, failure_minute
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.model.twin import Twin
from batchtune.twin.simulator.replica import Routing
from tests.twin.test_replicas import POISSON, twin_of
from tests.twin.twin_fakes import batcher_of, plan_replicas

P95 = Limit(name="p95", quantile=0.95, seconds=0.02)


@pytest.fixture(scope="module")
def twin() -> Twin:
    return twin_of(readings=3)


def minute_after(
    twin: Twin,
    outage: Outage,
    *,
    routing: Routing = "round_robin",
    rows_max: int = 64,
    traffic: Traffic = POISSON,
) -> FailureMinute:
    return failure_minute(
        twin, batcher_of(rows_max), traffic, outage, limits=(P95,), error_ratio=0.01, routing=routing
    )


@given(needed=st.integers(1, 100_000), share=st.floats(0.001, 0.95))
def test_of_a_fleet_that_loses_its_share_enough_are_left_and_no_smaller_one_would_do(
    needed: int, share: float
) -> None:
    failing = Failing(share=share)
    fleet = failing.fleet(needed)
    assert fleet - failing.down(fleet) >= needed
    assert failing.down(fleet) >= 1
    assert fleet - 1 - failing.down(fleet - 1) < needed


def test_n_plus_k_is_k_more() -> None:
    assert Failing(count=2).fleet(7) == 9
    assert Failing(share=0.05).fleet(19) == 20
    assert Failing(share=0.05).fleet(20) == 22


def test_a_plan_spares_as_many_as_may_be_down(twin: Twin) -> None:
    plain, spared = (
        plan_replicas(twin, batcher_of(64), POISSON, rate_rps=40_000.0, limits=(P95,), failing=failing)
        for failing in (None, Failing(count=2))
    )
    assert spared.advised == plain.advised + 2
    assert spared.failure is not None
    assert spared.failure.latency_s["p95"].value <= P95.seconds
    assert spared.failure.latency_s["p95"].value > spared.latency_s["p95"].value
    assert plain.failure is None
    document = json.loads(json.dumps(spared.to_dict(), allow_nan=False))
    assert document["failure"]["down"] == 2


@pytest.mark.parametrize("routing", ["round_robin", "random"])
@pytest.mark.parametrize(("replicas", "died"), [(4, 1), (400, 40)])
def test_what_is_lost_is_the_share_of_the_dead_until_they_are_forgotten(
    twin: Twin, routing: Routing, replicas: int, died: int
) -> None:
    minute = minute_after(
        twin, Outage(rate_rps=500.0 * replicas, replicas=replicas, died=died, detect_s=6.0), routing=routing
    )
    assert minute.error_ratio.value == pytest.approx(died / replicas * 6.0 / 60.0, rel=0.08)
    assert minute.seconds_missed in (6, 7)
    assert minute.latency_s["p95"].value < P95.seconds


def test_a_fleet_of_which_nearly_all_die_loses_what_they_are_sent(twin: Twin) -> None:
    """Four of the dead, at the rate of one each, would be sent nothing within these seconds."""
    minute = minute_after(twin, Outage(rate_rps=1_000.0, replicas=50_001, died=50_000, detect_s=6.0))
    assert minute.error_ratio.value == pytest.approx(0.1, rel=0.35)
    assert minute.seconds_missed >= 5


def test_the_least_loaded_lose_less_than_those_that_take_turns(twin: Twin) -> None:
    lost = {
        routing: minute_after(
            twin, Outage(rate_rps=2_000.0, replicas=4, died=1, detect_s=5.0), routing=routing
        ).error_ratio.value
        for routing in ("round_robin", "least_loaded")
    }
    assert 0.0 < lost["least_loaded"] < 0.1 * lost["round_robin"]


def test_too_few_that_are_left_miss_the_limit_for_the_rest_of_the_minute(twin: Twin) -> None:
    minute = minute_after(
        twin, Outage(rate_rps=3_000.0, replicas=2, died=1, detect_s=1.0), routing="random", rows_max=4
    )
    assert minute.seconds_missed > 55


def test_a_death_that_is_never_noticed_loses_its_share_throughout(twin: Twin) -> None:
    minute = minute_after(
        twin,
        Outage(rate_rps=2_000.0, replicas=4, died=1, detect_s=3600.0),
        traffic=Traffic(rate_rps=1.0, rows=(1, 2), weights=(3.0, 1.0)),
    )
    assert minute.error_ratio.value == pytest.approx(0.25, rel=0.02)
    assert minute.seconds_missed == 60
