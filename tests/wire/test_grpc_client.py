"""Our gRPC client against peers that we did not write: hyper-h2 by script, frames by hand."""

from __future__ import annotations

import gzip
import itertools
from typing import Any

import h2.events
import h2.exceptions
import h2.settings
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.wire.grpc.client_connection import NOT_PROCESSED, prepare_call
from batchtune.wire.http2 import PREFACE
from batchtune.wire.status import GRPC_CODES
from tests.wire.wire_peers import ClientUnderTest, H2Server, frames_of, grpc_message, raw_frame

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
PLAIN = b"\x88\x5f\x10application/grpc"
OK = b"\x00\x0bgrpc-status\x010"


def connected(**options: Any) -> tuple[ClientUnderTest, H2Server]:
    client = ClientUnderTest(**options)
    return client, H2Server(client)


def ready_client(**options: Any) -> ClientUnderTest:
    """A client whose peer is written by hand in the test."""
    client = ClientUnderTest(**options)
    client.receive(raw_frame(SETTINGS, 0, 0))
    client.transport.take()
    return client


def test_the_connection_is_ready_once_the_peers_settings_are_known() -> None:
    client = ClientUnderTest()
    assert client.connection.capacity == 0
    server = H2Server(client)
    assert client.ready == 1
    assert client.connection.capacity == 100
    assert server.of(h2.events.SettingsAcknowledged)


def test_a_call_arrives_as_grpc_asks() -> None:
    client, server = connected()
    client.call(b"hello", path="/p.S/M", metadata=[("key", "value"), ("raw-bin", b"\x00\xff")], timeout_s=1.5)
    server.exchange()
    (request,) = server.of(h2.events.RequestReceived)
    assert request.headers == [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/p.S/M"),
        (":authority", "test:1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "batchtune"),
        ("grpc-timeout", "1500000u"),
        ("key", "value"),
        ("raw-bin", "AP8"),
    ]
    assert b"".join(event.data for event in server.of(h2.events.DataReceived)) == grpc_message(b"hello")
    assert server.of(h2.events.StreamEnded)


@pytest.mark.parametrize(
    "pair", [("Key", "v"), ("", "v"), (":path", "v"), ("a b", "v"), ("key", "a\nb"), ("é", "v")]
)
def test_metadata_that_cannot_be_sent_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        prepare_call("/p.S/M", "a", b"", metadata=[pair])


def test_many_calls_are_answered_under_their_tags_in_any_order() -> None:
    client, server = connected()
    for tag in range(50):
        client.call(b"%d" % tag, tag=tag)
    server.exchange()
    for event in reversed(server.of(h2.events.RequestReceived)):
        server.answer(event.stream_id, b"for %d" % event.stream_id)
    server.exchange()
    assert sorted(client.done) == [(tag, 0, b"for %d" % (2 * tag + 1), "") for tag in range(50)]
    assert client.connection.in_flight == 0
    assert client.connection.capacity == 100


def test_an_empty_message_is_an_answer() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.answer(1, b"")
    server.exchange()
    assert client.done == [(0, 0, b"", "")]


def test_a_trailers_only_error_keeps_code_and_text() -> None:
    client, server = connected()
    client.call(tag=7)
    server.exchange()
    fields = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "14")]
    server.h2.send_headers(1, [*fields, ("grpc-message", "queue full: 100%25 %C3%BC")], end_stream=True)
    server.exchange()
    assert client.done == [(7, 14, b"", "queue full: 100% ü")]


def test_an_error_after_a_message_is_the_error() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.answer(1, b"half", status="13", trailers=[("grpc-message", "boom")])
    server.exchange()
    assert client.done == [(0, 13, b"", "boom")]


