"""`batchtune load` against the bundled server: its exit code, what it keeps, and servers that it did not launch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from batchtune.archive.run import Run
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.cli.arguments.load_request import LoadRequest
from batchtune.cli.commands import run_load as load_command
from batchtune.cli.commands.run_load import repeated_points, run_load
from batchtune.errors import MeasurementInvalidError
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import Samples
from batchtune.measure.caveats import HostGuard
from batchtune.report.live_view import sweep_view
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.evidence.best_point import spoilt_by
from batchtune.tune.loader import REPEATS_MAX
from batchtune.tune.trials.trial import TrialRequest
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED, batchtune
from tests.server.server_process import ServerProcess
from tests.target.kserve_server import KserveServer
from tests.tune.tune_fakes import FakeClock, FakeFleet, FakeTarget, Law, scenario_of

SCENARIO = """\
name: emulated
target: {kind: tfserving, model: MODEL}
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
ASKED = LoadRequest(results=None, json=True, quiet=True)
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


@pytest.mark.slow
def test_a_load_ends_with_6_exactly_when_its_point_shows_the_client_or_the_host(scenario: Path) -> None:
    """Whether so many clients outrun the server before they outrun their own core is up to the machine."""
    done = batchtune("load", scenario, "--concurrency", str(FAR_TOO_MANY), cwd=scenario.parent)
    void = "INVALID: the load generator was the limit here" in done.stdout or "NOISY: " in done.stdout
    assert done.returncode == (6 if void else 0), done.stderr
    assert ("invalid: no point is a measurement of the server: " in done.stderr) == void
    assert "requests/s" in done.stdout
    assert "the device is emulated" in done.stdout


@pytest.mark.slow
def test_a_range_ends_with_6_only_when_no_point_of_it_counts(scenario: Path) -> None:
    done = batchtune(
        "load", scenario, "--concurrency", f"2,{FAR_TOO_MANY}", "--json", "-q", cwd=scenario.parent
    )
    points = json.loads(done.stdout)["points"]
    counts = any(point["spoilt_by"] is None for point in points)
    assert done.returncode == (0 if counts else 6), done.stderr
    assert all({"kind", "text", "advice", "evidence"} == set(point["bottleneck"]) for point in points)


def test_help_says_with_which_code_a_load_ends() -> None:
    done = answered("load", "--help", cwd=Path.cwd())
    text = " ".join(done.stdout.split())
    assert "Exit code: 0 the SLO and every --gate are met, or there is none; 3 one is missed; 5 no" in text
    assert "6 no point is valid" in text


def test_a_load_is_kept_as_a_run_that_is_no_sweep(scenario: Path) -> None:
    done = answered(
        "load",
        scenario,
        "--concurrency",
        "1,2",
        "--set",
        "max_batch_size=8",
        "--json",
        "-q",
        cwd=scenario.parent,
    )
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
    latest = answered("recommend", cwd=scenario.parent)
    assert (latest.returncode, "no sweep under results, only other runs" in latest.stderr) == (2, True)
    resumed = answered("sweep", scenario, "--resume", run.path, cwd=scenario.parent)
    assert (resumed.returncode, "is not a sweep" in resumed.stderr) == (2, True)
    named = answered("recommend", run.path, cwd=scenario.parent)
    assert (named.returncode, "is a load test" in named.stderr) == (2, True)


@pytest.mark.slow
def test_nothing_is_kept_with_no_save(scenario: Path) -> None:
    done = batchtune("load", scenario, "--concurrency", "1", "--no-save", "--json", "-q", cwd=scenario.parent)
    assert json.loads(done.stdout)["run"] is None
    assert not (scenario.parent / "results").exists()


def test_a_missed_slo_ends_with_3(scenario: Path) -> None:
    """No answer is quicker than its device; noise of the host can only leave that open."""
    done = answered("load", scenario, "--slo-p50", "1us", "--no-save", cwd=scenario.parent)
    assert done.returncode in (3, 6), done.stderr
    assert ("the SLO is missed: " in done.stderr) == (done.returncode == 3)


@pytest.fixture
def server(scenario: Path) -> Iterator[ServerProcess]:
    """A bundled server that nobody told us the parameters of."""
    parameters = scenario.parent / "parameters.txt"
    parameters.write_text("max_batch_size { value: 4 }\nnum_batch_threads { value: 1 }\n")
    flags = ["--enable_batching", f"--batching_parameters_file={parameters}"]
    with ServerProcess(scenario.parent / "emulated", *flags) as started:
        yield started


