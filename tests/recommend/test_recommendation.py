"""Recommendations on planted ledgers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import fields, replace

import pytest

from batchtune.errors import InconclusiveError, NoFeasibleConfigurationError, TargetError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import caveat
from batchtune.recommend.near_best import near_best_of_measured
from batchtune.recommend.recommendation import Recommendation, recommend
from batchtune.scenario.spec.slo import SloSpec
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.evidence.pooled import pool
from batchtune.tune.trials.search_summary import SearchSummary
from batchtune.tune.trials.trial import Probe, Trial
from tests.tune.tune_fakes import planted, scenario_of

pytestmark = pytest.mark.smoke

LABEL_14 = "max_batch_size=14 batch_timeout_micros=2000 num_batch_threads=1"
SEARCH = {
    "budget": {"trials": 12},
    "seed": 1,
    "space": {
        "max_batch_size": {"low": 1, "high": 64},
        "batch_timeout_micros": {"low": 0, "high": 100_000, "step": 500},
        "num_batch_threads": {"low": 1, "high": 64},
    },
}
SCENARIO = scenario_of(search=SEARCH)
BATCH_14 = {"max_batch_size": 14, "batch_timeout_micros": 2000, "num_batch_threads": 1}
BATCH_8 = {"max_batch_size": 8, "batch_timeout_micros": 1000, "num_batch_threads": 1}


def side_by_side(*arms, first=1, blocks=3):
    """Confirmation blocks: (batching, throughput, p95_s) each; every arm a little off, the same in a block."""
    noise = random.Random(5)
    number = first
    for block in range(1, blocks + 1):
        for batching, throughput, p95_s in arms:
            off = math.exp(noise.gauss(0, 0.005))
            yield planted(
                number,
                batching=batching,
                throughput=throughput * off,
                p95_s=p95_s / off,
                source="confirm",
                block=block,
            )
            number += 1


def helping_ledger():
    busy = ServerActivity(
        duration_s=1.0,
        batches=164,
        rows=2230,
        mean_batch_rows=13.6,
        batches_by_rows={13: 30, 14: 134},
        execution_s_by_rows={13: 0.0058, 14: 0.0061},
        close_reasons={"full": 143, "timeout": 21},
    )
    search = [
        planted(1, batching=None, throughput=770, p95_s=0.024, source="no_batching"),
        planted(2, throughput=1500, p95_s=0.012, source="defaults"),
        planted(3, batching=BATCH_14, throughput=2300, p95_s=0.009, server=busy),
        planted(4, batching=BATCH_8, throughput=1900, p95_s=0.010),
    ]
    arms = [(BATCH_14, 2230, 0.0093), (None, 770, 0.024), ("defaults", 1500, 0.012)]
    confirmed = list(side_by_side(*arms, first=5))
    last = max(index for index, one in enumerate(confirmed) if one.configuration == search[2].configuration)
    confirmed[last] = planted(
        confirmed[last].number,
        batching=BATCH_14,
        throughput=2230,
        p95_s=0.0093,
        source="confirm",
        block=3,
        server=busy,
    )
    return search + confirmed


def test_batching_that_helps_is_recommended_with_its_gains_and_the_reason():
    found = recommend(helping_ledger(), scenario=SCENARIO)
    assert found.configuration.batching.max_batch_size == 14
    assert found.batching_helps == "yes"
    assert found.confirmations == 3
    assert found.gain_over_no_batching.value == pytest.approx(2230 / 770, rel=0.02)
    assert found.gain_over_no_batching.low > 2.5
    assert found.gain_over_defaults.value == pytest.approx(2230 / 1500, rel=0.02)
    assert "a batch of 14 rows takes 6.1 ms where 14 rows one by one take 18.2 ms" in found.reason
    assert "13.6 rows on average, 87 % close because they are full" in found.reason
    assert found.throughput_rps.low < 2230 < found.throughput_rps.high
    assert found.trials == 13
    assert found.seconds == pytest.approx(26.0)
    assert found.notes == ()


def test_the_figures_come_from_fresh_runs_not_from_the_lucky_one_of_the_search():
    found = recommend(helping_ledger(), scenario=SCENARIO)
    assert found.throughput_rps.value == pytest.approx(2230, rel=0.01)


def test_a_lucky_search_value_does_not_beat_a_confirmed_one():
    lucky = planted(99, batching=BATCH_8, throughput=2280, p95_s=0.009)
    found = recommend([*helping_ledger()[:3], *helping_ledger()[4:], lucky], scenario=SCENARIO)
    assert found.configuration.batching.max_batch_size == 14


def test_batching_that_gains_nothing_is_not_recommended():
    arms = [(BATCH_8, 1010, 0.018), (None, 1000, 0.018), ("defaults", 990, 0.019)]
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.018, source="no_batching"),
        planted(2, throughput=990, p95_s=0.019, source="defaults"),
        planted(3, batching=BATCH_8, throughput=1030, p95_s=0.018),
        *side_by_side(*arms, first=4),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.batching_helps == "no"
    assert found.configuration.batching is None
    assert found.configuration.label() == "no batching"
    assert found.gain_over_no_batching.value == 1.0


def test_a_gain_within_the_noise_is_called_not_distinguishable():
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.018, source="no_batching"),
        planted(2, throughput=900, p95_s=0.019, source="defaults"),
        planted(3, batching=BATCH_8, throughput=1070, p95_s=0.018),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.batching_helps == "not distinguishable"
    assert found.configuration.batching is None
    assert found.indistinct_from == "no_batching"
    assert not found.established
    assert "not confirmed by fresh runs" in found.notes[0]


def test_meeting_an_slo_that_no_batching_misses_is_help_enough():
    ledger = [
        planted(1, batching=None, throughput=1000, p95_s=0.060, source="no_batching"),
        planted(2, batching=BATCH_8, throughput=1010, p95_s=0.040),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.batching_helps == "yes"
    assert "without batching p95 is 60 ms, above the 50 ms allowed" in found.reason


def test_nothing_feasible_names_the_nearest_and_by_how_much_it_misses():
    ledger = [
        planted(1, batching=None, throughput=700, p95_s=0.090, source="no_batching"),
        planted(2, batching=BATCH_8, throughput=1500, p95_s=0.0575),
        planted(3, batching=BATCH_14, throughput=1500, p95_s=0.0675),
        planted(4, throughput=1500, p95_s=0.0775, source="defaults"),
    ]
    with pytest.raises(NoFeasibleConfigurationError) as caught:
        recommend(ledger, scenario=SCENARIO)
    assert caught.value.exit_code == 3
    assert "max_batch_size=8" in caught.value.message
    assert "p95 57.5 ms misses 50 ms by 15 %" in caught.value.message
    assert "p95 ≤ 50 ms" in caught.value.message


def test_a_distant_miss_is_told_as_a_multiple():
    ledger = [planted(1, batching=BATCH_8, throughput=1500, p95_s=0.76)]
    with pytest.raises(InconclusiveError, match=r"p95 760 ms is 15\.2 × 50 ms"):
        recommend(ledger, scenario=SCENARIO)


def test_errors_above_the_limit_make_a_configuration_infeasible():
    ledger = [planted(1, batching=BATCH_8, throughput=1500, p95_s=0.02, error_ratio=0.031)]
    with pytest.raises(InconclusiveError, match=r"3\.10 % of requests fail where 1\.00 % may"):
        recommend(ledger, scenario=SCENARIO)


def test_an_interrupted_sweep_of_two_trials_still_recommends_and_says_how_weakly():
    ledger = [
        planted(1, batching=None, throughput=770, p95_s=0.024, source="no_batching"),
        planted(2, batching=BATCH_14, throughput=2300, p95_s=0.009, source="rule"),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching.max_batch_size == 14
    assert found.confirmations == 0
    assert found.gain_over_defaults is None
    assert found.throughput_rps.half_width_ratio > 0.05
    assert "not confirmed by fresh runs" in found.notes[0]


def test_only_failures_are_told_with_the_last_reason():
    ledger = [planted(n, throughput=1, p95_s=1, failure=f"reason {n}") for n in (1, 2)]
    with pytest.raises(TargetError, match="2 trials failed; the last: reason 2"):
        recommend(ledger, scenario=SCENARIO)
    with pytest.raises(InconclusiveError, match="no trial is finished"):
        recommend([], scenario=SCENARIO)


def test_where_only_probes_were_made_the_sweep_is_to_go_on():
    probes = [planted(1, batching=None, throughput=440, p95_s=0.002, source="probe")]
    with pytest.raises(InconclusiveError, match="no trial is finished, only 1 probe") as raised:
        recommend(probes, scenario=SCENARIO)
    assert "--resume" in raised.value.hint
    assert "search.budget" in raised.value.hint
    assert "SLO" not in raised.value.hint


def test_a_configuration_that_failed_once_is_not_recommended():
    ledger = [
        planted(1, batching=BATCH_8, throughput=1900, p95_s=0.01),
        planted(2, batching=BATCH_14, throughput=2500, p95_s=0.01),
        planted(
            3, batching=BATCH_14, throughput=1, p95_s=1, source="confirm", block=1, failure="out of memory"
        ),
    ]
    assert recommend(ledger, scenario=SCENARIO).configuration.batching.max_batch_size == 8


def test_another_slo_ranks_the_same_trials_anew():
    ledger = [
        planted(1, batching=None, throughput=770, p95_s=0.004, source="no_batching"),
        planted(2, batching=BATCH_14, throughput=2300, p95_s=0.019),
        planted(3, batching=BATCH_8, throughput=1900, p95_s=0.009),
    ]
    assert recommend(ledger, scenario=SCENARIO).configuration.batching.max_batch_size == 14
    tight = recommend(ledger, scenario=SCENARIO, slo=SloSpec(p95_s=0.010))
    assert tight.configuration.batching.max_batch_size == 8
    assert tight.slo["p95"] == 0.010
    with pytest.raises(InconclusiveError, match="nearest: no batching, p95 4 ms misses 3 ms by 33 %"):
        recommend(ledger, scenario=SCENARIO, slo=SloSpec(p95_s=0.003))


def test_ties_go_to_the_larger_slo_margin_then_to_the_smaller_batch():
    alike = [
        planted(1, batching={"max_batch_size": 64}, throughput=2010, p95_s=0.010),
        planted(2, batching={"max_batch_size": 16}, throughput=2000, p95_s=0.010),
        planted(3, batching={"max_batch_size": 8}, throughput=2005, p95_s=0.020),
    ]
    assert recommend(alike, scenario=SCENARIO).configuration.batching.max_batch_size == 16


def test_a_capacity_for_another_slo_lies_between_the_rates_that_keep_it_and_that_miss_it():
    load = {"arrivals": "poisson"}
    scenario = scenario_of(load=load, objective="capacity", search=SEARCH)
    probes = tuple(
        Probe(rate_rps=rate, met=p95 <= 0.05, latency_s={"p95": p95}, error_ratio=0.0)
        for rate, p95 in ((2000.0, 0.048), (500.0, 0.01), (1000.0, 0.02), (2200.0, 0.09))
    )
    measured = planted(1, batching=BATCH_8, throughput=2000, p95_s=0.048)
    trial = replace(measured, probes=probes, objective=Estimate(value=2000.0, low=1900.0, high=2100.0))
    assert recommend([trial], scenario=scenario).throughput_rps.value == pytest.approx(2000)
    found = recommend([trial], scenario=scenario, slo=SloSpec(p95_s=0.025))
    assert 1000 < found.rate_rps < 2000


@pytest.mark.parametrize(
    ("rate", "helps", "why"),
    [
        (5000.0, "not distinguishable", "tried at a rate as low as no batching takes"),
        (420.0, "no", "meets the SLO"),
    ],
)
def test_a_rate_that_is_too_high_for_a_batch_does_not_show_that_batching_is_useless(rate, helps, why):
    scenario = scenario_of(load={"arrivals": "poisson"}, objective="capacity", search=SEARCH)

    def at(trial: Trial, rps: float) -> Trial:
        exactly = Estimate(value=rps, low=rps, high=rps)
        return replace(trial, rate_rps=rps, asked_rate_rps=rps, objective=exactly)

    alone = at(planted(1, batching=None, throughput=410, p95_s=0.02, source="no_batching"), 410.0)
    beyond = at(planted(2, batching=BATCH_8, throughput=400, p95_s=0.4), rate)
    found = recommend([alone, beyond], scenario=scenario)
    assert found.configuration.batching is None
    assert found.batching_helps == helps
    assert found.reason.startswith("no configuration with batching ")
    assert found.reason.endswith(why)


@pytest.mark.parametrize(
    ("batched", "words"), [("defaults", "none of your space was tried"), (None, "not known: none was tried")]
)
def test_that_no_batching_was_tried_is_not_said_where_the_defaults_were(batched, words):
    narrow = {**SEARCH, "space": {"max_batch_size": [1, 2]}}
    missed = [
        planted(1, batching=None, throughput=900, p95_s=0.09, source="no_batching"),
        planted(2, batching=batched, throughput=900, p95_s=0.09, source="defaults"),
    ]
    with pytest.raises(InconclusiveError, match=words):
        recommend(missed, scenario=scenario_of(search=narrow))


def test_a_search_in_which_all_failed_is_not_to_go_on():
    ledger = [
        planted(1, batching=None, throughput=440, p95_s=0.002, source="probe"),
        planted(2, throughput=1, p95_s=1, failure="no room"),
    ]
    with pytest.raises(InconclusiveError, match="1 trial failed; the last: no room") as raised:
        recommend(ledger, scenario=SCENARIO)
    assert "would fail again" in raised.value.hint


def test_alternatives_are_the_pareto_front_without_the_chosen_one():
    ledger = [
        planted(1, batching=BATCH_14, throughput=2300, p95_s=0.020),
        planted(2, batching=BATCH_8, throughput=2000, p95_s=0.010),
        planted(3, batching={"max_batch_size": 2}, throughput=1500, p95_s=0.012),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching.max_batch_size == 14
    assert [one.configuration.batching.max_batch_size for one in found.alternatives] == [8]
    assert found.alternatives[0].p95_ratio == pytest.approx(0.5)


def test_a_recommendation_survives_json():
    found = recommend(helping_ledger(), scenario=SCENARIO)
    assert Recommendation.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


def test_a_bound_of_p95_above_the_slo_has_nothing_to_spare():
    ledger = [planted(1, batching=BATCH_8, throughput=1900, p95_s=0.049)]
    (promise,) = recommend(ledger, scenario=SCENARIO).promises
    assert promise.value_s < promise.limit_s < promise.upper_bound_s
    assert promise.spare_ratio < 0


def test_a_lone_measurement_says_nothing_of_batching_nor_of_what_is_best():
    """As when a busy host has eaten the budget."""
    ledger = [planted(1, batching=None, throughput=700, p95_s=0.02, source="no_batching")]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.batching_helps == "not distinguishable"
    assert found.reason == "no configuration with batching was measured"
    assert found.near_best is None
    missing = planted(2, batching=BATCH_8, throughput=900, p95_s=0.09)
    tried = recommend([*ledger, missing], scenario=SCENARIO)
    assert (tried.batching_helps, tried.reason) == ("no", "no configuration with batching meets the SLO")


def test_drift_between_search_and_confirmation_widens_the_interval():
    def ledger(later: float):
        return [
            planted(1, batching=None, throughput=1000, p95_s=0.018, source="no_batching"),
            planted(2, batching=BATCH_8, throughput=2000, p95_s=0.018),
            *side_by_side((BATCH_8, 2000 * later, 0.018), (None, 1000 * later, 0.018), first=3),
        ]

    steady, slower = (recommend(ledger(later), scenario=SCENARIO).throughput_rps for later in (1.0, 0.7))
    assert slower.half_width_ratio > 2 * steady.half_width_ratio
    assert slower.high > 2000


def test_alternatives_are_not_praised_for_a_time_when_the_machine_was_faster():
    ledger = [
        planted(1, batching=BATCH_14, throughput=2300, p95_s=0.010),
        planted(2, batching=BATCH_8, throughput=2200, p95_s=0.011),
        *side_by_side((BATCH_14, 1500, 0.015), first=3),
    ]
    found = recommend(ledger, scenario=SCENARIO)
    assert found.configuration.batching.max_batch_size == 14
    assert found.alternatives == ()


def counted(times_s, *, batches=100):
    """A server's account: so many batches of each size, and their mean execution time."""
    return ServerActivity(
        duration_s=1.0,
        batches=batches * len(times_s),
        rows=batches * sum(times_s),
        mean_batch_rows=sum(times_s) / len(times_s),
        batches_by_rows=dict.fromkeys(times_s, batches),
        execution_s_by_rows=times_s,
    )


