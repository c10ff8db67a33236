"""A running Triton is reconfigured by its repository's API and gets back exactly what it had."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchtune.archive.run import open_run, read_original
from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.batching.triton_config import found_batching
from batchtune.cli.arguments.options import LoadRequest
from batchtune.cli.commands.ask_twin import asked_configurations, asked_values, notes_on
from batchtune.cli.commands.compare import run_compare
from batchtune.cli.session import run_restore
from batchtune.errors import ServerGoneError, TargetError, UsageError
from batchtune.plain_values import from_plain, to_plain
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target import endpoint
from batchtune.target.claim import OriginalModel
from batchtune.target.endpoint import Endpoint
from batchtune.target.kserve import TritonRepository
from batchtune.target.process import ServerProcess
from batchtune.target.triton import TritonTarget, flag_words, launch, model_in_repository, restored
from tests.cli.in_process import answered
from tests.target.kserve_server import Answer, statistics
from tests.target.stand_in_docker import StandInDocker
from tests.target.triton.fake_triton import CONFIG, FakeTriton
from tests.waiting import wait_until

BATCHED = Configuration(
    batching=BatchingParameters(max_batch_size=32, batch_timeout_micros=100, num_batch_threads=2),
    dialect="triton",
)


INDEX = "/v2/repository/index"


STATISTICS = "/v2/models/m/stats"


CONFIG_PAGE = "/v2/models/m/config"


SCENARIO = """\
name: hostile
target: {{kind: triton, model: m, rest_url: "{url}", ready_timeout: 400ms}}
request: {{distinct: 2}}
load: {{arrivals: closed, concurrency: 2, warm_up: 20ms, duration: 80ms, seed: 1}}
objective: throughput
search:
  strategy: grid
  budget: {{time: 20s}}
  space: {{max_batch_size: [4, 16], max_queue_delay_microseconds: [0]}}
