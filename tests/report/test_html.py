"""The page of a sweep: what is in the file. What a browser makes of it is in test_browser.py."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.deployable import BATCHING_PARAMETERS
from batchtune.archive.run import LEDGER, Run, create_run
from batchtune.cli.commands.report import report_at_end, write_report
from batchtune.errors import ArchiveError
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.html.shell.document import PAGE_FILE
from batchtune.report.html.sweep.account import account_of
from batchtune.report.html.sweep.answers import answers_of
from batchtune.report.html.sweep.forecast import Forecast
from batchtune.report.html.sweep.twin_figures import agreement
from batchtune.scenario.reader import format_scenario
from batchtune.twin.model.twin import Prediction
from tests.recommend.test_recommendation import SCENARIO, helping_ledger
from tests.report.pages import document_of, evil_page, first_screen_of, kept_run, quickstart_run

FIGURES = {
    "pareto",
    "space",
    "knobs",
    "distribution",
    "timeline",
    "split",
    "batches",
    "tau",
    "agreement",
    "rates",
    "history",
}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return quickstart_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page_file(quickstart: Run) -> Path:
    return write_report(quickstart)


def test_the_page_is_one_file_below_five_megabytes_that_names_no_other(page_file):
    text = page_file.read_text()
    assert page_file.name == PAGE_FILE
    assert page_file.stat().st_size <= 5_000_000
    shown = text[: text.index('id="plotly"')]
    assert not re.search(r"(src|href)=", shown)
    assert "http://" not in shown
    assert "https://" not in shown


def test_every_figure_is_there_or_says_in_a_line_why_not(page_file):
    text = page_file.read_text()
    drawn = set(document_of(text)["figures"])
    assert drawn == FIGURES - {"timeline"}
    assert text.count("Not shown: ") == 1
    assert "the requests of these runs were not kept" in text


def test_every_figure_is_one_that_plotly_knows(page_file):
    from plotly.graph_objects import Figure

    for name, figure in document_of(page_file.read_text())["figures"].items():
        roles = json.dumps(figure)
        named = re.sub(r'"@[\w-]+"', '"#123456"', re.sub(r', "span": [\d.]+', "", roles))
        Figure(json.loads(named))
        assert "NaN" not in roles, name


def test_first_screen_answers_with_the_command_that_deploys(page_file):
    text = page_file.read_text()
    first = first_screen_of(text)
    for question in ("What to deploy?", "What does it gain?", "How sure is that?", "What limits it?"):
        assert question in first
    assert "--batching_parameters_file=" in first
    assert "max_batch_size" in first
    assert "over no batching" in first


@pytest.mark.parametrize(
    ("high", "promised", "words"),
    [
        (1490.0, True, "capacity 1,420 [1,390, 1,490] requests/s"),
        (1490.0, False, "capacity below 1,490 requests/s"),
        (math.inf, True, "capacity at least 1,420 requests/s"),
    ],
)
def test_a_capacity_reads_as_on_the_terminal(tmp_path, high, promised, words):
    account = account_of(kept_run(tmp_path))
    capacity = Estimate(value=1420.0, low=1390.0, high=high)
    promises = account.chosen.promises if promised else ()
    chosen = replace(account.chosen, capacity_rps=capacity, promises=promises)
    _, gain, _, _ = answers_of(replace(account, chosen=chosen))
    assert words in gain.lines


def test_a_limit_is_kept_only_in_fresh_runs(tmp_path):
    account = account_of(kept_run(tmp_path))
    _, _, sure, _ = answers_of(account)
    assert sure.lines[0].startswith("SLO p95 ≤ 50 ms: kept in 3 fresh runs; another stays below ")
    unproven = replace(account.chosen, established=False, confirmations=0)
    _, _, sure, _ = answers_of(replace(account, chosen=unproven))
    assert sure.lines[0].startswith("SLO p95 ≤ 50 ms: a fresh run stays below ")


def test_the_command_names_a_file_only_if_that_holds_what_is_recommended(tmp_path):
    run = kept_run(tmp_path)
    account = account_of(run)
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
    assert "Not shown: " in text


def test_an_emulated_device_says_so_at_every_figure(tmp_path):
    run = kept_run(tmp_path)
    lines = (run.path / LEDGER).read_text().replace('"emulated":false', '"emulated":true')
    (run.path / LEDGER).write_text(lines)
    text = write_report(run).read_text()
    drawn = document_of(text)["figures"]
    assert text.count('<span class="emulated">') == len(drawn) + 1


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


@pytest.mark.parametrize("unknown", ["measured", "predicted"])
def test_without_a_p95_both_measured_and_predicted_their_figure_is_left_out(quickstart, monkeypatch, unknown):
    account = account_of(quickstart)
    assert account.twin is not None
    nothing = Estimate(value=math.inf, low=math.nan, high=math.nan)
    if unknown == "measured":
        for pooled in account.choice.pooled:
            pooled.runs[-1].latency_s["p95"] = nothing
    else:
        monkeypatch.setattr(Prediction, "latency", lambda *_: nothing)
    forecast = Forecast(twin=account.twin, scenario=account.scenario, budget_s=math.inf, now_s=lambda: 0.0)
    section = agreement(account, forecast)
    assert section.figure is None
    assert section.missing == "no configuration has both a measured and a predicted p95"


def test_predictions_end_when_their_time_is_spent(quickstart):
    account = account_of(quickstart)
    clock = iter([0.0, 0.0, 1.0, 3.9, 4.1, 9.0, 9.0])
    forecast = Forecast(twin=account.twin, scenario=account.scenario, budget_s=4.0, now_s=lambda: next(clock))
    configuration = account.choice.chosen.configuration
    answers = [forecast.objective(configuration, turn="rates") for _ in range(5)]
    assert [answer is not None for answer in answers] == [True, True, True, False, False]
    assert forecast.left_out == 2


@pytest.mark.slow
def test_two_thousand_trials_make_a_page_of_less_than_five_megabytes(tmp_path):
    run = kept_run(tmp_path, repeat=2000 // len(helping_ledger()) + 1)
    assert len(run.ledger()) >= 2000
    page = write_report(run)
    assert page.stat().st_size <= 5_000_000
