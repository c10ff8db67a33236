"""A sweep of several models: the answer, the files, the page, and a run of before that has its answer in another file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from batchtune.archive.listing import runs_under
from batchtune.archive.run import JOINT_RECOMMENDATION, RECOMMENDATION, Run, create_run
from batchtune.archive.server_files import own_file
from batchtune.cli.commands.report import write_report
from batchtune.errors import UsageError
from batchtune.scenario.reader import format_scenario, parse_scenario
from batchtune.tune.trials.trial import Trial
from tests.cli.in_process import answered
from tests.report.pages import document_of
from tests.tune.search.test_several_models import LATENCY, TEXT, swept


def models(folder: Path, text: str = TEXT) -> str:
    """The scenario with models that are there."""
    for name in "ab":
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "saved_model.pb").touch()
    return text.replace("model: a", f"model: {folder}/a").replace("model: b", f"model: {folder}/b")


@cache
def trials_of(text: str) -> list[Trial]:
    return swept(parse_scenario(text))


def kept(root: Path, text: str = TEXT, *, measured: str | None = None) -> Run:
    """A sweep on the simulated server."""
    scenario = parse_scenario(models(root, text) if measured is None else text)
    run = create_run(scenario, format_scenario(scenario), root=root / "results", provenance={})
    for trial in trials_of(measured or text):
        run.append(trial, None)
    return run


def told(*words: str | Path, cwd: Path, code: int = 0) -> str:
    done = answered(*map(str, words), cwd=cwd)
    assert done.returncode in (code, 5), done.stderr
    return " ".join(done.stdout.replace("\N{NO-BREAK SPACE}", " ").split())


def test_the_command_that_deploys_copies_each_models_parameters_beside_it(tmp_path: Path) -> None:
    run = kept(tmp_path)
    document = json.loads(answered("recommend", str(run.path), "--json", cwd=tmp_path).stdout)
    assert [model["name"] for model in document["models"]] == ["ranker", "reader"]
    copied = f"cp {own_file(run.path / 'batching_parameters.txt', 'reader')} {tmp_path}/b/1/"
    assert copied in told("recommend", run.path, cwd=tmp_path)


def test_models_that_are_files_are_copied_to_where_the_list_of_models_finds_them(tmp_path: Path) -> None:
    text = TEXT
    for name in "ab":
        (tmp_path / f"{name}.onnx").touch()
        text = text.replace(f"model: {name}", f"model: {tmp_path}/{name}.onnx")
    run = kept(tmp_path, text, measured=TEXT)
    said = told("recommend", run.path, cwd=tmp_path)
    assert "PATH/" not in said
    for name, file in (("ranker", "a.onnx"), ("reader", "b.onnx")):
        base_path = run.path / "models" / name
        assert f"mkdir -p {base_path}/1 && cp -r {tmp_path}/{file} {base_path}/1/model.onnx" in said
        assert f"cp {base_path}/batching_params.pbtxt {base_path}/1/batching_params.pbtxt" in said
        assert f'base_path: "{base_path}"' in (run.path / "models.config").read_text()


def test_a_latency_claims_no_rates_that_were_not_searched(tmp_path: Path) -> None:
    text = told("recommend", kept(tmp_path, LATENCY).path, cwd=tmp_path)
    assert "At ×1 of the stated rates, all models together:" in text
    assert "the tightest limit was used to" in text
    assert "of its tightest limit with" in text
    assert "alone it met its SLO at" not in text


def test_the_page_shows_every_model_and_every_load(tmp_path: Path) -> None:
    run = kept(tmp_path)
    document = document_of(write_report(run).read_text())
    together = [trial for trial in run.ledger() if not trial.request.models and trial.source != "probe"]
    figure = document["figures"]["rates"]
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(together)
    assert figure["layout"]["yaxis"]["title"]["text"] == "share of the tightest limit"
    assert len(document["rows"]) == sum(len(trial.parts) for trial in run.ledger())
    first = document["rows"][document["details"][0]["rows"][0]]
    assert first[1].startswith("ranker together ×")


def test_a_sweep_without_an_answer_says_why_on_its_page(tmp_path: Path) -> None:
    text = LATENCY.replace("p95: 25ms", "p95: 1ms")
    run = kept(tmp_path, text)
    assert "Nothing meets the SLO" in write_report(run).read_text()
    done = answered("recommend", str(run.path), cwd=tmp_path)
    assert done.returncode == 3
    assert "ranker:p95" in done.stderr


def test_files_of_another_recommendation_do_not_stay(tmp_path: Path) -> None:
    run = kept(tmp_path)
    stale = own_file(run.path / "batching_parameters.txt", "gone")
    stale.parent.mkdir(parents=True)
    stale.write_text("max_batch_size { value: 7 }")
    told("recommend", run.path, cwd=tmp_path)
    assert not stale.exists()
    own = own_file(run.path / "batching_parameters.txt", "reader").read_text()
    assert "max_batch_size { value: 4 }" in own
    assert f'base_path: "{tmp_path}/a"' in (run.path / "models.config").read_text()


def test_a_run_of_before_is_answered_from_its_trials(tmp_path: Path) -> None:
    run = kept(tmp_path)
    (run.path / JOINT_RECOMMENDATION).write_text('{"schema_version": 2, "factor": 9.9}')
    (listed,) = runs_under(tmp_path / "results")
    assert listed.verdict in ("established", "open")
    assert "ranker: max_batch_size=16" in (listed.recommended or "")
    assert not (run.path / RECOMMENDATION).exists()


def test_a_load_of_several_models_has_no_page_and_says_what_shows_it(tmp_path: Path) -> None:
    scenario = parse_scenario(models(tmp_path))
    run = create_run(scenario, format_scenario(scenario), root=tmp_path, provenance={}, kind="load")
    with pytest.raises(UsageError, match="a load of several models has no page") as refused:
        write_report(run)
    assert refused.value.hint.startswith(f"`batchtune trials {run.path}`")
