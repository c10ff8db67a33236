"""What a user reads has none of the words of an older voice: messages, help, pages, the schema."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
from click.testing import CliRunner

import batchtune
from batchtune.cli.app import app
from tests.package_trees import trees

pytestmark = pytest.mark.smoke

ROOT: Final = Path(batchtune.__file__).parent
WORDS: Final = re.compile(
    r"\b(told|kept|stands|mind|gives? way|sure)\b|sure\?|fresh (run|block)s?\b|∞|not known\]"
    r"|\b(for want of|wandered|held|anew|goes on|of yours|looked for|hoped to|at most so many|a tenth)\b",
    re.IGNORECASE,
)
APART: Final = {
    "server": "its messages are TensorFlow Serving's, and its own manual's",
    "wire": "protocols: no sentence of it reaches a user",
}
"""Folders that are not read, each with the reason."""
CODES: Final = {
    ("tune/sweep/optuna_export.py", "held"): "an attribute of a trial in Optuna's study",
    ("check/load_limits.py", "kept"): "the state of a limit, in JSON",
    ("report/check_text.py", "kept"): "that state, beside the word that is shown",
    ("report/live_view.py", "kept"): "the kind of a point, never shown",
}
"""Constants that are no text of a user, each with what they are."""


def constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is no docstring; one text each f-string, with {} for its expressions."""
    skipped: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            skipped.update(node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command, of its options, and of the commands below it."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for below, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{name} {below}".strip())


def test_no_message_has_a_word_of_the_older_voice() -> None:
    found = [
        f"{path}:{line}: {text.strip()}"
        for path, tree in trees().items()
        if Path(path).parts[0] not in APART
        for line, text in constants(tree)
        if WORDS.search(text) and (path, text) not in CODES
    ]
    assert not found, "\n".join(found)


def test_no_help_has_one() -> None:
    found = [f"{name}: {text}" for name, text in helps(typer.main.get_command(app), "") if WORDS.search(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name", ["page.css", "page.html", "page.js", "findings.toml", "sections.toml", "known_errors.toml"]
)
def test_no_page_or_text_of_a_finding_has_one(name: str) -> None:
    (path,) = ROOT.rglob(name)
    assert not WORDS.search(path.read_text(encoding="utf-8"))


def test_no_exception_is_left_over() -> None:
    assert all((ROOT / folder).is_dir() for folder in APART)
    for path, text in CODES:
        assert text in {constant for _, constant in constants(trees()[path])}, (path, text)


MANUALS: Final = (
    "README.md",
    "scenarios/README.md",
    "results/README.md",
    "docker/README.md",
    "batchtune/GLOSSARY.md",
    "batchtune/server/README.md",
)


@pytest.mark.parametrize("manual", MANUALS)
def test_a_manual_has_none_of_them(manual: str) -> None:
    lines = (ROOT.parent / manual).read_text(encoding="utf-8").splitlines()
    found_in = [f"{number}: {line}" for number, line in enumerate(lines, 1) if WORDS.search(line)]
    assert not found_in


def test_the_list_of_commands_cuts_no_summary_at_80_columns() -> None:
    listed = CliRunner().invoke(typer.main.get_command(app), ["--help"], terminal_width=80).output
    _, _, summaries = listed.partition("Commands:")
    assert "check " in summaries
    assert "..." not in summaries
