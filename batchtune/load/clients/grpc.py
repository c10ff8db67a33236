"""Sends requests as gRPC calls over a few HTTP/2 connections, many streams on each."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from batchtune.load.clients.dialer import Dialer
from batchtune.load.clients.source import Source
from batchtune.load.samples import GOOD, PENDING, Recorder, Status, of_grpc, of_lost_connection
from batchtune.target.endpoint import Endpoint
from batchtune.wire.grpc.client_connection import NOT_PROCESSED, GrpcClientConnection, PreparedCall
from batchtune.wire.status import GRPC_NAMES

CONNECTIONS_MAX: Final = 64

_monotonic_ns = time.monotonic_ns


class GrpcClient:
    """Sends `calls[i % len(calls)]` for request i, with at most `streams_max` in flight over all connections.

    After `open`, connections are added only when requests wait because the server's limit of streams is reached, or to
    replace lost ones.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        calls: Sequence[PreparedCall],
        recorder: Recorder,
        source: Source,
        *,
        streams_max: int,
        timeout_s: float,
    ) -> None:
        self._calls = calls
        self._period = len(calls)
        self._recorder = recorder
        self._sent = recorder.columns.sent
        self._source = source
        self._streams_max = streams_max
        self._in_flight = 0
        self._connections: list[GrpcClientConnection] = []
        self._turn = 0
        self._again: deque[int] = deque()
        self._all_ready: asyncio.Future[None] | None = None
        self._dialer = Dialer(
            endpoint,
            endpoint.grpc_port or 80,
            alpn="h2",
            connections_max=CONNECTIONS_MAX,
            timeout_s=timeout_s,
            make_protocol=self._make_connection,
            on_failed=self._dial_failed,
        )

    async def open(self, connections: int) -> None:
        """Open this many connections before the start, and wait up to 1 s for the server's SETTINGS, so that neither
        time is measured.

        Raises:
            TargetError: the host's name does not resolve.
        """
        ready_limit_s = 1.0
        await self._dialer.resolve()
        await self._dialer.dial_all(min(connections, CONNECTIONS_MAX))
        if len(self._connections) < self._dialer.open_count:
            self._all_ready = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_ready], timeout=ready_limit_s)

    def try_send(self, index: int) -> bool:
        """Put request `index` into the buffer of a connection with a free stream, to be written by `flush`; return
        False where no stream is free."""
        connection = self._connection_with_room()
        if connection is None:
            return False
        self._sent[index] = _monotonic_ns()
        self._in_flight += 1
        connection.call(self._calls[index % self._period], index)
        return True

    def flush(self) -> None:
        """Write the requests that `try_send` has put into buffers."""
        for connection in self._connections:
            connection.flush()

    def fill(self) -> None:
        """Send waiting requests on free streams and write them; where no stream is free, open another connection."""
        while self._again or self._source.backlog():
            connection = self._connection_with_room()
            if connection is None:
                if self._in_flight < self._streams_max:
                    self._dialer.dial(1)
                break
            now_ns = _monotonic_ns()
            index = self._next(now_ns)
            if index < 0:
                break
            self._sent[index] = now_ns
            self._in_flight += 1
            connection.call(self._calls[index % self._period], index)
        self.flush()

    def cancel(self, indices: Sequence[int]) -> None:
        """Give up on these requests, given by index, by resetting their streams; then send waiting requests on the free
        ones. Those that were answered meanwhile are ignored."""
        for index in indices:
            for connection in tuple(self._connections):
                before = connection.in_flight
                connection.cancel(index)
                if connection.in_flight < before:
                    self._in_flight -= 1
                    self._source.released(_monotonic_ns())
                    break
        self.fill()

    def close(self) -> None:
        """Close every connection at once, and open no more."""
        self._dialer.hang_up()

    def _make_connection(self) -> GrpcClientConnection:
        """Make a connection whose answers a closure records, which saves look-ups through objects on the hot path."""
        recorder, source, calls, period = self._recorder, self._source, self._calls, self._period
        done_ns, outcome, sent_ns = recorder.columns.done, recorder.columns.outcome, recorder.columns.sent
        finished = source.finished
        check_every = recorder.check_every or sys.maxsize

        def answered(tag: int, code: int, message: bytes, text: str) -> None:
            now_ns = _monotonic_ns()
            if code == 0:
                done_ns[tag] = now_ns
                outcome[tag] = GOOD
                if tag % check_every == 0:
                    recorder.keep_answer(tag, message)
            elif text.startswith(NOT_PROCESSED):
                self._again.append(tag)
                self._in_flight -= 1
                self.fill()
                return
            else:
                recorder.fail(tag, of_grpc(code, text), f"{GRPC_NAMES.get(code, code)}: {text}")
            if connection.capacity <= 0:
                self._in_flight -= 1
                source.released(now_ns)
                self.fill()
                return
            index = finished(now_ns)
            if index < 0:
                self._in_flight -= 1
                return
            sent_ns[index] = now_ns
            connection.call(calls[index % period], index)

        connection = GrpcClientConnection(
            answered, self._lost, self._ready, on_capacity=lambda _: self.fill()
        )
        return connection

    def _next(self, now_ns: int) -> int:
        """Return the index of the next request to send, negative if none is due.

        Requests that a GOAWAY excluded come first: the server has not processed them, so they may be sent again.
        """
        while self._again:
            index = self._again.popleft()
            if self._recorder.columns.outcome[index] == PENDING:
                return index
            self._source.released(now_ns)  # it timed out meanwhile
        return self._source.take(now_ns)

    def _connection_with_room(self) -> GrpcClientConnection | None:
        if self._in_flight >= self._streams_max:
            return None
        connections = self._connections
        count = len(connections)
        turn = self._turn
        for _ in range(count):
            turn += 1
            if turn >= count:
                turn = 0
            if connections[turn].capacity > 0:
                self._turn = turn
                return connections[turn]
        return None

    def _ready(self, connection: GrpcClientConnection) -> None:
        self._connections.append(connection)
        self._dialer.became_ready(connection)
        awaited, are_all = self._all_ready, len(self._connections) >= self._dialer.open_count
        if awaited is not None and not awaited.done() and are_all:
            awaited.set_result(None)
        self.fill()

    def _lost(self, connection: GrpcClientConnection, tags: list[int], reason: str) -> None:
        if not self._dialer.closed(connection):
            self._dial_failed(reason)
            return
        self._connections.remove(connection)
        now_ns = _monotonic_ns()
        status = of_lost_connection(reason)
        for tag in tags:
            self._recorder.fail(tag, status, reason)
            self._in_flight -= 1
            self._source.failed(now_ns)
        self.fill()

    def _dial_failed(self, reason: str) -> None:
        now_ns = _monotonic_ns()
        index = self._next(now_ns)
        if index >= 0:
            self._recorder.fail(index, Status.REFUSED, reason)
            self._source.failed(now_ns)
        self.fill()
