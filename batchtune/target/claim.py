"""Who changes a running server now, and what did it have before a sweep that was killed?

A file of this user's for each server, whatever folder a sweep is started in: locked (flock) while a process changes the
server, and holding what is to be put back until that is done. The kernel unlocks it however the process ends; what it
holds then is what the server had, and not what is found there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchtune.errors import TargetError


def state_folder() -> Path:
    """Where such files lie: $XDG_STATE_HOME/batchtune/servers."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "batchtune" / "servers"


class Claim:
    """The right of this process to change one server."""

    def __init__(self, address: str, model: str) -> None:
        self._server = f"{model} at {address}"
        name = hashlib.sha256(f"{address.replace('localhost', '127.0.0.1')} {model}".encode()).hexdigest()
        self._path = state_folder() / f"{name[:24]}.json"
        self._lock = -1

    def hold(self) -> dict[str, Any] | None:
        """What a killed process found there and did not put back, if that is so.

        Raises:
            TargetError: another process changes this server now, or the file cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TargetError(
                f"cannot write {self._path}: {error.strerror}",
                hint="it keeps what the server had until that is put back; set XDG_STATE_HOME to another folder",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise TargetError(
                f"another batchtune changes {self._server}: {self._path} is locked",
                hint="wait until it has ended: it puts back what it found",
            ) from error
        self._lock = lock
        try:
            kept = json.loads(self._path.read_bytes() or b"null")
        except ValueError:
            return None
        return kept if isinstance(kept, dict) else None

    def keep(self, original: Mapping[str, Any]) -> None:
        """Keep what is to be put back; on disk when this returns."""
        self._write(json.dumps(original).encode())

    def settle(self) -> None:
        """Nothing is to be put back any more."""
        self._write(b"")

    def release(self) -> None:
        """Let others change the server; more than once is fine."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, content: bytes) -> None:
        if self._lock >= 0:
            os.pwrite(self._lock, content, 0)
            os.truncate(self._lock, len(content))
            os.fsync(self._lock)