def no_help_ledger(server, **batching):
    return [
        planted(1, batching=None, throughput=1000, p95_s=0.018, source="no_batching"),
        planted(2, batching={**BATCH_8, **batching}, throughput=900, p95_s=0.018, server=server),
    ]


def test_a_time_proportional_to_the_rows_is_called_a_device_that_cannot_gain():
    proportional = counted({1: 0.001, 4: 0.004, 8: 0.0079})
    found = recommend(no_help_ledger(proportional), scenario=SCENARIO)
    assert found.batching_helps == "no"
    assert found.cannot_pay == (
        "batching cannot pay here: a batch of 8 rows takes 7.9 times as long as one of 1 row, so the device does no "
        "more rows in a second however they come"
    )


@pytest.mark.parametrize(
    "times_s",
    [
        {1: 0.001, 4: 0.004, 8: 0.0076},  # 8 rows at 0.95 ms each: a gain of 5.3 %
        {1: 0.001, 3: 0.003},  # too narrow a range of sizes
        {8: 0.008},
        {},
    ],
)
def test_a_device_that_gains_or_was_not_seen_enough_is_not_said_to_be_unable(times_s):
    server = counted(times_s) if times_s else None
    assert recommend(no_help_ledger(server), scenario=SCENARIO).cannot_pay is None


