"""What the short answer says: what to use, what is gained, the SLO, why, what limits, how sure, what next."""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration, from_dict
from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import as_text, coded
from batchtune.report.answer_words import capacity_text, gain_text, met_text, model_sentences, why_sentence
from batchtune.report.findings import advice_of
from batchtune.report.recommendation_text import print_answer
from batchtune.report.words import bottleneck_sentence, capitalised, sentence
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Alone, Capacity, ModelResult, OpenQuestion, Recommendation
from batchtune.tune.trials.trial import Trial
from tests.tune.answer.ledgers import (
    BATCH_14,
    BUSY,
    CAPACITY,
    SCENARIO,
    SEARCH,
    at_rate,
    capacity_ledger,
    helping_ledger,
    loop,
)
from tests.tune.tune_fakes import asked, planted, scenario_of

pytestmark = pytest.mark.smoke

P95_20 = SloSpec.model_validate({"p95": "20ms"})

DEPLOYMENT = "batchtune-model-server --model_base_path=PATH/fake --batching_parameters_file=FILE"
GOLDEN = """\
fake by gRPC, 1 row per request, 16 clients
Recommended max_batch_size 14, batch_timeout_micros 2000, num_batch_threads 1
Gain        ×2.90 [2.80, 3.00] throughput over no batching. ×1.49 [1.44, 1.54]
            throughput over the server's defaults. Gains compare these runs on
            this host; at another time they may differ.
            2,210-2,250 requests/s, p95 9.21-9.39 ms in 3 confirmation runs.
                              requests/s     p95 ms  runs  gain [least, most]
            recommended      2,210-2,250  9.21-9.39     3
            no batching          762-778  23.8-24.2     3  ×2.90 [2.80, 3.00]
            server defaults  1,480-1,520  11.9-12.1     3  ×1.49 [1.44, 1.54]
            server defaults: size 1000 · 0 µs · queue 10 · threads one per CPU.
SLO         p95 ≤ 50 ms: met in 3 of 3 confirmation runs (worst 9.39 ms, 81.2 %
            to spare).
Why         Batching helps: in a typical run batches contain 13.6 rows and take
            6.05 ms; as many rows one by one take 17.7 ms; 87.2 % of the batches
            close because they are full: batching is worth ×2.90 [2.80, 3.00].
Bottleneck  The device; batch threads execute 99.1 % of the time. Use a faster
            device, a smaller model or more replicas; larger batches would save
            little.
Confidence  Confirmed: 3 of 3 confirmation runs met the SLO, and no other
            configuration tried gains more than 10 %.
Next        deploy   batchtune-model-server --model_base_path=PATH/fake --batching_parameters_file=FILE
            explain  batchtune recommend RUN --why
"""
GOLDEN_CAPACITY = """\
fake by gRPC, 1 row per request, poisson arrivals
Recommended max_batch_size 14, batch_timeout_micros 2000, num_batch_threads 1
Gain        ×3.53 [2.86, 4.37] capacity over no batching. ×1.83 [1.54, 2.18]
            capacity over the server's defaults. Gains compare these runs on
            this host; at another time they may differ.
            Capacity 2,000/s: met in 3 of 3 confirmation runs (p95
            38.0-39.2 ms); the limit is about 2,280/s; the lowest rate that a
            run missed is 2,250/s.
                             met /s  limit below /s     p95 ms  runs  gain [least, most]
            recommended       2,000     about 2,280  38.0-39.2     3
            no batching        ~522             700       30.0     1  ×3.53 [2.86, 4.37]
            server defaults  ~1,040           1,300       30.0     1  ×1.83 [1.54, 2.18]
            server defaults: size 1000 · 0 µs · queue 10 · threads one per CPU.
            ~ is expected to be met: a share of a rate that was tried.
"""


def printed(chosen: Recommendation, *, scenario: Scenario = SCENARIO, **options: str) -> str:
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_answer(chosen, scenario=scenario, deployment=DEPLOYMENT, **options)
    return stream.getvalue()


def said(chosen: Recommendation, **options: str) -> str:
    """As printed, with lines joined."""
    return re.sub(r"\s+", " ", printed(chosen, **options))


@pytest.fixture(scope="module")
def chosen() -> Recommendation:
    return replace(recommend(helping_ledger(), scenario=SCENARIO), may_find_more=False)


