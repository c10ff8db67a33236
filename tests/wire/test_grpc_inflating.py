"""Are compressed requests inflated without holding up the event loop, and within bounds?"""

from __future__ import annotations

import asyncio
import gc
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator

import pytest

from batchtune.wire import inflating
from batchtune.wire.grpc.server_writer import ServerLimits
from batchtune.wire.inflating import GZIP, InflateError, Inflating, Outcome, Packed, TooLargeError
from batchtune.wire.listener import Listener, SharedLimits
from batchtune.wire.status import StatusError
from tests.wire.wire_peers import H2Client, grpc_message, served, until

GZIPPED = [("grpc-encoding", "gzip")]


Room = Callable[[int], None]


def ask(client: H2Client, size: int) -> int:
    """Send so many zeros, compressed."""
    return client.request(raw=grpc_message(bytes(size), compress=True), extra=GZIPPED)


def no_memory(*_: object) -> bytes:
    raise MemoryError


async def inflated(pool: Inflating) -> None:
    await until(lambda: not pool.waiting_bytes)


@pytest.fixture
def pool() -> Inflating:
    return Inflating()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return lambda size: monkeypatch.setattr(inflating, "ROOM_BYTES", size * inflating.BYTES_FOR_EACH)


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("size", [100, 2_000_000])
async def test_what_inflates_to_much_is_inflated_off_the_event_loop(size: int, pool: Inflating) -> None:
    server, client = served(limits=ServerLimits(max_inflated_bytes=2_000_000), inflating=pool)
    stream = ask(client, size)
    gone = ask(client, 2_000_000)
    large = ask(client, 2_000_001)
    await client.reset(gone)
    assert len(server.calls) == (size == 100)
    await inflated(pool)
    await client.exchange()
    assert server.messages == [bytes(size)]
    assert client.status(large)["grpc-status"] == "8"
    assert pool.held_bytes == size
    server.calls[0].reply(b"done")
    await client.exchange()
    assert client.status(stream)["grpc-status"] == "0"
    assert (server.writer.zombies, server.writer.held_bytes, len(server.writer.streams)) == (0, 0, 0)
    assert (pool.held_bytes, pool.waiting_bytes) == (0, 0)


async def test_requests_that_wait_to_be_inflated_are_bounded(
    monkeypatch: pytest.MonkeyPatch, pool: Inflating
) -> None:
    monkeypatch.setattr(inflating, "WAITING_BYTES_MAX", 5_000)
    _, client = served(inflating=pool)
    body = grpc_message(bytes(2_000_000), compress=True)
    assert len(gzip.compress(bytes(2_000_000))) < 5_000 < 3 * len(body)
    streams = [client.request(raw=body, extra=GZIPPED) for _ in range(4)]
    await client.exchange()
    assert "8" in {client.status(stream).get("grpc-status") for stream in streams}
    await inflated(pool)


async def test_nothing_is_inflated_while_what_was_leaves_no_room(room: Room, pool: Inflating) -> None:
    room(5_000_000)
    server, client = served(limits=ServerLimits(max_inflated_bytes=2_000_000), inflating=pool)
    for _ in range(10):
        ask(client, 2_000_000)
    await client.exchange()
    for answered in range(10):
        begun = min(2 + answered, 10)
        await until(lambda begun=begun: len(server.calls) >= begun)
        await asyncio.sleep(0)
        assert pool.held_bytes <= 4_000_000
        server.calls[answered].reply(b"")
    assert pool.held_bytes == pool.waiting_bytes == 0


async def test_nothing_more_is_inflated_while_answers_that_nobody_takes_fill_the_room(room: Room) -> None:
    room(3_000_000)
    shared = Listener(SharedLimits())
    pool = Inflating(shared.unsent)
    fills, filling = served(0, listener=shared, inflating=pool)
    asks, asking = served(listener=shared, inflating=pool)
    await filling.call()
    fills.calls[0].reply(bytes(8_000_000))
    await filling.exchange()
    for _ in range(2):
        ask(asking, 1_000_000)
    await asking.exchange()
    await until(lambda: asks.calls)
    assert (pool.held_bytes, pool.waiting_bytes > 0) == (1_000_000, True)
    fills.connection.connection_lost(None)
    asks.calls[0].reply(b"")
    await until(lambda: len(asks.calls) == 2)


async def test_a_client_that_takes_nothing_has_its_next_calls_put_off(room: Room, pool: Inflating) -> None:
    room(0)
    shared = Listener(SharedLimits())
    limits = ServerLimits(max_unsent_bytes=0, max_buffered_bytes=2_000)
    server, client = served(0, limits=limits, inflating=pool, listener=shared)
    first, put_off, refused = (ask(client, 100_000) for _ in range(3))
    await client.exchange()
    await until(lambda: server.calls)
    server.calls[0].reply(b"an answer that is not taken")
    await inflated(pool)
    assert 1_000 < shared.arriving.held_bytes == server.connection.arriving_bytes < 2_000
    await client.exchange()
    assert "grpc-status" not in client.status(put_off)
    assert client.status(refused)["grpc-status"] == "8", "beyond what may be put off"
    assert (len(server.calls), pool.held_bytes) == (1, 0)
    await client.take(1_000, first)
    await until(lambda: len(server.calls) == 2)
    assert server.calls[1].message == bytes(100_000)
    assert server.connection.arriving_bytes == 0