@pytest.mark.parametrize(
    ("http_status", "code"),
    [
        ("400", "INTERNAL"),
        ("401", "UNAUTHENTICATED"),
        ("403", "PERMISSION_DENIED"),
        ("404", "UNIMPLEMENTED"),
        ("429", "UNAVAILABLE"),
        ("503", "UNAVAILABLE"),
        ("500", "UNKNOWN"),
        ("200", "UNKNOWN"),
    ],
)
def test_an_http_answer_is_mapped_to_a_grpc_status(http_status: str, code: str) -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.h2.send_headers(1, [(":status", http_status), ("content-type", "text/html")])
    server.h2.send_data(1, b"<html>sorry</html>", end_stream=True)
    server.exchange()
    ((tag, status, message, text),) = client.done
    assert (tag, status, message) == (0, GRPC_CODES[code], b"")
    assert http_status in text
    assert "text/html" in text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "0 messages"),
        (grpc_message(b"a") + grpc_message(b"b"), "2 messages"),
        (grpc_message(b"abc")[:-1], "cut short"),
        (b"\x00\x00", "cut short"),
        (b"\x07\x00\x00\x00\x00", "flag"),
        (b"\x01\x00\x00\x00\x01x", "compressed"),
    ],
)
def test_an_ok_without_exactly_one_message_is_internal(body: bytes, text: str) -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.answer(1, raw=body)
    server.exchange()
    ((_, status, message, said),) = client.done
    assert (status, message) == (GRPC_CODES["INTERNAL"], b"")
    assert text in said


def test_data_that_ends_the_stream_without_trailers_is_unknown() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.h2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    server.h2.send_data(1, grpc_message(b"x"), end_stream=True)
    server.exchange()
    assert client.done[0][1] == GRPC_CODES["UNKNOWN"]


@pytest.mark.parametrize("value", ["99", "-1", "x", ""])
def test_a_status_that_grpc_does_not_know_is_unknown(value: str) -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.answer(1, status=value)
    server.exchange()
    assert client.done[0][1] == GRPC_CODES["UNKNOWN"]


def test_informational_heads_are_passed_over() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.h2.send_headers(1, [(":status", "103")])
    server.answer(1)
    server.exchange()
    assert client.done == [(0, 0, b"pong", "")]


def test_compressed_answers_are_inflated() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.answer(1, raw=grpc_message(b"a" * 1000, compress=True), head=[("grpc-encoding", "gzip")])
    server.exchange()
    assert client.done == [(0, 0, b"a" * 1000, "")]


@pytest.mark.parametrize(
    ("encoding", "body", "code"),
    [
        ("snappy", b"\x01\x00\x00\x00\x01x", "UNIMPLEMENTED"),
        ("gzip", b"\x01\x00\x00\x00\x01x", "INTERNAL"),
        ("gzip", b"\x01\x00\x00\x00\x0a" + gzip.compress(b"abc", mtime=0)[:10], "INTERNAL"),
        ("gzip", grpc_message(b"a" * 10**6, compress=True), "RESOURCE_EXHAUSTED"),
    ],
)
def test_what_does_not_inflate_is_an_error(encoding: str, body: bytes, code: str) -> None:
    client, server = connected(max_message_bytes=10_000)
    client.call()
    server.exchange()
    server.h2.send_headers(
        1, [(":status", "200"), ("content-type", "application/grpc"), ("grpc-encoding", encoding)]
    )
    server.h2.send_data(1, body)
    server.exchange()
    assert client.done[0][1] == GRPC_CODES[code]
    assert server.of(h2.events.StreamReset)


def test_a_message_above_the_limit_is_refused_before_it_is_kept() -> None:
    client, server = connected(max_message_bytes=10)
    client.call()
    client.call(tag=1)
    server.exchange()
    server.h2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    server.h2.send_data(1, grpc_message(b"01234567890")[:6])
    server.answer(3, b"0123456789")
    server.exchange()
    assert client.done[0][:2] == (0, GRPC_CODES["RESOURCE_EXHAUSTED"])
    assert "11 vs. 10" in client.done[0][3]
    assert client.done[1] == (1, 0, b"0123456789", "")
    assert server.of(h2.events.StreamReset)[0].error_code == ErrorCodes.CANCEL


def test_an_answer_of_many_frames_is_put_together() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.h2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    message = bytes(range(256)) * 1_000
    body = grpc_message(message)
    for at in range(0, len(body), 9_999):
        server.h2.send_data(1, body[at : at + 9_999], pad_length=at % 200)
    server.h2.send_headers(1, [("grpc-status", "0")], end_stream=True)
    server.exchange()
    assert client.done == [(0, 0, message, "")]


