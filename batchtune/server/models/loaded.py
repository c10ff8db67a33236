"""What is a loaded version, a model's or a chain's, to those who find, ask and close it?"""

from __future__ import annotations

import threading
from typing import Protocol

from batchtune.server.sessions.servable import Servable


class Holds:
    """The requests of chains that hold a version until they are answered; on the event loop but for the wait."""

    __slots__ = ("_count", "_ending", "_free")

    def __init__(self) -> None:
        self._count = 0
        self._ending = False
        self._free = threading.Event()

    def take(self) -> None:
        self._count += 1

    def leave(self) -> None:
        self._count -= 1
        if self._ending and not self._count:
            self._free.set()

    def wait_until_free(self) -> None:
        """Return when none is left of those that a version has which no request finds any more. Not on the loop."""
        self._ending = True
        if self._count:
            self._free.wait()


class LoadedVersion(Servable, Protocol):
    """One version; the front ends see it as a Servable."""

    @property
    def holds(self) -> Holds: ...

    def pads_lengths(self, signature_name: str) -> bool:
        """Whether the inputs of its batches are filled up to the longest request."""
        ...

    def summary(self) -> str:
        """What it takes and gives, in a line."""
        ...

    def close(self) -> None:
        """Answer what is queued, free what it holds. Not on the loop."""
        ...
