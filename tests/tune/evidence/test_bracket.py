"""Brackets are votes of runs: pure, monotone in the SLO, and no run is forgotten."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.measure.caveats import caveat
from batchtune.scenario.spec.check import SloSpec
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.recommendation import stated_capacity
from batchtune.tune.evidence.bracket import (
    BACK,
    CLIMB,
    FRESH,
    SATURATED,
    STEP,
    UNCONFIRMED,
    UNSTEADY,
    WIDTH,
    Bracket,
    BracketRun,
    crossing_rps,
    next_rate,
    runs_of,
)
from batchtune.tune.trials.trial import Probe, Trial
from tests.tune.tune_fakes import asked, capacity_scenario, planted, remeasured
from tests.tune.tune_fakes import bracket_run as run


def bracket(*runs: BracketRun) -> Bracket:
    return Bracket(tuple(runs))


def runs(rate: float, count: int, *, held: bool, **changes: Any) -> list[BracketRun]:
    return [run(rate, held=held, **changes)] * count


def loop(answered_rps: float, **changes: Any) -> BracketRun:
    return run(None, held=True, answered_rps=answered_rps, **changes)


UP, DOWN = {"held": True}, {"held": False}
FRESH_100 = runs(100, FRESH, fresh=True, **UP)


@pytest.mark.parametrize(
    ("given_runs", "held", "missed"),
    [
        ([], 0.0, math.inf),
        ([run(100, **UP)], 100.0, math.inf),
        # missed once, twice, by far
        ([run(100, **UP), run(200, **DOWN)], 100.0, math.inf),
        ([run(100, **UP), *runs(200, 2, **DOWN)], 100.0, 200.0),
        ([run(100, **UP), run(200, far=True, **DOWN)], 100.0, 200.0),
        # a stall below four rates that held costs one of them at most
        ([run(1000, **DOWN), *(run(rate, **UP) for rate in (1100, 1200, 1300, 1400))], 1300.0, math.inf),
        # held and missed once: a little below is believed
        ([run(100, **UP), run(100, **DOWN)], BACK * 100.0, math.inf),
        # rates that differ by rounding are one: with several models a rate is the sum of its shares
        ([run(100, **UP), run(math.nextafter(100.0, math.inf), **DOWN)], BACK * 100.0, math.inf),
        # held twice above what was missed once
        ([run(100, **DOWN), run(110, **UP), run(120, **UP)], 110.0, math.inf),
        # a loop that fills every batch is an upper end
        ([loop(500.0, clients=64, full=True)], 0.0, SATURATED * 500.0),
        ([loop(500.0, clients=64)], 0.0, math.inf),
    ],
)
def test_a_rate_is_held_by_more_runs_than_missed_it(
    given_runs: list[BracketRun], held: float, missed: float
) -> None:
    found = bracket(*given_runs)
    assert (found.held_rps, found.missed_rps) == (pytest.approx(held), pytest.approx(missed))


@pytest.mark.parametrize(("held", "missed", "end"), [(6, 2, math.inf), (6, 3, 114.0), (7, 3, math.inf)])
def test_a_rate_that_a_third_of_many_runs_miss_is_missed(held: int, missed: int, end: float) -> None:
    """Else the search repeats a rate at which the p95 is just the limit to the end of its budget."""
    found = [*FRESH_100, *runs(114, held, **UP), *runs(114, missed, **DOWN)]
    assert bracket(*found).missed_above(100.0) == end


def test_a_closed_loop_within_the_limit_counts_whoever_asked_for_it() -> None:
    assert bracket(loop(300.0, clients=8)).loop_rps == 300.0


@pytest.mark.parametrize(
    ("held", "missed", "confirmed"), [(2, 0, 0.0), (3, 0, 100.0), (3, 2, 0.0), (6, 2, 100.0)]
)
def test_fresh_runs_confirm_only_three_and_three_times_as_many_as_miss(
    held: int, missed: int, confirmed: float
) -> None:
    fresh = [*runs(100, held, fresh=True, **UP), *runs(100, missed, fresh=True, **DOWN)]
    assert bracket(*fresh).confirmed_rps == confirmed


def test_a_lucky_run_above_takes_nothing_from_what_is_confirmed() -> None:
    assert bracket(*FRESH_100, run(114, **UP)).stated_rps == 100.0


def test_what_only_the_search_held_is_stated_as_less() -> None:
    assert bracket(run(100, **UP)).stated_rps == pytest.approx(UNCONFIRMED * 100.0)


def test_of_streams_the_next_rate_does_not_wait_for_latencies_to_rise() -> None:
    held = replace(run(100.0, held=True), latency_s={"ttft_p95": 0.3})
    limits = {"ttft_p95": 0.5}
    assert next_rate(bracket(held), limits) == pytest.approx(100.0 * math.sqrt(5 / 3))
    assert next_rate(bracket(held), limits, streams=True) == pytest.approx(CLIMB * 100.0)
    tight = replace(held, latency_s={"ttft_p95": 0.45})
    assert next_rate(bracket(tight), limits, streams=True) == pytest.approx(STEP * 100.0)


RUNS = st.lists(
    st.tuples(
        st.sampled_from([100.0, 150.0, 200.0, 300.0, 450.0]),
        st.floats(min_value=0.001, max_value=0.1),
        st.sampled_from([0.5, 0.85, 1.0]),
        st.booleans(),
    ),
    max_size=12,
)
"""Rate, latency in seconds, share of the rate that was answered, whether it is a confirmation run."""


def judged(given_runs: list[tuple[float, float, float, bool]], limit_s: float) -> Bracket:
    found = []
    for rate, latency_s, share, fresh in given_runs:
        held = latency_s <= limit_s and share > 0.97
        figures = {"answered_rps": share * rate, "latency_s": {"p95": latency_s}}
        found.append(run(rate, held=held, far=not held and share < 0.8, fresh=fresh, **figures))
    return bracket(*found)


@given(RUNS, st.floats(min_value=0.001, max_value=0.1), st.floats(min_value=1.0, max_value=10.0))
@settings(max_examples=500, deadline=None)
def test_a_looser_slo_never_lowers_what_is_held_or_stated(
    given_runs: list[tuple[float, float, float, bool]], limit_s: float, factor: float
) -> None:
    strict, loose = judged(given_runs, limit_s), judged(given_runs, factor * limit_s)
    assert loose.held_rps >= strict.held_rps
    assert loose.confirmed_rps >= strict.confirmed_rps
    assert loose.stated_rps >= strict.stated_rps


@given(RUNS, st.floats(min_value=0.001, max_value=0.1))
@settings(max_examples=500, deadline=None)
def test_ends_are_in_order_and_nothing_is_stated_that_no_run_held(
    given_runs: list[tuple[float, float, float, bool]], limit_s: float
) -> None:
    found = judged(given_runs, limit_s)
    held = [one.rate_rps or 0.0 for one in found.open_runs if one.held]
    assert found.held_rps <= found.missed_rps
    assert found.stated_rps <= found.stated_missed_rps
    assert found.held_rps <= max(held, default=0.0)
    assert (found.held_rps > 0.0) == bool(held)
    assert found.confirmed_rps in {*held, 0.0}


def judged_trial(trial: Trial, p95: str = "20ms") -> list[BracketRun]:
    return runs_of([trial], SloSpec.model_validate({"p95": p95}), capacity_scenario())


def test_a_run_of_an_older_search_counts_each_of_its_rates() -> None:
    probes = tuple(
        Probe(rate_rps=rate, met=latency <= 0.02, latency_s={"p95": latency}, error_ratio=0.0)
        for rate, latency in ((100.0, 0.01), (200.0, 0.015), (400.0, 0.09))
    )
    found = judged_trial(replace(planted(1, throughput=90.0, p95_s=0.01), probes=probes))
    assert [(one.rate_rps, one.held) for one in found] == [(100.0, True), (200.0, True), (400.0, False)]


def test_a_loop_too_short_for_each_client_to_be_answered_is_no_upper_end() -> None:
    # 125 clients of a language model, 3 s: 51 answers, 17/s; it held 45/s
    trial = asked(planted(1, throughput=17.0, p95_s=0.01, batching={"max_batch_size": 16}), concurrency=125)
    (long,), (short,) = judged_trial(trial), judged_trial(remeasured(trial, requests=51))
    assert (long.full, short.full, bracket(short).missed_rps) == (True, False, math.inf)


def test_a_trial_that_failed_is_a_miss_by_far() -> None:
    (only,) = judged_trial(asked(planted(1, failure="it died"), rate_rps=100.0))
    assert (only.far, only.held, only.rate_rps) == (True, False, 100.0)


@pytest.mark.parametrize(
    ("further", "disturbed", "is_unsteady", "missed"),
    [
        (runs(110, 2, **DOWN), False, False, WIDTH * 100),
        # contradicting; one miss below what held, on a disturbed host, and where nothing higher held
        ([*runs(110, 2, **DOWN), run(130, **UP)], False, True, UNSTEADY * 100),
        ([run(109, **DOWN), *runs(110, 2, **UP)], False, False, math.inf),
        ([run(109, **DOWN), *runs(110, 2, **UP)], True, True, math.inf),
        ([run(109, **DOWN)], True, False, math.inf),
    ],
)
def test_runs_that_contradict_each_other_widen_what_is_stated_one_is_enough_on_a_disturbed_host(
    further: list[BracketRun], disturbed: bool, is_unsteady: bool, missed: float
) -> None:
    found = bracket(*FRESH_100, *(replace(one, disturbed=disturbed and not one.held) for one in further))
    assert (found.is_unsteady, found.stated_missed_rps) == (is_unsteady, pytest.approx(missed))


def streamed(rate: float, ttft_s: float) -> BracketRun:
    return replace(run(rate, held=ttft_s <= 0.08), latency_s={"ttft_p95": ttft_s, "itl_p99": 0.01})


def test_latencies_that_rise_slowly_cross_their_limit_between_what_held_and_what_missed() -> None:
    """A power law is found exactly, wherever its runs lie; the limit that is never reached crosses nothing."""
    limits = {"ttft_p95": 0.08, "itl_p99": 0.025}
    runs = [streamed(rate, 0.08 * (rate / 240.0) ** 4.5) for rate in (190.0, 225.0, 225.0, 255.0)]
    assert crossing_rps(bracket(*runs), limits) == pytest.approx(240.0)
    assert crossing_rps(bracket(*runs[:3]), limits) is None  # none above the limit
    assert crossing_rps(bracket(*runs[2:]), limits) is None  # too few
    overloaded = streamed(900.0, 2.0)
    assert crossing_rps(bracket(*runs, overloaded), limits) == pytest.approx(240.0, rel=0.03)


@pytest.mark.parametrize(
    ("verdict", "codes", "counts"),
    [
        ("INVALID", ("client_late",), False),
        ("NOISY", ("host_busy", "client_throttled"), False),
        ("NOISY", ("host_busy", "client_late"), True),
        ("FAIL", ("client_late",), True),
    ],
)
def test_a_miss_that_the_client_made_teaches_nothing_until_it_recurs(
    verdict: Any, codes: tuple[str, ...], counts: bool
) -> None:

    def told(p95_s: float, **ask: Any) -> BracketRun:
        notes: dict[str, Any] = {"verdict": verdict, "caveats": tuple(map(caveat, codes))}
        trial = planted(1, throughput=100, p95_s=p95_s, batching={"max_batch_size": 4}, **notes)
        return judged_trial(asked(trial, **ask))[0]

    miss, lower = told(0.03, rate_rps=100.0), told(0.03, rate_rps=80.0)
    assert bracket(miss).missed_once(0.0) == (100.0 if counts else math.inf)
    assert bracket(miss, lower).missed_once(0.0) == (80.0 if counts else math.inf)
    assert bracket(lower, miss).missed_once(0.0) == (80.0 if counts else 100.0)  # it recurred
    assert bracket(told(0.01, rate_rps=100.0)).held_rps == 100.0  # a pass is a pass on any host
    loop = told(0.01, concurrency=64)
    assert loop.full == counts  # what the client answered is no upper end of the server's


def test_a_batch_that_ends_just_after_a_short_run_is_no_backlog() -> None:
    """Batches of 0.9 s in a window of 5 s: a sixth of the answers comes after it, however idle the server is."""

    def judged(execution_s: float, answered: float) -> BracketRun:
        times = {"batches_by_rows": {110: 6}, "execution_s_by_rows": {110: execution_s}}
        measured = {"server": ServerActivity(duration_s=5.0, **times), "window_s": 5.0}
        trial = planted(1, throughput=answered, p95_s=1.4, **measured)
        return judged_trial(asked(trial, rate_rps=132.0), "2s")[0]

    assert judged(0.9, 111.0).held
    assert judged(0.01, 111.0).fell_behind  # batches are short: what is missing waits
    assert judged(0.9, 80.0).fell_behind


def test_confirmation_runs_refute_a_rate_only_where_none_of_them_held_any() -> None:
    missed = [run(rate, fresh=True, **DOWN) for rate in (1_050.0, 950.0)]
    found = bracket(run(1_000.0, **UP), run(1_100.0, **UP), *missed)
    stated = stated_capacity(found, {})
    assert (stated.refuted_rps, stated.held, stated.missed, stated.missed_higher) == (950.0, 0, 2, 0)
    assert (stated.least_met_rps, stated.most_met_rps) == (1_000.0, 1_100.0)
    assert stated.held_rps < 950.0
    once = stated_capacity(bracket(*found.runs, run(500.0, fresh=True, **UP)), {})
    assert (once.refuted_rps, once.missed_higher) == (None, 2)
