"""A server process that lasts as long as a test looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchtune.target.process import ServerProcess


@contextmanager
def running_process(command: Sequence[str], *, log_path: Path, **options: Any) -> Iterator[ServerProcess]:
    process = ServerProcess(log_path=log_path, **options)
    try:
        process.launch(command)
        yield process
    finally:
        process.stop()
