"""Run a program of batchtune and write which of its files executed a function, part by part.

    python tests/executed_files.py PARTS.txt MODULE MARK ARGUMENT …

MODULE is run as by `python -m`. Each call of a function named MARK ends a part: its line in PARTS.txt lists the files
since the part before. What runs only at import is left out; processes that the program starts are not seen.
"""

from __future__ import annotations

import inspect
import runpy
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import batchtune

ROOT = str(Path(batchtune.__file__).parent) + "/"


def main(parts: str, module: str, mark: str, *arguments: str) -> None:
    executed: set[str] = set()
    with Path(parts).open("w", buffering=1) as written:

        def note(frame: FrameType, event: str, _argument: Any) -> None:
            code = frame.f_code
            if event != "call" or not code.co_filename.startswith(ROOT):
                return
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function, not the body of a module or a class
                executed.add(code.co_filename.removeprefix(ROOT))
            if code.co_name == mark:
                written.write(" ".join(sorted(executed)) + "\n")
                executed.clear()

        sys.argv = [module, *arguments]
        threading.setprofile(note)
        sys.setprofile(note)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
