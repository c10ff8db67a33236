"""The turns of a duet: long enough for what is loaded, or none at all."""

from __future__ import annotations

import math

import pytest

from batchtune.scenario.reader import parse_scenario
from batchtune.tune.compare.blocks import DUET_S, PAIRS_MIN, TURN_S, Variant, duet_plan, request_cost
from tests.check.check_fakes import exactly, measurement, trial

SCENARIO = """\
name: duet
target: {model: ./model}
request: {protocol: grpc, rows: 1}
load: LOAD
objective: throughput
fixed: {max_batch_size: 8, batch_timeout_micros: 2000, num_batch_threads: 1}
"""
CLOSED = "{arrivals: closed, concurrency: 8, warm_up: 50ms, duration: 800ms, seed: 1}"


def variants(load: str = CLOSED, **words: str) -> list[Variant]:
    text = SCENARIO.replace("LOAD", load)
    if "rate" in load:
        text = text.replace("objective: throughput", "objective: latency")
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    return [Variant(name=name, scenario=parse_scenario(text)) for name in ("main", "new")]


def runs(*, p50_s: float = 0.006, p95_s: float = 0.008):
    latency_s = {"p50": exactly(p50_s), "p95": exactly(p95_s), "p99": exactly(1.0)}
    return [trial(name, 1, measurement(latency_s=latency_s)) for name in ("main", "new")]


LONG, RARE = CLOSED.replace("800ms", "5s"), "{arrivals: poisson, rate: 100/s, duration: 5s, seed: 1}"


def test_turns_are_short_and_many():
    plan = duet_plan(variants(), runs(), block=1)
    assert plan.turn_ns == TURN_S * 1e9
    assert plan.gap_ns == pytest.approx(2e6 + 1.25 * 8e6)
    assert plan.pairs == int(DUET_S / (2 * (0.008 + 0.012)))
    assert all(sorted(plan.order[turn : turn + 2]) == [0, 1] for turn in range(0, len(plan.order), 2))
    assert duet_plan(variants(), runs(), block=2).order != plan.order


def test_the_clocks_are_read_when_a_batch_that_nobody_fills_has_been_answered():
    plan = duet_plan(variants(LONG, **{"micros: 2000": "micros: 30000"}), runs(), block=1)
    assert plan.gap_ns == pytest.approx(2e6 + 30e6 + 6e6)


@pytest.mark.parametrize(("load", "p50_s", "turn_s"), [(LONG, 0.02, 0.025), (RARE, 0.006, 0.08)])
def test_turns_hold_some_typical_latencies_and_requests(load, p50_s, turn_s):
    assert duet_plan(variants(load), runs(p50_s=p50_s), block=1).turn_ns == pytest.approx(1e9 * turn_s)


def test_a_duet_takes_no_longer_than_is_needed():
    longer = variants(CLOSED.replace("800ms", "30s"))
    assert duet_plan(longer, runs(), block=1).begins_ns[-1] <= DUET_S * 1e9
    assert duet_plan(longer, runs(p50_s=0.2, p95_s=0.3), block=1).pairs == PAIRS_MIN


@pytest.mark.parametrize(
    ("load", "latencies"),
    [
        (CLOSED, {"p50_s": 0.2, "p95_s": 0.3}),
        (CLOSED, {"p95_s": math.inf}),
        (CLOSED.replace("800ms", "100ms"), {}),
        ("{arrivals: poisson, rate: 5/s, warm_up: 50ms, duration: 5s, seed: 1}", {}),
    ],
)
def test_where_too_few_pairs_fit_there_is_none(load, latencies):
    assert duet_plan(variants(load), runs(**latencies), block=1) is None


def test_without_runs_or_with_rates_of_their_own_there_is_none():
    assert duet_plan(variants(), runs()[:1], block=1) is None
    searched = {"objective: latency": "objective: capacity\nslo: {p95: 20ms}"}
    load = "{arrivals: poisson, rate: 500/s, warm_up: 50ms, duration: 800ms, seed: 1}"
    assert duet_plan(variants(load, **searched), runs(), block=1) is None


def test_the_cost_of_a_request_is_typical_of_the_pairs_one_that_strays_aside():
    pairs = [(1.0, 1.05)] * 9 + [(1.0, 40.0)]
    assert request_cost(pairs, planned=12) == pytest.approx((1.0, 1.05))
    assert request_cost(pairs[:5], planned=12) is None
    assert request_cost([], planned=12) is None
