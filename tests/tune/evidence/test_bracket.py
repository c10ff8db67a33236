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
from batchtune.tune.trials.trial import Probe
from tests.tune.tune_fakes import asked, planted, scenario_of

CAPACITY = {"objective": "capacity", "load": {"arrivals": "poisson"}, "slo": {"p95": "20ms"}}


def run(
    rate: float | None,
    *,
    held: bool,
    far: bool = False,
    fresh: bool = False,
    clients: int | None = None,
    answered: float | None = None,
    full: bool = False,
) -> BracketRun:
    return BracketRun(
        trial=1,
        rate_rps=rate,
        clients=clients,
        answered_rps=answered if answered is not None else (rate or 0.0),
        latency_s={"p95": 0.01 if held else 0.05},
        error_ratio=0.0,
        held=held,
        far=far,
        fresh=fresh,
        full=full,
    )


def bracket(*runs: BracketRun) -> Bracket:
    return Bracket(tuple(runs))


@pytest.mark.parametrize(
    ("runs", "held", "missed"),
    [
        ((), 0.0, math.inf),
        ((run(100, held=True),), 100.0, math.inf),
        ((run(100, held=True), run(200, held=False)), 100.0, math.inf),
        ((run(100, held=True), run(200, held=False), run(200, held=False)), 100.0, 200.0),
        ((run(100, held=True), run(200, held=False, far=True)), 100.0, 200.0),
        # a stall below four rates that held costs one of them at most
        (
            (run(1000, held=False), *(run(rate, held=True) for rate in (1100, 1200, 1300, 1400))),
            1300.0,
            math.inf,
        ),
        # one held, one missed at the same rate: neither won; a little below it is believed
        ((run(100, held=True), run(100, held=False)), BACK * 100.0, math.inf),
        # votes: held twice above what was missed once
        ((run(100, held=False), run(110, held=True), run(120, held=True)), 110.0, math.inf),
    ],
)
def test_a_rate_is_held_by_more_runs_than_missed_it(
    runs: tuple[BracketRun, ...], held: float, missed: float
) -> None:
    assert bracket(*runs).held_rps == pytest.approx(held)
    assert bracket(*runs).missed_rps == pytest.approx(missed)


def test_a_rate_that_a_third_of_many_runs_miss_is_missed() -> None:
    """Else the search repeats a rate at which the p95 is just the limit to the end of its budget."""
    runs = [run(100, held=True, fresh=True)] * 3 + [run(114, held=True)] * 6
    assert bracket(*runs, run(114, held=False), run(114, held=False)).missed_above(100.0) == math.inf
    assert bracket(*runs, *[run(114, held=False)] * 3).missed_above(100.0) == 114.0
    assert bracket(*runs, run(114, held=True), *[run(114, held=False)] * 3).missed_above(100.0) == math.inf


def test_rates_that_differ_by_rounding_are_one_rate() -> None:
    """With several models a rate is the sum of its shares, which may be the number beside it."""
    beside = math.nextafter(100.0, math.inf)
    assert bracket(run(100.0, held=True), run(beside, held=False)).held_rps == pytest.approx(BACK * 100.0)


def test_a_loop_that_fills_every_batch_is_an_upper_end() -> None:
    full = run(None, held=True, clients=64, answered=500.0, full=True)
    assert bracket(full).missed_rps == pytest.approx(SATURATED * 500.0)
    assert bracket(replace(full, full=False)).missed_rps == math.inf


def test_a_closed_loop_within_the_limit_counts_whoever_asked_for_it() -> None:
    assert bracket(run(None, held=True, clients=8, answered=300.0)).loop_rps == 300.0


def test_fresh_runs_confirm_only_three_and_three_times_as_many_as_miss() -> None:
    fresh = [run(100, held=True, fresh=True) for _ in range(FRESH)]
    assert bracket(*fresh[:2]).confirmed_rps == 0.0
    assert bracket(*fresh).confirmed_rps == 100.0
    missed = [run(100, held=False, fresh=True)] * 2
    assert bracket(*fresh, *missed).confirmed_rps == 0.0
    assert bracket(*fresh, *fresh, *missed).confirmed_rps == 100.0


def test_a_lucky_run_above_takes_nothing_from_what_is_confirmed() -> None:
    confirmed = [run(421, held=True, fresh=True)] * FRESH
    assert bracket(*confirmed, run(479, held=True)).stated_rps == 421.0


