"""The service-time curve's word, from closed loops of a device whose batches take 7 ms and 0.11 ms a row."""

from __future__ import annotations

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.tune.search.curve import Curve
from tests.tune.tune_fakes import scenario_of


def curve_under(**limits: str) -> Curve:
    scenario = scenario_of(objective="capacity", load={"arrivals": "poisson"}, slo=limits)
    curve = Curve(scenario)
    for rows in (16, 128):
        curve.learn(sized(rows), rows=rows, rows_per_s=rows / (0.007 + 0.00011 * rows))
    return curve


def sized(rows: int) -> Configuration:
    return Configuration(
        batching=BatchingParameters(max_batch_size=rows, batch_timeout_micros=0, num_batch_threads=1)
    )


def test_every_limit_is_asked_of_its_own_quantile() -> None:
    lone = curve_under(p99="40ms").capacity_rps(sized(128))
    both = curve_under(p50="12ms", p99="40ms").capacity_rps(sized(128))
    assert 0.1 * lone < both < lone  # a median of 12 ms costs rate; as a limit of p95 it would leave nothing
    assert curve_under(p95="12ms").capacity_rps(sized(128)) < 0.5 * both


@pytest.mark.parametrize(("limit", "keeps"), [("12ms", False), ("60ms", True)])
def test_a_closed_loop_says_how_much_of_a_limit_it_takes(limit: str, keeps: bool) -> None:
    said = curve_under(p50=limit).closed(sized(16), 32)
    assert (said.of_limit <= 1.0) == keeps
    assert said.answered_rps == pytest.approx(16 / (0.007 + 0.00011 * 16), rel=0.1)


def test_a_load_that_the_curve_leaves_aside_is_no_third_size() -> None:
    curve = curve_under(p95="20ms")
    assert not curve.has_three_sizes
    two_threads = Configuration(
        batching=BatchingParameters(max_batch_size=16, batch_timeout_micros=0, num_batch_threads=2)
    )
    curve.learn(two_threads, rows=16, rows_per_s=1.9 * 16 / (0.007 + 0.00011 * 16))
    # Without batching, how many run at once is unknown.
    curve.learn(Configuration(batching=None), rows=1, rows_per_s=2000.0)
    assert not curve.has_three_sizes
    curve.learn(sized(64), rows=64, rows_per_s=64 / (0.007 + 0.00011 * 64))
    assert curve.has_three_sizes
