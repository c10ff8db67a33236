"""Who gives way when the clients of a port hold too much together?"""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.server.rest.parser import RestLimits
from batchtune.wire.grpc.server_connection import serve
from batchtune.wire.http2 import PREFACE
from batchtune.wire.listener import SWEEP_S, Listener, SharedLimits
from tests.server.rest.test_connection import REQUEST
from tests.server.server_fakes import FakeServable, count_answers, running_rest
from tests.waiting import wait_until
from tests.wire.wire_peers import (
    grpc_message,
    opened,
    raw_frame,
    served,
)

DATA, HEADERS, _, _, SETTINGS, _, _, GOAWAY, _, CONTINUATION = range(10)
LIMITS = SharedLimits(
    arriving_bytes_max=1_000,
    slow_arriving_bytes_max=100,
    unsent_bytes_max=1_000,
    slow_unsent_bytes_max=100,
    patience_s=3 * SWEEP_S,
)


class Client:
    """Holds what the test says, until it is told not to."""

    def __init__(self, shared: Listener) -> None:
        self.arriving_bytes = self.unsent_bytes = 0
        self.waits_for_us = False
        self.ended = ""
        self._shared = shared
        shared.opened(self)

    def hold(self, *, arriving: int = 0, unsent: int = 0) -> None:
        self.arriving_bytes, self.unsent_bytes = arriving, unsent
        self._shared.arriving.note(self, arriving)
        self._shared.unsent.note(self, unsent)

    def refuse_arriving(self) -> None:
        self.ended = "refused"
        self.hold(unsent=self.unsent_bytes)

    def close_if_due(self) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None:
        self.ended = "aborted"
        self.hold()


def clients(count: int) -> tuple[Listener, list[Client]]:
    shared = Listener(LIMITS)
    return shared, [Client(shared) for _ in range(count)]


def test_a_lone_client_may_hold_more_than_all_together() -> None:
    shared, (client,) = clients(1)
    client.hold(arriving=10_000, unsent=10_000)
    for _ in range(2):
        shared.sweep()
    assert not client.ended


def test_a_lone_client_that_takes_nothing_is_cut_off_in_half_the_time_where_it_holds_much() -> None:
    shared, (much, little) = clients(2)
    much.hold(unsent=101)
    for _ in range(3):  # the first sees that it is new
        shared.sweep()
    assert much.ended == "aborted"
    little.hold(unsent=100)
    for _ in range(3):
        shared.sweep()
    assert not little.ended


def test_who_brought_the_least_gives_way_to_the_others() -> None:
    shared, (slow, fast, lone) = clients(3)
    slow.hold(arriving=300)
    for arriving in range(0, 800, 100):
        fast.hold(arriving=arriving)
    lone.hold(arriving=5_000)
    assert [client.ended for client in (slow, fast, lone)] == ["refused", "refused", ""]
    assert shared.arriving.held_bytes == 5_000


def test_a_small_request_that_has_just_begun_does_not_give_way_to_older_ones_that_hold_much() -> None:
    shared = Listener(SharedLimits(arriving_bytes_max=10_000))
    hoards, sends, begins, last = (Client(shared) for _ in range(4))
    hoards.hold(arriving=4_000)
    sends.hold(arriving=5_000)
    begins.hold(arriving=200)
    last.hold(arriving=2_000)
    assert [client.ended for client in (hoards, sends, begins, last)] == ["refused", "", "", ""]


def test_a_slow_client_gives_way_to_one_that_is_slow_for_less_long() -> None:
    shared, (stalled, started) = clients(2)
    stalled.hold(unsent=90)
    shared.sweep()
    shared.sweep()
    started.hold(unsent=950)
    assert [client.ended for client in (stalled, started)] == ["aborted", ""]


def test_slow_clients_may_hold_less_together_and_for_a_time_only() -> None:
    shared, (large, small, new) = clients(3)
    large.hold(unsent=90)
    small.hold(unsent=40)
    shared.sweep()
    assert not large.ended
    new.hold(unsent=300)
    shared.sweep()
    assert [client.ended for client in (large, small, new)] == ["aborted", "", ""]
    shared.sweep()
    new.hold()
    shared.sweep()
    assert small.ended == "aborted"
    assert shared.unsent.held_bytes == 0


def test_who_moves_or_waits_for_us_is_not_slow() -> None:
    shared = Listener(SharedLimits(slow_arriving_bytes_max=0, slow_unsent_bytes_max=0, patience_s=SWEEP_S))
    takes, sends, waits = (Client(shared) for _ in range(3))
    waits.waits_for_us = True
    waits.hold(arriving=200)
    left = 10**6
    for sweep in range(10):
        left -= 6_000
        takes.hold(unsent=left)
        sends.hold(arriving=1 + 6_000 * sweep)
        shared.sweep()
    assert not takes.ended
    assert not waits.ended


