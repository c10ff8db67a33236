"""Our gRPC server connection against hyper-h2 by script and frames by hand, in memory."""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
import tracemalloc
from typing import Any

import h2.events
import pytest
from h2.errors import ErrorCodes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream, known_heads
from batchtune.wire.grpc.server_writer import ServerLimits
from batchtune.wire.http2 import PREFACE, encode_block
from batchtune.wire.listener import SWEEP_S, Listener, SharedLimits
from batchtune.wire.status import StatusError
from tests.wire.wire_peers import (
    ANSWER_HEAD,
    BLOCK,
    BROKEN_FRAMES,
    REQUEST_HEADERS,
    H2Client,
    ServerUnderTest,
    frames_of,
    grpc_message,
    opened,
    raw_frame,
    request_frames,
    served,
    turns,
)

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)


def goaway_of(server: ServerUnderTest) -> tuple[int, bytes]:
    kind, _, _, payload = server.frames()[-1]
    assert kind == GOAWAY
    return struct.unpack_from(">I", payload, 4)[0], payload[8:]


async def test_a_call_is_dispatched_with_what_the_client_said() -> None:
    server, client = served()
    before_ns = time.monotonic_ns()
    stream_id = client.request(
        b"hello", extra=[("grpc-timeout", "10S"), ("key", "value"), ("raw-bin", "AP8")]
    )
    await client.call()
    call, without_timeout = server.calls
    assert without_timeout.deadline_ns is None
    assert (call.path, call.message, call.cancelled) == ("/p.S/M", b"hello", False)
    assert call.head.metadata == (("key", "value"), ("raw-bin", "AP8"))
    assert call.deadline_ns is not None
    assert 0 <= call.deadline_ns - before_ns - 10 * 10**9 < 10**9
    call.reply(b"world")
    call.reply(b"ignored")
    call.fail("INTERNAL", "ignored")
    await client.exchange()
    assert client.data(stream_id) == grpc_message(b"world")
    assert client.status(stream_id) == {**dict(ANSWER_HEAD), "grpc-status": "0"}
    assert client.of(h2.events.StreamEnded)


def refuse(_call: GrpcCall) -> None:
    raise StatusError("RESOURCE_EXHAUSTED", "no")


async def test_a_status_error_raised_by_dispatch_is_the_answer() -> None:
    server, client = served()
    server.connection._held.dispatch = refuse
    stream_id, pieces = client.request(), client.request(end_stream=False)
    client.h2.send_data(pieces, b"", end_stream=True)
    await client.exchange()
    assert client.status(stream_id)["grpc-status"] == client.status(pieces)["grpc-status"] == "8"


@pytest.mark.parametrize("echo", [False, True])
async def test_answers_of_one_turn_leave_in_one_write(echo: bool) -> None:
    server = opened(echo=echo)
    server.transport.writes = 0
    server.receive(b"".join(request_frames(i) for i in (1, 3, 5, 7)))
    for call in reversed(server.calls):
        call.reply(b"pong")
    await asyncio.sleep(0)
    assert server.transport.writes == 1


async def test_header_blocks_with_a_dynamic_table_are_read_until_the_client_empties_it() -> None:
    server, client = served(echo=True)
    client.server.receive(client.h2.data_to_send())  # do not show it our SETTINGS yet
    ids = [client.request(b"%d" % i, extra=[("key", f"value {i % 2}")]) for i in range(4)]
    server.receive(client.h2.data_to_send())
    await client.exchange()
    ids += [client.request(b"%d" % i, extra=[("key", f"value {i % 2}")]) for i in range(4, 8)]
    await client.exchange()
    assert [client.data(i) for i in ids] == [grpc_message(b"%d" % i) for i in range(8)]
    assert [call.head.metadata for call in server.calls] == [(("key", f"value {i % 2}"),) for i in range(8)]
    assert server.connection._head_reader.is_pure


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("identity", b"", "12"),
        ("identity", grpc_message(b"a") + grpc_message(b"b"), "12"),
        ("identity", grpc_message(b"abc")[:-1], "13"),
        ("identity", b"\x00", "13"),
        ("identity", b"\x09\x00\x00\x00\x00", "13"),
        ("identity", b"\x00\x00\x00\x03\xe9", "8"),
        ("gzip", b"\x01\x00\x00\x00\x01x", "13"),
        ("br", b"\x01\x00\x00\x00\x01x", "12"),
    ],
)
async def test_a_request_that_is_not_one_message_is_refused(encoding: str, body: bytes, status: str) -> None:
    server, client = served(limits=ServerLimits(max_message_bytes=1_000))
    extra = [("grpc-encoding", encoding)]
    whole, open_ended = (client.request(raw=body, extra=extra, end_stream=ends) for ends in (True, False))
    await client.exchange()
    assert client.status(whole)["grpc-status"] == status
    assert not server.calls
    if status == "8":  # refused though its request is not complete
        assert client.status(open_ended)["grpc-status"] == status
        (reset,) = client.of(h2.events.StreamReset)
        assert (reset.stream_id, reset.error_code) == (open_ended, ErrorCodes.NO_ERROR)
        server.receive(raw_frame(DATA, 0, open_ended, b"late"))
        assert not server.transport.closed