@pytest.fixture(scope="module")
def capacity() -> Recommendation:
    return recommend(capacity_ledger(), scenario=CAPACITY)


def test_the_whole_answer_reads_so_at_80_columns(chosen: Recommendation) -> None:
    assert printed(chosen, why="batchtune recommend RUN --why") == GOLDEN


def test_a_capacity_is_told_with_the_runs_that_held_it_and_the_rate_missed(capacity: Recommendation) -> None:
    assert printed(capacity, scenario=CAPACITY).startswith(GOLDEN_CAPACITY)


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (
            Capacity(held_rps=84_600, missed_rps=99_600, held=3, missed=0, confirmed=True),
            "capacity 84,600/s: met in 3 of 3 confirmation runs; missed at 99,600/s",
        ),
        (
            Capacity(held_rps=84_600, missed_rps=99_600, held=3, missed=0, confirmed=True, missed_higher=1),
            ("capacity 84,600/s: met in 3 of 4 confirmation runs at this rate or more; missed at 99,600/s"),
        ),
        (
            Capacity(
                held_rps=1_380,
                missed_rps=2_100,
                held=2,
                missed=0,
                confirmed=False,
                search_rps=1_590,
                missed_higher=2,
            ),
            (
                "capacity 1,380/s is 86.8 % of about 1,590/s, which runs met; 2 of 4 confirmation runs at it or more met "
                "the SLO; missed at 2,100/s"
            ),
        ),
        (
            Capacity(
                held_rps=36_500,
                missed_rps=49_300,
                held=0,
                missed=0,
                confirmed=False,
                is_bound=True,
                search_rps=42_000,
                doubtful_rps=39_900,
                missed_higher=2,
                fell_behind=2,
            ),
            (
                "capacity 36,500/s is 86.9 % of about 42,000/s, which most runs met; in 2 confirmation runs the server "
                "did not keep up with the rate; the limit is about 49,300/s; the lowest rate that a run missed is "
                "39,900/s"
            ),
        ),
        (
            Capacity(held_rps=84_600, missed_rps=96_444, held=3, missed=0, confirmed=True, is_bound=True),
            "capacity 84,600/s: met in 3 of 3 confirmation runs; the limit is about 96,400/s",
        ),
        (
            Capacity(held_rps=223.4, missed_rps=254.7, held=3, missed=0, confirmed=True, crossing_rps=239.6),
            (
                "capacity about 240/s, where its latencies cross the limit; 223/s: met in 3 of 3 confirmation runs; "
                "missed at 255/s"
            ),
        ),
        (
            Capacity(held_rps=84_600, missed_rps=None, held=1, missed=0, confirmed=False),
            "capacity 84,600/s: met in 1 of 1 confirmation run; no rate that misses the SLO was found",
        ),
        (
            Capacity(held_rps=84_600, missed_rps=None, held=0, missed=0, confirmed=False),
            "capacity 84,600/s by the search alone; no rate that misses the SLO was found",
        ),
        (
            Capacity(held_rps=90.0, missed_rps=None, held=0, missed=0, confirmed=False, search_rps=100.0),
            "capacity 90/s is 90 % of about 100/s, which runs met; no rate that misses the SLO was found",
        ),
        (
            Capacity(
                held_rps=36.54,
                missed_rps=53.5,
                held=0,
                missed=0,
                confirmed=False,
                is_bound=True,
                disputed_rps=47.77,
                is_disputed_end=True,
            ),
            (
                "capacity 36.5/s is 76.5 % of about 47.8/s, the lowest rate missed: no rate was met more often than "
                "missed; the limit is about 53.5/s"
            ),
        ),
        (
            Capacity(held_rps=90.0, missed_rps=None, held=2, missed=1, confirmed=False, search_rps=100.0),
            (
                "capacity 90/s is 90 % of about 100/s, which runs met; 2 of 3 confirmation runs at it or more met "
                "the SLO; no rate that misses the SLO was found"
            ),
        ),
        (
            Capacity(held_rps=84_600, missed_rps=90_000, held=0, missed=0, confirmed=False, by_loops=True),
            "capacity 84,600/s by closed loops alone; missed at 90,000/s",
        ),
    ],
)
def test_a_capacity_says_what_it_rests_on(capacity: Capacity, words: str) -> None:
    assert capacity_text(capacity) == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.8, 2.45, "×2.10 [1.80, 2.45]"),
        (0.9, 1.2, "no measurable difference"),
        (1.0, 1.3, "no measurable difference"),
        (0.7, 0.9, "×0.794 [0.700, 0.900]"),
        (9.0, float("inf"), "at least ×9"),
        (0.9, float("inf"), "–"),
    ],
)
def test_a_gain_in_words(low: float, high: float, words: str) -> None:
    value = low if high == float("inf") else (low * high) ** 0.5
    assert gain_text(Estimate(value=value, low=low, high=high)) == words


