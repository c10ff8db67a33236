"""Are compressed requests inflated without holding up the event loop, and within bounds?"""

from __future__ import annotations

import asyncio
import gc
import gzip
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from batchtune.wire import inflating
from batchtune.wire.grpc.server_writer import AnswerWriter, ServerLimits
from batchtune.wire.inflating import GZIP, InflateError, Inflating, Outcome, Packed, TooLargeError
from batchtune.wire.listener import Listener, SharedLimits
from batchtune.wire.status import StatusError
from tests.wire.wire_peers import H2Client, ServerUnderTest, grpc_message

GZIPPED = [("grpc-encoding", "gzip")]


@pytest.mark.parametrize("size", [100, 2_000_000])
def test_what_inflates_to_much_is_inflated_off_the_event_loop(size: int) -> None:
    async def scenario() -> None:
        pool = Inflating()
        server = ServerUnderTest(limits=ServerLimits(max_inflated_bytes=2_000_000), inflating=pool)
        client = H2Client(server)
        stream = client.request(raw=grpc_message(bytes(size), compress=True), extra=GZIPPED)
        gone = client.request(raw=grpc_message(bytes(2_000_000), compress=True), extra=GZIPPED)
        large = client.request(raw=grpc_message(bytes(2_000_001), compress=True), extra=GZIPPED)
        client.h2.reset_stream(gone)
        await client.exchange()
        assert len(server.calls) == (size == 100)
        await inflated(pool)
        await client.exchange()
        assert [call.message for call in server.calls] == [bytes(size)]
        assert client.status(large)["grpc-status"] == "8"
        assert pool.held_bytes == size
        server.calls[0].reply(b"done")
        await client.exchange()
        assert client.status(stream)["grpc-status"] == "0"
        writer = server.connection._writer
        assert writer is not None
        assert (writer.zombies, writer.held_bytes, len(writer.streams)) == (0, 0, 0)
        assert (pool.held_bytes, pool.waiting_bytes) == (0, 0)

    asyncio.run(scenario())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def inflated(pool: Inflating) -> None:
    await until(lambda: not pool.waiting_bytes)


def test_compressed_requests_that_wait_to_be_inflated_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(inflating, "WAITING_BYTES_MAX", 5_000)
        pool = Inflating()
        client = H2Client(ServerUnderTest(inflating=pool))
        body = grpc_message(bytes(2_000_000), compress=True)
        assert len(gzip.compress(bytes(2_000_000))) < 5_000 < 3 * len(body)
        streams = [client.request(raw=body, extra=GZIPPED) for _ in range(4)]
        await client.exchange()
        assert "8" in {client.status(stream).get("grpc-status") for stream in streams}
        await inflated(pool)

    asyncio.run(scenario())


def test_nothing_is_inflated_while_what_was_and_is_not_answered_leaves_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(inflating, "ROOM_BYTES", 5_000_000 * inflating.BYTES_FOR_EACH)
        pool = Inflating()
        server = ServerUnderTest(limits=ServerLimits(max_inflated_bytes=2_000_000), inflating=pool)
        client = H2Client(server)
        for _ in range(10):
            client.request(raw=grpc_message(bytes(2_000_000), compress=True), extra=GZIPPED)
        await client.exchange()
        for answered in range(10):
            begun = min(2 + answered, 10)
            await until(lambda begun=begun: len(server.calls) >= begun)
            await asyncio.sleep(0)
            assert pool.held_bytes <= 4_000_000
            server.calls[answered].reply(b"")
        assert pool.held_bytes == pool.waiting_bytes == 0

    asyncio.run(scenario())


def test_nothing_more_is_inflated_while_answers_that_nobody_takes_fill_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(inflating, "ROOM_BYTES", 3_000_000 * inflating.BYTES_FOR_EACH)
        shared = Listener(SharedLimits())
        pool = Inflating(shared.unsent)
        fills, asks = (ServerUnderTest(listener=shared, inflating=pool) for _ in range(2))
        filling, asking = H2Client(fills, {4: 0}), H2Client(asks)
        filling.request()
        await filling.exchange()
        fills.calls[0].reply(bytes(8_000_000))
        await filling.exchange()
        for _ in range(2):
            asking.request(raw=grpc_message(bytes(1_000_000), compress=True), extra=GZIPPED)
        await asking.exchange()
        await until(lambda: asks.calls)
        assert (pool.held_bytes, pool.waiting_bytes > 0) == (1_000_000, True)
        fills.connection.connection_lost(None)
        asks.calls[0].reply(b"")
        await until(lambda: len(asks.calls) == 2)

    asyncio.run(scenario())


def test_a_client_that_takes_nothing_has_its_next_calls_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(inflating, "ROOM_BYTES", 0)
        pool = Inflating()
        server = ServerUnderTest(limits=ServerLimits(max_unsent_bytes=0), inflating=pool)
        client = H2Client(server, {4: 0})
        body = grpc_message(bytes(100_000), compress=True)
        first, _, cancelled = (client.request(raw=body, extra=GZIPPED) for _ in range(3))
        await client.exchange()
        await until(lambda: server.calls)
        server.calls[0].reply(b"an answer that is not taken")
        client.h2.reset_stream(cancelled)
        await client.exchange()
        await inflated(pool)
        assert (len(server.calls), pool.held_bytes) == (1, 0)
        client.h2.increment_flow_control_window(1_000, first)
        await client.exchange()
        await until(lambda: len(server.calls) == 2)
        assert server.calls[1].message == bytes(100_000)
        assert server.connection.arriving_bytes == 0

    asyncio.run(scenario())


