"""A running Triton is reconfigured by its repository's API and gets back exactly what it had."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.batching.triton_config import found_batching
from batchtune.errors import ServerGoneError, TargetError, UsageError
from batchtune.plain_values import from_plain, to_plain
from batchtune.scenario.spec.target import TargetSpec
from batchtune.target import endpoint
from batchtune.target.claim import OriginalModel
from batchtune.target.endpoint import Endpoint
from batchtune.target.kserve import TritonRepository
from batchtune.target.process import ServerProcess
from batchtune.target.triton import TritonTarget, flag_words, launch, model_in_repository, restored
from tests.target.kserve_server import Answer
from tests.target.stand_in_docker import StandInDocker
from tests.target.triton.fake_triton import CONFIG, FakeTriton
from tests.waiting import wait_until

BATCHED = Configuration(
    batching=BatchingParameters(max_batch_size=32, batch_timeout_micros=100, num_batch_threads=2),
    dialect="triton",
)


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with FakeTriton() as running:
        yield running


def spec(server: FakeTriton, model: str = "m") -> TargetSpec:
    return TargetSpec(kind="triton", model=model, rest_url=server.url)


def test_an_attached_model_is_reconfigured_and_put_back(server: FakeTriton) -> None:
    kept: list[OriginalModel] = []
    with TritonTarget(spec(server)) as target:
        target.keep_original(kept.append)
        assert kept == [OriginalModel(model="m", rest_url=server.url, loaded=True, config=CONFIG)]
        assert server.orders == []  # what is there is kept before anything is changed
        target.apply(BATCHED)
        assert server.config["max_batch_size"] == 32
        assert server.config["input"] == CONFIG["input"]
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
        target = TritonTarget(spec(server), on_event=said.append)
        target.keep_original(lambda _original: None)
        target.apply(BATCHED)
    assert not target.alive()
    with pytest.raises(ServerGoneError, match=f"the server at {server.url} "):
        target.apply(replace(BATCHED, batching=None))
    assert f"{server.url} refuses connections" in said[-1]
    with pytest.raises(TargetError, match="was not restored"):
        target.close()


def test_a_command_that_only_waits_for_the_server_does_not_pass_for_it(
    server: FakeTriton, tmp_path: Path
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    server.pages["/v2/models/m/ready"] = (200, {})
    command, flags = ("sh", "-c", "exec sleep 60"), {"http-port": server.rest_port}
    process = ServerProcess(log_path=tmp_path / "log")
    try:
        launch(
            process, TargetSpec(kind="triton", model=str(tmp_path / "m"), command=command, flags=flags), {}
        )
        assert process.running
        assert (process.cpu_s(), process.memory_peak_bytes()) == (None, None)
    finally:
        process.stop()


def test_a_container_that_ended_by_itself_is_launched_again(server: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    server.pages["/v2/models/m/ready"] = (200, {})
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    docker = StandInDocker(tmp_path, server=program)
    command = (str(docker.program), "run", f"--cidfile={tmp_path / 'id'}", "image")
    flags = {"http-port": server.rest_port}
    own = TargetSpec(kind="triton", model=str(tmp_path / "m"), command=command, flags=flags)
    process = ServerProcess(log_path=tmp_path / "log")
    try:
        launch(process, own, {})
        wait_until((tmp_path / "id").exists)
        os.kill(docker.pid, signal.SIGKILL)
        wait_until(lambda: not process.running)
        launch(process, own, {})
        assert process.running
    finally:
        process.stop()


def test_nothing_is_changed_before_somebody_keeps_what_was_there(server: FakeTriton) -> None:
    with TritonTarget(spec(server)) as target, pytest.raises(ValueError, match="must run before"):
        target.apply(BATCHED)
    assert server.orders == []


def test_a_model_that_was_not_served_is_taken_out_again() -> None:
    with FakeTriton(loaded=False) as server:
        with TritonTarget(spec(server)) as target:
            assert target.start().max_batch_size == 8
            target.keep_original(lambda _original: None)
            target.apply(BATCHED)
        assert not server.loaded
        assert server.orders == ["load", "load", "unload"]


def test_that_a_model_is_not_served_is_kept_before_it_is_loaded_to_be_read() -> None:
    with FakeTriton(loaded=False) as server:
        kept: list[tuple[OriginalModel, int]] = []
        with TritonTarget(spec(server)) as target:
            target.start(before_load=lambda original: kept.append((original, len(server.orders))))
        (before, orders), (after, _) = kept
        assert (before.loaded, before.config, orders) == (False, {}, 0)
        assert (after.loaded, after.restored, after.words()) == (False, True, "not served")
        assert server.orders == ["load", "unload"]


@pytest.mark.parametrize("config", [(500, {"error": "no"}), (200, {**CONFIG, "max_batch_size": 0})])
def test_a_model_that_is_loaded_in_vain_is_taken_out_again(config: Answer) -> None:
    with FakeTriton(loaded=False) as server:
        server.pages["/v2/models/m/config"] = config
        with pytest.raises((TargetError, UsageError)), TritonTarget(spec(server)) as target:
            target.start()
        assert server.orders == ["load", "unload"]


def killed(target: TritonTarget) -> None:
    """What the kernel does when the process is killed."""
    assert target._claim is not None
    target._claim.release()


def test_a_killed_sweeps_configuration_is_not_taken_for_the_original(server: FakeTriton) -> None:
    before = dict(server.config)
    first = TritonTarget(spec(server))
    first.keep_original(lambda _original: None)
    first.apply(BATCHED)
    killed(first)
    assert server.config != before
    said: list[str] = []
    with TritonTarget(spec(server), on_event=said.append) as target:
        assert target.start() == found_batching(before)
    assert server.config == before
    assert "an earlier sweep of" in said[0]


def test_a_configuration_loaded_after_a_killed_sweep_is_the_original(server: FakeTriton) -> None:
    first = TritonTarget(spec(server))
    first.keep_original(lambda _original: None)
    before = dict(first._found().config)
    first.apply(BATCHED)
    killed(first)
    theirs = {**before, "dynamic_batching": {"max_queue_delay_microseconds": 7}}
    TritonRepository(first.endpoint).load(theirs)
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
    with TritonTarget(spec(server)) as first:
        first.keep_original(lambda _original: None)
        first.apply(BATCHED)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        with (
            pytest.raises(TargetError, match=f"a sweep gave it for a trial: process {os.getpid()} on "),
            TritonTarget(spec(server)) as second,
        ):
            second.start()
        assert server.config["max_batch_size"] == 32
    assert server.config == CONFIG


def test_a_second_sweep_of_a_running_model_is_refused(server: FakeTriton) -> None:
    with TritonTarget(spec(server)) as first:
        first.start()
        with (
            pytest.raises(TargetError, match="another batchtune changes m"),
            TritonTarget(spec(server)) as second,
        ):
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


def test_a_server_that_takes_no_orders_says_how_to_start_it(server: FakeTriton) -> None:
    server.refuse = "explicit model load / unload is not allowed if polling is enabled"
    target = TritonTarget(spec(server))
    target.keep_original(lambda _original: None)
    with pytest.raises(TargetError, match="not allowed") as raised:
        target.apply(BATCHED)
    assert "--model-control-mode=explicit" in raised.value.hint
    target.close()
    assert server.orders == ["load"], "nothing was changed, so nothing is put back"


def test_a_server_that_took_a_configuration_and_runs_another_is_found_out(server: FakeTriton) -> None:
    with TritonTarget(spec(server)) as target:
        target.keep_original(lambda _original: None)
        server.deaf = True
        with pytest.raises(TargetError, match="but runs max_batch_size 8, dynamic_batching"):
            target.apply(BATCHED)
        assert target.in_force is None
        server.deaf = False


def test_a_backend_that_adds_batching_by_itself_is_told_with_what_to_do(server: FakeTriton) -> None:
    alone = Configuration(batching=None, dialect="triton")
    with TritonTarget(spec(server)) as target:
        target.keep_original(lambda _original: None)
        server.deaf = True
        with pytest.raises(TargetError, match="the server took no batching, but runs") as raised:
            target.apply(alone)
        assert "--disable-auto-complete-config" in raised.value.hint
        with pytest.raises(TargetError) as raised:
            target.apply(BATCHED)
        assert raised.value.hint == ""
        server.deaf = False


def test_only_a_flag_without_a_value_stands_bare() -> None:
    asked = {"disable-auto-complete-config": "true", "rate-limit": "execution_count"}
    assert flag_words(asked) == ["--rate-limit=execution_count", "--disable-auto-complete-config"]
    assert flag_words({"disable-auto-complete-config": "false"}) == []


def test_a_server_that_cannot_be_put_back_is_told_once(server: FakeTriton) -> None:
    kept: list[OriginalModel] = []
    target = TritonTarget(spec(server))
    target.keep_original(kept.append)
    target.apply(BATCHED)
    server.refuse = "out of memory"
    with pytest.raises(TargetError, match=r"original configuration was not restored: .*out of memory"):
        target.restore()
    target.close()
    assert server.orders.count("load") == 2
    assert not kept[-1].restored


def test_what_a_killed_run_kept_is_put_back(server: FakeTriton) -> None:
    kept: list[OriginalModel] = []
    first = TritonTarget(spec(server))
    first.keep_original(kept.append)
    first.apply(BATCHED)
    killed(first)
    again = from_plain(OriginalModel, to_plain(kept[-1]))
    assert restored(again, spec(server)).restored
    assert server.config == CONFIG


def test_a_resumed_run_puts_back_what_the_killed_one_found(server: FakeTriton) -> None:
    kept: list[OriginalModel] = []
    first = TritonTarget(spec(server))
    first.keep_original(kept.append)
    first.apply(BATCHED)
    killed(first)
    with TritonTarget(spec(server), original=kept[-1]) as target:
        assert target.start().max_batch_size == 8  # not the 32 that the killed run left
    assert server.config == CONFIG


def test_an_attached_server_is_not_stopped(server: FakeTriton) -> None:
    with TritonTarget(spec(server)) as target:
        target.keep_original(lambda _original: None)
        target.apply(BATCHED)
        target.stop()
        assert target.in_force == BATCHED
        target.apply(BATCHED)
        assert server.orders == ["load"]


def test_a_model_that_is_not_there_is_told_with_those_that_are(server: FakeTriton) -> None:
    with (
        TritonTarget(spec(server, "nope")) as target,
        pytest.raises(TargetError, match="no model 'nope'") as raised,
    ):
        target.start()
    assert raised.value.hint == "set target.model to one of: m, other"


def test_a_model_without_a_batch_dimension_is_refused(server: FakeTriton) -> None:
    server.config["max_batch_size"] = 0
    with TritonTarget(spec(server)) as target, pytest.raises(UsageError, match="no batch dimension"):
        target.start()


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
    secret = TargetSpec(kind="triton", model="m", rest_url=server.url.replace("http:", "https:"))
    with (
        TritonTarget(secret) as target,
        pytest.raises(TargetError, match=r"no TLS connection: the server speaks http, not https"),
    ):
        target.start()


def test_a_server_that_is_gone_is_told() -> None:
    with FakeTriton() as server:
        pass
    with TritonTarget(spec(server)) as target, pytest.raises(TargetError, match="no connection"):
        target.start()


def test_a_document_that_is_no_original_is_refused() -> None:
    with pytest.raises(TypeError, match="model is missing"):
        from_plain(OriginalModel, {"rest_url": "", "config": {}, "models": 3})
    with pytest.raises(TypeError, match="config is 3"):
        from_plain(OriginalModel, {"model": "m", "rest_url": "", "loaded": True, "config": 3})


def test_a_linked_folder_of_a_repository_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "v7" / "1").mkdir(parents=True)
    (tmp_path / "net").symlink_to(tmp_path / "v7", target_is_directory=True)
    assert model_in_repository(str(tmp_path / "net")) == (tmp_path, "net")
