"""The servers that people run: tensorflow_model_server and containers, which others stand in for here."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import ScenarioError, TargetError
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.target import DockerSpec, TargetSpec
from batchtune.target.container import tfservings_container, tritons_container
from batchtune.target.tfserving import Demand, TfServingTarget, demand_of, thread_words
from tests.server.server_process import write_emulated
from tests.target.stand_in_docker import StandInDocker

BATCHED = Configuration(batching=BatchingParameters(max_batch_size=4, batch_timeout_micros=0))
DEMAND = Demand(clients=64, rows=2, protocol="grpc")
SCENARIO = """\
name: s
target: {kind: tfserving, model: imdb_transformer}
request: {rows: 2}
load: {arrivals: closed, concurrency: 4}
objective: throughput
search: {space: {max_batch_size: [8, 4096], num_batch_threads: [2]}}
"""


@pytest.fixture
def docker(tmp_path: Path) -> StandInDocker:
    return StandInDocker(tmp_path)


def docker_spec(docker: StandInDocker, tmp_path: Path) -> TargetSpec:
    model = write_emulated(tmp_path / "m", base_ms=1.0)
    engine = DockerSpec(program=str(docker.program), gpus="all", options=("--label=x",))
    return TargetSpec(model=str(model), docker=engine, cpus=(0,))


def test_a_container_is_given_its_parameters_and_removed(docker: StandInDocker, tmp_path: Path) -> None:
    spec = docker_spec(docker, tmp_path)
    with TfServingTarget(spec, demand=DEMAND) as target:
        assert target.apply(BATCHED) is not None
        before = target.counters()
        assert before.series
        assert before.server_cpu_s is not None
        endpoint = target.endpoint
        container = docker.pid
    assert not psutil.pid_exists(container)
    command = docker.command_lines[0]
    id_file = command[1]
    scratch = Path(id_file.removeprefix("--cidfile=")).parent
    assert id_file.startswith("--cidfile=")
    assert [command[0], *command[2:]] == [
        "run",
        "--rm",
        f"--publish=127.0.0.1:{endpoint.grpc_port}:{endpoint.grpc_port}",
        f"--publish=127.0.0.1:{endpoint.rest_port}:{endpoint.rest_port}",
        f"--mount=type=bind,source={scratch},target=/batchtune,readonly",
        f"--mount=type=bind,source={tmp_path / 'm'},target=/models/m,readonly",
        "--gpus=all",
        "--cpuset-cpus=0",
        "--init",
        "--entrypoint=tensorflow_model_server",
        "--label=x",
        "tensorflow/serving:latest-gpu",
        f"--port={endpoint.grpc_port}",
        f"--rest_api_port={endpoint.rest_port}",
        "--model_name=m",
        "--model_base_path=/models/m",
        "--monitoring_config_file=/batchtune/monitoring.txt",
        "--enable_batching=true",
        "--batching_parameters_file=/batchtune/batching_parameters.txt",
        "--grpc_max_threads=80",
        "--max_num_load_retries=0",
        "--rest_api_num_threads=80",
    ]
    assert docker.command_lines[-1] == ["rm", "--force", "c0ffee"]


def test_a_container_whose_client_was_killed_is_removed(docker: StandInDocker, tmp_path: Path) -> None:
    with TfServingTarget(docker_spec(docker, tmp_path)) as target:
        target.apply(BATCHED)
        orphan = psutil.Process(docker.pid)
        assert target.pid is not None
        os.kill(target.pid, signal.SIGKILL)
        while target.alive():
            time.sleep(0.001)
        with pytest.raises(TargetError, match="ended by signal 9"):
            target.counters()
    orphan.wait(5)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "no container engine runs"),
        ("Unable to find image 'tensorflow/serving:nope' locally", "check target.docker.image"),
        ("could not select device driver with capabilities: [[gpu]]", "the NVIDIA container toolkit"),
        ("Bind for 127.0.0.1:8500 failed: port is already allocated", "another program uses that port"),
    ],
)
def test_what_an_engine_refuses_is_told_with_what_to_do(
    docker: StandInDocker, tmp_path: Path, words: str, hint: str
) -> None:
    docker.fail(words)
    with TfServingTarget(docker_spec(docker, tmp_path)) as target:
        with pytest.raises(TargetError) as raised:
            target.apply(BATCHED)
        assert words in raised.value.message
        assert hint in raised.value.hint


def test_a_local_server_has_threads_for_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "tensorflow_model_server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@"\nexec {sys.executable} -m batchtune.server "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    model = write_emulated(tmp_path / "m", base_ms=1.0)
    events: list[str] = []
    flags = {"grpc_max_threads": 1}
    spec = TargetSpec(model=str(model), server="local", flags=flags)
    with TfServingTarget(spec, on_event=events.append, demand=DEMAND) as target:
        assert target.apply(BATCHED) is not None
        target.keep_log(tmp_path / "log")
        assert target.apply(Configuration(batching=None)) is not None  # it has no tuning API
    command = (tmp_path / "log").read_text().splitlines()[0]
    assert "--rest_api_num_threads=80" in command
    assert "--grpc_max_threads=1 " in command  # asked for, so it stays
    assert events == [
        "max_batch_size 4 never fills: each request, of 2 rows, holds one of 1 threads (grpc_max_threads) while it waits"
    ]


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    model = write_emulated(tmp_path / "m")
    spec = TargetSpec(model=str(model), docker=DockerSpec(program="no-such-engine"))
    with TfServingTarget(spec) as target, pytest.raises(TargetError, match="no such program") as raised:
        target.apply(BATCHED)
    assert "target.docker" in raised.value.hint


def test_the_demand_holds_the_largest_batches_and_every_client() -> None:
    scenario = parse_scenario(SCENARIO)
    assert demand_of(scenario).clients == 4096 * 3 // 2
    assert demand_of(scenario, clients_most=10_000).threads > 10_000
    small = parse_scenario(SCENARIO.replace("4096", "16"))
    assert demand_of(small).clients == 1024


def test_a_size_that_the_threads_can_fill_is_not_spoken_of() -> None:
    by_rest = Demand(clients=8, rows=2, protocol="rest")
    assert list(thread_words(BATCHED, {"rest_api_num_threads": "2"}, by_rest)) == []
    assert list(thread_words(BATCHED, {"grpc_max_threads": "1"}, by_rest)) == []
    assert len(list(thread_words(BATCHED, {"rest_api_num_threads": "1"}, by_rest))) == 1


def test_a_triton_s_container_mounts_its_model_alone() -> None:
    engine = DockerSpec(image="nvcr.io/nvidia/tritonserver:26.04-py3")
    spec = TargetSpec(kind="triton", model="/repository/m", docker=engine)
    assert tritons_container(spec, ports=(8000, 8001), mounts={Path("/repository/m"): "/models/m"}) == [
        "docker",
        "run",
        "--rm",
        "--publish=127.0.0.1:8000:8000",
        "--publish=127.0.0.1:8001:8001",
        "--mount=type=bind,source=/repository/m,target=/models/m,readonly",
        "--shm-size=1g",
        "nvcr.io/nvidia/tritonserver:26.04-py3",
        "tritonserver",
    ]


@pytest.mark.parametrize(
    ("engine", "init", "image"),
    [
        ({}, True, "tensorflow/serving"),
        ({"program": "/usr/bin/docker", "gpus": "all"}, True, "tensorflow/serving:latest-gpu"),
        ({"program": "podman"}, False, "tensorflow/serving"),
    ],
)
def test_only_docker_is_asked_for_a_first_process_and_a_gpu_has_its_image(
    engine: dict[str, str], init: bool, image: str
) -> None:
    words = tfservings_container(TargetSpec(model="m", docker=DockerSpec(**engine)), ports=(), mounts={})
    assert ("--init" in words, words[-1]) == (init, image)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{model: m, server: local, docker: {}}", "docker: read only with server: docker; this one is local"),
        ("{model: m, server: docker, command: [x]}", "command: server: docker starts its own program"),
        ("{kind: triton, model: ./m, server: bundled}", "server: the bundled server is not Triton"),
        ("{kind: triton, model: ./m, server: docker}", "docker.image: missing: the image has no usual tag"),
    ],
)
def test_servers_that_contradict_each_other_are_refused(target: str, words: str) -> None:
    text = SCENARIO.replace("{kind: tfserving, model: imdb_transformer}", target)
    with pytest.raises(ScenarioError, match=f"<string>:2: target.{words}"):
        parse_scenario(text.replace("num_batch_threads", "max_x"))
