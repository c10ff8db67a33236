"""What may the clients of a port together make the server keep? Counted in bytes; the slowest give way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

SWEEP_S = 5.0
"""Between two looks at who moves; a look takes about 1 µs for each connection."""
BYTES_PER_S_MIN = 1_000
"""Who moves less between two sweeps is slow; a modem moves more."""
_TRIMMED_BYTES_MIN = 2**24
"""Freed between two sweeps, before they are given back to the system, which takes about 10 ms for 100 MB."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what is freed between other blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLimits:
    """What the connections of a port may hold together; `slow_…`: those that move less than BYTES_PER_S_MIN, which are
    cut off after `patience_s` in any case."""

    arriving_bytes_max: int = 2**28
    slow_arriving_bytes_max: int = 2**23
    unsent_bytes_max: int = 2**29
    slow_unsent_bytes_max: int = 2**22
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


class ClientBytes:
    """What is held for the clients of a port: of requests that arrive, and of answers that they have not taken."""

    def __init__(self, limits: SharedLimits) -> None:
        sweeps = max(1, round(limits.patience_s / SWEEP_S))
        self.arriving = SharedBytes(
            limits.arriving_bytes_max, limits.slow_arriving_bytes_max, sweeps, _refuse, _waits_for_us
        )
        self._freed_bytes = 0  # in the interval before the last sweep; transports take a moment to let go
        self.unsent = SharedBytes(
            limits.unsent_bytes_max, limits.slow_unsent_bytes_max, sweeps, _abort, _never, outgoing=True
        )

    def sweep(self, clients: Iterable[Client]) -> None:
        """Look at all clients, once in SWEEP_S; cut off those that are slow for too long, or hold too much."""
        for client in clients:
            self.arriving.note(client, client.arriving_bytes)
            self.unsent.note(client, client.unsent_bytes)
        self.arriving.sweep()
        self.unsent.sweep()
        if self._freed_bytes > _TRIMMED_BYTES_MIN and _trim is not None:
            _trim(0)
        self._freed_bytes = self.arriving.forget_peak() + self.unsent.forget_peak()

    def forget(self, client: Client) -> None:
        """The client is gone."""
        self.arriving.note(client, 0)
        self.unsent.note(client, 0)


class _Account:
    """What one client holds; `moved_bytes` since the last sweep, `slow_sweeps` in a row since it last did."""

    __slots__ = ("held_bytes", "is_new", "moved_bytes", "slow_sweeps")

    def __init__(self) -> None:
        self.held_bytes = self.moved_bytes = self.slow_sweeps = 0
        self.is_new = True  # no sweep has come yet


class SharedBytes:
    """The bytes of one direction; only for the thread of one event loop.

    Above `bytes_max` the slowest are cut off until the others have room; so are, above `slow_bytes_max`, those that are
    slow. A lone client may exceed both: a single request or answer has limits of its own.
    """

    def __init__(
        self,
        bytes_max: int,
        slow_bytes_max: int,
        patience_sweeps: int,
        cut_off: Callable[[Client], None],
        is_excused: Callable[[Client], bool],
        *,
        outgoing: bool = False,
    ) -> None:
        self.held_bytes = self._peak_bytes = 0
        self._accounts: dict[Client, _Account] = {}
        self._bytes_max = bytes_max
        self._slow_bytes_max = slow_bytes_max
        self._patience_sweeps = patience_sweeps
        self._cut_off = cut_off
        self._is_excused = is_excused
        self._outgoing = outgoing

    def note(self, client: Client, held_bytes: int) -> None:
        """Take note of what a client holds now; where that is too much for all, the slowest end at once."""
        account = self._accounts.get(client)
        if account is None:
            if not held_bytes:
                return
            account = self._accounts[client] = _Account()
        growth = held_bytes - account.held_bytes
        account.held_bytes = held_bytes
        self.held_bytes += growth
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        if (growth < 0) is self._outgoing:
            account.moved_bytes += abs(growth)
        if not held_bytes:
            del self._accounts[client]
        elif growth > 0 and self.held_bytes > self._bytes_max:
            # An eighth more than needed, or the next bytes would ask again who is slowest.
            self._cut(list(self._accounts), self.held_bytes - self._bytes_max * 7 // 8)

    def sweep(self) -> None:
        """Tell the slow from the others."""
        slow, slow_bytes = [], 0
        for client, account in list(self._accounts.items()):
            moves = account.is_new or account.moved_bytes >= BYTES_PER_S_MIN * SWEEP_S
            account.moved_bytes, account.is_new = 0, False
            if moves or self._is_excused(client):
                account.slow_sweeps = 0
                continue
            account.slow_sweeps += 1
            if account.slow_sweeps >= self._patience_sweeps:
                self._end(client)
            else:
                slow.append(client)
                slow_bytes += account.held_bytes
        if slow_bytes > self._slow_bytes_max:
            self._cut(slow, slow_bytes - self._slow_bytes_max)

    def forget_peak(self) -> int:
        """By how much less is held than at the highest since this was asked last."""
        fallen_bytes, self._peak_bytes = self._peak_bytes - self.held_bytes, self.held_bytes
        return fallen_bytes

    def _cut(self, clients: list[Client], surplus_bytes: int) -> None:
        """End the slowest of several, the largest of equals, until so much is free."""
        accounts = self._accounts

        def pace(client: Client) -> tuple[int, int, int]:
            account = accounts[client]
            return -account.slow_sweeps, account.moved_bytes, -account.held_bytes

        for client in sorted(clients, key=pace)[:-1]:
            if surplus_bytes <= 0:
                return
            surplus_bytes -= self._end(client)

    def _end(self, client: Client) -> int:
        """Cut a client off; the bytes that it held."""
        account = self._accounts.pop(client, None)
        if account is None:  # it went with another
            return 0
        self.held_bytes -= account.held_bytes
        self._cut_off(client)
        return account.held_bytes


def _refuse(client: Client) -> None:
    client.refuse_arriving()


def _abort(client: Client) -> None:
    client.abort()


def _waits_for_us(client: Client) -> bool:
    return client.waits_for_us


def _never(_: Client) -> bool:
    return False