def test_calls_that_wait_for_their_client_to_take_answers_wait_compressed() -> None:
    async def scenario() -> None:
        pool = Inflating()
        server = ServerUnderTest(limits=ServerLimits(max_unsent_bytes=0), inflating=pool)
        client = H2Client(server, {4: 0})
        first = client.request(b"x")
        await client.exchange()
        server.calls[0].reply(b"an answer that is not taken")
        await asyncio.sleep(0)
        client.request(raw=grpc_message(bytes(10_000), compress=True), extra=GZIPPED)
        await client.exchange()
        assert (len(server.calls), pool.held_bytes) == (1, 0)
        client.h2.increment_flow_control_window(1_000, first)
        await client.exchange()
        await asyncio.sleep(0)
        assert (len(server.calls), pool.held_bytes) == (2, 10_000)
        server.connection.connection_lost(None)
        server.calls[1].fail("CANCELLED", "")
        assert pool.held_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [100_000, 2_000_000])
def test_what_was_inflated_in_vain_is_not_kept(size: int) -> None:
    """An exception's frames hold it, and one that refers to itself lives until a collection, which is far away."""

    async def scenario() -> None:
        pool = Inflating()
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

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_an_answer_counts_once() -> None:
    pool = Inflating()

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
def test_what_is_no_gzip_says_why(content: bytes, said: str) -> None:
    async def scenario() -> None:
        outcome = await outcome_of(content, 3)
        assert isinstance(outcome, InflateError)
        assert said in str(outcome)

    asyncio.run(scenario())


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
def test_a_gzip_may_be_padded_and_have_several_members(size: int, after: bytes) -> None:
    async def scenario() -> None:
        content = gzip.compress(bytes(size)) + after
        plain = gzip.decompress(content)
        assert await outcome_of(content, len(plain)) == plain
        too_large = await outcome_of(content, len(plain) - 1)
        assert type(too_large) is TooLargeError

    asyncio.run(scenario())


def test_a_gzip_that_holds_more_than_its_end_says_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(inflating, "ROOM_BYTES", 3_000_000 * inflating.BYTES_FOR_EACH)
        pool = Inflating()
        server = ServerUnderTest(limits=ServerLimits(max_inflated_bytes=2_000_000), inflating=pool)
        client = H2Client(server)
        padded = gzip.compress(bytes(2_000_000)) + bytes(4)
        for _ in range(2):
            client.request(raw=b"\1" + len(padded).to_bytes(4) + padded, extra=GZIPPED)
        await client.exchange()
        await until(lambda: server.calls)
        await asyncio.sleep(0.02)
        assert (len(server.calls), pool.held_bytes) == (1, 2_000_000)
        server.calls[0].reply(b"")
        await until(lambda: len(server.calls) == 2)

    asyncio.run(scenario())


def test_what_comes_as_deflate_leaves_room_for_the_next() -> None:
    async def scenario() -> None:
        pool = Inflating()
        server = ServerUnderTest(inflating=pool)
        client = H2Client(server)
        body = zlib.compress(bytes(1_000_000))
        for _ in range(4):
            client.request(raw=b"\1" + len(body).to_bytes(4) + body, extra=[("grpc-encoding", "deflate")])
        await client.exchange()
        await until(lambda: len(server.calls) == 4)
        assert pool.held_bytes == 4_000_000

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["reply", "failure"])
def test_an_answer_that_cannot_be_sent_is_one_all_the_same(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    async def scenario() -> None:
        monkeypatch.setattr(AnswerWriter, f"send_{ends}", no_memory)
        pool = Inflating()
        server = ServerUnderTest(inflating=pool)
        client = H2Client(server)
        client.request(raw=grpc_message(b"abc", compress=True), extra=GZIPPED)
        await client.exchange()
        (call,) = server.calls
        assert pool.held_bytes == 3
        with pytest.raises(MemoryError):
            call.reply(b"") if ends == "reply" else call.fail("INTERNAL", "")
        assert pool.held_bytes == 0

    asyncio.run(scenario())


def test_calls_that_are_put_off_count_and_fail_beyond_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(inflating, "ROOM_BYTES", 0)
        pool, shared = Inflating(), Listener(SharedLimits())
        limits = ServerLimits(max_unsent_bytes=0, max_buffered_bytes=2_000)
        server = ServerUnderTest(limits=limits, inflating=pool, listener=shared)
        client = H2Client(server, {4: 0})
        body = grpc_message(bytes(100_000), compress=True)
        _, put_off, refused = (client.request(raw=body, extra=GZIPPED) for _ in range(3))
        await client.exchange()
        await until(lambda: server.calls)
        server.calls[0].reply(b"an answer that is not taken")
        await inflated(pool)
        assert 1_000 < shared.arriving.held_bytes == server.connection.arriving_bytes < 2_000
        await client.exchange()
        assert "grpc-status" not in client.status(put_off)
        assert client.status(refused)["grpc-status"] == "8"

    asyncio.run(scenario())


def test_no_memory_is_the_clients_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(inflating, "inflate", partial(no_memory))
    outcomes: list[Outcome] = []
    Inflating().start(
        Packed(content=b"x", wbits=GZIP, bytes_max=3, go_on=lambda outcome, _: outcomes.append(outcome))
    )
    assert isinstance(outcomes[0], StatusError)
    assert outcomes[0].code == "RESOURCE_EXHAUSTED"
