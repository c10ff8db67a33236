"""How does the REST API listen: uvicorn's HTTP/1.1 protocol on the running loop, without uvicorn's own server.

uvicorn.Server would install signal handlers and poll ten times a second; the process has its own ways for both.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import uvicorn
from uvicorn.server import ServerState

from batchtune.server.rest_api import RestApi
from batchtune.server.rest_protocol import RestProtocol

_POLL_S = 0.02
_SWEEP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestLimits:
    """Connections that rest longer than `idle_s` are closed, and so are those that leave a request unfinished
    without sending anything for `stalled_s`."""

    idle_s: float = 3600.0
    stalled_s: float = 60.0


class RestServer:
    """A listening REST API; `port` is the actual one."""

    def __init__(self, server: asyncio.Server, state: ServerState, limits: RestLimits) -> None:
        self._server = server
        self._state = state
        self._limits = limits
        self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        self.port: int = server.sockets[0].getsockname()[1]

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._state.connections)

    async def drain(self, grace_s: float = 10.0) -> None:
        """Stop accepting, finish the requests under way, close; what is left after `grace_s` is cut off."""
        self._server.close()
        self._sweep_timer.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + grace_s
        while (self._state.connections or self._state.tasks) and loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            if isinstance(connection, RestProtocol):
                connection.transport.abort()

    def _sweep(self) -> None:
        """Close idle and stalled connections; one timer for all of them."""
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(_SWEEP_S, self._sweep)
        for connection in list(self._state.connections):
            if isinstance(connection, RestProtocol):
                connection.close_if_silent(idle_s=self._limits.idle_s, stalled_s=self._limits.stalled_s)


async def serve_rest(
    app: RestApi, host: str, port: int, *, limits: RestLimits | None = None, backlog: int = 4096
) -> RestServer:
    """Listen on host and port (0: any free one) in the running loop.

    Raises:
        OSError: the address cannot be bound.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        interface="asgi3",
        server_header=False,
        date_header=False,
    )
    config.load()
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line for every malformed request
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: RestProtocol(config, state, app), host, port, backlog=backlog)
    return RestServer(server, state, limits or RestLimits())
