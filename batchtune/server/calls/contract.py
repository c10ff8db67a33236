"""What do the front ends need to know of models? Met by models.repository and models.servable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from batchtune.server.sessions.request import Queued
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError

Outputs = Mapping[str, NDArray[Any]]
Done = Callable[[Outputs | None, StatusError | None], None]


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