def test_sizes_seen_a_few_times_and_busier_threads_do_not_count_for_the_law():
    rare = counted({1: 0.001, 8: 0.008}, batches=4)
    assert recommend(no_help_ledger(rare), scenario=SCENARIO).cannot_pay is None
    contended = planted(
        3,
        batching={**BATCH_14, "num_batch_threads": 2},
        throughput=900,
        p95_s=0.018,
        server=counted({1: 0.001, 8: 0.008}),
    )
    lone = no_help_ledger(counted({1: 0.001, 8: 0.004}))
    assert recommend([*lone, contended], scenario=SCENARIO).cannot_pay is None


def test_batching_that_helps_is_not_said_to_be_unable_to():
    summary = SearchSummary(strategy="guided", cannot_pay="batching cannot pay here: says the twin")
    assert recommend(helping_ledger(), scenario=SCENARIO, search=summary).cannot_pay is None
    found = recommend(no_help_ledger(None), scenario=SCENARIO, search=summary)
    assert found.cannot_pay == "batching cannot pay here: says the twin"


def noisy_ledger(server):
    """Fresh runs of batching 15 % above and 12 % below no batching."""
    fresh = [(BATCH_8, 1150), (None, 1000), (None, 1010), (BATCH_8, 880), (BATCH_8, 1000), (None, 990)]
    return [
        *no_help_ledger(server),
        *(
            planted(
                3 + number,
                batching=batching,
                throughput=throughput,
                p95_s=0.018,
                source="confirm",
                block=1 + number // 2,
            )
            for number, (batching, throughput) in enumerate(fresh)
        ),
    ]


