"""Can each bundled scenario be found without a checkout, told apart by its question, and run as it is written?"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from batchtune.errors import ScenarioError, UsageError
from batchtune.scenario import examples
from batchtune.scenario.examples import Example, example_names, read_example
from batchtune.scenario.reader import parse_scenario, read_scenario
from tests.cli.in_process import answered

ROOT = Path(__file__).parents[2]


def test_the_wheel_keeps_them_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    packaged = wheel["force-include"]["scenarios"]
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "batchtune" / "scenario" / "examples.py"))
    assert examples.examples_folder() == tmp_path / packaged
    (tmp_path / "scenarios").mkdir()
    assert examples.examples_folder() == tmp_path / "scenarios"
    (tmp_path / packaged).mkdir(parents=True)
    assert examples.examples_folder() == tmp_path / packaged


def test_every_scenario_of_the_checkout_is_bundled_the_quickstart_first() -> None:
    names = example_names()
    assert names[0] == "quickstart"
    assert set(names) == {path.stem for path in (ROOT / "scenarios").glob("*.yaml")}


@pytest.mark.parametrize("name", example_names())
def test_an_example_asks_one_question_and_names_the_command_that_answers(name: str) -> None:
    example = read_example(name)
    assert example.question.endswith("?")
    assert example.question.count("?") == 1
    assert "yaml-language-server" not in example.question
    assert len(example.question) <= 105
    assert f"\n| `{name}.yaml` | " in (ROOT / "scenarios" / "README.md").read_text()
    only_loaded = "kind: external" in example.text or "\n  models:" in example.text
    assert example.command == (
        "load" if only_loaded else "compare" if "\nvariants:" in example.text else "sweep"
    )


@pytest.mark.parametrize("name", example_names())
def test_an_example_written_elsewhere_is_the_same_scenario(name: str) -> None:
    text = read_example(name).text_for("mine.yaml")
    assert parse_scenario(text) == read_scenario(ROOT / "scenarios" / f"{name}.yaml")
    assert f"scenarios/{name}.yaml" not in text
    assert "batchtune " in text
    assert " mine.yaml" in text
    assert "$schema" not in text  # the schema is not beside it


def test_an_example_without_comments_has_an_empty_question_and_may_be_named_with_its_ending() -> None:
    assert read_example("quickstart.yaml") == read_example("quickstart")
    example = Example(name="bare", text="name: bare\n")
    assert (example.question, example.command) == ("", "sweep")


@pytest.mark.parametrize("name", ["../scenarios/quickstart", "/etc/passwd", "", "quickstart/"])
def test_only_a_bundled_name_is_read(name: str) -> None:
    with pytest.raises(UsageError, match="no bundled example"):
        read_example(name)


def test_a_mistyped_example_is_told_what_there_is() -> None:
    for name, hints in (("quikstart", ["did you mean 'quickstart'?"]), ("zzz", example_names())):
        with pytest.raises(UsageError) as caught:
            read_example(name)
        assert all(hint in caught.value.hint for hint in hints)


@pytest.mark.parametrize(
    "path", ["quickstart", "quickstart.yaml", "scenarios/quickstart.yaml", "quikstart.yml"]
)
def test_a_missing_scenario_that_is_bundled_can_be_written(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScenarioError) as caught:
        read_scenario(Path(path))
    assert caught.value.message == f"{path}: no such file"
    assert caught.value.hint == "`batchtune init --example quickstart` writes that example here"


def test_a_missing_scenario_is_told_what_is_bundled(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_scenario(tmp_path / "zzz.yaml")
    assert "batchtune init --example NAME" in caught.value.hint
    assert all(name in caught.value.hint for name in example_names())


MANUAL = (ROOT / "scenarios" / "README.md").read_text()
REST = {
    "name": "rest",
    "target": {"kind": "tfserving", "model": "imdb_transformer"},
    "load": {"arrivals": "poisson"},
    "slo": {"p95": "50ms"},
    "objective": "capacity",
    "search": {"space": {"max_batch_size": [1, 8]}},
}
"""What a block of the manual that is part of a scenario leaves out."""


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", MANUAL, re.DOTALL | re.MULTILINE))
def test_each_block_of_the_manual_is_a_scenario_or_a_part_of_one(block: str, tmp_path: Path) -> None:
    keys = yaml.safe_load(block)
    rest = {} if "name" in keys else REST
    if rest and "openai" in keys.get("request", {}):
        rest = {**REST, "target": {"kind": "external", "model": "m", "rest_url": "http://127.0.0.1:8000"}}
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump({**rest, **keys}, sort_keys=False))
    read_scenario(path)
    misspelt = {**rest, **keys, "slow": keys.get("slo", {})}
    path.write_text(yaml.safe_dump(misspelt, sort_keys=False))
    with pytest.raises(ScenarioError, match="slow"):
        read_scenario(path)


@pytest.mark.parametrize(
    "command",
    sorted(
        set(re.findall(r"`batchtune ([a-z][^`…]*)`|^batchtune (\w+ scenarios/[^#\n]*)", MANUAL, re.MULTILINE))
    ),
)
def test_each_command_of_the_manual_is_one_that_batchtune_takes(
    command: tuple[str, str], tmp_path: Path
) -> None:
    """With --help at its end a command is parsed, and runs nothing: an option that does not exist ends it with 2."""
    words = shlex.split("".join(command))
    assert answered(*words, "--help", cwd=tmp_path).returncode == 0
    assert answered(*words, "--no-such-option", "--help", cwd=tmp_path).returncode == 2
