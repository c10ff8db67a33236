"""Any form of a model that a user has is found, and served without touching what is theirs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.errors import TargetError, UsageError
from batchtune.scenario.reader import parse_scenario
from batchtune.scenario.spec.target import TargetSpec
from batchtune.server.models.model_config import read_model_config_file
from batchtune.server.startup import own_batching_parameters
from batchtune.target import model_files
from batchtune.target.model_files import (
    lies_bare,
    located_model,
    only_model_below,
    resolve_model,
    served_name,
    version_files,
)
from batchtune.target.tfserving import (
    OWN_PARAMETERS,
    TfServingTarget,
    model_config_text,
    own_fields,
    own_parameters,
    with_own_parameters,
)
from tests.server.server_process import write_emulated


def touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    models = "models/mnist/1/model.onnx models/mnist/2/model.onnx bare/saved_model.pb chain/1/pipeline.yaml"
    others = "nets/net.onnx.data nets/net_int8.onnx nets/script.pt weights.keras weights.pth notes.txt"
    touched(*(tmp_path / name for name in f"{models} {others}".split()))
    (tmp_path / "empty").mkdir()
    named = ("net.onnx.data", "more/weights.bin", "/etc/passwd", "../bare", "gone")
    write_onnx_naming(tmp_path / "nets/net.onnx", *named)
    return tmp_path


def write_onnx_naming(path: Path, *places: str) -> None:
    """Write a graph whose weights lie in these files: the first as an initializer, others as constants of nodes."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    tensors = [onnx.TensorProto(name=place, data_location=onnx.TensorProto.EXTERNAL) for place in places]
    for tensor, place in zip(tensors, places, strict=True):
        tensor.external_data.add(key="location", value=place)
        tensor.external_data.add(key="offset", value="0")
    nodes = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors[1:]]
    graph = onnx.helper.make_graph(nodes, "g", [], [], initializer=tensors[:1])
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


@pytest.mark.parametrize(
    ("given", "found", "name"),
    [
        ("models/mnist", "models/mnist", "mnist"),
        ("models/mnist/2", "models/mnist", "mnist"),
        ("models/mnist/2/model.onnx", "models/mnist", "mnist"),
        ("models/mnist/1", "models/mnist/1", "mnist"),
        ("bare", "bare", "bare"),
        ("bare/saved_model.pb", "bare", "bare"),
        ("nets/net.onnx", "nets/net.onnx", "net"),
    ],
)
def test_every_form_of_a_model_is_found_under_its_name(home: Path, given: str, found: str, name: str) -> None:
    path = located_model(str(home / given))
    assert path == home / found
    assert served_name(str(path)) == name


@pytest.mark.parametrize(
    ("given", "what", "hint"),
    [
        ("gone", "does not exist", "a SavedModel directory (its version directory or not)"),
        ("models", "no model in", "did you mean {}/models/mnist?"),
        ("nets", "no model in", "{}/nets/net.onnx or {}/nets/net_int8.onnx or {}/nets/script.pt?"),
        ("chain", "no model in", "chains of models no longer exist"),
        ("empty", "no model in", "saved_model.pb, model.onnx, model.pt2, model.pt, emulated.yaml"),
        ("weights.keras", "is not a model that a server loads", '.export("weights")'),
        ("weights.pth", "is not a model that a server loads", "'weights.pt2'"),
        ("notes.txt", "is not a model that a server loads", "give a SavedModel directory"),
        ("nets/script.pt", "does not list its inputs", "{}/nets/signature.yaml"),
    ],
)
def test_what_is_no_model_says_what_to_give(home: Path, given: str, what: str, hint: str) -> None:
    with pytest.raises(UsageError, match=what) as raised:
        located_model(str(home / given))
    assert hint.replace("{}", str(home)) in raised.value.hint


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("net.onnx", "make a version directory of them, {}/net/1/ with model.onnx, stages.yaml and what"),
        ("model.onnx", "give the folder, target.model: {}"),
    ],
)
def test_stages_beside_a_bare_file_are_refused_with_both_files(tmp_path: Path, file: str, hint: str) -> None:
    touched(tmp_path / file, tmp_path / "stages.yaml")
    with pytest.raises(UsageError, match="is served without") as raised:
        located_model(str(tmp_path / file))
    assert all(str(tmp_path / name) in raised.value.message for name in (file, "stages.yaml"))
    assert raised.value.hint.startswith(hint.replace("{}", str(tmp_path)))
    if file == "model.onnx":
        assert located_model(str(tmp_path)) == tmp_path


def test_the_only_model_of_a_folder_is_meant_and_of_several_none(home: Path) -> None:
    assert only_model_below(home / "models") == home / "models/mnist"
    assert only_model_below(home) == home / "bare"
    touched(home / "other/saved_model.pb")
    assert only_model_below(home) is None
    assert only_model_below(home / "models/mnist") is None


def test_a_sample_model_that_does_not_exist_suggests_a_close_one() -> None:
    with pytest.raises(UsageError, match="imdb_transfomer") as raised:
        resolve_model("imdb_transfomer")
    assert "did you mean 'imdb_transformer'?" in raised.value.hint


def test_a_file_is_laid_out_with_what_belongs_to_it(home: Path, tmp_path: Path) -> None:
    beside = ("net.env", "net.onnx.bak", "net_old.txt", "more/weights.bin")
    touched(*(home / "nets" / name for name in beside))
    base_path = resolve_model(str(home / "nets/net.onnx"), folder=tmp_path / "laid out")
    version = base_path / "1"
    files = [path for path in version.rglob("*") if path.is_file()]
    laid_out = {str(path.relative_to(version)): path.resolve() for path in files}
    weights = {name: home / "nets" / name for name in ("net.onnx.data", "more/weights.bin")}
    assert base_path.name == "net"
    assert laid_out == {"model.onnx": home / "nets/net.onnx", **weights}
    assert resolve_model(str(home / "nets/net.onnx"), folder=tmp_path / "laid out") == base_path
    touched(home / "nets/signature.yaml")
    script = home / "nets/script.pt"
    assert version_files(script) == {"model.pt": script, "signature.yaml": home / "nets/signature.yaml"}