"""


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with FakeTriton() as running:
        yield running


def configured(size: int, **flags: str) -> Configuration:
    batching = BatchingParameters(max_batch_size=size, batch_timeout_micros=0, num_batch_threads=1)
    return Configuration(batching=batching, dialect="triton", flags=tuple(sorted(flags.items())))


def spec(server: FakeTriton, model: str = "m") -> TargetSpec:
    return TargetSpec(kind="triton", model=model, rest_url=server.url, ready_timeout="300ms")


def attached(server: FakeTriton, kept: list[OriginalModel] | None = None, **options: Any) -> TritonTarget:
    """What the model had is in `kept`, and may be changed."""
    target = TritonTarget(spec(server), **options)
    target.keep_original((kept if kept is not None else []).append)
    return target


def killed(target: TritonTarget) -> None:
    """What the kernel does when the process is killed."""
    assert target._claim is not None
    target._claim.release()


def killed_in_a_trial(server: FakeTriton) -> OriginalModel:
    """What a sweep kept that was killed when it had given the model another configuration."""
    kept: list[OriginalModel] = []
    target = attached(server, kept)
    target.apply(BATCHED)
    killed(target)
    return from_plain(OriginalModel, to_plain(kept[-1]))


def test_an_attached_model_is_reconfigured_and_put_back(server: FakeTriton) -> None:
    kept: list[OriginalModel] = []
    with attached(server, kept) as target:
        assert kept == [OriginalModel(model="m", rest_url=server.url, loaded=True, config=CONFIG)]
        assert server.orders == []  # what is there is kept before anything is changed
        target.apply(BATCHED)
        assert server.config["max_batch_size"] == 32
        assert server.config["input"] == CONFIG["input"]
        target.stop()  # it is somebody else's
        assert target.in_force == BATCHED
        target.apply(BATCHED)
    assert server.config == CONFIG
    assert kept[-1].restored
    assert server.orders == ["load", "load"]


def test_an_attached_server_that_ended_is_missed_before_the_next_load_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "RETURN_LIMIT_S", 0.05)
    said: list[str] = []
    with FakeTriton() as server:
        target = attached(server, on_event=said.append)
        target.apply(BATCHED)
    assert not target.alive()
    with pytest.raises(ServerGoneError, match=f"the server at {server.url} "):
        target.apply(replace(BATCHED, batching=None))
    assert f"{server.url} refuses connections" in said[-1]
    with pytest.raises(TargetError, match="was not restored"):
        target.close()
    with TritonTarget(spec(server)) as later, pytest.raises(TargetError, match="no connection"):
        later.start()


@pytest.fixture
def launched(server: FakeTriton, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Launches a command in the place of the Triton that answers already."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    server.pages["/v2/models/m/ready"] = (200, {})
    process = ServerProcess(log_path=tmp_path / "log")

    def by(*command: str) -> ServerProcess:
        flags = {"http-port": server.rest_port}
        launch(
            process, TargetSpec(kind="triton", model=str(tmp_path / "m"), command=command, flags=flags), {}
        )
        assert process.running
        return process

    yield by
    process.stop()


def test_a_command_that_only_waits_for_the_server_does_not_pass_for_it(
    launched: Callable[..., ServerProcess],
) -> None:
    process = launched("sh", "-c", "exec sleep 60")
    assert (process.cpu_s(), process.memory_peak_bytes()) == (None, None)


def test_a_container_that_ended_by_itself_is_launched_again(
    launched: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    (tmp_path / "server").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "server").chmod(0o755)
    docker = StandInDocker(tmp_path, server=tmp_path / "server")
    command = (str(docker.program), "run", f"--cidfile={tmp_path / 'id'}", "image")
    process = launched(*command)
    wait_until((tmp_path / "id").exists)
    os.kill(docker.pid, signal.SIGKILL)
    wait_until(lambda: not process.running)
    launched(*command)


def test_nothing_is_changed_before_somebody_keeps_what_was_there(server: FakeTriton) -> None:
    with TritonTarget(spec(server)) as target, pytest.raises(ValueError, match="must run before"):
        target.apply(BATCHED)
    assert server.orders == []


def test_a_model_that_was_not_served_is_kept_as_such_before_it_is_loaded_and_taken_out_again() -> None:
    with FakeTriton(loaded=False) as server:
        kept: list[tuple[OriginalModel, int]] = []
        with TritonTarget(spec(server)) as target:

            def keep(original: OriginalModel) -> None:
                kept.append((original, len(server.orders)))

            assert target.start(before_load=keep).max_batch_size == 8
            target.keep_original(keep)
            target.apply(BATCHED)
        assert not server.loaded
        (before, orders), *_, (after, _) = kept
        assert (before.loaded, before.config, orders) == (False, {}, 0)
        assert (after.loaded, after.restored, after.words()) == (False, True, "not served")
        assert server.orders == ["load", "load", "unload"]


@pytest.mark.parametrize("config", [(500, {"error": "no"}), (200, {**CONFIG, "max_batch_size": 0})])
def test_a_model_that_is_loaded_in_vain_is_taken_out_again(config: Answer) -> None:
    with FakeTriton(loaded=False) as server:
        server.pages["/v2/models/m/config"] = config
        with pytest.raises((TargetError, UsageError)), TritonTarget(spec(server)) as target:
            target.start()
        assert server.orders == ["load", "unload"]


def test_a_killed_sweeps_configuration_is_not_taken_for_the_original(server: FakeTriton) -> None:
    killed_in_a_trial(server)
    assert server.config != CONFIG
    said: list[str] = []
    with TritonTarget(spec(server), on_event=said.append) as target:
        assert target.start() == found_batching(CONFIG)
    assert server.config == CONFIG
    assert "an earlier sweep of" in said[0]


def test_a_configuration_loaded_after_a_killed_sweep_is_the_original(server: FakeTriton) -> None:
    before = killed_in_a_trial(server).config
    theirs = {**before, "dynamic_batching": {"max_queue_delay_microseconds": 7}}
    TritonRepository(Endpoint(model_name="m", rest_port=server.rest_port)).load(theirs)
    theirs = dict(server.config)
    said: list[str] = []
    with TritonTarget(spec(server), on_event=said.append) as target:
        assert target.start() == found_batching(theirs)
        target.keep_original(lambda _original: None)
        target.apply(BATCHED)
    assert server.config == theirs
    assert "was set since, by somebody else" in said[0]


def test_a_trials_configuration_from_another_machine_is_refused(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There no file of this machine says what the model had: a mark on the server does."""
    with attached(server) as first:
        first.apply(BATCHED)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        said = f"a sweep gave it for a trial: process {os.getpid()} on "
        with TritonTarget(spec(server)) as second, pytest.raises(TargetError, match=said):
            second.start()
        assert server.config["max_batch_size"] == 32
    assert server.config == CONFIG


