"""How are finished trials, and duets of a check, kept one a line, and read after a kill at any instant?"""

from __future__ import annotations

import json
import os
from pathlib import Path

from batchtune.archive.whole_files import read_bytes
from batchtune.errors import ArchiveError, BatchtuneError
from batchtune.tune.trials.trial import Trial


def append_trial(path: Path, trial: Trial) -> None:
    """Add a line to the ledger; on disk when this returns.

    Raises:
        OSError: the file cannot be written.
    """
    line = json.dumps(trial.to_dict(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    with path.open("ab") as ledger:
        _cut_torn_line(ledger.fileno(), path)
        ledger.write(line)
        ledger.flush()
        os.fsync(ledger.fileno())


def append_duet(path: Path, block: int, cpu_s: tuple[float, float]) -> None:
    """Add what a request cost both sides of a check in CPU time, in one of its blocks.

    Raises:
        ArchiveError: the file cannot be written.
    """
    line = json.dumps({"block": block, "before_cpu_s": cpu_s[0], "after_cpu_s": cpu_s[1]}) + "\n"
    try:
        with path.open("a", encoding="utf-8") as duets:
            duets.write(line)
    except OSError as error:
        raise ArchiveError(f"block {block} cannot be kept: cannot write {path}: {error.strerror}") from error


def read_trials(path: Path) -> tuple[list[Trial], tuple[str, ...]]:
    """Every finished trial, in order, and notes of what was left out.

    A last line without its newline is the trial that was being written when the run was killed: left out, and noted.

    Raises:
        ArchiveError: a line that is no trial, with `file:line`.
    """
    whole, newline, torn = read_bytes(path).rpartition(b"\n")
    notes: tuple[str, ...] = ()
    if torn:
        number = whole.count(b"\n") + (2 if newline else 1)
        notes = (f"{path}:{number}: the last line is incomplete and was left out",)
    lines = whole.split(b"\n") if newline else []
    return [_trial(line, path=path, number=number) for number, line in enumerate(lines, start=1)], notes


def _trial(line: bytes, *, path: Path, number: int) -> Trial:
    try:
        return Trial.from_dict(json.loads(line))
    except (ValueError, AttributeError, BatchtuneError) as error:
        raise ArchiveError(
            f"{path}:{number}: not a trial: {str(error).removeprefix('not a trial: ')}",
            hint="restore the file, or remove this line to do without it",
        ) from error


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Shorten the ledger to its last newline, so that the next line starts on one of its own."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.ftruncate(descriptor, data.rfind(b"\n") + 1)