def test_the_first_gain_is_that_over_what_runs_now(chosen: Recommendation) -> None:
    present = replace(chosen.references[1], names=("present", "defaults"))
    now = replace(chosen, references=(present, chosen.references[0]))
    assert "Gain ×1.49 [1.44, 1.54] throughput over what runs now. Gains compare" in said(now)
    assert "Gain None: this is what runs now." in said(
        replace(
            chosen, names=("present",), references=(replace(present, configuration=chosen.configuration),)
        )
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gain": Estimate(value=1.05, low=0.9, high=1.2)},
            "No measurable difference from the server's defaults.",
        ),
        ({"open": True}, "Whether it is better than the server's defaults is open."),
        ({"gain": None}, "Whether it is better than the server's defaults is open."),
        (
            {"gain": Estimate(value=1.1, low=0.0, high=1.3)},
            "The gain over the server's defaults is not known: `batchtune compare`, with both as variants, measures it.",
        ),
        ({"keeps": False, "met": 0}, "The server's defaults miss the SLO."),
    ],
)
def test_what_is_said_of_a_reference(chosen: Recommendation, changes: dict[str, object], words: str) -> None:
    reference = replace(chosen.references[1], **changes)  # type: ignore[arg-type]
    assert words in said(replace(chosen, references=(reference,)))


def test_a_timeout_that_a_lost_client_makes_every_batch_wait_for_is_warned_of(chosen: Recommendation) -> None:
    all_clients = Configuration(batching=from_dict({"max_batch_size": 16, "batch_timeout_micros": 2000}))
    words = "With fewer than 16 clients each batch waits for its timeout, 2 ms."
    assert words in said(replace(chosen, configuration=all_clients))
    assert "each batch waits" not in said(chosen)


def test_what_a_gain_stands_for_is_said_once_where_one_is_stated(chosen: Recommendation) -> None:
    stands_for = "Gains compare these runs on this host; at another time they may differ."
    assert said(chosen).count(stands_for) == 1
    unknown = [replace(reference, gain=None) for reference in chosen.references]
    assert stands_for not in said(replace(chosen, references=tuple(unknown)))


def test_why_a_gain_is_open_is_said_where_the_host_was_disturbed(chosen: Recommendation) -> None:
    busy = (caveat("host_busy", foreign_ratio=0.77),)
    reference = replace(chosen.references[1], gain=None, caveats=busy)
    words = "Whether it is better than the server's defaults is open, since the host was disturbed."
    assert words in said(replace(chosen, references=(reference,)))