def idle_clients(count: int, **limits: int) -> tuple[SimpleNamespace, Listener, list[Client]]:
    """Clients of a port where those that are idle may hold 100,000 bytes together, and its clock."""
    clock = SimpleNamespace(now_s=0.0)
    shared = Listener(SharedLimits(idle_unsent_bytes_max=100_000, **limits), lambda: clock.now_s)
    return clock, shared, [Client(shared) for _ in range(count)]


def test_who_takes_nothing_gives_way_at_once_where_idle_clients_hold_too_much() -> None:
    clock, shared, (*idle, new) = idle_clients(11)
    for client in idle:
        client.hold(unsent=20_000)
    assert not any(client.ended for client in idle), "a moment is no idleness"
    clock.now_s = 0.3
    new.hold(unsent=20_000)
    assert [client.ended for client in idle] == ["aborted"] * 6 + [""] * 4
    assert shared.unsent.held_bytes == 100_000


def test_who_never_took_anything_gives_way_before_those_that_did() -> None:
    clock, shared, (takes, *never, new) = idle_clients(5, untried_unsent_bytes_max=30_000)
    takes.hold(unsent=20_000)
    takes.hold(unsent=10_000)
    for client in never:
        client.hold(unsent=10_000)
    clock.now_s = 0.3
    new.hold(unsent=10_000)
    assert [client.ended for client in (takes, *never, new)] == ["", "aborted", "aborted", "", ""]
    new.hold(unsent=60_000)
    assert [client.ended for client in (takes, *never, new)] == ["", "aborted", "aborted", "aborted", ""]
    assert shared.unsent.held_bytes == 70_000
    new.hold(unsent=100_000)
    assert (takes.ended, new.ended) == ("aborted", "")


def test_a_sweep_makes_room_where_no_answer_has_come_since_clients_were_busy() -> None:
    clock, shared, idle = idle_clients(10)
    for client in idle:
        client.hold(unsent=20_000)
    clock.now_s = 0.3
    shared.sweep()
    assert [client.ended for client in idle] == ["aborted"] * 5 + [""] * 5


async def test_many_slow_clients_are_cut_off_in_several_turns_of_the_loop() -> None:
    shared, slow = clients(100)
    for client in slow:
        client.hold(unsent=9)
    ended = []
    shared.sweep()  # sees that they are new
    shared.sweep()
    for _ in range(50):
        ended.append(sum(client.ended == "aborted" for client in slow))
        await asyncio.sleep(0)
    assert ended == [*range(2, 90, 2), *[89] * 6]
    assert shared.unsent.held_bytes == 99


def test_who_takes_its_answers_may_hold_more_than_idle_clients() -> None:
    clock, _, (takes, idle) = idle_clients(2)
    idle.hold(unsent=50_000)
    for step in range(100):
        clock.now_s = step / 10
        takes.hold(unsent=400_000)
        takes.hold(unsent=399_000)
    assert (takes.ended, idle.ended) == ("", "aborted")


def test_what_a_socket_has_taken_unnoted_is_a_step_too() -> None:
    clock, shared, (downloads, asks) = idle_clients(2)
    downloads.hold(unsent=400_000)
    for second in range(1, 5):
        clock.now_s = second
        downloads.unsent_bytes -= 50_000  # as the transport says it, which tells nobody
        asks.hold(unsent=20_000)
        asks.hold()
    assert not downloads.ended
    assert shared.unsent.held_bytes == 200_000


def test_a_byte_at_a_time_is_no_step() -> None:
    clock, _, (drips, asks) = idle_clients(2)
    for tenth in range(10):
        clock.now_s = tenth / 10
        drips.hold(unsent=100_000 - tenth)
    asks.hold(unsent=20_000)
    assert (drips.ended, asks.ended) == ("aborted", "")


def test_beyond_the_bound_of_all_even_those_that_move_give_way() -> None:
    _, shared, (first, second, third) = idle_clients(3, unsent_bytes_max=1_000_000)
    for client in (first, second, third):
        client.hold(unsent=400_000)
    assert [client.ended for client in (first, second, third)] == ["aborted", "", ""]
    assert shared.unsent.held_bytes == 800_000


def shared_servers(count: int, window: int | None = None, **limits: Any) -> list[tuple[Any, Any]]:
    """Servers of one port with their clients."""
    shared = Listener(SharedLimits(**limits))
    return [served(window, listener=shared) for _ in range(count)]


async def test_requests_of_several_connections_share_a_bound_and_the_slowest_is_refused() -> None:
    (refusing, slow), (taking, fast) = shared_servers(2, arriving_bytes_max=40_000)
    body = grpc_message(b"x" * 45_000)
    refused = slow.request(raw=body[:16_000], end_stream=False)
    await slow.exchange()
    taken = fast.request(raw=body[:16_000], end_stream=False)
    for at in (16_000, 32_000):
        fast.h2.send_data(taken, body[at : at + 16_000], end_stream=at == 32_000)
        await fast.exchange()
    await slow.exchange()
    assert slow.status(refused)["grpc-status"] == "8"
    assert taking.messages == [b"x" * 45_000]
    assert refusing.connection.arriving_bytes == taking.connection.arriving_bytes == 0


