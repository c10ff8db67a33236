"""Does a newcomer get a scenario without a checkout, and nothing that is there overwritten?"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batchtune.cli.app import app
from batchtune.errors import UsageError
from batchtune.scenario.examples import example_names, read_example
from batchtune.scenario.reader import read_scenario


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def batchtune(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("words", [("init", "--example"), ("init",)])
def test_examples_are_listed_a_line_each(words: tuple[str, ...]) -> None:
    lines = batchtune(*words).stdout.splitlines()
    assert [line.split()[0] for line in lines] == example_names()
    assert all(line.endswith("?") for line in lines)


def test_an_example_is_written_and_the_next_command_named() -> None:
    done = batchtune("init", "--example", "quickstart")
    assert done.exit_code == 0
    assert done.stdout.startswith("quickstart.yaml: ")
    assert "next: batchtune sweep quickstart.yaml" in done.stderr
    assert read_scenario(Path("quickstart.yaml")).name == "quickstart"


def test_an_example_is_written_where_asked() -> None:
    done = batchtune("init", "--example", "imdb-benchmark", "--output", "a b.yaml")
    assert "next: batchtune compare 'a b.yaml'" in done.stderr
    assert "batchtune compare 'a b.yaml'" in Path("a b.yaml").read_text()


def test_an_example_goes_to_stdout() -> None:
    done = batchtune("init", "--example", "quickstart", "-o", "-")
    assert done.stdout == read_example("quickstart").text_for("quickstart.yaml")
    assert not list(Path().iterdir())


def test_no_file_is_overwritten() -> None:
    Path("quickstart.yaml").write_text("mine")
    done = batchtune("init", "--example", "quickstart")
    assert isinstance(done.exception, UsageError)
    assert "quickstart.yaml: is there already" in done.exception.message
    assert Path("quickstart.yaml").read_text() == "mine"


def test_a_folder_that_is_not_there_is_named() -> None:
    done = batchtune("init", "--example", "quickstart", "-o", "no/where.yaml")
    assert isinstance(done.exception, UsageError)
    assert "no/where.yaml: cannot be written: No such file or directory" in done.exception.message


def test_a_name_without_the_flag_is_told_the_flag() -> None:
    done = batchtune("init", "quickstart")
    assert isinstance(done.exception, UsageError)
    assert "init --example quickstart" in done.exception.hint
