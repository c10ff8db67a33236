"""A sweep of two models on one server, to the end: launched, searched, kept, recommended, gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from batchtune.errors import MeasurementInvalidError, NoFeasibleConfigurationError
from batchtune.server.models.model_config import read_model_config_file
from tests.cli.in_process import answered
from tests.cli.test_cli import batchtune

EMULATED = """\
service_time: {base_ms: %s, per_row_ms: 0.1}
inputs: {x: {dtype: float32, shape: [2]}}
outputs: {y: {dtype: float32, shape: [1]}}
"""


def two_models(folder: Path) -> Path:
    for name, base_ms in (("quick", 1.0), ("slow", 4.0)):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "emulated.yaml").write_text(EMULATED % base_ms)
    scenario = folder / "two.yaml"
    scenario.write_text(
        f"""\
name: two
target:
  models:
    - {{name: quick, model: {folder}/quick, rate: 200/s, slo: {{p95: 10s, errors: 0.9}}}}
    - {{name: slow, model: {folder}/slow, rate: 100/s, slo: {{p95: 10s, errors: 0.9}}, space: {{max_batch_size: [2]}}}}
load: {{arrivals: poisson, warm_up: 50ms, duration: 150ms}}
objective: latency
search: {{budget: {{trials: 2, time: 12s}}, space: {{max_batch_size: [4, 8], num_batch_threads: [1]}}}}
fixed: {{batch_timeout_micros: 0}}
"""
    )
    return scenario


@pytest.mark.slow
def test_two_models_are_swept_together(tmp_path: Path) -> None:
    scenario = two_models(tmp_path)
    done = batchtune("sweep", scenario, "--json", cwd=tmp_path)
    if done.returncode in (MeasurementInvalidError.exit_code, NoFeasibleConfigurationError.exit_code):
        pytest.skip(f"this host left the client no time in any load of both models: {done.stderr}")
    assert done.returncode in (0, 5), done.stderr
    document = json.loads(done.stdout)
    if "models" not in document:
        pytest.skip(f"as many loads of both models missed the SLO on this host as met it: {document}")
    run = tmp_path / document["run"]
    assert [model["name"] for model in document["models"]] == ["quick", "slow"]
    assert [promise["name"] for promise in document["promises"]] == ["quick:p95", "slow:p95"]
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert {bool(trial["models"]) for trial in trials} == {True, False}
    assert all(set(trial["parts"]) == set(trial["models"] or ("quick", "slow")) for trial in trials)
    assert (run / "server.log").read_text().count(
        "available"
    ) == 2  # the parameters changed without a restart

    again = answered("recommend", document["run"], "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == document
    told = answered("recommend", document["run"], cwd=tmp_path)
    assert "At ×1 of the stated rates, all models together" in told.stdout
    assert (  # an emulated device is no SavedModel
        f"batchtune-model-server --model_config_file={document['run']}/models.config" in told.stdout
    )
    written = answered("recommend", document["run"], "--write", "out.txt", cwd=tmp_path)
    listed = tmp_path / "out.models.config"
    assert f"--model_config_file={listed.name}" in written.stdout
    assert (tmp_path / "out.txt").read_text() == (run / "batching_parameters.txt").read_text()
    for name in document["configuration"].get("models", {}):
        own = Path("out.models") / name / "batching_params.pbtxt"
        assert f"cp {own} {tmp_path}/{name}/1/batching_params.pbtxt" in written.stdout
        assert (tmp_path / own).read_text() == (run / "models" / name / own.name).read_text()
    served = read_model_config_file(listed)
    assert [(model.name, model.base_path) for model in served] == [
        (name, tmp_path / name) for name in ("quick", "slow")
    ]
    refused = answered("recommend", document["run"], "--write", ".", cwd=tmp_path)
    assert (
        refused.returncode,
        "--write: . is not a file; several are written" in refused.stderr,
    ) == (
        2,
        True,
    )
    refused = answered("recommend", document["run"], "--slo-p95", "1ms", cwd=tmp_path)
    assert (refused.returncode, "--slo-…: not of a sweep of several models" in refused.stderr) == (2, True)
    (entry,) = json.loads(answered("runs", "--json", cwd=tmp_path).stdout)["runs"]
    assert (entry["target"], entry["verdict"]) == (
        "quick + slow",
        "established" if done.returncode == 0 else "open",
    )
    for words in (("simulate", "--rate", "5"), ("plan", "--rate", "5")):
        twin = answered(words[0], document["run"], *words[1:], cwd=tmp_path)
        assert (
            twin.returncode,
            "is of several models, which the simulator does not support" in twin.stderr,
        ) == (
            5,
            True,
        )
    ledger = (run / "trials.jsonl").read_text().splitlines(keepends=True)
    (run / "trials.jsonl").write_text("".join(ledger)[:-100])  # killed while it wrote the last trial
    killed = answered("recommend", document["run"], cwd=tmp_path)
    assert killed.returncode in (0, 3, 5), killed.stderr
    page = answered("report", document["run"], cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    text = (tmp_path / page.stdout.strip()).read_text()
    assert all(words in text for words in ("quick + slow", "How the contenders compare", "models.config"))


ONE_VALUE: Final = (
    *("--set", "search.space.max_batch_size=[4]"),
    *("--set", "target.models.1.space.max_batch_size=[2]"),
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rate", "5"), ("--rate: not of several models", "write rate at each of target.models")),
        (("--slo-p95", "4ms"), ("slo: quick, slow have their own", "--set target.models.0.slo.…=…")),
        (("--optuna-storage", "sqlite:///a.db"), ("--optuna-storage: not of several models",)),
        (("--set", "search.strategy=rule"), ("search.strategy: rule searches one model",)),
        (("--set", "objective=throughput"), ("objective",)),
        (ONE_VALUE, ("search.space: no parameter has two values to try",)),
        (
            ONE_VALUE[:2],
            ("search.space.max_batch_size: slow has its own", "target.models.1.space.max_batch_size=…"),
        ),
    ],
)
def test_what_a_joint_sweep_cannot_do_is_told_before_anything_is_launched(
    tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = answered("sweep", two_models(tmp_path), *options, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "results").exists()


def test_a_limit_of_all_models_is_heard_where_none_has_its_own(tmp_path: Path) -> None:
    scenario = two_models(tmp_path)
    scenario.write_text(scenario.read_text().replace(", slo: {p95: 10s, errors: 0.9}", ""))
    done = answered("sweep", scenario, "--slo-p95", "4ms", *ONE_VALUE, cwd=tmp_path)
    assert (done.returncode, "no parameter has two values to try" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("command", ["load", "compare", "check"])
def test_a_limit_that_no_model_would_be_held_to_is_refused(tmp_path: Path, command: str) -> None:
    done = answered(command, two_models(tmp_path), "--slo-p95", "1ms", cwd=tmp_path)
    assert (done.returncode, "slo: quick, slow have their own" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "results").exists()


VARIANTS = """\
variants:
  four: {fixed: {max_batch_size: 4}}
  none: {fixed: {enable_batching: false}}
