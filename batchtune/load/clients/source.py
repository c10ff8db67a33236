"""Decides which request is sent next, and when: open loop by a schedule, closed loop by users who wait for answers.

A client takes the next request when a connection or stream is free (`take`) or its request was answered
(`finished`), and reports a connection or stream that is gone (`failed`, `released`). A negative index means: nothing to
send now.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

from batchtune.load.samples import PENDING, Columns

NOTHING: Final = -1

_monotonic_ns = time.monotonic_ns


class Client(Protocol):
    """A protocol: what sends requests over a pool of connections."""

    async def open(self, connections: int) -> None:
        """Open this many connections before the start, so that connecting is not measured."""

    def try_send(self, index: int) -> bool:
        """Send request `index` now if a connection or stream is free, perhaps into a buffer that `flush` writes; return
        whether it was sent."""

    def fill(self) -> None:
        """Send waiting requests on the connections or streams that are free; open more if there are too few."""

    def flush(self) -> None:
        """Write what is buffered."""

    def cancel(self, indices: Sequence[int]) -> None:
        """Forget these requests, which have no answer yet, and free their users or slots for further ones.

        Nothing is written to the columns: the caller records their outcome first.
        """

    def close(self) -> None:
        """Close every connection at once."""


class OpenSource:
    """The open loop: request i is sent when `columns.due[i]` is reached, whether earlier requests are answered or not.

    Requests for which no connection or stream is free wait in order; how long (ns) is written to `columns.wait`.
    """

    def __init__(self, columns: Columns, count: int, wake_at: Callable[[int], None]) -> None:
        self.issued = 0
        self.count = count
        self._due, self._wait, self._outcome = columns.due, columns.wait, columns.outcome
        self._waiting: deque[int] = deque()
        self._wake_at = wake_at
        self.sender: Client

    def start(self, _start_ns: int, _end_ns: int) -> None:
        """Set the timer for the first request; from now on `columns.due` must hold absolute times."""
        if self.count:
            self._wake_at(self._due[0])

    def stop(self) -> None:
        """Send only the requests that were due before this call."""
        self.count = self.issued

    @property
    def exhausted(self) -> bool:
        """Whether all requests of the schedule have been due."""
        return self.issued >= self.count

    def wake(self) -> None:
        """Send everything that is due by now."""
        due, sender = self._due, self.sender
        index, count = self.issued, self.count
        now_ns = _monotonic_ns()
        while index < count and due[index] <= now_ns:
            self.issued = index + 1
            if self._waiting or not sender.try_send(index):
                self._wait[index] = -_monotonic_ns()
                self._waiting.append(index)
            index += 1
            if index < count and due[index] > now_ns:
                now_ns = _monotonic_ns()
        if self._waiting:
            sender.fill()
        sender.flush()
        if index < self.count:
            self._wake_at(due[index])

    def take(self, now_ns: int) -> int:
        """Return the index of the request to send next on a free connection or stream; negative: no request is waiting.
        `now_ns`: CLOCK_MONOTONIC."""
        waiting = self._waiting
        while waiting:
            index = waiting.popleft()
            if self._outcome[index] == PENDING:
                self._wait[index] += now_ns
                return index
        return NOTHING

    finished = take

    def released(self, now_ns: int) -> None:
        """Do nothing: the schedule does not depend on answers."""

    failed = released

    def backlog(self) -> int:
        """Return how many requests wait for a free connection or stream."""
        return len(self._waiting)


class ClosedSource:
    """The closed loop: `users` users, each of whom sends its next request `think_ns` after the answer to its last.

    A request is due when its user is ready for it. A user whose connection failed waits at least 10 ms. `turns_ns`:
    (begin, end) of each turn, ns after the start; users who become ready between two turns wait for the next.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        users: int,
        think_ns: int,
        requests_max: int,
        wake_at: Callable[[int], None],
        turns_ns: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.issued = 0
        self.users = users
        self._due = columns.due
        self._think_ns = think_ns
        self._requests_max = min(requests_max, columns.capacity)
        self._end_ns = 0  # of the turn that has begun
        self._turns_ns = turns_ns
        self._turns: deque[tuple[int, int]] = deque()  # to come
        self._ready: deque[int] = deque()
        self._thinking: list[int] = []
        self._wake_at = wake_at
        self.sender: Client

    def start(self, start_ns: int, end_ns: int) -> None:
        """Make every user ready at `start_ns`; no request is sent from `end_ns` on or, if there are turns, outside
        these. Both are on CLOCK_MONOTONIC."""
        self._ready.extend([start_ns] * self.users)
        if self._turns_ns:
            self._turns.extend((start_ns + begin, start_ns + end) for begin, end in self._turns_ns)
            self._wake_at(self._turns[0][0])
            return
        self._end_ns = end_ns
        self._wake_at(start_ns)

    def stop(self) -> None:
        """Send no more requests."""
        self._end_ns = 0
        self._turns.clear()

    @property
    def exhausted(self) -> bool:
        """Whether no further request will be sent: the time is over, or `requests_max` were sent."""
        return not self._turns and self._rests()

    def wake(self) -> None:
        """Make the users ready whose turn has begun or whose think time is over, and send their requests."""
        now_ns = _monotonic_ns()
        while self._turns and self._turns[0][0] <= now_ns:
            begin_ns, self._end_ns = self._turns.popleft()
            self._ready = deque([begin_ns] * len(self._ready))
        while self._thinking and self._thinking[0] <= now_ns:
            self._ready.append(heapq.heappop(self._thinking))
        self.sender.fill()
        self.sender.flush()
        if not self.exhausted:
            self._arm()

    def take(self, now_ns: int) -> int:
        """Return the index of the request to send next on a free connection or stream; negative: no user is ready, or
        nothing may be sent now. `now_ns`: CLOCK_MONOTONIC."""
        if not self._ready or now_ns >= self._end_ns or self.issued >= self._requests_max:
            return NOTHING
        index = self.issued
        self.issued = index + 1
        self._due[index] = self._ready.popleft()
        return index

    def finished(self, now_ns: int) -> int:
        """Note that a request was answered; return the index of the request to send next on its connection or stream,
        negative: none is due. `now_ns`: CLOCK_MONOTONIC."""
        if self._think_ns:
            self._think(now_ns, self._think_ns)
            return self.take(now_ns)
        index = self.issued
        if now_ns >= self._end_ns or index >= self._requests_max:
            if self._turns:
                self._ready.append(now_ns)
            return NOTHING
        self.issued = index + 1
        self._due[index] = now_ns
        return index

    def released(self, now_ns: int) -> None:
        """Note that a request has ended and its connection or stream cannot be used again; its user continues as after
        an answer. `now_ns`: CLOCK_MONOTONIC."""
        if self._think_ns:
            self._think(now_ns, self._think_ns)
        else:
            self._ready.append(now_ns)

    def failed(self, now_ns: int) -> None:
        """Note that a request failed together with its connection, or never got a connection; its user waits at least
        10 ms. `now_ns`: CLOCK_MONOTONIC."""
        back_off_ns = 10_000_000  # so that a dead server is not flooded
        self._think(now_ns, max(self._think_ns, back_off_ns))

    def backlog(self) -> int:
        """Return how many users wait for a free connection or stream; 0 while nothing may be sent."""
        return 0 if self._rests() else len(self._ready)

    def _rests(self) -> bool:
        """Whether nothing may be sent now."""
        return _monotonic_ns() >= self._end_ns or self.issued >= self._requests_max

    def _think(self, now_ns: int, for_ns: int) -> None:
        heapq.heappush(self._thinking, now_ns + for_ns)
        if self._thinking[0] == now_ns + for_ns:
            self._arm()

    def _arm(self) -> None:
        """Set the timer for the begin of the next turn or the end of the next think time, whichever is first."""
        events_ns = [*self._thinking[:1], *(begin_ns for begin_ns, _ in islice(self._turns, 1))]
        if events_ns:
            self._wake_at(min(events_ns))


Source = OpenSource | ClosedSource
"""Where a client gets its requests from; `now_ns` is CLOCK_MONOTONIC."""
