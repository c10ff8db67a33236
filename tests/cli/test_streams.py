"""Output that nobody reads or that has no room: what other Unix tools do, for every command and every stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import kept_run
from tests.tune.answer.ledgers import SCENARIO


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    kept_run(folder / "results")
    return folder


LONG = (
    "--help",
    "recommend",
    "recommend --json",
    "recommend --format flags",
    "simulate --quiet",
    "plan --rate 1000 --json --quiet",
    "sweep --help",
    "--version",
)
"""A Python each, and their streams are those of the others."""
COMMANDS = ["runs", *(pytest.param(words, marks=pytest.mark.slow) for words in LONG)]


def ended(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    given: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "encoding": "utf-8",
        **options,
    }
    return subprocess.run(words, cwd=cwd, timeout=120, check=False, **given)


BATCHTUNE = (sys.executable, "-m", "batchtune")


def nobody_reads() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_that_nobody_reads_ends_silently_by_sigpipe(words: str, folder: Path) -> None:
    writer = nobody_reads()
    done = ended(*BATCHTUNE, *words.split(), cwd=folder, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_an_error_that_nobody_reads_ends_by_sigpipe_too(folder: Path) -> None:
    writer = nobody_reads()
    done = ended(*BATCHTUNE, "recommend", "nowhere", cwd=folder, stderr=writer)
    os.close(writer)
    assert done.returncode == -signal.SIGPIPE


@pytest.mark.parametrize("words", COMMANDS)
def test_a_full_disk_is_told_in_one_line(words: str, folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = ended(*BATCHTUNE, *words.split(), cwd=folder, stdout=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_that_was_closed_from_the_start_is_not_wanted(closed: int, folder: Path) -> None:
    done = ended("sh", "-c", f'exec "$0" -m batchtune runs {closed}>&-', sys.executable, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (SCENARIO.name in done.stdout) == (closed == 2)


@pytest.mark.slow
def test_an_encoding_without_our_signs_is_no_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = ended(*BATCHTUNE, "recommend", cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert "SLO p95 ? 50 ms" in " ".join(done.stdout.split())