async def test_calls_that_wait_for_their_client_to_take_answers_wait_compressed(pool: Inflating) -> None:
    server, client = served(0, limits=ServerLimits(max_unsent_bytes=0), inflating=pool)
    first = await client.call(b"x")
    server.calls[0].reply(b"an answer that is not taken")
    await asyncio.sleep(0)
    ask(client, 10_000)
    await client.exchange()
    assert (len(server.calls), pool.held_bytes) == (1, 0)
    await client.take(1_000, first)
    await asyncio.sleep(0)
    assert (len(server.calls), pool.held_bytes) == (2, 10_000)
    server.connection.connection_lost(None)
    server.calls[1].fail("CANCELLED", "")
    assert pool.held_bytes == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_automatic_collection")
@pytest.mark.parametrize("size", [100_000, 2_000_000])
async def test_what_was_inflated_in_vain_is_not_kept(size: int, pool: Inflating) -> None:
    """An exception's frames hold it, and one that refers to itself lives until a collection, which is far away."""

    outcomes: list[str] = []
    packed = Packed(
        content=gzip.compress(bytes(2 * size)),
        wbits=GZIP,
        bytes_max=size,
        go_on=lambda outcome, _: outcomes.append(type(outcome).__name__),
    )

    def counts() -> tuple[int, int]:
        return sys.getrefcount(packed.content), sys.getrefcount(packed)

    gc.collect()
    before = counts()
    pool.start(packed)
    # The thread lets go of its task just after it handed on the outcome.
    await until(lambda: outcomes and counts() == before)
    assert outcomes == ["TooLargeError"]


def test_an_answer_counts_once(pool: Inflating) -> None:
    def go_on(outcome: Outcome, release: object) -> None:
        assert outcome == b"abc"
        assert pool.held_bytes == 3
        assert callable(release)
        release()
        release()

    pool.start(Packed(content=gzip.compress(b"abc"), wbits=GZIP, bytes_max=3, go_on=go_on))
    assert pool.held_bytes == 0


LIE = gzip.compress(b"abcd", mtime=0)[:-4] + b"\2\0\0\0"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LIE, "incorrect length check"),
        (gzip.compress(b"abc", mtime=0) + b"no gzip", "incorrect header"),
        (gzip.compress(b"", mtime=0) * 30 + gzip.compress(b"abc", mtime=0)[:-1], "cut short"),
        (gzip.compress(b"", mtime=0) * 65, "more than 64 members"),
        (gzip.compress(b"abc", mtime=0)[:-1], "cut short"),
        (b"no gzip", "incorrect header"),
    ],
)
async def test_what_is_no_gzip_says_why(content: bytes, said: str) -> None:
    outcome = await outcome_of(content, 3)
    assert isinstance(outcome, InflateError)
    assert said in str(outcome)


async def outcome_of(content: bytes, bytes_max: int) -> Outcome:
    pool = Inflating()
    outcomes: list[Outcome] = []

    def go_on(outcome: Outcome, release: Callable[[], None]) -> None:
        outcomes.append(outcome)
        release()

    pool.start(Packed(content=content, wbits=GZIP, bytes_max=bytes_max, go_on=go_on))
    await until(lambda: outcomes)
    assert (pool.held_bytes, pool.waiting_bytes) == (0, 0)
    return outcomes[0]


@pytest.mark.parametrize("size", [3, 2_000_000])
@pytest.mark.parametrize(
    "after", [b"\0", bytes(600), gzip.compress(b"more", mtime=0), bytes(9) + gzip.compress(b"", mtime=0) * 2]
)
async def test_a_gzip_may_be_padded_and_have_several_members(size: int, after: bytes) -> None:
    content = gzip.compress(bytes(size)) + after
    plain = gzip.decompress(content)
    assert await outcome_of(content, len(plain)) == plain
    too_large = await outcome_of(content, len(plain) - 1)
    assert type(too_large) is TooLargeError


async def test_a_gzip_that_holds_more_than_its_end_says_waits_for_room(room: Room, pool: Inflating) -> None:
    room(3_000_000)
    server, client = served(limits=ServerLimits(max_inflated_bytes=2_000_000), inflating=pool)
    padded = gzip.compress(bytes(2_000_000)) + bytes(4)
    for _ in range(2):
        client.request(raw=b"\1" + len(padded).to_bytes(4) + padded, extra=GZIPPED)
    await client.exchange()
    await until(lambda: server.calls)
    await asyncio.sleep(0.02)
    assert (len(server.calls), pool.held_bytes) == (1, 2_000_000)
    server.calls[0].reply(b"")
    await until(lambda: len(server.calls) == 2)


async def test_what_comes_as_deflate_leaves_room_for_the_next(pool: Inflating) -> None:
    server, client = served(inflating=pool)
    body = zlib.compress(bytes(1_000_000))
    for _ in range(4):
        client.request(raw=b"\1" + len(body).to_bytes(4) + body, extra=[("grpc-encoding", "deflate")])
    await client.exchange()
    await until(lambda: len(server.calls) == 4)
    assert pool.held_bytes == 4_000_000


def test_no_memory_is_the_clients_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflating, "inflate", no_memory)
    outcomes: list[Outcome] = []
    Inflating().start(
        Packed(content=b"x", wbits=GZIP, bytes_max=3, go_on=lambda outcome, _: outcomes.append(outcome))
    )
    assert isinstance(outcomes[0], StatusError)
    assert outcomes[0].code == "RESOURCE_EXHAUSTED"