def test_a_reference_that_held_no_rate_is_beaten_by_at_least_so_much(capacity: Recommendation) -> None:
    none = Capacity(held_rps=0.0, missed_rps=700.0, held=0, missed=2, confirmed=False)
    gain = Estimate(value=2.86, low=2.86, high=float("inf"))
    reference = replace(capacity.references[0], capacity=none, keeps=False, gain=gain)
    text = said(replace(capacity, references=(reference,)), scenario=CAPACITY)
    assert "At least ×2.86 capacity over no batching. No rate tried met the SLO without batching." in text
    assert "no batching none 700 30.0 (missed) 1 at least ×2.86" in text


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (OpenQuestion(code="no_run"), "no run at a fixed rate met the SLO, only closed loops did"),
        (OpenQuestion(code="unconfirmed"), "no confirmation run was made"),
        (OpenQuestion(code="unconfirmed", held=1), "only 1 confirmation run met the SLO, 3 are needed"),
        (OpenQuestion(code="unconfirmed", held=2, missed=1), "only 2 of 3 confirmation runs met the SLO"),
        (
            OpenQuestion(code="unsteady", high=3.27),
            "its confirmation runs differ, the best and the worst by ×3.27",
        ),
        (OpenQuestion(code="wide", high=1.4), "its capacity may be up to ×1.4 of what is stated"),
        (OpenQuestion(code="wide"), "no rate that misses the SLO was found, so it may serve more"),
        (
            OpenQuestion(code="rivals", labels=("a", "b"), high=1.2),
            "a and 1 more may be better, by up to ×1.2",
        ),
        (OpenQuestion(code="rivals", labels=("a",)), "a may be better, by an unknown factor"),
        (
            OpenQuestion(code="client_limited"),
            "the load generator was the limit, so the figures are its own, not the server's",
        ),
    ],
)
def test_every_open_question_is_told_with_what_would_settle_it_first(
    chosen: Recommendation, question: OpenQuestion, words: str
) -> None:
    weak = replace(chosen, established=False, open_questions=(question,), may_find_more=True)
    text = printed(weak, next_step="batchtune sweep S --resume R", offer="--budget 3m")
    goes_on = (
        "The command behind `confirm` continues this sweep; its --budget includes the time already spent."
    )
    were_good = question.code in ("unsteady", "wide", "rivals", "client_limited")
    met = "3 of 3 confirmation runs met the SLO, but " if were_good else ""
    assert f"Confidence Not confirmed: {met}{words}. {goes_on}" in re.sub(r"\s+", " ", text)
    if question.code == "unconfirmed":
        short = "confirmation runs missed the SLO" if question.missed else "too few confirmation runs"
        assert f"(not confirmed: {short})" in re.sub(r"\s+", " ", text)
    assert "Next        confirm  batchtune sweep S --resume R" in text
    assert "may find a better" not in text
    assert "Confirmed" not in text


def test_a_closed_loop_that_the_client_limited_confirms_nothing_and_an_open_one_may() -> None:
    """An open loop states only rates that were met, which a client makes no easier."""

    def asked_in(ledger: list[Trial], scenario: Scenario) -> set[str]:
        busy = (caveat("client_busy", cpu_ratio=0.97),)
        trials = [
            replace(trial, measurement=replace(trial.measurement, caveats=busy))  # type: ignore[type-var]
            for trial in ledger
        ]
        return {question.code for question in recommend(trials, scenario=scenario).open_questions}

    assert asked_in(helping_ledger(), SCENARIO) == {"client_limited"}
    assert asked_in(capacity_ledger(), CAPACITY) == set()


def test_without_a_latency_limit_runs_are_judged_by_their_errors_and_no_slo_is_named() -> None:
    unlimited = scenario_of(slo={}, search=SEARCH)
    text = said(recommend(helping_ledger(), scenario=unlimited))
    assert "Confirmed: 3 of 3 confirmation runs had at most 1 % errors, and no other" in text
    assert "SLO" not in text
    few = said(recommend(helping_ledger()[:7], scenario=unlimited))
    assert "Not confirmed: only 1 confirmation run had at most 1 % errors, 3 are needed" in few
    assert "SLO" not in few


def test_a_longer_search_is_an_offer_where_nothing_is_open(chosen: Recommendation) -> None:
    command = "batchtune sweep R/scenario.yaml --resume R --budget 3m"
    text = said(replace(chosen, may_find_more=True), offer=command)
    assert "10 %. A longer search may find a better configuration: see `search`." in text
    assert f" search {command}" in text
    assert "may find a better" not in said(chosen)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kept": 2, "worst_s": 0.061}, "met in 2 of 3 confirmation runs (worst 61 ms)."),
        (
            {"kept": 2, "worst_s": float("inf")},
            "met in 2 of 3 confirmation runs (in the worst run too many requests had no good answer).",
        ),
        (
            {"limit_s": 0.0093},
            "p95 ≤ 9.3 ms: met in 3 of 3 confirmation runs (worst 9.39 ms); a further run may miss it.",
        ),
    ],
)
def test_a_limit_is_told_with_the_runs_that_kept_it(
    chosen: Recommendation, changes: dict[str, object], words: str
) -> None:
    promise = replace(chosen.promises[0], **changes)  # type: ignore[arg-type]
    assert words in said(replace(chosen, promises=(promise,)))


def test_from_five_runs_on_a_range_is_a_prediction(chosen: Recommendation) -> None:
    predicted = replace(chosen, interval="prediction", runs=5, confirmations=5)
    text = said(predicted)
    assert "95 % of further runs, while the host stays as fast: " in text
    assert "p95 9.21-9.39 ms, by 5 confirmation runs." in text
    assert "recommended† 2,210-2,250 9.21-9.39 5 no batching 762-778" in text
    assert text.count("† 95 % of further runs; other rows have the range of their runs.") == 1
    assert "†" not in said(chosen)


