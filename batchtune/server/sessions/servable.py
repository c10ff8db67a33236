"""What is a loaded version of a model to those who ask it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from batchtune.server.sessions.request import Done, Queued
from batchtune.wire.signature import Signature


class Servable(Protocol):
    """One loaded version of a model."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def version(self) -> int:
        """Its version number."""
        ...

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """Its signatures by name."""
        ...

    @property
    def metadata(self) -> bytes:
        """A serialised tensorflow.serving.SignatureDefMap."""
        ...

    def submit(
        self,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Done,
    ) -> Queued | None:
        """Run a request. On the loop's thread, `done(outputs, None)` or `done(None, error)` follows, unless
        StatusError is raised at once. `output_names` None: all; `deadline_ns` on CLOCK_MONOTONIC. Gives what stands
        for the request in a batching queue, if there is one."""
        ...
