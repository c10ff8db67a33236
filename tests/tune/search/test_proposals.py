"""Who names contenders: Optuna's sampler, the throughput × interval rule, the service-time curve."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.batching.parameters import Configuration
from batchtune.report.findings import text_of
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.search.contenders import Contender
from batchtune.tune.search.curve import Curve
from batchtune.tune.search.fixed_load import search_of
from batchtune.tune.search.proposals import ATTEMPTS, RuleAnswer, proposed_points, throughput_interval_rule
from tests.tune.tune_fakes import batches_of, capacity_scenario, scenario_of

VALUES: dict[str, list[Any]] = {
    "size": [1, 2, 4, 8, 16, 32],
    "threads": [1, 2, 4],
    "mode": ["eager", "graph", "fused"],
    "fixed": [7],
}


def held(point: dict[str, Any]) -> float:
    """One hill: 16 rows, 2 threads, fused."""
    far = abs(np.log2(point["size"] / 16)) + abs(np.log2(point["threads"] / 2))
    return 1000.0 - 100.0 * far - (0.0 if point["mode"] == "fused" else 200.0)


EVERY_POINT = [dict(zip(VALUES, point, strict=True)) for point in product(*VALUES.values())]
KNOWN = [(point, held(point)) for point in EVERY_POINT[::9]]
OUTSIDE = [({"size": 1000, "threads": 1, "mode": "eager", "fixed": 7}, 9e9), ({"size": 4}, 9e9)]


def test_points_are_of_the_grid_and_no_two_alike_and_follow_from_the_seed_and_points_of_the_grid() -> None:
    named = list(proposed_points(VALUES, KNOWN, seed=3))
    assert 1 <= len(named) <= ATTEMPTS
    assert all(point in EVERY_POINT and named.count(point) == 1 for point in named)
    assert list(proposed_points(VALUES, [*KNOWN, *OUTSIDE], seed=3)) == named
    assert list(proposed_points(VALUES, KNOWN, seed=4)) != named


def test_what_held_more_draws_the_points_near_it() -> None:
    """Over 40 seeds: what is named after a third of the grid held holds more than the grid in the mean."""
    known = [(point, held(point)) for point in EVERY_POINT[::3]]
    named = [held(next(proposed_points(VALUES, known, seed=seed))) for seed in range(40)]
    assert np.mean(named) > np.mean([held(point) for point in EVERY_POINT]) + 100.0


def test_of_a_space_of_one_point_nothing_is_named() -> None:
    assert list(proposed_points({"size": [8], "threads": [2]}, [], seed=1)) == []


def test_a_space_that_has_grown_is_named_from_as_a_whole() -> None:
    known = [({"size": size, "threads": 1}, float(size)) for size in (1, 2, 4, 8, 16)]
    grown = {"size": [1, 2, 4, 8, 16, 32, 64], "threads": [1, 2]}
    named = {next(proposed_points(grown, known, seed=seed))["size"] for seed in range(30)}
    assert named & {32, 64}


def scenario(strategy: str = "guided") -> Scenario:
    space = {"max_batch_size": [1, 4, 16], "batch_timeout_micros": [0, 1000], "num_batch_threads": [1, 2]}
    return scenario_of(search={"strategy": strategy, "budget": {"time": "60s"}, "space": space})


def named_by_a_search(strategy: str, *, steps: int = 0) -> list[Contender]:
    """Whom it names after all points of one thread, of which so many were named as neighbours too."""
    search = search_of(scenario(strategy), budget_s=60.0)
    known = []
    for size, micros in product([1, 4, 16], [0, 1000]):
        point = {"max_batch_size": size, "batch_timeout_micros": micros, "num_batch_threads": 1}
        contender = search.contenders.at(point, "grid")
        if len(known) < steps:
            search.contenders.at(point, "neighbour")
        known.append((contender, float(size)))
    return list(islice(search.optuna_contenders(known), 5))


def test_a_search_is_told_contenders_with_its_sampler_as_their_name() -> None:
    named = named_by_a_search("optuna")
    assert named
    assert all("sampler" in contender.sources and contender.point is not None for contender in named)


@pytest.mark.parametrize("strategy", ["rule", "grid"])
def test_with_strategies_that_name_all_contenders_nobody_else_is(strategy: str) -> None:
    assert named_by_a_search(strategy) == []


def test_the_sampler_is_not_told_of_a_leaders_neighbours() -> None:
    """All but the first two points hold more the larger they are; told of these two alone it is as if nothing were."""
    told_all = [contender.point for contender in named_by_a_search("guided")]
    told_none = [contender.point for contender in named_by_a_search("guided", steps=6)]
    untold = scenario().search.seed
    values = {name: list(knob.values) for name, knob in scenario().search.space.items()}
    assert told_none == list(islice(proposed_points(values, [], seed=untold), 5))
    assert told_all != told_none


def rule(rows_per_s: float, lone_s: float, rows: int = 1, **limits: float) -> RuleAnswer:
    return throughput_interval_rule(
        rows_per_s=rows_per_s, lone_latency_s=lone_s, limits=limits, rows_per_request=rows
    )


@pytest.mark.parametrize(
    ("asked", "size", "interval_s", "said"),
    [
        # half of what the SLO leaves, and throughput times it
        (
            rule(800.0, 0.002, p50=0.010, p95=0.042),
            16,
            0.020,
            "X = 800 rows/s one by one, interval (42 ms - 2 ms) / 2 = 20 ms: X·interval = 16",
        ),
        (rule(800.0, 0.05, rows=4, p95=0.02), 4, 0.0, "no interval is left"),
        # without an SLO the interval is the lone latency, without p95 the tightest limit counts
        (rule(2000.0, 0.005), 10, 0.005, ""),
        (rule(1000.0, 0.0, p90=0.02, p99=0.1), 10, 0.010, ""),
    ],
)
def test_the_rule_is_throughput_times_interval(
    asked: RuleAnswer, size: int, interval_s: float, said: str
) -> None:
    assert asked.interval_s == pytest.approx(interval_s)
    assert asked.point == {"max_batch_size": size, "batch_timeout_micros": 1e6 * interval_s}
    assert said in text_of(asked.arithmetic())


@given(st.floats(1.0, 1e5), st.floats(1e-4, 0.1), st.floats(1e-3, 2.0), st.integers(1, 64))
def test_a_device_without_economy_of_scale_still_meets_the_slo(
    rows_per_s: float, lone_s: float, slo_s: float, rows: int
) -> None:
    """Waiting I, executing X·I rows one by one and the lone latency stay within the SLO, but for rounding of a row."""
    answer = rule(rows_per_s, lone_s, rows, p95=slo_s)
    assert answer.max_batch_size >= rows
    if lone_s < slo_s and answer.max_batch_size > rows:
        worst_s = answer.interval_s + answer.max_batch_size / rows_per_s + lone_s
        assert worst_s <= slo_s + 1.0 / rows_per_s


def rows_per_s(rows: int) -> float:
    """Of a device whose batches take 7 ms and 0.11 ms a row."""
    return rows / (0.007 + 0.00011 * rows)


def curve_under(**limits: str) -> Curve:
    """The service-time curve from closed loops."""
    curve = Curve(capacity_scenario(slo=limits))
    for rows in (16, 128):
        curve.learn(batches_of(rows), rows=rows, rows_per_s=rows_per_s(rows))
    return curve


def test_every_limit_is_asked_of_its_own_quantile() -> None:
    lone = curve_under(p99="40ms").capacity_rps(batches_of(128))
    both = curve_under(p50="12ms", p99="40ms").capacity_rps(batches_of(128))
    assert 0.1 * lone < both < lone  # a median of 12 ms costs rate; as a limit of p95 it would leave nothing
    assert curve_under(p95="12ms").capacity_rps(batches_of(128)) < 0.5 * both


@pytest.mark.parametrize(("limit", "keeps"), [("12ms", False), ("60ms", True)])
def test_a_closed_loop_says_how_much_of_a_limit_it_takes(limit: str, keeps: bool) -> None:
    said = curve_under(p50=limit).closed(batches_of(16), 32)
    assert (said.of_limit <= 1.0) == keeps
    assert said.answered_rps == pytest.approx(rows_per_s(16), rel=0.1)


def test_a_load_that_the_curve_leaves_aside_is_no_third_size() -> None:
    curve = curve_under(p95="20ms")
    assert not curve.has_three_sizes
    curve.learn(batches_of(16, threads=2), rows=16, rows_per_s=1.9 * rows_per_s(16))
    # Without batching, how many run at once is unknown.
    curve.learn(Configuration(batching=None), rows=1, rows_per_s=2000.0)
    assert not curve.has_three_sizes
    curve.learn(batches_of(64), rows=64, rows_per_s=rows_per_s(64))
    assert curve.has_three_sizes