def test_a_rate_that_closed_loops_or_a_search_alone_say_is_no_rate_that_runs_met(
    capacity: Recommendation,
) -> None:
    assert capacity.capacity is not None
    explained = "~ is expected to be met: a share of a rate that was tried."
    met = replace(capacity, references=())
    assert "~" not in said(met, scenario=CAPACITY)
    for changes, cell, verb in (
        ({"search_rps": 2300.0}, "~2,000 ", "is expected to meet"),
        ({"by_loops": True}, "?2,000 by loops ", "is guessed to meet"),
        ({"disputed_rps": 2300.0}, "?2,000 ", "is guessed to meet"),
    ):
        share = replace(capacity.capacity, confirmed=False, **changes)  # type: ignore[arg-type]
        text = said(replace(met, capacity=share), scenario=CAPACITY)
        assert f"recommended {cell}" in text
        assert met_text(share) == verb
        assert (explained in text) == (cell[0] == "~")
        assert ("? is a guess: " in text) == (cell[0] == "?")


@pytest.mark.parametrize(
    ("p95_s", "cell", "more"),
    [
        (0.012, "70 by 1 client", "; one client alone met it, at 70 requests/s"),
        (0.080, "none", ""),
    ],
)
def test_one_client_that_met_the_slo_alone_is_said_where_no_rate_met_it(
    p95_s: float, cell: str, more: str
) -> None:
    lone = asked(planted(1, batching=None, throughput=70.0, p95_s=p95_s, source="probe"), concurrency=1)
    text = said(recommend([lone, *capacity_ledger()[1:]], scenario=CAPACITY), scenario=CAPACITY)
    assert f"capacity over no batching. No rate tried met the SLO without batching{more}. " in text
    assert f"no batching {cell} 700 80.0 (missed) 1 at least" in text


def test_no_figure_of_closed_loops_is_below_what_one_client_alone_was_answered() -> None:
    """A looser SLO, that many clients meet too, states no less than a strict one, that only one client met."""
    lone = asked(planted(1, batching=None, throughput=530.0, p95_s=0.003, source="probe"), concurrency=1)
    loops = loop(2, 584.0, 0.045, clients=16, batching=None)
    for limit_ms in (40, 50):
        slo = SloSpec.model_validate({"p95": f"{limit_ms}ms"})
        answer = recommend([lone, loops, *capacity_ledger()[3:]], scenario=CAPACITY, slo=slo)
        assert "no batching 530 by 1 client " in said(answer, scenario=CAPACITY), limit_ms


def test_a_run_that_met_more_than_what_is_confirmed_is_told_where_no_rate_was_missed() -> None:
    found = Capacity(held_rps=3_890, missed_rps=None, held=3, missed=0, confirmed=True, most_met_rps=4_410)
    text = "capacity 3,890/s: met in 3 of 3 confirmation runs; no rate that misses the SLO was found"
    assert capacity_text(found) == f"{text}; a run met it at 4,410/s"
    assert capacity_text(replace(found, most_met_rps=found.held_rps)) == text


def test_where_the_search_found_the_limit_no_higher_rate_is_advised() -> None:
    large = {"max_batch_size": 64, "batch_timeout_micros": 0, "num_batch_threads": 1}
    trials = [at_rate(number, 2000.0, 0.04, batching=large, source="confirm") for number in (1, 2, 3)]
    trials = [
        replace(one, measurement=replace(one.measurement, server=BUSY)) for one in trials if one.measurement
    ]
    missed = [at_rate(number, 2300.0, 0.09, batching=large) for number in (4, 5)]
    open_ended = recommend(trials, scenario=CAPACITY).bottleneck
    ended = recommend([*trials, *missed], scenario=CAPACITY).bottleneck
    assert open_ended is not None
    assert bottleneck_sentence(open_ended) == (
        "none; batch threads execute 99.1 % of the time, in batches of 13.6 rows: larger ones serve more rows, each in "
        "more time. Raise the rate to find what limits it."
    )
    assert ended is not None
    assert bottleneck_sentence(ended).startswith("the device; batch threads execute 99.1 % of the time. ")


