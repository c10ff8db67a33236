"""What is a loaded version to those who find, ask and close it?"""

from __future__ import annotations

from typing import Protocol

from batchtune.server.sessions.request import Servable


class LoadedVersion(Servable, Protocol):
    """One version; the front ends see it as a Servable."""

    def summary(self) -> str:
        """What it takes and gives, in a line."""
        ...

    def close(self) -> None:
        """Answer what is queued, free what it holds. Not on the loop."""
        ...
