"""What the connections of a port share: bytes, of which the idlest give way, and turns of the event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_RANK = 64
"""numpy's own limit."""


def object_array(values: Sequence[Any]) -> NDArray[Any]:
    """One dimension of Python objects."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def as_bytes(value: Any) -> bytes:
    """An element of a string tensor; raises ValueError for what is neither text nor bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ValueError(f"strings are bytes or text, not {type(value).__name__}")


def little_endian(name: str) -> np.dtype[Any]:
    """The dtype of this name as it travels."""
    if name == "bfloat16":
        import ml_dtypes  # comes with tensorflow; registers the dtype with numpy

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name).newbyteorder("<")


SWEEP_S = 5.0
"""Between two looks at who moves; a look takes about 1 µs for each connection."""
BYTES_PER_S_MIN = 1_000
"""Who moves less between two sweeps is slow; a modem moves more."""
_IDLE_S = 0.25
"""Without a step, while bytes are held for it, a client is idle; one that reads takes a step within a round trip."""
_START_S = 1.0
"""Without a step, and new since the last sweep, a client is slow."""
_STEP_BYTES = 1_000
"""Moved at once; a window opened by a byte at a time is no step."""
_KERNEL_BYTES_MAX = 2**17
"""Of one client's answers, not on their way yet; the default is 4 MB."""
_ENDED_AT_ONCE = 2
"""Clients that are cut off in one turn of the loop; one with 4,096 requests begun takes 0.5 ms."""
_TIGHT_SHARE = 16
"""A sixteenth of what idle clients may hold is little; busy ones that read reach it for moments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLimits:
    """What the connections of a port may hold together; `idle_…`: as soon as some have not moved for a moment;
    `untried_…`: as soon as some have not, ever;
    `slow_…`: those that move less than BYTES_PER_S_MIN, which are cut off after `patience_s` in any case, after half of
    it where one alone holds more."""

    arriving_bytes_max: int = 2**28
    slow_arriving_bytes_max: int = 2**21
    unsent_bytes_max: int = 2**29
    idle_unsent_bytes_max: int = 2**26
    untried_unsent_bytes_max: int = 2**24
    slow_unsent_bytes_max: int = 2**21
    patience_s: float = 60.0


class Client(Protocol):
    """A connection: what it holds, and how it is made to hold less."""

    @property
    def arriving_bytes(self) -> int:
        """Of requests that are not whole."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Of answers that it has not taken."""
        ...

    @property
    def waits_for_us(self) -> bool:
        """Whether it is our doing that nothing arrives."""
        ...

    def refuse_arriving(self) -> None:
        """Refuse the requests that are not whole."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


def bound_unsent(listener: asyncio.Server) -> None:
    """Let the kernel take little that a client's connection cannot carry: of what it takes, nobody keeps count."""
    for listening in listener.sockets:  # connections inherit the option
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_BYTES_MAX)