def test_a_header_block_in_continuations_is_put_together() -> None:
    client, server = connected()
    client.call()
    server.exchange()
    server.answer(1, status="3", trailers=[("grpc-message", "x" * 40_000)])
    server.exchange()
    assert client.done == [(0, 3, b"", "x" * 40_000)]


def test_padded_and_prioritised_headers_are_read() -> None:
    client = ready_client()
    client.call()
    padded = bytes((3,)) + b"\x00\x00\x00\x00\x10" + PLAIN + b"\0\0\0"
    client.receive(raw_frame(HEADERS, 0x4 | 0x8 | 0x20, 1, padded))
    client.receive(raw_frame(DATA, 0x8, 1, b"\x02" + grpc_message(b"pong") + b"\0\0"))
    client.receive(raw_frame(HEADERS, 0x5, 1, OK))
    assert client.done == [(0, 0, b"pong", "")]


def test_pings_are_answered_and_unknown_frames_ignored() -> None:
    client = ready_client()
    client.receive(
        raw_frame(PING, 0, 0, b"12345678")
        + raw_frame(0x55, 0xFF, 9, b"?")
        + raw_frame(PING, 1, 0, b"87654321")
    )
    assert frames_of(client.transport.take()) == [(PING, 1, 0, b"12345678")]
    assert not client.lost


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ErrorCodes.NO_ERROR, "INTERNAL"),
        (ErrorCodes.PROTOCOL_ERROR, "INTERNAL"),
        (ErrorCodes.REFUSED_STREAM, "UNAVAILABLE"),
        (ErrorCodes.CANCEL, "CANCELLED"),
        (ErrorCodes.ENHANCE_YOUR_CALM, "RESOURCE_EXHAUSTED"),
        (ErrorCodes.INADEQUATE_SECURITY, "PERMISSION_DENIED"),
    ],
)
def test_a_reset_is_mapped_to_a_grpc_status(error: ErrorCodes, code: str) -> None:
    client, server = connected()
    client.call(tag=5)
    server.exchange()
    server.h2.reset_stream(1, error)
    server.exchange()
    assert client.done == [(5, GRPC_CODES[code], b"", f"the peer reset the stream: {error.name}")]
    assert not client.lost


def test_goaway_names_the_calls_that_were_not_processed_and_the_others_end_well() -> None:
    client, server = connected()
    for tag in range(3):
        client.call(tag=tag)
    server.exchange()
    client.receive(raw_frame(GOAWAY, 0, 0, (3).to_bytes(4) + (0).to_bytes(4) + b"restart"))
    assert client.connection.capacity == 0
    ((tag, status, _, text),) = client.done
    assert (tag, status) == (2, GRPC_CODES["UNAVAILABLE"])
    assert text.startswith(NOT_PROCESSED)
    assert "restart" in text
    server.answer(1, b"one")
    server.answer(3, b"two")
    server.exchange()
    assert client.done[1:] == [(0, 0, b"one", ""), (1, 0, b"two", "")]
    ((tags, reason),) = client.lost
    assert tags == []
    assert "GOAWAY: NO_ERROR: restart" in reason
    assert client.transport.closed


def test_a_lost_connection_names_the_calls_without_answer() -> None:
    client, server = connected()
    for tag in range(3):
        client.call(tag=tag)
    server.exchange()
    server.answer(3)
    server.exchange()
    client.connection.connection_lost(ConnectionResetError("reset by peer"))
    assert client.done == [(1, 0, b"pong", "")]
    assert client.lost == [([0, 2], "connection lost: reset by peer")]
    client.connection.connection_lost(None)
    client.connection.close()
    assert len(client.lost) == 1


def test_capacity_follows_the_peers_concurrency_limit() -> None:
    client, server = connected()
    for _ in range(4):
        client.call()
    server.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
    server.exchange()
    assert client.connection.capacity == 0
    assert client.capacity_calls == 0
    server.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 10})
    server.exchange()
    assert client.connection.capacity == 6
    assert client.capacity_calls == 1


def test_a_clogged_socket_has_no_capacity() -> None:
    client, _ = connected()
    client.connection.pause_writing()
    assert client.connection.capacity == 0
    client.connection.resume_writing()
    assert client.connection.capacity == 100
    assert client.capacity_calls == 1


