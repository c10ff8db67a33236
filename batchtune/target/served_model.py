"""How is one of several models of a launched server seen by itself?"""

from __future__ import annotations

from dataclasses import replace

from batchtune.batching.parameters import Configuration
from batchtune.target.apply_record import ApplyRecord
from batchtune.target.endpoint import Endpoint, read_signature
from batchtune.target.telemetry import Counters
from batchtune.target.tfserving import TfServingTarget
from batchtune.wire.signature import Signature


class ServedModel:
    """A target, of one model by name; counters and process are the whole server's, which has been started."""

    def __init__(self, server: TfServingTarget, name: str, configuration: Configuration) -> None:
        self._server = server
        self._name = name
        self._configuration = configuration

    @property
    def endpoint(self) -> Endpoint:
        inside = self._server.batches_inside.get(self._name, "")
        return replace(self._server.endpoint, model_name=self._name, batches_inside=inside)

    @property
    def in_force(self) -> Configuration | None:
        return self._configuration

    def apply(self, configuration: Configuration) -> ApplyRecord:  # noqa: ARG002 a target's
        """Nothing is changed: it was started with what each of its models has."""
        return ApplyRecord(how="unchanged", seconds=0.0)

    def counters(self) -> Counters:
        return self._server.counters()

    def signature(self, name: str) -> Signature:
        return read_signature(self.endpoint, name)

    def alive(self) -> bool:
        return self._server.alive()

    def log_tail(self) -> str:
        return self._server.log_tail()
