"""The command line: lists the commands, runs one, and exits with its code, or the one of its error.

Nothing heavy is imported here: every command imports the rooms it needs, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn, TextIO

import typer

from batchtune.cli.arguments.options import examples
from batchtune.cli.command_line import commands
from batchtune.errors import BatchtuneError, UsageError
from batchtune.system import hear_interrupts

REMOVED: Final[Mapping[str, str]] = {
    "plan --exact": "a plan reports its accuracy; leave a margin with --slo-… where the limit is near",
    "plan --exact-time": "leave it out: a plan simulates a pool of 16 replicas at most",
    "plan --fleet": "leave it out: a plan simulates on this machine",
    "plan --profile": "plan for the peak with --rate, and once more for each rate that matters",
    "plan --detect": "leave it out: until they are noticed, dead replicas lose their share of the requests",
    "sweep --strategy": "use --set search.strategy=NAME",
    "sweep --parallel": "use --set search.parallel=N",
    **dict.fromkeys(
        (f"{name} --fleet" for name in ("sweep", "load", "compare", "check")),
        "use --set load.fleet.ray=ADDRESS",
    ),
    **dict.fromkeys(
        (f"{name} --fleet-workers" for name in ("sweep", "load", "compare", "check")),
        "use --set load.fleet.workers=N",
    ),
}
"""Options that earlier versions had, by command and name, each with what to do instead."""


def refuse_removed(words: Sequence[str]) -> None:
    """Check the words after `batchtune`, the command's name first.

    Raises:
        UsageError: an option that no longer exists; the hint says what to use.
    """
    for word in words[1:]:
        hint = REMOVED.get(f"{words[0]} {(option := word.partition('=')[0])}")
        if hint is not None:
            raise UsageError(f"{option}: this option of {words[0]} no longer exists", hint=hint)


def _end(code: int | None, **_options: object) -> None:
    """Exit with the code that a command returned."""
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="batchtune",
    result_callback=_end,
    help="Find the best batching parameters for a model server, with reason and confidence.",
    epilog=examples("init --example quickstart", "sweep quickstart.yaml", "recommend --slo-p95 20ms"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.add_typer(commands)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from batchtune import __version__

        typer.echo(f"batchtune {__version__}")
        raise typer.Exit


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
        code = _exit_code(lambda: refuse_removed(sys.argv[1:])) or _exit_code(app)
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
        if ended.__context__ is not None and isinstance(ended.__context__.__cause__, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)  # typer says nothing
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
