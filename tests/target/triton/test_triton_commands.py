"""`compare` and `noise` reconfigure a Triton that runs already between two runs, and put it back; twins say what they lack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchtune.archive.run import open_run, read_original
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.commands.ask_twin import asked_configurations, asked_values, notes_on
from batchtune.cli.commands.compare import run_compare, run_noise
from batchtune.errors import UsageError
from tests.cli.in_process import answered
from tests.target.triton.fake_triton import CONFIG, FakeTriton

SCENARIO = """\
name: pair
target: {{kind: triton, model: m, rest_url: "{url}"}}
request: {{distinct: 2}}
load: {{arrivals: closed, concurrency: 2, warm_up: 20ms, duration: 80ms, seed: 1}}
objective: throughput
fixed: {{max_batch_size: 4}}
variants:
  without: {{fixed: {{enable_batching: false}}}}
  with: {{fixed: {{max_batch_size: 16, preserve_ordering: true}}}}
"""
MAY_BE_NOISY = (0, 6)


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with FakeTriton() as running:
        yield running


def pair(folder: Path, server: FakeTriton, *more: str) -> Path:
    path = folder / "pair.yaml"
    path.write_text(SCENARIO.format(url=server.url) + "\n".join(more))
    return path


def test_variants_are_compared_on_one_attached_server(server: FakeTriton, tmp_path: Path) -> None:
    done = answered("compare", pair(tmp_path, server), "--blocks", "1", "--json", "--quiet", cwd=tmp_path)
    assert done.returncode in MAY_BE_NOISY, done.stderr
    document = json.loads(done.stdout)
    assert [one["failure"] for one in document["variants"]] == [None, None]
    run = open_run(tmp_path / document["run"])
    labels = {trial.reason: trial.configuration.label() for trial in run.ledger()}
    assert labels == {
        "without": "no batching instance_group.count=1",
        "with": "max_batch_size=16 max_queue_delay_microseconds=500 instance_group.count=1 preserve_ordering=true",
    }
    assert server.config == CONFIG
    original = read_original(run)
    assert original is not None
    assert original.restored


@pytest.mark.slow
def test_a_configuration_is_run_against_itself(
    server: FakeTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pair(tmp_path, server)
    wanted = LoadRequest(scenario=path, results=tmp_path / "results", json=True, quiet=True)
    code = run_noise(wanted, blocks=2)
    assert code in MAY_BE_NOISY
    assert "throughput" in json.loads(capsys.readouterr().out)["figures"]
    assert server.orders == ["load", "load"]
    assert server.config == CONFIG


def test_two_servers_cannot_be_put_back_by_one_run(server: FakeTriton, tmp_path: Path) -> None:
    path = pair(tmp_path, server, '  elsewhere: {target: {rest_url: "http://127.0.0.1:1"}}')
    with pytest.raises(UsageError, match="several servers or models; a run restores only one"):
        run_compare(LoadRequest(scenario=path, results=tmp_path, json=True, quiet=True), blocks=2)
    assert server.orders == []


BASE = Configuration(
    batching=BatchingParameters(max_batch_size=8, batch_timeout_micros=0, num_batch_threads=1),
    dialect="triton",
    flags=(("http-thread-count", "4"), ("preferred_batch_size", "4,8")),
)


def test_what_the_twin_leaves_out_of_a_triton_is_told() -> None:
    assert notes_on([BASE, BASE]) == [
        "Triton forms batches ahead of a free instance, which the simulator does not.",
        "preferred_batch_size is not simulated.",
    ]
    assert notes_on([Configuration(batching=BatchingParameters())]) == []


def test_a_twin_is_asked_in_tritons_words() -> None:
    (asked,) = asked_configurations(
        BASE, asked_values(["max_queue_delay_microseconds=100", "instance_group.count=2"])
    )
    assert asked.label() == (
        "max_batch_size=8 max_queue_delay_microseconds=100 instance_group.count=2 "
        "--http-thread-count=4 preferred_batch_size=4,8"
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_enqueued_batches=4", "Triton has no such parameter"),
        ("preserve_ordering=true", "the simulator lacks it"),
    ],
)
def test_what_no_triton_or_no_twin_has_is_refused(setting: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked_configurations(BASE, asked_values([setting]))
