"""Is the address of a server of OpenAI's API enough to load it, and does it say which model is meant?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from batchtune.cli.arguments.load_request import LoadRequest, asked_configuration, asked_load
from batchtune.cli.commands.init_model import run_init_model, run_init_server
from batchtune.cli.commands.model_scenario import subject_of_load, subject_of_sweep
from batchtune.cli.commands.run_load import run_load
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.reader import parse_scenario
from batchtune.target.command import CommandTarget
from batchtune.target.process import free_port
from batchtune.tune.loader import Loader, LoadRun
from tests.target.kserve_server import KserveServer
from tests.target.running_process import answering_process


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "batchtune.server.emulated_llm", f"--port={port}", "--model=org/tiny:1"]
    log_path = tmp_path_factory.mktemp("llm") / "log"
    with answering_process(command, f"{address}/health", log_path=log_path):
        yield address


@pytest.mark.parametrize("rest", ["", "/v1", "/v1/chat/completions", "/v1/completions", "/org/tiny:1"])
def test_a_load_takes_the_model_that_the_server_lists(url: str, rest: str) -> None:
    api = "completions" if rest == "/v1/completions" else "chat"
    wanted = subject_of_load(f"{url}{rest}", LoadRequest(concurrency="3", quiet=True))
    scenario = asked_load(wanted)[0]
    assert (scenario.target.kind, scenario.request.protocol) == ("http", "openai")
    assert scenario.request.openai is not None
    assert (scenario.request.openai.api, scenario.request.openai.model) == (api, "org/tiny:1")
    assert scenario.target.url == f"{url}/v1/{'chat/completions' if api == 'chat' else api}"
    assert (scenario.load.concurrency, scenario.slo.limits()) == (3, {})


def test_init_writes_a_whole_scenario(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.yaml"
    assert run_init_model(url, LoadRequest(quiet=True), write=file) == 0
    scenario = parse_scenario(file.read_text())
    assert scenario.name == "tiny-1"
    assert "ttft_p95" in scenario.slo.limits()
    assert f"next: batchtune load {file}" in capsys.readouterr().err


def test_the_limits_of_the_command_line_are_written(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = LoadRequest(overrides=["slo.ttft_p95=70ms"], quiet=True)
    assert run_init_model(url, wanted, write=None) == 0
    assert parse_scenario(capsys.readouterr().out).slo.ttft_p95_s == 0.07
    assert run_init_server("vllm", "org/tiny", wanted, write=None) == 0
    written = capsys.readouterr().out
    assert written.startswith("# vLLM: ")
    assert parse_scenario(written).slo.limits() == {"ttft_p95": 0.07, "itl_p99": 0.05}


@pytest.mark.parametrize(("rate", "concurrency"), [("7", None), (None, "9")])
def test_the_load_of_the_command_line_is_written(
    url: str, rate: str | None, concurrency: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = LoadRequest(rate=rate, concurrency=concurrency, quiet=True)
    asked = (rate and float(rate), concurrency and int(concurrency))
    assert run_init_model(url, wanted, write=None) == 0
    written = capsys.readouterr().out
    load = parse_scenario(written).load
    assert (load.rate_rps, load.concurrency, "null" in written) == (*asked, False)
    assert run_init_server("vllm", "org/tiny", wanted, write=None) == 0
    load = parse_scenario(capsys.readouterr().out).load
    assert (load.rate_rps, load.concurrency) == asked


def test_a_load_launches_a_known_server_with_its_own_defaults() -> None:
    wanted = LoadRequest(concurrency="4", quiet=True)
    scenario, wanted = asked_load(subject_of_load("org/tiny", wanted, server="vllm"))
    assert scenario.target.launch is not None
    assert scenario.target.launch[:3] == ("vllm", "serve", "org/tiny")
    assert asked_configuration(scenario, wanted).label() == "server defaults"


def test_a_sweep_names_what_it_needs(url: str) -> None:
    with pytest.raises(UsageError, match="parameters") as raised:
        subject_of_sweep(url.removeprefix("http://"), LoadRequest(quiet=True))
    assert "batchtune load" in raised.value.hint
    assert "--server vllm" in raised.value.hint


def listing(*names: str) -> KserveServer:
    server = KserveServer()
    models = [{"id": name, "object": "model", "owned_by": "vllm"} for name in names]
    server.get["/v1/models"] = (200, {"object": "list", "data": models})
    return server


def test_which_of_several_models_is_asked_for() -> None:
    with listing("one", "two") as server:
        address = f"127.0.0.1:{server.rest_port}"
        for given in (address, f"{address}/three"):
            with pytest.raises(UsageError, match="which model") as raised:
                subject_of_load(given, LoadRequest(quiet=True))
            assert raised.value.hint == f"give {address}/MODEL; there are one, two"
        wanted = subject_of_load(f"{address}/two", LoadRequest(quiet=True))
        asked = asked_load(wanted)[0].request.openai
        assert asked is not None
        assert (asked.model, asked.ignore_eos) == ("two", True)


UNNAMED = """
name: own
target: {{kind: http, url: "{url}/v1/chat/completions"}}
request: {{protocol: openai, openai: {{output: {{constant: 3}}}}}}
load: {{arrivals: closed, concurrency: 1, duration: 1s}}
objective: throughput
"""


def asked_model(address: str, *overrides: str) -> str:
    scenario = parse_scenario(UNNAMED.format(url=address), overrides=overrides)
    target = CommandTarget(scenario.target)
    load = LoadRun(arrivals=ClosedLoop(concurrency=1, duration_s=1.0), warm_up_s=0.0)
    job = Loader(scenario, cast("Any", target), cast("Any", None)).job(load)
    return str(json.loads(job.requests.bodies[0])["model"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": "hello"}', "expected"),
        ('{"promt": "typo"}', "expected"),
        ('{"prompt": 3}', "expected"),
        ("[]", "expected"),
        ('{"prompt": "a", "max_token": 9}', "unknown key 'max_token'; known: prompt, messages, max_tokens"),
        ('{"messages": [{"role": "user"}]}', "a message without content"),
    ],
)
def test_a_file_that_is_none_of_prompts_is_told_with_its_line(
    url: str, tmp_path: Path, line: str, said: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f'{{"prompt": "ok"}}\n{line}\n')
    with pytest.raises(ScenarioError, match=rf"bad\.jsonl:2: {said}"):
        asked_model(url, f"request.inputs={{file: {bad}}}")


def test_a_file_that_is_none_of_prompts_leaves_no_run(url: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "ok"}\n[]\n')
    file = tmp_path / "own.yaml"
    file.write_text(UNNAMED.format(url=url).replace("openai,", "openai, inputs: {file: bad.jsonl},"))
    with pytest.raises(ScenarioError, match=r"bad\.jsonl:2: expected"):
        run_load(LoadRequest(scenario=file, results=tmp_path / "results", quiet=True))
    assert not (tmp_path / "results").exists()


def test_without_a_name_the_only_model_that_is_served_is_asked(url: str) -> None:
    assert asked_model(url) == "org/tiny:1"
    assert asked_model(url, "request.openai.model=own") == "own"


@pytest.mark.parametrize("names", [(), ("one", "two")])
def test_without_a_name_a_server_of_none_or_of_several_models_is_refused(names: tuple[str, ...]) -> None:
    with listing(*names) as server, pytest.raises(UsageError, match=r"request\.openai\.model") as raised:
        asked_model(f"http://127.0.0.1:{server.rest_port}")
    assert all(name in raised.value.hint for name in names)
