"""What does a short program say, within a bounded time, or a command of the user's do, in a small environment?"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batchtune.errors import TargetError
from batchtune.target.process import ending_with_us

_VARIABLES: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
    *("SSH_AUTH_SOCK", "KUBECONFIG", "DOCKER_HOST", "DOCKER_CONTEXT"),
)
"""What programs that talk to a cluster or an engine look for; others are named in target.environment."""

_GRACE_S: Final = 1.0
_TAIL_BYTES: Final = 16_384


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


def small_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """The variables of ours that a command gets: the usual ones and those named, where they are set."""
    return {name: os.environ[name] for name in (*_VARIABLES, *names) if name in os.environ}


def run_step(
    words: Sequence[str],
    *,
    key: str,
    limit_s: float,
    environment: Mapping[str, str],
    log_path: Path,
    given: str = "",
) -> None:
    """Run a command with `given` on its stdin and return when it has ended with 0; what it says goes to the log.

    One that fails or takes longer than `limit_s` is ended with all that it started; what one that ends well leaves
    running stays. `key` is what the scenario calls it.

    Raises:
        TargetError: no such program, another exit code, or it took too long; with its last words.
    """
    if shutil.which(words[0], path=environment.get("PATH")) is None:
        place = f"it is seen from {Path.cwd()}; " if "/" in words[0] else ""
        raise TargetError(
            f"{key}: cannot start {words[0]!r}: no such program", hint=f"{place}give its whole path"
        )
    with log_path.open("ab") as log:
        begins_at = log.tell()
        try:
            process = subprocess.Popen(
                [*ending_with_us(), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            )
        except OSError as error:
            raise TargetError(f"{key}: cannot start {words[0]!r}: {error.strerror}") from error
    try:
        process.communicate(given.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        raise TargetError(
            f"{key} did not end within {round(limit_s, 2):g} s{_said(log_path, begins_at)}",
            hint="it hangs, or needs a longer target.step_timeout",
        ) from error
    except BaseException:
        _end(process)
        raise
    if process.returncode != 0:
        _end(process)
        code = process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        raise TargetError(f"{key} {how}{_said(log_path, begins_at)}")


def last_words(log_path: Path, *, begins_at: int = 0) -> str:
    """The last lines of what was said from that byte on, indented; empty: nothing."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(begins_at, log_path.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-12:])


def _said(log_path: Path, begins_at: int) -> str:
    words = last_words(log_path, begins_at=begins_at)
    return f"; its last words:\n{words}" if words else "; it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM for all of its session, a moment later SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S if number == signal.SIGTERM else None)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
