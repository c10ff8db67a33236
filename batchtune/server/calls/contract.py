"""What do the front ends need to know of models? Met by models.repository and models.servable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from batchtune.server.sessions.request import Servable

Outputs = Mapping[str, NDArray[Any]]


class VersionStatus(Protocol):
    """The life of one version."""

    @property
    def version(self) -> int:
        """Its number."""
        ...

    @property
    def state(self) -> str:
        """START, LOADING, AVAILABLE, UNLOADING or END."""
        ...

    @property
    def error_code(self) -> str:
        """gRPC's name; OK unless loading failed."""
        ...

    @property
    def error_message(self) -> str:
        """What went wrong, "" if nothing."""
        ...


class Models(Protocol):
    """All models of the server. Every method raises StatusError with TensorFlow Serving's text."""

    def find(self, name: str, *, version: int | None = None, label: str | None = None) -> Servable:
        """The version that serves: the one named or labelled, else the latest."""
        ...

    def statuses(self, name: str, *, version: int | None = None) -> Sequence[VersionStatus]:
        """The state of one version or of all."""
        ...

    def reload_config(self, config: Any) -> None:
        """Serve what a ModelServerConfig lists; returns when that is so. Called from a thread of its own."""
        ...

    def names(self) -> Sequence[str]:
        """The models configured now."""
        ...
