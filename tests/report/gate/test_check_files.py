"""A check as JUnit, Markdown, annotations and code quality."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from lxml import etree

from batchtune.check.gate import Gate
from batchtune.check.paired_check import judge_fixed
from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.commands.check_course import hand_on, require_writable
from batchtune.errors import UsageError
from batchtune.plain_values import as_text
from batchtune.report.ci_files import code_quality, comment, github_annotations, junit_xml, markdown
from tests.check.check_fakes import account, regressed, slower_blocks

OPEN = judge_fixed([Gate(metric="p95", margin=0.05)], slower_blocks(2))
VOID = replace(
    regressed(),
    verdict="INVALID",
    findings=(),
    reason=as_text("ended by signal 9\x00\x1b"),
    target_failed=True,
)
COUNTS = ("tests", "failures", "errors", "skipped")


def suite_of(checked) -> ET.Element:
    (suite,) = ET.fromstring(junit_xml(checked))
    return suite


def counts(suite: ET.Element) -> list[str | None]:
    return [suite.get(name) for name in COUNTS]


SCENARIO_FILE = Path("scenario.yaml")


def test_junit_has_a_case_for_each_gate_and_counts_them():
    suite = suite_of(account())
    assert counts(suite) == ["2", "1", "0", "0"]
    (failure,) = suite.iter("failure")
    assert "p95 +6.48 %" in failure.get("message", "")
    assert "batch execution time" in (failure.text or "")


def test_reports_are_written_into_folders_that_are_not_there_yet(tmp_path):
    junit, summary = tmp_path / "reports/batchtune.xml", tmp_path / "pages/batchtune.md"
    hand_on(account(), CheckRequest(scenario=SCENARIO_FILE, junit=junit, markdown=summary))
    assert "<testsuite" in junit.read_text()
    assert "p95" in summary.read_text()


def test_code_quality_and_annotations_point_to_the_scenario(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    report = tmp_path / "quality.json"
    hand_on(account(), CheckRequest(scenario=SCENARIO_FILE, code_quality=report))
    assert {issue["location"]["path"] for issue in json.loads(report.read_text())} == {"scenario.yaml"}
    assert "::error file=scenario.yaml," in capsys.readouterr().err


def test_junit_skips_what_is_open_and_errs_where_nothing_was_measured():
    assert suite_of(account(OPEN, attribution=None)).get("skipped") == "1"
    assert counts(suite_of(account(VOID, attribution=None))) == ["1", "0", "1", "0"]


def test_of_a_void_check_no_gate_fails_in_junit():
    void = replace(regressed(), verdict="INVALID", reason=as_text("the load generator was the limit"))
    suite = suite_of(account(void))
    assert counts(suite) == ["3", "0", "1", "2"]
    assert all(case.get("message", "").startswith("void: ") for case in suite.iter("skipped"))


def test_a_report_that_cannot_be_written_is_noted_and_costs_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    files = CheckRequest(scenario=SCENARIO_FILE, junit=tmp_path, comment=tmp_path / "comment.md")
    hand_on(account(), files)
    assert (tmp_path / "comment.md").read_text().startswith("<!-- batchtune:")
    assert capsys.readouterr().err.count(f"note: cannot write {tmp_path}: Is a directory") == 2


def test_files_are_tried_beforehand_and_left_as_they_were(tmp_path):
    kept, new = tmp_path / "kept.xml", tmp_path / "reports/new.md"
    kept.write_text("kept")
    require_writable(CheckRequest(scenario=SCENARIO_FILE, junit=kept, markdown=new))
    assert kept.read_text() == "kept"
    assert not new.exists()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "later")
    require_writable(CheckRequest(scenario=SCENARIO_FILE, junit=link))
    assert link.is_symlink()
    with pytest.raises(UsageError, match=f"cannot write {tmp_path}: Is a directory"):
        require_writable(CheckRequest(scenario=SCENARIO_FILE, comment=tmp_path))


@pytest.fixture(scope="module")
def junit_schema() -> etree.XMLSchema:
    """That of Jenkins' xunit plugin, which most readers of JUnit follow."""
    return etree.XMLSchema(etree.parse(Path(__file__).with_name("junit-10.xsd")))


@pytest.mark.parametrize(
    "conclusion",
    [
        regressed(),
        OPEN,
        replace(regressed(), verdict="OK"),
        VOID,
        replace(VOID, findings=regressed().findings),
        replace(VOID, verdict="INCOMPARABLE", reason=as_text("of another host")),
        replace(regressed(), verdict="SLO MISSED", reason=as_text("p95 60 ms of 50 ms")),
    ],
    ids=lambda conclusion: conclusion.verdict,
)
def test_junit_is_valid_by_the_common_schema(junit_schema, conclusion):
    checked = account(conclusion, scenario="<a> & \x07 'b' \ud800", candidate="\ufffe")
    junit_schema.assertValid(etree.fromstring(junit_xml(checked).encode()))


def test_markdown_is_a_table_with_the_verdict_at_its_head():
    text = markdown(account(baseline="a|b"))
    assert text.startswith("### REGRESSED: `pair`\n")
    assert "| figure | a\\|b | pull_request | median change of pairs [interval] | margin | verdict |" in text
    assert "- **Why:** batch execution time 2 ms" in text
    assert "Saved in" not in text


def test_a_comment_is_found_again_by_its_marker():
    assert comment(account(scenario="my pair --> x")).splitlines()[0] == "<!-- batchtune:my-pair-x -->"


def test_annotations_escape_what_would_end_them():
    (line,) = github_annotations(account(), file="scenarios/a,b.yaml")
    assert line.startswith("::error file=scenarios/a%2Cb.yaml,title=batchtune%3A REGRESSED::p95 +6.48 %25")
    assert "\n" not in line
    (line,) = github_annotations(account(OPEN, attribution=None), file="a.yaml")
    assert line.startswith("::warning ")
    assert github_annotations(account(replace(regressed(), verdict="OK")), file="a.yaml") == []


@pytest.mark.parametrize(("conclusion", "severities"), [(regressed(), ["major"]), (OPEN, ["minor"])])
def test_code_quality_lists_an_issue_for_each_gate_that_counts(conclusion, severities):
    issues = json.loads(code_quality(account(conclusion, attribution=None), file="a.yaml"))
    assert [issue["severity"] for issue in issues] == severities
    assert issues[0]["location"] == {"path": "a.yaml", "lines": {"begin": 1}}
