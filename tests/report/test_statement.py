"""What the whole statement says, sentence by sentence, on a terminal without colour."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from batchtune.measure.bottleneck import Bottleneck
from batchtune.measure.caveats import caveat
from batchtune.plain_values import as_text, coded
from batchtune.report.recommendation_text import print_answer
from batchtune.report.tables import paragraph
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Alternative, OpenQuestion, Recommendation
from batchtune.tune.trials.trial import SearchSummary
from tests.report.pages import Terminal
from tests.tune.answer.ledgers import BATCH_8, BATCH_14, CAPACITY, SCENARIO, capacity_ledger, helping_ledger
from tests.tune.tune_fakes import planted, scenario_of

pytestmark = pytest.mark.smoke

SEARCHED = SearchSummary(
    strategy="guided",
    stop_reason=coded("time_spent"),
    plan=coded("plan_of_time", budget_s=50.0, scout=12, compare=30, confirm=18),
    proposals={"grid": 5, "sampler": 1, "rule": 2},
)
DEPLOYMENT = "batchtune-model-server --model_base_path=PATH/fake --batching_parameters_file=FILE"
GOLDEN = """\
fake by gRPC, 1 row per request, poisson arrivals
Recommended max_batch_size 14, batch_timeout_micros 2000, num_batch_threads 1
Gain        ×3.53 [2.86, 4.37] capacity over no batching. ×1.83 [1.54, 2.18]
            capacity over the server's defaults. Gains compare these runs on
            this host; at another time they may differ.
            Capacity 2,000/s: met in 3 of 3 confirmation runs (p95
            38.0-39.2 ms); the limit is about 2,280/s; the lowest rate that a
            run missed is 2,250/s.

named by                configuration      met /s  limit below /s     p95 ms  gain [least, most]
────────────────────────────────────────────────────────────────────────────────────────────────
recommended, guide (a)  size 14 · 2000 µs   2,000     about 2,280  38.0-39.2
no batching             no batching          ~522             700       30.0  ×3.53 [2.86, 4.37]
server defaults*        server defaults    ~1,040           1,300       30.0  ×1.83 [1.54, 2.18]
rule                    size 8 · 1000 µs   ~1,650           2,000       45.0     none measurable
Columns that do not fit: p50 ms, limited by, p99 ms, runs; --json has them.
server defaults: size 1000 · 0 µs · queue 10 · threads one per CPU.
~ is expected to be met: a share of a rate that was tried.
* outside the search space: no candidate.

SLO         p95 ≤ 50 ms: met in 3 of 3 confirmation runs (worst 39.2 ms, 21.6 %
            to spare).
Why         Batching helps: batching is worth ×3.53 [2.86, 4.37].
Compared    The throughput × interval rule names max_batch_size=8
            batch_timeout_micros=1000 num_batch_threads=1: it is expected to
            meet the SLO at 1,650/s; no measurable difference from the
            recommended configuration.
            The tuning guide names the recommended configuration.
Bottleneck  Not known; the server reports nothing about itself. Let the server
            report its metrics to find what limits it.
Search      15 trials in 30 s. The plan was 50 s: 12 to scout, 30 to compare, 18
            to confirm. Runs by source: the space 5, rule 2, Optuna 1. The
            search ended: the time is spent.
Confidence  Confirmed: 3 of 3 confirmation runs met the SLO, and no other
            configuration tried gains more than 10 %.
Caveats     (a) recommended: the device is emulated by its service time —
            measure on the real device before you deploy