def test_noise_about_no_gain_is_an_answer_where_the_device_cannot_gain():
    found = recommend(noisy_ledger(None), scenario=SCENARIO)
    assert (found.batching_helps, found.established) == ("not distinguishable", False)
    unable = recommend(noisy_ledger(counted({1: 0.001, 4: 0.004, 8: 0.0079})), scenario=SCENARIO)
    assert unable.configuration.batching is None
    assert (unable.batching_helps, unable.established) == ("no", True)


def test_the_bound_of_a_fresh_run_is_held_against_each_limit():
    promised = SloSpec(p95_s=0.040, p99_s=0.050)
    found = recommend(helping_ledger(), scenario=SCENARIO, slo=promised)
    first, second = found.promises
    assert (first.name, first.limit_s) == ("p95", 0.040)
    assert first.value_s == found.latency_s["p95"].value
    assert first.upper_bound_s == found.latency_s["p95"].high
    assert second.spare_ratio == pytest.approx(1 - found.latency_s["p99"].high / 0.050)


def test_the_probability_of_the_search_counts_for_its_own_slo_and_leader_only():
    summary = SearchSummary(strategy="guided", near_best={LABEL_14: 0.9}, judged=30, space_size=30)
    found = recommend(helping_ledger(), scenario=SCENARIO, search=summary)
    assert (found.near_best.probability, found.near_best.of, found.near_best.count) == (0.9, "space", 30)
    other = recommend(helping_ledger(), scenario=SCENARIO, search=summary, slo=SloSpec(p95_s=0.040))
    assert (other.near_best.of, other.near_best.count) == ("measured", 4)


