"""Where does a server write what it says, and how much of that is kept?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

HEAD_BYTES: Final = 2**18
TAIL_BYTES: Final = 3 * 2**18
"""Of a longer log the start (flags, devices, the load of the model) and the end are kept: 1 MiB in all."""

WRITTEN_BYTES_MAX: Final = 2**24
"""A server that says a line for each request writes this much in minutes; its scratch file then starts again."""


class ServerLog:
    """The scratch file that a server appends to, and from `keep_in` on a bounded copy of it elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: Path | None = None
        self._copied_bytes = 0

    def keep_in(self, path: Path) -> None:
        """Append what was said so far to this file; each `copy` adds the rest."""
        self.kept = path
        self.copy()

    def copy(self) -> None:
        """Bring the kept file up to date. A folder that cannot be written costs the log, and no measurement."""
        if self.kept is None:
            return
        with contextlib.suppress(OSError):
            added = self._new_bytes()
            if added:
                before = self.kept.read_bytes() if self.kept.exists() else b""
                self.kept.write_bytes(_bounded(before + added))

    def _new_bytes(self) -> bytes:
        with self.path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self._copied_bytes, size - HEAD_BYTES - TAIL_BYTES))
            added = log.read(HEAD_BYTES + TAIL_BYTES)
            self._copied_bytes = log.tell()
        if size > WRITTEN_BYTES_MAX:
            os.truncate(self.path, 0)  # the server appends, so it goes on at the new end
            self._copied_bytes = 0
        return added


def _bounded(text: bytes) -> bytes:
    if len(text) <= HEAD_BYTES + TAIL_BYTES:
        return text
    return text[:HEAD_BYTES] + b"\n[batchtune left out the middle of this log]\n" + text[-TAIL_BYTES:]
