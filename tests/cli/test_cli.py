"""Every mistake a user can make ends with one clear error, the right exit code, and no process left behind."""

from __future__ import annotations

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
from tests.waiting import wait_until

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
  model: ./emulated
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 16, warm_up: 200ms, duration: 500ms, seed: 1}
slo: {p95: 500ms}
objective: throughput
search:
  strategy: optuna
  budget: {time: 40s, trials: 8}
  space: {max_batch_size: [4, 16], batch_timeout_micros: [0, 1000], num_batch_threads: [1]}
"""
SEVERAL = """\
name: two
target:
  models:
    - {name: a, model: ./emulated, rate: 10/s}
    - {name: b, model: ./nothing, rate: 10/s}
load: {arrivals: poisson}
slo: {p95: 50ms}
objective: latency
variants: {x: {fixed: {max_batch_size: 4}}, y: {fixed: {max_batch_size: 8}}}
"""


def write_version(model: Path, text: str = EMULATED) -> Path:
    """An emulated model with a version directory."""
    (model / "1").mkdir(parents=True)
    (model / "1" / "emulated.yaml").write_text(text)
    return model


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    write_version(tmp_path / "emulated")
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
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


def servers_of(folder: Path) -> list[psutil.Process]:
    """Bundled servers of models in this folder."""
    commands = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [
        process
        for process, words in commands.items()
        if any(str(folder) in word for word in words) and any("batchtune.server" in word for word in words)
    ]


def kept_ledger(folder: Path, *, trials: int = 1) -> Path:
    """The ledger of the folder's run, as soon as so many trials are kept."""
    ledgers: list[Path] = []

    def are_kept() -> bool:
        ledgers[:] = folder.glob("results/*/*/trials.jsonl")
        return bool(ledgers) and ledgers[0].read_bytes().count(b"\n") >= trials

    wait_until(are_kept, limit_s=60.0)
    return ledgers[0]


CAPACITY = ("--set", "objective=capacity", "--set", "load.arrivals=poisson", "--set", "load.concurrency=null")
SPACE = "{max_batch_size: [4, 16], batch_timeout_micros: [0, 1000], num_batch_threads: [1]}"
LOST = ("./emulated", "./nothing")
NO_SECOND = "s.yaml:5: target.models.1.model: './nothing' does not exist"
NO_PATH = "s.yaml:5: target.model: './nothing' does not exist"


