"""The page of a check: its verdict, its gates, why, and how sure that is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchtune.archive.listing import kind_by_trials
from batchtune.archive.run import CHECK, Run
from batchtune.check.account import read_account
from batchtune.check.gate import Gate
from batchtune.check.paired_check import judge_fixed
from batchtune.report.check_text import gate_table
from batchtune.report.html.check_page import check_document, gate_changes
from batchtune.report.html.shell.document import render
from tests.check.check_fakes import account
from tests.report.pages import EVIL, checked_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return checked_run(tmp_path_factory.mktemp("check"), names=("baseline", EVIL))


@pytest.fixture(scope="module")
def document(run: Run):
    return check_document(run)


def section(document, anchor: str):
    return next(part for part in document.sections if part.anchor == anchor)


def test_a_check_has_a_page_of_its_own_and_one_without_a_verdict_is_a_comparison(run, tmp_path):
    assert kind_by_trials(run) == "check"
    interrupted = checked_run(tmp_path)
    (interrupted.path / CHECK).unlink()
    assert kind_by_trials(interrupted) == "compare"


def test_the_answers_are_the_verdict_with_what_moved_why_and_how_sure(document):
    verdict, _, sure = document.answers
    assert (verdict.headline, verdict.tone) == ("No: regressed", "bad")
    assert re.search(r"throughput −(19|20|21)\.\d % \(margin", verdict.lines[0])
    assert re.match(r"\d+ blocks$", sure.headline)
    assert "confirmation blocks" in sure.lines[0]


def test_the_table_is_that_of_the_terminal(run, document):
    assert section(document, "verdicts").table.rows == gate_table(read_account(run.path))


def test_the_figure_shows_each_gate_with_its_interval_and_margin(document):
    traces = {trace["name"]: trace for trace in section(document, "gates").figure.data}
    assert "throughput" in traces["regressed"]["y"]
    at = traces["regressed"]["y"].index("throughput")
    assert -22 < traces["regressed"]["x"][at] < -18
    assert traces["regressed"]["error_x"]["array"][at] > 0.0
    margins = dict(zip(traces["margin"]["y"], traces["margin"]["x"], strict=True))
    assert margins["throughput"] < 0.0 < margins["p95"]


def test_an_end_that_the_blocks_do_not_give_is_not_drawn():
    conclusion = judge_fixed([Gate(metric="throughput", margin=0.05)], [{"throughput": (100.0, 99.0)}] * 2)
    trace = gate_changes(account(conclusion)).figure.data[0]
    assert (trace["error_x"]["array"], trace["error_x"]["arrayminus"]) == ([0.0], [0.0])
    assert "[" not in trace["text"][0]


def test_of_a_stored_baseline_no_runs_were_made_in_turns():
    stored = gate_changes(account(stored=True))
    assert "in turns" not in stored.how
    assert "of two sessions" in stored.how
    assert "of two runs made in turns" in gate_changes(account()).how


@pytest.mark.parametrize("verdict", ["INVALID", "INCOMPARABLE"])
def test_of_a_void_check_no_test_and_no_bar_counts(tmp_path: Path, verdict):
    run = checked_run(tmp_path)
    void = json.loads((run.path / CHECK).read_text()) | {"verdict": verdict, "reason": "a noisy host"}
    (run.path / CHECK).write_text(json.dumps(void))
    page = check_document(run)
    assert page.answers[-1].headline == "Nothing is known"
    assert "equal servers" not in " ".join(page.answers[-1].lines)
    assert "fails the check" not in section(page, "gates").lead


def test_names_are_escaped_where_html_and_plotly_read_them(document):
    assert EVIL not in render(document)
    figures = [part.figure for part in document.sections if part.figure]
    texts = [text for figure in figures for trace in figure.data for text in trace.get("text", ())]
    assert texts
    assert not any("<script" in text for text in texts)


def test_a_check_against_a_stored_baseline_has_one_side_to_show(tmp_path: Path):
    run = checked_run(tmp_path)
    scenario = run.path / "scenario.yaml"
    scenario.write_text(scenario.read_text().partition("variants:")[0])
    ledger = run.path / "trials.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if json.loads(line)["reason"] == "candidate"))
    blocks = section(check_document(Run(run.path)), "blocks")
    assert {trace["name"] for trace in blocks.figure.data} == {"candidate"}
