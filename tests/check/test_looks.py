"""What each look may spend, and that all of them together spend no more than stated."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from batchtune.check.gate import bounds, fewest_blocks, looks_up_to, planned_looks


@pytest.mark.parametrize("blocks_max", [6, 7, 10, 24, 54, 200])
@pytest.mark.parametrize("gates", [1, 5, 8])
def test_the_looks_spend_no_more_than_the_error_rate(blocks_max, gates):
    looks = planned_looks(looks_up_to(blocks_max), gates=gates)
    assert looks[-1].blocks == blocks_max
    assert gates * sum(look.flag_level for look in looks) <= 0.05 + 1e-12
    assert sum(look.clear_level for look in looks) <= 0.05 + 1e-12
    assert gates * sum(look.flag_level for look in looks) > 0.02 or blocks_max < 10


def test_six_blocks_that_agree_can_clear_a_gate():
    (first, *_) = planned_looks(looks_up_to(24), gates=5)
    assert (first.blocks, first.clear_level, first.flag_level) == (6, 1 / 64, 0.0)


def test_more_than_three_gates_need_more_than_six_blocks_to_flag_one():
    assert [fewest_blocks(gates=gates) for gates in (1, 3, 4, 6, 7)] == [6, 6, 7, 7, 8]


def test_bounds_hold_the_truth_as_often_as_stated():
    """2,000 draws of 10 differences: 2.4 % expected beyond either end, three standard errors allowed."""
    chance = random.Random(1)
    above = sum(
        bounds([chance.gauss(0.0, 1.0) for _ in range(10)], low_level=0.025, high_level=0.025)[1] > 0.0
        for _ in range(2000)
    )
    assert above / 2000 == pytest.approx(0.0244, abs=0.0104)


def test_bounds_are_the_median_and_infinite_where_the_level_allows_none():
    value, low, high = bounds([1.0, 2.0, 4.0], low_level=0.05, high_level=0.05)
    assert value == statistics.median([1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
    assert (low, high) == (-math.inf, math.inf)
    assert math.isnan(bounds([], low_level=0.05, high_level=0.05)[0])
