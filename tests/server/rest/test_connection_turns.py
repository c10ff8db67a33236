"""Does a REST connection that has more to do than a slice let others go first, and answer everything in order?"""

from __future__ import annotations

import asyncio
import itertools
import json
import re

from batchtune.server.metrics import Metrics
from batchtune.server.rest.connection import RestConnection
from batchtune.server.rest.parser import RestLimits
from batchtune.server.rest.rest_api import RestApi
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.listener import LARGE_READ_BYTES, Listener, SharedLimits
from tests.server.server_fakes import FakeModels
from tests.wire.wire_peers import MemoryTransport, turns

REQUESTS = 60
A_SLICE = 6
"""Looks at a clock that ticks 0.1 ms with each, at most: after each answer, and each piece that is parsed."""


class RestUnderTest:
    """A connection in memory, for which each look at the clock takes 0.1 ms."""

    def __init__(self) -> None:
        ticks = itertools.count()
        self.shared = Listener(SharedLimits())
        self.shared.turns.now_s = lambda: next(ticks) * 0.0001
        self.transport = MemoryTransport()
        self.models = FakeModels()
        self.connection = RestConnection(
            RestApi(self.models, Metrics(), ServerFlags()),
            limits=RestLimits(),
            listener=self.shared,
        )
        self.connection.connection_made(self.transport)

    @property
    def answered(self) -> list[int]:
        """The numbers of the requests answered."""
        return [int(number) for number in re.findall(rb"Not found: /n(\d+)", self.transport.written)]


def requests(first: int = 0) -> bytes:
    return b"".join(
        b"GET /n%02d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(first, first + REQUESTS)
    )


async def test_others_have_their_turn_between_two_slices_and_the_order_is_kept() -> None:
    rest = RestUnderTest()
    counts: list[int] = []
    rest.connection.data_received(requests())
    assert 0 < len(rest.answered) <= A_SLICE
    assert rest.transport.reads_paused
    while len(rest.answered) < REQUESTS:
        counts.append(len(rest.answered))
        await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise(counts)) <= A_SLICE
    assert rest.answered == list(range(REQUESTS))
    await asyncio.sleep(0)
    assert not rest.transport.reads_paused
    assert rest.connection.arriving_bytes == 0


async def test_a_body_in_chunks_of_a_byte_is_read_in_turns() -> None:
    rest = RestUnderTest()
    body = json.dumps({"instances": [1.0] * 5_000}).encode()
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sent = head + chunks
    first = LARGE_READ_BYTES - 1  # one more and it would wait for its turn before the first byte
    rest.connection.data_received(sent[:first])
    assert 0 < rest.connection.waiting_bytes < first
    assert rest.connection.waits_for_us
    rest.connection.data_received(sent[first:])
    assert rest.connection.waiting_bytes > len(sent) - first
    await turns(4 * REQUESTS)
    assert rest.transport.written.count(b"2.5") == 5_000
    assert not rest.connection.waits_for_us
    ((_, inputs, _, _),) = rest.models.servable.asked
    assert inputs["x"].shape == (5_000,)


async def test_what_arrives_meanwhile_comes_after_what_waits() -> None:
    rest = RestUnderTest()
    frames = requests()
    for at in range(0, len(frames), 50):
        rest.connection.data_received(frames[at : at + 50])
    rest.connection.data_received(requests(REQUESTS))
    assert len(rest.answered) < 2 * REQUESTS
    await turns(4 * REQUESTS)
    assert rest.answered == list(range(2 * REQUESTS))


async def test_nothing_is_answered_or_kept_of_a_client_that_is_gone() -> None:
    rest = RestUnderTest()
    rest.connection.data_received(requests())
    answered = len(rest.answered)
    rest.connection.connection_lost(None)
    await turns(4 * REQUESTS)
    assert len(rest.answered) == answered
    assert (rest.connection.arriving_bytes, rest.shared.arriving.held_bytes) == (0, 0)
    assert not rest.shared.connections


async def test_draining_answers_what_has_arrived_and_closes() -> None:
    rest = RestUnderTest()
    rest.connection.data_received(requests())
    rest.connection.drain()
    assert not rest.transport.closed
    await turns(4 * REQUESTS)
    assert rest.answered == list(range(REQUESTS))
    assert rest.transport.closed


async def test_reading_goes_on_only_when_the_socket_takes_answers_and_nothing_waits() -> None:
    rest = RestUnderTest()
    rest.connection.data_received(requests())
    rest.connection.pause_writing()
    await turns(4 * REQUESTS)
    assert len(rest.answered) < REQUESTS
    assert rest.transport.reads_paused
    rest.connection.resume_writing()
    await turns(4 * REQUESTS)
    assert rest.answered == list(range(REQUESTS))
    assert not rest.transport.reads_paused


async def test_a_large_read_waits_for_a_turn() -> None:
    rest = RestUnderTest()
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    rest.connection.data_received(head.ljust(LARGE_READ_BYTES))
    assert rest.transport.reads_paused
    assert rest.connection.waiting_bytes == LARGE_READ_BYTES
    await turns(4 * REQUESTS)
    assert not rest.transport.reads_paused
    assert rest.connection.waiting_bytes == 0
