"""How does the process listen, for gRPC and for REST, and how does it stop listening?"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from batchtune.server.flags import ServerFlags
from batchtune.server.grpc_api.services import GrpcOptions, make_grpc_api
from batchtune.server.log import say
from batchtune.server.metrics.counters import Metrics
from batchtune.server.models.batching_control import BatchingControl
from batchtune.server.models.repository import ModelRepository
from batchtune.server.rest.app import RestOptions, make_app
from batchtune.server.rest.listener import RestServer, serve_rest
from batchtune.wire.grpc.server import GrpcServer, serve
from batchtune.wire.grpc.server_limits import ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnds:
    """What listens; None: that protocol is off."""

    host: str
    grpc: GrpcServer | None
    rest: RestServer | None
    announce_stop: Callable[[], None]

    def addresses(self) -> str:
        """Such as `gRPC on 127.0.0.1:8500, REST off`."""
        named = (("gRPC", self.grpc), ("REST", self.rest))
        return ", ".join(f"{name} on {self.host}:{end.port}" if end else f"{name} off" for name, end in named)

    async def drain(self, grace_s: float) -> None:
        """Take no more requests, let those under way end, close; cut off what is left after `grace_s`."""
        self.announce_stop()
        ends = [end.drain(grace_s) for end in (self.grpc, self.rest) if end is not None]
        await asyncio.gather(*ends)


async def listen(
    flags: ServerFlags,
    repository: ModelRepository,
    metrics: Metrics,
    control: BatchingControl,
    *,
    monitoring_path: str | None,
    grpc_limits: ServerLimits,
    tls: ssl.SSLContext | None,
) -> FrontEnds:
    """Bind the ports and the socket that the flags name.

    Raises:
        OSError: one cannot be bound; the message says which.
    """
    grpc_options = GrpcOptions(
        serialize_as_content=flags.enable_serialization_as_tensor_content,
        check_methods=flags.enable_signature_method_name_check,
        health=flags.enable_grpc_healthcheck_service,
        reflection=flags.enable_grpc_reflection,
    )
    rest_options = RestOptions(
        timeout_ms=flags.rest_api_timeout_in_ms,
        cors=flags.rest_api_enable_cors_support,
        monitoring_path=monitoring_path,
        tuning=control if flags.enable_tuning_api else None,
        check_methods=flags.enable_signature_method_name_check,
        gzip_answers=flags.rest_api_enable_gzip_answers,
        body_bytes_max=flags.rest_api_max_body_bytes,
    )
    grpc, rest, announce_stop = None, None, _nothing
    where = f"{flags.host}:{flags.port}"
    try:
        if flags.port:
            api = make_grpc_api(repository, metrics, options=grpc_options)
            announce_stop = api.announce_stop
            grpc = await serve(
                flags.host, flags.port, api.dispatch, streams=api.streams, limits=grpc_limits, tls=tls
            )
            if flags.grpc_socket_path:
                where = f"unix:{flags.grpc_socket_path}"
                await grpc.listen_unix(flags.grpc_socket_path, tls)
                say(f"gRPC on {where} too")
        if flags.rest_api_port:
            where = f"{flags.host}:{flags.rest_api_port}"
            app = make_app(repository, metrics, options=rest_options)
            rest = await serve_rest(app, flags.host, flags.rest_api_port)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        raise OSError(f"cannot listen on {where}: {reason}") from error
    return FrontEnds(host=flags.host, grpc=grpc, rest=rest, announce_stop=announce_stop)


def _nothing() -> None:
    """There is no health service to tell."""
