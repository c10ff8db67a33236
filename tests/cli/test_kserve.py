"""`batchtune load` against a running KServe v2 server, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import batchtune
from tests.target.kserve_server import KserveServer

SCENARIO = """\
name: kserve
target: {model: m}
request: {protocol: kserve_grpc, rows: 2}
load: {arrivals: closed, concurrency: 2, warm_up: 100ms, duration: 300ms, seed: 1}
slo: {}
objective: throughput
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "kserve.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.mark.parametrize(
    ("protocol", "option"),
    [
        ("kserve_grpc", "--grpc-url=127.0.0.1:{0.grpc_port}"),
        pytest.param("kserve_rest", "--rest-url=http://127.0.0.1:{0.rest_port}", marks=pytest.mark.slow),
        ("kserve_rest_binary", "--rest-url=http://127.0.0.1:{0.rest_port}"),
    ],
)
def test_a_running_kserve_server_is_loaded(scenario: Path, protocol: str, option: str) -> None:
    with KserveServer() as server:
        arguments = [
            "load",
            scenario,
            option.format(server),
            "--json",
            "--set",
            f"request.protocol={protocol}",
        ]
        done = batchtune(*arguments, cwd=scenario.parent)
    assert done.returncode in (0, 6), done.stderr  # 6: this host was too noisy
    (point,) = json.loads(done.stdout)["points"]
    assert point["failure"] is None
    assert point["measurement"]["errors"] == {}
    assert point["measurement"]["requests"] > 0


def test_a_launched_server_speaks_no_kserve(scenario: Path) -> None:
    done = batchtune("load", scenario, cwd=scenario.parent)
    assert done.returncode == 2
    assert "request.protocol" in done.stderr
    assert "--rest-url" in done.stderr


def test_a_model_that_is_not_there_is_a_target_failure(scenario: Path) -> None:
    with KserveServer() as server:
        option = f"--grpc-url=127.0.0.1:{server.grpc_port}"
        done = batchtune("load", scenario, option, "--set", "target.model=nope", cwd=scenario.parent)
    assert done.returncode == 7
    assert "unknown model: 'nope'" in done.stdout + done.stderr
