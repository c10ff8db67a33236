"""How the two sides of a check are said: models, git refs, images, commands, batching files, flags."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchtune.cli.app import app
from batchtune.cli.arguments.options import CheckRequest, SideWords
from batchtune.cli.commands.check_course import with_words_of_sides
from batchtune.cli.commands.run_check import asked_pair
from batchtune.errors import BatchtuneError, UsageError
from batchtune.scenario.reader import read_scenario
from batchtune.scenario.spec.check import CHECK_BLOCKS_MAX
from batchtune.target.container import tfservings_container
from batchtune.target.model_files import export_model, version_files
from tests.cli.test_cli import EMULATED
from tests.target.test_model_files import touched, write_onnx_naming

SCENARIO = """\
name: sides
target: {model: ./models/net}
request: {protocol: grpc, rows: 1}
load: {arrivals: closed, concurrency: 8, warm_up: 50ms, duration: 200ms, seed: 1}
objective: throughput
fixed: {max_batch_size: 8, batch_timeout_micros: 0}
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def emulated(folder: Path, text: str = EMULATED) -> Path:
    touched(folder / "1" / "emulated.yaml")
    (folder / "1" / "emulated.yaml").write_text(text)
    return folder


def committed(folder: Path, message: str = "x") -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", message)


def git(folder: Path, *words: str) -> str:
    quiet = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *quiet, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Called beside `scenarios/`, where a scenario and its model lie."""
    emulated(tmp_path / "scenarios/models/net")
    (tmp_path / "scenarios/sides.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repository(here: Path) -> Path:
    """Two commits: `old`, and HEAD with a slower model."""
    git(here, "init", "-q", "-b", "main")
    committed(here)
    git(here, "tag", "old")
    emulated(here / "scenarios/models/net", EMULATED.replace("2.0", "3.0"))
    committed(here)
    return here


SCENARIO_PATH = Path("scenarios/sides.yaml")
NET = "scenarios/models/net"


def overrides(**candidate) -> list[str]:
    words = {"baseline": SideWords(), "candidate": SideWords(**candidate)}
    with with_words_of_sides(CheckRequest(scenario=SCENARIO_PATH), words) as asked:
        assert asked.baseline_set == []
        return list(asked.candidate_set)


def candidate(**words):
    given = {"candidate_set": overrides(**words), "scenario": SCENARIO_PATH}
    return asked_pair(CheckRequest(**given), read_scenario(SCENARIO_PATH))[1].scenario


@pytest.mark.parametrize("name", ["new model", "new.onnx", "not/there", "stable"])
def test_a_model_is_meant_from_where_the_command_is_called_by_its_own_name(here: Path, name: str) -> None:
    if name == "new model":
        (here / name).mkdir()
    (here / "scenarios" / name).mkdir(parents=True)
    (here / "stable").symlink_to(here / "scenarios/models/net", target_is_directory=True)
    assert overrides(model=name) == [f'target.model="{here / name}"']


def test_a_sample_model_is_meant_by_its_name_and_has_no_ref(repository: Path) -> None:
    assert overrides(model="imdb_transformer") == ['target.model="imdb_transformer"']
    SCENARIO_PATH.write_text(SCENARIO.replace("./models/net", "imdb_transformer"))
    with pytest.raises(UsageError, match="'imdb_transformer' is not a folder in git"):
        overrides(ref="HEAD")


@pytest.mark.parametrize("words", [{"model": "./new"}, {"ref": "HEAD"}])
def test_of_several_models_a_side_says_which_is_another(here: Path, words: dict[str, str]) -> None:
    models = "models: [{name: a, model: ./models/net}, {name: b, model: ./models/net}]"
    SCENARIO_PATH.write_text(SCENARIO.replace("model: ./models/net", models))
    with pytest.raises(UsageError, match="lists several models") as caught:
        overrides(**words)
    assert caught.value.message.startswith(f"--candidate-{next(iter(words))}: ")
    assert "--candidate-set target.models.0.model=PATH" in caught.value.hint
    emulated(here / "scenarios/new")
    changed = read_scenario(SCENARIO_PATH, overrides=overrides(set=["target.models.1.model=./new"]))
    assert [Path(own.model).name for own in changed.target.models] == ["net", "new"]


def test_both_sides_may_be_commits_of_the_model_and_are_removed_at_the_end(repository: Path) -> None:
    words = {"baseline": SideWords(ref="old"), "candidate": SideWords(ref="HEAD")}
    with with_words_of_sides(CheckRequest(scenario=SCENARIO_PATH), words) as asked:
        pair = asked_pair(asked, read_scenario(SCENARIO_PATH))
        paths = [Path(side.scenario.target.model) for side in pair]
        texts = [(path / "1/emulated.yaml").read_text() for path in paths]
        assert [path.name for path in paths] == ["net", "net"]
        assert texts == [EMULATED, EMULATED.replace("2.0", "3.0")]
        commit = git(repository, "rev-parse", "old")[:9]
        assert asked.note.startswith(f"baseline: scenarios/models/net at old ({commit}); candidate: ")
        assert asked.commit == git(repository, "rev-parse", "HEAD")
    assert not any(path.exists() for path in paths)


def test_a_commit_may_hold_a_model_that_is_gone_from_the_working_tree(repository: Path) -> None:
    git(repository, "rm", "-qr", "scenarios/models")
    words = {"baseline": SideWords(ref="old", model="scenarios/models/net")}
    with with_words_of_sides(CheckRequest(scenario=SCENARIO_PATH), words) as asked:
        (override,) = asked.baseline_set
        assert override.endswith('/baseline/scenarios/models/net"')


def test_a_repository_may_be_the_model(tmp_path: Path) -> None:
    model = emulated(tmp_path / "net")
    (model / ".gitattributes").write_text("*.bin -diff\n")
    git(model, "init", "-q")
    committed(model)
    path, _, _ = export_model(model, "HEAD", tmp_path / "out")
    assert path == tmp_path / "out/net"
    assert (path / "1/emulated.yaml").is_file()


def test_what_git_will_not_read_is_told_in_its_words(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(UsageError, match=r"it is in no git repository: .*dubious ownership"):
        overrides(ref="HEAD")


def test_a_models_file_comes_with_its_weights(repository: Path, tmp_path: Path) -> None:
    for name in ("net.onnx", "net.onnx.data", "other.onnx"):
        (repository / name).write_text("x")
    write_onnx_naming(repository / "named.onnx", "more/weights.bin")
    touched(repository / "more/weights.bin")
    for text in ("then", "now"):
        (repository / "more/weights.bin").write_text(text)
        committed(repository)
    exported, _, _ = export_model(repository / "net.onnx", "HEAD", tmp_path / "out")
    assert sorted(path.name for path in exported.parent.iterdir()) == ["net.onnx", "net.onnx.data"]
    exported, _, _ = export_model(repository / "named.onnx", "HEAD~1", tmp_path / "before")
    assert version_files(exported)["more/weights.bin"].read_text() == "then"


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ({"ref": "no-such"}, "'no-such' is not a commit", "git fetch origin no-such"),
        ({"ref": "--upload-pack=x"}, "is not a commit", "git fetch"),
        ({"ref": "old", "model": "scenarios/models/later"}, "not in old", "--baseline-model"),
        ({"ref": "old", "model": "/"}, "it is in no git repository", ""),
        ({"flag": ["intra"]}, "expected NAME=VALUE", ""),
        ({"command": "serve 'x"}, "is not a command line", ""),
        ({"batching": "none.txt"}, "none.txt: No such file", ""),
        ({"model": "~no_such_user/m"}, "~no_such_user/m: no such user has a home folder here", ""),
        ({"batching": "~no_such_user/b"}, "~no_such_user/b: no such user has a home folder here", ""),
        ({"model": "models"}, "models: no such model here", "did you mean scenarios/models?"),
    ],
)
def test_a_side_that_cannot_be_had_says_why_and_what_to_do(repository: Path, words, what, hint) -> None:
    with pytest.raises(UsageError) as raised:
        overrides(**words)
    assert what in raised.value.message
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("words", "place", "command"),
    [
        ({"ref": "HEAD"}, "net/1/emulated.yaml at HEAD", "git lfs fetch origin HEAD"),
        ({"model": NET}, "--candidate-model: .*emulated.yaml", "git lfs pull"),
        ({"model": f"{NET}/1/emulated.yaml"}, "--candidate-model: .*emulated.yaml", "git lfs pull"),
    ],
)
def test_a_pointer_of_git_lfs_is_named_where_it_would_be_served(
    repository: Path, words: dict[str, str], place: str, command: str
) -> None:
    model = emulated(repository / "scenarios/models/net", POINTER)
    committed(repository)
    with pytest.raises(UsageError, match=f"{place}: a Git LFS pointer") as raised:
        overrides(**words)
    assert command in raised.value.hint
    touched(model / "12/emulated.yaml")
    (model / "12/emulated.yaml").write_text(EMULATED)
    assert overrides(model="scenarios/models/net") == [f'target.model="{model}"']


def test_flags_a_command_and_an_image_are_the_sides_own(here: Path) -> None:
    target = candidate(
        flag=["tensorflow_intra_op_parallelism=2", "--x=a.b=c"], command="serve --fast 'a b'"
    ).target
    assert target.flags == {"tensorflow_intra_op_parallelism": 2, "x": "a.b=c"}
    assert target.command == ("serve", "--fast", "a b")
    target = candidate(image="serving:1.1").target
    assert target.runs == "docker"
    assert tfservings_container(target, ports=(), mounts={})[-1] == "serving:1.1"
    with pytest.raises(BatchtuneError, match="docker starts its own program"):
        candidate(image="serving:1.1", command="serve")


def test_a_batching_file_replaces_the_parameters_and_must_name_what_the_scenario_fixes(here: Path) -> None:
    file = here / "batching.txt"
    file.write_text("max_batch_size { value: 4 }\nallowed_batch_sizes: 2\nallowed_batch_sizes: 4\n")
    with pytest.raises(UsageError, match="the scenario fixes batch_timeout_micros, but the file does not"):
        overrides(batching="batching.txt")
    file.write_text(f"{file.read_text()}batch_timeout_micros {{ value: 500 }}\n")
    batching = candidate(batching="batching.txt").configuration({}).batching
    assert (batching.max_batch_size, batching.batch_timeout_micros) == (4, 500)
    assert batching.allowed_batch_sizes == (2, 4)


@pytest.mark.parametrize("wrong", ["fixed.max_batch_siz=2", "load", "load.rate=5", "target.flags.port=x"])
def test_a_mistake_of_a_side_is_told_by_the_option_of_that_side(here: Path, wrong: str) -> None:
    with pytest.raises(UsageError) as raised:
        candidate(set=[wrong])
    assert raised.value.message.startswith(f"--candidate-set {wrong}: ")


def test_a_batching_file_of_another_server_is_read_as_a_sweep_reads_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dynamic = "dynamic_batching { max_queue_delay_microseconds: 300 preferred_batch_size: [8] }"
    (here / "config.pbtxt").write_text(f"max_batch_size: 16\n{dynamic}\n")
    batching = candidate(batching="config.pbtxt").configuration({}).batching
    assert (batching.max_batch_size, batching.batch_timeout_micros) == (16, 300)
    assert "note: config.pbtxt: preferred_batch_size has no counterpart" in capsys.readouterr().err


def test_the_help_names_every_word_of_both_sides() -> None:
    text = CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "160", "NO_COLOR": "1"}).output
    for side in ("baseline", "candidate"):
        for word in ("model", "ref", "image", "command", "batching", "flag", "set"):
            assert f"--{side}-{word}" in text
    assert f"Default: {CHECK_BLOCKS_MAX}." in " ".join(text.replace("│", " ").split())
    assert f"({CHECK_BLOCKS_MAX})" in (Path(__file__).parents[3] / "scenarios/README.md").read_text()


EMPTY = "fixed.max_batch_size is empty"
ASKED = ("--candidate-flag", "x=1")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ((*ASKED, "--baseline-ref", ""), "--baseline-ref: is empty", ""),
        ((*ASKED, "--candidate-model", " "), "--candidate-model: is empty", ""),
        ((*ASKED, "--candidate-set", ""), "--candidate-set: is empty", ""),
        (("--candidate-set", "fixed.max_batch_size="), f"--candidate-set: {EMPTY}", ""),
        (("--baseline-set", "fixed.max_batch_size= "), f"--baseline-set: {EMPTY}", ""),
        (("--candidate-flag", "x="), "--candidate-flag: x is empty", ""),
        (("--set", "fixed.max_batch_size="), f"--set: {EMPTY}", ""),
        ((*ASKED, "--candidate", "other"), "--candidate: ", "--candidate-set"),
        (("--baseline", "b.json", "--candidate", "other"), "--candidate: ", "--candidate-set"),
        (("--baseline", "b.json", "--baseline-image", "x"), "a stored baseline has no model, flags or", ""),
    ],
)
def test_words_that_make_no_side_are_refused_and_not_passed_over(
    here: Path, words: tuple[str, ...], message: str, hint: str
) -> None:
    result = CliRunner().invoke(app, ["check", str(SCENARIO_PATH), *words])
    assert isinstance(result.exception, UsageError)
    assert message in result.exception.message
    assert hint in (result.exception.hint or "")
    assert [path.name for path in here.iterdir()] == ["scenarios"]
