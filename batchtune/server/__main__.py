"""What does `batchtune-model-server` do with its command line?"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from importlib.metadata import version

from batchtune.errors import UsageError
from batchtune.server.flags import help_text, parse_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code: 0 stopped, 1 could not serve, 2 wrong flags or files."""
    try:
        command = parse_flags(sys.argv[1:] if argv is None else argv)
        if command.wants == "help":
            sys.stdout.write(help_text())
            return 0
        if command.wants == "version":
            sys.stdout.write(f"batchtune-model-server {version('batchtune')}\n")
            return 0
        for note in command.notes:
            sys.stderr.write(f"{note}\n")
        import uvloop

        from batchtune.server.model_server import ModelServer

        server = ModelServer(command.flags)
    except UsageError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return error.exit_code
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(server.run())


if __name__ == "__main__":
    sys.exit(main())
