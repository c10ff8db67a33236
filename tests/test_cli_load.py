"""`batchtune load` against the bundled server: its exit code says whether the figures are the server's at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import EMULATED, batchtune

SCENARIO = """\
name: emulated
target: {kind: tfserving, model: MODEL}
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 16, warm_up: 100ms, duration: 300ms, seed: 1}
slo: {p95: 30ms}
objective: throughput
fixed: {max_batch_size: 1000, batch_timeout_micros: 0, num_batch_threads: 1}
"""
FAR_TOO_MANY = 500
"""Clients of a server that answers them all in 2 ms: more than one load generator may be able to serve."""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    version = tmp_path / "emulated" / "1"
    version.mkdir(parents=True)
    (version / "emulated.yaml").write_text(EMULATED.replace("per_row_ms: 0.05", "per_row_ms: 0.0"))
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("MODEL", str(tmp_path / "emulated")))
    return path


def test_a_load_ends_with_6_exactly_when_its_point_shows_the_client_or_the_host(scenario: Path) -> None:
    """Whether so many clients outrun the server before they outrun their own core is up to the machine."""
    done = batchtune("load", scenario, "--concurrency", str(FAR_TOO_MANY), cwd=scenario.parent)
    void = "INVALID: the load generator was the limit here" in done.stdout or "NOISY: " in done.stdout
    assert done.returncode == (6 if void else 0), done.stderr
    assert ("invalid: no point is a measurement of the server: " in done.stderr) == void
    assert "requests/s" in done.stdout
    assert "the device is emulated" in done.stdout


def test_a_range_ends_with_6_only_when_no_point_of_it_counts(scenario: Path) -> None:
    done = batchtune(
        "load", scenario, "--concurrency", f"2,{FAR_TOO_MANY}", "--json", "-q", cwd=scenario.parent
    )
    points = json.loads(done.stdout)["points"]
    counts = any(point["spoilt_by"] is None for point in points)
    assert done.returncode == (0 if counts else 6), done.stderr
    assert all({"kind", "text", "advice", "evidence"} == set(point["bottleneck"]) for point in points)


def test_help_says_when_a_load_is_void() -> None:
    done = batchtune("load", "--help", cwd=Path.cwd())
    assert "Ends with 6" in " ".join(done.stdout.split())
