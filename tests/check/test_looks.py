"""What each look may spend, and that all of them together spend no more than stated."""

from __future__ import annotations

import math
import random

import pytest

from batchtune.check.gate import looks_up_to, planned_looks, student_bounds


@pytest.mark.parametrize("blocks_max", [6, 7, 10, 24, 54, 200])
@pytest.mark.parametrize("gates", [1, 5, 8])
def test_the_looks_of_both_tests_spend_no_more_than_the_error_rate(blocks_max, gates):
    looks = planned_looks(looks_up_to(blocks_max), gates=gates)
    flags = sum(look.flag_level + look.student_flag_level for look in looks)
    clears = sum(look.clear_level + look.student_clear_level for look in looks)
    assert looks[-1].blocks == blocks_max
    assert 0.02 / gates - 1e-12 <= flags <= 0.05 / gates + 1e-12
    assert 0.03 < clears <= 0.05 + 1e-12


def test_nothing_is_spent_on_clearing_before_all_gates_are_measured():
    usual, later = (planned_looks(looks_up_to(36), gates=5, clear_first=first) for first in (0, 6))
    assert [look.blocks for look in later if look.student_clear_level] == [6, 8, 10]
    assert [look.student_flag_level for look in later] == [look.student_flag_level for look in usual]
    spent = [sum(look.student_clear_level for look in looks) for looks in (usual, later)]
    assert spent[0] == pytest.approx(spent[1])


def test_the_first_looks_have_students_test_alone():
    first, _, third, *_ = planned_looks(looks_up_to(36), gates=5)
    assert (first.blocks, first.flag_level, first.clear_level) == (3, 0.0, 0.0)
    assert first.student_flag_level > 0.0
    assert (third.blocks, third.clear_level) == (6, 0.0)


def test_three_blocks_tell_what_lies_an_order_of_magnitude_beyond_their_noise():
    """A change of 0.69 over noise of 0.01 is told within 0.15 at 0.1 %; over noise of 0.5 nothing is."""
    quiet = [(0.0, 0.69), (0.01, 0.71), (-0.01, 0.67)]
    low, high = student_bounds(quiet, low_level=0.001, high_level=0.001)
    assert 0.54 < low < 0.69 < high < 0.84
    loud = [(0.0, 0.69), (0.5, 0.21), (-0.5, 1.17)]
    assert student_bounds(loud, low_level=0.001, high_level=0.001)[0] < 0.0


def test_students_bounds_hold_the_truth_as_often_as_stated():
    """4,000 draws of 3 blocks of one noise: at most 5 % expected beyond each end, three standard errors allowed."""
    chance = random.Random(1)
    drawn = [[(chance.gauss(0, 1), chance.gauss(0, 1)) for _ in range(3)] for _ in range(4000)]
    ends = [student_bounds(pairs, low_level=0.05, high_level=0.05) for pairs in drawn]
    assert 0.02 < sum(low > 0.0 for low, _ in ends) / 4000 <= 0.0604
    assert 0.02 < sum(high < 0.0 for _, high in ends) / 4000 <= 0.0604


def test_students_test_follows_the_pairs_where_the_host_moves_both_sides():
    pairs = [(speed, speed + 0.1) for speed in (0.0, 0.3, -0.2, 0.1, 0.25, -0.3)]
    assert student_bounds(pairs, low_level=0.01, high_level=0.01) == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("pairs", [[], [(0.0, 1.0)] * 2, [(0.0, 1.0), (0.0, 1.0), (0.0, math.inf)]])
def test_students_test_says_nothing_of_two_blocks_or_of_what_is_infinite(pairs):
    assert student_bounds(pairs, low_level=0.01, high_level=0.01) == (-math.inf, math.inf)
