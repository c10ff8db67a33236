"""A port that listens, and what its connections share: memory, for which the idlest are closed, and turns to work."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

SWEEP_S = 5.0
"""Time between two sweeps, which look for slow, silent and old connections; a sweep takes about 1 µs for each."""
_STEP_BYTES = 1_000
"""A client that sends or reads so much at once takes a step; one that opens its window byte by byte does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLimits:
    """Most bytes that a port holds in memory for all of its connections together: incomplete requests (`arriving`), and
    answers that clients have not read (`unsent`).

    Above a limit clients are cut off, beginning with the client whose last step (_STEP_BYTES sent or read) is longest
    ago. Above `…_bytes_max` any client may be cut off; above `idle_…` only clients without a step for 0.25 s; above
    `untried_…` only such clients that never took a step; above `slow_…` those that move less than 1,000 bytes/s. Slow
    clients are also cut off after `patience_s`; after half of that if one alone holds more than `slow_…`.
    """

    arriving_bytes_max: int = 2**28
    slow_arriving_bytes_max: int = 2**21
    unsent_bytes_max: int = 2**29
    idle_unsent_bytes_max: int = 2**26
    untried_unsent_bytes_max: int = 2**24
    slow_unsent_bytes_max: int = 2**21
    patience_s: float = 60.0


