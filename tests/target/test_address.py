"""The address of a Ray Serve or an MLServer is enough to attach to it, tune it and put it back, that of a server of
OpenAI's API to load it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from batchtune.cli.arguments.load_request import LoadRequest, asked_configuration, asked_load
from batchtune.cli.commands.init_model import run_init_model, run_init_server
from batchtune.cli.commands.model_scenario import subject_of_load, subject_of_sweep
from batchtune.cli.commands.run_load import run_load
from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.reader import parse_scenario, read_scenario
from batchtune.scenario.spec.scenario import Scenario
from batchtune.target.command import CommandTarget
from batchtune.target.process import free_port
from batchtune.tune.loader import Loader, LoadRun
from tests.target.kserve_server import KserveServer
from tests.target.running_process import answering_process

APP = Path(__file__).parent / "stand_ins" / "attached_server.py"


SERVE = "/api/serve/applications/"


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a stand-in with these words after its port; its URL."""
    with ExitStack() as stack:

        def start(*words: str) -> str:
            port = free_port()
            url, command = f"http://127.0.0.1:{port}", [sys.executable, str(APP), str(port), *words]
            stack.enter_context(answering_process(command, url, log_path=tmp_path / "log"))
            return url

        yield start


def swept(address: str) -> Scenario:
    subject = subject_of_sweep(address, LoadRequest(overrides=["slo.p95=1s"], quiet=True))
    return read_scenario(subject.scenario, overrides=subject.overrides)


def test_a_ray_serve_is_attached_to_by_the_address_of_its_dashboard(launched: Callable[..., str]) -> None:
    """The other application is sent along: a PUT replaces them all."""
    url = launched()
    scenario = swept(f"{url}/main")
    assert (scenario.target.url, scenario.target.launch, scenario.target.attached) == (
        f"{url}/main",
        None,
        True,
    )
    before = applications(url)
    with CommandTarget(scenario.target) as target:
        assert target.attach() == {"max_batch_size": 4, "batch_wait_timeout_s": 0.02}
        target.apply(scenario.configuration({"max_batch_size": 16, "batch_timeout_micros": 2000}))
        config = {"max_batch_size": 16, "batch_wait_timeout_s": 0.002, "further": "kept"}
        now = applications(url)
        changed = {"name": "Model", "user_config": config, "max_ongoing_requests": 1600}
        assert now["main"]["deployed_app_config"]["deployments"] == [{"name": "Ingress"}, changed]
        assert now["other"] == before["other"]
    assert applications(url) == before


def test_the_metrics_of_a_ray_serve_are_read_if_they_are_of_one_application(
    launched: Callable[..., str],
) -> None:
    """They have no application's name on all counters, and are 10 s old."""
    url = launched()
    assert swept(f"{url}/main").target.metrics is None
    main = applications(url)["main"]["deployed_app_config"]
    httpx.put(url + SERVE, json={"applications": [main]})
    metrics = swept(f"{url}/main").target.metrics
    assert metrics is not None
    assert (metrics.url, metrics.every_s) == (f"{url}/metrics", 10.0)


def applications(url: str) -> dict[str, Any]:
    return dict(httpx.get(url + SERVE).json()["applications"])


def test_which_of_several_applications_is_asked(launched: Callable[..., str]) -> None:
    url = launched()
    with pytest.raises(UsageError, match="which model of that server") as raised:
        swept(url)
    assert raised.value.hint == f"give {url}/MODEL; there are main, other"
    with pytest.raises(
        UsageError, match="no deployment of other has batch_wait_timeout_s and max_batch_size"
    ):
        swept(f"{url}/other")


def test_an_mlserver_of_this_machine_is_attached_to_by_its_address(
    launched: Callable[..., str], tmp_path: Path
) -> None:
    """Its file is found in the folder that it was started with; what that does not say is off."""
    file = tmp_path / "models" / "m" / "model-settings.json"
    file.parent.mkdir(parents=True)
    text = json.dumps({"name": "m", "implementation": "m.M", "max_batch_time": 0.5})
    file.write_text(text)
    url = launched(str(tmp_path / "models"))
    scenario = swept(url.removeprefix("http://"))
    with CommandTarget(scenario.target, kserve=True) as target:
        assert target.attach() == {"max_batch_size": 1, "max_batch_time": 0.5}
        target.apply(scenario.configuration({"max_batch_size": 16, "batch_timeout_micros": 2000}))
    changed = {"name": "m", "implementation": "m.M", "max_batch_time": 0.002, "max_batch_size": 16}
    assert httpx.get(f"{url}/loaded").json() == [changed, json.loads(text)]
    assert file.read_text() == text


def test_an_mlserver_whose_file_is_elsewhere_says_so(launched: Callable[..., str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"that of m is not found here"):
        swept(launched(str(tmp_path)))


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
