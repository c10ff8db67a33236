"""What the short answer says: what to use, what is gained, the SLO, why, what limits, how sure, what next."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration, from_dict
from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.caveats import caveat
from batchtune.measure.quantiles import Estimate
from batchtune.plain_values import Coded, as_text, coded
from batchtune.report.answer_words import capacity_text, gain_text, met_text, model_sentences, why_sentence
from batchtune.report.findings import advice_of
from batchtune.report.recommendation_text import print_answer
from batchtune.report.tables import paragraph
from batchtune.report.words import bottleneck_sentence, capitalised, sentence
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import (
    Alone,
    Alternative,
    Capacity,
    ModelResult,
    OpenQuestion,
    Recommendation,
)
from batchtune.tune.trials.trial import Trial
from tests.report.pages import Terminal
from tests.tune.answer.ledgers import (
    BATCH_8,
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

UNCONFIRMED = OpenQuestion(code="unconfirmed")
P95_20 = SloSpec.model_validate({"p95": "20ms"})

DEPLOYMENT = "batchtune-model-server --model_base_path=PATH/fake --batching_parameters_file=FILE"


def printed(chosen: Recommendation, *, scenario: Scenario = SCENARIO, **options: Any) -> str:
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_answer(chosen, scenario=scenario, deployment=DEPLOYMENT, **options)
    return stream.getvalue()


def said(chosen: Recommendation, **options: Any) -> str:
    """As printed, with lines joined."""
    return re.sub(r"\s+", " ", printed(chosen, **options))


@pytest.fixture(scope="module")
def chosen() -> Recommendation:
    return replace(recommend(helping_ledger(), scenario=SCENARIO), may_find_more=False)


@pytest.fixture(scope="module")
def capacity() -> Recommendation:
    return recommend(capacity_ledger(), scenario=CAPACITY)


CONFIRMED = Capacity(held_rps=84_600, missed_rps=99_600, held=3, missed=0, confirmed=True)
SHARE = replace(CONFIRMED, held_rps=90.0, missed_rps=None, held=0, confirmed=False, search_rps=100.0)
NO_RATE_MISSES = "no rate that misses the SLO was found"


@pytest.mark.parametrize(
    ("capacity", "changes", "words"),
    [
        (CONFIRMED, {}, "84,600/s: met in 3 of 3 confirmation runs; missed at 99,600/s"),
        (
            CONFIRMED,
            {"missed_higher": 1},
            "84,600/s: met in 3 of 4 confirmation runs at this rate or more; missed at 99,600/s",
        ),
        (
            CONFIRMED,
            {"missed_rps": 96_444, "is_bound": True},
            "84,600/s: met in 3 of 3 confirmation runs; the limit is about 96,400/s",
        ),
        (
            CONFIRMED,
            {"crossing_rps": 89_640.0},
            (
                "about 89,600/s, where its latencies cross the limit; 84,600/s: met in 3 of 3 confirmation runs; missed at "
                "99,600/s"
            ),
        ),
        (
            CONFIRMED,
            {"missed_rps": None, "most_met_rps": 84_600},
            f"84,600/s: met in 3 of 3 confirmation runs; {NO_RATE_MISSES}",
        ),
        (
            CONFIRMED,
            {"missed_rps": None, "most_met_rps": 88_000},
            f"84,600/s: met in 3 of 3 confirmation runs; {NO_RATE_MISSES}; a run met it at 88,000/s",
        ),
        (
            CONFIRMED,
            {"missed_rps": None, "held": 1, "confirmed": False},
            f"84,600/s: met in 1 of 1 confirmation run; {NO_RATE_MISSES}",
        ),
        (
            CONFIRMED,
            {"missed_rps": None, "held": 0, "confirmed": False},
            f"84,600/s by the search alone; {NO_RATE_MISSES}",
        ),
        (
            CONFIRMED,
            {"held": 0, "confirmed": False, "by_loops": True},
            "84,600/s by closed loops alone; missed at 99,600/s",
        ),
        (SHARE, {}, f"90/s is 90 % of about 100/s, which runs met; {NO_RATE_MISSES}"),
        (
            SHARE,
            {"held": 2, "missed": 1},
            (
                "90/s is 90 % of about 100/s, which runs met; 2 of 3 confirmation runs at it or more met the SLO; "
                f"{NO_RATE_MISSES}"
            ),
        ),
        (
            SHARE,
            {"missed_rps": 120.0, "held": 2, "missed_higher": 2},
            (
                "90/s is 90 % of about 100/s, which runs met; 2 of 4 confirmation runs at it or more met the SLO; missed at "
                "120/s"
            ),
        ),
        (
            SHARE,
            {
                "missed_rps": 120.0,
                "is_bound": True,
                "doubtful_rps": 95.0,
                "missed_higher": 2,
                "fell_behind": 2,
            },
            (
                "90/s is 90 % of about 100/s, which most runs met; in 2 confirmation runs the server did not keep up with "
                "the rate; the limit is about 120/s; the lowest rate that a run missed is 95/s"
            ),
        ),
        (
            SHARE,
            {"search_rps": None, "disputed_rps": 100.0, "is_disputed_end": True, "missed_rps": 120.0},
            (
                "90/s is 90 % of about 100/s, the lowest rate missed: no rate was met more often than missed; missed at "
                "120/s"
            ),
        ),
    ],
)
def test_a_capacity_says_what_it_rests_on(capacity: Capacity, changes: dict[str, Any], words: str) -> None:
    assert capacity_text(replace(capacity, **changes)) == f"capacity {words}"


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


def with_reference(chosen: Recommendation, **changes: Any) -> Recommendation:
    """Beside the server's defaults alone, changed so."""
    return replace(chosen, references=(replace(chosen.references[1], **changes),))