async def test_a_request_without_body_is_refused() -> None:
    server = opened()
    server.receive(raw_frame(HEADERS, 5, 1, BLOCK))
    assert b"\x0212" in server.transport.take()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({":method": "GET"}, "405"),
        ({"content-type": "text/plain"}, "415"),
        ({"content-type": "application/grpcx"}, "415"),
    ],
)
async def test_what_is_no_grpc_call_gets_an_http_status(change: dict[str, str], status: str) -> None:
    server, client = served()
    headers = [(name, change.get(name, value)) for name, value in REQUEST_HEADERS]
    stream_id, open_ended = client.request(headers=headers), client.request(headers=headers, end_stream=False)
    await client.exchange()
    assert client.status(stream_id)[":status"] == client.status(open_ended)[":status"] == status
    assert b"gRPC" in client.data(stream_id)
    assert not server.calls


@pytest.mark.parametrize(
    "fields",
    [
        REQUEST_HEADERS[1:],
        (*REQUEST_HEADERS, (":path", "/again")),
        ((":method", "POST"), *REQUEST_HEADERS),
        (*REQUEST_HEADERS, (":unknown", "x")),
        (*REQUEST_HEADERS, ("Upper", "x")),
        (*REQUEST_HEADERS, ("connection", "close")),
        (*REQUEST_HEADERS, ("grpc-timeout", "soon")),
        (*REQUEST_HEADERS, ("key", "a\r\nb: c")),
        (*REQUEST_HEADERS, ("a key", "x")),
        (*REQUEST_HEADERS, ("key\n", "x")),
        (*REQUEST_HEADERS, ("a:key", "x")),
        (*REQUEST_HEADERS, ("content-length", "4"), ("content-length", "9")),
        (*REQUEST_HEADERS, ("content-length", "-1")),
        (*REQUEST_HEADERS, ("content-length", "9" * 5_000)),
        (*REQUEST_HEADERS[:4], ("te", "gzip"), REQUEST_HEADERS[5]),
    ],
)
async def test_a_malformed_request_resets_its_stream_only(fields: tuple[tuple[str, str], ...]) -> None:
    server = opened(echo=True)
    server.receive(raw_frame(HEADERS, 4, 1, encode_block(fields)) + request_frames(3))
    frames = server.frames()
    assert frames[0] == (RST, 0, 1, b"\0\0\0\1")
    assert server.messages == [b"ping"]


