"""With which exit code does a command end, and what is said last?"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from batchtune.cli.app import app
from batchtune.cli.streams import ReaderGoneError, end_by_sigpipe, guard
from batchtune.errors import BatchtuneError
from batchtune.interrupts import hear_interrupts


def main() -> NoReturn:
    """The console script: run a command and exit with its code (see batchtune.errors)."""
    hear_interrupts()
    guard()
    try:
        code = _exit_code(app)
        code = _exit_code(sys.stdout.flush) or code
    except ReaderGoneError:
        end_by_sigpipe()
    except BatchtuneError as error:  # raised where one was told: stderr cannot be written
        code = error.exit_code
    sys.exit(code)


def _exit_code(run: Callable[[], object]) -> int:
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
