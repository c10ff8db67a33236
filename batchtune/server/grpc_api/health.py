"""Is the server healthy? grpc.health.v1.Health, as grpc's own service answers.

"" asks for the whole server, and so do TensorFlow Serving's services, by their full names and by the short ones under
which it registers them (server.cc); a model's name asks for that model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from batchtune.server.calls.contract import Models
from batchtune.server.grpc_api.classify_regress import parse_message
from batchtune.server.grpc_api.front_end import fail_call
from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream
from batchtune.wire.status import StatusError

_POLL_S = 0.5
_UNKNOWN_NAME_BYTES_MAX = 256
"""Of a name that is watched before it exists; a client may send 64 MiB."""


class HealthCalls:
    """Answers Check and Watch. A server that was told to `stop` is not serving."""

    def __init__(self, models: Models, services: Iterable[str]) -> None:
        self._models = models
        full = tuple(services)
        self._services = frozenset(["", *full, *(name.rpartition(".")[2] for name in full)])
        self._stopping = False
        self._watchers: dict[GrpcStream, tuple[str, str]] = {}
        self._polling = False

    def stop(self) -> None:
        """Answer NOT_SERVING from now on; the watches end with it, for a drain waits for every stream."""
        self._stopping = True
        self._tell_watchers()
        for stream in list(self._watchers):
            self._end(stream)

    def check(self, call: GrpcCall) -> None:
        """Answer Check; NOT_FOUND for a service that does not exist here."""
        try:
            status = self._status(parse_message(HealthCheckRequest, call.message).service)
            if status == "SERVICE_UNKNOWN":
                raise StatusError("NOT_FOUND", "unknown service")
        except StatusError as error:
            fail_call(call, error)
            return
        call.reply(_response(status))

    def watch(self, stream: GrpcStream) -> None:
        """Serve Watch: the status now and whenever it has changed (looked at twice a second)."""

        def start(message: bytes) -> None:
            stream.on_message = None  # a watch has one request
            try:
                service = parse_message(HealthCheckRequest, message).service
            except StatusError as error:
                stream.finish(error.code, error.message)
                return
            status = self._status(service)
            if status == "SERVICE_UNKNOWN":
                service = service.encode()[:_UNKNOWN_NAME_BYTES_MAX].decode(errors="ignore")
            self._watchers[stream] = (service, status)
            self._tell(stream, status)
            if self._stopping:
                self._end(stream)
            elif not self._polling:
                self._polling = True
                asyncio.get_running_loop().call_later(_POLL_S, self._poll)

        stream.on_message = start
        stream.on_cancel = lambda: self._forget(stream)

    def _forget(self, stream: GrpcStream) -> None:
        self._watchers.pop(stream, None)
        stream.finish("CANCELLED")

    def _end(self, stream: GrpcStream) -> None:
        self._watchers.pop(stream, None)
        stream.finish("UNAVAILABLE", "The server is shutting down")

    def _poll(self) -> None:
        self._tell_watchers()
        self._polling = bool(self._watchers)
        if self._polling:
            asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def _tell_watchers(self) -> None:
        statuses: dict[str, str] = {}
        for stream, (service, last) in list(self._watchers.items()):
            if stream.answered:
                del self._watchers[stream]
                continue
            status = statuses.get(service)
            if status is None:
                status = statuses[service] = self._status(service)
            if status != last:
                self._watchers[stream] = (service, status)
                self._tell(stream, status)

    def _tell(self, stream: GrpcStream, status: str) -> None:
        """Send a status; a client that does not read is answered by the connection, and watches no more."""
        stream.send(_response(status))
        if stream.answered:
            self._watchers.pop(stream, None)

    def _status(self, service: str) -> str:
        names = self._models.names()
        if service in self._services:
            serving = all(self._is_available(name) for name in names)
        elif service in names:
            serving = self._is_available(service)
        else:
            return "SERVICE_UNKNOWN"
        return "SERVING" if serving and not self._stopping else "NOT_SERVING"

    def _is_available(self, name: str) -> bool:
        try:
            self._models.find(name)
        except StatusError:
            return False
        return True


def _response(status: str) -> bytes:
    number = HealthCheckResponse.ServingStatus.Value(status)
    return bytes(HealthCheckResponse(status=number).SerializeToString())