def test_a_bare_directory_and_an_older_version_are_laid_out_as_version_1(home: Path, tmp_path: Path) -> None:
    for given, name in ((home / "bare", "bare"), (home / "models/mnist/1", "mnist")):
        base_path = resolve_model(str(given), folder=tmp_path / "laid out")
        assert (base_path.name, (base_path / "1").resolve()) == (name, given)
        assert lies_bare(given)
    assert resolve_model(str(home / "models/mnist"), folder=tmp_path / "none") == home / "models/mnist"
    assert not (tmp_path / "none").exists()
    assert not lies_bare(home / "models/mnist")


def test_the_name_of_a_model_that_is_gone_is_still_known() -> None:
    given = ["mnist", "net.onnx", "model.onnx", "/gone/a.b/3", "./my.model"]
    assert [served_name(model) for model in given] == ["mnist", "net", "model", "a.b", "my.model"]


def test_a_model_without_version_directory_is_served_and_stays_as_it_was(tmp_path: Path) -> None:
    bare = tmp_path / "net"
    shutil.move(write_emulated(tmp_path / "versions") / "1", bare)
    before = sorted(bare.iterdir())
    with TfServingTarget(TargetSpec(model=str(bare))) as target:
        target.apply(Configuration(batching=None))
        assert target.endpoint.model_name == "net"
        assert [spec.name for spec in target.signature("serving_default").inputs] == ["x"]
    assert sorted(bare.iterdir()) == before


def test_a_link_is_served_under_its_own_name(tmp_path: Path) -> None:
    touched(tmp_path / "blobs/4f2a")
    (tmp_path / "net.onnx").symlink_to(tmp_path / "blobs/4f2a")
    link = str(tmp_path / "net.onnx")
    assert served_name(str(located_model(link))) == "net"
    text = f"name: s\ntarget: {{model: {link}}}\nload: {{arrivals: closed, concurrency: 1}}\nobjective: throughput\n"
    assert parse_scenario(text, directory=tmp_path).target.model == link


def test_a_sample_model_is_prepared_once_however_often_it_is_launched_or_tells_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = {"tiny": (str(tmp_path), ""), "large": ("", "disk full")}

    def printed(command: list[str], **_limits: float) -> tuple[str, str]:
        return ("tiny large", "") if "--list" in command else exported[command[-1]]

    monkeypatch.setattr(model_files, "ask", printed)
    monkeypatch.setattr(model_files, "_EXPORTED", {})
    said: list[str] = []
    for _ in range(2):
        assert resolve_model("tiny", on_event=said.append) == tmp_path
    assert said == ["preparing the sample model tiny (exported once, then cached)"]
    with pytest.raises(TargetError, match="sample_models large: disk full"):
        resolve_model("large")


@pytest.mark.parametrize("folder", ["plain", 'with "quotes" and \\', "mit Umlaut ü", "🐢"])
def test_models_and_paths_survive(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "models.txt"
    wanted = {"ranker": f"/models/{folder}", "reader-2.0": "/models/other"}
    path.write_text(model_config_text(wanted), encoding="utf-8")
    found = read_model_config_file(path)
    assert {one.name: str(one.base_path) for one in found} == wanted


def test_every_version_gets_the_models_own_parameters_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    for version in ("1", "2", "notes"):
        (tmp_path / "m" / version / "variables").mkdir(parents=True)
        (tmp_path / "m" / version / "saved_model.pb").write_text(version)
    (tmp_path / "m" / "2" / OWN_PARAMETERS).write_text("max_batch_size { value: 9 }")
    parameters = BatchingParameters(max_batch_size=4, num_batch_threads=2, thread_pool_name="x")
    base_path = with_own_parameters(tmp_path / "m", tmp_path / "own", parameters)
    assert sorted(path.name for path in base_path.iterdir()) == ["1", "2"]
    for version in ("1", "2"):
        assert (base_path / version / "saved_model.pb").read_text() == version
        assert (base_path / version / "variables").is_dir()
        assert own_batching_parameters(base_path / version) == BatchingParameters(max_batch_size=4)
    assert (tmp_path / "m" / "2" / OWN_PARAMETERS).read_text() == "max_batch_size { value: 9 }"
    assert not (tmp_path / "m" / "1" / OWN_PARAMETERS).exists()


def test_own_parameters_are_those_of_the_configuration_which_a_scenario_gives_its_own() -> None:
    models = "[{name: a, model: m, batching: {max_batch_size: 4}}, {name: b, model: n}]"
    scenario = parse_scenario(
        f"name: s\ntarget: {{models: {models}}}\nload: {{arrivals: closed, concurrency: 1}}\nobjective: throughput\n"
    )
    shared = Configuration(batching=BatchingParameters(max_batch_size=16, num_batch_threads=2))
    joint = replace(shared, models=(("a", BatchingParameters(max_batch_size=1)),))
    for configuration, own in ((shared, 4), (joint, 1)):
        found = own_fields(own_parameters("ab", scenario.with_models(configuration)))
        assert found == {"a": {"max_batch_size": own}, "b": {"max_batch_size": 16}}
    assert own_parameters("ab", shared) == {}
    assert own_parameters("ab", scenario.with_models(Configuration(batching=None))) == {}