def test_the_probability_of_being_near_the_best_falls_as_a_rival_comes_near():
    """One rival r times better in the search, one run each, noise 3 % assumed with 4 degrees of freedom.

    The gap ln r + e with e of scale √2 · 0.03 must stay below -ln 0.95 = 0.0513: by Student's t with 4 degrees 0.853
    for r = 1 (t = 1.209), and 0.5 for r = 1 / 0.95.
    """

    def probability(ratio: float) -> float:
        ledger = [
            planted(1, batching=BATCH_8, throughput=2000, p95_s=0.02),
            planted(2, batching=BATCH_14, throughput=2000 * ratio, p95_s=0.02),
        ]
        first, *_ = pooled = pool(ledger, scenario=SCENARIO)
        return near_best_of_measured(first, pooled, scenario=SCENARIO).probability

    assert probability(1.0) == pytest.approx(0.853, abs=0.01)
    assert probability(1 / 0.95) == pytest.approx(0.5, abs=0.01)
    assert probability(0.5) == pytest.approx(1.0, abs=0.001)


def test_rivals_that_miss_the_slo_are_none():
    ledger = [
        planted(1, batching=BATCH_8, throughput=2000, p95_s=0.02),
        planted(2, batching=BATCH_14, throughput=4000, p95_s=0.06),
    ]
    first, *_ = pooled = pool(ledger, scenario=SCENARIO)
    assert near_best_of_measured(first, pooled, scenario=SCENARIO).probability == 1.0


