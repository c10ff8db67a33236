"""What spoils a check or fails it beyond its gates, and the line that it leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from batchtune.check.account import Conclusion, attributed
from batchtune.check.gate import Gate
from batchtune.check.history import append_history, history_line
from batchtune.check.paired_check import judge_fixed, judged
from batchtune.measure.caveats import caveat
from batchtune.plain_values import as_text
from batchtune.report.findings import text_of
from batchtune.tune.compare.blocks import Variant
from tests.check.check_fakes import account, measurement, moved, regressed, trial
from tests.tune.tune_fakes import scenario_of

VARIANTS = [Variant(name=name, scenario=scenario_of()) for name in ("main", "pull_request")]
OK = Conclusion(verdict="OK", findings=(), blocks=6, fresh_blocks=0, blocks_max=24)


def runs(measured=None) -> list:
    """Six blocks of both, of which the candidate measured this."""
    return [
        trial(name, block, measured if name == "pull_request" else None)
        for block in range(1, 7)
        for name in ("main", "pull_request")
    ]


NOISY = runs(measurement(caveats=(caveat("host_steal", steal_ratio=0.2),)))
LIMITED = runs(measurement(caveats=(caveat("client_busy", cpu_ratio=0.95),)))
FAILING = runs(measurement(verdict="FAIL", verdict_reason=as_text("p95 60 ms of 50 ms")))


@pytest.mark.parametrize(
    ("trials", "verdict", "exit_code", "words"),
    [
        (LIMITED, "INVALID", 6, "load generator was the limit"),
        (NOISY, "INVALID", 6, "the host disturbed every run of pull_request"),
        (FAILING, "SLO MISSED", 3, "p95 60 ms of 50 ms"),
    ],
)
def test_a_check_without_regression_ends_as_its_runs_say(trials, verdict, exit_code, words):
    assert judged(OK, runs(), VARIANTS) == OK
    conclusion = judged(OK, trials, VARIANTS)
    assert (conclusion.verdict, conclusion.exit_code) == (verdict, exit_code)
    assert words in text_of(conclusion.reason)


def test_a_confirmed_regression_stands_on_a_disturbed_host_and_not_where_the_client_was_the_limit():
    confirmed = replace(regressed(), confirms=True)
    assert judged(confirmed, NOISY, VARIANTS) == confirmed
    assert judged(regressed(), LIMITED, VARIANTS).verdict == "INVALID"
    assert judged(regressed(), FAILING, VARIANTS).verdict == "REGRESSED"


def test_a_failed_server_stays_the_reason():
    failed = replace(OK, verdict="INVALID", reason=as_text("ended by signal 9"), target_failed=True)
    assert judged(failed, [], VARIANTS) == failed


def test_a_change_is_attributed_and_none_is_not():
    slower = runs(moved(execution_s_by_rows={16: 0.003}))
    sides = {"baseline": "main", "candidate": "pull_request"}
    assert attributed(regressed(), slower, **sides).cause == "compute"
    assert attributed(OK, slower, **sides) is None
    failing = judge_fixed([Gate(metric="errors", margin=0.001)], [{"errors": (0.0, 0.1)}] * 10)
    assert failing.verdict == "REGRESSED"
    assert attributed(failing, slower, **sides) is None


def test_the_history_gets_a_line_a_check_also_after_one_that_was_cut_short(tmp_path):
    provenance = {"git": {"commit": "abc"}, "machine": {"host": "ci"}, "cpu": {"model": "EPYC"}}
    line = history_line(account(), provenance)
    assert (line["verdict"], line["commit"], line["host"]) == ("REGRESSED", "abc", "ci")
    assert history_line(account(), {"git": {"commit": "abc"}}, commit="f00")["commit"] == "f00"
    assert line["gates"]["p95"]["state"] == "regressed"
    root = tmp_path / "results"
    path = append_history(root, line)
    with path.open("a") as file:
        file.write('{"cut')
    append_history(root, line)
    first, cut, last = path.read_text().splitlines()
    assert json.loads(first) == json.loads(last)
    assert cut == '{"cut'
