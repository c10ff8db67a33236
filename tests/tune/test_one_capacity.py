"""The capacity of one configuration: the next rate by what was held and missed, and searches of a fake server."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bracket import OPEN, Bracket, BracketRun
from batchtune.tune.one_capacity import LEAST, SEARCH_S, probed_rate, search_seconds
from batchtune.tune.trials.pace import Pace
from batchtune.tune.trials.trial import Trial
from tests.tune.tune_fakes import (
    FakeClock,
    FakeFleet,
    FakeTarget,
    Law,
    batches_of,
    bench_of,
    bracket_run,
    capacity_scenario,
    planned,
)

LIMITS = {"p95": 0.020}
SIXTEEN = batches_of(16)


def scenario(slo: str = "20ms") -> Scenario:
    return capacity_scenario(slo, load={"arrivals": "poisson", "warm_up": "100ms", "duration": "2s"})


def loop(answered_rps: float, *, full: bool = True) -> BracketRun:
    return bracket_run(None, held=False, clients=32, answered_rps=answered_rps, full=full)


def at(rate_rps: float, *, held: bool, far: bool = False, p95_s: float = 0.01) -> BracketRun:
    answered_rps = 0.79 * rate_rps if far else rate_rps
    return bracket_run(rate_rps, held=held, far=far, answered_rps=answered_rps, latency_s={"p95": p95_s})


def after(*runs: BracketRun, streams: bool = False) -> float | None:
    return probed_rate(Bracket(runs), LIMITS, streams=streams)


WIDE = loop(1000.0, full=False)
"""It bounds nothing."""
HELD = at(1000.0, held=True)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        # below what a closed loop answered
        ([loop(1000.0)], 800.0),
        ([loop(0.0)], 1.0),
        # a rate that was held is followed by the room that its latency leaves, twice at most
        ([WIDE, at(700.0, held=True, p95_s=0.0125)], 700.0 * math.sqrt(1.6)),
        ([WIDE, at(700.0, held=True, p95_s=0.001)], 1400.0),
        ([loop(1000.0), at(700.0, held=True, p95_s=0.001)], math.sqrt(700.0 * 1300.0)),
        # a near miss counts when it is seen twice and a far one at once
        ([HELD, at(1090.0, held=False)], 1090.0),
        ([HELD, *[at(1090.0, held=False)] * 2], None),
        ([HELD, at(1090.0, held=False, far=True)], None),
        # one that is not sure is seen again where it is near; below one that is sure lies the next
        ([HELD, at(1140.0, held=False)], 1140.0),
        ([HELD, at(1440.0, held=False)], 1200.0),
        ([HELD, at(1440.0, held=False, far=True)], math.sqrt(1000.0 * 1440.0)),
    ],
)
def test_the_next_rate_follows_from_what_was_held_and_missed(
    runs: list[BracketRun], expected: float | None
) -> None:
    assert after(*runs) == pytest.approx(expected)


def test_of_streams_whose_latencies_hardly_rise_the_rate_doubles() -> None:
    assert after(WIDE, at(700.0, held=True, p95_s=0.0125), streams=True) == pytest.approx(1400.0)


def test_rates_go_down_until_one_is_held_and_end_where_hardly_any_load_is_left():
    runs = [loop(1000.0)]
    while (rate := after(*runs)) is not None:
        runs.append(at(rate, held=False))
    tried = [run.rate_rps for run in runs[1:]]
    assert tried == sorted(tried, reverse=True)
    assert LEAST * 800.0 <= tried[-1] <= 2.0 * LEAST * 800.0


@given(knee=st.floats(30.0, 5000.0), answered=st.floats(0.6, 1.6), steep=st.floats(1.0, 8.0))
def test_on_a_quiet_server_the_bracket_closes_around_the_capacity(knee, answered, steep):
    """Whatever the loop answered between 0.6 and 1.6 times the capacity, within a dozen loads."""
    runs = [loop(answered * knee, full=answered > 1.0)]
    while (rate := after(*runs)) is not None:
        p95_s = 0.02 * (rate / knee) ** steep
        runs.append(at(rate, held=rate <= knee, far=rate > 1.27 * knee, p95_s=p95_s))
        assert len(runs) < 14
    bracket = Bracket(tuple(runs))
    assert bracket.held_rps <= knee <= 1.001 * bracket.missed_rps
    assert bracket.missed_rps <= 1.001 * OPEN * bracket.held_rps


def searched(law: Law, *, seed: int = 1) -> tuple[Trial, FakeFleet, float]:
    target = FakeTarget(FakeClock(), law=law)
    fleet = FakeFleet(target, seed=seed)
    plan = planned(SIXTEEN, seed=1000 * seed, pace=Pace(), source="variant", reason="with")
    return bench_of(scenario(), target, fleet).run(plan).trial, fleet, target.clock() - 1000.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_capacity_of_a_server_is_what_its_law_says(seed):
    """tau(b) = 0.9 ms + 0.4 ms × b: batches of 16 end 2,192 requests a second, and 20 ms leave room for a queue."""
    trial, fleet, seconds = searched(Law(), seed=seed)
    assert 0.8 * 2192 < trial.objective.value < 2192
    assert trial.objective.low == trial.objective.value < trial.objective.high <= 1.3 * 2192
    assert trial.feasible
    assert trial.measurement.latency_s["p95"].value <= 0.02
    assert trial.rate_rps == pytest.approx(trial.objective.value, rel=0.01)
    assert len(trial.probes) == len(fleet.jobs) - 1
    assert seconds < SEARCH_S


def test_the_loads_of_a_search_have_schedules_of_their_own():
    _, fleet, _ = searched(Law())
    schedules = [tuple(job.arrivals.due_ns[:20].tolist()) for job in fleet.jobs[1:]]
    assert len(set(schedules)) == len(schedules)


def test_a_server_too_slow_for_its_limit_holds_nothing_and_its_lowest_rate_is_shown():
    trial, _, _ = searched(Law(fixed_s=0.03, per_row_s=0.0))
    assert (trial.state, trial.objective, trial.feasible) == ("complete", None, False)
    assert trial.rate_rps == pytest.approx(min(probe.rate_rps for probe in trial.probes), rel=0.05)


def test_a_slow_server_is_searched_for_longer():
    slow = Pace(lone_s=1.0, batch_s_by_rows={1: 1.0, 16: 2.0})
    assert search_seconds(scenario(), SIXTEEN, Pace()) == SEARCH_S
    assert search_seconds(scenario(), SIXTEEN, slow) >= 2 * SEARCH_S


def test_a_search_ends_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr("batchtune.tune.one_capacity.SEARCH_S", 3.0)
    trial, _, seconds = searched(Law(noise=0.2))
    assert trial.probes
    assert seconds < 10.0