def test_a_space_that_was_measured_whole_is_judged_whole():
    scenario = scenario_of(search={"budget": {"trials": 4}, "seed": 1, "space": {"max_batch_size": [4, 8]}})
    ledger = [
        replace(planted(n, batching={"max_batch_size": size}, throughput=100 * size, p95_s=0.01), point=point)
        for n, size in ((1, 4), (2, 8))
        for point in ({"max_batch_size": size},)
    ]
    assert recommend(ledger, scenario=scenario).near_best.of == "space"
    larger = scenario_of(search={"budget": {"trials": 4}, "seed": 1, "space": {"max_batch_size": [4, 8, 9]}})
    assert recommend(ledger, scenario=larger).near_best.of == "measured"


def test_noise_is_said_to_be_assumed_until_something_was_run_twice():
    once = recommend(helping_ledger()[:4], scenario=SCENARIO)
    assert (once.noise_ratio, once.noise_measured) == (pytest.approx(0.03), False)
    twice = recommend(helping_ledger(), scenario=SCENARIO)
    assert twice.noise_measured
    assert twice.noise_ratio < 0.03


def test_what_limits_the_recommended_configuration_is_judged_by_its_own_runs():
    waiting = replace(
        counted({3: 0.002}),
        close_reasons={"timeout": 80, "full": 20},
        queue_wait_mean_s=0.040,
        device_busy_ratio=0.2,
    )
    slow = {"max_batch_size": 64, "batch_timeout_micros": 50_000, "num_batch_threads": 1}
    trial = planted(1, batching=slow, throughput=300, p95_s=0.045, server=waiting)
    measured = replace(trial.measurement, latency_mean_s=0.043)
    found = recommend([replace(trial, measurement=measured)], scenario=SCENARIO)
    assert found.bottleneck.kind == "batch_timeout"
    assert "80 % of the batches waited out 50 ms" in found.bottleneck.text
    assert "lower batch_timeout_micros" in found.bottleneck.advice
    hasty = planted(2, batching={**slow, "batch_timeout_micros": 0}, throughput=150, p95_s=0.045)
    found = recommend([replace(trial, measurement=measured), hasty], scenario=SCENARIO)
    assert found.configuration == trial.configuration
    assert found.bottleneck.advice == "a lower batch_timeout_micros was tried, and is no better here"


