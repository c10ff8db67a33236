"""A real tritonserver is swept, attached and launched; an attached one is left as it was found, also after SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchtune.archive.run import Run, open_run
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TargetError
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.triton import TritonTarget
from tests.cli.test_cli import batchtune, start, swept
from tests.target.triton.triton_server import (
    NEEDS_TRITON,
    PACKAGES,
    TritonServer,
    executable,
    write_models,
)
from tests.waiting import wait_until

pytestmark = NEEDS_TRITON

MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        time.sleep(0.008 + 0.0005 * sum(len(array) for array in arrays))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in arrays]
"""
CONFIG = """
# kept by its owner
backend: "python" max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }]
instance_group [{ count: 1 kind: KIND_CPU }]
dynamic_batching { max_queue_delay_microseconds: 300 preserve_ordering: true }
parameters { key: "note" value { string_value: "mine" } }
"""
SCENARIO = """\
name: triton
target: {{kind: triton, model: {model}{target}}}
request: {{distinct: 4}}
load: {{arrivals: closed, concurrency: 16, warm_up: 100ms, duration: 400ms, seed: 1}}
objective: throughput
search:
  strategy: {strategy}
  budget: {{trials: 8}}
  space: {{{space}}}
"""
DELAYS = "max_batch_size: [1, 4, 16], max_queue_delay_microseconds: [0, 20000]"
WORDS = """max_batch_size: [4, 16], preferred_batch_size: [none, [16]],
    default_queue_policy: {max_queue_size: [0, 100]}, instance_group: {count: [1]}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    assert PACKAGES is not None
    flags = ("--model-control-mode=explicit", "--load-model=m", "--disable-auto-complete-config")
    with TritonServer({"m": (CONFIG, MODEL)}, tmp_path_factory.mktemp("triton"), PACKAGES, *flags) as started:
        yield started


def url(server: TritonServer) -> str:
    return f"http://127.0.0.1:{server.rest_port}"


def config_of(server: TritonServer) -> dict[str, Any]:
    return dict(httpx.get(f"{url(server)}/v2/models/m/config").json())


def attached_scenario(
    folder: Path, server: TritonServer, *, by_grpc: bool = True, space: str = DELAYS
) -> Path:
    target = f', rest_url: "{url(server)}"'
    target += f', grpc_url: "127.0.0.1:{server.grpc_port}"' if by_grpc else ""
    path = folder / "triton.yaml"
    path.write_text(SCENARIO.format(model="m", target=target, strategy="grid", space=space))
    return path


def test_every_word_of_triton_s_is_taken_and_told_back(server: TritonServer) -> None:
    before = config_of(server)
    policy = "default_queue_policy"
    settings = {
        "preferred_batch_size": ["2", "2,4"],
        "preserve_ordering": ["false", "true"],
        f"{policy}.max_queue_size": ["64", "0"],
        f"{policy}.default_timeout_microseconds": ["500000", "0"],
        f"{policy}.timeout_action": ["DELAY", "REJECT"],
        f"{policy}.allow_timeout_override": ["true", "false"],
    }
    batching = BatchingParameters(max_batch_size=8, batch_timeout_micros=100, num_batch_threads=2)
    with TritonTarget(TargetSpec(kind="triton", model="m", rest_url=url(server))) as target:
        target.keep_original(lambda _original: None)
        for name, values in settings.items():
            for value in values:
                configuration = Configuration(batching=batching, dialect="triton", flags=((name, value),))
                target.apply(configuration)
        dynamic = config_of(server)["dynamic_batching"]
        assert dynamic["default_queue_policy"]["timeout_action"] == "REJECT"
        assert dynamic["preserve_ordering"] is True
    assert config_of(server) == before


@pytest.mark.parametrize(("by_grpc", "space"), [(True, DELAYS), (False, WORDS)], ids=["gRPC", "REST"])
def test_an_attached_server_is_swept_and_left_as_it_was(
    server: TritonServer, tmp_path: Path, by_grpc: bool, space: str
) -> None:
    before = config_of(server)
    path = attached_scenario(tmp_path, server, by_grpc=by_grpc, space=space)
    chosen = swept(path, by=batchtune)
    assert config_of(server) == before
    assert chosen["configuration"]["batching"]["max_batch_size"] == 16
    assert chosen["configuration"]["dialect"] == "triton"
    run = open_run(Path(tmp_path / chosen["run"]))
    trial = next(one for one in run.ledger() if one.configuration.batching is not None)
    assert trial.measurement is not None
    assert trial.measurement.server is not None
    assert trial.measurement.server.batches_by_rows
    check_config_pbtxt(server, run, before)


def check_config_pbtxt(server: TritonServer, run: Run, before: dict[str, Any]) -> None:
    """The file that the run hands back is one that Triton takes, and differs from what was there in batching alone."""
    assert PACKAGES is not None
    (run.path / "deployed").mkdir()
    models = {"m": ((run.path / "config.pbtxt").read_text(), MODEL)}
    with TritonServer(models, run.path / "deployed", PACKAGES) as started:
        deployed = config_of(started)
    differing = {name for name in {*before, *deployed} if before.get(name) != deployed.get(name)}
    assert differing == {"max_batch_size", "dynamic_batching"}
    assert deployed["parameters"] == {"note": {"string_value": "mine"}}
    assert deployed["dynamic_batching"]["preserve_ordering"] is True


@pytest.mark.parametrize(("word", "code"), [("KILL", -9), ("INT", 130)])
def test_a_sweep_that_ends_early_puts_the_server_back_or_restore_does(
    server: TritonServer, tmp_path: Path, word: str, code: int
) -> None:
    before = config_of(server)
    sweep = start("sweep", attached_scenario(tmp_path, server), cwd=tmp_path)
    wait_until(lambda: config_of(server) != before)
    sweep.send_signal(signal.Signals[f"SIG{word}"])
    _, err = sweep.communicate(timeout=60)
    assert sweep.returncode == code, err
    (run,) = (tmp_path / "results" / "triton").iterdir()
    if word == "KILL":
        assert config_of(server) != before
        assert batchtune("restore", run, cwd=tmp_path).returncode == 0
    assert config_of(server) == before
    assert "nothing to do" in batchtune("restore", run, cwd=tmp_path).stderr


def test_a_launched_server_that_was_killed_is_launched_again(tmp_path: Path) -> None:
    assert PACKAGES is not None
    program = executable(tmp_path, PACKAGES)
    model = write_models({"m": (CONFIG, MODEL)}, tmp_path) / "m"
    batching = BatchingParameters(max_batch_size=8, batch_timeout_micros=0, num_batch_threads=1)
    configuration = Configuration(batching=batching, dialect="triton")
    with TritonTarget(TargetSpec(kind="triton", model=str(model), command=[str(program)])) as target:
        target.start()
        target.apply(configuration)
        killed = target.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(TargetError, match="ended by signal 9"):
            target.counters()
        target.apply(configuration)
        assert target.pid != killed
        assert target.counters().series


def test_a_launched_server_is_swept_to_the_best_of_its_model(tmp_path: Path) -> None:
    """τ(b) = 8 ms + 0.5 ms · b: 16 rows at once are 1,000/s, which nothing else in the space comes near."""
    assert PACKAGES is not None
    program = executable(tmp_path, PACKAGES)
    repository = write_models({"m": (CONFIG, MODEL)}, tmp_path)
    path = tmp_path / "triton.yaml"
    target = f", command: [{program}]"
    path.write_text(SCENARIO.format(model=repository / "m", target=target, strategy="guided", space=DELAYS))
    chosen = swept(path, by=batchtune)
    assert chosen["configuration"]["batching"]["max_batch_size"] == 16
    assert (repository / "m" / "config.pbtxt").read_text() == CONFIG
    run = Path(tmp_path / chosen["run"])
    assert "successfully loaded 'm'" in (run / "server.log").read_text()