def test_a_large_request_respects_the_peers_windows() -> None:
    client = ClientUnderTest()
    server = H2Server(client, {SettingCodes.INITIAL_WINDOW_SIZE: 1_000})
    message = bytes(range(256)) * 1_000
    client.call(message)
    client.call(b"x", tag=1)
    server.exchange()
    seen = 0
    for _ in range(2_000):
        received = sum(len(event.data) for event in server.of(h2.events.DataReceived) if event.stream_id == 1)
        if received == len(message) + 5:
            break
        assert received > seen  # hyper-h2 raises FlowControlError if a window is exceeded
        server.h2.acknowledge_received_data(received - seen, 1)
        seen = received
        server.exchange()
    ended = {event.stream_id for event in server.of(h2.events.StreamEnded)}
    assert ended == {1, 3}
    assert b"".join(e.data for e in server.of(h2.events.DataReceived) if e.stream_id == 1) == grpc_message(
        message
    )


def test_a_new_initial_window_applies_to_requests_that_wait() -> None:
    client = ClientUnderTest()
    server = H2Server(client, {SettingCodes.INITIAL_WINDOW_SIZE: 0})
    client.call(b"0123456789")
    server.exchange()
    assert not server.of(h2.events.DataReceived)
    server.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
    server.exchange()
    assert b"".join(e.data for e in server.of(h2.events.DataReceived)) == grpc_message(b"0123456789")[:10]
    server.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
    server.exchange()
    assert b"".join(e.data for e in server.of(h2.events.DataReceived)) == grpc_message(b"0123456789")


def test_an_answer_before_the_request_is_sent_entirely_ends_the_call() -> None:
    client = ClientUnderTest()
    server = H2Server(client, {SettingCodes.INITIAL_WINDOW_SIZE: 10})
    client.call(b"x" * 1_000)
    server.exchange()
    server.h2.send_headers(
        1, [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "8")], end_stream=True
    )
    server.exchange()
    assert client.done == [(0, 8, b"", "")]
    assert server.of(h2.events.StreamReset)[0].error_code == ErrorCodes.NO_ERROR


def test_metadata_larger_than_a_frame_is_sent_in_continuations() -> None:
    client, server = connected()
    client.call(metadata=[("key", "v" * 40_000)])
    server.exchange()
    (request,) = server.of(h2.events.RequestReceived)
    assert ("key", "v" * 40_000) in request.headers
    assert server.of(h2.events.StreamEnded)


def test_used_up_stream_ids_retire_the_connection() -> None:
    client = ready_client()
    client.connection._next_id = 2**31 - 1
    client.call()
    assert client.connection.capacity == 0
    assert client.connection.retiring == "stream ids are used up"
    client.receive(
        raw_frame(HEADERS, 4, 2**31 - 1, PLAIN) + raw_frame(DATA, 0, 2**31 - 1, grpc_message(b"last"))
    )
    client.receive(raw_frame(HEADERS, 5, 2**31 - 1, OK))
    assert client.done == [(0, 0, b"last", "")]
    assert client.lost == [([], "stream ids are used up")]


def test_a_cancelled_call_is_reset_and_never_heard_of_again() -> None:
    client, server = connected()
    client.call(tag=1)
    client.call(tag=2)
    server.exchange()
    client.connection.cancel(1)
    client.connection.cancel(99)
    server.exchange()
    late = (
        raw_frame(HEADERS, 4, 1, PLAIN)
        + raw_frame(DATA, 0, 1, grpc_message(b"late"))
        + raw_frame(HEADERS, 5, 1, OK)
    )
    client.receive(late, raw_frame(RST, 0, 1, bytes(4)))
    server.answer(3)
    server.exchange()
    assert client.done == [(2, 0, b"pong", "")]
    assert [event.error_code for event in server.of(h2.events.StreamReset)] == [ErrorCodes.CANCEL]


def test_calls_made_while_answers_are_read_leave_in_one_write() -> None:
    client = ready_client()
    prepared = prepare_call("/p.S/M", "a", b"ping")
    answers: list[int] = []

    def on_done(tag: int, *_: Any) -> None:
        answers.append(tag)
        client.connection.call(prepared, tag + 10)
        client.connection.flush()

    client.connection._on_done = on_done
    for tag in range(3):
        client.call(tag=tag)
    client.transport.take()
    client.transport.writes = 0
    client.receive(
        b"".join(
            raw_frame(HEADERS, 4, i, PLAIN)
            + raw_frame(DATA, 0, i, grpc_message(b""))
            + raw_frame(HEADERS, 5, i, OK)
            for i in (1, 3, 5)
        )
    )
    assert answers == [0, 1, 2]
    assert client.transport.writes == 1
    assert [frame[2] for frame in frames_of(client.transport.take())] == [7, 7, 9, 9, 11, 11]