def test_a_second_sweep_of_a_running_model_is_refused(server: FakeTriton) -> None:
    with TritonTarget(spec(server)) as first, TritonTarget(spec(server)) as second:
        first.start()
        with pytest.raises(TargetError, match="another batchtune changes m"):
            second.start()


def test_a_run_that_was_killed_in_its_first_load_is_put_back_or_gone_on_with() -> None:
    with FakeTriton(loaded=False) as server:
        kept: list[OriginalModel] = []
        first = TritonTarget(spec(server))
        first.start(before_load=kept.append)
        killed(first)
        again = from_plain(OriginalModel, to_plain(kept[0]))
        with TritonTarget(spec(server), original=again) as target:
            assert target.start().max_batch_size == 8
            assert server.loaded
        assert not server.loaded
        server.loaded = True
        assert restored(again, spec(server)).restored
        assert not server.loaded


def test_what_a_killed_run_kept_is_put_back_by_restore_or_when_it_goes_on(server: FakeTriton) -> None:
    assert restored(killed_in_a_trial(server), spec(server)).restored
    assert server.config == CONFIG
    kept = killed_in_a_trial(server)
    with TritonTarget(spec(server), original=kept) as target:
        assert target.start().max_batch_size == 8  # not the 32 that the killed run left
    assert server.config == CONFIG


def test_a_server_that_takes_no_orders_says_how_to_start_it(server: FakeTriton) -> None:
    server.refuse = "explicit model load / unload is not allowed if polling is enabled"
    with attached(server) as target, pytest.raises(TargetError, match="not allowed") as raised:
        target.apply(BATCHED)
    assert "--model-control-mode=explicit" in raised.value.hint
    assert server.orders == ["load"], "nothing was changed, so nothing is put back"


@pytest.mark.parametrize(
    ("fault", "words", "hint"),
    [
        ("hangs", r"/v2/repository/models/m/load: no answer within 0\.3 s", "target.ready_timeout"),
        ("refuses", "did not load m: load failed for model 'm': version 1 is at UNAVAILABLE state", ""),
        ("is deaf", "took max_batch_size=3 .*, but runs max_batch_size 8", ""),
        ("loses the model", "/v2/models/m/config: Request for unknown model: 'm' is not found", ""),
    ],
)
def test_a_load_that_does_not_load_says_why_and_the_next_is_tried(
    server: FakeTriton, fault: Any, words: str, hint: str
) -> None:
    server.faults = {3: fault}
    with attached(server) as target:
        with pytest.raises(TargetError, match=words) as raised:
            target.apply(configured(3))
        assert hint in raised.value.hint
        assert target.in_force is None
        target.apply(configured(4))
    assert server.config == CONFIG


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


def test_a_backend_that_adds_batching_by_itself_is_told_with_what_to_do(server: FakeTriton) -> None:
    with attached(server) as target:
        server.deaf = True
        with pytest.raises(TargetError, match="the server took no batching, but runs") as raised:
            target.apply(Configuration(batching=None, dialect="triton"))
        assert "--disable-auto-complete-config" in raised.value.hint
        with pytest.raises(TargetError, match="but runs max_batch_size 8, dynamic_batching") as raised:
            target.apply(BATCHED)
        assert raised.value.hint == ""
        server.deaf = False


def test_settings_that_are_the_default_need_not_be_told_back(server: FakeTriton) -> None:
    flags = {"preserve_ordering": "false", "default_queue_policy.timeout_action": "REJECT"}
    told = {**CONFIG, "max_batch_size": 4, "dynamic_batching": {"preferred_batch_size": [4]}}
    with attached(server) as target:
        server.pages[CONFIG_PAGE] = (200, told)
        target.apply(configured(4, **flags))
        del server.pages[CONFIG_PAGE]


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


def test_only_a_flag_without_a_value_stands_bare() -> None:
    asked = {"disable-auto-complete-config": "true", "rate-limit": "execution_count"}
    assert flag_words(asked) == ["--rate-limit=execution_count", "--disable-auto-complete-config"]
    assert flag_words({"disable-auto-complete-config": "false"}) == []


