"""The exit code of a command, and what is said last."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from batchtune.cli.app import app
from batchtune.errors import BatchtuneError, UsageError
from batchtune.system import hear_interrupts

# When nobody reads our output any more, or when it cannot be written.
#
# A command whose reader goes away (`batchtune recommend | head -1`) ends as other Unix tools do: silently, by SIGPIPE.
# A full disk is reported in one line. Both are raised as an exception of our own, because typer and rich take a
# BrokenPipeError for exit code 1, and because a pipe between our processes may break too.


class ReaderGoneError(Exception):
    """Whoever read stdout or stderr has closed it."""


class _Output(io.FileIO):
    """The file below stdout or stderr; the first write that fails raises, later ones are dropped.

    Writing raises:
        ReaderGoneError: whoever read the stream has closed it.
        UsageError: it cannot be written otherwise, for instance on a full disk.
    """

    _failed = False

    def write(self, data: Any, /) -> int:
        if self._failed:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            if isinstance(error, BrokenPipeError):
                raise ReaderGoneError from error
            raise UsageError(f"the output cannot be written: {error.strerror}") from error


def guard() -> None:
    """Replace stdout and stderr, so that printing raises ReaderGoneError or UsageError in place of an
    OSError.

    A stream that was closed before the start becomes /dev/null. Characters that the stream's encoding lacks
    are replaced: by `?` on stdout, by an escape on stderr.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(2, sys.stderr)


def end_by_sigpipe() -> NoReturn:
    """End this process by SIGPIPE, as other Unix tools do: what is buffered is dropped, and a shell sees exit
    code 141."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPIPE})
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)


def _guarded(descriptor: int, present: TextIO | None) -> TextIO:
    """Return a text stream on the descriptor that writes through `_Output`, with the encoding of the
    `present` stream."""
    file = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        file,
        encoding="utf-8" if present is None else present.encoding,
        errors="replace" if descriptor == 1 else "backslashreplace",
        line_buffering=descriptor == 2 or os.isatty(descriptor),
        write_through=isinstance(present, io.TextIOWrapper) and present.write_through,
    )


def main() -> NoReturn:
    """Run the command line and exit with the code of the command or of its error (see batchtune.errors); the
    console script."""
    hear_interrupts()
    guard()
    try:
        code = _exit_code(app)
        code = _exit_code(sys.stdout.flush) or code
    except ReaderGoneError:
        end_by_sigpipe()
    except BatchtuneError as error:  # raised where one was reported: stderr cannot be written
        code = error.exit_code
    sys.exit(code)


def _exit_code(run: Callable[[], object]) -> int:
    """Call `run` and return the exit code for how it ended; an error is printed with its hint, an unexpected
    one is code 70.

    Raises:
        ReaderGoneError: stdout or stderr was closed by its reader.
    """
    try:
        run()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BatchtuneError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except ReaderGoneError:
        raise
    except Exception:  # noqa: BLE001 - the last line of defence: an unexpected failure is our bug, and says so
        traceback.print_exc()
        print("error: this is a bug in batchtune; please report it with the lines above", file=sys.stderr)
        return 70
    return 0
