"""What a recommendation says on a terminal without colour, sentence by sentence."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest

from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.measure.validity.caveats import caveat
from batchtune.recommend.alternatives import Alternative
from batchtune.recommend.near_best import NearBest
from batchtune.recommend.prediction import Promise
from batchtune.recommend.recommendation import Recommendation, recommend
from batchtune.report.statement import print_recommendation
from batchtune.report.tables import paragraph
from batchtune.tune.trials.search_summary import SearchSummary
from tests.recommend.test_recommendation import BATCH_8, BATCH_14, LABEL_14, SCENARIO, helping_ledger
from tests.tune.tune_fakes import planted, scenario_of

pytestmark = pytest.mark.smoke

GUIDED = SearchSummary(
    strategy="guided",
    stop_reason="all survivors lie within 5 % of each other",
    space_size=30,
    twin={"draws": [1, 2, 3]},
    trust="leads",
    trust_reason="trials left out of the fit are predicted within p95 9 % (median): the twin leads the search",
    twin_error={"p95": 0.09, "throughput": 0.04, "spearman": 0.9},
    near_best={LABEL_14: 0.943},
    judged=30,
    proposals={"twin": 4, "sampler": 1},
    noise_ratio=0.028,
    seconds_by_phase={"calibration": 8.0, "race": 6.0, "confirmation": 12.0},
)
DEPLOYMENT = (
    "batchtune-model-server --model_base_path=PATH/fake --enable_batching --batching_parameters_file=FILE"
)

GOLDEN = """\
fake by gRPC, 1 row per request, 16 clients in a closed loop; SLO p95 ≤ 50 ms;
  objective throughput

Recommended
  max_batch_size             14
  batch_timeout_micros       2000
  num_batch_threads          1


                     recommended a        no batching a      server defaults a
 ─────────────────────────────────────────────────────────────────────────────
 requests/s   2,220 [1,970, 2,490]       769 [685, 863]   1,500 [1,330, 1,680]
 p50 ms          5.61 [4.67, 6.75]    14.4 [12.0, 17.4]    7.20 [5.98, 8.67] b
 p95 ms          9.35 [7.78, 11.3]    24.0 [20.0, 28.9]    12.0 [9.97, 14.4] b
 p99 ms          12.2 [10.1, 14.6]    31.3 [26.0, 37.6]    15.6 [13.0, 18.8] b
 mean batch                   13.6                    –                      –
 limited by                   none                 none                   none
 gain over                           ×2.88 [2.79, 2.98]     ×1.48 [1.43, 1.53]

Batching helps here: a batch of 14 rows takes 6.1 ms where 14 rows one by one
  take 18.2 ms; batches hold 13.6 rows on average, 87 % close because they are
  full: batching is worth 2.88× no batching (2.79 to 2.98).
SLO: p95 9.35 ms a, in a fresh run at most 11.3 ms of 50 ms allowed (77 % to
  spare).
Limit: none was seen, the server tells nothing of itself. Advice: measure with
  more clients to find what limits it.

How sure: 13 trials in 26 s; the figures rest on 3 fresh runs, made after the
  choice, and hold at 95 % for another fresh run. Runs of one configuration
  differ by 2.80 % (standard deviation). The twin made 4 of 5 proposals.
Nothing better by 5 % or more is likely (94 %) among the 30 points of the space.
Established: fresh runs kept the SLO, and whether batching helps is known.

a  the device is emulated by its service time — judge the tool by this, not a
   model or a device
b  (server defaults) 1000 requests, not all independent of each other, give no
   upper bound of p99 — measure for longer
