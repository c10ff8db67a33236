"""`batchtune init --ci`: jobs that runners accept, for the scenario at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchtune.cli.commands.gate.ci import run_init_ci
from batchtune.errors import UsageError
from batchtune.report.gate.ci_jobs import JOB_FILES, job_text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios" / "my model").mkdir(parents=True)
    (tmp_path / "scenarios" / "a b.yaml").write_text('target: {model: "./my model"}\n')
    return tmp_path


def steps(document) -> list[str]:
    return [step["run"] for step in document["jobs"]["check"]["steps"] if "run" in step]


def test_a_github_workflow_checks_both_models_side_by_side_and_renews_the_baseline(here):
    assert run_init_ci("github", "scenarios/a b.yaml", output=None) == 0
    document = yaml.load((here / JOB_FILES["github"]).read_text(), Loader=yaml.BaseLoader)
    check = next(run for run in steps(document) if "--paired" in run)
    assert "batchtune check 'scenarios/a b.yaml' --paired" in check
    assert "--candidate-model 'scenarios/my model'" in check
    assert any("--update-baseline" in run for run in steps(document))
    assert document["jobs"]["check"]["timeout-minutes"] == "30"
    assert all("@v" in step["uses"] for step in document["jobs"]["check"]["steps"] if "uses" in step)


def test_a_gitlab_pipeline_reports_junit_and_code_quality(here):
    assert run_init_ci("gitlab", "scenarios/a b.yaml", output=Path("ci.yml")) == 0
    document = yaml.safe_load((here / "ci.yml").read_text())
    assert document["batchtune-check"]["artifacts"]["reports"] == {
        "junit": "batchtune.xml",
        "codequality": "batchtune-code-quality.json",
    }
    assert any("--update-baseline" in line for line in document["batchtune-baseline"]["script"])


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("{kind: external, rest_url: 'http://h:1'}", "this server runs already"),
        ("{kind: triton, rest_url: 'http://h:1', model: m}", "this server runs already"),
        ("{kind: command, apply: [true]}", "no command says which model"),
        ("{models: [{name: a, model: './my model'}]}", "several do not say which is meant"),
    ],
)
def test_a_server_that_the_job_could_not_launch_twice_is_refused_beforehand(here, target, reason):
    (here / "running.yaml").write_text(f"target: {target}\n")
    with pytest.raises(UsageError, match=reason):
        run_init_ci("github", "running.yaml", output=None)
    assert not (here / JOB_FILES["github"]).exists()


def test_the_scripts_are_shell(here):
    for host in ("github", "gitlab"):
        run_init_ci(host, "scenarios/a b.yaml", output=Path(f"{host}.yml"))
        document = yaml.safe_load((here / f"{host}.yml").read_text())
        scripts = steps(document) if host == "github" else document["batchtune-check"]["script"]
        for script in scripts:
            assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0


def test_a_scenario_that_is_not_there_and_a_file_that_is_are_refused(here):
    with pytest.raises(UsageError, match="no such scenario"):
        run_init_ci("github", None, output=None)
    Path("scenario.yaml").write_text("target: {model: imdb_transformer}\n")
    run_init_ci("github", None, output=Path("x.yml"))
    assert "--candidate-model model" in Path("x.yml").read_text()
    with pytest.raises(UsageError, match="is there already"):
        run_init_ci("github", None, output=Path("x.yml"))


def test_the_gitlab_job_finds_the_target_branch_on_a_runner_that_was_used_before(here):
    script = yaml.safe_load(job_text("gitlab", path="s", scenario="s", model="m"))["batchtune-check"][
        "script"
    ]
    lines = [line for line in script if "worktree" in line]
    quiet = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x"
    subprocess.run(["bash", "-ec", f"git init -q . && {quiet}"], cwd=here, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, check=True, capture_output=True, text=True
    ).stdout
    environment = {**os.environ, "CI_MERGE_REQUEST_DIFF_BASE_SHA": head.strip()}
    for leftover in (None, "worktree", "folder alone", "registered alone"):
        if leftover == "folder alone":
            shutil.rmtree(here / ".git/worktrees")
        if leftover == "registered alone":
            shutil.rmtree(here / "base")
        for line in lines:
            subprocess.run(["bash", "-ec", line], cwd=here, check=True, env=environment, capture_output=True)
        assert (here / "base/.git").is_file()


def test_a_job_names_the_scenario_from_the_top_of_the_repository(here, monkeypatch):
    run_init_ci("github", str(here / "scenarios/a b.yaml"), output=Path("x.yml"))
    assert "batchtune check 'scenarios/a b.yaml' --paired" in Path("x.yml").read_text()
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    with pytest.raises(UsageError, match="lies outside of"):
        run_init_ci("github", "../scenarios/a b.yaml", output=Path("x.yml"))


def test_a_linked_model_is_named_by_its_link(here):
    (here / "linked").symlink_to(here / "scenarios/my model", target_is_directory=True)
    Path("linked.yaml").write_text("target: {model: ./linked}\n")
    run_init_ci("github", "linked.yaml", output=Path("x.yml"))
    assert "--candidate-model linked" in Path("x.yml").read_text()


def test_a_model_that_is_a_file_is_named(here):
    (here / "scenarios/net.onnx").touch()
    Path("scenarios/file.yaml").write_text("target: {model: ./net.onnx}\n")
    run_init_ci("github", "scenarios/file.yaml", output=Path("x.yml"))
    assert "--candidate-model scenarios/net.onnx" in Path("x.yml").read_text()


@pytest.mark.parametrize(("host", "schema"), [("github", "github-workflows"), ("gitlab", "gitlab-ci")])
def test_the_job_is_valid_by_its_runners_own_schema(here, host, schema):
    """Of schemastore, as check-jsonschema brings it; no network is asked."""
    run_init_ci(host, "scenarios/a b.yaml", output=Path("job.yml"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", "job.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
