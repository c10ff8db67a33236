"""Who gives way when the clients of a port hold too much together?"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from batchtune.server.rest.parser import RestLimits
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.grpc.server_connection import serve
from batchtune.wire.grpc.server_writer import ServerLimits
from batchtune.wire.http2 import LARGEST_STREAM_ID, PREFACE
from batchtune.wire.listener import LARGE_READ_BYTES, STRIDE_BYTES, SWEEP_S, Listener, SharedLimits, Turns
from tests.server.server_fakes import REQUEST, FakeServable, count_answers, running_rest
from tests.waiting import wait_until
from tests.wire.wire_peers import (
    BLOCK,
    OPENING,
    ServerUnderTest,
    grpc_message,
    opened,
    raw_frame,
    request_frames,
    served,
    turns,
)

DATA, HEADERS, _, _, SETTINGS, _, PING, GOAWAY, _, CONTINUATION = range(10)
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


def steps_of(*sizes: int, who: str) -> str:
    """Someone moves a step in each tenth of a second."""
    return " ".join(f"@{tenth / 10} {who}=u{size}" for tenth, size in enumerate(sizes))


MOVES = SharedLimits(slow_arriving_bytes_max=0, slow_unsent_bytes_max=0, patience_s=SWEEP_S)
IDLE = SharedLimits(idle_unsent_bytes_max=100_000, unsent_bytes_max=1_000_000)
UNTRIED = SharedLimits(idle_unsent_bytes_max=100_000, untried_unsent_bytes_max=30_000)
LARGER = SharedLimits(arriving_bytes_max=10_000)
TEN = " ".join(f"{name}=u20000" for name in "ABCDEFGHIJ")
NEVER_TOOK = "T=u20000 T=u10000 A=u10000 B=u10000 C=u10000 @0.3 N=u10000"
PAIR = "A=u90 B=u40 sweep"
MOVING = " ".join(f"A=u{10**6 - 6_000 * n} B=a{1 + 6_000 * n} sweep" for n in range(10))
GROWING = " ".join(f"B=a{size}" for size in range(0, 800, 100))
TAKING = steps_of(*[400_000] * 100, who="T=u399000 T")
DRIPPING = steps_of(*range(100_000, 99_990, -1), who="A")
WHO_GIVES_WAY: dict[str, tuple[SharedLimits, str, str, tuple[int, int]]] = {
    "not who is alone": (LIMITS, "A=a10000u10000 sweep sweep", "", (10_000, 10_000)),
    "who is slow with much, in half the time": (LIMITS, "A=u101 sweep sweep sweep", "A", (0, 0)),
    "not yet who is slow with little": (LIMITS, "A=u100 sweep sweep sweep", "", (0, 100)),
    "who brought the least": (LIMITS, f"A=a300 {GROWING} C=a5000", "ab", (5_000, 0)),
    "not who begins a small request": (LARGER, "A=a4000 B=a5000 C=a200 D=a2000", "a", (7_200, 0)),
    "who is slow for longer": (LIMITS, "A=u90 sweep sweep B=u950", "A", (0, 950)),
    "not yet who is slow": (LIMITS, PAIR, "", (0, 130)),
    "who is slow together with others": (LIMITS, f"{PAIR} C=u300 sweep", "A", (0, 340)),
    "who is slow for a time": (LIMITS, f"{PAIR} C=u300 sweep sweep C=u0 sweep", "AB", (0, 0)),
    "nobody who moves or waits for us": (MOVES, f"W=a200w {MOVING}", "", (54_201, 946_000)),
    "nobody who was idle for a moment": (IDLE, TEN, "", (0, 200_000)),
    "the first who take nothing": (IDLE, f"{TEN} @0.3 N=u20000", "ABCDEF", (0, 100_000)),
    "the first who take nothing at a sweep": (IDLE, f"{TEN} @0.3 sweep", "ABCDE", (0, 100_000)),
    "who never took anything": (UNTRIED, NEVER_TOOK, "AB", (0, 30_000)),
    "all who never took anything": (UNTRIED, f"{NEVER_TOOK} N=u60000", "ABC", (0, 70_000)),
    "then those who did": (UNTRIED, f"{NEVER_TOOK} N=u60000 N=u100000", "TABC", (0, 100_000)),
    "not who takes its answers": (IDLE, f"A=u50000 {TAKING}", "A", (0, 400_000)),
    "who takes a byte at a time": (IDLE, f"{DRIPPING} N=u20000", "A", (0, 20_000)),
    "even who moves where it is too much": (IDLE, "A=u400000 B=u400000 C=u400000", "A", (0, 800_000)),
}


@pytest.mark.parametrize("name", WHO_GIVES_WAY)
def test_who_gives_way(name: str) -> None:
    """Steps: `A=a30u20` client A holds 30 bytes that arrive and 20 unsent, with `w` it waits for us; `@0.3` the clock.

    Told by capitals: whose connection is aborted; by small letters: whose requests are refused.
    """
    limits, steps, told, held = WHO_GIVES_WAY[name]
    clock = SimpleNamespace(now_s=0.0)
    shared = Listener(limits, lambda: clock.now_s)
    clients: dict[str, Client] = defaultdict(lambda: Client(shared))
    for step in steps.split():
        if step == "sweep":
            shared.sweep()
        elif step[0] == "@":
            clock.now_s = float(step[1:])
        else:
            sizes = dict(re.findall(r"([au])(\d+)", step))
            clients[step[0]].waits_for_us = step.endswith("w")
            clients[step[0]].hold(arriving=int(sizes.get("a", 0)), unsent=int(sizes.get("u", 0)))
    ended = {"aborted": str.upper, "refused": str.lower}
    assert "".join(ended[one.ended](key) for key, one in clients.items() if one.ended) == told
    assert (shared.arriving.held_bytes, shared.unsent.held_bytes) == held


async def test_many_slow_clients_are_cut_off_in_several_turns_of_the_loop() -> None:
    shared = Listener(LIMITS)
    slow = [Client(shared) for _ in range(100)]
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


def test_what_a_socket_has_taken_unnoted_is_a_step_too() -> None:
    clock = SimpleNamespace(now_s=0.0)
    shared = Listener(IDLE, lambda: clock.now_s)
    downloads, asks = Client(shared), Client(shared)
    downloads.hold(unsent=400_000)
    for second in range(1, 5):
        clock.now_s = second
        downloads.unsent_bytes -= 50_000  # as the transport says it, which tells nobody
        asks.hold(unsent=20_000)
        asks.hold()
    assert not downloads.ended
    assert shared.unsent.held_bytes == 200_000


def shared_servers(count: int, window: int | None = None, **limits: Any) -> list[tuple[Any, Any]]:
    """Servers of one port with their clients."""
    shared = Listener(SharedLimits(**limits))
    return [served(window, listener=shared) for _ in range(count)]


async def test_requests_of_several_connections_share_a_bound_and_the_slowest_is_refused() -> None:
    (refusing, slow), (taking, fast) = shared_servers(2, arriving_bytes_max=40_000)
    body = grpc_message(b"x" * 45_000)
    refused = await slow.call(raw=body[:16_000], end_stream=False)
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
    refused = await client.call(raw=b"", end_stream=False)
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
        await client.call()
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


# -- connections that have more to do than a slice take turns, in order, with all that is due between them --


REQUESTS = 60
A_SLICE = 6
"""Looks at a clock that ticks 0.1 ms with each, at most; so with each gRPC request of a kilobyte."""


def ticking_clock() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * 0.0001


def ticking(**options: Any) -> ServerUnderTest:
    """A server for which each look at the clock takes 0.1 ms."""
    return opened(now_s=ticking_clock(), **options)


def requests(first: int = 0) -> bytes:
    """Frames of requests whose messages are their numbers, in 1,000 digits."""
    numbered = range(first, first + REQUESTS)
    frames = b"".join(request_frames(2 * number + 1, b"%01000d" % number) for number in numbered)
    assert len(frames) > STRIDE_BYTES
    return frames


def numbers(server: ServerUnderTest) -> list[int]:
    return [int(message) for message in server.messages]


async def test_others_have_their_turn_between_two_slices_and_the_order_is_kept() -> None:
    server = ticking()
    begun: list[int] = []

    def other_work() -> None:
        begun.append(len(server.calls))
        if len(server.calls) < REQUESTS:
            asyncio.get_running_loop().call_soon(other_work)

    frames = requests()
    server.receive(frames)
    assert 0 < len(server.calls) <= A_SLICE
    assert server.transport.reads_paused
    assert len(frames) / 2 < server.connection.arriving_bytes < len(frames)
    assert server.connection.waits_for_us
    other_work()
    await turns(4 * REQUESTS)
    assert (server.connection.arriving_bytes, server.connection.waits_for_us) == (0, False)
    assert max(after - before for before, after in itertools.pairwise(begun)) <= A_SLICE
    assert numbers(server) == list(range(REQUESTS))
    assert not server.transport.reads_paused


async def test_a_small_read_is_worked_off_at_once() -> None:
    server = ticking()
    frames = request_frames(1, b"0") + raw_frame(PING, 0, 0, b"12345678") * 40
    assert len(frames) <= STRIDE_BYTES
    server.receive(frames)
    assert len(server.frames()) == 40
    assert not server.transport.reads_paused


async def test_what_arrives_meanwhile_comes_after_what_waits() -> None:
    server = ticking()
    frames = requests()
    server.receive(frames[:10_000], *(frames[at : at + 100] for at in range(10_000, len(frames), 100)))
    assert len(server.calls) <= A_SLICE
    await turns(4 * REQUESTS)
    assert numbers(server) == list(range(REQUESTS))
    assert server.connection.arriving_bytes == 0


async def test_connections_take_turns() -> None:
    shared = Listener(SharedLimits())
    servers = [ticking(listener=shared) for _ in range(3)]
    for server in servers:
        server.receive(requests())
    assert 0 < 2 * len(servers[1].calls) < len(servers[0].calls), "who comes while others wait does little"
    behind: list[int] = []
    while min(len(server.calls) for server in servers) < REQUESTS:
        await asyncio.sleep(0)
        begun = [len(server.calls) for server in servers]
        behind.append(max(begun) - min(begun))
    assert max(behind) <= 2 * A_SLICE
    assert all(numbers(server) == list(range(REQUESTS)) for server in servers)


async def test_nothing_is_begun_or_kept_of_a_client_that_is_gone() -> None:
    shared = Listener(SharedLimits())
    server = ticking(listener=shared)
    server.receive(requests())
    begun = len(server.calls)
    server.connection.connection_lost(None)
    await turns(4 * REQUESTS)
    assert len(server.calls) == begun
    assert all(call.cancelled for call in server.calls)
    assert (server.connection.arriving_bytes, shared.arriving.held_bytes) == (0, 0)


async def test_an_error_ends_the_connection_once_it_is_its_turn() -> None:
    server = ticking(echo=True)
    server.receive(requests() + raw_frame(DATA, 0, 0, b"x") + request_frames(2 * REQUESTS + 1, b"0"))
    assert not server.transport.closed
    await turns(4 * REQUESTS)
    assert numbers(server) == list(range(REQUESTS))
    assert server.frames()[-1][0] == GOAWAY
    assert server.transport.closed


async def test_a_flood_is_counted_over_all_its_turns() -> None:
    server = ticking(limits=ServerLimits(max_control_frames_per_s=100))
    server.receive(raw_frame(PING, 0, 0, b"12345678") * 1_000)
    assert not server.transport.closed
    await turns(4 * REQUESTS)
    assert server.frames()[-1][0] == GOAWAY


async def test_draining_waits_for_what_has_arrived() -> None:
    server = ticking(echo=True)
    server.receive(requests() + raw_frame(PING, 1, 0, b"draining"))
    server.connection.drain()
    assert len(server.calls) <= A_SLICE
    await turns(4 * REQUESTS)
    assert numbers(server) == list(range(REQUESTS))
    goaways = [payload for kind, _, _, payload in server.frames() if kind == GOAWAY]
    assert [int.from_bytes(goaway[:4]) for goaway in goaways] == [LARGEST_STREAM_ID, 2 * REQUESTS - 1]
    assert server.transport.closed


async def test_reading_goes_on_only_when_the_socket_takes_answers_and_nothing_waits() -> None:
    server = ticking()
    server.receive(requests())
    server.connection.pause_writing()
    await turns(4 * REQUESTS)
    assert len(server.calls) == REQUESTS
    assert server.transport.reads_paused
    server.connection.resume_writing()
    assert not server.transport.reads_paused
    server.receive(requests(REQUESTS))
    server.connection.pause_writing()
    server.connection.resume_writing()
    assert server.transport.reads_paused
    await turns(4 * REQUESTS)
    assert not server.transport.reads_paused


async def test_the_next_of_large_reads_waits_for_a_turn() -> None:
    server = ServerUnderTest()  # whose slices are never over
    server.receive(OPENING)
    frame = raw_frame(DATA, 1, 1, grpc_message(bytes(2 * LARGE_READ_BYTES)))
    server.receive(raw_frame(HEADERS, 4, 1, BLOCK) + frame[:LARGE_READ_BYTES])
    assert server.transport.reads_paused
    await turns(2)
    assert not server.transport.reads_paused
    server.receive(frame[LARGE_READ_BYTES:])
    await turns(2)
    assert not server.transport.reads_paused
    (call,) = server.calls
    assert len(call.message) == 2 * LARGE_READ_BYTES


async def test_who_fails_in_its_turn_costs_nobody_else_theirs() -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    shared, taken = Turns(lambda: 0.0), []

    def fail() -> None:
        raise OSError("gone")

    for go_on in (fail, lambda: taken.append(1), fail, lambda: taken.append(2)):
        shared.wait(go_on)
    await turns(10)
    assert taken == [1, 2]
    assert len(failures) == 2


async def test_a_fault_of_the_service_in_a_later_turn_closes_the_connection() -> None:
    def fail_at_half(call: GrpcCall) -> None:
        server.calls.append(call)
        if len(server.calls) == REQUESTS // 2:
            raise OSError("broken")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: failures.append(said["exception"]))
    server = ticking()
    server.connection._held.dispatch = fail_at_half
    server.receive(requests())
    await turns(4 * REQUESTS)
    assert len(server.calls) == REQUESTS // 2
    assert server.transport.aborted
    assert len(failures) == 1


async def test_few_connections_go_on_in_one_turn_of_the_loop() -> None:
    shared, taken = Turns(lambda: 0.0), []
    for number in range(10):
        shared.wait(partial(taken.append, number))
    assert not taken
    await asyncio.sleep(0)
    assert 0 < len(taken) < 10
    await turns(10)
    assert taken == list(range(10))
