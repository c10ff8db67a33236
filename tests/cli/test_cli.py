"""Every mistake a user can make ends with one clear error, the right exit code, and no process left behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchtune.target.process import free_port
from tests.cli.in_process import answered
from tests.server.server_process import ServerProcess

EMULATED = """\
service_time: {base_ms: 2.0, per_row_ms: 0.05}
inputs: {x: {dtype: float32, shape: [8]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
SCENARIO = """\
# yaml-language-server: $schema=../scenarios/scenario.schema.json
name: emulated
target:
  kind: tfserving
  model: MODEL
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 16, warm_up: 200ms, duration: 500ms, seed: 1}
slo: {p95: 500ms}
objective: throughput
search:
  strategy: optuna
  budget: {time: 40s, trials: 8}
  space: {max_batch_size: [4, 16], batch_timeout_micros: [0, 1000], num_batch_threads: [1]}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    version = tmp_path / "emulated" / "1"
    version.mkdir(parents=True)
    (version / "emulated.yaml").write_text(EMULATED)
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("MODEL", str(tmp_path / "emulated")))
    return path


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batchtune", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        start_new_session=True,
    )


def batchtune(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    assert not left_behind(process.pid)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def left_behind(session: int) -> list[psutil.Process]:
    """Processes of the session that are still there 5 s after its leader ended; they are killed."""
    give_up = time.monotonic() + 5
    while leftovers := [one for one in psutil.process_iter() if session_of(one.pid) == session]:
        if time.monotonic() > give_up:
            for one in leftovers:
                one.kill()
            return leftovers
        time.sleep(0.02)
    return []


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def servers_of(model: Path) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter(["cmdline"]):
        if any(str(model) in word for word in one.info["cmdline"] or []) and "batchtune.server" in str(
            one.info["cmdline"]
        ):
            found.append(one)
    return found


@pytest.mark.parametrize(
    ("wrong", "right", "expected"),
    [
        ("warm_up: 200ms", "warm-up: 200ms", ["warm-up", "did you mean", "warm_up"]),
        ("duration: 500ms", "duration: 500 parsecs", ["load.duration", "500 parsecs"]),
        ("num_batch_threads: [1]", "num_batch_threads: []", ["num_batch_threads"]),
        ("protocol: grpc", "protocol: soap", ["request.protocol", "soap", "grpc"]),
    ],
)
def test_a_mistake_in_the_scenario_names_file_line_and_key(
    scenario: Path, wrong: str, right: str, expected: list[str]
) -> None:
    text = scenario.read_text()
    line = next(number for number, one in enumerate(text.splitlines(), 1) if wrong in one)
    scenario.write_text(text.replace(wrong, right))
    done = answered("sweep", scenario, cwd=scenario.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f"{scenario.name}:{line}" in done.stderr
    for word in expected:
        assert word in done.stderr
    assert done.stdout == ""
    assert not (scenario.parent / "results").exists()


def test_a_storage_that_is_none_is_refused_before_anything_is_measured(scenario: Path) -> None:
    done = answered("sweep", scenario, "--optuna-storage", "study.txt", cwd=scenario.parent)
    assert done.returncode == 2
    assert "error: --optuna-storage: no SQLite file: 'study.txt'" in done.stderr
    assert not (scenario.parent / "results").exists()


def test_an_empty_search_space_is_refused(scenario: Path) -> None:
    text = scenario.read_text()
    scenario.write_text(text[: text.index("  space:")] + "  space: {}\n")
    done = answered("sweep", scenario, cwd=scenario.parent)
    assert done.returncode == 2
    assert "space" in done.stderr


def test_a_model_that_does_not_exist_is_named(scenario: Path) -> None:
    scenario.write_text(scenario.read_text().replace(str(scenario.parent / "emulated"), "imdb_transfomer"))
    done = answered("sweep", scenario, cwd=scenario.parent)
    assert done.returncode == 2
    assert "imdb_transfomer" in done.stderr
    assert "did you mean 'imdb_transformer'" in done.stderr


def test_a_path_of_one_of_several_models_that_leads_nowhere_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "name: two\ntarget:\n  models:\n    - {name: a, model: imdb_transformer, rate: 10/s}\n"
        "    - {name: b, model: ./nothing, rate: 10/s}\nload: {arrivals: poisson}\nslo: {p95: 50ms}\n"
    )
    done = answered("load", path, cwd=tmp_path)
    assert done.returncode == 2
    assert "two.yaml:5: target.models.1.model: './nothing' does not exist" in done.stderr
    assert "preparing" not in done.stderr


@pytest.mark.parametrize("words", [("compare",), ("check", "--paired")])
def test_compare_and_check_name_the_line_of_the_path_of_one_of_several_models(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "a/1").mkdir(parents=True)
    (tmp_path / "a/1/emulated.yaml").write_text(EMULATED)
    path = tmp_path / "two.yaml"
    path.write_text(
        "name: two\ntarget:\n  models:\n    - {name: a, model: ./a, rate: 10/s}\n"
        "    - {name: b, model: ./nothing, rate: 10/s}\nload: {arrivals: poisson}\nslo: {p95: 50ms}\n"
        "objective: latency\nvariants:\n  x: {fixed: {max_batch_size: 4}}\n  y: {fixed: {max_batch_size: 8}}\n"
    )
    command, *options = words
    done = answered(command, path, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "two.yaml:5: target.models.1.model: './nothing' does not exist" in done.stderr


@pytest.mark.parametrize("command", ["sweep", "load"])
def test_a_models_path_that_leads_nowhere_is_named_with_its_line_before_a_launch(
    scenario: Path, command: str
) -> None:
    scenario.write_text(scenario.read_text().replace(str(scenario.parent / "emulated"), "./nothing"))
    done = answered(command, scenario, cwd=scenario.parent)
    assert done.returncode == 2
    assert f"{scenario.name}:5: target.model: './nothing' does not exist" in done.stderr
    assert "launching" not in done.stderr


def test_a_missing_scenario_is_named(tmp_path: Path) -> None:
    done = batchtune("sweep", "nothing.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "nothing.yaml" in done.stderr


def test_a_port_already_taken_ends_with_the_servers_own_words(scenario: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = scenario.read_text()
        scenario.write_text(text.replace("kind: tfserving", f"kind: tfserving\n  flags: {{port: {port}}}"))
        done = answered("sweep", scenario, cwd=scenario.parent)
    assert done.returncode == 7
    assert str(port) in done.stderr
    assert not servers_of(scenario.parent)


def test_a_command_that_does_not_exist_is_a_target_failure(scenario: Path) -> None:
    text = scenario.read_text()
    scenario.write_text(text.replace("kind: tfserving", "kind: tfserving\n  command: [no_such_model_server]"))
    done = answered("sweep", scenario, cwd=scenario.parent)
    assert done.returncode == 7
    assert "no_such_model_server" in done.stderr


def test_recommending_without_a_run_says_what_to_do(tmp_path: Path) -> None:
    done = answered("recommend", cwd=tmp_path)
    assert done.returncode == 2
    assert "sweep" in done.stderr


def swept(
    scenario: Path, *, by: Callable[..., subprocess.CompletedProcess[str]] = answered
) -> dict[str, Any]:
    """What a sweep recommends, `by` a process of its own or this one; of the second one where the host was too noisy for the first to see any gain."""
    for _ in range(2):
        done = by("sweep", scenario, "--json", cwd=scenario.parent)
        assert done.returncode in (0, 5), done.stderr  # 5: too noisy a host to say
        document: dict[str, Any] = json.loads(done.stdout)
        if document["established"] or document["configuration"]["batching"] is not None:
            return document
    pytest.skip(f"this host was too noisy to say: {document['open_questions']}")


@pytest.mark.slow
def test_a_sweep_ends_with_a_recommendation_that_recommend_repeats(scenario: Path) -> None:
    document = swept(scenario)
    run = Path(scenario.parent / document["run"])
    assert {"scenario.yaml", "provenance.json", "trials.jsonl", "recommendation.json", "report.html"} <= {
        one.name for one in run.iterdir()
    }
    assert (run / "batching_parameters.txt").read_text().startswith(f"# batchtune: {document['label']}\n")
    assert document["configuration"]["batching"] is not None
    assert document["batching_helps"] == "yes"
    assert document["gain_over_no_batching"]["low"] > 1.5
    assert "emulated" in json.dumps(document["caveats"])

    again = answered("recommend", "--slo-p95", "400ms", cwd=scenario.parent)
    assert again.returncode in (0, 5), again.stderr
    assert "Batching helps" in again.stdout
    assert "requests/s" in again.stdout

    flags = answered("recommend", "--format", "triton", "--write", "config.pbtxt", cwd=scenario.parent)
    assert flags.returncode in (0, 5), flags.stderr
    assert "dynamic_batching" in (scenario.parent / "config.pbtxt").read_text()
    assert "model_base_path" not in flags.stdout

    never = answered("recommend", "--slo-p95", "1us", cwd=scenario.parent)
    assert never.returncode == 3
    assert "no configuration" in never.stderr  # one request alone takes longer, or the nearest is named

    wrong = answered("recommend", "--slo-p95", "20 furlongs", cwd=scenario.parent)
    assert wrong.returncode == 2
    assert "20 furlongs" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupted_sweep_keeps_its_trials_and_still_recommends(
    scenario: Path, number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"whoever runs the tests ignores {number.name}, as nohup does, and so does a sweep")
    text = scenario.read_text().replace("budget: {time: 40s, trials: 8}", "budget: {time: 60s}")
    scenario.write_text(text.replace("duration: 500ms", "duration: 200ms"))
    process = start("sweep", scenario, cwd=scenario.parent)
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        ledgers = list((scenario.parent / "results").glob("*/*/trials.jsonl"))
        if ledgers and len(ledgers[0].read_text().splitlines()) >= 3:
            break
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in err
    assert "Recommended " in out
    kept = {path.name for path in ledgers[0].parent.iterdir()}
    assert {"scenario.yaml", "provenance.json", "recommendation.json", "report.html"} <= kept
    assert not servers_of(scenario.parent)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was_and_says_what_was_lost(scenario: Path) -> None:
    process = start("sweep", scenario, cwd=scenario.parent)
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        ledgers = list((scenario.parent / "results").glob("*/*/trials.jsonl"))
        if ledgers and ledgers[0].read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    assert not left_behind(process.pid)
    (ledger,) = ledgers
    kept = ledger.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    ledger.write_bytes(kept + b'{"schema_version":1,"number":')
    line = kept.count(b"\n") + 1

    done = batchtune("sweep", scenario, "--resume", ledger.parent, cwd=scenario.parent)
    assert done.returncode in (0, 5), done.stderr  # 5: too noisy a host to say
    assert f"note: {ledger}:{line}: the last line is incomplete and was left out" in done.stderr
    assert ledger.read_bytes().startswith(kept)
    numbers = [json.loads(one)["number"] for one in ledger.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))

    provenance = ledger.parent / "provenance.json"
    document = json.loads(provenance.read_text())
    provenance.write_text(json.dumps({**document, "cpu": {**document["cpu"], "model": "another"}}))
    elsewhere = batchtune("sweep", scenario, "--resume", ledger.parent, cwd=scenario.parent)
    assert elsewhere.returncode == 2
    assert "another machine" in elsewhere.stderr
    assert "cpu.model" in elsewhere.stderr
    provenance.write_text("{")
    unknown = batchtune("sweep", scenario, "--resume", ledger.parent, cwd=scenario.parent)
    assert unknown.returncode == 2
    assert f"{provenance}: not JSON" in unknown.stderr


def test_loading_prints_one_row_a_point(scenario: Path) -> None:
    short = ("--set", "load.warm_up=50ms", "--set", "load.duration=100ms")
    done = answered("load", scenario, "--concurrency", "1:2:x2", "--json", *short, cwd=scenario.parent)
    assert done.returncode in (0, 5, 6), done.stderr  # 5, 6: too few requests, or a noisy host
    points = json.loads(done.stdout)["points"]
    assert [one["concurrency"] for one in points] == [1, 2]
    assert all(one["measurement"]["requests"] > 0 for one in points)


@pytest.mark.parametrize("protocol", ["grpc", pytest.param("rest", marks=pytest.mark.slow)])
def test_a_running_server_is_loaded_and_left_running(scenario: Path, protocol: str) -> None:
    with ServerProcess(scenario.parent / "emulated") as server:
        address = {
            "grpc": f"--grpc-url=127.0.0.1:{server.grpc_port}",
            "rest": f"--rest-url=http://127.0.0.1:{server.rest_port}",
        }
        arguments = ["load", scenario, address[protocol], "--rate", "50,100", "--csv"]
        changes = (
            f"request.protocol={protocol}",
            "target.model=m",
            "load.warm_up=50ms",
            "load.duration=150ms",
        )
        options = [word for change in changes for word in ("--set", change)]
        done = answered(*arguments, *options, cwd=scenario.parent)
        assert done.returncode in (0, 5, 6), done.stderr  # 5, 6: too few requests, or a noisy host
        rows = list(csv.DictReader(done.stdout.splitlines()))
        assert [float(row["rate_rps"]) for row in rows] == [50.0, 100.0]
        assert all(float(row["p95_ms"]) > 2.0 for row in rows)
        assert server.predict({"instances": [[0.0] * 8]}) == {"predictions": [[0.0, 1.0]]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--concurrency", "4", "--rate", "10"], "exclude each other"),
        (["--concurrency", "0.5"], "0.5"),
        (["--concurrency", "8:2"], "--concurrency: '8:2' starts above its end"),
        (
            ["--concurrency", "many"],
            "--concurrency: expected a value, start:end:step or start:end:x2; was 'many'",
        ),
        (["--rate", "0"], "--rate: '0' is not above 0"),
        (["--rate", "fast"], "--rate: expected a value"),
        (
            [
                "--set",
                "objective=capacity",
                "--set",
                "load.arrivals=poisson",
                "--set",
                "load.concurrency=null",
            ],
            "give --rate 500",
        ),
        (["--rest-url", "http://127.0.0.1"], "--rest-url"),
        (["--rest-url", "ftp://127.0.0.1:1"], "--rest-url"),
        (["--batching-parameters-file", "no_such_file"], "no_such_file"),
    ],
)
def test_wrong_options_of_load_are_refused_in_one_line(
    scenario: Path, arguments: list[str], expected: str
) -> None:
    done = answered("load", scenario, *arguments, cwd=scenario.parent)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr


def test_a_server_that_does_not_answer_is_a_target_failure(scenario: Path) -> None:
    done = answered("load", scenario, f"--rest-url=http://127.0.0.1:{free_port()}", cwd=scenario.parent)
    assert done.returncode == 7, done.stderr


def test_version_is_printed() -> None:
    done = batchtune("--version", cwd=Path.cwd())
    assert done.stdout.startswith("batchtune 0.")


@pytest.mark.parametrize("command", ["sweep", "load", "compare"])
def test_results_that_cannot_be_saved_are_told_before_the_model_is_looked_at(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = answered(command, "gone.onnx", "--results", "file/results", cwd=tmp_path)
    assert "error: cannot make file/results" in done.stderr
    assert "gone" not in done.stderr
