"""How does the REST API listen, and how does it stop? A listening socket, its connections, and their sweep."""

from __future__ import annotations

import asyncio

from batchtune.server.rest.connection import RestConnection, RestService
from batchtune.server.rest.parser import RestLimits
from batchtune.wire.shared_bytes import SWEEP_S, ClientBytes, bound_unsent


class RestServer:
    """A REST port that listens; made by `serve_rest`."""

    def __init__(self, service: RestService, limits: RestLimits) -> None:
        self.open_connections: set[RestConnection] = set()
        self._service = service
        self._limits = limits
        self._listener: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._all_closed = asyncio.Event()
        self._port = 0
        self._client_bytes = ClientBytes(limits.shared)
        service.share(self._client_bytes.unsent)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self.open_connections)

    async def listen(self, host: str, port: int, backlog: int) -> None:
        """Begin to listen; raises OSError when the address cannot be bound."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, host, port, backlog=backlog)
        bound_unsent(self._listener)
        self._port = int(self._listener.sockets[0].getsockname()[1])
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep_on)

    async def drain(self, grace_s: float = 10.0) -> None:
        """Stop accepting, finish the requests under way, close; what is left after `grace_s` is cut off."""
        if self._listener is not None:
            self._listener.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in list(self.open_connections):
            connection.drain()
        self._note_closed()
        try:
            await asyncio.wait_for(self._all_closed.wait(), grace_s)
        except TimeoutError:
            for connection in list(self.open_connections):
                connection.abort()
        self._service.close()

    def sweep(self) -> None:
        """Close idle and stalled connections, and those that make us keep too much."""
        connections = list(self.open_connections)
        for connection in connections:
            connection.close_if_silent()
        self._client_bytes.sweep(connections)

    def _connection(self) -> RestConnection:
        return RestConnection(
            self._service,
            limits=self._limits,
            connections=self.open_connections,
            on_closed=self._note_closed,
            client_bytes=self._client_bytes,
        )

    def _note_closed(self) -> None:
        if self.open_connections:
            self._all_closed.clear()
        else:
            self._all_closed.set()

    def _sweep_on(self) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_on)
        self.sweep()


async def serve_rest(
    service: RestService, host: str, port: int, *, limits: RestLimits | None = None, backlog: int = 4096
) -> RestServer:
    """Listen on host and port (0: any free one) in the running loop.

    Raises:
        OSError: the address cannot be bound.
    """
    server = RestServer(service, limits or RestLimits())
    await server.listen(host, port, backlog)
    return server
