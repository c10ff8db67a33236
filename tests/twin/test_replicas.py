"""Replicas are planned with an interval, never above what one can do, and quickly for a very large fleet."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.errors import TwinError
from batchtune.measure.slo import Limit
from batchtune.report.findings import text_of
from batchtune.twin.replicas import POOL_MOST, Failing
from batchtune.twin.service_time import Fitted, linear_service_time
from batchtune.twin.traffic import Traffic
from batchtune.twin.twin import FitError, Twin
from tests.twin.twin_fakes import P95, batcher_of, device_of, limit_of, plan_replicas

SURE = FitError(p95_ratio=0.03, throughput_ratio=0.02, mape=0.04, left_out=8)


def twin_of(*, spread: float = 0.05, readings: int = 6) -> Twin:
    """A known device, and readings of it that are faster or slower as a whole."""
    device = device_of()

    def fitted(factor: float) -> Fitted:
        times = linear_service_time(0.002 * factor, 0.00005 * factor, [1.0, 8.0, 64.0])
        return Fitted(
            service_time=times,
            contention=1.0,
            serial=False,
            jitter_ratio=device.jitter_ratio,
            delay_s=device.delay_s,
            front_end_s=device.front_end_s,
            wake_s=5e-5,
        )

    factors = np.exp(spread * np.linspace(-2.0, 2.0, readings))
    return Twin(
        best_fit=fitted(1.0),
        fits=tuple(fitted(float(one)) for one in factors),
        rows_max=64,
        threads_max=1,
        error=SURE,
        observations=8,
    )


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
