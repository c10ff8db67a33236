"""A tensorflow_model_server, also in a container: what it is given, and why it fails; others stand in for it here.

Whatever it does, the trial gets the reason, the next configuration a new server, and nothing stays.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import ScenarioError, TargetError
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.target import DockerSpec, TargetSpec
from batchtune.target.container import tfservings_container, tritons_container
from batchtune.target.external import read_parameters
from batchtune.target.process import HEAD_BYTES, TAIL_BYTES, WRITTEN_BYTES_MAX, ServerLog
from batchtune.target.tfserving import Demand, TfServingTarget, demand_of, thread_words
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.trials.trial import TrialRequest
from tests.load.load_servers import run_here
from tests.server.server_process import write_emulated
from tests.target.stand_in_docker import StandInDocker
from tests.target.stand_ins.faulty_server import FaultyServer
from tests.waiting import wait_until

BATCHED = Configuration(batching=BatchingParameters(max_batch_size=4, batch_timeout_micros=0))


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TfServingTarget]:
    model = write_emulated(tmp_path / "m", base_ms=1.0)
    with TfServingTarget(TargetSpec(model=str(model))) as launched:
        launched.apply(Configuration(batching=None))
        yield launched


def signalled(target: TfServingTarget, number: signal.Signals) -> int:
    pid = target.pid
    assert pid is not None
    os.kill(pid, number)
    return pid


def test_a_server_that_was_killed_says_so_and_is_launched_again(target: TfServingTarget) -> None:
    killed = signalled(target, signal.SIGKILL)
    with pytest.raises(TargetError, match="the server was ended by signal 9"):
        target.counters()
    assert target.apply(BATCHED) is not None
    assert target.pid != killed
    assert target.in_force == BATCHED
    target.counters()


@pytest.mark.slow
def test_a_server_that_does_not_answer_says_so_and_is_launched_again(target: TfServingTarget) -> None:
    """Five seconds until the answer is missed, five more until the server is ended the hard way."""
    stopped = signalled(target, signal.SIGSTOP)
    with pytest.raises(TargetError, match="metrics: no answer in time"):
        target.counters()
    assert target.in_force is None
    assert target.apply(BATCHED) is not None
    assert target.pid != stopped
    target.counters()


def test_retries_that_were_asked_for_are_left_alone(tmp_path: Path) -> None:
    model = write_emulated(tmp_path / "m")
    (tmp_path / "server.py").write_text("import sys\nprint(sys.argv, flush=True)\nsys.exit(1)\n")
    command = [sys.executable, str(tmp_path / "server.py")]
    spec = TargetSpec(model=str(model), command=command, flags={"max_num_load_retries": 3})
    with TfServingTarget(spec) as target, pytest.raises(TargetError, match="--max_num_load_retries=3"):
        target.apply(Configuration(batching=None))


def test_the_servers_log_is_kept(target: TfServingTarget, tmp_path: Path) -> None:
    kept = tmp_path / "server.log"
    target.keep_log(kept)
    assert "is available" in kept.read_text()
    signalled(target, signal.SIGTERM)
    target.close()
    assert kept.read_text().count("is available") == 1


def test_of_a_long_log_the_start_and_the_end_are_kept(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "scratch.log")
    log.path.write_text("flags and devices\n")
    log.keep_in(tmp_path / "server.log")
    for round_ in range(4):
        with log.path.open("a") as file:
            file.write(f"a line for each request of round {round_}\n" * 2**17)
        log.copy()
    text = (tmp_path / "server.log").read_text()
    assert len(text) < HEAD_BYTES + TAIL_BYTES + 100
    assert text.startswith("flags and devices\n")
    assert text.count("left out the middle") == 1
    assert text.endswith("round 3\n")
    assert log.path.stat().st_size < WRITTEN_BYTES_MAX


def test_a_log_that_cannot_be_kept_costs_nothing_else(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "scratch.log")
    log.path.write_text("words\n")
    log.keep_in(tmp_path / "no such folder" / "server.log")
    log.copy()
    assert log.path.read_text() == "words\n"


def test_length_buckets_come_into_force_between_two_batches_and_other_flags_by_a_restart(
    target: TfServingTarget,
) -> None:
    for flags in ((), (("length_buckets", "32,64"),), (("length_buckets", "auto"),), ()):
        bucketed = Configuration(batching=BATCHED.batching, flags=flags)
        assert target.apply(bucketed) is None
        assert read_parameters(target.endpoint) == bucketed
    assert target.apply(Configuration(batching=None, flags=(("zero_padding", "true"),))) is not None


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
    run, id_file, *command = docker.command_lines[0]
    assert (run, id_file.startswith("--cidfile=")) == ("run", True)
    scratch = Path(id_file.removeprefix("--cidfile=")).parent
    grpc, rest = endpoint.grpc_port, endpoint.rest_port
    assert " ".join(command) == (
        f"--rm --publish=127.0.0.1:{grpc}:{grpc} --publish=127.0.0.1:{rest}:{rest} "
        f"--mount=type=bind,source={scratch},target=/batchtune,readonly "
        f"--mount=type=bind,source={tmp_path / 'm'},target=/models/m,readonly "
        "--gpus=all --cpuset-cpus=0 --init --entrypoint=tensorflow_model_server --label=x "
        f"tensorflow/serving:latest-gpu --port={grpc} --rest_api_port={rest} "
        "--model_name=m --model_base_path=/models/m --monitoring_config_file=/batchtune/monitoring.txt "
        "--enable_batching=true --batching_parameters_file=/batchtune/batching_parameters.txt "
        "--grpc_max_threads=80 --max_num_load_retries=0 --rest_api_num_threads=80"
    )
    assert docker.command_lines[-1] == ["rm", "--force", "c0ffee"]


@pytest.mark.slow
def test_a_container_whose_client_was_killed_is_removed(docker: StandInDocker, tmp_path: Path) -> None:
    with TfServingTarget(docker_spec(docker, tmp_path)) as target:
        target.apply(BATCHED)
        orphan = psutil.Process(docker.pid)
        assert target.pid is not None
        os.kill(target.pid, signal.SIGKILL)
        wait_until(lambda: not target.alive())
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
    for flag, threads, told in (
        ("rest_api_num_threads", "2", 0),
        ("grpc_max_threads", "1", 0),
        ("rest_api_num_threads", "1", 1),
    ):
        assert len(list(thread_words(BATCHED, {flag: threads}, by_rest))) == told


def test_a_triton_s_container_mounts_its_model_alone() -> None:
    engine = DockerSpec(image="nvcr.io/nvidia/tritonserver:26.04-py3")
    spec = TargetSpec(kind="triton", model="/repository/m", docker=engine)
    words = tritons_container(spec, ports=(8000, 8001), mounts={Path("/repository/m"): "/models/m"})
    assert " ".join(words) == (
        "docker run --rm --publish=127.0.0.1:8000:8000 --publish=127.0.0.1:8001:8001 "
        "--mount=type=bind,source=/repository/m,target=/models/m,readonly --shm-size=1g "
        "nvcr.io/nvidia/tritonserver:26.04-py3 tritonserver"
    )


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


NEVER_READY = "is not ready after 0.3 s: "


ANY_LOAD = """\
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


