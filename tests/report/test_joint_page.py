"""The page of a sweep of several models: its answers, the table of the models, the loads, and why there is no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.archive.joint import deployable, write_joint
from batchtune.archive.run import Run, create_run
from batchtune.batching.parameters import BatchingParameters
from batchtune.cli.commands.report import write_report
from batchtune.errors import UsageError
from batchtune.report.html.joint_page import joint_answer, joint_document
from batchtune.report.html.shell.document import Report, render
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommendation import OpenQuestion
from tests.report.pages import document_of
from tests.tune.joint.test_search import TEXT, swept


def joint_run(root: Path, scenario: Scenario) -> Run:
    """A sweep on the simulated server."""
    run = create_run(scenario, format_scenario(scenario), root=root, provenance={})
    for load in swept(scenario):
        run.append(load.trial, None)
    return run


def page_of(run: Run) -> Report:
    return joint_document(run, joint_answer(run), deployment=["cp a b", "serve <it>"])


def models(folder: Path) -> str:
    """The scenario with models that are there."""
    for name in "ab":
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "saved_model.pb").touch()
    return TEXT.replace("model: a", f"model: {folder}/a").replace("model: b", f"model: {folder}/b")


def test_the_page_answers_for_each_model_and_shows_every_load(tmp_path: Path) -> None:
    run = joint_run(tmp_path / "results", parse_scenario(models(tmp_path)))
    chosen = joint_answer(run)
    page = joint_document(
        run, replace(chosen, established=True, open_questions=()), deployment=["cp a b", "serve <it>"]
    )
    deploy, gets, sure, company = page.answers
    assert [name for name, _ in deploy.pairs] == [
        "num_batch_threads",
        *(f"{name}: {word}" for name in ("ranker", "reader") for word in (
            "max_batch_size", "batch_timeout_micros", "max_enqueued_batches",
        )),
    ]  # fmt: skip
    assert gets.headline.endswith("of the stated rates")
    assert [line.partition(":")[0] for line in gets.lines] == ["ranker", "reader"]
    assert (sure.headline, "met every SLO" in sure.lines[0]) == ("Established", True)
    doubtful = joint_document(
        run,
        replace(chosen, established=False, open_questions=(OpenQuestion(code="no_run"),)),
        deployment=[],
    )
    assert doubtful.answers[2].headline == "Open"
    assert doubtful.open_questions[0].startswith(
        "Confidence: not established: no run at a fixed rate met the SLO"
    )
    assert len(company.lines) == 2
    shares, rates = page.sections
    assert [row[0] for row in shares.table.rows] == ["ranker", "reader"]
    together = [trial for trial in run.ledger() if not trial.request.models]
    assert sum(len(trace["x"]) for trace in rates.figure.data) == len(together)
    document = document_of(render(page))
    details = document["details"]
    clicked = [number for trace in rates.figure.data for number in trace["customdata"]]
    assert all(details[number]["heading"].startswith("Load ") for number in clicked)
    first = document["rows"][details[clicked[0]]["rows"][0]]
    assert first[1].startswith("ranker together ×")
    assert "serve &lt;it&gt;" in render(page)


def test_the_commands_name_files_that_hold_what_is_recommended(tmp_path: Path) -> None:
    scenario = parse_scenario(models(tmp_path))
    run = joint_run(tmp_path / "results", scenario)
    chosen = joint_answer(run)
    assert deployable(run, chosen.configuration, scenario).models == Path("FILE.models.config")
    write_joint(run, chosen, scenario)
    assert deployable(run, chosen.configuration, scenario).models == run.path / "models.config"
    other = replace(chosen.configuration, batching=BatchingParameters(num_batch_threads=7))
    assert deployable(run, other, scenario).own["reader"] == Path("FILE.reader.batching_params.pbtxt")


def test_a_sweep_without_an_answer_says_why_and_shows_its_loads(tmp_path: Path) -> None:
    scenario = parse_scenario(models(tmp_path).replace("p95: 25ms", "p95: 1ms"))
    page = page_of(joint_run(tmp_path / "results", scenario))
    assert page.command is None
    assert page.answers[0].headline == "Nothing yet"
    assert "never met their SLOs together" in page.answers[0].lines[0]
    assert page.sections[0].figure is not None


def test_a_load_of_several_models_has_no_page_and_says_what_shows_it(tmp_path: Path) -> None:
    scenario = parse_scenario(models(tmp_path))
    run = create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={}, kind="load")
    with pytest.raises(UsageError, match="a load of several models has no page") as refused:
        write_report(run)
    assert refused.value.hint.startswith(f"`batchtune trials {run.path}`")
