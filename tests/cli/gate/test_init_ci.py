"""`batchtune init --ci`: jobs that runners accept, for the scenario at hand."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchtune.cli.commands.init_model import run_init_ci
from batchtune.errors import UsageError
from batchtune.report.ci_files import JOB_FILES
from tests.cli.in_process import answered
from tests.target.test_model_files import touched

LOAD = "load: {arrivals: closed, concurrency: 1}\nobjective: throughput\nname: n\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios" / "my model").mkdir(parents=True)
    (tmp_path / SCENARIO).write_text(f'target: {{model: "./my model"}}\n{LOAD}')
    return tmp_path


SCENARIO = "scenarios/a b.yaml"


def job(host: str, scenario: str = SCENARIO) -> tuple[str, dict[str, Any]]:
    """Text and document of the job that is written for this scenario."""
    file = Path("job.yml")
    file.unlink(missing_ok=True)
    assert run_init_ci(host, scenario, output=file) == 0
    text = file.read_text()
    return text, yaml.load(text, Loader=yaml.BaseLoader if host == "github" else yaml.SafeLoader)


def scripts(host: str, document: dict[str, Any]) -> list[str]:
    """What its check runs, the set-up first."""
    if host == "github":
        return [step["run"] for step in document["jobs"]["check"]["steps"] if "run" in step]
    return [*document[".batchtune"]["before_script"], *document["batchtune-check"]["script"]]


def with_scenario(target: str) -> str:
    Path("s.yaml").write_text(f"target: {{{target}}}\n{LOAD}")
    return "s.yaml"


def test_a_github_workflow_checks_both_models_side_by_side_and_renews_the_baseline(here):
    _, document = job("github")
    runs = scripts("github", document)
    check = next(run for run in runs if "--paired" in run)
    assert "batchtune check 'scenarios/a b.yaml' --paired" in check
    assert "--candidate-model 'scenarios/my model'" in check
    assert any("--update-baseline" in run for run in runs)
    assert document["jobs"]["check"]["timeout-minutes"] == "17"
    used = [step for step in document["jobs"]["check"]["steps"] if "uses" in step]
    assert all("@v" in step["uses"] for step in used)
    assert [step["with"]["lfs"] for step in used if "checkout" in step["uses"]] == ["true", "true"]
    (saved,) = (step for step in used if "cache/save" in step["uses"])
    (restored,) = (step for step in used if "cache/restore" in step["uses"])
    assert (saved["if"], saved["with"]["path"]) == ("always()", restored["with"]["path"])


def test_a_gitlab_pipeline_reports_junit_and_code_quality(here):
    _, document = job("gitlab")
    reports = {"junit": "batchtune.xml", "codequality": "batchtune-code-quality.json"}
    assert document["batchtune-check"]["artifacts"]["reports"] == reports
    assert document["batchtune-check"]["allow_failure"] == {"exit_codes": [5]}
    assert any("--update-baseline" in line for line in document["batchtune-baseline"]["script"])
    assert document[".batchtune"]["cache"]["when"] == "always"
    assert document[".batchtune"]["timeout"].endswith(" minutes")
    assert any("git lfs install" in line for line in document[".batchtune"]["before_script"])


def in_shell(script: str, folder: Path, *, code: int = 0) -> int:
    """How a step ends where batchtune ends with this code."""
    program = folder / "bin" / "batchtune"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def test_a_job_passes_what_is_inconclusive_and_the_change_that_adds_the_model_and_nothing_else(here):
    check = next(run for run in scripts("github", job("github")[1]) if "--paired" in run)
    adds = next(line for line in scripts("gitlab", job("gitlab")[1]) if "ls-files" in line)
    (here / "scenarios/my model/saved_model.pb").touch()
    subprocess.run(["git", "init", "-q", "."], cwd=here, check=True)
    assert in_shell(check, here, code=2) == 2  # a model that is not in git is to be built for both sides
    assert in_shell(f"{adds}\nexit 9", here) == 9
    subprocess.run(["git", "add", "scenarios"], cwd=here, check=True)
    assert in_shell(check, here, code=2) == 0
    assert in_shell(f"{adds}\nexit 9", here) == 0
    (here / "base/scenarios").mkdir(parents=True)
    (here / "base/scenarios/a b.yaml").touch()  # the model was moved
    assert in_shell(f"{adds}\nexit 9", here) == 9
    (here / "base/scenarios/a b.yaml").unlink()
    (here / "base/scenarios/my model").mkdir()
    assert in_shell(f"{adds}\nexit 9", here) == 9
    codes = (0, 1, 2, 3, 4, 5, 6, 7)
    assert [in_shell(check, here, code=code) for code in codes] == [0, 1, 2, 3, 4, 0, 6, 7]


@pytest.mark.parametrize(
    ("files", "target", "installed"),
    [
        (["m/1/saved_model.pb"], "model: ./m", "pip install 'batchtune[tensorflow]'"),
        (["m/1/model.onnx"], "model: ./m", "pip install 'batchtune[onnx]'"),
        (["m.onnx"], "model: ./m.onnx", "pip install 'batchtune[onnx]'"),
        (["m.onnx"], "model: ./m.onnx, docker: {image: i}", "pip install batchtune"),
        (["m/1/model.pt2"], "model: ./m", "whl/cpu && pip install 'batchtune[torch]'"),
        (["m/1/config.pbtxt", "m/1/model.onnx"], "kind: triton, model: ./m", "pip install batchtune"),
    ],
)
def test_a_job_installs_what_runs_the_model(here, files, target, installed):
    touched(*(here / file for file in files))
    for host in ("github", "gitlab"):
        assert scripts(host, job(host, with_scenario(target))[1])[0].endswith(installed)


def minutes_of(scenario: str) -> int:
    Path("timed.yaml").write_text(scenario)
    return int(job("github", "timed.yaml")[1]["jobs"]["check"]["timeout-minutes"])


def test_a_job_has_as_long_as_the_check_may_take(here):
    model = 'name: n\ntarget: {model: "./scenarios/my model"}\n'
    capacity = f"{model}load: {{arrivals: poisson}}\nslo: {{p95: 20ms}}\nobjective: capacity\n"
    searches_min = 2 * 36 * 2 * 45 / 60  # screen and confirmation, 36 blocks, two sides, 45 s a search
    assert minutes_of(f"{capacity}check: {{gates: {{capacity: 5%}}}}\n") > searches_min
    assert minutes_of(capacity) <= 20
    assert minutes_of(f"{capacity}check: {{blocks: 6}}\n") < minutes_of(capacity)


def test_the_last_line_is_a_command_that_runs_here(here, capsys):
    job("github")
    said = capsys.readouterr()
    assert "usually in about" in said.out
    command = "batchtune check 'scenarios/a b.yaml' --candidate-model 'scenarios/my model'"
    assert said.err.splitlines()[-1] == f"next: {command}"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("model: imdb_transformer", "'imdb_transformer' is not a folder of this repository"),
        ("model: /x/y", "lies outside of"),
        ("kind: external, rest_url: 'http://h:1'", "this server runs already"),
        ("kind: triton, rest_url: 'http://h:1', model: m", "this server runs already"),
        ("kind: command, apply: [true]", "target.kind: command: the job launches"),
        ("models: [{name: a, model: './my model'}]", "target.models: the job launches"),
    ],
)
def test_what_the_job_could_not_launch_twice_or_no_change_would_change_is_refused(here, target, reason):
    with pytest.raises(UsageError, match=reason):
        run_init_ci("github", with_scenario(target), output=None)
    assert not (here / JOB_FILES["github"]).exists()


@pytest.mark.parametrize(
    ("model", "named"),
    [("./built", "built"), ("./linked", "linked"), ("./scenarios/net.onnx", "scenarios/net.onnx")],
)
def test_a_model_is_named_from_the_top_and_one_that_the_job_is_to_build_is_told(here, capsys, model, named):
    touched(here / "scenarios/net.onnx")
    (here / "linked").symlink_to(here / "scenarios/my model", target_is_directory=True)
    text, _ = job("github", with_scenario(f"model: {model}"))
    assert f"--candidate-model {named}" in text
    note = "note: built is not here: have the job build or fetch it, and base/built"
    assert (note in capsys.readouterr().err) == (named == "built")


@pytest.mark.parametrize("host", ["github", "gitlab"])
def test_the_scripts_are_shell(here, host):
    for script in scripts(host, job(host)[1]):
        assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0


def test_a_scenario_that_is_not_there_and_a_file_that_is_are_refused(here):
    with pytest.raises(UsageError, match="no such scenario"):
        run_init_ci("github", None, output=None)
    Path("scenario.yaml").write_text(f'target: {{model: "scenarios/my model"}}\n{LOAD}')
    run_init_ci("github", None, output=None)
    assert (here / JOB_FILES["github"]).is_file()
    with pytest.raises(UsageError, match="already exists"):
        run_init_ci("github", None, output=None)


def test_the_gitlab_job_finds_the_target_branch_on_a_runner_that_was_used_before(here):
    lines = [line for line in scripts("gitlab", job("gitlab")[1]) if "worktree" in line]
    quiet = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x"
    subprocess.run(["bash", "-ec", f"git init -q . && {quiet}"], cwd=here, check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=here, text=True).strip()
    environment = {**os.environ, "CI_MERGE_REQUEST_DIFF_BASE_SHA": head}
    for leftover in (None, "worktree", "folder alone", "registered alone"):
        if leftover == "folder alone":
            shutil.rmtree(here / ".git/worktrees")
        if leftover == "registered alone":
            shutil.rmtree(here / "base")
        for line in lines:
            subprocess.run(["bash", "-ec", line], cwd=here, check=True, env=environment, capture_output=True)
        assert (here / "base/.git").is_file()


def test_a_job_names_the_scenario_from_the_top_of_the_repository(here, monkeypatch):
    assert "batchtune check 'scenarios/a b.yaml' --paired" in job("github", str(here / SCENARIO))[0]
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    with pytest.raises(UsageError, match="lies outside of"):
        job("github", f"../{SCENARIO}")


@pytest.mark.parametrize(("host", "schema"), [("github", "github-workflows"), ("gitlab", "gitlab-ci")])
def test_the_job_is_valid_by_its_runners_own_schema(here, host, schema):
    """Of schemastore, as check-jsonschema brings it; no network is asked."""
    job(host)
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", "job.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("system", ["github", "gitlab"])
def test_each_command_of_a_job_is_one_that_this_batchtune_takes(here, system):
    """With --help at its end a command is parsed, and runs nothing: an option that does not exist ends it with 2."""
    text, _ = job(system)
    lines = [line.lstrip("- ") for line in text.replace("\\\n", " ").splitlines()]
    commands = [line.removeprefix("batchtune check") for line in lines if line.startswith("batchtune check")]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.split("||")[0])
        assert answered("check", *words, "--help", cwd=here).returncode == 0, command
        assert answered("check", *words, "--no-such-option", "--help", cwd=here).returncode == 2
