"""When a figure changed: found where it was planted, and hardly ever where none was."""

from __future__ import annotations

import random

import pytest

from batchtune.check.history import LEAST, change_points


def series(*levels: tuple[float, int], sd: float = 0.01, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [level * (1.0 + chance.gauss(0.0, sd)) for level, count in levels for _ in range(count)]


def test_a_step_of_five_per_cent_is_found_where_it_came():
    (change,) = change_points(series((1.0, 12), (1.05, 12)))
    assert abs(change.at - 12) <= 1
    assert change.change == pytest.approx(0.05, abs=0.01)


def test_two_steps_are_told_in_the_order_of_time():
    found = change_points(series((1.0, 15), (1.1, 15), (0.9, 15)))
    assert [abs(change.at - at) <= 1 for change, at in zip(found, (15, 30), strict=True)] == [True, True]
    assert found[0].after == found[1].before


def test_a_series_without_a_change_shows_one_in_a_hundred():
    """1 % expected of 300; 9 have a probability below 0.2 %."""
    assert sum(bool(change_points(series((1.0, 20), seed=seed))) for seed in range(300)) <= 8


def test_the_fewest_values_show_a_step_halfway():
    assert all(change_points(series((1.0, LEAST // 2), (1.5, LEAST // 2), seed=seed)) for seed in range(20))


def test_one_outlier_is_no_change():
    values = series((1.0, 20))
    values[10] *= 3.0
    assert change_points(values) == []


@pytest.mark.parametrize("count", [0, 1, LEAST - 1])
def test_too_few_values_show_none(count):
    assert change_points([1.0 if at < count / 2 else 9.0 for at in range(count)]) == []


def test_equal_values_show_none():
    assert change_points([2.0] * 30) == []
