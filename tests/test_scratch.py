"""Scratch folders: gone with their owner, however it ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from batchtune.cli.commands.run_sweep import _beside_others
from batchtune.system import ScratchFolder, remove_abandoned

KILLED = """
import os, signal
from batchtune.system import ScratchFolder

folder = ScratchFolder()
(folder.path / "server.log").write_text("words")
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False)
    abandoned = Path(done.stdout.strip())
    assert (abandoned / "server.log").is_file()
    with ScratchFolder() as folder:
        assert not abandoned.exists()
        assert folder.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_living_process_stays() -> None:
    with ScratchFolder() as folder:
        remove_abandoned()
        assert folder.path.is_dir()
    assert not folder.path.exists()
    folder.close()


def test_a_sweep_tells_of_another_process_that_measures_on_its_cpus() -> None:
    code = "import sys; from batchtune.system import ScratchFolder as S; s = S(); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        assert remove_abandoned() == {other.pid}
        assert _beside_others().startswith(f"another batchtune (process {other.pid}) runs on these CPUs")
        other.communicate()
    assert _beside_others() == ""


def test_what_is_not_a_scratch_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "batchtune-notes").mkdir()
    (tmp_path / "batchtune-file").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("1\n")
    (tmp_path / "batchtune-link").symlink_to(elsewhere)
    remove_abandoned()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"batchtune-file", "batchtune-link", "batchtune-notes", "elsewhere"}
