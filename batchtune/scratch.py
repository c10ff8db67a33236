"""Where do scratch files live, and who removes those of a process that was killed?

Each folder has a file that its owner keeps locked (flock) while it lives: the kernel unlocks it however the owner ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final, Self

PREFIX: Final = "batchtune-"
_OWNER: Final = "owner"


class ScratchFolder:
    """A new folder under the system's temporary one, removed by `close`, or by a later process once we are dead."""

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        unseen = self.path / f".{_OWNER}"
        self._lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        unseen.rename(self.path / _OWNER)  # others look at this name only: it is never there unlocked

    def close(self) -> None:
        """Remove it with all that is in it; more than once is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()


def remove_abandoned() -> None:
    """Remove the scratch folders of this user whose owner has died."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
