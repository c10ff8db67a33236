"""A server process that lasts as long as a test looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from batchtune.target.process import ServerProcess
from tests.waiting import wait_until


@contextmanager
def running_process(command: Sequence[str], *, log_path: Path, **options: Any) -> Iterator[ServerProcess]:
    process = ServerProcess(log_path=log_path, **options)
    try:
        process.launch(command)
        yield process
    finally:
        process.stop()


@contextmanager
def answering_process(command: Sequence[str], url: str, *, log_path: Path) -> Iterator[ServerProcess]:
    with running_process(command, log_path=log_path) as process:
        wait_until(lambda: answers(url))
        yield process


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(url).status_code)
    except httpx.HTTPError:
        return False