Next        deploy   batchtune-model-server --model_base_path=PATH/fake --batching_parameters_file=FILE
"""


def printed(
    chosen: Recommendation,
    scenario: Scenario = SCENARIO,
    stream: io.StringIO | None = None,
    **options: str,
) -> str:
    stream = stream or Terminal()
    with redirect_stdout(stream):
        print_answer(chosen, scenario=scenario, deployment=DEPLOYMENT, whole=True, **options)
    return stream.getvalue()


def said(chosen: Recommendation, scenario: Scenario = SCENARIO, **options: str) -> str:
    """As printed, with lines joined."""
    return re.sub(r"\s+", " ", printed(chosen, scenario, **options))


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(helping_ledger(), scenario=SCENARIO)


def test_the_whole_statement_reads_so() -> None:
    chosen = recommend(capacity_ledger(), scenario=CAPACITY, search=SEARCHED)
    text = printed(
        replace(chosen, caveats=(caveat("emulated_device"),), may_find_more=False), CAPACITY, io.StringIO()
    )
    assert "\n".join(line.rstrip() for line in text.splitlines()) + "\n" == GOLDEN


def test_every_contender_stands_in_the_table(found: Recommendation) -> None:
    text = said(found)
    assert "size 14 · 2000 µs 2,210-2,250 5.52-5.64 9.21-9.39 12.0-12.2 13.6 device 3" in text
    assert "size 8 · 1000 µs 1,900 6.00 10.0 13.0 – – 1 ×1.17 [1.12, 1.23]" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"open": True}, "p95 10.0 ms; it may still be better."),
        (
            {"keeps": False, "met": 0},
            "names max_batch_size=8 batch_timeout_micros=1000 num_batch_threads=1: it misses the SLO.",
        ),
        ({}, "p95 10.0 ms; the recommended configuration gives ×1.17 [1.12, 1.23] throughput over it."),
    ],
)
def test_how_the_rules_own_contender_fared(
    found: Recommendation, changes: dict[str, object], words: str
) -> None:
    ruled = replace(found.contenders[0], names=("rule",), **changes)  # type: ignore[arg-type]
    text = said(replace(found, contenders=(ruled,), rule=as_text("X = 770 rows/s")))
    assert "The throughput × interval rule (X = 770 rows/s) names max_batch_size=8" in text
    assert words in text


def test_a_rule_whose_contender_was_not_run_is_told(found: Recommendation) -> None:
    words = "The throughput × interval rule (X = 770 rows/s) names a configuration that was not run."
    assert words in said(replace(found, rule=as_text("X = 770 rows/s")))
    assert "interval rule" not in said(found)


def test_what_is_open_is_told_with_what_would_settle_it(found: Recommendation) -> None:
    weak = replace(found, established=False, open_questions=(OpenQuestion(code="unconfirmed"),))
    step = "batchtune sweep s.yaml --resume RUN --budget 60s"
    text = said(weak, next_step=step)
    assert "Confidence Not confirmed: no confirmation run was made. The command behind `confirm`" in text
    assert f"Next confirm {step}" in text
    assert "Confidence Confirmed:" not in said(weak)


def test_what_limits_it_is_told_with_its_evidence_and_one_advice(found: Recommendation) -> None:
    limit = Bottleneck(
        kind="batch_timeout",
        text=coded("device_busy", busy_ratio=0.8),
        advice=coded("batch_timeout_advice"),
        evidence={},
    )
    text = said(replace(found, bottleneck=limit))
    words = "Bottleneck The batch timeout; the device is busy 80 % of the time. Lower batch_timeout_micros"
    assert words in text
    assert "13.6 batch timeout 3" in text


def test_alternatives_are_told_as_trades() -> None:
    ledger = [
        planted(1, batching=BATCH_14, throughput=2300, p95_s=0.020),
        planted(2, batching=BATCH_8, throughput=1840, p95_s=0.010),
    ]
    text = said(recommend(ledger, scenario=SCENARIO))
    assert "20 % less throughput buys 50 % lower p95 (without confirmation runs)." in text


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
def test_every_kind_of_trade_has_its_words(
    found: Recommendation, throughput_ratio: float, p95_ratio: float, words: str
) -> None:
    one = Alternative(
        configuration=found.configuration,
        throughput_rps=1.0,
        p95_s=1.0,
        throughput_ratio=throughput_ratio,
        p95_ratio=p95_ratio,
        confirmations=3,
    )
    assert f"{words}. " in said(replace(found, alternatives=(one,)))


def test_the_advice_that_two_caveats_share_is_given_once(found: Recommendation) -> None:
    noise = (caveat("host_busy", foreign_ratio=0.4), caveat("host_steal", steal_ratio=0.1))
    stream = Terminal()
    with redirect_stdout(stream):
        print_answer(replace(found, caveats=noise), scenario=SCENARIO, deployment=DEPLOYMENT)
    assert re.sub(r"\s+", " ", stream.getvalue()).count("Repeat when the machine is quiet.") == 1


def test_an_open_loop_is_named_by_its_arrivals() -> None:
    scenario = scenario_of(load={"arrivals": "poisson", "rate": "500/s"}, objective="latency")
    trial = planted(1, batching=BATCH_8, throughput=500, p95_s=0.01, objective="latency")
    assert trial.measurement is not None
    measured = replace(trial.measurement, concurrency=None, offered_rps=500.0)
    trial = replace(trial, concurrency=None, rate_rps=500.0, measurement=measured)
    text = said(recommend([trial], scenario=scenario), scenario)
    assert "poisson arrivals at 500/s" in text


def test_a_number_stays_with_its_unit_and_long_words_whole() -> None:
    text = paragraph("takes 6.1 ms and 15 % of averyveryverylongword", width=10)
    assert text.splitlines() == ["takes", "  6.1 ms", "  and 15 %", "  of", "  averyveryverylongword"]


def test_a_reference_that_failed_is_told_from_one_that_was_not_tried() -> None:
    ledger = helping_ledger()
    defaults = next(trial.configuration for trial in ledger if trial.source == "defaults")
    others = [trial for trial in ledger if trial.configuration != defaults]
    assert "Server defaults: not measured." in said(recommend(others, scenario=SCENARIO))
    failed = planted(99, throughput=1, p95_s=1, source="defaults", failure="OOM when allocating")
    text = said(recommend([*others, failed], scenario=SCENARIO))
    assert "Server defaults: failed when it was tried (OOM when allocating" in text
