"""A model, or a server that runs, stands where a scenario would: what was guessed is said, what ran can be run again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.cli.arguments.load_request import LoadRequest, refuse_range
from batchtune.cli.arguments.overrides import kind_of, model_of, request_overrides
from batchtune.cli.commands import doctor
from batchtune.cli.commands.init_model import run_init_model
from batchtune.cli.commands.model_scenario import (
    Command,
    LookedAt,
    look_at,
    loop_of_model,
    shortage_of,
    subject_of_comparison,
    subject_of_load,
    subject_of_sweep,
    wants_of,
)
from batchtune.errors import TargetError, UsageError
from batchtune.load.first_tries import FirstTries
from batchtune.scenario.reader import format_scenario, parse_scenario, read_scenario
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.address import answering_at, is_address
from batchtune.target.choice import target_of
from batchtune.target.model_files import located_model, resolve_model
from batchtune.tune.search.contenders import one_by_one, reference_configurations
from tests.cli.in_process import answered
from tests.cli.test_cli import EMULATED, batchtune, write_version
from tests.load.tiny_onnx import lookup, product
from tests.server.server_process import ServerProcess, free_ports
from tests.target.kserve_server import KserveServer
from tests.target.triton.fake_triton import FakeTriton
from tests.tune.tune_fakes import scenario_of


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    """Without a version directory."""
    model = tmp_path / "my model"
    model.mkdir()
    (model / "emulated.yaml").write_text(EMULATED)
    return model


def test_a_run_is_gone_on_with_by_its_own_scenario(tmp_path: Path, emulated: Path) -> None:
    (tmp_path / "trials.jsonl").touch()
    with pytest.raises(UsageError, match="a run, not a model") as refused:
        model_of(str(tmp_path))
    resumed = f"batchtune sweep {tmp_path}/scenario.yaml --resume {tmp_path}"
    assert refused.value.hint == f"go on with it: {resumed}"
    with pytest.raises(UsageError, match="--resume") as refused:
        subject_of_sweep(str(emulated), LoadRequest(quiet=True), resume=tmp_path)
    assert refused.value.hint == resumed


def looked_at(model: Path, *overrides: str, **options: Any) -> tuple[LookedAt, list[str]]:
    said: list[str] = []
    return look_at(str(model), overrides, say=said.append, **{"command": "sweep", **options}), said


def test_what_is_on_disk_tells_a_scenario_from_a_model(emulated: Path, tmp_path: Path) -> None:
    (tmp_path / "localhost:8500").touch()
    kinds = {
        "gone.yaml": "scenario",
        "gone.yml": "scenario",
        "/dev/null": "scenario",
        "/dev/stdin": "scenario",
        "/dev/fd/63": "scenario",
        str(emulated): "model",
        "net.onnx": "model",
        "imdb_transformer": "model",
        "localhost:8500": "address",
        "[::1]:8500/m": "address",
        "http://host:8501/v1/models/m": "address",
        str(tmp_path / "localhost:8500"): "model",
    }
    assert {argument: kind_of(argument) for argument in kinds} == kinds


@pytest.mark.parametrize(
    ("argument", "message", "hint"),
    [
        ("nothing", r"not a scenario \(\.yaml\), model file or directory, HOST", "imdb_transformer"),
        ("quickstart", "quickstart", "`batchtune init --example quickstart` writes that example here"),
        ("./nothing", r"\./nothing.* does not exist", ""),
    ],
)
def test_what_is_neither_names_all_that_is_taken(argument: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        model_of(argument)
    assert hint in raised.value.hint


def test_a_scenario_in_a_pipe_is_read_once() -> None:
    text = b"name: s\ntarget: {model: m}\nload: {arrivals: poisson, rate: 5/s}\nobjective: latency\n"
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    try:
        asked = subject_of_sweep(f"/dev/fd/{reading}", LoadRequest(rate="7/s", quiet=True))
    finally:
        os.close(reading)
    assert read_scenario(asked.scenario, overrides=asked.overrides).load.rate_rps == 7.0


def test_a_path_that_cannot_be_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refused)
    closed = str(tmp_path / "model")
    for look in (kind_of, model_of, located_model, resolve_model):
        with pytest.raises(UsageError, match=f"{closed}: cannot be read: Permission denied"):
            look(closed)
    with pytest.raises(UsageError, match="localhost:1/m: cannot be read"):
        is_address("localhost:1/m")
    with pytest.raises(UsageError, match=f"target.model: {closed} cannot be read: Permission denied"):
        parse_scenario(f"name: s\ntarget: {{model: {closed}}}\nload: {{arrivals: closed, concurrency: 1}}\n")


@pytest.mark.parametrize("command", ["load", "compare", "sweep", "init"])
def test_a_rate_keeps_the_pattern_that_was_set_for_a_model(command: Command) -> None:
    given = ["load.arrivals=gamma", "load.gamma={cv: 4}"]
    loop = loop_of_model(given, command=command, rate="50/s", concurrency=None)
    assert "load.arrivals=poisson" not in loop
    assert {"load.rate=50.0", "load.concurrency=null"} <= set(loop)
    with pytest.raises(UsageError, match="the scenario's arrivals are gamma"):
        loop_of_model(given, command=command, rate=None, concurrency="4")
    closed = loop_of_model([], command="compare", rate="50/s", concurrency=None)
    assert "load.arrivals=poisson" in closed


def test_the_only_model_of_a_folder_is_taken(emulated: Path) -> None:
    assert model_of(str(emulated.parent)) == str(emulated)


def test_options_of_a_request_are_those_of_a_scenario() -> None:
    overrides = request_overrides(
        rest=True, rows=3, shapes=["ids=128", "image=8x8x3", "flag="], ranges=["ids=0:20000", "x=-1:0.5"]
    )
    assert overrides[:2] == ["request.protocol=rest", "request.rows=3"]
    assert [json.loads(text.partition("=")[2]) for text in overrides[2:]] == [
        {"ids": [128], "image": [8, 8, 3], "flag": []},
        {
            "random": {
                "by_input": {"ids": {"low": 0, "high": 20000, "whole": True}, "x": {"low": -1.0, "high": 0.5}}
            }
        },
    ]
    assert request_overrides(rest=False, rows=None, shapes=None, ranges=[]) == []


@pytest.mark.parametrize(
    ("shapes", "ranges", "expected"),
    [
        (["128"], [], "--shape: expected NAME=128, or NAME=224x224x3; was '128'"),
        (["x=0"], [], "--shape"),
        (["x=-"], [], "--shape"),
        ([], ["x=5"], "--range: expected NAME=0:20000; was 'x=5'"),
        ([], ["x=5:5"], "--range"),
        ([], ["=0:5"], "--range"),
        ([], ["x=0:inf"], "--range"),
        ([], ["x=-inf:0"], "--range"),
    ],
)
def test_a_shape_or_a_range_that_is_none_says_how_one_is_written(
    shapes: list[str], ranges: list[str], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        request_overrides(rest=False, rows=None, shapes=shapes, ranges=ranges)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("load", "net", "--rate", "5", "--concurrency", "3"), "exclude each other"),
        (("load", "net", "--gate", "speed=3"), "speed"),
        (("load", "net", "--gate", "p95=soon"), "--gate: expected a duration"),
        (("load", "net", "--batching-parameters-file", "gone.txt"), "gone.txt"),
        (("sweep", "net", "--budget", "45"), "--budget: expected a duration"),
        (("sweep", "net", "--budget", "0s"), "--budget: '0s' is not above 0"),
    ],
)
def test_a_mistake_in_an_option_is_told_before_a_look_at_a_model(
    words: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError)
    assert message in done.exception.message
    assert "no scenario (.yaml), model file" not in done.exception.message


def test_a_budget_too_short_for_so_slow_a_model_is_said_before_it_is_spent() -> None:
    tries = FirstTries(request=RequestSpec(), shapes={}, ranges={}, lone_s=0.302, larger_s=0.309)
    asked = {"load": {"arrivals": "poisson"}, "objective": "capacity", "slo": {"p95": "2s"}}
    space = {"max_batch_size": [1, 8, 64]}
    searches = ({"space": space, "budget": {"time": budget}} for budget in ("35s", "10m"))
    short, enough = (shortage_of(scenario_of(**asked, search=search), tries) for search in searches)
    assert short == "a request takes 302 ms: 35 s allow few runs; for a confirmed answer give --budget 181s"
    assert enough is None


def test_one_load_is_no_range() -> None:
    with pytest.raises(UsageError, match="--rate: one value, not 3") as raised:
        refuse_range(rate="100:300:100", concurrency=None)
    assert "batchtune load" in raised.value.hint
    refuse_range(rate=None, concurrency="8")


def test_a_model_alone_makes_a_scenario_that_can_be_read_again(emulated: Path) -> None:
    looked, said = looked_at(emulated, "slo.p95=50ms")
    scenario = read_scenario(looked.text("m"))
    assert (scenario.name, scenario.target.model) == ("my-model", str(emulated))
    assert (scenario.objective, scenario.load.arrivals) == ("capacity", "poisson")
    assert scenario.search.budget.time_s == 90.0
    assert said == [f"inspecting {emulated}: launching the server"]
    assert looked.notes == ()
    assert parse_scenario(format_scenario(scenario)) == scenario
    assert not list(emulated.glob("1"))


def test_what_was_guessed_is_said_and_stands_in_the_scenario(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = lookup(tmp_path / "ids.onnx", vocabulary=1000)
    looked, _ = looked_at(model, "load.arrivals=closed", "load.concurrency=8", "objective=throughput")
    assert looked.document["request"] == {
        "protocol": "grpc",
        "rows": 1,
        "shapes": {"ids": [128]},
        "inputs": {"random": {"by_input": {"ids": {"low": 0, "high": 100, "whole": True}}}},
    }
    assert looked.notes == (
        "ids: the model leaves [?, ?] open; sent is 128 a row (--shape ids=128)",
        "ids: whole numbers from 0 to 99 (--range ids=0:20000 for a vocabulary of 20,000)",
    )
    two_types, _ = looked_at(lookup(tmp_path / "types.onnx", vocabulary=2), command="load")
    assert two_types.notes[-1] == "ids: whole numbers from 0 to 1 (--range ids=LOW:HIGH for other values)"
    given = request_overrides(rest=False, rows=2, shapes=["ids=7"], ranges=["ids=0:1000"])
    looked, _ = looked_at(model, *given, command="load")
    assert looked.notes == ()
    scenario = read_scenario(looked.text("m"))
    assert (scenario.request.shapes, scenario.request.rows) == ({"ids": (7,)}, 2)
    assert (scenario.load.concurrency, scenario.objective) == (32, "throughput")


def test_a_model_that_takes_few_rows_at_once_is_searched_below_that(emulated: Path) -> None:
    (emulated / "emulated.yaml").write_text(f"{EMULATED}\nmemory: {{rows_max: 4}}\n")
    looked, _ = looked_at(emulated, "slo.p95=50ms")
    assert looked.document["search"]["space"]["max_batch_size"] == [1, 2, 4]
    assert any("8 rows at once are refused" in note and "room for 4 rows" in note for note in looked.notes)


GOALS = ("--slo-p95 20ms", "--concurrency 32", "--rate 500/s")


@pytest.mark.parametrize(
    ("overrides", "message", "hints"),
    [
        ((), "no goal: a capacity needs a latency limit", GOALS),
        (("slo=20ms",), r"--set slo=.*: expected keys and values", ()),
        (("slo=5",), r"--set slo=.*: expected keys and values", ()),
        (("slo=[1]",), r"--set slo=.*: expected keys and values", ()),
    ],
)
def test_a_sweep_without_a_goal_asks_for_one(
    emulated: Path, overrides: tuple[str, ...], message: str, hints: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        looked_at(emulated, *overrides)
    assert all(option in (raised.value.hint or "") for option in hints)


def test_a_load_without_one_rate_is_said_in_words() -> None:
    load = {"arrivals": "ramp", "ramp": {"from": "1/s", "to": "9/s"}}
    scenario = scenario_of(objective="latency", load=load)
    assert wants_of(scenario).startswith("goal: the lowest latency at the rates of its ramp")


def test_a_model_that_cannot_be_batched_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = product(tmp_path / "fixed.onnx", rows=1)
    done = answered("sweep", model, "--slo-p95", "20ms", cwd=tmp_path)
    assert done.returncode == 7
    assert "the batch dimension is fixed" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_sweep_of_a_model_names_the_scenario_that_ran(emulated: Path, tmp_path: Path) -> None:
    options = ["--slo-p95", "100ms", "--concurrency", "8", "--budget", "20s"]
    done = batchtune("sweep", emulated, *options, cwd=tmp_path)
    assert done.returncode in (0, 5), done.stderr
    assert "Recommended " in done.stdout, done.stderr
    assert "mkdir -p 'served/my model/1'" in done.stdout
    assert "goal: most requests/s of 8 clients within p95 ≤ 100 ms" in done.stderr
    named = next(line for line in done.stderr.splitlines() if line.startswith("the scenario that ran: "))
    path = tmp_path / named.removeprefix("the scenario that ran: ").partition(" (")[0]
    assert read_scenario(path).search.budget.time_s == 20.0


def test_a_comparison_of_a_model_is_without_batching_and_with(emulated: Path) -> None:
    with pytest.raises(UsageError, match="a model alone has no variants"):
        subject_of_comparison(str(emulated), LoadRequest(quiet=True))
    with pytest.raises(UsageError, match="--no-batching is for a model alone"):
        subject_of_comparison("s.yaml", LoadRequest(no_batching=True, quiet=True))
    wanted = LoadRequest(overrides=["fixed.max_batch_size=8"], no_batching=True, concurrency="4", quiet=True)
    asked = subject_of_comparison(str(emulated), wanted)
    scenario = read_scenario(asked.scenario, overrides=asked.overrides)
    assert list(scenario.variants) == ["no_batching", "batching"]
    assert (scenario.fixed, scenario.load.concurrency) == ({"max_batch_size": 8}, 4)


def test_options_change_a_scenario_file_likewise(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(format_scenario(scenario_of()))
    wanted = LoadRequest(overrides=["request.protocol=rest"], rate="50/s", quiet=True)
    asked = subject_of_sweep(str(path), wanted)
    scenario = read_scenario(asked.scenario, overrides=asked.overrides)
    changed = (scenario.objective, scenario.load.rate_rps, scenario.request.protocol)
    assert changed == ("latency", 50.0, "rest")


WITHIN_1_S = LoadRequest(overrides=["slo.p95=1s"], quiet=True)


def test_a_running_server_that_takes_no_parameters_is_to_be_loaded(running: ServerProcess) -> None:
    address = f"127.0.0.1:{running.rest_port}/m"
    with pytest.raises(UsageError, match="takes no parameters through its address") as raised:
        subject_of_sweep(address, WITHIN_1_S)
    assert f"batchtune load {address}" in raised.value.hint


def test_a_running_server_that_batches_nothing_is_attached_to_and_is_what_runs_now(tmp_path: Path) -> None:
    """No batching is told to it as what it is, and is what it has again at the end."""
    with ServerProcess(write_version(tmp_path / "base"), "--enable_tuning_api") as server:
        url = f"http://127.0.0.1:{server.rest_port}/v1/tuning/batching_parameters"
        subject = subject_of_sweep(f"127.0.0.1:{server.rest_port}/m", WITHIN_1_S)
        asked = read_scenario(subject.scenario)
        assert (asked.target.kind, asked.target.attached) == ("http", True)
        with target_of(asked) as target:
            spec = asked.target.model_copy(update={"present": target.attach()})
            named = reference_configurations(asked.model_copy(update={"target": spec}))
            assert named["present"] == named["no_batching"] == one_by_one(asked)
            target.apply(asked.configuration({"max_batch_size": 3, "num_batch_threads": 1}))
            assert httpx.get(url).json()["max_batch_size"] == 3
            target.apply(named["no_batching"])
            assert httpx.get(url).json() == {"enable_batching": False}
            target.apply(asked.configuration({"max_batch_size": 4, "num_batch_threads": 1}))
        assert httpx.get(url).json() == {"enable_batching": False}


@pytest.mark.parametrize(("protocol", "other"), [("rest", "grpc"), ("grpc", "rest")])
def test_a_running_server_is_found_by_either_port(running: ServerProcess, protocol: str, other: str) -> None:
    port = running.rest_port if protocol == "rest" else running.grpc_port
    address = answering_at(f"127.0.0.1:{port}/m")
    assert address.protocol == protocol
    with pytest.raises(UsageError, match=f"speaks {protocol}, not {other}") as dropped:
        look_at(address, [f"request.protocol={other}"], command="load", batched=False)
    assert "leave out --" in dropped.value.hint
    looked = look_at(address, ["load.concurrency=3"], command="load", batched=False)
    scenario = read_scenario(looked.text("m"))
    assert (scenario.target.model, scenario.request.protocol) == ("m", protocol)
    with pytest.raises(TargetError, match="nobody") as refused:
        look_at(answering_at(f"127.0.0.1:{port}/nobody"), [], command="load", batched=False)
    assert refused.value.hint.startswith("is nobody the name under which that server serves it")


def test_an_address_is_a_url_or_a_port_with_a_model(running: ServerProcess) -> None:
    place = f"127.0.0.1:{running.rest_port}"
    assert answering_at(f"http://{place}/v1/models/m:predict") == answering_at(f"{place}/m")
    wanted = subject_of_load(f"127.0.0.1:{running.grpc_port}/m", LoadRequest(quiet=True))
    assert (wanted.rest_url, wanted.grpc_url) == (None, f"grpc://127.0.0.1:{running.grpc_port}")
    with pytest.raises(UsageError, match="which model of that server") as raised:
        answering_at(place)
    assert raised.value.hint == f"give {place}/MODEL"


def test_a_server_of_kserves_protocol_is_told_from_one_of_tensorflows() -> None:
    with KserveServer() as server:
        server.get["/v2"] = (200, {"name": "fake", "extensions": []})
        assert answering_at(f"127.0.0.1:{server.rest_port}/m").protocol == "kserve_rest"
        address = answering_at(f"grpc://127.0.0.1:{server.grpc_port}/m")
        assert address.protocol == "kserve_grpc"
        looked = look_at(address, [], command="load", batched=False)
        assert [spec.name for spec in looked.signature.inputs] == ["x"]


def test_a_tritons_address_is_attached_to_and_init_writes_that_scenario(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "WINDOW_S", 0.0)
    with FakeTriton() as server:
        server.pages["/v2"] = (200, {"name": "triton", "extensions": ["model_repository"]})
        address = f"127.0.0.1:{server.rest_port}/m"
        asked = read_scenario(subject_of_sweep(address, WITHIN_1_S).scenario)
        found = (asked.target.kind, asked.target.rest_url, asked.target.attached)
        assert found == ("triton", server.url, True)
        assert run_init_model(address, LoadRequest(quiet=True), write=None) == 0
        written = capsys.readouterr()
        assert parse_scenario(written.out).target == asked.target
        assert "batchtune sweep" in written.err
        assert server.orders == []


def test_an_address_where_nobody_answers_is_told() -> None:
    (port,) = free_ports(1)
    for address in (f"127.0.0.1:{port}/m", f"grpc://127.0.0.1:{port}/m"):
        with pytest.raises(TargetError, match="no connection"):
            answering_at(address)
    with pytest.raises(UsageError, match="no address of a server"):
        answering_at("http://host/m")