def with_promise(chosen: Recommendation, **changes: Any) -> Recommendation:
    return replace(chosen, promises=(replace(chosen.promises[0], **changes),))


def with_caveats(chosen: Recommendation, *caveats: Coded, **changes: Any) -> Recommendation:
    return replace(chosen, caveats=caveats, **changes)


def with_batching(chosen: Recommendation, batching: dict[str, Any] | None, **flags: str) -> Recommendation:
    parameters = None if batching is None else from_dict(batching)
    return replace(chosen, configuration=Configuration(batching=parameters, flags=tuple(flags.items())))


def with_trade(chosen: Recommendation, throughput_ratio: float, p95_ratio: float) -> Recommendation:
    other = Alternative(
        configuration=chosen.configuration,
        throughput_rps=1.0,
        p95_s=1.0,
        throughput_ratio=throughput_ratio,
        p95_ratio=p95_ratio,
        confirmations=3,
    )
    return replace(chosen, alternatives=(other,))


def ruled(chosen: Recommendation, **changes: Any) -> Recommendation:
    """With a contender that the rule named."""
    contenders = (replace(chosen.contenders[0], names=("rule",), **changes),)
    return replace(chosen, contenders=contenders, rule=as_text("X = 770 rows/s"))


BUSY_HOST = caveat("host_busy", foreign_ratio=0.4)
BUSY_CLIENT = caveat("client_busy", cpu_ratio=0.97)
TEXTLESS = caveat("streams_textless", answers=coded("part_of", part=12, whole=340, part_ratio=12 / 340))
CANNOT_PAY = coded("cannot_pay", most_rows=32, least_rows=1, times=31.5)
IS_BUSY = "Warning Other processes used 40 % of the CPUs: the server is probably faster than measured."
RULE = "The throughput × interval rule (X = 770 rows/s) names"
OPEN = "Whether it is better than the server's defaults is open"
MET = "met in 2 of 3 confirmation runs (worst 61 ms)."
MET_NONE = "met in 2 of 3 confirmation runs (in the worst run too many requests had no good answer)."
BELOW = "p95 ≤ 9.3 ms: met in 3 of 3 confirmation runs (worst 9.39 ms); a further run may miss it."
NOT_KNOWN = "The gain over the server's defaults is not known: `batchtune compare`, with both as variants, measures it."
TIMEOUT = Bottleneck(
    kind="batch_timeout",
    text=coded("device_busy", busy_ratio=0.8),
    advice=coded("batch_timeout_advice"),
    evidence={},
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: with_reference(a, gain=Estimate(value=1.05, low=0.9, high=1.2)),
            "No measurable difference from the",
        ),
        (lambda a: with_reference(a, open=True), f"{OPEN}."),
        (lambda a: with_reference(a, gain=None), f"{OPEN}."),
        (
            lambda a: with_reference(a, gain=None, caveats=(BUSY_HOST,)),
            f"{OPEN}, since the host was disturbed.",
        ),
        (lambda a: with_reference(a, gain=Estimate(value=1.1, low=0.0, high=1.3)), NOT_KNOWN),
        (lambda a: with_reference(a, keeps=False, met=0), "The server's defaults miss the SLO."),
        (
            lambda a: with_reference(a, names=("present", "defaults")),
            "Gain ×1.49 [1.44, 1.54] throughput over what runs now. Gains compare",
        ),
        (
            lambda a: replace(
                with_reference(a, names=("present",), configuration=a.configuration), names=("present",)
            ),
            "Gain None: this is what runs now.",
        ),
        (lambda a: with_promise(a, kept=2, worst_s=0.061), MET),
        (lambda a: with_promise(a, kept=2, worst_s=math.inf), MET_NONE),
        (lambda a: with_promise(a, limit_s=0.0093), BELOW),
        (lambda a: with_caveats(a, BUSY_HOST), IS_BUSY),
        (lambda a: with_caveats(a, BUSY_HOST, established=False, open_questions=(UNCONFIRMED,)), IS_BUSY),
        (
            lambda a: with_caveats(with_reference(a, caveats=(BUSY_CLIENT,)), caveat("emulated_device")),
            (
                "of the CPU that it has (the server's defaults). "
                f"{capitalised(advice_of(BUSY_CLIENT))}. The device is emulated"
            ),
        ),
        (
            lambda a: with_caveats(a, TEXTLESS),
            "Warning 12 of 340 (3.53 %) answers had no text: they count as good",
        ),
        (
            lambda a: with_batching(a, {"max_batch_size": 16, "batch_timeout_micros": 2000}),
            "With fewer than 16 clients each batch waits for its timeout, 2 ms.",
        ),
        (lambda a: with_batching(a, None), "Recommended no batching Gain"),
        (lambda a: with_batching(a, None, x="1"), "Recommended no batching, --x 1 Gain"),
        (lambda a: with_batching(a, {}, threads="8"), "Recommended the server's defaults, --threads 8 Gain"),
        (
            lambda a: replace(a, batching_helps="no", cannot_pay=CANNOT_PAY, reason=as_text("noise")),
            (
                "Why Batching does not help: batching cannot pay here: a batch of 32 rows takes 31.5 times as long as one "
                "of 1 row, so larger"
            ),
        ),
        (
            lambda a: replace(a, drops=("preferred_batch_size 4,8", "priority_levels 2")),
            "Warning The answer drops preferred_batch_size 4,8, priority_levels 2 of what runs now;",
        ),
        (
            lambda a: replace(a, may_find_more=True),
            "10 %. A longer search may find a better configuration: see `search`. Next",
        ),
        (
            lambda a: ruled(a, open=True),
            "p95 10.0 ms; it may still be better.",
        ),
        (
            lambda a: ruled(a, keeps=False, met=0),
            f"{RULE} max_batch_size=8 batch_timeout_micros=1000 num_batch_threads=1: it misses the SLO.",
        ),
        (ruled, "p95 10.0 ms; the recommended configuration gives ×1.17 [1.12, 1.23] throughput over it."),
        (lambda a: replace(a, rule=as_text("X = 770 rows/s")), f"{RULE} a configuration that was not run."),
        (
            lambda a: replace(a, bottleneck=TIMEOUT),
            "Bottleneck The batch timeout; the device is busy 80 % of the time. Lower batch_timeout_micros",
        ),
        (lambda a: with_trade(a, 0.88, 0.7), "12 % less throughput buys 30 % lower p95. "),
        (lambda a: with_trade(a, 1.12, 1.3), "30 % higher p95 buys 12 % more throughput. "),
        (lambda a: with_trade(a, 1.12, 0.7), "12 % more throughput and 30 % lower p95. "),
        (lambda a: with_trade(a, 1.004, 0.7), "30 % lower p95 at the same throughput. "),
        (lambda a: with_trade(a, 1.12, 0.996), "12 % more throughput at the same p95. "),
    ],
)
def test_what_is_said_of_an_answer(
    chosen: Recommendation, change: Callable[[Recommendation], Recommendation], words: str
) -> None:
    offer = "batchtune sweep R/scenario.yaml --resume R --budget 3m"
    changed, as_it_was = (
        said(answer, offer=offer) + said(answer, whole=True) for answer in (change(chosen), chosen)
    )
    assert words in changed
    assert words not in as_it_was