@pytest.mark.parametrize("lone_s", [0.012, 0.080])
def test_a_reference_that_ran_in_closed_loops_alone_has_no_rate_and_is_no_better_than_they(
    lone_s: float,
) -> None:
    lone = asked(planted(1, batching=None, throughput=70.0, p95_s=lone_s, source="probe"), concurrency=1)
    loops = loop(2, 700.0, 0.080, clients=16, batching=None)
    answer = recommend([lone, loops, *capacity_ledger()[3:]], scenario=CAPACITY)
    text = said(answer, scenario=CAPACITY)
    more = "; one client alone met it, at 70 requests/s" if lone_s < 0.050 else ""
    assert f"No rate was tried without batching, only closed loops, which missed the SLO{more}. " in text
    assert f"no batching {'70 by 1 client' if more else '–'} " in text
    assert answer.batching_gain is not None  # over SATURATED times what the loops answered
    assert answer.batching_gain.high == math.inf
    assert answer.batching_helps == "yes"


def test_a_reference_that_met_the_slo_in_some_runs_is_not_said_to_miss_it() -> None:
    trials = helping_ledger()
    met = [planted(20, batching=None, throughput=770, p95_s=0.019)]
    text = said(recommend([*trials[:1], *met, *trials[1:4]], scenario=SCENARIO, slo=P95_20))
    assert "No batching met the SLO in 1 of 2 runs." in text
    assert "met in 1 of 2" in text
    assert "misses the SLO" not in text


def test_why_batching_helps_does_not_say_that_no_batching_is_as_good() -> None:
    """No batching misses the SLO, but is not measurably slower."""
    trials = [
        planted(1, batching=None, throughput=2250, p95_s=0.024, source="no_batching"),
        planted(2, batching=BATCH_14, throughput=2300, p95_s=0.009, server=BUSY),
    ]
    answer = recommend(trials, scenario=SCENARIO, slo=P95_20)
    assert answer.batching_helps == "yes"
    assert why_sentence(answer).endswith("; without batching p95 is 24 ms, above the 20 ms allowed.")


def test_figures_of_the_search_are_not_called_fresh() -> None:
    text = said(recommend(helping_ledger()[:4], scenario=SCENARIO))
    assert "p95 9.00 ms in 1 run of the search" in text
    assert "in 3 of 3 confirmation runs" not in text
    assert "Not confirmed: no confirmation run was made" in text


@pytest.mark.parametrize("established", [True, False])
def test_a_noisy_host_is_told_also_where_the_answer_is_confirmed(
    chosen: Recommendation, established: bool
) -> None:
    noise = (caveat("host_busy", foreign_ratio=0.4),)
    question = () if established else (OpenQuestion(code="unconfirmed"),)
    noisy = replace(chosen, caveats=noise, established=established, open_questions=question)
    assert (
        "Warning Other processes used 40 % of the CPUs: the server is probably faster than measured."
        in said(noisy)
    )


def test_what_speaks_against_a_reference_is_said_and_an_emulated_device_last(chosen: Recommendation) -> None:
    limited = replace(chosen.references[0], caveats=(caveat("client_busy", cpu_ratio=0.97),))
    text = said(
        replace(chosen, caveats=(caveat("emulated_device"),), references=(limited, *chosen.references[1:]))
    )
    advice = capitalised(advice_of(limited.caveats[0]))
    assert f"of the CPU that it has (no batching). {advice}. The device is emulated" in text


def test_answers_without_text_are_told_with_their_share(chosen: Recommendation) -> None:
    share = coded("part_of", part=12, whole=340, part_ratio=12 / 340)
    text = said(replace(chosen, caveats=(caveat("streams_textless", answers=share),)))
    assert "Warning 12 of 340 (3.53 %) answers had no text: they count as good" in text


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (Configuration(batching=None), "Recommended no batching Gain"),
        (Configuration(batching=None, flags=(("x", "1"),)), "Recommended no batching, --x 1 Gain"),
        (
            Configuration(batching=from_dict({}), flags=(("threads", "8"),)),
            "Recommended the server's defaults, --threads 8 Gain",
        ),
    ],
)
def test_what_sets_no_parameter_has_a_name(
    chosen: Recommendation, configuration: Configuration, words: str
) -> None:
    assert words in said(replace(chosen, configuration=configuration))


def test_that_batching_cannot_pay_is_the_reason_where_it_does_not_help(chosen: Recommendation) -> None:
    unable = coded("cannot_pay", most_rows=32, least_rows=1, times=31.5)
    alone = replace(chosen, batching_helps="no", cannot_pay=unable, reason=as_text("noise"))
    words = "batching cannot pay here: a batch of 32 rows takes 31.5 times as long as one of 1 row, so larger"
    assert f"Why Batching does not help: {words}" in said(alone)


