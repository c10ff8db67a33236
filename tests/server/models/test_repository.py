"""Versions on disk become versions that answer, and go away again, as in TF Serving."""

from __future__ import annotations

import io
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.errors import UsageError
from batchtune.server.backends.model import LoadedModel
from batchtune.server.backends.registry import load_model
from batchtune.server.metrics import Metrics
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.model_config import (
    ModelConfig,
    aspired_versions,
    models_of,
    read_model_config_file,
)
from batchtune.server.models.model_repository import ModelRepository
from batchtune.server.models.servable import Servable
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.pool import BatchingSettings
from batchtune.server.startup import configured_models
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import ModelServerConfig
from tests.waiting import wait_until

EMULATED = "inputs: {x: {dtype: float32, shape: [1]}}\noutputs: {y: {dtype: float32, shape: [1]}}\n"
QUICK = ServerFlags(
    file_system_poll_wait_seconds=0.005,  # type: ignore[arg-type]
    max_num_load_retries=2,
    load_retry_interval_micros=10_000,
)
LOOK_ONCE = ServerFlags(file_system_poll_wait_seconds=0, max_num_load_retries=0)
Make = Callable[..., ModelRepository]
Load = Callable[[Path, ServerFlags], LoadedModel]


def add_version(base_path: Path, version: int, text: str = EMULATED) -> None:
    staging = base_path.parent / f"staging-{version}"
    staging.mkdir(parents=True)
    (staging / "emulated.yaml").write_text(text)
    base_path.mkdir(exist_ok=True)
    staging.rename(base_path / str(version))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes started repositories of emulated models; a function for the event loop runs at once."""
    made: list[tuple[ModelRepository, BatchingControl]] = []
    dead: list[str] = []

    def run_at_once(function: Callable[[], None]) -> None:
        function()

    def start(*models: ModelConfig, flags: ServerFlags = QUICK, load: Load | None = None) -> ModelRepository:
        metrics = Metrics()
        control = BatchingControl(
            BatchingSettings(), observer=metrics, deliver=lambda _completions: None, on_loop=run_at_once
        )

        def open_servable(name: str, version: int, directory: Path) -> Servable:
            model = (load or load_model)(directory, ServerFlags())
            servable = Servable(name=name, version=version, model=model, metrics=metrics)
            control.attach(servable)
            return servable

        def close_servable(servable: Servable) -> None:
            control.detach(servable)
            servable.close()

        repository = ModelRepository(
            models,
            open_servable=open_servable,
            close_servable=close_servable,
            on_loop=run_at_once,
            on_dead=lambda: dead.append("keeper"),
            flags=flags,
        )
        made.append((repository, control))
        repository.start()
        return repository

    yield start
    for repository, control in made:
        repository.close()
        control.close()
    assert dead == []


def test_the_policy_picks_versions() -> None:
    present = [3, 1, 2]
    assert aspired_versions(1, present) == [3]
    assert aspired_versions(2, present) == [2, 3]
    assert aspired_versions(None, present) == [1, 2, 3]
    assert aspired_versions((1, 7), present) == [1]


def test_the_latest_version_answers_and_a_new_one_takes_over(tmp_path: Path, make: Make) -> None:
    base_path = tmp_path / "m"
    add_version(base_path, 1)
    add_version(base_path, 2)
    repository = make(ModelConfig(name="m", base_path=base_path))
    repository.wait_until_loaded()
    assert repository.find("m").version == 2
    assert [(one.version, one.state) for one in repository.statuses("m")] == [(2, "AVAILABLE")]
    add_version(base_path, 3)
    wait_until(lambda: repository.find("m").version == 3)
    wait_until(lambda: [one.state for one in repository.statuses("m")] == ["AVAILABLE", "END"])
    with pytest.raises(StatusError, match=r"Servable not found for request: Specific\(m, 2\)"):
        repository.find("m", version=2)


def test_version_directories_may_have_leading_zeros(tmp_path: Path, make: Make) -> None:
    """As TensorFlow Serving's own example, saved_model_half_plus_two_cpu/00000123, has."""
    for name in ("00000123", "0007", "7", "9" * 19, "v9", "1.5"):
        (tmp_path / "m" / name).mkdir(parents=True)
    for name in ("00000123", "7"):  # of 0007 and 7 the reference takes the last by name
        (tmp_path / "m" / name / "emulated.yaml").write_text(EMULATED)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m", policy=None))
    repository.wait_until_loaded()
    assert [status.version for status in repository.statuses("m")] == [123, 7]
    assert {status.state for status in repository.statuses("m")} == {"AVAILABLE"}