class Connection(Protocol):
    """A protocol: a client's connection, as the listener sees it, with the bytes held for it and the ways to end it or
    its requests."""

    @property
    def arriving_bytes(self) -> int:
        """Bytes in memory of incomplete requests."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes in memory of answers that the client has not read."""
        ...

    @property
    def waits_for_us(self) -> bool:
        """Whether nothing arrives because the server has paused reading, which is no fault of the client."""
        ...

    def refuse_arriving(self) -> None:
        """Refuse the incomplete requests."""
        ...

    def close_if_due(self) -> None:
        """Close the connection if it is too old, or has been silent for too long."""
        ...

    def drain(self) -> None:
        """Answer the requests that have arrived, accept no more, then close."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class Listener:
    """A port that listens, its open `connections`, and what they share; looks at them all once in SWEEP_S.

    `arriving`: bytes of incomplete requests; `unsent`: bytes of answers that clients have not read; `turns`: the order
    in which connections work that have more to do than fits into a slice of time. `port`: 0 before `listen`.
    """

    def __init__(self, limits: SharedLimits, now_s: Callable[[], float] = time.monotonic) -> None:
        self.connections: set[Connection] = set()
        self.arriving = SharedBytes(limits, now_s, outgoing=False)
        self.unsent = SharedBytes(limits, now_s, outgoing=True)
        self.turns = Turns()
        self.port = 0
        self._connect: Callable[[], asyncio.Protocol]
        self._sockets: list[asyncio.Server] = []
        self._all_closed = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None

    async def listen(
        self,
        connect: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listen on host:port (0: any free port, see `port`); raises OSError where that fails."""
        loop = asyncio.get_running_loop()
        self._connect = connect
        server = await loop.create_server(connect, host, port, ssl=tls, backlog=4_096)
        self._sockets.append(server)
        kernel_bytes_max = 2**17  # Of one client's answers, not on their way yet; the default is 4 MB.
        # Connections inherit the option; nobody counts what the kernel takes.
        for listening in server.sockets:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, kernel_bytes_max)
        self.port = int(server.sockets[0].getsockname()[1])
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep_on)

    async def listen_unix(self, path: str, tls: ssl.SSLContext | None) -> None:
        """Listen on a Unix socket as well; raises OSError where that fails."""
        server = await asyncio.get_running_loop().create_unix_server(self._connect, path, ssl=tls)
        self._sockets.append(server)

    def opened(self, connection: Connection) -> None:
        """Add a new connection."""
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """Remove a connection, and subtract the bytes that were held for it from the counts."""
        self.connections.discard(connection)
        self.arriving.note(connection, 0)
        self.unsent.note(connection, 0)
        if not self.connections:
            self._all_closed.set()

    def sweep(self) -> None:
        """Close connections that are silent or too old; cut off clients that are slow for too long or hold too much."""
        connections = list(self.connections)
        for connection in connections:
            connection.close_if_due()
        for connection in connections:
            self.arriving.note(connection, connection.arriving_bytes)
            self.unsent.note(connection, connection.unsent_bytes)
        self.arriving.sweep()
        self.unsent.sweep()

    async def drain(self, grace_s: float) -> bool:
        """Accept no more connections, let every client finish, then close; after `grace_s` seconds cut off the rest.

        Returns True if no client was cut off.
        """
        self._stop_listening()
        for connection in list(self.connections):
            connection.drain()
        if not self.connections:
            return True
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), grace_s)
        except TimeoutError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close at once, whatever is in flight."""
        self._stop_listening()
        for connection in list(self.connections):
            connection.abort()

    def _stop_listening(self) -> None:
        for server in self._sockets:
            server.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()

    def _sweep_on(self) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_on)
        self.sweep()


class _Account:
    """What is held for one client.

    `held_bytes`: now. `moved_bytes`: sent or read since the last sweep. `slow_sweeps`: in how many sweeps in a row it
    was slow. `step_s`: when it took its last step, or began.
    """

    __slots__ = ("held_bytes", "is_new", "moved_bytes", "slow_sweeps", "step_s")

    def __init__(self, now_s: float) -> None:
        self.held_bytes = self.moved_bytes = self.slow_sweeps = 0
        self.step_s = now_s
        self.is_new = True  # no sweep has come yet


class SharedBytes:
    """Counts the bytes held for all clients in one direction, and cuts clients off beyond `SharedLimits`.

    `outgoing`: whether the direction is answers that are not read; False: incomplete requests. A lone client may exceed
    the limits for a time: a single request or answer has limits of its own. `is_tight`: little room is left. `waiting`:
    functions to be called, once, as soon as there is room again. Only for the thread of one event loop.
    """

    def __init__(self, limits: SharedLimits, now_s: Callable[[], float], *, outgoing: bool) -> None:
        self.held_bytes = 0
        self.is_tight = False  # there is little room for more
        self.waiting: set[Callable[[], None]] = set()
        self._accounts: dict[Connection, _Account] = {}  # in the order of their last steps
        # of clients that never took one, in the order of their beginnings; only outgoing: small requests take none
        self._untried: dict[Connection, _Account] = {}
        if outgoing:
            self._bytes_max, self._slow_bytes_max = limits.unsent_bytes_max, limits.slow_unsent_bytes_max
            self._idle_bytes_max = min(limits.idle_unsent_bytes_max, self._bytes_max)
            self._untried_bytes_max = min(limits.untried_unsent_bytes_max, self._idle_bytes_max)
        else:
            self._bytes_max, self._slow_bytes_max = limits.arriving_bytes_max, limits.slow_arriving_bytes_max
            self._idle_bytes_max = self._untried_bytes_max = self._bytes_max
        # A sixteenth of what idle clients may hold is little; busy ones that read reach it for moments only.
        tight_share = 16
        self._tight_bytes = self._idle_bytes_max // tight_share
        self._patience_sweeps = max(1, round(limits.patience_s / SWEEP_S))
        self._now_s = now_s
        self._outgoing = outgoing

    def note(self, client: Connection, held_bytes: int) -> None:
        """Set how many bytes are held for a client now.

        If all clients together then hold more than the limits, clients are cut off, those first whose last step is
        longest ago.
        """
        account = self._accounts.get(client)
        if account is None:
            if not held_bytes:
                return
            account = self._accounts[client] = _Account(self._now_s())
            if self._outgoing:
                self._untried[client] = account
        growth = held_bytes - account.held_bytes
        account.held_bytes = held_bytes
        self._count(growth)
        if (growth < 0) is self._outgoing:
            account.moved_bytes += abs(growth)
            if abs(growth) >= _STEP_BYTES:
                account.step_s = self._now_s()
                del self._accounts[client]
                self._accounts[client] = account
                self._untried.pop(client, None)
        if not held_bytes:
            del self._accounts[client]
            self._untried.pop(client, None)
        elif growth > 0 and self.held_bytes > self._untried_bytes_max:
            self.make_room()

    def make_room(self) -> None:
        """Cut off clients while all together hold too much, those first whose last step is longest ago; below the limit
        for any client (`SharedLimits`) only idle ones."""
        self._end_oldest(self._untried, self._untried_bytes_max)
        self._end_oldest(self._accounts, self._idle_bytes_max)

    def _end_oldest(self, accounts: dict[Connection, _Account], idle_bytes_max: int) -> None:
        # Without a step, while bytes are held for it, a client is idle; one that reads takes a step within a
        # round trip.
        idle_s = 0.25
        while self.held_bytes > idle_bytes_max and accounts and len(self._accounts) > 1:
            client, account = next(iter(accounts.items()))
            held_bytes = client.unsent_bytes if self._outgoing else client.arriving_bytes
            if held_bytes <= account.held_bytes - _STEP_BYTES:  # its socket has taken some meanwhile
                self.note(client, held_bytes)
                continue
            if self.held_bytes <= self._bytes_max and self._now_s() - account.step_s < idle_s:
                return
            self._end(client)

    def sweep(self) -> None:
        """Find the slow clients, and cut off those that have been slow for too long, or that together hold too much.

        At most two are cut off in one turn of the event loop.
        """
        # A client that sends or reads less than this between two sweeps is slow; a modem moves more.
        least_bytes_per_s = 1_000
        self.make_room()
        slow, slow_bytes, now_s = [], 0, self._now_s()
        doomed = []
        start_s = 1.0  # Without a step, and new since the last sweep, a client is slow.
        for client, account in list(self._accounts.items()):
            starts = account.is_new and now_s - account.step_s < start_s
            moves = starts or account.moved_bytes >= least_bytes_per_s * SWEEP_S
            account.moved_bytes, account.is_new = 0, False
            if moves or (client.waits_for_us and not self._outgoing):
                account.slow_sweeps = 0
                continue
            account.slow_sweeps += 1
            holds_much = account.held_bytes > self._slow_bytes_max
            if account.slow_sweeps * (2 if holds_much else 1) >= self._patience_sweeps:
                doomed.append(client)
            else:
                slow.append(client)
                slow_bytes += account.held_bytes
        for client in slow[:-1]:
            if slow_bytes > self._slow_bytes_max:
                slow_bytes -= self._accounts[client].held_bytes
                doomed.append(client)
        self._end_all(doomed)

    def _end_all(self, clients: list[Connection]) -> None:
        # Clients that are cut off in one turn of the loop; one with 4,096 requests begun takes 0.5 ms.
        ended_at_once = 2
        for client in clients[:ended_at_once]:
            self._end(client)
        if len(clients) > ended_at_once:
            asyncio.get_running_loop().call_soon(self._end_all, clients[ended_at_once:])

    def _end(self, client: Connection) -> None:
        """Cut a client off, or refuse its incomplete requests; not where nothing is held for it any more."""
        account = self._accounts.pop(client, None)
        self._untried.pop(client, None)
        if account is not None:
            self._count(-account.held_bytes)
            if self._outgoing:
                client.abort()
            else:
                client.refuse_arriving()

    def _count(self, growth: int) -> None:
        self.held_bytes += growth
        self.is_tight = self.held_bytes > self._tight_bytes
        if self.waiting and not self.is_tight:
            waiting, self.waiting = self.waiting, set()
            for go_on in waiting:
                go_on()


# Turns: where connections have more to do than fits into a moment, each works for a slice, then waits.
#
# uvloop hands a busy socket up to 32 reads of 256 KiB in one turn of the event loop, and to work off one read of small
# frames takes some 100 ms. So a connection stops reading when its slice is over, and goes on with what it holds in a
# later turn of the loop, after whatever else was due. Connections that ask for little never wait.

STRIDE_BYTES = 1_024
"""Bytes read between two looks at the clock (0.1 µs each); a smaller read needs no look (front_ends.py)."""
SMALL_FRAME_BYTES = 64
"""Bytes that a frame counts in a stride on top of its own, unless it is HEADERS or DATA of a request in two frames.

