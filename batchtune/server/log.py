"""Writes what the server says on stderr.

To say something never raises: who reads it may have gone, its disk may be full, and neither is a reason to stop
serving.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t", 10: "\\n"}
"""Control characters, with which a name or path that a client chose would write lines of its own or move the cursor."""


def say(line: str) -> None:
    """Write a line about what the server does to stderr."""
    name = "batchtune-model-server"
    _write(f"{name}: {line.translate(_ESCAPES)}\n")


def note(line: str) -> None:
    """Write a line about what may surprise whoever measures this server."""
    say(f"note: {line}")


def warn(line: str) -> None:
    """Write a line about what went wrong and did not end the process."""
    say(f"warning: {line}")


def say_error(message: str, *, hint: str = "") -> None:
    """Write why the process ends."""
    _write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))


def flush() -> None:
    """Flush stderr, before `os._exit`, which skips Python's own flush."""
    _write("")


def let_go() -> None:
    """Flush stderr before Python exits, or point it at /dev/null: Python's own flush would fail (exit code 120) where
    nobody reads it."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            stream.flush()


def _write(text: str) -> None:
    stream = sys.stderr
    if stream is None:  # closed by whoever started the process
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return