def test_what_only_the_search_held_is_stated_as_less() -> None:
    assert bracket(run(100, held=True)).stated_rps == pytest.approx(UNCONFIRMED * 100.0)


def test_of_streams_the_next_rate_does_not_wait_for_latencies_to_rise() -> None:
    held = replace(run(100.0, held=True), latency_s={"ttft_p95": 0.3})
    limits = {"ttft_p95": 0.5}
    assert next_rate(bracket(held), limits) == pytest.approx(100.0 * math.sqrt(5 / 3))
    assert next_rate(bracket(held), limits, streams=True) == pytest.approx(CLIMB * 100.0)
    tight = replace(held, latency_s={"ttft_p95": 0.45})
    assert next_rate(bracket(tight), limits, streams=True) == pytest.approx(STEP * 100.0)


RUNS = st.lists(
    st.builds(
        lambda rate, latency, answered, fresh: (rate, latency, answered, fresh),
        st.sampled_from([100.0, 150.0, 200.0, 300.0, 450.0]),
        st.floats(min_value=0.001, max_value=0.1),
        st.sampled_from([0.5, 0.85, 1.0]),
        st.booleans(),
    ),
    max_size=12,
)


def judged(given_runs: list[tuple[float, float, float, bool]], limit_s: float) -> Bracket:
    return Bracket(
        tuple(
            BracketRun(
                trial=at,
                rate_rps=rate,
                clients=None,
                answered_rps=share * rate,
                latency_s={"p95": latency},
                error_ratio=0.0,
                held=latency <= limit_s and share > 0.97,
                far=not (latency <= limit_s and share > 0.97) and share < 0.8,
                fresh=fresh,
            )
            for at, (rate, latency, share, fresh) in enumerate(given_runs)
        )
    )


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


def test_a_run_of_an_older_search_counts_each_of_its_rates() -> None:
    scenario = scenario_of(**CAPACITY)
    probes = tuple(
        Probe(rate_rps=rate, met=latency <= 0.02, latency_s={"p95": latency}, error_ratio=0.0)
        for rate, latency in ((100.0, 0.01), (200.0, 0.015), (400.0, 0.09))
    )
    trial = replace(planted(1, throughput=90.0, p95_s=0.01), probes=probes)
    runs = runs_of([trial], scenario.slo, scenario)
    assert [(one.rate_rps, one.held) for one in runs] == [(100.0, True), (200.0, True), (400.0, False)]


def test_a_loop_too_short_for_each_client_to_be_answered_is_no_upper_end() -> None:
    # 125 clients of a language model, 3 s: 51 answers, 17/s; it held 45/s
    scenario = scenario_of(**CAPACITY)
    trial = asked(planted(1, throughput=17.0, p95_s=0.01, batching={"max_batch_size": 16}), concurrency=125)
    measured = trial.measurement
    assert measured is not None
    (long,) = runs_of([trial], scenario.slo, scenario)
    (short,) = runs_of([replace(trial, measurement=replace(measured, requests=51))], scenario.slo, scenario)
    assert (long.full, short.full) == (True, False)
    assert bracket(short).missed_rps == math.inf


def test_a_trial_that_failed_is_a_miss_by_far() -> None:
    scenario = scenario_of(**CAPACITY)
    trial = planted(1, throughput=90.0, p95_s=0.01)
    failed = replace(asked(trial, rate_rps=100.0), state="failed", measurement=None)
    (only,) = runs_of([failed], scenario.slo, scenario)
    assert only.far
    assert not only.held
    assert only.rate_rps == 100.0


def test_a_stricter_slo_is_judged_by_the_same_runs() -> None:
    scenario = scenario_of(**CAPACITY)
    trial = planted(1, throughput=100.0, p95_s=0.01)
    trial = replace(asked(trial, rate_rps=100.0), concurrency=None)
    strict = SloSpec.model_validate({"p95": "5ms"})
    (loose_run,), (strict_run,) = (runs_of([trial], slo, scenario) for slo in (scenario.slo, strict))
    assert loose_run.held
    assert not strict_run.held


def test_runs_that_contradict_each_other_widen_what_is_stated() -> None:
    fresh = [run(100, held=True, fresh=True) for _ in range(3)]
    steady = bracket(*fresh, run(110, held=False), run(110, held=False))
    contradicting = bracket(*fresh, run(110, held=False), run(110, held=False), run(130, held=True))
    assert not steady.is_unsteady
    assert steady.stated_missed_rps == pytest.approx(WIDTH * 100)
    assert contradicting.is_unsteady
    assert contradicting.stated_missed_rps >= UNSTEADY * 100