def test_noise_of_the_host_is_a_caveat_and_no_limit_of_the_configuration():
    noisy = [
        replace(one, measurement=replace(one.measurement, caveats=(caveat("host_steal", steal_ratio=0.1),)))
        for one in helping_ledger()
    ]
    found = recommend(noisy, scenario=SCENARIO)
    assert [one.code for one in found.caveats] == ["host_steal"]
    assert found.bottleneck.kind != "host_noise"


def test_references_have_their_own_batches_limits_and_caveats():
    ledger = [
        planted(1, batching=None, throughput=770, p95_s=0.024, source="no_batching"),
        planted(2, throughput=1500, p95_s=0.012, source="defaults", server=counted({8: 0.005})),
        planted(3, batching=BATCH_14, throughput=2300, p95_s=0.009),
    ]
    ledger[0] = replace(
        ledger[0], measurement=replace(ledger[0].measurement, caveats=(caveat("not_steady"),))
    )
    off, defaults = recommend(ledger, scenario=SCENARIO).references
    assert (off.name, defaults.name) == ("no_batching", "defaults")
    assert (off.mean_batch_rows, defaults.mean_batch_rows) == (None, 8.0)
    assert [one.code for one in off.caveats] == ["not_steady"]
    assert defaults.caveats == ()


CAPACITY = scenario_of(load={"arrivals": "poisson"}, objective="capacity", search=SEARCH)


def rate_run(number, rate, p95_s, *, batching=BATCH_8, source="race"):
    trial = planted(number, batching=batching, throughput=rate, p95_s=p95_s, source=source, block=number)
    return replace(
        trial, rate_rps=rate, asked_rate_rps=rate, objective=Estimate(value=rate, low=rate, high=rate)
    )


