"""Locks a running server against other sweeps, and keeps what it had before a sweep that was killed.

A file of this user's for each server, whatever folder a sweep is started in: locked (flock) while a process changes the
server, and holding what is to be put back until that is done. The kernel unlocks it however the process ends; what it
holds then is what the server had, and not what is found there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from batchtune.batching.triton_config import found_batching
from batchtune.errors import TargetError


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalModel:
    """A model as it was before the first change; `loaded` False: it was in the repository, and not served, and `config`
    is what it has when it is loaded from its own files, empty until then.

    `attached` False: the server was launched for the run, and nothing has to be put back.
    """

    model: str
    rest_url: str
    loaded: bool
    config: Mapping[str, Any]
    attached: bool = True
    restored: bool = False

    def words(self) -> str:
        """What it ran with; of a server of kind http what it had."""
        if self.config.keys() == {"file", "document"}:
            return "the parameters from before the run"
        return found_batching(self.config).words() if self.loaded else "not served"

    def to_dict(self) -> dict[str, Any]:
        names = ("model", "rest_url", "loaded", "attached", "restored")
        return {**{name: getattr(self, name) for name in names}, "config": dict(self.config)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ValueError: it is not such a document.
        """
        if not isinstance(document.get("config"), dict) or not isinstance(document.get("rest_url"), str):
            raise ValueError("config must be an object and rest_url a text")
        try:
            return cls(**document)
        except TypeError as error:
            raise ValueError(str(error)) from error


def state_folder() -> Path:
    """Return the folder of the files that say what is to be put back on running servers:
    $XDG_STATE_HOME/batchtune/servers."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "batchtune" / "servers"


class Claim:
    """The right of this process to change one server."""

    def __init__(self, address: str, model: str) -> None:
        self._server = f"{model} at {address}"
        name = hashlib.sha256(f"{address.replace('localhost', '127.0.0.1')} {model}".encode()).hexdigest()
        self._path = state_folder() / f"{name[:24]}.json"
        self._lock = -1

    @property
    def held(self) -> bool:
        return self._lock >= 0

    def hold(
        self, original: OriginalModel | None, on_event: Callable[[str], None] = lambda _text: None
    ) -> OriginalModel | None:
        """Lock the server against other sweeps. Returns what a killed process noted there and did not put back, None:
        nothing.

        That is the `original`, else what a killed process found there and did not put back, which is told.

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
            return original
        if original is not None or not isinstance(kept, dict):
            return original
        left = OriginalModel.from_dict(kept)
        on_event(
            f"a sweep of {left.model} at {left.rest_url} was killed and left its trial's parameters there; "
            f"at the end it gets back {left.words()}"
        )
        return left

    def keep(self, original: OriginalModel) -> None:
        """Write down what is to be put back on the server; on disk when this returns."""
        self._write(json.dumps(original.to_dict()).encode())

    def settle(self) -> None:
        """Note that the server has been put back."""
        self._write(b"")

    def release(self) -> None:
        """Unlock the server, so that others may change it; more than once is fine."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, content: bytes) -> None:
        if self._lock >= 0:
            os.pwrite(self._lock, content, 0)
            os.truncate(self._lock, len(content))
            os.fsync(self._lock)