def test_a_server_on_cpus_of_its_own_costs_no_line(chosen: Recommendation) -> None:
    server = SCENARIO.target.model_copy(update={"cpus": (0,), "model": "/models/imdb_transformer"})
    head = printed(chosen, scenario=SCENARIO.model_copy(update={"target": server})).splitlines()[0]
    assert head == "imdb_transformer by gRPC, 1 row per request, 16 clients, server on CPU 0"


def test_what_the_recommendation_drops_of_what_runs_now_is_said(chosen: Recommendation) -> None:
    text = said(replace(chosen, drops=("preferred_batch_size 4,8", "priority_levels 2")))
    assert "Warning The answer drops preferred_batch_size 4,8, priority_levels 2 of what runs now;" in text
    assert "Warning" not in said(chosen)


@pytest.mark.parametrize(
    ("target", "rates", "ignored"),
    [
        (
            {"kind": "command", "rest_url": "http://127.0.0.1:1", "apply": ["true"]},
            (770, 765, 780, 772),
            True,
        ),
        (
            {"kind": "command", "rest_url": "http://127.0.0.1:1", "apply": ["true"]},
            (770, 765, 780, 900),
            False,
        ),
        ({}, (770, 765, 780, 772), False),
    ],
)
def test_configurations_that_answer_alike_are_told_where_nobody_read_them_back(
    target: dict[str, object], rates: tuple[float, ...], ignored: bool
) -> None:
    """The bundled server tells what is in force, and one in which a size gives more takes it."""
    scenario = scenario_of(target={"model": "m", **target})
    trials = [
        planted(number, batching={"max_batch_size": size}, throughput=rate, p95_s=0.02)
        for number, (size, rate) in enumerate(zip((1, 4, 16, 32), rates, strict=True), start=1)
    ]
    text = said(recommend(trials, scenario=scenario), scenario=scenario)
    assert ("Warning All configurations answer alike, whatever their size" in text) is ignored


def test_a_parameter_keeps_its_case_at_the_head_of_a_sentence() -> None:
    assert sentence("max_batch_size=16 may be better") == "max_batch_size=16 may be better."
    assert sentence("no rate tried met the SLO") == "No rate tried met the SLO."


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("defaults", "Keep the server's defaults, which are outside search.space and measured better."),
        ("present", "Keep what runs now, which is outside search.space and measured better."),
    ],
)
def test_what_the_user_has_comes_first_where_the_written_space_allows_only_what_is_surely_worse(
    chosen: Recommendation, name: str, keep: str
) -> None:
    worse = Estimate(value=0.68, low=0.55, high=0.83)
    others = [own for own in chosen.references if own.name != "defaults"]
    (has,) = (own for own in chosen.references if own.name == "defaults")
    outside = replace(has, names=(name,), outside=True, keeps=True, open=False, gain=worse)
    answer = replace(chosen, references=(*others, outside))
    assert f"Recommended {keep} In search.space: max_batch_size 14," in said(answer)
    within_noise = replace(outside, gain=Estimate(value=0.9, low=0.8, high=1.02))
    for other in (within_noise, replace(outside, outside=False)):
        assert "Recommended max_batch_size 14," in said(replace(chosen, references=(*others, other)))


@pytest.mark.parametrize(("threads", "words"), [(1, "combined, are"), (2, "one of them), are")])
def test_the_best_of_each_model_alone_may_differ_in_what_all_share(
    chosen: Recommendation, threads: int, words: str
) -> None:
    own = tuple((name, BatchingParameters(max_batch_size=4)) for name in ("a", "b"))
    together = Configuration(batching=BatchingParameters(num_batch_threads=1), models=own)
    others = {"a": replace(together, batching=BatchingParameters(num_batch_threads=threads)), "b": together}
    models = tuple(
        ModelResult(
            name=name,
            stated_rps=100.0,
            rate_rps=100.0,
            alone=Alone(configuration=other.of_model(name), rate_rps=200.0, of_limit=None, tried=1),
        )
        for name, other in others.items()
    )
    *_, last = model_sentences(replace(chosen, configuration=together, names=("alone",), models=models))
    assert last.endswith(f"{words} the recommended ones.")
