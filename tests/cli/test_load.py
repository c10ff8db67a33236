"""`batchtune load` against the bundled server: its exit code, what it keeps, and servers that it did not launch."""

from __future__ import annotations

import csv
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from batchtune.archive.run import Run
from batchtune.cli.arguments.load_request import LoadRequest
from batchtune.cli.commands import run_load as load_command
from batchtune.cli.commands.run_load import repeated_points, run_load
from batchtune.errors import MeasurementInvalidError
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import Samples
from batchtune.measure.caveats import HostGuard
from batchtune.report.live_view import sweep_view
from batchtune.tune.evidence.best_point import spoilt_by
from batchtune.tune.loader import REPEATS_MAX
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED, write_version
from tests.server.server_process import ServerProcess
from tests.target.kserve_server import KserveServer
from tests.tune.tune_fakes import (
    FakeClock,
    FakeFleet,
    FakeTarget,
    Law,
    batches_of,
    bench_of,
    planned,
    scenario_of,
)

SCENARIO = """\
name: emulated
target: {kind: tfserving, model: ./emulated}
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 16, warm_up: 50ms, duration: 150ms, seed: 1}
slo: {}
objective: throughput
fixed: {max_batch_size: 1000, batch_timeout_micros: 0, num_batch_threads: 1}
"""
KSERVE_SCENARIO = """\
name: kserve
target: {model: m}
request: {protocol: kserve_grpc, rows: 2}
load: {arrivals: closed, concurrency: 2, warm_up: 50ms, duration: 150ms, seed: 1}
slo: {}
objective: throughput
"""
BY_GRPC, BY_REST = "--grpc-url=127.0.0.1:{0.grpc_port}", "--rest-url=http://127.0.0.1:{0.rest_port}"
ASKED = LoadRequest(results=None, json=True, quiet=True)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    write_version(tmp_path / "emulated", EMULATED.replace("per_row_ms: 0.05", "per_row_ms: 0.0"))
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_load_is_kept_as_a_run_that_is_no_sweep(scenario: Path) -> None:
    options = ("--concurrency", "1:2:x2", "--set", "max_batch_size=8", "--json", "-q")
    done = answered("load", scenario, *options, cwd=scenario.parent)
    assert done.returncode in (0, 6), done.stderr
    document = json.loads(done.stdout)
    run = Run(scenario.parent / document["run"])
    assert run.path.name.endswith("-load")
    assert [(trial.source, trial.concurrency) for trial in run.ledger()] == [("load", 1), ("load", 2)]
    assert {trial.configuration.batching.max_batch_size for trial in run.ledger()} == {8}
    assert run.scenario().name == "emulated"
    assert len(run.requests(2).status) >= run.ledger()[1].measurement.requests
    assert run.provenance()
    assert "How many clients are best?" in (run.path / "report.html").read_text()
    assert "report" not in done.stderr
    for words, refusal in (
        (("recommend",), "no sweep under results, only other runs"),
        (("recommend", run.path), "is a load test"),
        (("sweep", scenario, "--resume", run.path), "is not a sweep"),
    ):
        refused = answered(*words, cwd=scenario.parent)
        assert (refused.returncode, refusal in refused.stderr) == (2, True)


def test_a_missed_slo_ends_with_3_and_nothing_is_kept_with_no_save(scenario: Path) -> None:
    """No answer is quicker than its device; noise of the host can only leave that open."""
    options = ("--slo-p50", "1us", "--no-save", "--csv")
    done = answered("load", scenario, *options, cwd=scenario.parent)
    assert done.returncode in (3, 6), done.stderr
    assert ("the SLO is missed: " in done.stderr) == (done.returncode == 3)
    (row,) = csv.DictReader(done.stdout.splitlines())
    assert float(row["p95_ms"]) > 2.0
    assert not (scenario.parent / "results").exists()


def loaded(scenario: Path, address: str) -> subprocess.CompletedProcess[str]:
    options = (address, "--rate=50", "--set=target.model=m", "--json")
    return answered("load", scenario, *options, cwd=scenario.parent)


@pytest.mark.parametrize("address", [BY_GRPC, BY_REST])
def test_a_running_server_is_loaded_and_left_running(
    scenario: Path, running: ServerProcess, address: str
) -> None:
    done = loaded(scenario, address.format(running))
    assert running.predict({"instances": [[0.0] * 8]}) == {"predictions": [[0.0, 1.0]]}
    asks = "request.protocol is rest, as --rest-url asks; the scenario says grpc"
    assert (asks in done.stderr) == (address == BY_REST)
    (point,) = json.loads(done.stdout)["points"]
    assert (point["failure"], point["rate_rps"]) == (None, 50.0)
    assert point["configuration"]["batching"] == "unknown"
    assert "1000" not in json.dumps(point["bottleneck"])
    assert point["bottleneck"]["kind"] not in ("concurrency", "batch_timeout", "batch_threads")


