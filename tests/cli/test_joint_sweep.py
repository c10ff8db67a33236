"""A sweep of two models on one server, to the end: launched, searched, kept, recommended, gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from batchtune.errors import MeasurementInvalidError, NoFeasibleConfigurationError
from batchtune.server.models.model_config import read_model_config_file
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED, batchtune, write_version

SEARCH = "search: {budget: {trials: 2, time: 12s}, space: {max_batch_size: [4, 8], num_batch_threads: [1]}}\n"
SCENARIO = f"""\
name: two
target:
  models:
    - {{name: quick, model: ./quick, rate: 200/s, slo: {{p95: 10s, errors: 0.9}}}}
    - {{name: slow, model: ./slow, rate: 100/s, slo: {{p95: 10s, errors: 0.9}}, space: {{max_batch_size: [2]}}}}
load: {{arrivals: poisson, warm_up: 50ms, duration: 150ms}}
objective: latency
fixed: {{batch_timeout_micros: 0}}
{SEARCH}"""
VARIANTS = "variants: {four: {fixed: {max_batch_size: 4}}, none: {fixed: {enable_batching: false}}}\n"


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    for name, base_ms in (("quick", "1.0"), ("slow", "4.0")):
        write_version(tmp_path / name, EMULATED.replace("2.0", base_ms))
    scenario = tmp_path / "two.yaml"
    scenario.write_text(SCENARIO)
    return scenario


def trials_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_models_are_swept_together(two_models: Path, tmp_path: Path) -> None:
    done = batchtune("sweep", two_models, "--json", cwd=tmp_path)
    if done.returncode in (MeasurementInvalidError.exit_code, NoFeasibleConfigurationError.exit_code):
        pytest.skip(f"this host left the client no time in any load of both models: {done.stderr}")
    assert done.returncode in (0, 5), done.stderr
    document = json.loads(done.stdout)
    if "models" not in document:
        pytest.skip(f"as many loads of both models missed the SLO on this host as met it: {document}")
    run = tmp_path / document["run"]
    assert [model["name"] for model in document["models"]] == ["quick", "slow"]
    assert [promise["name"] for promise in document["promises"]] == ["quick:p95", "slow:p95"]
    trials = trials_of(run)
    assert {bool(trial["models"]) for trial in trials} == {True, False}
    assert all(set(trial["parts"]) == set(trial["models"] or ("quick", "slow")) for trial in trials)
    log = (run / "server.log").read_text()
    assert log.count("available") == 2  # the parameters changed without a restart

    again = answered("recommend", document["run"], "--json", cwd=tmp_path)
    assert json.loads(again.stdout) == document
    written = answered("recommend", document["run"], "--write", "out.txt", cwd=tmp_path)
    assert "At ×1 of the stated rates, all models together" in written.stdout
    listed = tmp_path / "out.models.config"
    assert f"batchtune-model-server --model_config_file={listed.name}" in written.stdout  # no SavedModel
    assert (tmp_path / "out.txt").read_text() == (run / "batching_parameters.txt").read_text()
    for name in document["configuration"].get("models", {}):
        own = Path("out.models") / name / "batching_params.pbtxt"
        assert f"cp {own} {tmp_path}/{name}/1/batching_params.pbtxt" in written.stdout
        assert (tmp_path / own).read_text() == (run / "models" / name / own.name).read_text()
    served = {model.name: model.base_path for model in read_model_config_file(listed)}
    assert served == {name: tmp_path / name for name in ("quick", "slow")}
    for words, code, refusal in (
        (("recommend", document["run"], "--write", "."), 2, "--write: . is not a file; several are written"),
        (("recommend", document["run"], "--slo-p95", "1ms"), 2, "--slo-…: not of a sweep of several models"),
        (("simulate", document["run"], "--rate", "5"), 5, "which the simulator does not support"),
        (("plan", document["run"], "--rate", "5"), 5, "which the simulator does not support"),
    ):
        refused = answered(*words, cwd=tmp_path)
        assert (refused.returncode, refusal in refused.stderr) == (code, True), refused.stderr
    (entry,) = json.loads(answered("runs", "--json", cwd=tmp_path).stdout)["runs"]
    verdict = "established" if done.returncode == 0 else "open"
    assert (entry["target"], entry["verdict"]) == ("quick + slow", verdict)
    ledger = (run / "trials.jsonl").read_text()
    (run / "trials.jsonl").write_text(ledger[:-100])  # killed while it wrote the last trial
    killed = answered("recommend", document["run"], cwd=tmp_path)
    assert killed.returncode in (0, 3, 5), killed.stderr
    page = answered("report", document["run"], cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    assert "quick + slow" in (tmp_path / page.stdout.strip()).read_text()


ONE_SIZE: Final = ("--set", "search.space.max_batch_size=[4]")
ONE_VALUE: Final = (*ONE_SIZE, "--set", "target.models.1.space.max_batch_size=[2]")
OWN_SIZE: Final = ("search.space.max_batch_size: slow has its own", "target.models.1.space.max_batch_size=…")
OWN_SLO: Final = ("slo: quick, slow have their own", "--set target.models.0.slo.…=…")


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("sweep", ("--rate", "5"), ("--rate: not of several models", "write rate at each of target.models")),
        ("load", ("--rate", "5"), ("hint: write rate: at each of target.models",)),
        ("sweep", ("--slo-p95", "4ms"), OWN_SLO),
        ("load", ("--slo-p95", "1ms"), OWN_SLO[:1]),
        ("compare", ("--slo-p95", "1ms"), OWN_SLO[:1]),
        ("check", ("--slo-p95", "1ms"), OWN_SLO[:1]),
        ("sweep", ("--optuna-storage", "sqlite:///a.db"), ("--optuna-storage: not of several models",)),
        ("sweep", ("--set", "search.strategy=rule"), ("search.strategy: rule searches one model",)),
        ("sweep", ("--set", "objective=throughput"), ("objective",)),
        ("sweep", ONE_VALUE, ("search.space: no parameter has two values to try",)),
        ("sweep", ONE_SIZE, OWN_SIZE),
    ],
)
def test_what_several_models_cannot_be_asked_is_told_before_anything_is_launched(
    two_models: Path, command: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = answered(command, two_models, *options, cwd=two_models.parent)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (two_models.parent / "results").exists()


def test_a_limit_of_all_models_is_heard_where_none_has_its_own(two_models: Path) -> None:
    two_models.write_text(SCENARIO.replace(", slo: {p95: 10s, errors: 0.9}", ""))
    done = answered("sweep", two_models, "--slo-p95", "4ms", *ONE_VALUE, cwd=two_models.parent)
    assert (done.returncode, "no parameter has two values to try" in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_two_models_are_compared_and_checked_side_by_side(two_models: Path, tmp_path: Path) -> None:
    text = SCENARIO.replace("space: {max_batch_size: [2]}", "batching: {max_batch_size: 2}")
    two_models.write_text(text.replace(SEARCH, VARIANTS))
    limits = ("--blocks", "2", "--max-regress", "p95=90%")
    done = batchtune("compare", two_models, *limits, "--json", cwd=tmp_path)
    assert done.returncode in (0, 1, 3, 5, 6), done.stderr  # so short runs tell little
    document = json.loads(done.stdout)
    assert [pair["variant"] for pair in document["pairs"]] == ["none/quick", "none/slow"]
    (account,) = document["checks"]
    gates = [(gate["model"], gate["metric"]) for gate in account["gates"]]
    assert gates == [("quick", "p95"), ("slow", "p95")]
    run = tmp_path / document["run"]
    trials = trials_of(run)
    reasons = {(trial["reason"], part["reason"]) for trial in trials for part in trial["parts"].values()}
    assert reasons == {(side, f"{side}/{model}") for side in ("four", "none") for model in ("quick", "slow")}
    assert all(trial["failure"] is None for trial in trials)
    four = [trial["configuration"] for trial in trials if trial["reason"] == "four"]
    assert all(configuration["models"]["slow"]["max_batch_size"] == 2 for configuration in four)
    assert answered("recommend", document["run"], cwd=tmp_path).returncode == 2
    page = (run / "report.html").read_text()
    assert all(words in page for words in ("quick + slow", "Does batching help?", "four/quick"))

    limits = ("--blocks", "6", "--max-regress", "errors=50%")
    done = batchtune("check", two_models, *limits, "--json", cwd=tmp_path)
    assert done.returncode in (0, 5, 6), done.stderr
    account = json.loads(done.stdout)
    gates = [(gate["model"], gate["metric"]) for gate in account["gates"]]
    assert gates == [("quick", "errors"), ("slow", "errors")]
    assert "Is it still as good?" in (tmp_path / account["run"] / "report.html").read_text()


@pytest.mark.slow
def test_two_models_are_loaded_at_once_and_each_alone(two_models: Path, tmp_path: Path) -> None:
    text = SCENARIO.replace(
        "space: {max_batch_size: [2]}", "batching: {max_batch_size: 2}, request: {rows: 2}"
    )
    two_models.write_text(text.replace(SEARCH, ""))
    done = batchtune("load", two_models, "--set", "load.duration=400ms", "--json", cwd=tmp_path)
    assert done.returncode in (0, 5, 6), done.stderr  # so short a run may leave the SLO unsure
    document = json.loads(done.stdout)
    for name, rate, rows in (("quick", 200.0, 1), ("slow", 100.0, 2)):
        for beside in ("together", "alone"):
            measured = document["models"][name][beside]["measurement"]
            assert (measured["offered_rps"], measured["errors"]) == (pytest.approx(rate, rel=0.5), {})
            per_request = measured["throughput_rows_per_s"]["value"] / measured["throughput_rps"]["value"]
            assert per_request == pytest.approx(rows)
    assert set(document["server"]["model_batches"]) == set(document["models"]) == {"quick", "slow"}
    run = tmp_path / document["run"]
    assert [(trial["reason"], *trial["parts"]) for trial in trials_of(run)] == [
        ("together", "quick", "slow"),
        ("alone", "quick"),
        ("alone", "slow"),
    ]
    assert re.search(
        r"model slow version 1 is available: .* max_batch_size 2,", (run / "server.log").read_text()
    )