def test_the_parameters_of_a_server_that_runs_already_are_unknown(
    scenario: Path, server: ServerProcess
) -> None:
    url = f"127.0.0.1:{server.rest_port}"
    done = answered(
        "load", scenario, "--rest-url", url, "--json", "--set", "target.model=m", cwd=scenario.parent
    )
    assert "request.protocol is rest, as --rest-url asks; the scenario says grpc" in done.stderr
    (point,) = json.loads(done.stdout)["points"]
    assert point["failure"] is None
    assert point["configuration"]["batching"] == "unknown"
    assert "1000" not in json.dumps(point["bottleneck"])
    assert point["bottleneck"]["kind"] not in ("concurrency", "batch_timeout", "batch_threads")


def test_a_server_with_the_tuning_api_tells_its_parameters(scenario: Path) -> None:
    parameters = scenario.parent / "parameters.txt"
    parameters.write_text("max_batch_size { value: 4 }\nbatch_timeout_micros { value: 0 }\n")
    flags = ["--enable_tuning_api", "--enable_batching", f"--batching_parameters_file={parameters}"]
    with ServerProcess(scenario.parent / "emulated", *flags) as started:
        url = f"127.0.0.1:{started.rest_port}"
        done = answered(
            "load", scenario, "--rest-url", url, "--json", "--set", "target.model=m", cwd=scenario.parent
        )
    (point,) = json.loads(done.stdout)["points"]
    assert point["configuration"]["batching"] == {"max_batch_size": 4, "batch_timeout_micros": 0}


def test_json_and_csv_exclude_each_other(scenario: Path) -> None:
    done = answered("load", scenario, "--json", "--csv", cwd=scenario.parent)
    assert (done.returncode, "--json and --csv" in done.stderr) == (2, True)