def test_on_a_disturbed_host_one_run_that_missed_a_held_rate_widens_what_is_stated() -> None:
    fresh = [run(100, held=True, fresh=True) for _ in range(3)]
    missed = run(109, held=False)
    quiet = bracket(*fresh, missed, run(110, held=True), run(110, held=True))
    disturbed = bracket(*fresh, replace(missed, disturbed=True), run(110, held=True), run(110, held=True))
    never_held = bracket(*fresh, replace(missed, disturbed=True))
    assert not quiet.is_unsteady
    assert disturbed.is_unsteady
    assert disturbed.stated_missed_rps >= UNSTEADY * 100
    assert not never_held.is_unsteady


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
    scenario = scenario_of(**CAPACITY)

    def told(p95_s: float, **ask: Any) -> BracketRun:
        trial = asked(planted(1, throughput=100, p95_s=p95_s, batching={"max_batch_size": 4}), **ask)
        assert trial.measurement is not None
        measured = replace(trial.measurement, verdict=verdict, caveats=tuple(map(caveat, codes)))
        (run,) = runs_of([replace(trial, measurement=measured)], scenario.slo, scenario)
        return run

    miss, lower = told(0.03, rate_rps=100.0), told(0.03, rate_rps=80.0)
    assert bracket(miss).missed_once(0.0) == (100.0 if counts else math.inf)
    assert bracket(miss, lower).missed_once(0.0) == (80.0 if counts else math.inf)
    assert bracket(lower, miss).missed_once(0.0) == (80.0 if counts else 100.0)  # it recurred
    assert bracket(told(0.01, rate_rps=100.0)).held_rps == 100.0  # a pass is a pass on any host
    loop = told(0.01, concurrency=64)
    assert loop.full == counts  # what the client answered is no upper end of the server's


def test_a_batch_that_ends_just_after_a_short_run_is_no_backlog() -> None:
    """Batches of 0.9 s in a window of 5 s: a sixth of the answers comes after it, however idle the server is."""
    scenario = scenario_of(**{**CAPACITY, "slo": {"p95": "2s"}})

    def judged(execution_s: float, answered: float) -> BracketRun:
        server = ServerActivity(
            duration_s=5.0, batches_by_rows={110: 6}, execution_s_by_rows={110: execution_s}
        )
        trial = asked(planted(1, throughput=answered, p95_s=1.4, server=server), rate_rps=132.0)
        assert trial.measurement is not None
        trial = replace(trial, measurement=replace(trial.measurement, window_s=5.0))
        return runs_of([trial], scenario.slo, scenario)[0]

    assert judged(0.9, 111.0).held
    assert judged(0.01, 111.0).fell_behind  # batches are short: what is missing waits
    assert judged(0.9, 80.0).fell_behind


def test_confirmation_runs_that_missed_a_higher_rate_are_counted_apart() -> None:
    """As a sweep made them: of four at the stated rate or more two missed, each above the lowest that held."""
    measured = [(1_850.0, True), (1_850.0, False), (1_760.0, False), (1_590.0, True)]
    stated = stated_capacity(bracket(*(run(rate, held=held, fresh=True) for rate, held in measured)), {})
    assert stated is not None
    assert (stated.held, stated.missed, stated.missed_higher) == (2, 0, 2)
    assert stated.fell_behind == 0


def test_confirmation_runs_refute_a_rate_only_where_none_of_them_held_any() -> None:
    searched = (run(1_000.0, held=True), run(1_100.0, held=True))
    missed = [run(rate, held=False, fresh=True) for rate in (1_050.0, 950.0)]
    stated = stated_capacity(bracket(*searched, *missed), {})
    assert stated is not None
    assert (stated.refuted_rps, stated.held, stated.missed, stated.missed_higher) == (950.0, 0, 2, 0)
    assert (stated.least_met_rps, stated.most_met_rps) == (1_000.0, 1_100.0)
    assert stated.held_rps < 950.0
    once = stated_capacity(bracket(*searched, *missed, run(500.0, held=True, fresh=True)), {})
    assert once is not None
    assert (once.refuted_rps, once.missed_higher) == (None, 2)
