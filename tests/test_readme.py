"""The manual is true: every console line that can run here runs, in the manual's own order, from the first one on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
# Set-up that has happened before a test can run, and the test run itself.
SET_UP = ("python3 -m venv", ". .venv/bin/activate", "pip install", "pytest")


def console_commands() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    commands = [part.strip() for line in lines for part in line.split(" && ")]
    return [command for command in commands if not command.startswith(SET_UP)]


def is_quick(command: str) -> bool:
    """Whether it needs no run of the sweep, nor is one: the others take two minutes together."""
    return command.endswith("--help")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a user has, so that no run is left in the checkout."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(ROOT / "scenarios", folder / "scenarios")
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={**os.environ, "PATH": path, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


OPEN = ((5, "not confirmed"), (5, '"established": false'))
EXCUSES = {
    "load": ((6, "the host was noisy"), (5, "no verdict on the slo")),
    "plan": ((5, "warning: "),),
    "simulate": ((5, "warning: "),),
    "sweep": OPEN,
    "recommend": OPEN,
}
"""What a noisy host excuses: exit codes, and what is said with them."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=() if is_quick(command) else pytest.mark.slow)
        for command in console_commands()
    ],
)
def test_console_line_runs(command: str, folder: Path) -> None:
    done = run(command, folder)
    print(done.stdout)
    said = " ".join(f"{done.stdout} {done.stderr}".lower().split())
    excuses = [words for code, words in EXCUSES.get(command.split()[1], ()) if code == done.returncode]
    assert done.returncode == 0 or any(words in said for words in excuses), done.stderr
    assert done.stdout


@pytest.mark.slow
def test_the_quickstart_recommends_batching_for_the_real_model(folder: Path) -> None:
    if not (folder / "results").exists():
        pytest.skip("needs the sweep of the console line before it")
    document = json.loads(run("batchtune recommend --json", folder).stdout)
    if not document["established"] or document["batching_helps"] == "not distinguishable":
        pytest.skip(f"this host was too noisy to say: {document['open_questions']}")
    assert document["batching_helps"] == "yes"
    batching = document["configuration"]["batching"]
    assert batching is not None  # where the server's defaults are best, no key is set
    assert batching.get("max_batch_size", 1000) > 1
    assert document["gain_over_no_batching"]["low"] > 1.0
    run_folder = folder / document["run"]
    provenance = json.loads((run_folder / "provenance.json").read_text())
    print(json.dumps(provenance, indent=1)[:400], time.strftime("%H:%M:%S"))
    assert len((run_folder / "trials.jsonl").read_text().splitlines()) == document["trials"]


def test_both_commands_of_the_manual_do_their_own_set_up() -> None:
    commands = [line for line in README.splitlines() if line.startswith("$ python3 -m venv")]
    assert len(commands) == 2
    assert all("pip install" in command for command in commands)


def test_exit_codes_in_the_manual_are_those_of_the_errors() -> None:
    from batchtune import errors

    manual = {int(code) for code in re.findall(r"^\| (\d+) \|", RESULTS, flags=re.MULTILINE)}
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in classes if issubclass(kind, errors.BatchtuneError)}
    assert manual == codes | {0, 1, 130}


MANUALS = [
    ROOT / "README.md",
    *(ROOT / "batchtune").rglob("README.md"),
    *(ROOT / "results").rglob("README.md"),
]


@pytest.mark.parametrize(
    "manual", [*MANUALS, ROOT / "scenarios" / "README.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_that_a_manual_links_to_exist(manual: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", manual.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (manual.parent / target).exists(), target


def test_headings_that_the_manual_links_to_exist() -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", README):
        text = (ROOT / (target or "README.md")).read_text(encoding="utf-8")
        slugs = {
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        assert heading in slugs, heading


def test_a_newcomer_has_at_most_150_lines_to_read() -> None:
    assert len(README.splitlines()) <= 150
    assert not [line for line in README.splitlines() if len(line) > 100 and not line.startswith("$ ")]


def test_no_sentence_of_the_manual_is_longer_than_30_words() -> None:
    text = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^[|#!-].*$", "", text, flags=re.MULTILINE)
    sentences = re.split(r"(?<=[.:?])\s+|\n\n", prose)
    assert not [sentence for sentence in sentences if len(sentence.split()) > 30]
