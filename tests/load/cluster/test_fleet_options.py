"""`load.fleet` by `--set` of the commands that measure, and what is told where Ray is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.errors import UsageError
from batchtune.load.cluster import cluster_fleet
from batchtune.target.process import ServerProcess
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED

SCENARIO = """\
name: emulated
target: {kind: tfserving, model: MODEL}
load: {arrivals: closed, concurrency: 4, warm_up: 100ms, duration: 300ms}
objective: throughput
search: {space: {max_batch_size: [1, 8]}}
variants: {small: {fixed: {max_batch_size: 1}}, large: {fixed: {max_batch_size: 8}}}
"""
COMMANDS = ("load", "sweep", "compare", "check")


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., Any]:
    """Call a command with a scenario of its own and such options; its exception."""
    version = tmp_path / "emulated" / "1"
    version.mkdir(parents=True)
    (version / "emulated.yaml").write_text(EMULATED)
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("MODEL", str(tmp_path / "emulated")))

    def invoked(command: str, *settings: str) -> Any:
        words = [command, str(path), "--results", str(tmp_path / "results"), "--quiet"]
        options = [word for setting in settings for word in ("--set", f"load.fleet.{setting}")]
        return CliRunner().invoke(app, [*words, *options]).exception

    return invoked


@pytest.mark.parametrize("command", COMMANDS)
def test_without_ray_each_command_names_the_extra(
    command: str, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a server is launched."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
    )
    launched: list[Any] = []
    monkeypatch.setattr(ServerProcess, "launch", lambda *command, **_: launched.append(command))
    error = invoke(command, "ray=auto")
    assert isinstance(error, UsageError)
    assert (error.exit_code, error.hint) == (2, "pip install 'batchtune[ray]'")
    assert launched == []


def test_a_fleet_is_asked_for_by_name(invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_actors: Any, spec: Any, _on_event: Any) -> None:
        raise UsageError(f"{spec.ray} {spec.workers}")

    monkeypatch.setattr(cluster_fleet, "RayActors", lambda *_address, **_names: None)
    monkeypatch.setattr(cluster_fleet, "ray_cluster", refuse)
    error = invoke("load", "ray=ray://head:10001", "workers=3")
    assert error.message == "ray://head:10001 3"


def test_workers_without_a_cluster_are_refused(invoke: Callable[..., Any]) -> None:
    error = invoke("load", "workers=3")
    assert isinstance(error, UsageError)
    assert "load.fleet.ray" in error.message


def test_the_options_of_before_say_what_to_write(tmp_path: Path) -> None:
    done = answered("sweep", "s.yaml", "--fleet=auto", cwd=tmp_path)
    told = "error: --fleet: this option of sweep no longer exists\nhint: use --set load.fleet.ray=ADDRESS\n"
    assert (done.returncode, done.stderr) == (2, told)
