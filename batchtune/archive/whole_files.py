"""How is a file written so that a crash leaves the old one or the new one, and how is it told what cannot be read?"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from batchtune.errors import ArchiveError


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one: beside it, synced, renamed, folder synced.

    Raises:
        ArchiveError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing can be removed either
            beside.unlink(missing_ok=True)
        raise ArchiveError(f"cannot write {path}: {error.strerror}") from error


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ArchiveError: missing, or no JSON object.
    """
    try:
        document = json.loads(read_bytes(path))
    except ValueError as error:
        raise ArchiveError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ArchiveError(f"{path}: not a JSON object")
    return document


def read_bytes(path: Path) -> bytes:
    """All of a file.

    Raises:
        ArchiveError: missing, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