async def test_a_frame_that_is_not_whole_counts_and_ends_its_connection() -> None:
    shared = Listener(SharedLimits(arriving_bytes_max=50_000))
    cut, other = (opened(listener=shared) for _ in range(2))
    for server in (cut, other):
        server.receive(raw_frame(DATA, 1, 1, bytes(40_000))[:30_000])
    assert cut.transport.closed
    assert cut.frames()[-1][0] == GOAWAY
    assert not other.transport.closed


@pytest.mark.parametrize("continued", [b"", raw_frame(CONTINUATION, 0, 1, bytes(16_000))[:10_000]])
@pytest.mark.parametrize("begun", [b"", raw_frame(HEADERS, 0, 1, bytes(15_000))])
async def test_a_connection_that_holds_a_frame_in_part_is_closed(begun: bytes, continued: bytes) -> None:
    """What is left there belongs to no stream that could be refused, and is counted no more."""
    server = opened()
    server.receive(begun + continued)
    held_bytes = server.connection.arriving_bytes
    server.connection.refuse_arriving()
    assert server.transport.closed is (held_bytes > 0)
    assert server.connection.arriving_bytes == 0


async def test_a_call_with_a_frame_in_part_is_refused_before_its_connection_is_closed() -> None:
    server, client = served()
    refused = client.request(raw=b"", end_stream=False)
    await client.exchange()
    server.receive(raw_frame(DATA, 0, refused, bytes(1_000))[:500])
    server.connection.refuse_arriving()
    await client.exchange()
    assert client.status(refused)["grpc-status"] == "8"
    assert server.transport.closed


async def test_streams_that_send_nothing_count_once_there_are_many() -> None:
    server, client = served()
    for _ in range(1_100):
        client.request(raw=b"", end_stream=False)
    await client.exchange()
    assert server.connection.arriving_bytes > 100 * 1_100
    server.connection.refuse_arriving()
    assert server.connection.arriving_bytes == 0
    assert server.transport.closed


async def test_answers_that_wait_for_windows_share_a_bound() -> None:
    pairs = shared_servers(2, window=0, unsent_bytes_max=50_000)
    for server, client in pairs:
        client.request()
        await client.exchange()
        server.calls[0].reply(b"x" * 30_000)
        await asyncio.sleep(0)
    assert [server.transport.aborted for server, _ in pairs] == [True, False]


async def test_the_kernel_takes_little_that_a_client_does_not() -> None:
    server = await serve("127.0.0.1", 0, lambda call: call.reply(b""))
    reader, client = await asyncio.open_connection("127.0.0.1", server.port)
    client.write(PREFACE)
    await reader.readexactly(9)  # of the server's SETTINGS
    (connection,) = server.connections
    accepted = connection._writer.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 1 << 17
    client.close()
    await server.drain(5)


HEAD = REQUEST.partition(b"{")[0].replace(b"length: 20", b"length: 60000")


def test_bodies_over_rest_share_a_bound_and_the_slowest_is_refused() -> None:
    limits = RestLimits(shared=SharedLimits(arriving_bytes_max=60_000))
    with running_rest(limits=limits) as rest:
        slow, fast = (socket.create_connection(("127.0.0.1", rest.port), timeout=10) for _ in range(2))
        with slow, fast:
            slow.sendall(HEAD + b" " * 20_000)
            wait_until(lambda: rest.server.arriving.held_bytes > 20_000)
            fast.sendall(HEAD + b" " * (60_000 - 20))
            assert slow.makefile("rb").read().startswith(b"HTTP/1.1 503 ")
            fast.sendall(REQUEST[-20:])
            received = b""
            while not count_answers(received):
                received += fast.recv(1 << 16)
            assert b"2.5" in received
        wait_until(lambda: rest.server.arriving.held_bytes == 0)


def test_answers_over_rest_that_nobody_reads_share_a_bound() -> None:
    limits = RestLimits(shared=SharedLimits(unsent_bytes_max=3 << 20))
    row = b'{"instances": [' + b"1.0, " * 20_000 + b"1.0]}"
    request = HEAD.replace(b"60000", b"%d" % len(row)) + row
    with running_rest(FakeServable(), limits=limits) as rest:
        clients = []
        for _ in range(60):
            client = socket.create_connection(("127.0.0.1", rest.port), timeout=10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.setblocking(False)
            clients.append(client)

        def ask() -> bool:
            for client in clients:
                try:
                    client.send(request)
                except OSError:
                    continue
            assert rest.server.unsent.held_bytes <= 3 << 20
            return len(rest.server.connections) < 60

        wait_until(ask, limit_s=60)
        answer = socket.create_connection(("127.0.0.1", rest.port), timeout=10)
        answer.sendall(REQUEST)
        assert b"2.5" in answer.recv(1 << 16)
        for client in (*clients, answer):
            client.close()