def test_unknown_names_versions_and_labels_have_the_reference_s_texts(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "m", 1)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"))
    repository.wait_until_loaded()
    for call, code, message in (
        (lambda: repository.find("n"), "NOT_FOUND", "Servable not found for request: Latest(n)"),
        (
            lambda: repository.find("m", version=9),
            "NOT_FOUND",
            "Servable not found for request: Specific(m, 9)",
        ),
        (
            lambda: repository.find("m", label="x"),
            "INVALID_ARGUMENT",
            "Unrecognized servable version label: x",
        ),
        (lambda: repository.statuses("n"), "NOT_FOUND", "Could not find any versions of model n"),
        (lambda: repository.statuses("m", version=9), "NOT_FOUND", "Could not find version 9 of model m"),
    ):
        with pytest.raises(StatusError) as raised:
            call()
        assert (raised.value.code, raised.value.message) == (code, message)


def test_a_version_that_cannot_be_loaded_does_not_replace_one_that_answers(
    tmp_path: Path, make: Make
) -> None:
    add_version(tmp_path / "m", 1)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"))
    repository.wait_until_loaded()
    add_version(tmp_path / "m", 2, "inputs: {}\n")
    wait_until(lambda: repository.statuses("m")[0].state == "END")
    failed = repository.statuses("m")[0]
    assert (failed.version, failed.error_code) == (2, "INVALID_ARGUMENT")
    assert "inputs: missing" in failed.error_message
    assert repository.find("m").version == 1
    shutil.rmtree(tmp_path / "m" / "2")
    add_version(tmp_path / "m", 3)
    wait_until(lambda: repository.find("m").version == 3)


def test_a_framework_that_fails_in_its_own_words_holds_up_nothing(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_directory: Path, _options: ServerFlags) -> LoadedModel:
        raise ZeroDivisionError("in C++")

    add_version(tmp_path / "m", 1)
    monkeypatch.setitem(globals(), "load_model", load)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"))
    with pytest.raises(StatusError, match="did not become available"):
        repository.wait_until_loaded()
    failed = repository.statuses("m")[0]
    assert (failed.error_code, failed.error_message) == ("INTERNAL", "ZeroDivisionError: in C++")


def test_a_failed_load_is_tried_again(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "m", 1)
    flags = replace(QUICK, max_num_load_retries=1000)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"), flags=flags)
    repository.wait_until_loaded()
    add_version(tmp_path / "m", 2, "{")
    wait_until(lambda: repository.statuses("m")[0].error_code == "INVALID_ARGUMENT")
    (tmp_path / "m" / "2" / "emulated.yaml").write_text(EMULATED)
    wait_until(lambda: repository.find("m").version == 2)
    assert repository.statuses("m", version=2)[0].error_message == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "{name: m version: 1} due to error: INVALID_ARGUMENT"),
        (None, "No versions of servable m found under base path"),
    ],
)
def test_a_model_without_a_version_that_loads_is_said_at_the_start(
    tmp_path: Path, make: Make, text: str | None, said: str
) -> None:
    (tmp_path / "m").mkdir()
    if text is not None:
        add_version(tmp_path / "m", 1, text)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"), flags=LOOK_ONCE)
    with pytest.raises(StatusError) as raised:
        repository.wait_until_loaded()
    assert raised.value.message.startswith("1 servable(s) did not become available: ")
    assert said in raised.value.message


def test_a_base_path_that_is_looked_at_once_and_does_not_exist_is_said(tmp_path: Path, make: Make) -> None:
    repository = make(ModelConfig(name="m", base_path=tmp_path / "none"), flags=LOOK_ONCE)
    with pytest.raises(StatusError, match=r"Could not find base path .*none for servable m"):
        repository.wait_until_loaded()


