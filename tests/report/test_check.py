"""How a check reads, on a terminal and in files."""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace

import pytest

from batchtune.check.attribution import attribute
from batchtune.check.gate import Gate, default_gates
from batchtune.check.paired import Conclusion, judge_fixed
from batchtune.report.gate.statement import headline, print_check
from tests.check.check_fakes import account, measurement, moved, regressed, slower_blocks


def printed(checked) -> str:
    stream = io.StringIO()
    print_check(checked, stream=stream)
    return stream.getvalue()


def test_a_regression_reads_in_fifteen_lines():
    text = printed(account())
    assert text.startswith("REGRESSED  pull_request against main: p95 +6.48 % (margin 2 %)")
    assert "CPU µs/request" in text
    assert "Why   compute" in text
    assert len(text.rstrip().splitlines()) <= 15
    assert "10 blocks, one look" in " ".join(text.split())


def test_five_gates_read_in_fifteen_lines_too():
    figures = ("throughput", "p95", "p99", "errors", "cpu")
    blocks = [
        {name: (0.5, 0.5 + 0.2 * (name == "p95") + 0.001 * (block % 3)) for name in figures}
        for block in range(10)
    ]
    conclusion = replace(judge_fixed(default_gates("throughput"), blocks), fresh_blocks=10, confirms=True)
    attribution = attribute(
        [measurement()] * 6,
        [moved(execution_s_by_rows={16: 0.003}, queue_wait_mean_s=0.002, server_cpu_s=0.5)] * 6,
    )
    text = printed(account(conclusion, attribution=attribution))
    assert text.startswith("REGRESSED")
    assert len(text.rstrip().splitlines()) <= 15, text


def test_an_open_check_says_what_would_settle_it():
    blocks = [{"p95": (1.0, 1.0 + 0.3 * (-1) ** block)} for block in range(6)]
    text = printed(account(judge_fixed([Gate(metric="p95", margin=0.05)], blocks), attribution=None))
    assert text.startswith("INCONCLUSIVE")
    assert "--max-regress p95=10%" in " ".join(text.split())


def test_a_raised_margin_says_what_was_asked():
    chance = random.Random(1)
    blocks = [{"p95": (1.0, math.exp(chance.gauss(0.0, 0.05)))} for _ in range(24)]
    conclusion = judge_fixed([Gate(metric="p95", margin=0.03)], blocks)
    assert conclusion.verdict == "OK"
    assert "(noise; asked 3)" in printed(account(conclusion))


def test_void_runs_say_why():
    void = replace(
        regressed(), verdict="INVALID", reason="the server of main was ended by signal 9", target_failed=True
    )
    assert headline(account(void)).endswith(": the server of main was ended by signal 9")
    assert void.exit_code == 7
    assert replace(void, target_failed=False).exit_code == 6


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


def test_a_figure_that_nobody_measured_is_told():
    gates = [Gate(metric="p95", margin=0.02), Gate(metric="gpu", margin=0.02)]
    assert "not measured" in printed(account(judge_fixed(gates, slower_blocks())))
