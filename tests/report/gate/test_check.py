"""How a check reads, on a terminal and in files."""

from __future__ import annotations

import io
import math
import random
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from batchtune.check.account import Conclusion, attribute
from batchtune.check.gate import BlockFigures, Gate, default_gates
from batchtune.check.paired_check import judge_fixed
from batchtune.plain_values import as_text
from batchtune.report.check_text import advice_text, headline, print_check
from tests.check.check_fakes import account, measurement, moved, regressed, slower_blocks


def printed(checked) -> str:
    stream = io.StringIO()
    with redirect_stdout(stream):
        print_check(checked)
    return stream.getvalue()


def flat(checked) -> str:
    return " ".join(printed(checked).split())


def noisy_blocks(factor: float) -> list[BlockFigures]:
    chance = random.Random(1)
    return [{"p95": (1.0, factor * math.exp(chance.gauss(0.0, 0.05)))} for _ in range(24)]


P95, P95_5 = Gate(metric="p95", margin=0.02), Gate(metric="p95", margin=0.05)
CPU, GPU = Gate(metric="cpu", margin=0.02), Gate(metric="gpu", margin=0.02)


def test_a_regression_reads_in_fifteen_lines():
    text = printed(account())
    assert text.startswith("REGRESSED  pull_request against main: p95 +6.48 % (margin 2 %)")
    assert "CPU µs/request" in text
    assert "Why   batch execution time 2 ms" in text
    assert len(text.rstrip().splitlines()) <= 15
    assert "10 blocks, judged once" in flat(account())


def test_five_gates_read_in_fifteen_lines_too():
    figures = ("throughput", "p95", "p99", "errors", "cpu")
    blocks = [
        {name: (0.5, 0.5 + 0.2 * (name == "p95") + 0.001 * (block % 3)) for name in figures}
        for block in range(10)
    ]
    conclusion = replace(judge_fixed(default_gates("throughput"), blocks), fresh_blocks=10, confirms=True)
    slower = moved(execution_s_by_rows={16: 0.003}, queue_wait_mean_s=0.002, server_cpu_s=0.5)
    attribution = attribute([measurement()] * 6, [slower] * 6)
    text = printed(account(conclusion, attribution=attribution))
    assert text.startswith("REGRESSED")
    assert len(text.rstrip().splitlines()) <= 15, text


OPEN = [{"p95": (1.0, 1.0 + 0.3 * (-1) ** block), "cpu": (1.0, 1.0)} for block in range(6)]
UNDECIDED = judge_fixed([P95_5, CPU], OPEN)
WIDER = "a quieter machine, or wider margins: --max-regress p95=10%,cpu=2%"


def test_wider_margins_name_every_gate_and_no_blocks_that_cannot_be_had():
    text = printed(account(judge_fixed([P95_5], OPEN), attribution=None))
    assert text.startswith("INCONCLUSIVE")
    assert "--max-regress p95=10%" in " ".join(text.split())
    assert advice_text(account(UNDECIDED)) == f"--blocks 12, a longer load.duration, {WIDER}"
    assert "--blocks 200," in advice_text(account(replace(UNDECIDED, blocks_max=150)))
    assert "--blocks" not in advice_text(account(replace(UNDECIDED, blocks_max=200)))


def test_a_stored_baseline_states_no_error_rate_and_asks_for_no_other_load():
    stored = account(replace(UNDECIDED, confirms=True), stored=True)
    assert advice_text(stored) == WIDER
    told = flat(stored)
    assert "the margins allow for their differences; the error rate is not known" in told
    assert "equal servers" not in told
    assert (stored.to_dict()["error_rate"], account().to_dict()["error_rate"]) == (None, 0.05)


@pytest.mark.parametrize(("rate", "told"), [(0.025, "2.5 %"), (0.05 / 11, "0.455 %"), (0.05, "5 %")])
def test_an_error_rate_that_several_candidates_share_is_told_as_it_is(rate, told):
    text = flat(account(replace(regressed(), error_rate=rate)))
    assert f"A check of two equal servers fails in at most {told} of cases." in text


def test_a_figure_that_nobody_measured_is_told_and_not_called_undecided():
    assert "not measured" in printed(account(judge_fixed([P95, GPU], slower_blocks())))
    done = regressed()
    p95, cpu = done.findings
    text = printed(account(replace(done, findings=(p95, replace(cpu, state="open", blocks=0)))))
    assert "not measured" in text
    assert "ndecided" not in text


def test_what_was_asked_for_and_not_measured_is_the_headline():
    asked = account(judge_fixed([P95_5, GPU], [{"p95": (1.0, 1.0)}] * 12))
    assert headline(asked).endswith("main: gpu was asked for and not measured")
    assert advice_text(asked) == "ask only for what is measured here: --max-regress p95=5%"
    nothing = account(judge_fixed(default_gates("latency"), [{}] * 6))
    assert headline(nothing).endswith("main: no figure was measured")


@pytest.mark.parametrize(
    ("factor", "verdict", "words"),
    [(1.0, "OK", "(asked 3 %, widened for noise)"), (0.5, "IMPROVED", "(margin 3 %)\n")],
)
def test_a_margin_is_told_as_it_was_asked_for(factor, verdict, words):
    conclusion = judge_fixed([Gate(metric="p95", margin=0.03)], noisy_blocks(factor))
    assert conclusion.verdict == verdict
    assert words in f"{headline(account(conclusion))}\n{printed(account(conclusion))}"


def test_void_runs_say_why():
    reason = as_text("the server of main was ended by signal 9")
    void = replace(regressed(), verdict="INVALID", reason=reason, target_failed=True)
    assert headline(account(void)).endswith(": the server of main was ended by signal 9")
    assert (void.exit_code, replace(void, target_failed=False).exit_code) == (7, 6)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        ("OK", 0),
        ("IMPROVED", 0),
        ("REGRESSED", 1),
        ("SLO MISSED", 3),
        ("INCOMPARABLE", 4),
        ("INCONCLUSIVE", 5),
    ],
)
def test_each_verdict_has_its_exit_code(verdict, code):
    conclusion = Conclusion(verdict=verdict, findings=(), blocks=0, fresh_blocks=0, blocks_max=24)
    assert conclusion.exit_code == code


def test_a_figure_that_only_the_confirmation_flags_is_undecided_and_says_so():
    done = regressed()
    once = replace(done, findings=tuple(replace(finding, state="open") for finding in done.findings))
    lines = printed(account(once)).splitlines()
    (slower,) = (line for line in lines if line.startswith("p95 ms"))
    (alike,) = (line for line in lines if line.startswith("CPU"))
    assert slower.endswith("undecided: only the confirmation shows it")
    assert "undecided" in alike
    assert "confirmation" not in alike
    assert "Undecided: the interval contains the margin." in " ".join("\n".join(lines).split())