@pytest.mark.parametrize("empty", [False, True])
def test_a_base_path_without_versions_is_waited_for(
    tmp_path: Path, make: Make, empty: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As TF Serving does: file_system_storage_path_source.cc looks again, server_core.cc waits."""
    if empty:
        (tmp_path / "m").mkdir()
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"))
    waiting = threading.Thread(target=repository.wait_until_loaded)
    waiting.start()
    waiting.join(0.03)
    assert waiting.is_alive()
    add_version(tmp_path / "m", 1)
    waiting.join(10)
    assert repository.find("m").version == 1
    said = "No versions of servable m found" if empty else "Could not find base path"
    assert f"warning: {said}" in capsys.readouterr().err


def test_a_version_that_waits_for_a_load_thread_is_seen(tmp_path: Path, make: Make) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        loading.set()
        assert go_on.wait(10)
        return load_model(directory, options)

    for name in "ab":
        add_version(tmp_path / name, 1)
    repository = make(*(ModelConfig(name=name, base_path=tmp_path / name) for name in "ab"), load=load)
    assert loading.wait(10)
    assert [repository.statuses(name)[0].state for name in "ab"] == ["LOADING", "START"]
    go_on.set()
    repository.wait_until_loaded()
    assert [repository.statuses(name)[0].state for name in "ab"] == ["AVAILABLE", "AVAILABLE"]


def test_a_retry_under_way_is_not_given_up(tmp_path: Path, make: Make) -> None:
    """Late storage: the first model that becomes available ends no one's wait while the second is being loaded."""
    attempts: dict[str, int] = {}
    first_available = threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        name = directory.parent.name
        attempts[name] = attempts.get(name, 0) + 1
        if attempts[name] == 1:
            raise StatusError("UNAVAILABLE", "the storage is late")
        if name == "b":
            wait_until(lambda: repository.statuses("a")[0].state == "AVAILABLE")
            first_available.set()
            threading.Event().wait(0.02)
        return load_model(directory, options)

    for name in "ab":
        add_version(tmp_path / name, 1)
    flags = replace(QUICK, num_load_threads=2, max_num_load_retries=5)
    models = (ModelConfig(name=name, base_path=tmp_path / name) for name in "ab")
    repository = make(*models, flags=flags, load=load)
    repository.wait_until_loaded()
    assert first_available.is_set()
    assert [repository.find(name).version for name in "ab"] == [1, 1]


def test_whatever_a_framework_raises_marks_the_version_and_nothing_else(tmp_path: Path, make: Make) -> None:
    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        if directory.parent.name == "a":
            raise SystemExit(3)
        return load_model(directory, options)

    for name in "ab":
        add_version(tmp_path / name, 1)
    models = [ModelConfig(name=name, base_path=tmp_path / name) for name in "ab"]
    repository = make(*models, flags=LOOK_ONCE, load=load)
    with pytest.raises(StatusError, match="name: a version: 1} due to error: INTERNAL: SystemExit: 3"):
        repository.wait_until_loaded()
    assert repository.find("b").version == 1


def test_of_versions_that_have_ended_the_last_are_remembered(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "m", 1)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"))
    repository.wait_until_loaded()
    for version in range(2, 25):
        add_version(tmp_path / "m", version)
        wait_until(lambda version=version: repository.find("m").version == version)  # type: ignore[misc]
    wait_until(lambda: len(repository.statuses("m")) == 17)
    wait_until(lambda: repository.statuses("m", version=23)[0].state == "END")
    assert [one.version for one in repository.statuses("m")] == list(range(24, 7, -1))


def test_a_slow_load_holds_up_only_its_own_model(tmp_path: Path, make: Make) -> None:
    """Beside it other models' versions are loaded and unloaded, and other configurations come into force."""
    loading, go_on = threading.Event(), threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        if directory.parts[-2:] == ("a", "2"):
            loading.set()
            assert go_on.wait(30)
        return load_model(directory, options)

    for name in "abc":
        add_version(tmp_path / name, 1)
    a, b, c = (ModelConfig(name=name, base_path=tmp_path / name) for name in "abc")
    repository = make(a, b, flags=replace(QUICK, num_load_threads=2), load=load)
    repository.wait_until_loaded()
    add_version(tmp_path / "a", 2)
    assert loading.wait(10)
    add_version(tmp_path / "a", 3)
    add_version(tmp_path / "b", 2)
    wait_until(lambda: [one.state for one in repository.statuses("b")] == ["AVAILABLE", "END"])
    repository.configure([a, c])
    assert repository.find("c").version == 1
    wait_until(lambda: repository.statuses("b")[0].state == "END")
    assert [(one.version, one.state) for one in repository.statuses("a")] == [
        (2, "LOADING"),
        (1, "AVAILABLE"),
    ]
    go_on.set()
    wait_until(lambda: repository.find("a").version == 3)


def test_a_retry_that_waits_for_another_load_of_its_model_keeps_no_cpu_busy(
    tmp_path: Path, make: Make
) -> None:
    failed, go_on = threading.Event(), threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        if directory.name == "2":
            failed.set()
            raise StatusError("UNAVAILABLE", "the storage is late")
        assert go_on.wait(30)
        return load_model(directory, options)

    for version in (1, 2):
        add_version(tmp_path / "m", version)
    model = ModelConfig(name="m", base_path=tmp_path / "m", policy=None)
    flags = replace(
        QUICK, file_system_poll_wait_seconds=0.02, num_load_threads=2, load_retry_interval_micros=0
    )
    repository = make(model, flags=flags, load=load)
    assert failed.wait(10)
    begun = repository._rounds_begun
    threading.Event().wait(0.05)
    assert repository._rounds_begun - begun < 50
    go_on.set()


def test_a_version_that_does_not_end_holds_up_only_its_own_model(tmp_path: Path, make: Make) -> None:
    """Its run hangs, say. No third version of the model is loaded beside it and its successor."""
    go_on = threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        model = load_model(directory, options)
        slow = directory.parts[-2:] == ("a", "1")
        return replace(model, close=lambda: bool(go_on.wait(30))) if slow else model

    for name in "ab":
        add_version(tmp_path / name, 1)
    repository = make(*(ModelConfig(name=name, base_path=tmp_path / name) for name in "ab"), load=load)
    repository.wait_until_loaded()
    add_version(tmp_path / "a", 2)
    wait_until(lambda: repository.statuses("a", version=1)[0].state == "UNLOADING")
    add_version(tmp_path / "a", 3)
    for version in (2, 3):
        add_version(tmp_path / "b", version)
        wait_until(lambda version=version: repository.find("b").version == version)  # type: ignore[misc]
    assert repository.find("a").version == 2
    assert repository.statuses("a", version=3)[0].state == "START"
    go_on.set()
    wait_until(lambda: repository.find("a").version == 3)


def test_who_waits_for_a_load_is_told_when_the_server_stops(tmp_path: Path, make: Make) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        loading.set()
        assert go_on.wait(30)
        return load_model(directory, options)

    add_version(tmp_path / "m", 1)
    repository = make(load=load)
    repository.wait_until_loaded()
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(repository.configure, [ModelConfig(name="m", base_path=tmp_path / "m")])
        assert loading.wait(10)
        repository.stop()
        error = change.exception(timeout=10)
    assert isinstance(error, StatusError)
    assert error.code == "UNAVAILABLE"
    go_on.set()


def test_a_version_that_cannot_be_closed_holds_up_no_other(tmp_path: Path, make: Make) -> None:
    def close() -> None:
        raise OSError("in C++")

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        model = load_model(directory, options)
        return replace(model, close=close) if directory.name == "1" else model

    add_version(tmp_path / "m", 1)
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"), load=load)
    repository.wait_until_loaded()
    for version in (2, 3):
        add_version(tmp_path / "m", version)
        wait_until(lambda version=version: repository.find("m").version == version)  # type: ignore[misc]
    wait_until(lambda: repository.statuses("m", version=2)[0].state == "END")


def test_a_path_that_no_system_can_have_is_one_model_s_fault(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "m", 1)
    good = ModelConfig(name="m", base_path=tmp_path / "m")
    repository = make(good)
    repository.wait_until_loaded()
    for _ in range(3):
        with pytest.raises(StatusError, match="Could not find base path"):
            repository.configure([ModelConfig(name="n", base_path=Path("a\0b")), good])
    repository.configure([good])
    assert repository.find("m").version == 1


def test_a_stderr_that_nobody_reads_stops_no_version(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GonePipe(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    add_version(tmp_path / "m", 1)
    monkeypatch.setattr(sys, "stderr", GonePipe())
    repository = make(ModelConfig(name="m", base_path=tmp_path / "m"))
    repository.wait_until_loaded()
    add_version(tmp_path / "m", 2)
    wait_until(lambda: [one.state for one in repository.statuses("m")] == ["AVAILABLE", "END"])


def test_a_fault_in_a_round_is_told_to_who_waits_and_the_next_round_goes_on(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(tmp_path / "m", 1)
    model = ModelConfig(name="m", base_path=tmp_path / "m")
    repository = make(model)
    repository.wait_until_loaded()

    def fails(_path: Path) -> None:
        raise RecursionError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fails)
        with pytest.raises(StatusError, match="RecursionError: a fault of ours"):
            repository.configure([model])
    repository.configure([model])
    assert repository.find("m").version == 1


def test_the_end_of_the_watching_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = threading.Event()
    repository = ModelRepository(
        [ModelConfig(name="m", base_path=tmp_path)],
        open_servable=lambda *_: pytest.fail("nothing to load"),
        close_servable=lambda _: None,
        on_loop=lambda function: function(),
        on_dead=dead.set,
        flags=QUICK,
    )

    def ends(_path: Path) -> None:
        raise SystemExit

    monkeypatch.setattr(Path, "iterdir", ends)
    repository.start()
    assert dead.wait(10)
    with pytest.raises(StatusError, match="did not become available"):
        repository.wait_until_loaded()
    repository.close()


def test_configurations_given_at_once_are_adopted_one_after_the_other(tmp_path: Path, make: Make) -> None:
    for name in "abc":
        add_version(tmp_path / name, 1)
    models = {name: ModelConfig(name=name, base_path=tmp_path / name, labels={"stable": 1}) for name in "abc"}
    repository = make(models["a"])
    repository.wait_until_loaded()
    with ThreadPoolExecutor(6) as pool:
        changes = [pool.submit(repository.configure, [models["abc"[number % 3]]]) for number in range(18)]
        assert [change.exception() for change in changes] == [None] * 18
    (name,) = repository.names()
    assert repository.find(name, label="stable").version == 1


def test_labels_name_versions_and_need_an_available_one(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "m", 1)
    add_version(tmp_path / "m", 2)

    def labelled(**labels: int) -> ModelConfig:
        return ModelConfig(name="m", base_path=tmp_path / "m", policy=None, labels=labels)

    repository = make(labelled(stable=1, canary=2))
    repository.wait_until_loaded()
    assert repository.find("m", label="stable").version == 1
    assert repository.find("m", label="canary").version == 2
    repository.configure([labelled(stable=2)])
    assert repository.find("m", label="stable").version == 2
    with pytest.raises(StatusError, match="label to version 5 of model m, which is not currently available"):
        repository.configure([labelled(stable=5)])
    assert repository.find("m", label="stable").version == 2


def test_a_new_configuration_adds_and_removes_models(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "a", 1)
    add_version(tmp_path / "b", 4)
    repository = make(ModelConfig(name="a", base_path=tmp_path / "a"))
    repository.wait_until_loaded()
    config = ModelServerConfig()
    config.model_config_list.config.add(name="b", base_path=str(tmp_path / "b"), model_platform="tensorflow")
    repository.reload_config(config)
    assert repository.find("b").version == 4
    assert repository.names() == ("b",)
    wait_until(lambda: [one.state for one in repository.statuses("a")] == ["END"])
    with pytest.raises(StatusError, match=r"Latest\(a\)"):
        repository.find("a")


def test_a_model_that_comes_back_is_loaded_again(tmp_path: Path, make: Make) -> None:
    add_version(tmp_path / "a", 1)
    add_version(tmp_path / "b", 1)
    one, other = (ModelConfig(name=name, base_path=tmp_path / name) for name in "ab")
    repository = make(one)
    repository.wait_until_loaded()
    repository.configure([other])
    wait_until(lambda: [status.state for status in repository.statuses("a")] == ["END"])
    repository.configure([one, other])
    assert repository.find("a").version == 1


def test_a_configuration_file_lists_models_policies_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    path.write_text(
        'model_config_list { config { name: "a" base_path: "/models/a" model_platform: "tensorflow"\n'
        '  model_version_policy { specific { versions: 1 versions: 3 } } version_labels { key: "s" value: 3 } }\n'
        '  config { name: "b" base_path: "/models/b" model_version_policy { all {} } }\n'
        '  config { name: "c" base_path: "/models/c" model_version_policy { latest { num_versions: 2 } } } }\n'
    )
    assert read_model_config_file(path) == (
        ModelConfig(name="a", base_path=Path("/models/a"), policy=(1, 3), labels={"s": 3}),
        ModelConfig(name="b", base_path=Path("/models/b"), policy=None),
        ModelConfig(name="c", base_path=Path("/models/c"), policy=2),
    )


def test_a_wrong_configuration_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    path.write_text('model_config_list { config { nam: "a" } }')
    with pytest.raises(UsageError, match=r"models\.config: .*nam"):
        read_model_config_file(path)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([("a", "/a"), ("a", "/b")], "Illegal to list model a multiple times in config list"),
        ([("", "/a")], "a model without a name"),
        ([("a", "")], "Expected model a to have a base_path"),
        ([("a\nx", "/a")], r"model 'a\\nx': control characters"),
        ([("a", "/a\x1b[31m")], "model 'a': control characters"),
        ([("a", "gs://bucket/a")], "only local directories are served; mount or copy what gs:// holds"),
    ],
)
def test_an_illegal_configuration_is_refused(models: list[tuple[str, str]], said: str) -> None:
    config = ModelServerConfig()
    for name, base_path in models:
        config.model_config_list.config.add(name=name, base_path=base_path)
    with pytest.raises(StatusError, match=said):
        models_of(config)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("file:///models/m", "/models/m"),
        ("FILE://localhost/models/m", "/models/m"),
        ("/models/a://b", "/models/a://b"),
    ],
)
def test_a_base_path_may_be_a_file_url(written: str, read: str) -> None:
    """tensorflow_model_server takes one, for TensorFlow's file systems do."""
    config = ModelServerConfig()
    config.model_config_list.config.add(name="m", base_path=written)
    (model,) = models_of(config)
    assert model.base_path == Path(read)
    flags = ServerFlags(model_base_path=written)
    assert configured_models(flags)[0].base_path == Path(read)
    with pytest.raises(UsageError, match=r"--model_base_path=s3://b/m: .* only local directories"):
        configured_models(ServerFlags(model_base_path="s3://b/m"))


def test_a_model_whose_requests_shall_be_logged_is_told_once_that_they_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ModelServerConfig()
    model = config.model_config_list.config.add(name="unlogged", base_path="/m")
    model.logging_config.SetInParent()
    for _ in range(2):
        models_of(config)
    assert capsys.readouterr().err.count("model unlogged: logging_config has no effect") == 1


def test_a_custom_configuration_is_refused_with_the_reference_s_text() -> None:
    config = ModelServerConfig()
    config.custom_model_config.SetInParent()
    for refused in (config, ModelServerConfig()):
        with pytest.raises(StatusError, match="Only ModelConfigList is currently supported"):
            models_of(refused)


def test_a_file_that_is_being_written_takes_no_model_out_of_service(tmp_path: Path) -> None:
    """As in TensorFlow Serving (ServerCore::ReloadConfig): only a list, which may be empty, changes anything."""
    path = tmp_path / "models.config"
    path.write_text("# the editor has not written yet\n")
    with pytest.raises(UsageError, match=r"models\.config: it is empty: the models stay as they are"):
        read_model_config_file(path)
    assert read_model_config_file(path, may_be_empty=True) == ()
    path.write_text("model_config_list { }")
    assert read_model_config_file(path) == ()