So the clock is looked at after 14 of the smallest frames. DATA of fewer bytes than this is small (greedy_clients.py).
"""
LARGE_READ_BYTES = 1 << 16
"""After a read of so many bytes the next one waits for a turn: copying it takes 0.1 ms (greedy_clients.py, uploads)."""


class Turns:
    """A queue of the connections of one port that have more to do than fits into a slice of time.

    Only for the thread of one event loop.
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.now_s = now_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taking = False

    def slice_end_s(self) -> float:
        """Return when a slice of work that begins now ends, in seconds on the clock `now_s`."""
        # What one connection does at once; some 50 small requests (tests/benchmarks/server/greedy_clients.py).
        slice_s = 0.0005
        # What it does before its turn while others wait for theirs; 64 may come at once (greedy_clients.py, 64
        # clients).
        short_slice_s = 0.0001
        return self.now_s() + (slice_s if self._is_taking or not self._waiting else short_slice_s)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once, in a later turn of the event loop, after the connections that began to wait earlier."""
        if not self._waiting and not self._is_taking:
            asyncio.get_running_loop().call_soon(self._take)
        self._waiting.append(go_on)

    def _take(self) -> None:
        """Call the two functions that have waited for longest."""
        self._is_taking = True
        # Of those that wait, in one turn of the loop; each may read 256 KiB afterwards, for 0.2 ms
        # (greedy_clients.py).
        connections_per_turn = 2
        try:
            for _ in range(min(len(self._waiting), connections_per_turn)):
                self._waiting.popleft()()
        finally:
            self._is_taking = False
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._take)
