"""Versions on disk become versions that answer, and go away again, as in TF Serving."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

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


Load = Callable[[Path, ServerFlags], LoadedModel]


class Shelf:
    """Versions of emulated models on disk, and a repository of them; a function for the event loop runs at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead: list[str] = []
        self._made: list[tuple[ModelRepository, BatchingControl]] = []

    def config(self, name: str, **fields: Any) -> ModelConfig:
        return ModelConfig(name=name, base_path=self.folder / name, **fields)

    def add(self, name: str, *versions: int, text: str = EMULATED) -> None:
        for version in versions:
            staging = self.folder / f"staging-{version}"
            staging.mkdir()
            (staging / "emulated.yaml").write_text(text)
            (self.folder / name).mkdir(exist_ok=True)
            staging.rename(self.folder / name / str(version))

    def started(
        self, *models: ModelConfig | str, flags: ServerFlags = QUICK, load: Load = load_model
    ) -> ModelRepository:
        """A repository that has begun; of a model that is given by its name, version 1 is there."""
        for name in models:
            if isinstance(name, str):
                self.add(name, 1)
        configs = [self.config(one) if isinstance(one, str) else one for one in models]
        metrics = Metrics()
        control = BatchingControl(
            BatchingSettings(), observer=metrics, deliver=lambda _: None, on_loop=lambda function: function()
        )

        def open_servable(name: str, version: int, directory: Path) -> Servable:
            model = load(directory, ServerFlags())
            servable = Servable(name=name, version=version, model=model, metrics=metrics)
            control.attach(servable)
            return servable

        def close_servable(servable: Servable) -> None:
            control.detach(servable)
            servable.close()

        repository = ModelRepository(
            configs,
            open_servable=open_servable,
            close_servable=close_servable,
            on_loop=lambda function: function(),
            on_dead=lambda: self.dead.append("keeper"),
            flags=flags,
        )
        self._made.append((repository, control))
        repository.start()
        return repository

    def loaded(self, *models: ModelConfig | str, **options: Any) -> ModelRepository:
        repository = self.started(*models, **options)
        repository.wait_until_loaded()
        return repository

    def close(self) -> None:
        for repository, control in self._made:
            repository.close()
            control.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()
    assert shelf.dead == []


class Held:
    """A load that waits, of versions in a folder of this name (NAME or NAME/VERSION)."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self, directory: Path, options: ServerFlags) -> LoadedModel:
        if directory.parts[-2:][: len(self.parts)] == self.parts:
            self.began.set()
            assert self.go_on.wait(30)
        return load_model(directory, options)


def states(repository: ModelRepository, name: str = "m") -> dict[int, str]:
    return {one.version: one.state for one in repository.statuses(name)}


def wait_for(repository: ModelRepository, version: int, name: str = "m") -> None:
    wait_until(lambda: repository.find(name).version == version)


def test_the_policy_picks_versions() -> None:
    present = [3, 1, 2]
    assert aspired_versions(1, present) == [3]
    assert aspired_versions(2, present) == [2, 3]
    assert aspired_versions(None, present) == [1, 2, 3]
    assert aspired_versions((1, 7), present) == [1]


def test_the_latest_version_answers_and_a_new_one_takes_over(shelf: Shelf) -> None:
    shelf.add("m", 1, 2)
    repository = shelf.loaded(shelf.config("m"))
    assert repository.find("m").version == 2
    assert states(repository) == {2: "AVAILABLE"}
    shelf.add("m", 3)
    wait_for(repository, 3)
    wait_until(lambda: states(repository) == {3: "AVAILABLE", 2: "END"})
    with pytest.raises(StatusError, match=r"Servable not found for request: Specific\(m, 2\)"):
        repository.find("m", version=2)


def test_version_directories_may_have_leading_zeros(shelf: Shelf) -> None:
    """As TensorFlow Serving's own example, saved_model_half_plus_two_cpu/00000123, has."""
    for name in ("00000123", "0007", "7", "9" * 19, "v9", "1.5"):
        (shelf.folder / "m" / name).mkdir(parents=True)
    for name in ("00000123", "7"):  # of 0007 and 7 the reference takes the last by name
        (shelf.folder / "m" / name / "emulated.yaml").write_text(EMULATED)
    repository = shelf.loaded(shelf.config("m", policy=None))
    assert list(states(repository).items()) == [(123, "AVAILABLE"), (7, "AVAILABLE")]


