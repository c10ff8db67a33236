"""Writes the server's messages to stderr.

None of these functions raises: the reader of stderr may have gone or its disk may be full, and the server
goes on.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {9: "\t", 10: "\\n"}
"""Control characters in a name or path of a client could write lines of their own or move the cursor."""


def say(line: str) -> None:
    """Write a line about what the server does; control characters are escaped."""
    name = "batchtune-model-server"
    _write(f"{name}: {line.translate(_ESCAPES)}\n")


def note(line: str) -> None:
    """Write "note: …", a line about something that affects measurements or that the user may not expect."""
    say(f"note: {line}")


def warn(line: str) -> None:
    """Write "warning: …", a line about an error that does not end the process."""
    say(f"warning: {line}")


def say_error(message: str, *, hint: str = "") -> None:
    """Write "error: …", and "hint: …" if there is one: why the process ends."""
    _write(f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))


def flush() -> None:
    """Flush stderr, before `os._exit`, which skips Python's own flush."""
    _write("")


def flush_stderr() -> None:
    """Flush stderr before Python exits; where that fails point it at /dev/null.

    Otherwise Python's own flush would fail, with exit code 120.
    """
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
