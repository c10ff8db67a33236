"""Do connections that have more to do than a slice take turns, in order, and with all that is due between them?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.grpc.server_writer import ServerLimits
from batchtune.wire.http2 import LARGEST_STREAM_ID
from batchtune.wire.listener import LARGE_READ_BYTES, STRIDE_BYTES, Listener, SharedLimits, Turns
from tests.wire import wire_peers
from tests.wire.wire_peers import (
    BLOCK,
    OPENING,
    ServerUnderTest,
    grpc_message,
    raw_frame,
    request_frames,
    turns,
)

DATA, HEADERS, _, _, _, _, PING, GOAWAY, _, _ = range(10)
REQUESTS = 60
A_SLICE = 6
"""Looks at a clock that ticks 0.1 ms with each, at most; so with each gRPC request of a kilobyte."""


def ticking_clock() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: next(ticks) * 0.0001


def opened(**options: Any) -> ServerUnderTest:
    """A server for which each look at the clock takes 0.1 ms."""
    return wire_peers.opened(now_s=ticking_clock(), **options)


def requests(first: int = 0) -> bytes:
    """Frames of requests whose messages are their numbers, in 1,000 digits."""
    numbered = range(first, first + REQUESTS)
    frames = b"".join(request_frames(2 * number + 1, b"%01000d" % number) for number in numbered)
    assert len(frames) > STRIDE_BYTES
    return frames


def numbers(server: ServerUnderTest) -> list[int]:
    return [int(message) for message in server.messages]


async def test_others_have_their_turn_between_two_slices_and_the_order_is_kept() -> None:
    server = opened()
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
    server = opened()
    frames = request_frames(1, b"0") + raw_frame(PING, 0, 0, b"12345678") * 40
    assert len(frames) <= STRIDE_BYTES
    server.receive(frames)
    assert len(server.frames()) == 40
    assert not server.transport.reads_paused


async def test_what_arrives_meanwhile_comes_after_what_waits() -> None:
    server = opened()
    frames = requests()
    server.receive(frames[:10_000], *(frames[at : at + 100] for at in range(10_000, len(frames), 100)))
    assert len(server.calls) <= A_SLICE
    await turns(4 * REQUESTS)
    assert numbers(server) == list(range(REQUESTS))
    assert server.connection.arriving_bytes == 0


async def test_connections_take_turns() -> None:
    shared = Listener(SharedLimits())
    servers = [opened(listener=shared) for _ in range(3)]
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
    server = opened(listener=shared)
    server.receive(requests())
    begun = len(server.calls)
    server.connection.connection_lost(None)
    await turns(4 * REQUESTS)
    assert len(server.calls) == begun
    assert all(call.cancelled for call in server.calls)
    assert (server.connection.arriving_bytes, shared.arriving.held_bytes) == (0, 0)


async def test_an_error_ends_the_connection_once_it_is_its_turn() -> None:
    server = opened(echo=True)
    server.receive(requests() + raw_frame(DATA, 0, 0, b"x") + request_frames(2 * REQUESTS + 1, b"0"))
    assert not server.transport.closed
    await turns(4 * REQUESTS)
    assert numbers(server) == list(range(REQUESTS))
    assert server.frames()[-1][0] == GOAWAY
    assert server.transport.closed


async def test_a_flood_is_counted_over_all_its_turns() -> None:
    server = opened(limits=ServerLimits(max_control_frames_per_s=100))
    server.receive(raw_frame(PING, 0, 0, b"12345678") * 1_000)
    assert not server.transport.closed
    await turns(4 * REQUESTS)
    assert server.frames()[-1][0] == GOAWAY


async def test_draining_waits_for_what_has_arrived() -> None:
    server = opened(echo=True)
    server.receive(requests() + raw_frame(PING, 1, 0, b"draining"))
    server.connection.drain()
    assert len(server.calls) <= A_SLICE
    await turns(4 * REQUESTS)
    assert numbers(server) == list(range(REQUESTS))
    goaways = [payload for kind, _, _, payload in server.frames() if kind == GOAWAY]
    assert [int.from_bytes(goaway[:4]) for goaway in goaways] == [LARGEST_STREAM_ID, 2 * REQUESTS - 1]
    assert server.transport.closed


async def test_reading_goes_on_only_when_the_socket_takes_answers_and_nothing_waits() -> None:
    server = opened()
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
    server = opened()
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
