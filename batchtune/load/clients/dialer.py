"""Opens a load client's connections, within the limit of open files."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable
from typing import cast

from batchtune.errors import TargetError
from batchtune.target.endpoint import Endpoint


class Dialer:
    """Opens connections to one address, at most `connections_max` of them open or being opened.

    `on_failed(reason)` is called for each attempt that fails. The client calls `became_ready(protocol)` when it can
    use a connection, and `closed(protocol)` when it has lost one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        port: int,
        *,
        alpn: str,
        connections_max: int,
        timeout_s: float,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        on_failed: Callable[[str], None],
    ) -> None:
        self.connections_max = min(connections_max, descriptors_free())
        self.open_count = 0
        self._ready: set[asyncio.BaseProtocol] = set()
        self._transports: dict[asyncio.BaseProtocol, asyncio.BaseTransport] = {}
        self._endpoint = endpoint
        self._port = port
        self._timeout_s = timeout_s
        self._make_protocol = make_protocol
        self._on_failed = on_failed
        self._addresses = [endpoint.host]
        self._ssl: ssl.SSLContext | None = None
        self._failed = False
        self._tasks: set[asyncio.Task[None]] = set()
        if endpoint.tls is not None:
            self._ssl = endpoint.tls.context()
            self._ssl.set_alpn_protocols([alpn])

    async def resolve(self) -> None:
        """Look the host up once, so that no dial waits for it; its addresses are tried in turn until one answers.

        Raises:
            TargetError: the name does not resolve.
        """
        loop = asyncio.get_running_loop()
        try:
            resolved = await loop.getaddrinfo(self._endpoint.host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
            raise TargetError(f"host {self._endpoint.host!r} cannot be resolved: {error}") from error
        self._addresses = list(dict.fromkeys(str(row[4][0]) for row in resolved))

    def dial(self, wanted: int) -> None:
        """Begin to open connections until `wanted` are being opened or not ready yet; at most 16 of these at a time,
        and `connections_max` in all."""
        # Few, since a server that is stalled accepts only as many as its listen queue holds, often 100.
        dials_at_once_max = 16
        loop = asyncio.get_running_loop()
        on_the_way = self.open_count - len(self._ready)  # being opened, or open and not ready yet
        room = min(wanted, dials_at_once_max) - on_the_way
        for _ in range(min(room, self.connections_max - self.open_count)):
            self.open_count += 1
            task = loop.create_task(self._dial_one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def dial_all(self, wanted: int) -> None:
        """Open connections until `wanted` (at most `connections_max`) are open, and wait for them; stops after the
        first failure."""
        wanted = min(wanted, self.connections_max)
        while self.open_count < wanted and not self._failed:
            self.dial(wanted - len(self._ready))
            await asyncio.gather(*self._tasks)

    def became_ready(self, protocol: asyncio.BaseProtocol) -> None:
        """Count a connection as ready; called by the client when it can use the connection."""
        self._ready.add(protocol)

    def closed(self, protocol: asyncio.BaseProtocol) -> bool:
        """Remove a lost connection from the count; return whether it had been ready."""
        self.open_count -= 1
        self._transports.pop(protocol, None)
        was_ready = protocol in self._ready
        self._ready.discard(protocol)
        return was_ready

    def hang_up(self) -> None:
        """Give up the attempts under way, close every connection at once, and open no more."""
        self.connections_max = 0
        for task in self._tasks:
            task.cancel()
        for transport in tuple(self._transports.values()):
            cast("asyncio.Transport", transport).abort()

    async def _dial_one(self) -> None:
        loop = asyncio.get_running_loop()
        server_name = None
        if self._ssl is not None and self._endpoint.tls is not None:
            server_name = self._endpoint.tls.server_name or self._endpoint.host
        reason = "no address"
        for address in self._addresses:
            try:
                async with asyncio.timeout(self._timeout_s):
                    transport, protocol = await loop.create_connection(
                        self._make_protocol, address, self._port, ssl=self._ssl, server_hostname=server_name
                    )
            except (OSError, ssl.SSLError) as error:  # TimeoutError is an OSError
                why = "timed out" if isinstance(error, TimeoutError) else error
                reason = f"no connection to {self._endpoint.host}:{self._port}: {why}"
                continue
            self._addresses = [address]
            if not transport.is_closing():
                self._transports[protocol] = transport
            return
        self.open_count -= 1
        self._failed = True
        self._on_failed(reason)


def descriptors_free() -> int:
    """Raise the soft limit of open files to the hard one, unless that is infinite; return how many sockets this process
    may open: the limit less 64 for other files, at least 1."""
    descriptors_reserved = 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return max(1, soft - descriptors_reserved)