Deploy: batchtune-model-server --model_base_path=PATH/fake --enable_batching --batching_parameters_file=FILE
"""


def emulated(ledger):
    """The ledger with caveats: all trials on an emulated device, those of the defaults with too few requests."""
    defaults = next(one.configuration for one in ledger if one.source == "defaults")
    few = caveat("few_requests", requests=1000, quantile="p99")
    for trial in ledger:
        found = (caveat("emulated_device"), *((few,) if trial.configuration == defaults else ()))
        yield replace(trial, measurement=replace(trial.measurement, caveats=found))


def printed(chosen: Recommendation, scenario=SCENARIO) -> str:
    stream = io.StringIO()
    print_recommendation(chosen, scenario=scenario, deployment=DEPLOYMENT, stream=stream)
    return stream.getvalue()


def said(chosen: Recommendation, scenario=SCENARIO) -> str:
    """As printed, with lines joined."""
    return re.sub(r"\s+", " ", printed(chosen, scenario))


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(helping_ledger(), scenario=SCENARIO)


def test_the_whole_statement_reads_so_at_80_columns_without_colour():
    text = printed(recommend(list(emulated(helping_ledger())), scenario=SCENARIO, search=GUIDED))
    assert "\n".join(line.rstrip() for line in text.splitlines()) + "\n" == GOLDEN
    *body, deployment = GOLDEN.splitlines()
    assert max(map(len, body)) <= 80
    assert deployment.startswith("Deploy: ")


def test_the_upper_bound_of_every_limit_is_held_against_it(found):
    promise = Promise(name="p99", limit_s=0.040, value_s=0.030, upper_bound_s=0.032)
    text = said(replace(found, promises=(*found.promises, promise)))
    assert "SLO: p99 30 ms, in a fresh run at most 32 ms of 40 ms allowed (20 % to spare)." in text


def test_a_bound_above_its_limit_is_said_to_be_a_possible_miss(found):
    promise = Promise(name="p95", limit_s=0.050, value_s=0.049, upper_bound_s=0.0563)
    text = said(replace(found, promises=(promise,), established=False))
    assert "p95 49 ms, in a fresh run at most 56.3 ms: above the 50 ms allowed, so it may be missed." in text


def test_a_capacity_stands_first_with_its_interval(found):
    capacity = Estimate(value=1420.0, low=1390.0, high=1490.0)
    text = said(replace(found, capacity_rps=capacity))
    assert "capacity /s 1,420 [1,390, 1,490]" in text
    assert "capacity" not in said(found)


def with_capacities(chosen: Recommendation, *capacities: Estimate | None) -> Recommendation:
    """A capacity of 1,420 beside those of the references, whose runs answered something else."""
    references = (
        replace(reference, capacity_rps=capacity)
        for reference, capacity in zip(chosen.references, capacities, strict=True)
    )
    capacity = Estimate(value=1420.0, low=1390.0, high=1490.0)
    return replace(chosen, objective="capacity", capacity_rps=capacity, references=tuple(references))


def test_a_capacity_stands_beside_those_of_the_references_never_beside_what_runs_answered(found):
    known = Estimate(value=473.0, low=460.0, high=490.0)
    at_least = Estimate(value=950.0, low=930.0, high=math.inf)
    row = "capacity /s 1,420 [1,390, 1,490]"
    assert f"{row} 473 [460, 490] at least 950" in said(with_capacities(found, known, at_least))
    assert f"{row} 473 [460, 490] – p50" in said(with_capacities(found, known, None))


def test_what_speaks_against_a_latency_speaks_against_the_capacity_that_it_limits(found):
    few = caveat("few_requests", requests=9, quantile="p99")
    touching = replace(found, caveats=(few,), references=())
    assert "capacity /s 1,420 [1,390, 1,490] a" in said(with_capacities(touching))
    assert "requests/s 2,220 [1,970, 2,490] p50" in said(touching)


def test_what_was_only_measured_claims_nothing_of_the_rest_of_the_space(found):
    near = NearBest(probability=0.875, of="measured", count=12)
    text = said(replace(found, near_best=near))
    assert "Nothing better by 5 % or more is likely (88 %) among the 12 configurations measured" in text
    assert "the rest of the space is not judged" in text


@pytest.mark.parametrize(
    ("probability", "words"),
    [
        (1.0, "Nothing better by 5 % or more is likely (over 99 %) among the 30 points of the space."),
        (0.02, "Better points may exist: +5 % or more is likely (98 %) among the 30 points of the space."),
        (
            0.0,
            "Better points may exist: +5 % or more is likely (over 99 %) among the 30 points of the space.",
        ),
    ],
)
def test_of_what_may_be_better_the_likelier_is_said(found, probability, words):
    assert words in said(replace(found, near_best=NearBest(probability=probability, of="space", count=30)))


def test_of_a_large_space_the_points_that_were_looked_at_are_counted(found):
    near = NearBest(probability=0.9, of="space", count=1500, space_size=20_000)
    assert "among the 1500 of 20,000 points that were looked at." in said(replace(found, near_best=near))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "The twin made 4 of 5 proposals."),
        ({"trust": "off"}, "The twin made 4 of 5 proposals; in the end it was switched off."),
        ({"proposals": {}, "trust": "shares"}, "In the end the twin shared the search with the sampler."),
        ({"trust": None}, "No twin took part (strategy guided)."),
    ],
)
def test_what_the_twin_did_is_told_of_the_whole_search(found, changes, words):
    assert words in said(replace(found, search=replace(GUIDED, **changes)))


def test_what_is_open_is_told_with_what_would_settle_it(found):
    stream = io.StringIO()
    unknown = replace(found, established=False, open_questions=("no fresh run confirms it",))
    step = "batchtune sweep s.yaml --resume RUN --set search.budget.time=60s"
    print_recommendation(unknown, scenario=SCENARIO, deployment=None, next_step=step, stream=stream)
    text = " ".join(stream.getvalue().split())
    assert f"Not established: no fresh run confirms it. To establish it: {step}" in text
    assert "Deploy" not in text


@pytest.mark.parametrize(
    ("other", "batching", "words"),
    [
        ("no_batching", None, "Recommended: no batching: what was tuned cannot be told from it"),
        ("no_batching", BATCH_8, "Recommended, so far not to be told from no batching"),
        ("defaults", {}, "Recommended: the server's defaults: what was tuned cannot be told from them"),
    ],
)
def test_the_first_line_says_from_what_it_cannot_be_told(found, other, batching, words):
    configuration = planted(1, batching=batching, throughput=1, p95_s=1).configuration
    assert words in said(replace(found, configuration=configuration, indistinct_from=other))


def test_a_gain_without_an_upper_end_is_at_least_so_much(found):
    gain = Estimate(value=5.0, low=4.5, high=math.inf)
    assert "at least ×5.00" in said(replace(found, gain_over_no_batching=gain))


def test_an_assumed_noise_floor_says_so(found):
    text = said(replace(found, noise_ratio=0.03, noise_measured=False))
    assert "differ by 3.00 % (standard deviation, assumed: too few were repeated)." in text
    assert "assumed" not in said(replace(found, noise_ratio=0.03, noise_measured=True))


def test_repeated_trials_are_counted(found):
    twice = said(replace(found, search=replace(GUIDED, repeated_trials=2)))
    assert "2 trials were repeated because of a noisy host or a slow client." in twice
    assert "repeated because" not in said(replace(found, search=GUIDED))


def test_what_limits_it_is_told_with_its_evidence_and_one_advice(found):
    limit = Bottleneck(
        kind="batch_timeout",
        text="80 % of the batches waited out 50 ms",
        advice="lower batch_timeout_micros",
        evidence={},
    )
    text = said(replace(found, bottleneck=limit))
    assert (
        "Limit: the batch timeout, 80 % of the batches waited out 50 ms. Advice: lower batch_timeout_micros."
        in text
    )
    assert "limited by batch timeout none none" in text


def test_batching_that_cannot_pay_is_told_in_a_sentence_of_its_own(found):
    chosen = replace(
        found, batching_helps="no", cannot_pay="batching cannot pay here: τ(b) is proportional to b"
    )
    text = said(chosen)
    assert "Batching does not help here: " in text
    assert "Batching cannot pay here: τ(b) is proportional to b." in text


def test_alternatives_are_told_as_trades():
    ledger = [
        planted(1, batching=BATCH_14, throughput=2300, p95_s=0.020),
        planted(2, batching=BATCH_8, throughput=2024, p95_s=0.014),
    ]
    text = said(recommend(ledger, scenario=SCENARIO))
    assert "12 % less throughput buys 30 % lower p95 (by the search alone)." in text


@pytest.mark.parametrize(
    ("throughput_ratio", "p95_ratio", "words"),
    [
        (0.88, 0.7, "12 % less throughput buys 30 % lower p95"),
        (1.12, 1.3, "30 % higher p95 buys 12 % more throughput"),
        (1.12, 0.7, "12 % more throughput and 30 % lower p95"),
        (1.004, 0.7, "30 % lower p95 at the same throughput"),
        (1.12, 0.996, "12 % more throughput at the same p95"),
    ],
)
def test_every_kind_of_trade_has_its_words(found, throughput_ratio, p95_ratio, words):
    one = Alternative(
        configuration=found.configuration,
        throughput_rps=1.0,
        p95_s=1.0,
        throughput_ratio=throughput_ratio,
        p95_ratio=p95_ratio,
        confirmations=3,
    )
    assert one.trade == words
    assert f"{words}. " in said(replace(found, alternatives=(one,)))


def test_a_figure_that_was_not_confirmed_is_not_said_to_rest_on_fresh_runs():
    text = said(recommend(helping_ledger()[:4], scenario=SCENARIO))
    assert "How sure: 4 trials in 8 s." in text
    assert "not confirmed by fresh runs: the figures are from 1 run of the search" in text
    assert "made after the choice" not in text


def test_an_open_loop_is_named_by_its_arrivals():
    scenario = scenario_of(load={"arrivals": "poisson", "rate": "500/s"}, objective="latency")
    trial = planted(1, batching=BATCH_8, throughput=500, p95_s=0.01, objective="latency")
    measured = replace(trial.measurement, concurrency=None, offered_rps=500.0)
    chosen = recommend([replace(trial, concurrency=None, measurement=measured)], scenario=scenario)
    assert "poisson arrivals at 500/s; SLO p95 ≤ 50 ms; objective latency" in said(chosen, scenario)


def test_a_number_stays_with_its_unit_and_long_words_whole():
    text = paragraph("takes 6.1 ms and 15 % of averyveryverylongword", width=10)
    assert text.splitlines() == ["takes", "  6.1 ms", "  and 15 %", "  of", "  averyveryverylongword"]


def test_an_established_promise_without_room_for_single_runs_is_one_of_their_mean(found):
    promise = Promise(name="p95", limit_s=0.050, value_s=0.049, upper_bound_s=0.0563)
    text = said(replace(found, promises=(promise,), established=True))
    words = (
        "SLO: p95 49 ms; single runs may reach 56.3 ms of 50 ms allowed, the mean of the fresh runs keeps it."
    )
    assert words in text
    unknown = replace(promise, upper_bound_s=math.inf)
    assert "how high it comes in a fresh run is not known" in said(replace(found, promises=(unknown,)))


def test_a_reference_that_failed_is_told_from_one_that_was_not_tried():
    ledger = helping_ledger()
    defaults = next(trial.configuration for trial in ledger if trial.source == "defaults")
    others = [trial for trial in ledger if trial.configuration != defaults]
    assert "Server defaults: not measured." in said(recommend(others, scenario=SCENARIO))
    failed = planted(99, throughput=1, p95_s=1, source="defaults", failure="OOM when allocating")
    text = said(recommend([*others, failed], scenario=SCENARIO))
    assert "Server defaults: failed when it was tried (OOM when allocating" in text


@pytest.mark.parametrize(
    ("batching", "words"),
    [
        (None, "Recommended: no batching: nothing that was tuned is worth its parameters"),
        (BATCH_8, "Recommended, hardly better than no batching"),
    ],
)
def test_a_sure_but_small_gain_is_not_said_to_be_untold(found, batching, words):
    configuration = planted(1, batching=batching, throughput=1, p95_s=1).configuration
    text = said(replace(found, configuration=configuration, little_better_than="no_batching"))
    assert words in text
    assert "to be told from" not in text
    assert "cannot be told" not in text


@pytest.mark.parametrize(("high", "shown"), [(1490.0, "below 1,490"), (math.inf, "not known")])
def test_a_capacity_without_a_promise_is_never_below_infinity(found, high, shown):
    capacity = Estimate(value=1420.0, low=1390.0, high=high)
    assert f"capacity /s {shown} " in said(replace(found, capacity_rps=capacity, promises=()))


def test_a_capacity_that_fresh_runs_refuted_stands_in_one_figure(found):
    capacity = Estimate(value=18_800.0, low=18_000.0, high=18_900.0)
    rate = Estimate(value=19_000.0, low=17_000.0, high=21_000.0)
    text = said(replace(found, capacity_rps=capacity, throughput_rps=rate, promises=()))
    assert "capacity /s below 18,900" in text
    assert "19,000" not in text


def test_a_capacity_that_nothing_missed_is_at_least_so_much(found):
    capacity = Estimate(value=1420.0, low=1390.0, high=math.inf)
    assert "capacity /s at least 1,420" in said(replace(found, capacity_rps=capacity))
