"""Replicas are planned with an interval, never above what one can do, and quickly for a very large fleet."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from batchtune.errors import TwinError
from batchtune.measure.slo import Limit
from batchtune.report.findings import text_of
from batchtune.twin.replicas import POOL_MOST
from batchtune.twin.service_time import Fitted, linear_service_time
from batchtune.twin.simulator.simulate import Routing
from batchtune.twin.traffic import Traffic
from batchtune.twin.twin import FitError, Twin
from tests.twin.twin_fakes import batcher_of, device_of, plan_replicas

P95 = Limit(name="p95", quantile=0.95, seconds=0.02)
POISSON = Traffic(rate_rps=1.0)
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
    plan = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=500.0, limits=(P95,))
    assert plan.advised == 1
    assert (plan.replicas.low, plan.replicas.high) == (1.0, 1.0)
    assert not plan.extrapolated


def test_replicas_grow_with_the_rate(twin: Twin) -> None:
    plans = [
        plan_replicas(twin, batcher_of(64), POISSON, rate_rps=rate, limits=(P95,), routing="random")
        for rate in (1e4, 1e5, 1e6)
    ]
    assert plans[0].advised < plans[1].advised < plans[2].advised
    assert plans[2].replicas.value == pytest.approx(10.0 * plans[1].replicas.value, rel=0.1)
    for plan in plans:
        assert plan.replicas.low <= plan.replicas.value <= plan.advised <= plan.replicas.high


def test_no_replica_is_planned_above_nine_tenths_of_its_saturation(twin: Twin) -> None:
    lax = Limit(name="p95", quantile=0.95, seconds=10.0)
    plan = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=1e6, limits=(lax,), routing="random")
    assert plan.per_replica_rps.value <= 0.91 * plan.saturation_rps
    assert (
        plan.by_saturation_alone == plan.advised
    )  # as sure as what is advised, so that the two may be compared
    assert not plan.extrapolated


def test_the_fleet_that_is_advised_keeps_the_limit(twin: Twin) -> None:
    tight = Limit(name="p95", quantile=0.95, seconds=0.006)
    plan = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=60_000.0, limits=(tight,))
    assert plan.latency_s["p95"].value <= 0.006
    pool = min(plan.advised, POOL_MOST)
    fewer = max(1, round(0.6 * plan.advised))
    crowded = twin.predict(
        batcher_of(64), Traffic(rate_rps=60_000.0 * min(fewer, pool) / fewer), replicas=min(fewer, pool)
    )
    assert crowded.latency("p95").value > 0.006


@pytest.mark.parametrize(
    "routing",
    [
        *(pytest.param(routing, marks=pytest.mark.slow) for routing in ("round_robin", "random")),
        "least_loaded",
    ],
)
def test_a_pool_stands_for_a_large_fleet(twin: Twin, routing: Routing) -> None:
    tight = Limit(name="p95", quantile=0.95, seconds=0.006)
    plan = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=1e6, limits=(tight,), routing=routing)
    assert plan.advised > POOL_MOST == plan.simulated_replicas
    assert any(f"a pool of {POOL_MOST} replicas" in text_of(note) for note in plan.notes)
    assert plan.latency_s["p95"].value <= 0.0062


def test_even_turns_need_no_more_replicas_than_chance(twin: Twin) -> None:
    tight = Limit(name="p95", quantile=0.95, seconds=0.0045)
    needed = {
        routing: plan_replicas(
            twin, batcher_of(8), POISSON, rate_rps=30_000.0, limits=(tight,), routing=routing
        ).replicas.value
        for routing in ("round_robin", "random")
    }
    assert needed["round_robin"] <= needed["random"] * 1.02


def test_a_wider_twin_gives_a_wider_interval() -> None:
    narrow, wide = (
        plan_replicas(
            twin_of(spread=spread), batcher_of(64), POISSON, rate_rps=1e6, limits=(P95,), routing="random"
        )
        for spread in (0.01, 0.15)
    )
    assert wide.replicas.high / wide.replicas.low > narrow.replicas.high / narrow.replicas.low
    assert wide.advised > narrow.advised


def test_more_threads_than_were_measured_are_labelled(twin: Twin) -> None:
    plan = plan_replicas(twin, batcher_of(64, 0.0, 4), POISSON, rate_rps=1e4, limits=(P95,), routing="random")
    assert plan.extrapolated
    assert any("batch threads" in text_of(reason) for reason in plan.extrapolations)


def test_a_limit_that_no_rate_keeps_is_an_error_with_a_hint(twin: Twin) -> None:
    with pytest.raises(TwinError, match="no rate that meets p95 within 1 ms") as failure:
        plan_replicas(
            twin,
            batcher_of(64),
            POISSON,
            rate_rps=1e4,
            limits=(Limit(name="p95", quantile=0.95, seconds=0.001),),
        )
    assert "--set" in failure.value.hint


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, math.inf, math.nan])
def test_a_plan_needs_a_rate(twin: Twin, rate_rps: float) -> None:
    with pytest.raises(TwinError, match="rate above 0"):
        plan_replicas(twin, batcher_of(64), POISSON, rate_rps=rate_rps, limits=(P95,))


def test_a_rate_beyond_all_fleets_is_an_error_and_not_a_fleet_that_is_too_small(twin: Twin) -> None:
    with pytest.raises(TwinError, match="10,000,000 replicas are not enough for"):
        plan_replicas(twin, batcher_of(64), POISSON, rate_rps=1e13, limits=(P95,), routing="random")


def test_a_plan_is_plain_json(twin: Twin) -> None:
    plan = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=1e4, limits=(P95,), routing="random")
    document = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert document["advised"] == plan.advised
    assert document["limits"] == [{"name": "p95", "seconds": 0.02}]


def test_a_plan_keeps_every_limit(twin: Twin) -> None:
    p50 = Limit(name="p50", quantile=0.5, seconds=0.0035)
    alone = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=60_000.0, limits=(P95,))
    both = plan_replicas(twin, batcher_of(64), POISSON, rate_rps=60_000.0, limits=(p50, P95))
    assert alone.latency_s["p50"].value > 0.0035 >= both.latency_s["p50"].value * 0.99
    assert both.advised > alone.advised
