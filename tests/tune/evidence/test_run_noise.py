"""Between-run noise, prediction intervals, paired ratios."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.tune import policy
from batchtune.tune.evidence.run_noise import geometric_mean, paired_ratio, predict, spread

POSITIVE = st.floats(min_value=1e-3, max_value=1e6)


def exactly(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def coverage(sd: float, *, prior_sd: float, runs: int, repeats: int, seed: int) -> float:
    """Share of experiments in which one more run falls inside the interval of `runs` and two references' repeats."""
    chance = random.Random(seed)

    def measured(true: float) -> float:
        return true * math.exp(chance.gauss(0.0, sd))

    hits = 0
    for _ in range(repeats):
        others = [[measured(true) for _ in range(runs)] for true in (700.0, 1500.0)]
        own = [measured(2000.0) for _ in range(runs)]
        interval = predict([exactly(value) for value in own], repeats=[own, *others], prior_sd=prior_sd)
        hits += interval.low <= measured(2000.0) <= interval.high
    return hits / repeats


@pytest.mark.parametrize(
    ("sd", "runs", "least"),
    [(0.003, 1, 0.93), (0.03, 1, 0.93), (0.003, 3, 0.93), (0.03, 3, 0.93), (0.08, 3, 0.90), (0.08, 5, 0.91)],
)
def test_a_fresh_run_falls_inside_the_interval(sd, runs, least):
    """Noise of the assumed size or less: 0.95; much more than was assumed: as soon as repeats tell, 0.9.

    False alarm: at a true coverage 0.02 above `least`, 1 in 10,000 seeds; the seed is fixed.
    """
    assert coverage(sd, prior_sd=0.03, runs=runs, repeats=2000, seed=7) >= least


def test_the_interval_narrows_to_the_noise_with_many_runs():
    runs = [exactly(1000.0 * (1 + 0.001 * (index % 3))) for index in range(60)]
    values = [run.value for run in runs]
    assert predict(runs, repeats=[values], prior_sd=0.03).half_width_ratio < 0.02


def test_the_error_within_a_run_is_a_floor():
    wide = [Estimate(value=1.0, low=0.5, high=2.0)] * 3
    interval = predict(wide, repeats=[], prior_sd=0.01)
    assert interval.low < 0.5
    assert interval.high > 2.0


def test_noise_of_the_neighbours_widens_the_interval():
    quiet = predict([exactly(1.0)] * 3, repeats=[[1.0, 1.0, 1.0]], prior_sd=0.03)
    noisy = predict([exactly(1.0)] * 3, repeats=[[1.0, 1.3, 0.8]], prior_sd=0.03)
    assert noisy.half_width_ratio > 2 * quiet.half_width_ratio


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
def test_an_undefined_run_gives_no_interval(value):
    interval = predict([exactly(value)], repeats=[], prior_sd=0.03)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


@given(st.lists(POSITIVE, min_size=1, max_size=8), POSITIVE)
def test_the_unit_of_measurement_does_not_matter(values, factor):
    one = predict([exactly(value) for value in values], repeats=[], prior_sd=0.03)
    other = predict([exactly(value * factor) for value in values], repeats=[], prior_sd=0.03)
    assert other.low == pytest.approx(one.low * factor, rel=1e-6)
    assert other.high == pytest.approx(one.high * factor, rel=1e-6)


@given(st.lists(st.lists(POSITIVE, max_size=5), max_size=5))
def test_degrees_of_freedom_are_repeats_less_one_per_group(groups):
    expected = policy.PRIOR_DEGREES + sum(max(len(group) - 1, 0) for group in groups)
    assert spread(groups, prior_sd=0.03).degrees == expected


def test_what_a_pair_shares_does_not_blur_its_ratio():
    slow_then_fast = [(100.0, 50.0), (200.0, 100.0), (400.0, 200.0)]
    ratio = paired_ratio(slow_then_fast, run_sd=0.01)
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low > 1.95
    assert paired_ratio([(1.0, math.inf), (0.0, 1.0)], run_sd=0.01) is None


def test_geometric_mean_needs_positive_figures():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))
    assert math.isnan(geometric_mean([1.0, math.inf]))


def test_the_weight_of_the_prior_is_read_when_it_is_asked_for(monkeypatch):
    moderated = spread([[1.0, 1.5]], prior_sd=0.01).sd
    monkeypatch.setattr(policy, "PRIOR_DEGREES", 1)
    assert spread([[1.0, 1.5]], prior_sd=0.01).sd > 1.5 * moderated