def test_an_open_loop_without_an_slo_is_repeated_on_a_noisy_host() -> None:
    """The session's canaries took no time, so that any run of them now is far too slow."""
    clock = FakeClock()
    target = FakeTarget(clock, Law(fixed_s=0.01))
    fleet = FakeFleet(target)
    load = {"arrivals": "poisson", "rate": 50, "warm_up": "100ms", "duration": "2s"}
    scenario = scenario_of(load=load, objective="latency", slo={})
    noisy = HostGuard(canaries_s=[1e-9] * 20)
    bench = Bench(
        scenario,
        target,
        fleet,
        on_live=lambda _plan, _live: None,
        now_s=clock,
        sleep=clock.sleep,
        guard=noisy,
    )
    batching = BatchingParameters(max_batch_size=8, num_batch_threads=1)
    plan = Plan(
        number=1,
        seed=1,
        request=TrialRequest(source="load", reason="load", configuration=Configuration(batching=batching)),
    )
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
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` on a fake server and fleet, on a host that nobody watches; a batch takes 10 ms."""
    target = LaunchedFake(FakeClock(), Law(fixed_s=0.01, per_row_s=0.0, noise=0.0))
    fleet = BreakingFleet(target)
    monkeypatch.setattr(load_command, "target_of", lambda *_scenario, **_events: target)
    monkeypatch.setattr("batchtune.cli.session.fleet_of", lambda _load, **_events: fleet)
    monkeypatch.setattr(load_command, "HostGuard", lambda: None)
    monkeypatch.setattr("batchtune.cli.session.client_max_rps", lambda *_requests, **_cpus: 1e5)


def test_points_before_a_load_generator_failed_are_printed(
    scenario: Path, faked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(ASKED, scenario=scenario, concurrency="4,8", overrides=["max_batch_size=8"])
    assert run_load(asked) == MeasurementInvalidError.exit_code
    said = capsys.readouterr()
    (point,) = json.loads(said.out)["points"]
    assert point["concurrency"] == 4
    assert "does not report back" in said.err


def test_what_is_not_sure_asks_for_more_of_the_requests_that_were_asked_for(
    scenario: Path, faked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(
        ASKED, scenario=scenario, overrides=["load.requests=20", "slo.p95=25ms", "load.warm_up=0s"]
    )
    assert run_load(asked) == 5
    assert "20 requests were measured: --set load.requests=N" in capsys.readouterr().err


def test_a_missed_gate_is_told_and_counts_beside_an_slo_that_is_not_sure(
    scenario: Path, faked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(
        ASKED, scenario=scenario, overrides=["load.requests=20", "slo.p95=25ms", "load.warm_up=0s"]
    )
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


@pytest.mark.parametrize(
    ("protocol", "option"),
    [
        ("kserve_grpc", "--grpc-url=127.0.0.1:{0.grpc_port}"),
        pytest.param("kserve_rest", "--rest-url=http://127.0.0.1:{0.rest_port}", marks=pytest.mark.slow),
        ("kserve_rest_binary", "--rest-url=http://127.0.0.1:{0.rest_port}"),
    ],
)
def test_a_running_kserve_server_is_loaded(kserve_scenario: Path, protocol: str, option: str) -> None:
    with KserveServer() as server:
        arguments = [
            "load",
            kserve_scenario,
            option.format(server),
            "--json",
            "--set",
            f"request.protocol={protocol}",
        ]
        done = answered(*arguments, cwd=kserve_scenario.parent)
    assert done.returncode in (0, 6), done.stderr  # 6: this host was too noisy
    (point,) = json.loads(done.stdout)["points"]
    assert point["failure"] is None
    assert point["measurement"]["errors"] == {}
    assert point["measurement"]["requests"] > 0


def test_a_launched_server_speaks_no_kserve(kserve_scenario: Path) -> None:
    done = answered("load", kserve_scenario, cwd=kserve_scenario.parent)
    assert done.returncode == 2
    assert "request.protocol" in done.stderr
    assert "--rest-url" in done.stderr


def test_a_model_that_is_not_there_is_a_target_failure(kserve_scenario: Path) -> None:
    with KserveServer() as server:
        option = f"--grpc-url=127.0.0.1:{server.grpc_port}"
        done = answered(
            "load", kserve_scenario, option, "--set", "target.model=nope", cwd=kserve_scenario.parent
        )
    assert done.returncode == 7
    assert "unknown model: 'nope'" in done.stdout + done.stderr


@pytest.mark.slow
def test_several_models_are_loaded_at_once_and_each_alone(tmp_path: Path) -> None:
    for name in ("quick", "slow"):
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version / "emulated.yaml").write_text(EMULATED)
    scenario = tmp_path / "two.yaml"
    scenario.write_text(
        f"""\
name: two
target:
  models:
    - {{name: quick, model: {tmp_path}/quick, rate: 200/s}}
    - {{name: slow, model: {tmp_path}/slow, rate: 50/s, request: {{rows: 4}}, slo: {{p95: 10s}},
       batching: {{max_batch_size: 4}}}}
load: {{arrivals: poisson, warm_up: 100ms, duration: 400ms}}
objective: latency
fixed: {{max_batch_size: 8, batch_timeout_micros: 0, num_batch_threads: 1}}
"""
    )
    done = batchtune("load", scenario, "--json", cwd=tmp_path)
    assert done.returncode in (0, 5, 6), done.stderr  # so short a run may leave the SLO unsure
    document = json.loads(done.stdout)
    assert set(document["models"]) == {"quick", "slow"}
    for name, rate, rows in (("quick", 200.0, 1), ("slow", 50.0, 4)):
        for beside in ("together", "alone"):
            measured = document["models"][name][beside]["measurement"]
            assert measured["offered_rps"] == pytest.approx(rate, rel=0.5)
            assert measured["errors"] == {}
            per_request = measured["throughput_rows_per_s"]["value"] / measured["throughput_rps"]["value"]
            assert per_request == pytest.approx(rows)
    assert document["models"]["quick"]["together"]["measurement"]["verdict"] in (None, "INVALID", "NOISY")
    assert set(document["server"]["model_batches"]) == {"quick", "slow"}
    ledger = [
        json.loads(line) for line in (tmp_path / document["run"] / "trials.jsonl").read_text().splitlines()
    ]
    parts = [
        (one["reason"], name, part["configuration"]["batching"]["max_batch_size"])
        for one in ledger
        for name, part in one["parts"].items()
    ]
    assert parts == [
        ("together", "quick", 8),
        ("together", "slow", 4),
        ("alone", "quick", 8),
        ("alone", "slow", 4),
    ]
    log = (tmp_path / document["run"] / "server.log").read_text()
    assert re.search(r"model quick version 1 is available: .* max_batch_size 8,", log)
    assert re.search(r"model slow version 1 is available: .* max_batch_size 4,", log)
    assert not (tmp_path / document["run"] / "report.html").exists()
    refused = answered("load", scenario, "--rate", "100", cwd=tmp_path)
    assert refused.returncode == 2
    assert "hint: write rate: at each of target.models" in refused.stderr