async def test_a_stream_window_above_the_maximum_resets_the_stream() -> None:
    server = opened()
    server.receive(request_frames(1) + raw_frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff"))
    assert server.frames()[-1] == (RST, 0, 1, b"\0\0\0\3")
    assert server.calls[0].cancelled
    server.calls[0].reply(b"nobody listens")


async def test_a_reset_cancels_the_call_and_its_place_is_free_only_when_the_service_is_done() -> None:
    server = opened(limits=ServerLimits(max_concurrent_streams=2))
    server.receive(request_frames(1) + request_frames(3))
    server.receive(raw_frame(RST, 0, 1, b"\0\0\0\x08") + request_frames(5))
    assert server.calls[0].cancelled
    assert server.frames() == [(RST, 0, 5, b"\0\0\0\7")]
    server.calls[0].fail("CANCELLED", "gone")
    server.receive(request_frames(7))
    assert len(server.calls) == 3
    assert not server.transport.take()


async def test_draining_finishes_what_was_sent_and_refuses_nothing_that_crossed_it() -> None:
    server, client = served()
    first = await client.call(b"first")
    server.connection.drain()
    crossing = client.request(b"crossing")  # sent before our GOAWAY arrives
    server.receive(client.h2.data_to_send())
    received = server.transport.take()
    assert [frame[0] for frame in frames_of(received)] == [GOAWAY, PING]
    server.receive(raw_frame(PING, 1, 0, frames_of(received)[1][3]))
    assert server.frames()[-1] == (GOAWAY, 0, 0, crossing.to_bytes(4) + bytes(4))
    server.receive(request_frames(crossing + 2))
    assert server.frames() == [(RST, 0, crossing + 2, b"\0\0\0\7")]
    assert server.messages == [b"first", b"crossing"]
    for call in server.calls:
        assert not server.transport.closed
        call.reply(b"done")
        await asyncio.sleep(0)
    assert server.transport.closed
    assert first < crossing


@pytest.mark.parametrize(("age_ms", "grace_ms"), [(0, 1), (1, 0), (1, 1)])
async def test_an_old_connection_is_told_to_go_and_closed_after_the_grace(age_ms: int, grace_ms: int) -> None:
    """So that clients behind a balancer of connections spread over new replicas."""
    limits = ServerLimits(max_connection_age_ms=age_ms, max_connection_age_grace_ms=grace_ms)
    server = opened(limits=limits)
    server.receive(request_frames(1))
    for _ in range(3):
        await asyncio.sleep(0.005)
        server.connection.close_if_due()
    assert [frame[0] for frame in server.frames()] == ([GOAWAY, PING] if age_ms else [])
    assert server.transport.closed == (age_ms > 0 and grace_ms > 0)


async def test_a_stream_exchanges_messages_both_ways() -> None:
    streams: list[GrpcStream] = []

    def serve(stream: GrpcStream) -> None:
        streams.append(stream)
        stream.on_message = lambda message: stream.send(message[::-1])
        stream.on_end = stream.finish

    server, client = served(streams={"/p.S/M": serve})
    stream_id = await client.call(b"abc", end_stream=False)
    assert client.data(stream_id) == grpc_message(b"cba")
    client.h2.send_data(stream_id, grpc_message(b"de") + grpc_message(b"fg"), end_stream=True)
    await client.exchange()
    assert client.data(stream_id) == b"".join(grpc_message(part) for part in (b"cba", b"ed", b"gf"))
    assert client.status(stream_id)["grpc-status"] == "0"
    await client.call(b"", end_stream=False)
    await client.reset(stream_id + 2)
    assert streams[1].cancelled
    for ended in streams:
        ended.send(b"late")
        ended.finish("INTERNAL", "late")
    assert not server.writer.streams
    assert not server.transport.take()


async def test_a_stream_may_fail_and_its_messages_wait_for_the_window() -> None:
    def serve(stream: GrpcStream) -> None:
        for _ in range(3):
            stream.send(b"x" * 995)
        stream.finish("ABORTED", "enough")

    _, client = served(100, streams={"/p.S/M": serve})
    client.h2.send_headers(1, REQUEST_HEADERS, end_stream=True)
    await client.exchange()
    assert len(client.data(1)) == 100
    await client.take(2_900, 1)
    assert client.data(1) == grpc_message(b"x" * 995) * 3
    assert client.status(1)["grpc-status"] == "10"


async def test_what_waits_for_a_client_that_does_not_read_is_bounded_and_its_calls_fail() -> None:
    server, client = served(0, limits=ServerLimits(max_queued_bytes=10_000))
    stream_ids = [client.request() for _ in range(50)]
    await client.exchange()
    for call in server.calls:
        call.reply(b"x" * 995)
    await client.exchange()
    refused = [one for one in stream_ids if client.status(one).get("grpc-status") == "8"]
    assert refused == stream_ids[10:]
    assert server.writer._flow.queued_bytes == 10_000
    await client.take(1_000, stream_ids[0])
    assert client.data(stream_ids[0]) == grpc_message(b"x" * 995)
    server, client = served(limits=ServerLimits(max_queued_bytes=10_000))
    await client.call()
    server.calls[0].reply(b"x" * 20_000)
    await client.exchange()
    assert client.data(1) == grpc_message(b"x" * 20_000), "one may be larger than what may wait"


async def test_what_waits_for_a_socket_that_is_clogged_is_bounded_whatever_the_windows_allow() -> None:
    server, client = served(limits=ServerLimits(max_queued_bytes=10_000))
    stream_ids = [client.request() for _ in range(3)]
    await client.exchange()
    server.connection.pause_writing()
    for call, clogged_bytes in zip(server.calls, (8_000, 9_500), strict=False):
        server.transport.clogged_bytes = clogged_bytes
        call.reply(b"x" * 995)
    server.connection.resume_writing()
    server.calls[2].reply(b"x" * 995)
    await client.exchange()
    assert [client.status(number)["grpc-status"] for number in stream_ids] == ["0", "8", "0"]


async def test_a_stream_whose_messages_nobody_reads_is_ended() -> None:
    def serve(stream: GrpcStream) -> None:
        for _ in range(10_000):
            stream.send(b"x" * 995)

    server, client = served(0, streams={"/p.S/M": serve}, limits=ServerLimits(max_queued_stream_bytes=10_000))
    client.h2.send_headers(1, REQUEST_HEADERS, end_stream=True)
    client.h2.send_headers(3, REQUEST_HEADERS, end_stream=True)
    await client.exchange()
    assert server.writer._flow.queued_bytes < 12_000
    assert client.status(3)["grpc-status"] == "8"
    await client.take(20_000, 1)
    assert client.data(1) == grpc_message(b"x" * 995) * 11
    assert client.status(1)["grpc-status"] == "8"


async def test_long_heads_are_not_remembered() -> None:
    before = len(known_heads)
    for number in range(30):
        server = ServerUnderTest()
        client = H2Client(server)
        for _ in range(2):
            await client.call(extra=[("key", f"{number}" + "v" * 4_000)])
        assert len(server.calls) == 2
    kept = list(known_heads.values())[before:]
    assert sum(len(value) for head in kept for _, value in head.metadata) < 10_000


@pytest.mark.parametrize(
    ("told", "pieces", "dispatched"),
    [
        (9, [9], True),
        (8, [9], False),
        (10, [9], False),
        (9, [7, 2], True),
        (10, [7, 2], False),
        (6, [7, 2], False),
        (0, [9], False),
    ],
)
async def test_data_of_another_length_resets_the_stream(
    told: int, pieces: list[int], dispatched: bool
) -> None:
    block = encode_block((*REQUEST_HEADERS, ("content-length", str(told))))
    message = grpc_message(b"ping")
    server = opened(echo=True)
    server.receive(raw_frame(HEADERS, 4, 1, block))
    for end in itertools.accumulate(pieces):
        server.receive(raw_frame(DATA, end == 9, 1, message[:end]))
        message = message[end:] if end < 9 else message
    assert server.messages == [b"ping"] * dispatched
    assert ((RST, 0, 1, b"\0\0\0\1") in server.frames()) != dispatched
    server.receive(request_frames(3))
    assert server.messages[-1] == b"ping"
    assert (server.writer.held_bytes, server.writer.begun_streams) == (0, 0)


async def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    server = opened(echo=True)
    server.receive(request_frames(1 | 1 << 31) + request_frames(3))
    server.receive(raw_frame(PING, 0, 1 << 31, b"12345678"))
    assert {stream_id for kind, _, stream_id, _ in server.frames()} == {1, 3, 0}
    assert server.messages == [b"ping"] * 2


BROKEN = {
    **BROKEN_FRAMES,
    "window of an idle stream": (raw_frame(WINDOW, 0, 77, b"\0\0\0\1"), 1),
    "priority of 4 bytes": (raw_frame(PRIORITY, 0, 1, b"\0\0\0\0"), 6),
    "push enabled twice": (raw_frame(SETTINGS, 0, 0, b"\0\2\0\0\0\2"), 1),
    "dynamic table after emptying it": (raw_frame(HEADERS, 4, 1, b"\x20\xbe"), 9),
    "large header list": (raw_frame(HEADERS, 4, 1, encode_block([("a", "x" * 32_760)])), 11),
    "header bomb": (raw_frame(HEADERS, 4, 1, b"\x40\x01a\x7f\x81\x1e" + b"x" * 4_000 + b"\xbe" * 10_000), 11),
    "endless continuations": (raw_frame(HEADERS, 0, 1, BLOCK) + raw_frame(CONTINUATION, 0, 1) * 100, 11),
    "settings flood": (raw_frame(SETTINGS, 0, 0) * 301, 11),
    "settings acknowledged too often": (raw_frame(SETTINGS, 1, 0) * 20_001, 11),
    "ping flood": (raw_frame(PING, 0, 0, b"12345678") * 20_001, 11),
    "priority flood": (raw_frame(PRIORITY, 0, 1, b"\0\0\0\0\0") * 20_001, 11),
    "empty data flood": (raw_frame(HEADERS, 4, 1, BLOCK) + raw_frame(DATA, 0, 1) * 20_001, 11),
    "one-byte data flood": (
        raw_frame(HEADERS, 4, 1, BLOCK)
        + raw_frame(DATA, 0, 1, b"\0\0\1\0\0")  # of a message that does not end
        + raw_frame(DATA, 0, 1, b"x") * 20_020,
        11,
    ),
    "window flood": (raw_frame(HEADERS, 4, 1, BLOCK) + raw_frame(WINDOW, 0, 1, b"\0\0\0\1") * 20_020, 11),
    "connection window flood": (raw_frame(WINDOW, 0, 0, b"\0\0\0\1") * 20_001, 11),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_malformed_or_flooding_client_gets_goaway_with_the_code(name: str) -> None:
    data, code = BROKEN[name]
    server = opened()
    server.receive(data)
    assert goaway_of(server)[0] == code
    assert server.transport.closed
    server.receive(b"more")
    server.connection.connection_lost(None)
    assert not server.connections


async def test_windows_opened_and_prefixes_sent_for_each_request_are_no_flood() -> None:
    server = opened(limits=ServerLimits(max_control_frames_per_s=10), echo=True)
    whole = grpc_message(b"ping")
    for stream_id in range(1, 401, 2):
        server.receive(
            raw_frame(HEADERS, 4, stream_id, BLOCK),
            raw_frame(DATA, 0, stream_id, whole[:5]),
            raw_frame(WINDOW, 0, stream_id, b"\0\0\0\x09"),
            raw_frame(DATA, 1, stream_id, whole[5:]),
            raw_frame(WINDOW, 0, 0, b"\0\0\0\x09"),
        )
    assert len(server.calls) == 200
    assert not server.transport.closed


async def test_rapid_resets_end_the_connection_and_never_pile_up_work() -> None:
    limits = ServerLimits(max_concurrent_streams=100, max_resets_per_s=1_000)
    server = opened(limits=limits)
    for stream_id in range(1, 2_003, 2):
        server.receive(request_frames(stream_id) + raw_frame(RST, 0, stream_id, b"\0\0\0\x08"))
    assert len(server.calls) == 100
    assert not server.transport.closed or goaway_of(server)[0] == 11
    idle = opened(limits=limits, echo=False)
    for stream_id in range(1, 2_005, 2):
        idle.connection.data_received(
            raw_frame(HEADERS, 4, stream_id, BLOCK) + raw_frame(RST, 0, stream_id, b"\0\0\0\x08")
        )
    assert goaway_of(idle) == (11, b"too many streams reset")


async def test_incomplete_requests_are_bounded_together_but_one_may_be_large() -> None:
    server = opened(limits=ServerLimits(max_buffered_bytes=10_000))
    body = grpc_message(b"x" * 50_000)
    server.receive(raw_frame(HEADERS, 4, 1, BLOCK) + raw_frame(DATA, 0, 1, body[:40_000]))
    assert not server.transport.take()
    server.receive(raw_frame(HEADERS, 4, 3, BLOCK) + raw_frame(DATA, 0, 3, body[:5]))
    answered = {frame[2] for frame in server.frames()}
    assert answered == {3}
    server.receive(raw_frame(DATA, 1, 1, body[40_000:]))
    assert server.calls[0].message == b"x" * 50_000
    assert server.writer.held_bytes == 0


async def test_the_account_of_held_bytes_returns_to_zero_whatever_ends_a_request() -> None:
    server = opened(limits=ServerLimits(max_message_bytes=1_000))
    writer = server.writer
    part = raw_frame(DATA, 0, 1, grpc_message(b"x" * 900)[:500])
    endings = [
        raw_frame(RST, 0, 1, b"\0\0\0\x08"),
        raw_frame(DATA, 1, 1, b"x"),
        raw_frame(HEADERS, 5, 1, BLOCK),
        raw_frame(HEADERS, 4, 1, BLOCK),
        raw_frame(DATA, 0, 1, b"x" * 405 + grpc_message(b"second")),
        raw_frame(DATA, 0, 1, b"x" * 405 + b"\0\0\1\0\0"),
    ]
    for stream_id, ending in zip(itertools.count(1, 2), endings, strict=False):
        frames = raw_frame(HEADERS, 4, 1, BLOCK) + part + ending
        server.receive(
            *(raw_frame(kind, flags, stream_id, data) for kind, flags, _, data in frames_of(frames))
        )
        assert (writer.held_bytes, len(writer.streams)) == (0, 0)
    assert not server.calls


SOON_CUT_OFF = ServerLimits(shared=SharedLimits(patience_s=SWEEP_S))


async def test_a_clogged_socket_stops_reading_and_a_stalled_client_is_cut_off() -> None:
    server = opened(limits=SOON_CUT_OFF)
    server.transport.clogged_bytes = 10
    server.connection.pause_writing()
    assert server.transport.reads_paused
    server.connection.resume_writing()
    assert not server.transport.reads_paused
    server.connection.pause_writing()
    never_opens, client = served(0, echo=True, limits=SOON_CUT_OFF)
    await client.call()
    for stalled in (server, never_opens):
        for _ in range(2):  # in the first it is new
            assert not stalled.transport.aborted
            stalled.connection._listener.sweep()
        assert stalled.transport.aborted


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/1.1\r\n\r\n"])
async def test_who_speaks_http_1_is_told_so_in_http_1_and_others_get_goaway(first: bytes) -> None:
    server = ServerUnderTest()
    server.receive(first)
    answer = server.transport.take()
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"gRPC" in answer
    other = ServerUnderTest()
    other.receive(b"\x16\x03\x01\x02\x00\x01")
    assert goaway_of(other)[0] == 1
    assert (server.transport.closed, other.transport.closed) == (True, True)


def session() -> bytes:
    """What a client says, in all the ways that a request can come."""
    message = grpc_message(b"ping")
    table = encode_block(REQUEST_HEADERS, opens_table=False)
    packed = encode_block([*REQUEST_HEADERS, ("grpc-encoding", "gzip")])
    parts = [
        PREFACE,
        raw_frame(SETTINGS, 0, 0, b"\0\4\0\1\0\0"),
        raw_frame(HEADERS, 4, 1, table) + raw_frame(DATA, 1, 1, message),
        raw_frame(HEADERS, 4, 3, BLOCK) + raw_frame(DATA, 1, 3, message),
        raw_frame(HEADERS, 0x28, 5, b"\2\0\0\0\0\x10" + BLOCK[:9] + b"\0\0"),  # padded, with a priority
        raw_frame(CONTINUATION, 0, 5, BLOCK[9:20]) + raw_frame(CONTINUATION, 4, 5, BLOCK[20:]),
        raw_frame(DATA, 0, 5, message[:2])
        + raw_frame(PING, 0, 0, b"12345678")
        + raw_frame(DATA, 9, 5, b"\2" + message[2:] + b"\0\0"),
        raw_frame(HEADERS, 4, 7, packed) + raw_frame(DATA, 1, 7, grpc_message(b"ping", compress=True)),
        raw_frame(HEADERS, 4, 9, BLOCK) + raw_frame(DATA, 0, 9, message) + raw_frame(HEADERS, 5, 9, table),
        raw_frame(HEADERS, 4, 11, BLOCK) + raw_frame(RST, 0, 11, bytes(4)),
        raw_frame(WINDOW, 0, 0, b"\0\0\1\0"),
        raw_frame(HEADERS, 5, 13, encode_block([(":method", "GET"), (":scheme", "http"), (":path", "/")])),
    ]
    return b"".join(parts)


def answers_to(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    async def run() -> tuple[list[bytes], bytes]:
        server = ServerUnderTest(echo=True)
        server.receive(*pieces)
        return server.messages, server.transport.take()

    return asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1_200), max_size=60))