@pytest.mark.parametrize(
    ("words", "wrong", "right", "expected"),
    [
        ("sweep", "warm_up: 200ms", "warm-up: 200ms", ("s.yaml:7: ", "warm-up", "did you mean", "warm_up")),
        ("sweep", "duration: 500ms", "duration: 500 parsecs", ("s.yaml:7: load.duration", "500 parsecs")),
        ("sweep", "num_batch_threads: [1]", "num_batch_threads: []", ("s.yaml:13: ", "num_batch_threads")),
        ("sweep", "protocol: grpc", "protocol: soap", ("s.yaml:6: request.protocol", "soap", "grpc")),
        ("sweep", SPACE, "{}", ("space",)),
        ("sweep", *LOST, (NO_PATH,)),
        ("load", *LOST, (NO_PATH,)),
        ("sweep --optuna-storage study.txt", "", "", ("--optuna-storage: no SQLite file: 'study.txt'",)),
        ("load", "protocol: grpc", "protocol: kserve_grpc", ("request.protocol", "--rest-url")),
        ("load", SCENARIO, SEVERAL, (NO_SECOND,)),
        ("compare", SCENARIO, SEVERAL, (NO_SECOND,)),
        ("check --paired", SCENARIO, SEVERAL, (NO_SECOND,)),
        ("load --json --csv", "", "", ("--json and --csv",)),
        ("load --concurrency 4 --rate 10", "", "", ("exclude each other",)),
        ("load --concurrency 0.5", "", "", ("0.5",)),
        ("load --concurrency 8:2", "", "", ("--concurrency: '8:2' starts above its end",)),
        ("load --concurrency many", "", "", ("expected a value, start:end:step or start:end:x2",)),
        ("load --rate 0", "", "", ("--rate: '0' is not above 0",)),
        ("load --rate fast", "", "", ("--rate: expected a value",)),
        (f"load {' '.join(CAPACITY)}", "", "", ("give --rate 500",)),
        ("load --rest-url http://127.0.0.1", "", "", ("--rest-url",)),
        ("load --rest-url ftp://127.0.0.1:1", "", "", ("--rest-url",)),
        ("load --batching-parameters-file no_such_file", "", "", ("no_such_file",)),
    ],
)
def test_a_mistake_is_named_before_anything_is_launched(
    scenario: Path, words: str, wrong: str, right: str, expected: tuple[str, ...]
) -> None:
    scenario.write_text(SCENARIO.replace(wrong, right))
    command, *options = words.split()
    done = answered(command, scenario, *options, cwd=scenario.parent)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert all(part in done.stderr for part in ("error: ", *expected)), done.stderr
    assert "launching" not in done.stderr
    assert not (scenario.parent / "results").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sweep nothing.yaml", "nothing.yaml"),
        ("recommend", "sweep"),
        ("sweep gone.onnx --results file/results", "error: cannot make file/results"),
        ("load gone.onnx --results file/results", "error: cannot make file/results"),
        ("compare gone.onnx --results file/results", "error: cannot make file/results"),
    ],
)
def test_what_is_not_there_or_cannot_be_saved_comes_first(tmp_path: Path, words: str, expected: str) -> None:
    (tmp_path / "file").touch()
    done = answered(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "gone" not in done.stderr


def test_a_port_already_taken_ends_with_the_servers_own_words(scenario: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--set", f"target.flags.port={port}")
        done = answered("sweep", scenario, *flags, cwd=scenario.parent)
    assert done.returncode == 7
    assert str(port) in done.stderr
    assert not servers_of(scenario.parent)


@pytest.mark.parametrize(
    ("command", "option", "expected"),
    [
        ("sweep", "--set=target.command=[no_such_model_server]", "no_such_model_server"),
        ("load", "--rest-url=http://127.0.0.1:PORT", "PORT"),
    ],
)
def test_a_server_that_does_not_start_or_answer_is_a_target_failure(
    scenario: Path, command: str, option: str, expected: str
) -> None:
    port = str(free_port())
    done = answered(command, scenario, option.replace("PORT", port), cwd=scenario.parent)
    assert done.returncode == 7
    assert expected.replace("PORT", port) in done.stderr


def swept(
    scenario: Path, *, by: Callable[..., subprocess.CompletedProcess[str]] = answered
) -> dict[str, Any]:
    """What a sweep recommends, `by` a process of its own or this one; of the second one where the host was too noisy for the first to see any gain."""
    for _ in range(2):
        done = by("sweep", scenario, "--json", cwd=scenario.parent)
        assert done.returncode in (0, 5), done.stderr  # 5: too noisy a host to say
        assert "each line: in brackets what proposed the configuration" in done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        if document["established"] or document["configuration"]["batching"] is not None:
            return document
    pytest.skip(f"this host was too noisy to say: {document['open_questions']}")


@pytest.mark.slow
def test_a_sweep_ends_with_a_recommendation_that_recommend_repeats(scenario: Path) -> None:
    document = swept(scenario)
    run = scenario.parent / document["run"]
    files = {"scenario.yaml", "provenance.json", "trials.jsonl", "recommendation.json", "report.html"}
    assert files <= {path.name for path in run.iterdir()}
    assert (run / "batching_parameters.txt").read_text().startswith(f"# batchtune: {document['label']}\n")
    assert document["configuration"]["batching"] is not None
    assert document["batching_helps"] == "yes"
    assert document["gain_over_no_batching"]["low"] > 1.5
    assert "emulated" in json.dumps(document["caveats"])

    again = answered("recommend", "--slo-p95", "400ms", cwd=scenario.parent)
    assert again.returncode in (0, 5), again.stderr
    assert "Batching helps" in again.stdout
    never = answered("recommend", "--slo-p95", "1us", cwd=scenario.parent)
    assert never.returncode == 3
    assert "no configuration" in never.stderr  # one request alone takes longer, or the nearest is named


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupted_sweep_keeps_its_trials_and_recommends(scenario: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"whoever runs the tests ignores {number.name}, as nohup does, and so does a sweep")
    text = SCENARIO.replace("budget: {time: 40s, trials: 8}", "budget: {time: 60s}")
    scenario.write_text(text.replace("duration: 500ms", "duration: 200ms"))
    process = start("sweep", scenario, cwd=scenario.parent)
    ledger = kept_ledger(scenario.parent, trials=3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in err
    assert "Recommended " in out
    files = {"scenario.yaml", "provenance.json", "recommendation.json", "report.html"}
    assert files <= {path.name for path in ledger.parent.iterdir()}
    assert not servers_of(scenario.parent)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was_and_says_what_was_lost(scenario: Path) -> None:
    process = start("sweep", scenario, cwd=scenario.parent)
    ledger = kept_ledger(scenario.parent, trials=2)
    process.kill()
    process.communicate(timeout=60)
    assert not left_behind(process.pid)
    kept = ledger.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    ledger.write_bytes(kept + b'{"schema_version":1,"number":')
    line = kept.count(b"\n") + 1
    resumed = ("sweep", scenario, "--resume", ledger.parent)
    done = batchtune(*resumed, cwd=scenario.parent)
    assert done.returncode in (0, 5), done.stderr  # 5: too noisy a host to say
    assert f"note: {ledger}:{line}: the last line is incomplete and was left out" in done.stderr
    assert ledger.read_bytes().startswith(kept)
    numbers = [json.loads(trial)["number"] for trial in ledger.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    provenance = ledger.parent / "provenance.json"
    provenance.write_text("{")
    unknown = answered(*resumed, cwd=scenario.parent)
    assert unknown.returncode == 2
    assert f"{provenance}: not JSON" in unknown.stderr


def test_version_is_printed() -> None:
    assert batchtune("--version", cwd=Path.cwd()).stdout.startswith("batchtune 0.")
