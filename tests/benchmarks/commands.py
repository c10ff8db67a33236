"""Runs commands of this checkout as a user does, each a child process, for the benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
END_S = 20.0
"""For an interrupted command to stop its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that ended; `document` is what it printed as JSON, {} for nothing."""

    code: int
    document: Any
    errors: str
    seconds: float

    def or_exit(self) -> Any:
        """The document; without one, or with an error in it, the benchmark ends with what the command said."""
        if not self.document or "error" in self.document:
            sys.exit(f"exit code {self.code}: {self.errors[-2000:]}")
        return self.document


def batchtune(*words: object, cwd: Path, within_s: float = 1800.0) -> Ended:
    """Run `batchtune WORDS --json`; after `within_s` it is interrupted, then killed with all it started."""
    started_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "batchtune", *map(str, words), "--json"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = child.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        printed, errors = _interrupted(child)
    except BaseException:
        _interrupted(child)
        raise
    seconds = time.monotonic() - started_s
    return Ended(code=child.returncode, document=_document(printed), errors=errors, seconds=seconds)


def _interrupted(child: subprocess.Popen[str]) -> tuple[str, str]:
    for how in (signal.SIGINT, signal.SIGKILL):
        os.killpg(child.pid, how)
        try:
            return child.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError(f"process {child.pid} does not end")


def _document(printed: str) -> Any:
    try:
        return json.loads(printed)
    except json.JSONDecodeError:
        return {}
