"""Output that nobody reads or that has no room: what other Unix tools do, for every command and every stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.archive.run import create_run
from batchtune.provenance import collect
from batchtune.scenario.reader import format_scenario
from tests.tune.answer.ledgers import SCENARIO, helping_ledger


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = create_run(SCENARIO, format_scenario(SCENARIO), root=folder / "results", provenance=collect(1))
    for trial in helping_ledger():
        run.append(trial, None)
    return folder


QUICK = [["runs"], ["--help"]]
LONG = [
    ["recommend"],
    ["recommend", "--json"],
    ["recommend", "--format", "flags"],
    ["simulate", "--quiet"],
    ["plan", "--rate", "1000", "--json", "--quiet"],
    ["sweep", "--help"],
    ["--version"],
]
"""A Python each, and their streams are those of the others."""
COMMANDS = [*QUICK, *(pytest.param(words, marks=pytest.mark.slow) for words in LONG)]


def ended(*words: str, cwd: Path, **streams: int) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(
        [sys.executable, "-m", "batchtune", *words], cwd=cwd, text=True, timeout=120, check=False, **given
    )


def nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_that_nobody_reads_ends_silently_by_sigpipe(words: list[str], folder: Path) -> None:
    writer = nobody_reads()
    done = ended(*words, cwd=folder, stdout=writer)
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE, done.stderr
    assert done.stderr == ""


def test_an_error_that_nobody_reads_ends_by_sigpipe_too(folder: Path) -> None:
    writer = nobody_reads()
    assert ended("recommend", "nowhere", cwd=folder, stderr=writer).returncode == -signal.SIGPIPE
    os.close(writer)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_disk_is_told_in_one_line(words: list[str], folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = ended(*words, cwd=folder, stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_that_was_closed_from_the_start_is_not_wanted(closed: int, folder: Path) -> None:
    command = f'exec "$0" -m batchtune runs {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (SCENARIO.name in done.stdout) == (closed == 2)


def test_an_encoding_without_our_signs_is_no_error(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchtune", "recommend"],
        cwd=folder,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"SLO p95 ? 50 ms" in b" ".join(done.stdout.split())