def test_closing_within_a_callback_stops_reading() -> None:
    client = ready_client()
    client.connection._on_done = lambda *_: client.connection.close()
    client.call(tag=1)
    client.call(tag=2)
    client.receive(
        b"".join(
            raw_frame(HEADERS, 4, i, PLAIN)
            + raw_frame(DATA, 0, i, grpc_message(b""))
            + raw_frame(HEADERS, 5, i, OK)
            for i in (1, 3)
        )
    )
    assert client.lost == [([2], "closed by the client")]
    assert client.transport.closed
    assert frames_of(client.transport.take())[-1][0] == GOAWAY


BROKEN = {
    "frame too large": raw_frame(DATA, 0, 1, b"")[:9].replace(b"\0\0\0\0", b"\xff\xff\xff\0", 1),
    "data before headers": raw_frame(DATA, 0, 1, b"abc"),
    "data on stream 0": raw_frame(DATA, 0, 0, b"abc"),
    "data on an idle stream": raw_frame(DATA, 0, 77, b"abc"),
    "headers on an even stream": raw_frame(HEADERS, 4, 2, PLAIN),
    "headers on an idle stream": raw_frame(HEADERS, 5, 77, PLAIN),
    "reset of an idle stream": raw_frame(RST, 0, 77, b"\0\0\0\0"),
    "second head": raw_frame(HEADERS, 4, 1, PLAIN) * 2,
    "trailers that do not end": raw_frame(HEADERS, 4, 1, PLAIN) + raw_frame(HEADERS, 4, 1, OK),
    "dynamic table index": raw_frame(HEADERS, 4, 1, b"\xff\x20"),
    "garbage headers": raw_frame(HEADERS, 4, 1, b"\x00\xff\xff\xff\xff\xff\xff\xff\xff"),
    "non-numeric status": raw_frame(HEADERS, 4, 1, b"\x08\x03abc"),
    "continuation alone": raw_frame(CONTINUATION, 4, 1, PLAIN),
    "continuation elsewhere": raw_frame(HEADERS, 0, 1, PLAIN) + raw_frame(CONTINUATION, 4, 3, b""),
    "interrupted block": raw_frame(HEADERS, 0, 1, PLAIN) + raw_frame(PING, 0, 0, b"12345678"),
    "endless continuations": raw_frame(HEADERS, 0, 1, PLAIN) + raw_frame(CONTINUATION, 0, 1, b"") * 1000,
    "huge block": raw_frame(HEADERS, 0, 1, b"a" * 60_000) + raw_frame(CONTINUATION, 0, 1, b"a" * 60_000),
    "push promise": raw_frame(PUSH, 4, 1, b"\0\0\0\2" + PLAIN),
    "push enabled": raw_frame(SETTINGS, 0, 0, b"\0\2\0\0\0\1"),
    "settings on a stream": raw_frame(SETTINGS, 0, 1),
    "settings of 5 bytes": raw_frame(SETTINGS, 0, 0, b"\0\1\0\0\0"),
    "settings ack with payload": raw_frame(SETTINGS, 1, 0, b"\0\1\0\0\0\0"),
    "initial window too large": raw_frame(SETTINGS, 0, 0, b"\0\4\x80\0\0\0"),
    "max frame size too small": raw_frame(SETTINGS, 0, 0, b"\0\5\0\0\0\1"),
    "ping of 7 bytes": raw_frame(PING, 0, 0, b"1234567"),
    "ping on a stream": raw_frame(PING, 0, 1, b"12345678"),
    "goaway of 4 bytes": raw_frame(GOAWAY, 0, 0, b"\0\0\0\0"),
    "reset of 3 bytes": raw_frame(RST, 0, 1, b"\0\0\0"),
    "window update by 0": raw_frame(WINDOW, 0, 0, b"\0\0\0\0"),
    "window overflow": raw_frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"),
    "padding longer than the frame": raw_frame(DATA, 8, 1, b"\xffabc"),
    "padded frame without length": raw_frame(HEADERS, 0xC, 1, b""),
    "an HTTP/1 answer": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_peer_loses_the_connection_with_a_reason(name: str) -> None:
    client = ready_client()
    client.call(tag=1)
    client.call(tag=2)
    client.receive(BROKEN[name])
    ((tags, reason),) = client.lost
    assert tags == [1, 2]
    assert ": " in reason
    assert not client.done
    assert client.transport.closed
    client.receive(b"more", b"and more")  # nothing happens any more
    assert frames_of(client.transport.take())[-1][0] == GOAWAY


def dialogue() -> bytes:
    """What a server says in answer to twelve calls, in all the ways that an answer can come."""
    head, tail, message = raw_frame(HEADERS, 4, 1, PLAIN), raw_frame(HEADERS, 5, 1, OK), grpc_message(b"pong")

    def on(stream_id: int, *frames: bytes) -> bytes:
        return b"".join(frame[:5] + stream_id.to_bytes(4) + frame[9:] for frame in frames)

    packed = PLAIN + b"\x00\x0dgrpc-encoding\x04gzip"
    parts = [
        raw_frame(SETTINGS, 0, 0, b"\0\3\0\0\0\x64"),
        on(1, head, raw_frame(DATA, 0, 1, message), tail),
        on(3, head, raw_frame(DATA, 8, 1, b"\4" + message + b"\0" * 4), tail),
        raw_frame(PING, 0, 0, b"12345678"),
        on(5, raw_frame(HEADERS, 0, 1, PLAIN[:4]), raw_frame(CONTINUATION, 4, 1, PLAIN[4:])),
        on(5, raw_frame(DATA, 0, 1, message[:3]), raw_frame(DATA, 0, 1, message[3:]), tail),
        on(7, raw_frame(HEADERS, 5, 1, PLAIN + b"\x00\x0bgrpc-status\x0214\x00\x0cgrpc-message\x04full")),
        on(9, raw_frame(RST, 0, 1, b"\0\0\0\x08")),
        on(
            11,
            raw_frame(HEADERS, 4, 1, packed),
            raw_frame(DATA, 0, 1, grpc_message(b"pong", compress=True)),
            tail,
        ),
        raw_frame(WINDOW, 0, 0, b"\0\0\1\0"),
        on(
            13,
            head,
            raw_frame(DATA, 0, 1, b""),
            raw_frame(DATA, 0, 1, message),
            raw_frame(DATA, 0, 1, b""),
            tail,
        ),
        on(
            15,
            head,
            raw_frame(DATA, 0, 1, message),
            raw_frame(HEADERS, 1, 1, OK[:5]),
            raw_frame(CONTINUATION, 4, 1, OK[5:]),
        ),
        raw_frame(GOAWAY, 0, 0, (17).to_bytes(4) + bytes(4)),
        on(17, head, raw_frame(DATA, 0, 1, message), tail),
    ]
    return b"".join(parts)


def answers_to(pieces: list[bytes]) -> tuple[list[Any], list[Any]]:
    client = ClientUnderTest()
    for tag in range(12):
        client.call(tag=tag)
    client.receive(*pieces)
    return client.done, client.lost


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=60))
def test_frames_cut_at_any_byte_give_the_same_answers(cuts: list[int]) -> None:
    data = dialogue()
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    whole = answers_to([data])
    assert answers_to(pieces) == whole
    assert len(whole[0]) == 12
    assert [tag for tag, status, *_ in whole[0] if status == 0] == [0, 1, 2, 5, 6, 7, 8]


def test_a_byte_at_a_time_gives_the_same_answers() -> None:
    data = dialogue()
    assert answers_to([data[i : i + 1] for i in range(len(data))]) == answers_to([data])


def test_the_preface_comes_first_and_forbids_a_dynamic_table() -> None:
    written = ClientUnderTest().transport.take()
    assert written.startswith(PREFACE)
    (kind, _, _, payload), (update, *_) = frames_of(written[len(PREFACE) :])
    assert (kind, update) == (SETTINGS, WINDOW)
    assert payload[:6] == b"\0\1\0\0\0\0"