def test_a_server_that_cannot_be_put_back_is_told_once(server: FakeTriton) -> None:
    kept: list[OriginalModel] = []
    target = attached(server, kept)
    target.apply(BATCHED)
    server.refuse = "out of memory"
    with pytest.raises(TargetError, match=r"original configuration was not restored: .*out of memory"):
        target.restore()
    target.close()
    assert server.orders.count("load") == 2
    assert not kept[-1].restored


def test_a_model_without_a_batch_dimension_or_that_is_not_there_is_refused(server: FakeTriton) -> None:
    server.config["max_batch_size"] = 0
    with TritonTarget(spec(server)) as target, pytest.raises(UsageError, match="no batch dimension"):
        target.start()
    with (
        TritonTarget(spec(server, "nope")) as target,
        pytest.raises(TargetError, match="no model 'nope'") as raised,
    ):
        target.start()
    assert raised.value.hint == "set target.model to one of: m, other"


def test_ensembles_that_ask_the_model_are_named(server: FakeTriton) -> None:
    names = ["m", "ens", "plain", "asleep"]
    index = [{"name": name, "state": "READY" if name != "asleep" else "UNAVAILABLE"} for name in names]
    server.pages["/v2/repository/index"] = (200, index)
    steps = {"step": [{"model_name": "tokens"}, {"model_name": "m"}]}
    server.pages["/v2/models/ens/config"] = (200, {"name": "ens", "ensemble_scheduling": steps})
    server.pages["/v2/models/plain/config"] = (200, {**CONFIG, "name": "plain"})
    endpoint = Endpoint(model_name="m", rest_port=server.rest_port, grpc_port=None)
    assert TritonRepository(endpoint).ensembles() == ["ens"]


def test_a_server_without_tls_is_told_as_such(server: FakeTriton) -> None:
    secret = spec(server).model_copy(update={"rest_url": server.url.replace("http:", "https:")})
    said = r"no TLS connection: the server speaks http, not https"
    with TritonTarget(secret) as target, pytest.raises(TargetError, match=said):
        target.start()


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        (INDEX, (200, ["m"]), "has no model repository API: HTTP 200"),
        (INDEX, (404, b"<html>"), "has no model repository API: HTTP 404: <html>"),
        (INDEX, None, "the connection was closed without an answer"),
        (CONFIG_PAGE, (200, {"max_batch_size": "many"}), "an invalid configuration of m"),
        (CONFIG_PAGE, (200, {**CONFIG, "dynamic_batching": [1]}), "an invalid configuration of m"),
        (CONFIG_PAGE, (200, []), "/v2/models/m/config: HTTP 200"),
    ],
)
def test_pages_that_are_none_are_told_before_anything_is_changed(
    server: FakeTriton, path: str, answer: Answer, words: str
) -> None:
    server.pages[path] = answer
    with pytest.raises(TargetError, match=words):
        attached(server)
    assert server.orders == []


def test_a_document_that_is_no_original_is_refused() -> None:
    with pytest.raises(TypeError, match="model is missing"):
        from_plain(OriginalModel, {"rest_url": "", "config": {}, "models": 3})
    with pytest.raises(TypeError, match="config is 3"):
        from_plain(OriginalModel, {"model": "m", "rest_url": "", "loaded": True, "config": 3})


def test_a_linked_folder_of_a_repository_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "v7" / "1").mkdir(parents=True)
    (tmp_path / "net").symlink_to(tmp_path / "v7", target_is_directory=True)
    assert model_in_repository(str(tmp_path / "net")) == (tmp_path, "net")


@pytest.mark.slow
def test_a_server_that_dies_in_a_sweep_ends_it_and_is_restored_later(tmp_path: Path) -> None:
    with FakeTriton() as server:
        server.faults = {16: "dies"}
        (tmp_path / "hostile.yaml").write_text(SCENARIO.format(url=server.url))
        done = answered("sweep", "hostile.yaml", cwd=tmp_path)
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


PAIR = """\
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


@pytest.mark.slow
def test_variants_are_compared_on_one_attached_server(server: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(PAIR.format(url=server.url))
    done = answered("compare", "pair.yaml", "--blocks", "1", "--json", "--quiet", cwd=tmp_path)
    assert done.returncode in (0, 6), done.stderr  # 6: the host was not quiet
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


def test_two_servers_cannot_be_put_back_by_one_run(server: FakeTriton, tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    elsewhere = '  elsewhere: {target: {rest_url: "http://127.0.0.1:1"}}'
    path.write_text(PAIR.format(url=server.url) + elsewhere)
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
