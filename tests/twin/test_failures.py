"""Of a fleet that may lose replicas those that are left keep every limit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.measure.slo import Limit
from batchtune.twin.replicas import Failing
from batchtune.twin.twin import Twin
from tests.twin.test_replicas import POISSON, twin_of
from tests.twin.twin_fakes import batcher_of, plan_replicas

P95 = Limit(name="p95", quantile=0.95, seconds=0.02)


@pytest.fixture(scope="module")
def twin() -> Twin:
    return twin_of(readings=3)


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
