"""Recommendations on planted ledgers."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from tune_fakes import planted, scenario_of

from batchtune.errors import NoFeasibleConfigurationError
from batchtune.measure.quantiles import Estimate
from batchtune.recommend import Recommendation, recommend
from batchtune.scenario.spec import SloSpec
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.trial import Probe

SCENARIO = scenario_of()
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
    assert "13.6 rows on average, 87% close because they are full" in found.reason
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
    assert found.configuration.batching is not None
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
    ]
    with pytest.raises(NoFeasibleConfigurationError) as caught:
        recommend(ledger, scenario=SCENARIO)
    assert caught.value.exit_code == 3
    assert "max_batch_size=8" in caught.value.message
    assert "p95 57.5 ms misses 50 ms by 15%" in caught.value.message
    assert "p95 ≤ 50 ms" in caught.value.message


def test_a_distant_miss_is_told_as_a_multiple():
    ledger = [planted(1, batching=BATCH_8, throughput=1500, p95_s=0.76)]
    with pytest.raises(NoFeasibleConfigurationError, match=r"p95 760 ms is 15\.2 × 50 ms"):
        recommend(ledger, scenario=SCENARIO)


def test_errors_above_the_limit_make_a_configuration_infeasible():
    ledger = [planted(1, batching=BATCH_8, throughput=1500, p95_s=0.02, error_ratio=0.031)]
    with pytest.raises(NoFeasibleConfigurationError, match=r"3\.10% of requests fail where 1\.00% may"):
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
    with pytest.raises(NoFeasibleConfigurationError, match="all 2 trials failed; the last: reason 2"):
        recommend(ledger, scenario=SCENARIO)
    with pytest.raises(NoFeasibleConfigurationError, match="no trial is finished"):
        recommend([], scenario=SCENARIO)


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
    with pytest.raises(
        NoFeasibleConfigurationError, match="nearest: no batching, p95 4 ms misses 3 ms by 33%"
    ):
        recommend(ledger, scenario=SCENARIO, slo=SloSpec(p95_s=0.003))


def test_ties_go_to_the_larger_slo_margin_then_to_the_smaller_batch():
    alike = [
        planted(1, batching={"max_batch_size": 64}, throughput=2010, p95_s=0.010),
        planted(2, batching={"max_batch_size": 16}, throughput=2000, p95_s=0.010),
        planted(3, batching={"max_batch_size": 8}, throughput=2005, p95_s=0.020),
    ]
    assert recommend(alike, scenario=SCENARIO).configuration.batching.max_batch_size == 16


def test_a_capacity_for_another_slo_is_the_highest_rate_tried_that_meets_it():
    load = {"arrivals": "poisson"}
    scenario = scenario_of(load=load, objective="capacity")
    probes = tuple(
        Probe(rate_rps=rate, met=p95 <= 0.05, latency_s={"p95": p95}, error_ratio=0.0)
        for rate, p95 in ((2000.0, 0.048), (500.0, 0.01), (1000.0, 0.02), (2200.0, 0.09))
    )
    measured = planted(1, throughput=2000, p95_s=0.048)
    trial = replace(measured, probes=probes, objective=Estimate(value=2000.0, low=1900.0, high=2100.0))
    assert recommend([trial], scenario=scenario).throughput_rps.value == pytest.approx(2000)
    found = recommend([trial], scenario=scenario, slo=SloSpec(p95_s=0.025))
    assert found.rate_rps == pytest.approx(1000)
    assert any("highest rate tried" in note for note in found.notes)


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


def test_a_bound_of_p95_above_the_slo_is_noted():
    ledger = [planted(1, batching=BATCH_8, throughput=1900, p95_s=0.049)]
    notes = recommend(ledger, scenario=SCENARIO).notes
    assert any("a fresh run's p95 may reach" in note and "above the SLO's 50 ms" in note for note in notes)


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
