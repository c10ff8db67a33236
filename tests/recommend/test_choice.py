"""Which configuration is recommended: inside the space, the simpler of equals, and never more under a stricter SLO."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.batching.parameters import Configuration, from_dict
from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.recommend.recommendation import recommend
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.evidence.claimed_capacity import claim_of
from batchtune.tune.evidence.rates import Located
from batchtune.tune.trials.space import lies_inside
from tests.tune.tune_fakes import planted, scenario_of

SCENARIO = scenario_of()
CAPACITY = scenario_of(load={"arrivals": "poisson"}, objective="capacity")


def knobs(size: int, timeout: int = 0, threads: int = 1) -> dict[str, int]:
    return {"max_batch_size": size, "batch_timeout_micros": timeout, "num_batch_threads": threads}


def at_rate(number, rate, p95_s, *, batching, source="race", errors=0.0, requests=1000, verdict=None):
    trial = planted(
        number,
        batching=batching,
        throughput=rate,
        p95_s=p95_s,
        source=source,
        block=number,
        error_ratio=errors,
    )
    measured = replace(trial.measurement, requests=requests, verdict=verdict)
    exactly = Estimate(value=rate, low=rate, high=rate)
    return replace(trial, rate_rps=rate, asked_rate_rps=rate, objective=exactly, measurement=measured)


def fresh(number, batching, throughput, p95_s, block):
    return planted(
        number, batching=batching, throughput=throughput, p95_s=p95_s, source="confirm", block=block
    )


def confirmed(first, *arms, blocks=3):
    return [
        fresh(first + block * len(arms) + at, batching, throughput * (1 + 0.002 * block), p95_s, block + 1)
        for block in range(blocks)
        for at, (batching, throughput, p95_s) in enumerate(arms)
    ]


def test_what_lies_outside_the_space_is_named_and_not_recommended():
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        planted(2, throughput=4000, p95_s=0.01, source="defaults"),
        planted(3, batching=knobs(16), throughput=3000, p95_s=0.01),
        planted(4, batching=knobs(439), throughput=3900, p95_s=0.01, source="rule"),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching.max_batch_size == 16
    assert any(note.startswith("outside your space: server defaults, 33 % more") for note in found.notes)
    assert found.alternatives == ()


@pytest.mark.parametrize(
    ("batching", "inside"),
    [(None, True), (knobs(16), True), (knobs(14), False), (knobs(64), False), ({}, False)],
)
def test_a_list_allows_its_own_values_only_and_no_batching_is_always_allowed(batching, inside):
    assert lies_inside(planted(1, batching=batching, throughput=1, p95_s=1).configuration, SCENARIO) is inside


def test_what_cannot_be_told_from_no_batching_gives_way_to_it():
    arms = [(knobs(16), 1030, 0.01), (None, 1000, 0.01)]
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        planted(2, batching=knobs(16), throughput=1040, p95_s=0.01),
        *confirmed(3, *arms),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching is None
    assert found.indistinct_from == "no_batching"


def test_what_cannot_be_told_from_defaults_inside_the_space_gives_way_to_them():
    space = {
        "max_batch_size": [8, 16, 1000],
        "batch_timeout_micros": [0, 1000],
        "num_batch_threads": {"low": 1, "high": 512},
    }
    scenario = scenario_of(search={"budget": {"trials": 3}, "seed": 1, "space": space})
    arms = [(knobs(16), 3050, 0.01), (None, 1000, 0.01), ({}, 3000, 0.01)]
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        planted(2, batching={}, throughput=3000, p95_s=0.01, source="defaults"),
        planted(3, batching=knobs(16), throughput=3070, p95_s=0.01),
        *confirmed(4, *arms),
    ]
    found = recommend(ledger, scenario=scenario)
    assert found.configuration.label() == "server defaults"
    assert found.indistinct_from == "defaults"
    assert found.batching_helps == "yes"
    assert found.established


def test_of_equals_the_shorter_timeout_is_recommended():
    ledger = [
        planted(1, batching=knobs(16, 5000), throughput=3040, p95_s=0.008),
        planted(2, batching=knobs(16, 0), throughput=3000, p95_s=0.011),
        planted(3, batching=knobs(8, 0), throughput=2000, p95_s=0.005),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching.batch_timeout_micros == 0
    assert found.configuration.batching.max_batch_size == 16


def test_kept_by_fresh_runs_and_known_to_help_is_established():
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        planted(2, batching=knobs(16), throughput=3000, p95_s=0.01),
        *confirmed(3, (knobs(16), 3000, 0.01), (None, 1000, 0.01)),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.established
    assert found.open_questions == ()
    assert not recommend(ledger[:2], scenario=SCENARIO).established
    (question,) = recommend(ledger[:2], scenario=SCENARIO).open_questions
    assert "no fresh run" in question


def test_a_bound_above_the_limit_is_an_open_question():
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        planted(2, batching=knobs(16), throughput=3000, p95_s=0.047),
        *confirmed(3, (knobs(16), 3000, 0.047), (None, 1000, 0.01)),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert not found.established
    assert found.open_questions[0].startswith("in a fresh run p95 may reach ")


def test_a_capacity_that_fresh_runs_refuted_is_neither_promised_nor_established():
    ledger = [
        at_rate(1, 3000.0, 0.01, batching=None, source="no_batching"),
        at_rate(2, 3300.0, 0.08, batching=None, source="no_batching"),
        at_rate(3, 14_000.0, 0.01, batching=knobs(16)),
        at_rate(4, 15_700.0, 0.04, batching=knobs(16), requests=4),
        at_rate(5, 15_700.0, 0.9, batching=knobs(16), source="confirm", errors=0.33),
        at_rate(6, 15_700.0, 0.9, batching=knobs(16), source="confirm", errors=0.71),
    ]
    found = recommend(ledger, scenario=CAPACITY)
    assert found.configuration.batching.max_batch_size == 16
    assert found.rate_rps < 15_700
    assert found.promises == ()
    (question,) = found.open_questions
    assert question.startswith(
        "2 fresh runs at 15,700/s missed the SLO (33 % errors and 71 % errors): the capacity"
    )
    assert question.endswith("is not established; below that it held at 14,000/s in trial 3")


@pytest.mark.parametrize(("p95_s", "established"), [(0.040, True), (0.049, False)])
def test_a_capacity_is_established_where_most_fresh_runs_are_sure_to_keep_the_limit(p95_s, established):
    ledger = [
        at_rate(1, 1000.0, 0.02, batching=None, source="no_batching"),
        at_rate(2, 1100.0, 0.08, batching=None, source="no_batching"),
        at_rate(3, 4000.0, 0.04, batching=knobs(16)),
        at_rate(4, 4200.0, 0.06, batching=knobs(16)),
        *(at_rate(number, 3950.0, p95_s, batching=knobs(16), source="confirm") for number in (5, 6, 7)),
    ]
    found = recommend(ledger, scenario=CAPACITY)
    assert found.rate_rps == 3950.0
    assert found.established is established


def test_a_refuted_capacity_with_nothing_below_is_not_known_to_be_none():
    ledger = [
        at_rate(1, 2000.0, 0.04, batching=knobs(16)),
        at_rate(2, 2000.0, 0.09, batching=knobs(16), source="confirm"),
        at_rate(3, 2000.0, 0.09, batching=knobs(16), source="confirm"),
    ]
    with pytest.raises(InconclusiveError, match="refuted by fresh runs"):
        recommend(ledger, scenario=CAPACITY)


def test_a_lone_request_that_keeps_the_slo_makes_nothing_meets_it_unknown():
    lone = replace(planted(1, batching=None, throughput=4, p95_s=0.01, source="probe"), concurrency=1)
    missed = at_rate(2, 2000.0, 0.9, batching=knobs(16))
    with pytest.raises(InconclusiveError, match="a lone request keeps it"):
        recommend([lone, missed], scenario=CAPACITY)
    with pytest.raises(NoFeasibleConfigurationError):
        recommend([missed], scenario=CAPACITY)
    late = planted(1, batching=None, throughput=4, p95_s=0.3, source="probe")
    fresh = at_rate(3, 2000.0, 0.9, batching=knobs(16), source="confirm")
    with pytest.raises(NoFeasibleConfigurationError):
        recommend([replace(late, concurrency=1), missed, fresh], scenario=CAPACITY)


def test_where_every_batch_failed_the_models_own_words_are_told():
    words = "INVALID_ARGUMENT: Got: 16 Expected: 1"
    broken = planted(2, batching=knobs(16), throughput=1, p95_s=1, failure="no request was answered")
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        replace(broken, error_texts={"INVALID_ARGUMENT": words}),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.reason.startswith(f"every configuration with batching failed: {words}")
    assert not found.established


RUNS = st.lists(
    st.tuples(
        st.sampled_from([None, 2, 4, 8, 64]),
        st.sampled_from([0, 1000]),
        st.integers(5, 30),
        st.floats(0.005, 0.3),
        st.sampled_from([0.0, 0.005, 0.02, 0.3]),
        st.sampled_from(["sampler", "race", "confirm"]),
        st.integers(1, 500),
        st.sampled_from([None, "PASS", "FAIL", "NOISY"]),
    ),
    min_size=1,
    max_size=16,
)


def stated(trials, slo):
    try:
        return recommend(trials, scenario=CAPACITY, slo=slo).rate_rps
    except (NoFeasibleConfigurationError, InconclusiveError):
        return 0.0


@settings(max_examples=100, deadline=None)
@given(RUNS, st.floats(0.004, 0.4), st.floats(0.3, 1.0), st.floats(0.1, 1.0))
def test_a_stricter_slo_never_states_a_higher_capacity(rows, limit_s, share, errors_share):
    trials = [
        at_rate(
            number,
            100.0 * rate,
            p95_s,
            batching=None if size is None else knobs(size, timeout),
            source="no_batching" if size is None and source != "confirm" else source,
            errors=errors,
            requests=requests,
            verdict=verdict,
        )
        for number, (size, timeout, rate, p95_s, errors, source, requests, verdict) in enumerate(rows, 1)
    ]
    loose = SloSpec(p95_s=limit_s, errors=0.01)
    own = CAPACITY.slo
    strict = SloSpec(p95_s=share * limit_s, errors=0.01 * errors_share)
    least = SloSpec(p95_s=min(share * limit_s, 0.05), p99_s=0.2, errors=0.01 * errors_share)
    assert stated(trials, strict) <= stated(trials, loose) * (1 + 1e-9)
    assert stated(trials, least) <= min(stated(trials, strict), stated(trials, own)) * (1 + 1e-9)


def test_the_capacity_of_a_run_falls_as_the_limit_does():
    trials = [
        at_rate(1, 1000.0, 0.01, batching=knobs(8)),
        at_rate(2, 2000.0, 0.03, batching=knobs(8)),
        at_rate(3, 2100.0, 0.049, batching=knobs(16)),
        at_rate(4, 2200.0, 0.08, batching=knobs(16)),
        at_rate(5, 2000.0, 0.031, batching=knobs(8), source="confirm"),
    ]
    limits = [0.2, 0.1, 0.05, 0.04, 0.0305, 0.03, 0.02, 0.011]
    capacities = [stated(trials, SloSpec(p95_s=limit_s)) for limit_s in limits]
    assert capacities == sorted(capacities, reverse=True)
    assert capacities[-1] > 0.0
    assert math.isclose(capacities[2], 2000.0)
    assert policy.UNCONFIRMED_SHARE < 1.0


@pytest.mark.parametrize(("flag", "inside"), [("2", True), ("3", False)])
def test_a_flag_is_found_in_the_space_whether_written_as_a_number_or_a_text(flag, inside):
    space = {"max_batch_size": [16], "enable_batching": [True, False], "--threads": [0, 2]}
    scenario = scenario_of(search={"budget": {"trials": 3}, "seed": 1, "space": space})
    configuration = Configuration(batching=from_dict(knobs(16)), flags=(("threads", flag),))
    assert lies_inside(configuration, scenario) is inside


def test_a_sure_but_small_gain_is_told_from_one_that_cannot_be_told():
    arms = [(knobs(16), 1030, 0.01), (None, 1000, 0.01)]
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.01, source="no_batching"),
        planted(2, batching=knobs(16), throughput=1030, p95_s=0.01),
        *confirmed(3, *arms, blocks=12),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching is None
    assert (found.indistinct_from, found.little_better_than) == (None, "no_batching")


def test_one_point_that_misses_says_nothing_of_the_others():
    missed = [
        planted(1, batching=None, throughput=1000, p95_s=0.06, source="no_batching"),
        *(planted(at + 2, batching=knobs(8, 1000 * at), throughput=1000, p95_s=0.06) for at in range(2)),
    ]
    with pytest.raises(InconclusiveError, match="only 1 with batching was tried, of 30 points"):
        recommend(missed[:2], scenario=SCENARIO)
    more = planted(9, batching=knobs(16), throughput=1000, p95_s=0.06)
    with pytest.raises(NoFeasibleConfigurationError):
        recommend([*missed, more], scenario=SCENARIO)
    lone = planted(9, batching=None, throughput=100, p95_s=0.06, source="probe")
    with pytest.raises(NoFeasibleConfigurationError):
        recommend([*missed[:2], replace(lone, concurrency=1)], scenario=SCENARIO)


def test_what_fresh_runs_refute_bounds_the_capacity():
    ledger = [
        at_rate(1, 1000, 0.02, batching=knobs(8)),
        at_rate(2, 2000, 0.03, batching=knobs(8)),
        at_rate(3, 1800, 0.09, batching=knobs(8), source="confirm"),
        at_rate(4, 1800, 0.09, batching=knobs(8), source="confirm"),
    ]
    found = recommend(ledger, scenario=CAPACITY)
    assert not found.established
    assert found.capacity_rps.high <= 1800
    assert found.capacity_rps.value < 1800


def test_the_gain_of_a_capacity_is_that_of_the_values_stated():
    ledger = [
        *(at_rate(at + 1, 1000 * (at + 1), 0.02, batching=knobs(8)) for at in range(4)),
        at_rate(5, 5000, 0.09, batching=knobs(8)),
        at_rate(6, 1000, 0.04, batching=None, source="no_batching"),
        at_rate(7, 1100, 0.09, batching=None, source="no_batching"),
        *(at_rate(at, 1000, 0.04, batching=None, source="confirm") for at in (8, 9)),
    ]
    found = recommend(ledger, scenario=CAPACITY)
    assert found.confirmations == 0
    assert found.gain_over_no_batching.value == pytest.approx(found.capacity_rps.value / 1000)


def test_the_lowest_rate_missed_is_the_least_that_is_known():
    located = Located(held_rps=0.0, crossing_rps=900.0, sd=0.1, bracketed=True)
    claim = claim_of([])
    assert math.isnan(claim.missed_rps)
    assert replace(claim, located=located, refuted_rps=800.0).missed_rps == 800.0
    assert replace(claim, refuted_rps=800.0).missed_rps == 800.0
