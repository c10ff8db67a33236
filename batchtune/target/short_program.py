"""What does a short program say, within a bounded time?"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchtune.target.process import ending_with_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What it wrote to stdout, stripped; `failure` says why that is no answer, "" where it is one."""

    output: str = ""
    failure: str = ""


def ask(command: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run a program to its end, `environment` added to ours; after `limit_s` it is killed."""
    try:
        ended = subprocess.run(
            [*ending_with_us(), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return Answer(failure=f"no answer within {limit_s:g} s")
    except OSError as error:
        return Answer(failure=f"cannot be started: {error.strerror}")
    if ended.returncode == 0:
        return Answer(output=ended.stdout.strip())
    if ended.returncode < 0:
        return Answer(failure=f"ended by {signal.Signals(-ended.returncode).name}")
    last_words = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
    return Answer(failure=last_words[0].strip()[:200])
