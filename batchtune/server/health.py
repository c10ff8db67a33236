"""Is the server healthy? grpc.health.v1.Health, as grpc's own service answers.

"" asks for the whole server; a model's name, or one of TensorFlow Serving's services, asks for that part.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchtune.server.grpc_call import UnaryCall, fail_call
from batchtune.server.grpc_inference import parse_message
from batchtune.server.served_models import Models
from batchtune.wire.protos import HealthCheckRequest, HealthCheckResponse
from batchtune.wire.status import StatusError


class HealthCalls:
    """Answers Check. A server that was told to `stop` is not serving."""

    def __init__(self, models: Models, services: Iterable[str]) -> None:
        self._models = models
        self._services = frozenset(["", *services])
        self._stopping = False

    def stop(self) -> None:
        """Tell whoever asks that this server is going away."""
        self._stopping = True

    def check(self, call: UnaryCall) -> None:
        """Answer Check; NOT_FOUND for a service that does not exist here."""
        try:
            service = parse_message(HealthCheckRequest, call.message).service
            serving = self._is_serving(service)
        except StatusError as error:
            fail_call(call, error)
            return
        status = HealthCheckResponse.ServingStatus.Value("SERVING" if serving else "NOT_SERVING")
        call.reply(HealthCheckResponse(status=status).SerializeToString())

    def _is_serving(self, service: str) -> bool:
        names = self._models.names()
        if service in self._services:
            return not self._stopping and all(self._is_available(name) for name in names)
        if service in names:
            return not self._stopping and self._is_available(service)
        raise StatusError("NOT_FOUND", "unknown service")

    def _is_available(self, name: str) -> bool:
        try:
            self._models.find(name)
        except StatusError:
            return False
        return True