class ClientBytes:
    """What is held for the clients of a port: of requests that arrive, and of answers that they have not taken.

    `turns`: which of its connections go on, where some have more to do than fits into a moment.
    """

    def __init__(self, limits: SharedLimits, now_s: Callable[[], float] = time.monotonic) -> None:
        sweeps = max(1, round(limits.patience_s / SWEEP_S))
        arriving = Bounds(
            bytes_max=limits.arriving_bytes_max,
            idle_bytes_max=limits.arriving_bytes_max,
            untried_bytes_max=limits.arriving_bytes_max,
            slow_bytes_max=limits.slow_arriving_bytes_max,
            patience_sweeps=sweeps,
        )
        unsent = Bounds(
            bytes_max=limits.unsent_bytes_max,
            idle_bytes_max=min(limits.idle_unsent_bytes_max, limits.unsent_bytes_max),
            untried_bytes_max=min(
                limits.untried_unsent_bytes_max, limits.idle_unsent_bytes_max, limits.unsent_bytes_max
            ),
            slow_bytes_max=limits.slow_unsent_bytes_max,
            patience_sweeps=sweeps,
        )
        self.arriving = SharedBytes(arriving, _arriving_bytes, _refuse, _waits_for_us, now_s)
        self.unsent = SharedBytes(unsent, _unsent_bytes, _abort, _never, now_s, outgoing=True)
        self.turns = Turns()

    def sweep(self, clients: Iterable[Client]) -> None:
        """Look at all clients, once in SWEEP_S; cut off those that are slow for too long, or hold too much."""
        for client in clients:
            self.arriving.note(client, client.arriving_bytes)
            self.unsent.note(client, client.unsent_bytes)
        self.arriving.sweep()
        self.unsent.sweep()

    def forget(self, client: Client) -> None:
        """The client is gone."""
        self.arriving.note(client, 0)
        self.unsent.note(client, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the bytes of one direction."""

    bytes_max: int
    idle_bytes_max: int
    untried_bytes_max: int
    slow_bytes_max: int
    patience_sweeps: int

    def patience_sweeps_of(self, held_bytes: int) -> int:
        """For how many sweeps a client that holds so much may be slow."""
        return self.patience_sweeps if held_bytes <= self.slow_bytes_max else -(-self.patience_sweeps // 2)


class _Account:
    """What one client holds; `moved_bytes` since the last sweep, `slow_sweeps` in a row since it last did; it began, or
    took its last step, at `step_s`."""

    __slots__ = ("held_bytes", "is_new", "moved_bytes", "slow_sweeps", "step_s")

    def __init__(self, now_s: float) -> None:
        self.held_bytes = self.moved_bytes = self.slow_sweeps = 0
        self.step_s = now_s
        self.is_new = True  # no sweep has come yet


class SharedBytes:
    """The bytes of one direction; only for the thread of one event loop.

    Above `bytes_max` those that have not moved for longest are cut off until the others have room; so are those that
    are idle above `idle_bytes_max`, of those that never took a step above `untried_bytes_max`, and those that are slow
    above `slow_bytes_max`. A lone client may exceed them all for a time: a single request or answer has its own limits.
    `waiting`: what is called, once, as soon as there is room again.
    """

    def __init__(
        self,
        bounds: Bounds,
        held_by: Callable[[Client], int],
        cut_off: Callable[[Client], None],
        is_excused: Callable[[Client], bool],
        now_s: Callable[[], float],
        *,
        outgoing: bool = False,
    ) -> None:
        self.held_bytes = 0
        self.is_tight = False  # there is little room for more
        self.waiting: set[Callable[[], None]] = set()
        self._tight_bytes = bounds.idle_bytes_max // _TIGHT_SHARE
        self._accounts: dict[Client, _Account] = {}  # in the order of their last steps
        # of clients that never took one, in the order of their beginnings; only outgoing: small requests take none
        self._untried: dict[Client, _Account] = {}
        self._bounds = bounds
        self._held_by = held_by
        self._cut_off = cut_off
        self._is_excused = is_excused
        self._now_s = now_s
        self._outgoing = outgoing

    def note(self, client: Client, held_bytes: int) -> None:
        """Take note of what a client holds now; where that is too much for all, the idlest end at once."""
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
        elif growth > 0 and self.held_bytes > self._bounds.untried_bytes_max:
            self.make_room()

    def make_room(self) -> None:
        """End those that have not moved for longest, while too much is held; only idle ones where the rest has room."""
        bounds = self._bounds
        self._end_oldest(self._untried, bounds.untried_bytes_max, bounds.bytes_max)
        self._end_oldest(self._accounts, bounds.idle_bytes_max, bounds.bytes_max)

    def _end_oldest(self, accounts: dict[Client, _Account], idle_bytes_max: int, bytes_max: int) -> None:
        while self.held_bytes > idle_bytes_max and accounts and len(self._accounts) > 1:
            client, account = next(iter(accounts.items()))
            held_bytes = self._held_by(client)
            if held_bytes <= account.held_bytes - _STEP_BYTES:  # its socket has taken some meanwhile
                self.note(client, held_bytes)
                continue
            if self.held_bytes <= bytes_max and self._now_s() - account.step_s < _IDLE_S:
                return
            self._end(client)

    def sweep(self) -> None:
        """Tell the slow from the others; where many have to go, they do in several turns of the loop."""
        self.make_room()
        slow, slow_bytes, now_s = [], 0, self._now_s()
        doomed = []
        for client, account in list(self._accounts.items()):
            starts = account.is_new and now_s - account.step_s < _START_S
            moves = starts or account.moved_bytes >= BYTES_PER_S_MIN * SWEEP_S
            account.moved_bytes, account.is_new = 0, False
            if moves or self._is_excused(client):
                account.slow_sweeps = 0
                continue
            account.slow_sweeps += 1
            if account.slow_sweeps >= self._bounds.patience_sweeps_of(account.held_bytes):
                doomed.append(client)
            else:
                slow.append(client)
                slow_bytes += account.held_bytes
        for client in slow[:-1]:
            if slow_bytes > self._bounds.slow_bytes_max:
                slow_bytes -= self._accounts[client].held_bytes
                doomed.append(client)
        self._end_all(doomed)

    def _end_all(self, clients: list[Client]) -> None:
        for client in clients[:_ENDED_AT_ONCE]:
            self._end(client)
        if len(clients) > _ENDED_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._end_all, clients[_ENDED_AT_ONCE:])

    def _end(self, client: Client) -> None:
        """Cut a client off, unless it is gone or has taken everything since."""
        account = self._accounts.pop(client, None)
        self._untried.pop(client, None)
        if account is not None:
            self._count(-account.held_bytes)
            self._cut_off(client)

    def _count(self, growth: int) -> None:
        self.held_bytes += growth
        self.is_tight = self.held_bytes > self._tight_bytes
        if self.waiting and not self.is_tight:
            waiting, self.waiting = self.waiting, set()
            for go_on in waiting:
                go_on()


def _arriving_bytes(client: Client) -> int:
    return client.arriving_bytes


def _unsent_bytes(client: Client) -> int:
    return client.unsent_bytes


def _refuse(client: Client) -> None:
    client.refuse_arriving()


def _abort(client: Client) -> None:
    client.abort()


def _waits_for_us(client: Client) -> bool:
    return client.waits_for_us


def _never(_: Client) -> bool:
    return False


# Turns: where connections have more to do than fits into a moment, each works for a slice, then waits.
#
# uvloop hands a busy socket up to 32 reads of 256 KiB in one turn of the event loop, and to work off one read of small
# frames takes some 100 ms. So a connection stops reading when its slice is over, and goes on with what it holds in a
# later turn of the loop, after whatever else was due. Connections that ask for little never wait.

_SLICE_S = 0.0005
"""What one connection does at once; some 50 small requests (tests/benchmarks/server/greedy_clients.py)."""
_SHORT_SLICE_S = 0.0001
"""What it does before its turn while others wait for theirs; 64 may come at once (greedy_clients.py, 64 clients)."""
STRIDE_BYTES = 1_024
"""Between two looks at the clock, which take 0.1 µs each; a smaller read is worked off without one (front_ends.py)."""
SMALL_FRAME_BYTES = 64
"""What a frame counts in a stride beside its own bytes, where it is no request in two frames, so that the clock is
looked at after 14 of the smallest; DATA of fewer bytes is small (greedy_clients.py)."""
LARGE_READ_BYTES = 1 << 16
"""Of a read after which the next one waits for a turn: to copy it takes 0.1 ms (greedy_clients.py, uploads)."""
_CONNECTIONS_PER_TURN = 2
"""Of those that wait, in one turn of the loop; each may read 256 KiB afterwards, for 0.2 ms (greedy_clients.py)."""


class Turns:
    """Connections of one port that have more to do than a slice; for the thread of one event loop."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.now_s = now_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taking = False

    def slice_end_s(self) -> float:
        """Tell when a slice that begins now is over, on the clock `now_s`."""
        return self.now_s() + (_SLICE_S if self._is_taking or not self._waiting else _SHORT_SLICE_S)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once, in a later turn of the event loop, after the connections that have waited for longer."""
        if not self._waiting and not self._is_taking:
            asyncio.get_running_loop().call_soon(self._take)
        self._waiting.append(go_on)

    def _take(self) -> None:
        """Let those go on that have waited for longest."""
        self._is_taking = True
        try:
            for _ in range(min(len(self._waiting), _CONNECTIONS_PER_TURN)):
                self._waiting.popleft()()
        finally:
            self._is_taking = False
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._take)