def test_unknown_names_versions_and_labels_have_the_reference_s_texts(shelf: Shelf) -> None:
    repository = shelf.loaded("m")
    not_found = "NOT_FOUND: Servable not found for request:"
    for call, said in (
        (lambda: repository.find("n"), f"{not_found} Latest(n)"),
        (lambda: repository.find("m", version=9), f"{not_found} Specific(m, 9)"),
        (lambda: repository.find("m", label="x"), "INVALID_ARGUMENT: Unrecognized servable version label: x"),
        (lambda: repository.statuses("n"), "NOT_FOUND: Could not find any versions of model n"),
        (lambda: repository.statuses("m", version=9), "NOT_FOUND: Could not find version 9 of model m"),
    ):
        with pytest.raises(StatusError) as raised:
            call()
        assert str(raised.value) == said


def test_a_version_that_cannot_be_loaded_does_not_replace_one_that_answers(shelf: Shelf) -> None:
    repository = shelf.loaded("m")
    shelf.add("m", 2, text="inputs: {}\n")
    wait_until(lambda: repository.statuses("m")[0].state == "END")
    failed = repository.statuses("m")[0]
    assert (failed.version, failed.error_code) == (2, "INVALID_ARGUMENT")
    assert "inputs: missing" in failed.error_message
    assert repository.find("m").version == 1
    shutil.rmtree(shelf.folder / "m" / "2")
    shelf.add("m", 3)
    wait_for(repository, 3)


def test_a_failed_load_is_tried_again(shelf: Shelf) -> None:
    repository = shelf.loaded("m", flags=replace(QUICK, max_num_load_retries=1000))
    shelf.add("m", 2, text="{")
    wait_until(lambda: repository.statuses("m")[0].error_code == "INVALID_ARGUMENT")
    (shelf.folder / "m" / "2" / "emulated.yaml").write_text(EMULATED)
    wait_for(repository, 2)
    assert repository.statuses("m", version=2)[0].error_message == ""


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ((1,), "{name: m version: 1} due to error: INVALID_ARGUMENT"),
        ((), "No versions of servable m found under base path"),
        (None, "Could not find base path"),
    ],
)
def test_a_model_without_a_version_that_loads_is_said_at_the_start(
    shelf: Shelf, versions: tuple[int, ...] | None, said: str
) -> None:
    if versions is not None:
        (shelf.folder / "m").mkdir()
        shelf.add("m", *versions, text="{")
    with pytest.raises(StatusError) as raised:
        shelf.loaded(shelf.config("m"), flags=LOOK_ONCE)
    assert raised.value.message.startswith("1 servable(s) did not become available: ")
    assert said in raised.value.message


