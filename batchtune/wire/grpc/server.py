"""How does a process serve gRPC? A listening socket, its connections, and how both end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from batchtune.wire.grpc.held_calls import ServerLimits
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.grpc.server_connection import Dispatch, GrpcServerConnection, StreamServices
from batchtune.wire.inflating import Inflating
from batchtune.wire.shared_bytes import SWEEP_S, ClientBytes, bound_unsent


class GrpcServer:
    """A gRPC port that listens; made by `serve`."""

    def __init__(self, dispatch: Dispatch, limits: ServerLimits, streams: StreamServices) -> None:
        self.connections: set[GrpcServerConnection] = set()
        self._dispatch = dispatch
        self._limits = limits
        self._streams = streams
        self._listeners: list[asyncio.Server] = []
        self._port = 0
        self._all_closed = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._client_bytes = ClientBytes(limits.shared)
        self._inflating = Inflating(self._client_bytes.unsent)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None, backlog: int) -> None:
        """Begin to listen; raises OSError when the port is taken."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self._connection, host, port, ssl=tls, backlog=backlog)
        self._listeners.append(listener)
        bound_unsent(listener)
        self._port = int(listener.sockets[0].getsockname()[1])
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep_on)

    async def listen_unix(self, path: str, tls: ssl.SSLContext | None) -> None:
        """Listen on a Unix socket too; raises OSError where that cannot be."""
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_unix_server(self._connection, path, ssl=tls))

    async def drain(self, grace_s: float) -> bool:
        """Accept no one, let every client finish, close; after `grace_s` cut off who has not. True: none was."""
        self._close_listener()
        for connection in list(self.connections):
            connection.drain()
        self._note_closed()
        try:
            await asyncio.wait_for(self._all_closed.wait(), grace_s)
        except TimeoutError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close at once, whatever is in flight."""
        self._close_listener()
        for connection in list(self.connections):
            connection.abort()

    def sweep(self) -> None:
        """Cut off clients that are slow for too long, or that make us keep too much; let go of old ones."""
        for connection in list(self.connections):
            connection.close_if_old()
        self._client_bytes.sweep(list(self.connections))

    def _connection(self) -> GrpcServerConnection:
        return GrpcServerConnection(
            self._dispatch,
            limits=self._limits,
            connections=self.connections,
            streams=self._streams,
            on_closed=self._note_closed,
            client_bytes=self._client_bytes,
            inflating=self._inflating,
        )

    def _note_closed(self) -> None:
        if self.connections:
            self._all_closed.clear()
        else:
            self._all_closed.set()

    def _close_listener(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()

    def _sweep_on(self) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_on)
        self.sweep()


async def serve(
    host: str,
    port: int,
    dispatch: Callable[[GrpcCall], None],
    *,
    streams: StreamServices | None = None,
    limits: ServerLimits | None = None,
    tls: ssl.SSLContext | None = None,
    backlog: int = 4_096,
) -> GrpcServer:
    """Listen on host:port (0: any free port, see `GrpcServer.port`); raises OSError when that cannot be.

    `dispatch(call)` is called on the loop's thread for every unary call and must answer it sooner or later with
    `call.reply` or `call.fail`; `streams` maps the paths of streaming methods to what serves them. With `tls` the
    context must offer ALPN "h2".
    """
    server = GrpcServer(dispatch, limits or ServerLimits(), streams or {})
    await server.listen(host, port, tls, backlog)
    return server
