"""Pooled figures and the ranking made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.measure.statistics.quantiles import Estimate
from batchtune.scenario.spec.slo import SloSpec
from batchtune.tune import policy
from batchtune.tune.evidence.pooled import pool
from batchtune.tune.evidence.ranking import leaders
from batchtune.tune.sweep.confirmation import confirmation_arms, hopeful
from batchtune.tune.trials.trial import Probe
from tests.tune.tune_fakes import planted, scenario_of

SCENARIO = scenario_of()
CAPACITY = scenario_of(load={"arrivals": "poisson"}, objective="capacity")


def size(number: int) -> dict[str, int]:
    return {"max_batch_size": number}


def sizes(ranked) -> list[int]:
    return [one.configuration.batching.max_batch_size for one in ranked]


def capacity_found(number, rate, p95_s=0.049, batch=8):
    probes = (Probe(rate_rps=rate, met=True, latency_s={"p95": p95_s}, error_ratio=0.0),)
    trial = planted(number, batching=size(batch), throughput=rate, p95_s=p95_s)
    return replace(trial, objective=Estimate(value=rate, low=rate, high=rate * 1.05), probes=probes)


def fresh_at(number, rate, p95_s, batch=8):
    trial = planted(
        number, batching=size(batch), throughput=rate, p95_s=p95_s, source="confirm", block=number
    )
    return replace(trial, rate_rps=rate, objective=Estimate(value=rate, low=rate, high=rate))


def test_fresh_runs_replace_the_figures_of_the_search():
    trials = [
        planted(1, batching=size(8), throughput=2600, p95_s=0.01),
        planted(2, batching=size(8), throughput=2000, p95_s=0.02, source="confirm", block=1),
        planted(3, batching=size(8), throughput=2420, p95_s=0.02, source="confirm", block=2),
    ]
    (only,) = pool(trials, scenario=SCENARIO)
    assert only.value == pytest.approx(2200)
    assert only.search_value == pytest.approx(2600)
    assert only.confirmations == 2
    assert only.constraints == pytest.approx({"p95": -0.6, "errors": -1.0})


def test_when_the_machine_slows_down_after_the_search_the_confirmed_leader_stays():
    trials = [
        planted(1, batching=size(8), throughput=7300, p95_s=0.01),
        planted(2, batching=size(16), throughput=6500, p95_s=0.01),
        planted(3, batching=size(8), throughput=5000, p95_s=0.01, source="confirm", block=1),
    ]
    assert sizes(leaders(pool(trials, scenario=SCENARIO), scenario=SCENARIO)) == [8, 16]


def test_when_the_leader_fails_its_confirmation_the_next_of_the_search_is_to_be_confirmed():
    trials = [
        planted(1, throughput=3000, p95_s=0.01, source="defaults"),
        planted(2, batching=size(8), throughput=7300, p95_s=0.045),
        planted(3, batching=size(16), throughput=6500, p95_s=0.01),
        planted(4, batching=size(8), throughput=7000, p95_s=0.07, source="confirm", block=1),
        planted(5, throughput=3000, p95_s=0.01, source="confirm", block=1),
    ]
    pooled = pool(trials, scenario=SCENARIO)
    assert leaders(pooled, scenario=SCENARIO)[0].configuration == trials[2].configuration
    arms = confirmation_arms(pooled, scenario=SCENARIO, references=[], runs_affordable=100)
    assert arms[0] == trials[2].configuration
    assert trials[1].configuration not in arms


def test_without_time_for_it_no_rival_is_begun():
    trials = [
        planted(number, batching=size(number), throughput=2000 + number, p95_s=0.01) for number in (4, 8)
    ]
    pooled = pool(trials, scenario=SCENARIO)
    assert len(confirmation_arms(pooled, scenario=SCENARIO, references=[], runs_affordable=100)) == 2
    assert len(confirmation_arms(pooled, scenario=SCENARIO, references=[], runs_affordable=3)) == 1


def test_nothing_feasible_needs_no_confirmation():
    pooled = pool([planted(1, batching=size(8), throughput=2000, p95_s=0.09)], scenario=SCENARIO)
    assert confirmation_arms(pooled, scenario=SCENARIO, references=[], runs_affordable=100) == []


def test_a_capacity_is_confirmed_where_fresh_runs_keep_the_slo():
    trials = [capacity_found(1, 2000), *(fresh_at(number, 2000.0, 0.045) for number in (2, 3, 4))]
    (only,) = pool(trials, scenario=CAPACITY)
    assert only.feasible
    assert only.value == pytest.approx(2000)
    assert only.confirmations == 3


def test_a_capacity_that_fresh_runs_refute_is_not_claimed_where_nothing_lower_held():
    trials = [capacity_found(1, 2000), fresh_at(2, 2000.0, 0.06)]
    (only,) = pool(trials, scenario=CAPACITY)
    assert not only.feasible
    assert only.claim.misses[0].trial == 2
    assert hopeful([only])[0].value == pytest.approx(2000 / 1.05)
    trials += [fresh_at(number, 2000.0 / 1.05 ** (number - 2), 0.06) for number in range(3, 10)]
    (only,) = pool(trials, scenario=CAPACITY)
    assert hopeful([only])[0] is only
    trials.append(fresh_at(10, 1400.0, 0.04))
    (only,) = pool(trials, scenario=CAPACITY)
    assert only.feasible
    assert only.claim.established
    assert only.value == pytest.approx(1400)


def test_below_a_refuted_rate_the_search_still_speaks_unconfirmed():
    trials = [
        capacity_found(1, 1500, p95_s=0.02),
        capacity_found(2, 2000),
        fresh_at(3, 2000.0, 0.09),
        fresh_at(4, 2000.0, 0.08),
    ]
    (only,) = pool(trials, scenario=CAPACITY)
    assert only.feasible
    assert not only.claim.established
    assert only.confirmations == 0
    assert 1500 < only.value < 2000 / policy.CAPACITY_STEP
    assert only.claim.held.trial == 1


def test_the_majority_of_fresh_runs_decides():
    trials = [capacity_found(1, 2000), fresh_at(2, 2000.0, 0.045), fresh_at(3, 2000.0, 0.055)]
    (tied,) = pool(trials, scenario=CAPACITY)
    assert not tied.claim.established
    (kept,) = pool([*trials, fresh_at(4, 2100.0, 0.049)], scenario=CAPACITY)
    assert kept.claim.established
    assert kept.value == pytest.approx(2000)


def test_another_slo_does_not_throw_the_fresh_runs_away():
    trials = [capacity_found(1, 2000, p95_s=0.01), *(fresh_at(number, 2000.0, 0.045) for number in (2, 3, 4))]
    (only,) = pool(trials, scenario=CAPACITY, slo=SloSpec(p95_s=0.04))
    assert not only.feasible
    assert len(only.claim.misses) == 3


def test_a_failed_probe_does_not_ban_a_configuration():
    failed = planted(1, batching=size(8), throughput=0, p95_s=0.01, source="calibration", failure="no answer")
    later = planted(2, batching=size(8), throughput=2000, p95_s=0.01)
    (only,) = pool([failed, later], scenario=SCENARIO)
    assert only.feasible


RUNS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.floats(500, 3000),
        st.floats(0.005, 0.3),
        st.sampled_from([0.0, 0.005, 0.02, 0.3]),
        st.sampled_from(["sampler", "race", "confirm", "probes"]),
        st.integers(1, 500),
    ),
    min_size=1,
    max_size=14,
)


def capacity_ledger(rows):
    trials = []
    for number, (batch, rate, p95_s, errors, source, requests) in enumerate(rows, 1):
        rate = 100.0 * round(rate / 100.0)
        probes = ()
        if source == "probes":
            probes = (
                Probe(
                    rate_rps=rate,
                    met=p95_s <= 0.05,
                    latency_s={"p95": p95_s, "p99": 1.3 * p95_s},
                    error_ratio=errors,
                ),
            )
        trial = planted(
            number,
            batching=size(2**batch),
            throughput=rate,
            p95_s=p95_s,
            error_ratio=errors,
            source="sampler" if probes else source,
            block=number if source == "confirm" else None,
        )
        asked = None if probes else rate
        measured = replace(trial.measurement, requests=requests)
        trials.append(
            replace(trial, measurement=measured, asked_rate_rps=asked, rate_rps=asked, probes=probes)
        )
    return trials


@given(RUNS, st.floats(0.004, 0.4), st.floats(0.3, 1.0), st.floats(0.1, 1.0))
def test_no_configuration_takes_more_under_a_stricter_slo(rows, limit_s, share, errors_share):
    trials = capacity_ledger(rows)

    def capacities(slo):
        pooled = pool(trials, scenario=CAPACITY, slo=slo)
        return {one.configuration: one.value if one.feasible else 0.0 for one in pooled}

    loose = capacities(SloSpec(p95_s=limit_s, errors=0.01))
    strict = capacities(SloSpec(p95_s=share * limit_s, p99_s=limit_s, errors=0.01 * errors_share))
    assert all(strict[one] <= loose[one] * (1 + 1e-9) for one in loose)


def test_a_reference_of_a_capacity_takes_no_run_that_the_claim_needs():
    trials = [capacity_found(1, 2000.0), capacity_found(2, 1980.0, batch=16), fresh_at(3, 2000.0, 0.045)]
    pooled = pool(trials, scenario=CAPACITY)
    reference = trials[1].configuration

    def arms(runs_affordable):
        asked = confirmation_arms(
            pooled, scenario=CAPACITY, references=[reference], runs_affordable=runs_affordable
        )
        return [one.batching.max_batch_size for one in asked]

    assert arms(3) == [8, 16]
    assert arms(2) == [8]


def test_a_rival_whose_fresh_run_missed_stays_at_a_lower_claim_while_it_may_still_win():
    trials = [
        capacity_found(1, 2000.0),
        capacity_found(2, 2200.0, batch=16),
        fresh_at(3, 2000.0, 0.045),
        fresh_at(4, 2200.0, 0.06, batch=16),
    ]

    def arms(ledger):
        pooled = pool(ledger, scenario=CAPACITY)
        asked = confirmation_arms(pooled, scenario=CAPACITY, references=[], runs_affordable=3)
        return {one.batching.max_batch_size for one in asked}

    assert arms(trials) == {8, 16}
    behind = [*trials, fresh_at(5, 2200.0 / policy.CAPACITY_STEP, 0.06, batch=16)]
    assert arms(behind) == {8}


def test_a_capacity_without_any_answer_is_pooled_for_another_slo_too():
    trial = capacity_found(1, 2000)
    nothing = replace(trial.measurement, throughput_rps=Estimate(value=0.0, low=0.0, high=0.0))
    (only,) = pool([replace(trial, measurement=nothing)], scenario=CAPACITY, slo=SloSpec(p95_s=0.1))
    assert only.value == pytest.approx(2000)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.floats(10, 1e5), st.floats(1e-4, 0.2), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_the_leader_is_feasible_and_no_ranking_loses_a_feasible_one(rows):
    trials = [
        planted(
            number,
            batching=size(batch),
            throughput=throughput,
            p95_s=p95_s,
            source="confirm" if fresh else "sampler",
            block=number if fresh else None,
        )
        for number, (batch, throughput, p95_s, fresh) in enumerate(rows, 1)
    ]
    pooled = pool(trials, scenario=SCENARIO)
    ranked = leaders(pooled, scenario=SCENARIO)
    assert sorted(sizes(ranked)) == sorted(sizes(one for one in pooled if one.feasible))
    confirmed = [one.confirmations > 0 for one in ranked]
    ahead = ranked[: confirmed.index(True)] if True in confirmed else []
    assert all(
        one.value > max(other.search_value for other in ranked if other.confirmations) for one in ahead
    )


def test_a_probe_that_failed_bans_no_configuration():
    trials = [
        planted(1, batching=size(8), throughput=1, p95_s=1, source="calibration", failure="hung"),
        planted(2, batching=size(8), throughput=2000, p95_s=0.01),
    ]
    assert leaders(pool(trials, scenario=SCENARIO), scenario=SCENARIO)