"""


@pytest.mark.slow
def test_two_models_are_compared_and_checked_side_by_side(tmp_path: Path) -> None:
    scenario = two_models(tmp_path)
    scenario.write_text(
        scenario.read_text()
        .replace("space: {max_batch_size: [2]}", "batching: {max_batch_size: 2}")
        .replace(
            "search: {budget: {trials: 2, time: 12s}, space: {max_batch_size: [4, 8], num_batch_threads: [1]}}\n",
            "",
        )
        + VARIANTS
    )
    done = batchtune("compare", scenario, "--blocks", "2", "--max-regress", "p95=90%", "--json", cwd=tmp_path)
    assert done.returncode in (0, 1, 3, 5, 6), done.stderr  # so short runs tell little
    document = json.loads(done.stdout)
    assert [pair["variant"] for pair in document["pairs"]] == ["none/quick", "none/slow"]
    (account,) = document["checks"]
    assert [(gate["model"], gate["metric"]) for gate in account["gates"]] == [
        ("quick", "p95"),
        ("slow", "p95"),
    ]
    run = tmp_path / document["run"]
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    assert {trial["reason"] for trial in trials} == {"four", "none"}
    assert {part["reason"] for trial in trials for part in trial["parts"].values()} == {
        "four/quick",
        "four/slow",
        "none/quick",
        "none/slow",
    }
    assert all(trial["failure"] is None for trial in trials)
    four = [trial["configuration"] for trial in trials if trial["reason"] == "four"]
    assert all(configuration["models"]["slow"]["max_batch_size"] == 2 for configuration in four)
    refused = answered("recommend", document["run"], cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout
    page = (run / "report.html").read_text()
    assert "quick + slow" in page
    assert "Does batching help?" in page
    assert "four/quick" in page

    done = batchtune(
        "check", scenario, "--blocks", "6", "--max-regress", "errors=50%", "--json", cwd=tmp_path
    )
    assert done.returncode in (0, 5, 6), done.stderr
    account = json.loads(done.stdout)
    assert [(gate["model"], gate["metric"]) for gate in account["gates"]] == [
        ("quick", "errors"),
        ("slow", "errors"),
    ]
    assert "Is it still as good?" in (tmp_path / account["run"] / "report.html").read_text()