@pytest.mark.parametrize("empty", [False, True])
def test_an_empty_folder_is_waited_for(shelf: Shelf, empty: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As TF Serving does: file_system_storage_path_source.cc looks again, server_core.cc waits."""
    if empty:
        (shelf.folder / "m").mkdir()
    repository = shelf.started(shelf.config("m"))
    waiting = threading.Thread(target=repository.wait_until_loaded)
    waiting.start()
    waiting.join(0.03)
    assert waiting.is_alive()
    shelf.add("m", 1)
    waiting.join(10)
    assert repository.find("m").version == 1
    said = "No versions of servable m found" if empty else "Could not find base path"
    assert f"warning: {said}" in capsys.readouterr().err


def test_a_version_that_waits_for_a_load_thread_is_seen(shelf: Shelf) -> None:
    held = Held()
    repository = shelf.started("a", "b", load=held)
    assert held.began.wait(10)
    assert [states(repository, name) for name in "ab"] == [{1: "LOADING"}, {1: "START"}]
    held.go_on.set()
    repository.wait_until_loaded()
    assert [states(repository, name) for name in "ab"] == [{1: "AVAILABLE"}] * 2


def test_a_retry_under_way_is_not_given_up(shelf: Shelf) -> None:
    """Late storage: the first model that becomes available ends no one's wait while the second is being loaded."""
    attempts: Counter[str] = Counter()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        name = directory.parent.name
        attempts[name] += 1
        if attempts[name] == 1:
            raise StatusError("UNAVAILABLE", "the storage is late")
        if name == "b":
            wait_until(lambda: states(repository, "a") == {1: "AVAILABLE"})
            threading.Event().wait(0.02)
        return load_model(directory, options)

    flags = replace(QUICK, num_load_threads=2, max_num_load_retries=5)
    repository = shelf.started("a", "b", flags=flags, load=load)
    repository.wait_until_loaded()
    assert attempts == {"a": 2, "b": 2}
    assert [repository.find(name).version for name in "ab"] == [1, 1]


@pytest.mark.parametrize("error", [SystemExit(3), ZeroDivisionError("in C++")])
def test_whatever_a_framework_raises_marks_the_version_alone(shelf: Shelf, error: BaseException) -> None:
    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        if directory.parent.name == "a":
            raise error
        return load_model(directory, options)

    repository = shelf.started("a", "b", flags=LOOK_ONCE, load=load)
    said = f"{type(error).__name__}: {error}"
    with pytest.raises(StatusError, match=re.escape(f"name: a version: 1}} due to error: INTERNAL: {said}")):
        repository.wait_until_loaded()
    failed = repository.statuses("a")[0]
    assert (failed.error_code, failed.error_message) == ("INTERNAL", said)
    assert repository.find("b").version == 1


def test_of_versions_that_have_ended_the_last_are_remembered(shelf: Shelf) -> None:
    repository = shelf.loaded("m")
    for version in range(2, 25):
        shelf.add("m", version)
        wait_for(repository, version)
    wait_until(lambda: len(states(repository)) == 17)
    wait_until(lambda: states(repository)[23] == "END")
    assert list(states(repository)) == list(range(24, 7, -1))


def test_a_slow_load_holds_up_only_its_own_model(shelf: Shelf) -> None:
    """Beside it other models' versions are loaded and unloaded, and other configurations come into force."""
    held = Held("a", "2")
    repository = shelf.loaded("a", "b", flags=replace(QUICK, num_load_threads=2), load=held)
    shelf.add("a", 2)
    assert held.began.wait(10)
    shelf.add("a", 3)
    shelf.add("b", 2)
    wait_until(lambda: states(repository, "b") == {2: "AVAILABLE", 1: "END"})
    shelf.add("c", 1)
    repository.configure([shelf.config("a"), shelf.config("c")])
    assert repository.find("c").version == 1
    wait_until(lambda: repository.statuses("b")[0].state == "END")
    assert states(repository, "a") == {2: "LOADING", 1: "AVAILABLE"}
    held.go_on.set()
    wait_for(repository, 3, "a")


def test_a_retry_that_waits_for_another_load_of_its_model_keeps_no_cpu_busy(shelf: Shelf) -> None:
    failed, held = threading.Event(), Held("m", "1")

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        if directory.name == "2":
            failed.set()
            raise StatusError("UNAVAILABLE", "the storage is late")
        return held(directory, options)

    shelf.add("m", 1, 2)
    flags = replace(
        QUICK, file_system_poll_wait_seconds=0.02, num_load_threads=2, load_retry_interval_micros=0
    )
    repository = shelf.started(shelf.config("m", policy=None), flags=flags, load=load)
    assert failed.wait(10)
    begun = repository._rounds_begun
    threading.Event().wait(0.05)
    assert repository._rounds_begun - begun < 50
    held.go_on.set()


def test_a_version_that_does_not_end_holds_up_only_its_own_model(shelf: Shelf) -> None:
    """Its run hangs, say. No third version of the model is loaded beside it and its successor."""
    go_on = threading.Event()

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        model = load_model(directory, options)
        slow = directory.parts[-2:] == ("a", "1")
        return replace(model, close=lambda: bool(go_on.wait(30))) if slow else model

    repository = shelf.loaded("a", "b", load=load)
    shelf.add("a", 2)
    wait_until(lambda: states(repository, "a")[1] == "UNLOADING")
    shelf.add("a", 3)
    for version in (2, 3):
        shelf.add("b", version)
        wait_for(repository, version, "b")
    assert repository.find("a").version == 2
    assert states(repository, "a")[3] == "START"
    go_on.set()
    wait_for(repository, 3, "a")


def test_who_waits_for_a_load_is_told_when_the_server_stops(shelf: Shelf) -> None:
    held = Held()
    shelf.add("m", 1)
    repository = shelf.loaded(load=held)
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(repository.configure, [shelf.config("m")])
        assert held.began.wait(10)
        repository.stop()
        error = change.exception(timeout=10)
    assert isinstance(error, StatusError)
    assert error.code == "UNAVAILABLE"
    held.go_on.set()


def test_a_version_that_cannot_be_closed_holds_up_no_other(shelf: Shelf) -> None:
    def close() -> None:
        raise OSError("in C++")

    def load(directory: Path, options: ServerFlags) -> LoadedModel:
        model = load_model(directory, options)
        return replace(model, close=close) if directory.name == "1" else model

    repository = shelf.loaded("m", load=load)
    for version in (2, 3):
        shelf.add("m", version)
        wait_for(repository, version)
    wait_until(lambda: states(repository)[2] == "END")


def test_a_path_that_no_system_can_have_is_one_model_s_fault(shelf: Shelf) -> None:
    repository = shelf.loaded("m")
    for _ in range(3):
        with pytest.raises(StatusError, match="Could not find base path"):
            repository.configure([ModelConfig(name="n", base_path=Path("a\0b")), shelf.config("m")])
    repository.configure([shelf.config("m")])
    assert repository.find("m").version == 1


def test_a_stderr_that_nobody_reads_stops_no_version(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys.stderr, "write", write)
    repository = shelf.loaded("m")
    shelf.add("m", 2)
    wait_until(lambda: states(repository) == {2: "AVAILABLE", 1: "END"})


def test_a_fault_in_a_round_is_told_and_goes_by(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = shelf.loaded("m")

    def fails(_path: Path) -> None:
        raise RecursionError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fails)
        with pytest.raises(StatusError, match="RecursionError: a fault of ours"):
            repository.configure([shelf.config("m")])
    repository.configure([shelf.config("m")])
    assert repository.find("m").version == 1


def test_the_end_of_the_watching_thread_is_told(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(_path: Path) -> None:
        raise SystemExit

    monkeypatch.setattr(Path, "iterdir", ends)
    (shelf.folder / "m").mkdir()
    repository = shelf.started(shelf.config("m"))
    wait_until(lambda: shelf.dead == ["keeper"])
    with pytest.raises(StatusError, match="did not become available"):
        repository.wait_until_loaded()
    shelf.dead.clear()


def test_configurations_given_at_once_are_adopted_one_after_the_other(shelf: Shelf) -> None:
    for name in "abc":
        shelf.add(name, 1)
    models = [shelf.config(name, labels={"stable": 1}) for name in "abc"]
    repository = shelf.loaded(models[0])
    with ThreadPoolExecutor(6) as pool:
        changes = [pool.submit(repository.configure, [models[number % 3]]) for number in range(18)]
        assert [change.exception() for change in changes] == [None] * 18
    (name,) = repository.names()
    assert repository.find(name, label="stable").version == 1


def test_labels_name_versions_and_need_an_available_one(shelf: Shelf) -> None:
    def labelled(**labels: int) -> ModelConfig:
        return shelf.config("m", policy=None, labels=labels)

    shelf.add("m", 1, 2)
    repository = shelf.loaded(labelled(stable=1, canary=2))
    assert repository.find("m", label="stable").version == 1
    assert repository.find("m", label="canary").version == 2
    repository.configure([labelled(stable=2)])
    assert repository.find("m", label="stable").version == 2
    with pytest.raises(StatusError, match="label to version 5 of model m, which is not currently available"):
        repository.configure([labelled(stable=5)])
    assert repository.find("m", label="stable").version == 2


def test_a_new_configuration_adds_and_removes_models_and_brings_them_back(shelf: Shelf) -> None:
    repository = shelf.loaded("a")
    shelf.add("b", 4)
    config = ModelServerConfig()
    path = str(shelf.folder / "b")
    config.model_config_list.config.add(name="b", base_path=path, model_platform="tensorflow")
    repository.reload_config(config)
    assert repository.find("b").version == 4
    assert repository.names() == ("b",)
    wait_until(lambda: states(repository, "a") == {1: "END"})
    with pytest.raises(StatusError, match=r"Latest\(a\)"):
        repository.find("a")
    repository.configure([shelf.config("a"), shelf.config("b")])
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


def test_a_model_with_logging_is_told_once_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
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