def test_what_a_gain_stands_for_is_said_once_where_one_is_stated(chosen: Recommendation) -> None:
    stands_for = "Gains compare these runs on this host; at another time they may differ."
    assert said(chosen).count(stands_for) == 1
    assert stands_for not in said(with_reference(chosen, gain=None))


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


def test_a_server_on_cpus_of_its_own_costs_no_line(chosen: Recommendation) -> None:
    server = SCENARIO.target.model_copy(update={"cpus": (0,), "model": "/models/imdb_transformer"})
    head = printed(chosen, scenario=SCENARIO.model_copy(update={"target": server})).splitlines()[0]
    assert head == "imdb_transformer by gRPC, 1 row per request, 16 clients, server on CPU 0"


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


def test_every_contender_stands_in_the_table_of_a_wide_terminal(
    chosen: Recommendation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    stream = Terminal()
    with redirect_stdout(stream):
        print_answer(chosen, scenario=SCENARIO, deployment=DEPLOYMENT, whole=True)
    text = re.sub(r"\s+", " ", stream.getvalue())
    assert "size 14 · 2000 µs 2,210-2,250 5.52-5.64 9.21-9.39 12.0-12.2 13.6 device 3" in text
    assert "size 8 · 1000 µs 1,900 6.00 10.0 13.0 – – 1 ×1.17 [1.12, 1.23]" in text


def test_alternatives_are_told_as_trades() -> None:
    ledger = [
        planted(1, batching=BATCH_14, throughput=2300, p95_s=0.020),
        planted(2, batching=BATCH_8, throughput=1840, p95_s=0.010),
    ]
    text = said(recommend(ledger, scenario=SCENARIO), whole=True)
    assert "20 % less throughput buys 50 % lower p95 (without confirmation runs)." in text


def test_the_advice_that_two_caveats_share_is_given_once(chosen: Recommendation) -> None:
    noisy = with_caveats(chosen, BUSY_HOST, caveat("host_steal", steal_ratio=0.1))
    assert said(noisy).count("Repeat when the machine is quiet.") == 1


def test_an_open_loop_is_named_by_its_arrivals() -> None:
    scenario = scenario_of(load={"arrivals": "poisson", "rate": "500/s"}, objective="latency")
    trial = planted(1, batching=BATCH_8, throughput=500, p95_s=0.01, objective="latency")
    assert trial.measurement is not None
    measured = replace(trial.measurement, concurrency=None, offered_rps=500.0)
    trial = replace(trial, concurrency=None, rate_rps=500.0, measurement=measured)
    assert "poisson arrivals at 500/s" in said(recommend([trial], scenario=scenario), scenario=scenario)


def test_a_number_stays_with_its_unit_and_long_words_whole() -> None:
    text = paragraph("takes 6.1 ms and 15 % of averyveryverylongword", width=10)
    assert text.splitlines() == ["takes", "  6.1 ms", "  and 15 %", "  of", "  averyveryverylongword"]


def test_a_reference_that_failed_is_told_from_one_that_was_not_tried() -> None:
    ledger = helping_ledger()
    defaults = next(trial.configuration for trial in ledger if trial.source == "defaults")
    others = [trial for trial in ledger if trial.configuration != defaults]
    assert "Server defaults: not measured." in said(recommend(others, scenario=SCENARIO), whole=True)
    failed = planted(99, throughput=1, p95_s=1, source="defaults", failure="OOM when allocating")
    text = said(recommend([*others, failed], scenario=SCENARIO), whole=True)
    assert "Server defaults: failed when it was tried (OOM when allocating" in text
