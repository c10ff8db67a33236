"""`batchtune check` as a user meets it: a real server, emulated models, what goes wrong, and what a job is told."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from batchtune.cli.arguments.options import CheckRequest
from batchtune.cli.commands.run_check import asked_pair, run_check, with_sides
from batchtune.errors import TargetError, UsageError
from batchtune.scenario.reader import format_scenario, read_kept_variants, read_scenario
from batchtune.target.tfserving import TfServingTarget
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED, batchtune, kept_ledger, servers_of, write_version

SCENARIO = """\
name: gate
target: {model: ./emulated}
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 8, warm_up: 50ms, duration: 200ms, seed: 1}
objective: throughput
fixed: {max_batch_size: 8, batch_timeout_micros: 0, num_batch_threads: 1}
check: {gates: {throughput: 10%, p95: 20%}, blocks: 6}
"""
SLOWER = EMULATED.replace("base_ms: 2.0", "base_ms: 20.0")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    write_version(tmp_path / "emulated")
    write_version(tmp_path / "slower", SLOWER)
    path = tmp_path / "gate.yaml"
    path.write_text(SCENARIO)
    return path


def asked(scenario: Path, **changes) -> int:
    results = scenario.parent / "results"
    return run_check(CheckRequest(scenario=scenario, results=results, quiet=True, **changes))


TWO = "variants: {a: {}, b: {}}"


@pytest.mark.parametrize(
    ("variants", "changes", "words"),
    [
        ("", {}, "nothing to compare: no variants"),
        ("variants: {a: {}, b: {}, c: {}}", {}, "compares one candidate with 'a'"),
        (TWO, {"candidate": "d"}, "--candidate d: no candidate of "),
        (TWO, {"max_regress": ["p96=5%"]}, "no figure is called 'p96'"),
        ("", {"candidate_set": ["target.model=/no/such/model"]}, "/no/such/model"),
        (TWO, {"max_regress": ["capacity=5%"]}, "capacity: no run searches it"),
        (TWO, {"junit": Path()}, "cannot write .: Is a directory"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_before_anything_runs(scenario, variants, changes, words):
    scenario.write_text(scenario.read_text() + variants)
    with pytest.raises(UsageError) as raised:
        asked(scenario, **changes)
    assert words in raised.value.message
    assert not (scenario.parent / "results").exists()


def test_a_server_that_cannot_be_put_back_is_told_after_the_verdict(scenario, monkeypatch):
    def failing(target: TfServingTarget) -> None:
        close(target)
        raise TargetError("the model was not put back")

    close = TfServingTarget.close
    monkeypatch.setattr(TfServingTarget, "close", failing)
    broken = ["--set", "target.command=[no_such_model_server]", "--candidate-set", "load.seed=2"]
    done = answered("check", scenario, *broken, cwd=scenario.parent)
    assert done.returncode == 7
    verdict = "INVALID candidate against baseline: baseline: cannot start 'no_such_model_server'"
    assert " ".join(done.stdout.split()).startswith(verdict)
    assert "error: the model was not put back\nhint: `batchtune restore results/gate/" in done.stderr
    (kept,) = scenario.parent.glob("results/gate/*-check/check.json")
    assert json.loads(kept.read_text())["verdict"] == "INVALID"
    assert (scenario.parent / "results/history.jsonl").read_text().count("\n") == 1


def test_the_kept_scenario_holds_both_sides(scenario: Path, tmp_path: Path) -> None:
    wanted = CheckRequest(scenario=scenario, candidate_set=["target.model=./slower", "load.seed=7"])
    read = read_scenario(scenario)
    pair = asked_pair(wanted, read)
    kept = tmp_path / "kept.yaml"
    kept.write_text(format_scenario(with_sides(read, pair)))
    variants = read_kept_variants(kept)
    assert list(variants) == ["baseline", "candidate"]
    assert variants["candidate"].target.model == str(tmp_path / "slower")
    assert (variants["baseline"].load.seed, variants["candidate"].load.seed) == (1, 7)


@pytest.mark.slow
def test_a_device_many_times_slower_is_a_regression_that_a_job_is_told_of(scenario: Path) -> None:
    reports = ("--json", "--junit", "junit.xml", "--comment", "comment.md")
    done = batchtune("check", scenario, "--candidate-model", "slower", *reports, cwd=scenario.parent)
    assert done.returncode in (1, 6), done.stderr  # 6: a busy machine spoilt every run
    document = json.loads(done.stdout)
    assert (document["baseline"], document["candidate"]) == ("baseline", "candidate")
    assert {gate["metric"] for gate in document["gates"]} == {"throughput", "p95"}
    assert document["fresh_blocks"] >= 3  # the first look of the confirmation
    assert document["attribution"]["cause"] in ("compute", "batch size")
    assert "the check restarts the servers that it launched" in done.stderr
    run = scenario.parent / document["run"]
    assert json.loads((run / "check.json").read_text()) == document
    (line,) = (scenario.parent / "results" / "history.jsonl").read_text().splitlines()
    assert json.loads(line)["verdict"] == document["verdict"]
    assert (scenario.parent / "junit.xml").read_text().startswith("<?xml")
    assert (scenario.parent / "comment.md").read_text().startswith("<!-- batchtune:gate -->")
    assert (run / "report.html").is_file()
    assert servers_of(scenario.parent) == []


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_a_killed_server_of_a_side_makes_it_invalid_and_leaves_nothing(scenario: Path, side: int) -> None:
    def kill() -> None:
        kept_ledger(scenario.parent)
        servers = sorted(servers_of(scenario.parent), key=lambda server: server.create_time())
        counts.append(len(servers))
        servers[side].kill()

    counts: list[int] = []
    killer = threading.Thread(target=kill)
    killer.start()
    sides = ("--candidate-set", "load.seed=2", "--blocks", "200")
    done = answered("check", scenario, *sides, cwd=scenario.parent)
    killer.join()
    assert done.returncode == 7, done.stderr
    assert (counts, servers_of(scenario.parent)) == ([2], [])
    assert done.stdout.startswith("INVALID  candidate against baseline:")
    assert "the server was ended by signal 9" in " ".join(done.stdout.split())
    (kept,) = scenario.parent.glob("results/gate/*-check/check.json")
    document = json.loads(kept.read_text())
    assert (document["verdict"], document["exit_code"]) == ("INVALID", 7)
