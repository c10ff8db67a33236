"""Whatever a server of somebody else's does, the trial gets the reason, the next one a new server, and nothing stays."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TargetError
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.target import DockerSpec, TargetSpec
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.trials.trial import TrialRequest
from tests.load.load_servers import run_here
from tests.server.server_process import write_emulated
from tests.target.stand_in_docker import StandInDocker
from tests.target.stand_ins.faulty_server import FaultyServer

BATCHED = Configuration(batching=BatchingParameters(max_batch_size=4, batch_timeout_micros=0))
NO_BATCHING = Configuration(batching=None)
NEVER_READY = "is not ready after 0.3 s: "
SCENARIO = """\
name: s
target: {kind: tfserving, server: local, model: MODEL, ready_timeout: 30s}
request: {protocol: rest, timeout: 200ms}
load: {arrivals: closed, concurrency: 2, warm_up: 0s, duration: 200ms}
objective: throughput
"""
FAULTS = {
    "crash on start": ("exit: Failed to start server", "exited with 1; its last words:\n  loading the model\n  Failed to start", "fix what it names"),
    "unknown flag": ("exit: unknown argument: --odd=1", "unknown argument: --odd=1", "a flag"),
    "model cut short": ("exit: Read less bytes than requested", "exited with 1; its last words:\n  loading the model\n  Read less bytes", "the model"),
    "port in use": ("exit: Failed to bind 127.0.0.1:8500: Address already in use", "Address already in use", "another program uses that port"),
    "503 to everything": ("503", f"{NEVER_READY}HTTP 503: {{\"error\": \"overloaded\"}}; its last words:\n  loading", "target.ready_timeout"),
    "hang": ("hang", f"{NEVER_READY}no answer in time; its last words:\n  loading the model", "target.ready_timeout"),
    "garbage": ("garbage", f"{NEVER_READY}HTTP 200: <html>welcome</html>", "target.ready_timeout"),
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    server = FaultyServer(tmp_path)
    monkeypatch.setenv("PATH", f"{server.folder}{os.pathsep}{os.environ['PATH']}")
    return server


def spec_of(tmp_path: Path, docker: StandInDocker | None = None, *, words: str = "") -> TargetSpec:
    """Where the server is never ready, for as long as the words say."""
    model = str(write_emulated(tmp_path / "m"))
    limit = "300ms" if words.startswith(NEVER_READY) else "30s"
    if docker is None:
        return TargetSpec(model=model, server="local", ready_timeout=limit)
    engine = DockerSpec(program=str(docker.program))
    return TargetSpec(model=model, server="docker", docker=engine, ready_timeout=limit)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_local_server_that_fails_says_why_and_is_started_again(
    server: FaultyServer, tmp_path: Path, fault: str
) -> None:
    how, words, hint = FAULTS[fault]
    before = children()
    server.fail(how)
    with TfServingTarget(spec_of(tmp_path, words=words)) as target:
        with pytest.raises(TargetError) as raised:
            target.apply(BATCHED)
        assert words in raised.value.message
        assert hint in raised.value.hint
        assert target.in_force is None
        assert children() <= before
        server.mend()
        if not words.startswith(NEVER_READY):
            assert target.apply(BATCHED) is not None
    assert children() <= before


@pytest.mark.parametrize("fault", ["crash on start", "hang"])
def test_a_container_that_fails_says_why_and_none_is_left(
    server: FaultyServer, tmp_path: Path, fault: str
) -> None:
    how, words, hint = FAULTS[fault]
    docker = StandInDocker(tmp_path, server=server.program)
    before = children()
    server.fail(how)
    with TfServingTarget(spec_of(tmp_path, docker, words=words)) as target:
        with pytest.raises(TargetError, match=words) as raised:
            target.apply(BATCHED)
        assert hint in raised.value.hint
        assert children() <= before
        assert not psutil.pid_exists(docker.pid)
        server.mend()
        if fault != "hang":
            assert target.apply(BATCHED) is not None
            assert psutil.pid_exists(docker.pid)
    assert fault == "hang" or not psutil.pid_exists(docker.pid)
    assert children() <= before


def test_a_slow_start_is_waited_for(server: FaultyServer, tmp_path: Path) -> None:
    server.fail("slow")
    with TfServingTarget(spec_of(tmp_path)) as target:
        assert target.apply(BATCHED) is not None
        words = server.command_lines[0]
    assert words[1] == f"--rest_api_port={target.endpoint.rest_port}"
    assert words[2:4] == ["--model_name=m", f"--model_base_path={tmp_path / 'm'}"]
    assert words[7:] == ["--grpc_max_threads=1040", "--max_num_load_retries=0", "--rest_api_num_threads=1040"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage answers", "are none: the answer does not decode"),
        ("503 answers", "no request was answered: "),
        ("hanging answers", "no request was answered: "),
        ("dies", "the server exited with 139; its last words:\n  loading the model\n  Segmentation fault"),
    ],
)
def test_a_server_that_is_ready_and_then_not_fails_its_trial_alone(
    server: FaultyServer, tmp_path: Path, fault: str, words: str
) -> None:
    scenario = parse_scenario(SCENARIO.replace("MODEL", str(write_emulated(tmp_path / "m"))))
    before = children()
    here: Any = SimpleNamespace(run=lambda job, **_options: run_here(job))
    with TfServingTarget(scenario.target) as target:
        bench = Bench(scenario, target, here, on_live=lambda _plan, _live: None, sleep=lambda _s: None)
        server.fail(fault)
        failed = bench.run(plan_of(BATCHED)).trial
        server.mend()
        mended = bench.run(plan_of(NO_BATCHING)).trial
    assert failed.state == "failed"
    assert words in (failed.failure or "")
    assert (mended.state, mended.failure) == ("complete", None)
    assert children() <= before


def plan_of(configuration: Configuration) -> Plan:
    request = TrialRequest(configuration=configuration, source="sampler", reason="")
    return Plan(number=1, seed=1, request=request)
