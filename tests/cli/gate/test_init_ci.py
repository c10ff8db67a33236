"""`batchtune init --ci`: jobs that runners accept, for the scenario at hand."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchtune.cli.commands.init_model import run_init_ci
from batchtune.errors import UsageError
from batchtune.report.ci_files import JOB_FILES, job_text
from tests.cli.in_process import answered

LOAD = "load: {arrivals: closed, concurrency: 1}\nobjective: throughput\nname: n\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios" / "my model").mkdir(parents=True)
    (tmp_path / "scenarios" / "a b.yaml").write_text(f'target: {{model: "./my model"}}\n{LOAD}')
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
    assert document["jobs"]["check"]["timeout-minutes"] == "17"
    checkouts = [
        step["with"] for step in document["jobs"]["check"]["steps"] if "checkout" in step.get("uses", "")
    ]
    assert [checkout["lfs"] for checkout in checkouts] == ["true", "true"]
    saved = next(step for step in document["jobs"]["check"]["steps"] if "cache/save" in step.get("uses", ""))
    restored = next(
        step for step in document["jobs"]["check"]["steps"] if "cache/restore" in step.get("uses", "")
    )
    assert (saved["if"], saved["with"]["path"]) == ("always()", restored["with"]["path"])
    assert all("@v" in step["uses"] for step in document["jobs"]["check"]["steps"] if "uses" in step)


def test_a_gitlab_pipeline_reports_junit_and_code_quality(here):
    assert run_init_ci("gitlab", "scenarios/a b.yaml", output=Path("ci.yml")) == 0
    document = yaml.safe_load((here / "ci.yml").read_text())
    assert document["batchtune-check"]["artifacts"]["reports"] == {
        "junit": "batchtune.xml",
        "codequality": "batchtune-code-quality.json",
    }
    assert any("--update-baseline" in line for line in document["batchtune-baseline"]["script"])
    assert document["batchtune-check"]["allow_failure"] == {"exit_codes": [5]}
    assert document[".batchtune"]["cache"]["when"] == "always"
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
    run_init_ci("github", "scenarios/a b.yaml", output=Path("x.yml"))
    check = next(run for run in steps(yaml.safe_load(Path("x.yml").read_text())) if "--paired" in run)
    run_init_ci("gitlab", "scenarios/a b.yaml", output=Path("y.yml"))
    lines = yaml.safe_load(Path("y.yml").read_text())["batchtune-check"]["script"]
    adds = next(line for line in lines if "ls-files" in line)
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
    for file in files:
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        (here / file).touch()
    Path("s.yaml").write_text(f"target: {{{target}}}\n{LOAD}")
    for host in ("github", "gitlab"):
        run_init_ci(host, "s.yaml", output=Path(host))
        document = yaml.safe_load(Path(host).read_text())
        lines = steps(document) if host == "github" else document[".batchtune"]["before_script"]
        assert lines[0].endswith(installed)


def minutes_of(scenario: str) -> int:
    Path("timed.yaml").write_text(scenario)
    run_init_ci("github", "timed.yaml", output=Path("timed.yml"))
    document = yaml.safe_load(Path("timed.yml").read_text())
    Path("timed.yml").unlink()
    return int(document["jobs"]["check"]["timeout-minutes"])


def test_a_job_has_as_long_as_the_check_may_take(here):
    model = 'name: n\ntarget: {model: "./scenarios/my model"}\n'
    capacity = f"{model}load: {{arrivals: poisson}}\nslo: {{p95: 20ms}}\nobjective: capacity\n"
    searches_min = 2 * 36 * 2 * 45 / 60  # screen and confirmation, 36 blocks, two sides, 45 s a search
    assert minutes_of(f"{capacity}check: {{gates: {{capacity: 5%}}}}\n") > searches_min
    assert minutes_of(capacity) <= 20
    assert minutes_of(f"{capacity}check: {{blocks: 6}}\n") < minutes_of(capacity)
    run_init_ci("gitlab", "timed.yaml", output=Path("y.yml"))
    assert yaml.safe_load(Path("y.yml").read_text())[".batchtune"]["timeout"].endswith(" minutes")


def test_the_last_line_is_a_command_that_runs_here(here, capsys):
    Path("scenarios/my model").mkdir(exist_ok=True)
    run_init_ci("github", "scenarios/a b.yaml", output=None)
    told = capsys.readouterr()
    assert "usually in about" in told.out
    assert (
        told.err.splitlines()[-1]
        == "next: batchtune check 'scenarios/a b.yaml' --candidate-model 'scenarios/my model'"
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("imdb_transformer", "'imdb_transformer' is not a folder of this repository"),
        ("/x/y", "lies outside of"),
    ],
)
def test_a_model_that_no_change_would_change_is_refused(here, model, reason):
    Path("s.yaml").write_text(f"target: {{model: {model}}}\n{LOAD}")
    with pytest.raises(UsageError, match=reason):
        run_init_ci("github", "s.yaml", output=None)
    assert not (here / JOB_FILES["github"]).exists()


def test_a_model_that_the_job_is_to_build_is_told(here, capsys):
    Path("s.yaml").write_text(f"target: {{model: ./built}}\n{LOAD}")
    run_init_ci("github", "s.yaml", output=Path("x.yml"))
    assert (
        "note: built is not here: have the job build or fetch it, and base/built" in capsys.readouterr().err
    )
    assert "--candidate-model built" in Path("x.yml").read_text()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("{kind: external, rest_url: 'http://h:1'}", "this server runs already"),
        ("{kind: triton, rest_url: 'http://h:1', model: m}", "this server runs already"),
        ("{kind: command, apply: [true]}", "target.kind: command: the job launches"),
        ("{models: [{name: a, model: './my model'}]}", "target.models: the job launches"),
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
    Path("scenario.yaml").write_text(f'target: {{model: "scenarios/my model"}}\n{LOAD}')
    run_init_ci("github", None, output=Path("x.yml"))
    with pytest.raises(UsageError, match="already exists"):
        run_init_ci("github", None, output=Path("x.yml"))


def test_the_gitlab_job_finds_the_target_branch_on_a_runner_that_was_used_before(here):
    script = yaml.safe_load(job_text("gitlab", path="s", scenario="s", model="m", usual="50 s", minutes=20))[
        "batchtune-check"
    ]["script"]
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
    Path("linked.yaml").write_text(f"target: {{model: ./linked}}\n{LOAD}")
    run_init_ci("github", "linked.yaml", output=Path("x.yml"))
    assert "--candidate-model linked" in Path("x.yml").read_text()


def test_a_model_that_is_a_file_is_named(here):
    (here / "scenarios/net.onnx").touch()
    Path("scenarios/file.yaml").write_text(f"target: {{model: ./net.onnx}}\n{LOAD}")
    run_init_ci("github", "scenarios/file.yaml", output=Path("x.yml"))
    assert "--candidate-model scenarios/net.onnx" in Path("x.yml").read_text()


@pytest.mark.parametrize(("host", "schema"), [("github", "github-workflows"), ("gitlab", "gitlab-ci")])
def test_the_job_is_valid_by_its_runners_own_schema(here, host, schema):
    """Of schemastore, as check-jsonschema brings it; no network is asked."""
    run_init_ci(host, "scenarios/a b.yaml", output=Path("job.yml"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", "job.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("system", ["github", "gitlab"])
def test_each_command_of_a_job_is_one_that_this_batchtune_takes(here, system):
    """With --help at its end a command is parsed, and runs nothing: an option that does not exist ends it with 2."""
    run_init_ci(system, "scenarios/a b.yaml", output=Path("job.yml"))
    lines = Path("job.yml").read_text().replace("\\\n", " ").splitlines()
    commands = [
        line.split("batchtune check", 1)[1]
        for line in lines
        if line.lstrip("- ").startswith("batchtune check")
    ]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.split("||")[0])
        assert answered("check", *words, "--help", cwd=here).returncode == 0, command
        assert answered("check", *words, "--no-such-option", "--help", cwd=here).returncode == 2