@example(list(range(1_500)))
def test_frames_cut_at_any_byte_give_the_same_answers(cuts: list[int]) -> None:
    data = session()
    whole = answers_to([data])
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    assert answers_to([data[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert whole[0] == [b"ping"] * 5


HOLDING = ServerLimits(max_unsent_bytes=10_000, max_buffered_bytes=50_000)


async def behind(size: int = 20_000, **options: Any) -> tuple[ServerUnderTest, H2Client]:
    """A server with a client whose windows are closed and that has so many bytes to take, on stream 1."""
    server, client = served(0, **(options or {"limits": HOLDING}))
    await client.call()
    server.calls.pop().reply(b"x" * size)
    await client.exchange()
    return server, client


async def take_all(client: H2Client) -> None:
    await client.take(20_005, 1)
    await turns()


async def test_calls_are_begun_once_the_client_has_taken_its_answers() -> None:
    server, client = await behind()
    sent = [client.request(b"%d" % number) for number in range(40)]
    await client.exchange()
    assert not server.calls
    assert server.connection.arriving_bytes > 40_000
    await client.take(9_000, 1)
    assert not server.calls, "11 kB wait yet"
    await client.take(11_005, 1)
    await turns()
    assert [call.stream_id for call in server.calls] == sent
    assert server.connection.arriving_bytes == 0
    assert client.data(1)[5:] == b"x" * 20_000


async def test_held_calls_are_begun_a_few_at_a_time_and_no_more_of_them_once_answers_wait_again() -> None:
    server, client = await behind()
    for number in range(40):
        client.request(b"%d" % number)
    await client.exchange()
    server.connection._held.dispatch = lambda call: (server.calls.append(call), call.reply(b"x" * 2_000))
    await take_all(client)
    assert 0 < len(server.calls) < 40
    assert server.connection.unsent_bytes <= 16 * 2_005 + 10_000


async def test_a_socket_that_takes_nothing_holds_calls_until_it_does() -> None:
    server, client = served(limits=HOLDING)
    await client.exchange()
    server.transport.clogged_bytes = 20_000
    server.connection.pause_writing()
    await client.call()
    assert not server.calls
    server.transport.clogged_bytes = 0
    server.connection.resume_writing()
    await client.exchange()
    assert len(server.calls) == 1


async def test_where_there_is_little_room_only_clients_that_take_answers_get_many_calls_at_once() -> None:
    shared = Listener(SharedLimits(idle_unsent_bytes_max=400_000))
    takes, taking = await behind(listener=shared)
    await take_all(taking)
    await behind(100_000, listener=shared)
    new, fresh = served(0, listener=shared)
    for client in (fresh, taking):
        for _ in range(40):
            client.request()
        client.server.receive(client.h2.data_to_send())
    assert (len(new.calls), len(takes.calls)) == (0, 40)
    await turns()
    assert len(new.calls) == 2, "under way at a time"
    for number in range(3):
        new.calls[number].reply(b"x" * 30_000)
        await turns()
    assert (len(new.calls), new.connection.unsent_bytes) == (4, 3 * 30_005), (
        "no more until the client takes these"
    )


@pytest.mark.parametrize("ends", ["answered", "cancelled", "refused"])
async def test_the_next_call_of_a_client_on_trial_is_begun_however_the_one_before_ends(ends: str) -> None:
    shared = Listener(SharedLimits(idle_unsent_bytes_max=0))
    await behind(1, listener=shared)
    server, client = served(listener=shared)
    sent = [client.request() for _ in range(6)]
    await client.exchange()
    await turns()
    while len(server.calls) < 6:
        call = server.calls[-1]
        if ends == "cancelled":
            await client.reset(call.stream_id)
        begun = len(server.calls)
        call.fail("UNAVAILABLE", "closing") if ends == "refused" else call.reply(b"x")
        await turns()
        assert len(server.calls) > begun
    assert [call.stream_id for call in server.calls] == sent


async def crowded() -> tuple[ServerUnderTest, ServerUnderTest]:
    """A server whose client takes nothing, so that there is little room; and one whose client has 40 calls."""
    shared = Listener(SharedLimits(idle_unsent_bytes_max=400_000))
    fills, _ = await behind(100_000, listener=shared)
    server, client = served(listener=shared)
    for _ in range(40):
        client.request()
    await client.exchange()
    await turns()
    assert len(server.calls) == 2
    return fills, server


async def test_a_client_on_trial_gets_one_more_call_for_each_answer_and_all_where_there_is_room() -> None:
    fills, server = await crowded()
    for under_way in (4, 8, 16):
        for call in server.calls:
            call.reply(b"x")
        await turns()
        assert sum(not call.answered for call in server.calls) == under_way
    fills.connection.connection_lost(None)
    await turns()
    assert len(server.calls) == 40
    assert not server.connection._listener.unsent.waiting


async def test_nobody_waits_for_room_who_is_gone() -> None:
    _, server = await crowded()
    waiting = server.connection._listener.unsent.waiting
    assert len(waiting) == 1
    server.connection.connection_lost(None)
    assert not waiting


async def test_requests_that_are_not_whole_are_refused_beyond_their_number() -> None:
    server, client = served(limits=ServerLimits(max_begun_streams=3))
    begun = [client.request(raw=b"", end_stream=False) for _ in range(5)]
    await client.exchange()
    refused = [event.stream_id for event in client.events if isinstance(event, h2.events.StreamReset)]
    assert refused == begun[3:]
    client.h2.send_data(begun[0], grpc_message(b"x"), end_stream=True)
    client.h2.reset_stream(begun[1])
    client.request()
    whole = await client.call()
    assert [call.stream_id for call in server.calls] == [begun[0], whole - 2, whole]
    server.calls[0].reply(b"")
    server.connection.refuse_arriving()
    await client.exchange()
    assert server.writer.begun_streams == 0


async def test_a_call_that_is_cancelled_while_it_waits_is_never_begun_and_one_refused_after_all_fails() -> (
    None
):
    server, client = await behind()
    cancelled, refused = client.request(), client.request()
    await client.exchange()
    server.connection._held.dispatch = lambda call: (server.calls.append(call), refuse(call))
    client.h2.reset_stream(cancelled)
    await take_all(client)
    assert [call.stream_id for call in server.calls] == [refused]
    assert client.status(refused)["grpc-status"] == "8"
    assert server.writer.zombies == 0


async def test_calls_that_wait_are_bounded_and_fail_beyond_it() -> None:
    server, client = await behind()
    sent = [client.request(b"x" * 9_000) for _ in range(6)]
    await client.exchange()
    assert [client.status(number).get("grpc-status") for number in sent] == [None] * 5 + ["8"]
    server.connection.refuse_arriving()
    await client.exchange()
    assert [client.status(number)["grpc-status"] for number in sent] == ["8"] * 6
    assert server.connection.arriving_bytes == 0
    await take_all(client)
    assert not server.calls


async def test_nothing_is_kept_of_a_client_that_is_gone() -> None:
    server, client = served(0, limits=HOLDING)
    client.request()
    await client.call()
    answered, running = server.calls
    answered.reply(b"x" * 20_000)
    await client.exchange()
    await client.call()
    assert server.connection._listener.unsent.held_bytes == 20_005
    assert server.connections == {server.connection}
    server.connection.connection_lost(None)
    assert server.connections == set()
    assert running.cancelled
    running.reply(b"late")
    assert running.sink.unsent_bytes == 0
    assert server.connection.arriving_bytes == server.connection._held.held_bytes == 0
    assert server.connection._listener.unsent.held_bytes == 0


async def test_an_idle_connection_is_cheap() -> None:
    tracemalloc.start()
    shared = Listener(SharedLimits())
    kept = [opened(listener=shared) for _ in range(200)]
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(kept) < 6_000
