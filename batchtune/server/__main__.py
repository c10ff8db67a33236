"""The program `batchtune-model-server`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from batchtune.errors import UsageError
from batchtune.server.log import flush_stderr, say, say_error
from batchtune.server.memory import share_one_heap
from batchtune.server.server_flags import help_text, parse_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal stops the server; return the exit code.

    0: stopped, or help or version shown; 1: ports or models failed; 2: wrong flags or files. argv: the arguments; None:
    those of sys.argv.
    """
    if sys.stderr is None:  # closed by whoever started us: its number must not become a socket's
        os.open(os.devnull, os.O_WRONLY)
    try:
        return _serve(argv)
    finally:
        flush_stderr()


def _serve(argv: Sequence[str] | None) -> int:
    try:
        wanted, flags, notes = parse_flags(sys.argv[1:] if argv is None else argv)
        if wanted == "help":
            sys.stdout.write(help_text())
            return 0
        if wanted == "version":
            sys.stdout.write(f"batchtune-model-server {version('batchtune')}\n")
            return 0
        for line in notes:
            say(line)
        share_one_heap()  # before a library starts threads
        import uvloop

        from batchtune.server.model_server import ModelServer

        server = ModelServer(flags)
    except UsageError as error:
        say_error(error.message, hint=error.hint or "")
        return error.exit_code
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.run())


if __name__ == "__main__":
    sys.exit(main())
