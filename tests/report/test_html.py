"""The page of a sweep: what is in the file. What a browser makes of it is in test_browser.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchtune.archive.run import LEDGER, Run, create_run
from batchtune.archive.server_files import BATCHING_PARAMETERS
from batchtune.cli.commands.report import report_at_end, write_report
from batchtune.errors import ArchiveError
from batchtune.report.html.contender_figures import sweep_results_of
from batchtune.report.html.shell.document import PAGE_FILE, unbroken
from batchtune.scenario.reader import format_scenario
from batchtune.scenario.spec.check import SloSpec
from tests.report.pages import (
    compared_run,
    document_of,
    evil_page,
    kept_run,
    loaded_run,
    quickstart_run,
    rising_rates,
)
from tests.tune.answer.ledgers import BATCH_14, CAPACITY, SCENARIO, capacity_ledger, helping_ledger
from tests.tune.tune_fakes import planted

FIGURES = {
    "brackets",
    "pareto",
    "space",
    "knobs",
    "distribution",
    "timeline",
    "split",
    "batches",
    "tau",
    "history",
}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return quickstart_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page_file(quickstart: Run) -> Path:
    return write_report(quickstart)


def test_the_page_is_one_file_below_two_megabytes_that_names_no_other(page_file):
    text = page_file.read_text()
    assert page_file.name == PAGE_FILE
    assert page_file.stat().st_size <= 2_000_000
    shown = text[: text.index('id="plotly"')]
    assert not re.search(r"(src|href)=", shown)
    assert "http://" not in shown
    assert "https://" not in shown


def test_every_figure_is_there_or_says_in_a_line_why_not(page_file):
    text = page_file.read_text()
    drawn = set(document_of(text)["figures"])
    assert drawn == FIGURES - {"timeline"}
    assert text.count("Not shown") == 1
    assert "The requests of these runs were not stored" in text


@pytest.mark.parametrize(
    "run_in",
    [quickstart_run, compared_run, lambda root: loaded_run(root, rising_rates())],
    ids=["sweep", "compare", "load"],
)
def test_every_figure_is_one_that_plotly_knows(tmp_path, run_in):
    from plotly.graph_objects import Figure

    for name, figure in document_of(write_report(run_in(tmp_path)).read_text())["figures"].items():
        roles = json.dumps(figure)
        Figure(json.loads(re.sub(r'"@[\w-]+"', '"#123456"', re.sub(r', "span": [\d.e+]+', "", roles))))
        assert "NaN" not in roles, name


def test_the_page_of_a_capacity_has_its_rates_and_marks_the_contender_recommended(tmp_path):
    text = write_report(kept_run(tmp_path, CAPACITY, trials=capacity_ledger())).read_text()
    assert {"brackets", "rates", "history"} <= set(document_of(text)["figures"])
    row = re.search(r'<tr class="marked">(.*?)</tr>', text).group(1)
    cells = ["recommended, guide", "size 14 · 2000\u00a0µs", "2,000", "about 2,280"]
    assert re.findall(r"<td[^>]*>([^<]*)", row)[:4] == cells


def test_the_command_names_a_file_only_if_that_holds_what_is_recommended(tmp_path):
    run = kept_run(tmp_path)
    account = sweep_results_of(run)
    run.write_recommendation(account.chosen)
    assert f"--batching_parameters_file={run.path}" in write_report(run).read_text()
    (run.path / BATCHING_PARAMETERS).write_text("max_batch_size { value: 999 }")
    assert "--batching_parameters_file=FILE" in write_report(run).read_text()


def test_what_a_scenario_or_a_server_says_is_escaped(tmp_path):
    text = evil_page(tmp_path)
    assert "<script>window" not in text
    assert "<a href='https" not in text
    assert text.count("&lt;script&gt;window.hacked") >= 4


def test_a_run_of_which_nothing_can_be_recommended_says_so(tmp_path):
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=tmp_path, provenance={})
    text = write_report(run).read_text()
    assert "Nothing yet" in text
    assert text.count("Not shown") == 1


def test_where_nothing_meets_the_slo_the_page_says_why_once_and_shows_what_was_tried(tmp_path):
    scenario = SCENARIO.model_copy(update={"slo": SloSpec.model_validate({"p95": "1ms"})})
    text = write_report(kept_run(tmp_path, scenario, trials=helping_ledger())).read_text()
    shown = text[: text.index('id="document"')]
    assert len(re.findall("configuration of 4 measured meets", shown)) == 1
    assert "Nothing meets the SLO" in shown
    assert "What came nearest under load?" in shown
    figures = document_of(text)["figures"]
    assert {"brackets", "pareto", "space", "history"} <= set(figures)
    names = [trace.get("name") for trace in figures["pareto"]["data"]]
    assert "nearest to the SLO" in names
    (_, crosses) = figures["space"]["data"]
    assert (crosses["x"], crosses["y"]) == (["1000", "8", "14"], ["0", "1000", "2000"])
    assert shown.count("<h2>Not shown</h2>") == 1


def test_an_answer_that_is_not_established_is_amber_where_it_says_what_to_deploy(tmp_path):
    text = write_report(quickstart_run(tmp_path)).read_text()
    assert re.search(r'<section class="answer open">\s*<h2>What to deploy\?', text)
    first_screen = text.split('id="why"')[0]
    assert "Confirmed" not in first_screen
    step, deploy = (
        re.sub("<.*?>", "", code)
        for code in re.findall(r'<div class="command">.*?<code>(.*?)</code>', first_screen, flags=re.DOTALL)
    )
    assert step.startswith("batchtune sweep ")
    assert " --resume " in step
    writing, serving = deploy.splitlines()
    assert re.fullmatch(r"batchtune recommend \S+ --write FILE", writing)
    assert serving.startswith("batchtune-model-server ")


def test_missed_points_stand_in_the_legend(tmp_path):
    slow = planted(50, batching={**BATCH_14, "max_batch_size": 16}, throughput=2000, p95_s=0.2)
    text = write_report(kept_run(tmp_path, trials=[*helping_ledger(), slow])).read_text()
    traces = document_of(text)["figures"]["pareto"]["data"]
    assert [trace["name"] for trace in traces if trace["showlegend"]].count("misses the SLO") == 1


def test_an_emulated_device_says_so_at_every_figure(tmp_path):
    run = kept_run(tmp_path)
    lines = (run.path / LEDGER).read_text().replace('"emulated":false', '"emulated":true')
    (run.path / LEDGER).write_text(lines)
    text = write_report(run).read_text()
    drawn = document_of(text)["figures"]
    assert text.count('<span class="emulated">') == len(drawn) + 2  # the table of contenders, and the title


@pytest.mark.parametrize(
    "fault", [ValueError("min() of an empty list\nand more"), ArchiveError("disk is full")]
)
def test_a_page_that_cannot_be_written_is_a_note_at_the_end_of_a_sweep(tmp_path, monkeypatch, capsys, fault):
    def fail(*_: object, **__: object) -> Path:
        raise fault

    monkeypatch.setattr("batchtune.cli.commands.report.write_page", fail)
    report_at_end(kept_run(tmp_path))
    told = {ValueError: "ValueError: min() of an empty list and more", ArchiveError: "disk is full"}
    assert capsys.readouterr().err == f"note: no report: {told[type(fault)]}\n"


@pytest.mark.slow
def test_two_thousand_trials_make_a_page_of_less_than_five_megabytes(tmp_path):
    run = kept_run(tmp_path, repeat=2000 // len(helping_ledger()) + 1)
    assert len(run.ledger()) >= 2000
    page = write_report(run)
    assert page.stat().st_size <= 5_000_000


@pytest.mark.parametrize(
    ("text", "unbroken_text"),
    [
        ("p95 −4.9 % (20 ms)", "p95 −4.9\u00a0% (20\u00a0ms)"),
        ("3 min 05 s, 2 GiB", "3\u00a0min 05\u00a0s, 2\u00a0GiB"),
        ("10 sides of 3 points", "10 sides of 3\u00a0points"),
    ],
)
def test_no_line_breaks_before_a_unit(text, unbroken_text):
    assert unbroken(text) == unbroken_text
