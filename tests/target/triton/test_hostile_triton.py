"""A Triton that hangs, lies, loses the model or dies makes a trial fail with that reason, and gets back what it had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchtune.archive.run import open_run
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.cli.session import run_restore
from batchtune.errors import TargetError
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target.triton import TritonTarget
from tests.cli.test_cli import batchtune
from tests.target.kserve_server import Answer, statistics
from tests.target.triton.fake_triton import CONFIG, FakeTriton

INDEX = "/v2/repository/index"
STATISTICS = "/v2/models/m/stats"
SCENARIO = """\
name: hostile
target: {{kind: triton, model: m, rest_url: "{url}", ready_timeout: 400ms}}
request: {{distinct: 2}}
load: {{arrivals: closed, concurrency: 2, warm_up: 20ms, duration: 80ms, seed: 1}}
objective: throughput
search:
  strategy: grid
  budget: {{time: 20s}}
  space: {{max_batch_size: {sizes}, max_queue_delay_microseconds: [0]}}
"""


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with FakeTriton() as running:
        yield running


def configured(size: int, **flags: str) -> Configuration:
    batching = BatchingParameters(max_batch_size=size, batch_timeout_micros=0, num_batch_threads=1)
    return Configuration(batching=batching, dialect="triton", flags=tuple(sorted(flags.items())))


def attached(server: FakeTriton) -> TritonTarget:
    target = TritonTarget(TargetSpec(kind="triton", model="m", rest_url=server.url, ready_timeout="300ms"))
    target.keep_original(lambda _original: None)
    return target


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hangs", r"/v2/repository/models/m/load: no answer within 0\.3 s"),
        (
            "refuses",
            "the server did not load m: load failed for model 'm': version 1 is at UNAVAILABLE state",
        ),
        ("is deaf", "took max_batch_size=3 .*, but runs max_batch_size 8"),
        ("loses the model", "/v2/models/m/config: Request for unknown model: 'm' is not found"),
    ],
)
def test_a_load_that_does_not_load_says_why_and_the_next_is_tried(
    server: FakeTriton, fault: Any, words: str
) -> None:
    server.faults = {3: fault}
    with attached(server) as target:
        with pytest.raises(TargetError, match=words):
            target.apply(configured(3))
        assert target.in_force is None
        target.apply(configured(4))
    assert server.config == CONFIG


def test_a_load_that_hangs_says_which_limit_it_met(server: FakeTriton) -> None:
    server.faults = {3: "hangs"}
    with attached(server) as target, pytest.raises(TargetError) as raised:
        target.apply(configured(3))
    assert "target.ready_timeout" in raised.value.hint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"preserve_ordering": "true"}, "preserve_ordering false"),
        ({"default_queue_policy.max_queue_size": "9"}, "default_queue_policy.max_queue_size 0"),
        ({"default_queue_policy.timeout_action": "DELAY"}, "default_queue_policy.timeout_action REJECT"),
    ],
)
def test_a_setting_that_was_not_taken_is_found_out(
    server: FakeTriton, flags: dict[str, str], words: str
) -> None:
    with attached(server) as target:
        target.apply(configured(4))
        server.deaf = True
        with pytest.raises(TargetError, match=f"but runs {words}"):
            target.apply(configured(4, **flags))
        server.deaf = False


def test_settings_that_are_the_default_need_not_be_told_back(server: FakeTriton) -> None:
    flags = {"preserve_ordering": "false", "default_queue_policy.timeout_action": "REJECT"}
    with attached(server) as target:
        server.pages["/v2/models/m/config"] = (
            200,
            {**CONFIG, "max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": [4]}},
        )
        target.apply(configured(4, **flags))
        del server.pages["/v2/models/m/config"]


def test_what_another_master_changed_meanwhile_is_applied_again(server: FakeTriton) -> None:
    with attached(server) as target:
        target.apply(configured(4))
        server.config["max_batch_size"] = 2
        target.apply(configured(4))
        assert server.config["max_batch_size"] == 4


def test_counts_that_go_back_tell_that_somebody_else_loaded_the_model(server: FakeTriton) -> None:
    with attached(server) as target:
        target.apply(configured(4))
        server.pages[STATISTICS] = (200, statistics((1, 50)))
        target.counters()
        server.pages[STATISTICS] = (200, statistics((1, 3)))
        with pytest.raises(TargetError, match="loaded by somebody else, or restarted"):
            target.counters()
        assert target.in_force is None
        target.apply(configured(4))
        target.counters()


def test_statistics_that_are_missing_for_once_are_no_count(server: FakeTriton) -> None:
    with attached(server) as target:
        target.apply(configured(4))
        for page in ((200, statistics((1, 5))), (404, b"none"), (200, statistics((1, 7)))):
            server.pages[STATISTICS] = page
            target.counters()


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        (INDEX, (200, ["m"]), "has no model repository API: HTTP 200"),
        (INDEX, (404, b"<html>"), "has no model repository API: HTTP 404: <html>"),
        (INDEX, (200, [{"name": "other"}]), "has no model 'm' in its repository"),
        (INDEX, None, "the connection was closed without an answer"),
        ("/v2/models/m/config", (200, {"max_batch_size": "many"}), "an invalid configuration of m"),
        (
            "/v2/models/m/config",
            (200, {"max_batch_size": 4, "dynamic_batching": [1]}),
            "an invalid configuration of m",
        ),
        ("/v2/models/m/config", (200, []), "/v2/models/m/config: HTTP 200"),
    ],
)
def test_pages_that_are_none_are_told_before_anything_is_changed(
    server: FakeTriton, path: str, answer: Answer, words: str
) -> None:
    server.pages[path] = answer
    with pytest.raises(TargetError, match=words):
        attached(server)
    assert server.orders == []


def scenario_file(folder: Path, server: FakeTriton, sizes: list[int]) -> Path:
    path = folder / "hostile.yaml"
    path.write_text(SCENARIO.format(url=server.url, sizes=sizes))
    return path


@pytest.mark.slow
def test_a_sweep_goes_on_past_configurations_that_the_server_does_not_take(
    server: FakeTriton, tmp_path: Path
) -> None:
    server.faults = {2: "hangs", 3: "loses the model"}
    server.pages[STATISTICS] = (404, {"error": "no statistics"})
    done = batchtune("sweep", scenario_file(tmp_path, server, [2, 3, 16]), "--json", cwd=tmp_path)
    assert done.returncode in (0, 5), done.stderr
    run = open_run(tmp_path / json.loads(done.stdout)["run"])
    failures = {
        trial.configuration.batching.max_batch_size: trial.failure
        for trial in run.ledger()
        if trial.configuration.batching is not None
    }
    assert "no answer within" in (failures[2] or "")
    assert "not found" in (failures[3] or "")
    assert (failures[8], failures[16]) == (None, None)
    assert server.config == CONFIG


@pytest.mark.slow
def test_a_server_that_dies_in_a_sweep_ends_it_and_is_restored_later(tmp_path: Path) -> None:
    with FakeTriton() as server:
        server.faults = {16: "dies"}
        done = batchtune("sweep", scenario_file(tmp_path, server, [4, 16]), cwd=tmp_path)
        assert done.returncode == TargetError.exit_code
        changed, port = server.config, server.rest_port
    told = done.stderr
    (run,) = (tmp_path / "results" / "hostile").iterdir()
    assert "original configuration was not restored" in told
    assert f"`batchtune restore {run.relative_to(tmp_path)}` tries again" in told
    with FakeTriton(rest_port=port) as again:
        again.config = changed
        assert run_restore(run) == 0
        assert again.config == CONFIG