def spec_of(tmp_path: Path, *, words: str = "") -> TargetSpec:
    """Where the server is never ready, for as long as the words say."""
    limit = "300ms" if words.startswith(NEVER_READY) else "30s"
    return TargetSpec(model=str(write_emulated(tmp_path / "m")), server="local", ready_timeout=limit)


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


def test_a_slow_start_is_waited_for_and_there_are_threads_for_every_client(
    server: FaultyServer, tmp_path: Path
) -> None:
    server.fail("slow")
    spec = spec_of(tmp_path).model_copy(update={"flags": {"grpc_max_threads": 1}})
    events: list[str] = []
    with TfServingTarget(spec, on_event=events.append, demand=DEMAND) as target:
        assert target.apply(BATCHED) is not None
        assert target.apply(Configuration(batching=None)) is not None  # it has no tuning API
        words = server.command_lines[0]
    assert words[2:4] == ["--model_name=m", f"--model_base_path={tmp_path / 'm'}"]
    threads = {word for word in words if "threads" in word}
    assert threads == {"--grpc_max_threads=1", "--rest_api_num_threads=80"}  # what was asked for stays
    assert events == [
        "max_batch_size 4 never fills: each request, of 2 rows, holds one of 1 threads (grpc_max_threads) while it waits"
    ]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage answers", "are none: the answer does not decode"),
        ("503 answers", "no request was answered: "),
        ("hang answers", "no request was answered: "),
        (
            "die answers",
            "the server exited with 139; its last words:\n  loading the model\n  Segmentation fault",
        ),
    ],
)
def test_a_server_that_is_ready_and_then_not_fails_its_trial_alone(
    server: FaultyServer, tmp_path: Path, fault: str, words: str
) -> None:
    scenario = parse_scenario(ANY_LOAD.replace("MODEL", str(write_emulated(tmp_path / "m"))))
    before = children()
    here: Any = SimpleNamespace(run=lambda job, **_options: run_here(job))
    with TfServingTarget(scenario.target) as target:
        bench = Bench(scenario, target, here, on_live=lambda _plan, _live: None, sleep=lambda _s: None)
        server.fail(fault)
        failed = bench.run(plan_of(BATCHED)).trial
        server.mend()
        mended = bench.run(plan_of(Configuration(batching=None))).trial
    assert failed.state == "failed"
    assert words in (failed.failure or "")
    assert (mended.state, mended.failure) == ("complete", None)
    assert children() <= before


def plan_of(configuration: Configuration) -> Plan:
    request = TrialRequest(configuration=configuration, source="sampler", reason="")
    return Plan(number=1, seed=1, request=request)