@pytest.mark.parametrize("rates", [(980, 1030), (600, 980, 1030), (500, 700, 980, 1030, 1300)])
def test_the_interval_of_a_capacity_depends_on_where_the_limit_was_crossed_not_on_the_rates_asked(rates):
    trials = [rate_run(number, rate, 0.05 * (rate / 1000) ** 4) for number, rate in enumerate(rates, 1)]
    trials += [rate_run(10 + number, 970.0, 0.044, source="confirm") for number in range(3)]
    capacity = recommend(trials, scenario=CAPACITY).capacity_rps
    assert capacity.value == 970.0
    assert capacity.low == pytest.approx(930, rel=0.02)
    assert capacity.high == pytest.approx(1080, rel=0.02)
    assert math.log(capacity.high / capacity.low) < 0.2


def test_the_gain_over_a_reference_that_never_held_is_at_least_so_much():
    trials = [
        rate_run(1, 200.0, 0.08, batching=None, source="no_batching"),
        rate_run(2, 400.0, 0.9, batching=None, source="no_batching"),
        rate_run(3, 980.0, 0.046),
        rate_run(4, 1030.0, 0.056),
    ]
    chosen = recommend(trials, scenario=CAPACITY)
    gain = chosen.gain_over_no_batching
    assert chosen.references[0].capacity_rps is None
    assert gain.value == pytest.approx(0.9 * 0.97 * 1003 / 200.0, rel=0.01)
    assert gain.low < gain.value
    assert gain.high == math.inf


def test_the_gain_in_capacity_is_that_over_the_references_capacity_whatever_its_runs_answered():
    trials = [
        rate_run(1, 200.0, 0.02, batching=None, source="no_batching"),
        rate_run(2, 400.0, 0.9, batching=None, source="no_batching"),
        *(rate_run(number, 970.0, 0.044, source="confirm") for number in (3, 4, 5)),
        rate_run(6, 1030.0, 0.056),
    ]
    chosen = recommend(trials, scenario=CAPACITY)
    (reference,) = chosen.references
    assert 0.0 < reference.capacity_rps.low <= reference.capacity_rps.value < 400.0
    assert chosen.gain_over_no_batching.value == pytest.approx(
        chosen.capacity_rps.value / reference.capacity_rps.value
    )
    rate = recommend(helping_ledger(), scenario=SCENARIO)
    assert all(point.capacity_rps is None for point in rate.references)


def test_a_recommendation_with_all_it_can_say_survives_json():
    summary = SearchSummary(strategy="guided", trust="off", twin={"draws": []}, twin_error={"p95": math.inf})
    found = recommend(no_help_ledger(counted({1: 0.001, 8: 0.008})), scenario=SCENARIO, search=summary)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Recommendation.from_dict(document) == found
    assert document["search"]["twin"] is None
    assert document["label"] == "no batching"
    assert set(document) == {each.name for each in fields(found)} | {"schema_version", "label"}


def test_a_recommendation_kept_by_an_earlier_version_can_still_be_read():
    document = recommend(helping_ledger(), scenario=SCENARIO).to_dict()
    later = ("promises", "near_best", "bottleneck", "search", "noise_ratio", "cannot_pay", "capacity_rps")
    earlier = {name: value for name, value in document.items() if name not in later}
    found = Recommendation.from_dict({**earlier, "schema_version": 1})
    assert found.configuration.batching.max_batch_size == 14
    assert found.bottleneck is None
    with pytest.raises(ValueError, match="schema_version 3 where 2 is read"):
        Recommendation.from_dict({**document, "schema_version": 3})


@pytest.mark.parametrize(
    ("budget", "words"),
    [({"time": "30s"}, "no time was left to confirm it"), ({"time": "300s"}, "it was not confirmed")],
)
def test_want_of_time_is_named_only_where_it_was_the_reason(budget, words):
    sooner = planted(99, batching={**BATCH_8, "num_batch_threads": 2}, throughput=2310, p95_s=0.004)
    search = {**SEARCH, "budget": budget}
    found = recommend([*helping_ledger(), sooner], scenario=scenario_of(search=search))
    assert any(note.endswith(words) for note in found.notes)
