"""Locks a running server against other sweeps, and keeps what it had before a sweep that was killed.

For each server there is one file of this user's, whatever folder a sweep is started in. It is locked (flock)
while a process changes the server, and holds what is to be put back until that is done. The kernel unlocks it
however the process ends; a file that is not empty then says what the server had before, which is not what it
has now.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchtune.batching.triton_config import found_batching
from batchtune.errors import TargetError
from batchtune.plain_values import from_plain, to_plain
from batchtune.system import interrupts_noted


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalModel:
    """A model as it was on the server before the first change."""

    model: str
    rest_url: str
    # False: it was in the repository, but not served.
    loaded: bool
    # Its configuration in Triton's JSON; of a model that was not served that of its own files, empty until it
    # is loaded. Of a server of kind http what `Settings.original` returns.
    config: Mapping[str, Any]
    # False: the server was launched for the run, and nothing has to be put back.
    attached: bool = True
    # Whether it was put back.
    restored: bool = False
    # Folder of the run that changed it first; "": not known.
    run: str = ""

    def words(self) -> str:
        """Describe in words what the model ran with, for a message: its batching on Triton, `not served`, or `the
        parameters from before the run`."""
        if self.config.keys() >= {"file", "document"}:
            return "the parameters from before the run"
        return found_batching(self.config).words() if self.loaded else "not served"

    def left_words(self, original: str) -> str:
        """Describe, for a message, that the server has a trial's parameters; `original`: what it gets back, in
        words."""
        return f"{self._sweep()} left its trial's parameters there; at the end it gets back {original}"

    def replaced_words(self, now: str) -> str:
        """Describe, for a message, that somebody replaced the parameters of a sweep's last trial by those of `now`, in
        words."""
        return (
            f"{self._sweep()} did not restore it; {now} was set since, by somebody else, and is what counts"
        )

    def unrestored_words(self) -> str:
        """Describe, for a message, that the server may have a trial's parameters, and what restores it."""
        restores = f"`batchtune restore {shlex.quote(self.run)}`" if self.run else "the next sweep of it"
        return (
            f"{self._sweep()} did not restore it: what is measured has the parameters of its last trial, unless others "
            f"were set since; {restores} restores it"
        )

    def _sweep(self) -> str:
        return f"an earlier sweep of {self.model} at {self.rest_url}{f' ({self.run})' if self.run else ''}"


Keep = Callable[[OriginalModel], OriginalModel | None]
"""Saves a model as it is to be put back, and returns it with the run that changed it first; None: unchanged."""


def state_folder() -> Path:
    """Return $XDG_STATE_HOME/batchtune/servers (~/.local/state by default), where files hold what running servers have
    to get back."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "batchtune" / "servers"


class Claim:
    """The right of this process to change one server, between `hold` and `release`, and what the server gets back.

    `original`: the model as it is to be put back; None: not known yet. `path`: the file of this user that records it.
    `keep`: a function that saves it in a second place; None: there is none.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        original: OriginalModel | None = None,
        on_event: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.original = original
        self.keep: Keep | None = None
        self._on_event = on_event
        self._server = f"{model} at {address}"
        name = hashlib.sha256(f"{address.replace('localhost', '127.0.0.1')} {model}".encode()).hexdigest()
        self.path = state_folder() / f"{name[:24]}.json"
        self._lock = -1

    @property
    def held(self) -> bool:
        """Whether this process has locked the server."""
        return self._lock >= 0

    def hold(self, judge: Callable[[OriginalModel], tuple[bool, str]]) -> None:
        """Lock the server against other sweeps. If an earlier process recorded what the server had and did not put it
        back, because it was killed or failed, that becomes `original`; None, if somebody has changed the server since.

        `judge`: takes that record; returns (whether the server still has what that process gave it last, words): what
        the server gets back, or what was set since, such as `max_batch_size 8`.

        Raises:
            TargetError: another process changes this server now, the file cannot be written, or the server does not
                answer.
        """
        earlier = self.lock() or self.original
        if earlier is None:
            return
        is_left, words = judge(earlier)
        self._on_event(earlier.left_words(words) if is_left else earlier.replaced_words(words))
        self.original = earlier if is_left else None
        if not is_left:
            self._settle(earlier)

    def lock(self) -> OriginalModel | None:
        """Lock the server against other sweeps. Return what an earlier process recorded and did not put back; None: no
        such record.

        Raises:
            TargetError: another process changes this server now, or the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TargetError(
                f"cannot write {self.path}: {error.strerror}",
                hint="it stores the server's settings until they are restored; set XDG_STATE_HOME to another folder",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise TargetError(
                f"another batchtune changes {self._server}: {self.path} is locked",
                hint="wait until it ends: it restores the settings that it found",
            ) from error
        self._lock = lock
        try:
            kept = json.loads(self.path.read_bytes() or b"null")
        except ValueError:
            return None
        return from_plain(OriginalModel, kept) if isinstance(kept, dict) else None

    def save(self, original: OriginalModel) -> OriginalModel:
        """Set `original`, save it by `keep`, and return it with the folder of the run that changed the server first."""
        self.original = (self.keep and self.keep(original)) or original
        return self.original

    def record(self, original: OriginalModel) -> None:
        """Record the model that is to be put back, by `keep` and in this user's file; it is on disk when this
        returns."""
        self._write(json.dumps(to_plain(self.save(original))).encode())

    def put_back(self, original: OriginalModel, put: Callable[[OriginalModel], object]) -> None:
        """Put the server back by `put(original)`, during which a first interrupt is ignored, and record that this was
        done.

        Raises:
            TargetError: the server is gone, or does not take it.
        """
        try:
            with interrupts_noted():
                put(original)
        except TargetError as error:
            raise TargetError(
                f"the server's original configuration was not restored: {error.message}", hint=error.hint
            ) from error
        self._settle(original)

    def settle(self) -> None:
        """Record that the server has been put back: empty this user's file."""
        self._write(b"")

    def _settle(self, original: OriginalModel) -> None:
        self.settle()
        if self.keep is not None:
            self.keep(replace(original, restored=True))

    def release(self) -> None:
        """Unlock the server, so that others may change it; does nothing where it is not locked."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self, content: bytes) -> None:
        if self._lock >= 0:
            os.pwrite(self._lock, content, 0)
            os.truncate(self._lock, len(content))
            os.fsync(self._lock)


def foreign_parameters(address: str, model: str) -> str:
    """Say in words why a server may have a trial's parameters instead of its own: another process changes it now, or a
    sweep that was killed did not restore it; "": neither is known.

    `address`: URL of the server's REST port. `model`: the model's name.
    """
    claim = Claim(address, model)
    if not claim.path.is_file():
        return ""
    try:
        earlier = claim.lock()
    except TargetError:
        return "another batchtune changes this server now, and with it what is measured"
    finally:
        claim.release()
    return "" if earlier is None else earlier.unrestored_words()


def discard_record(original: OriginalModel) -> None:
    """Empty the record of what is to be put back on the server of this model.

    Raises:
        TargetError: another process changes the server now, or the file cannot be written.
    """
    claim = Claim(original.rest_url, original.model)
    try:
        claim.lock()
        claim.settle()
    finally:
        claim.release()