def test_a_server_with_the_tuning_api_tells_its_parameters(scenario: Path) -> None:
    parameters = scenario.parent / "parameters.txt"
    parameters.write_text("max_batch_size { value: 4 }\nbatch_timeout_micros { value: 0 }\n")
    flags = ("--enable_tuning_api", "--enable_batching", f"--batching_parameters_file={parameters}")
    with ServerProcess(scenario.parent / "emulated", *flags) as server:
        (point,) = json.loads(loaded(scenario, BY_REST.format(server)).stdout)["points"]
    assert point["configuration"]["batching"] == {"max_batch_size": 4, "batch_timeout_micros": 0}


def test_an_open_loop_without_an_slo_is_repeated_on_a_noisy_host() -> None:
    """The session's canaries took no time, so that any run of them now is far too slow."""
    load = {"arrivals": "poisson", "rate": 50, "warm_up": "100ms", "duration": "2s"}
    scenario = scenario_of(load=load, objective="latency", slo={})
    target = FakeTarget(FakeClock(), Law(fixed_s=0.01))
    fleet = FakeFleet(target)
    bench = bench_of(scenario, target, fleet, guard=HostGuard(canaries_s=[1e-9] * 20))
    plan = planned(batches_of(8), source="load")
    with sweep_view(quiet=True) as view:
        (finished,) = repeated_points(bench, [plan], scenario=scenario, view=view)
    assert spoilt_by(finished.trial) == "host"
    assert finished.trial.measurement.verdict is None
    assert len(fleet.jobs) == 1 + REPEATS_MAX


class LaunchedFake(FakeTarget):
    """A server at the tuner's boundary, with an end."""

    def close(self) -> None:
        self.running = False


class BreakingFleet(FakeFleet):
    """Its load generators fail after the first load."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        return

    def run(self, job: LoadJob, **watchers: Any) -> Samples:
        if self.jobs:
            raise MeasurementInvalidError("a load worker does not report back", hint="please report this")
        return super().run(job, **watchers)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> BreakingFleet:
    """`load` on a fake server and fleet, on a host that nobody watches; a batch takes 10 ms."""
    target = LaunchedFake(FakeClock(), Law(fixed_s=0.01, per_row_s=0.0, noise=0.0))
    fleet = BreakingFleet(target)
    monkeypatch.setattr(load_command, "target_of", lambda *_scenario, **_events: target)
    monkeypatch.setattr("batchtune.cli.session.fleet_of", lambda _load, **_events: fleet)
    monkeypatch.setattr(load_command, "HostGuard", lambda: None)
    monkeypatch.setattr("batchtune.cli.session.client_max_rps", lambda *_requests, **_cpus: 1e5)
    return fleet


def test_points_before_a_load_generator_failed_are_printed(
    scenario: Path, faked: BreakingFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(ASKED, scenario=scenario, concurrency="4,8", overrides=["max_batch_size=8"])
    assert run_load(asked) == MeasurementInvalidError.exit_code
    said = capsys.readouterr()
    (point,) = json.loads(said.out)["points"]
    assert point["concurrency"] == 4
    assert "does not report back" in said.err


def test_what_is_not_sure_asks_for_more_of_the_requests_and_a_missed_gate_counts_beside_it(
    scenario: Path, faked: BreakingFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["load.requests=20", "slo.p95=25ms", "load.warm_up=0s"]
    asked = replace(ASKED, scenario=scenario, overrides=overrides)
    assert run_load(asked) == 5
    assert "20 requests were measured: --set load.requests=N" in capsys.readouterr().err
    faked.jobs.clear()
    assert run_load(asked, gates=["throughput=1000000/s"]) == 3
    said = capsys.readouterr()
    assert "no verdict on the SLO" in said.err
    assert "gate: throughput" in said.err
    (gate,) = json.loads(said.out)["gates"]
    assert (gate["metric"], gate["limit"], gate["state"]) == ("throughput", 1e6, "missed")
    assert gate["figure"]["high"] < 1e6


@pytest.fixture
def kserve_scenario(tmp_path: Path) -> Path:
    path = tmp_path / "kserve.yaml"
    path.write_text(KSERVE_SCENARIO)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "option"),
    [
        ("kserve_grpc", BY_GRPC),
        pytest.param("kserve_rest", BY_REST, marks=pytest.mark.slow),
        ("kserve_rest_binary", BY_REST),
    ],
)
def test_a_running_kserve_server_is_loaded(kserve_scenario: Path, protocol: str, option: str) -> None:
    with KserveServer() as server:
        options = (option.format(server), "--json", f"--set=request.protocol={protocol}")
        done = answered("load", kserve_scenario, *options, cwd=kserve_scenario.parent)
        unknown = (option.format(server), "--set=target.model=nope")
        refused = answered("load", kserve_scenario, *unknown, cwd=kserve_scenario.parent)
    assert done.returncode in (0, 6), done.stderr  # 6: this host was too noisy
    (point,) = json.loads(done.stdout)["points"]
    assert (point["failure"], point["measurement"]["errors"]) == (None, {})
    assert point["measurement"]["requests"] > 0
    assert refused.returncode == 7
    assert "nope" in refused.stdout + refused.stderr
