"""Our gRPC client against peers that we did not write: hyper-h2 by script, frames by hand."""

from __future__ import annotations

import gzip
import itertools
from typing import Any

import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchtune.wire.grpc.client_connection import NOT_PROCESSED, prepare_call
from batchtune.wire.http2 import PREFACE
from batchtune.wire.status import GRPC_CODES
from tests.wire.wire_peers import (
    ANSWER_HEAD,
    BROKEN_FRAMES,
    INITIAL_WINDOW_SIZE,
    ClientUnderTest,
    H2Server,
    frames_of,
    grpc_message,
    raw_frame,
)

DATA, HEADERS, _, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
PLAIN = b"\x88\x5f\x10application/grpc"
OK = b"\x00\x0bgrpc-status\x010"


def connected(**options: Any) -> tuple[ClientUnderTest, H2Server]:
    client = ClientUnderTest(**options)
    return client, H2Server(client)


def called(count: int = 1, **options: Any) -> tuple[ClientUnderTest, H2Server]:
    """A client with so many calls in flight, whose tags count from 0 and whose streams are 1, 3, 5 …"""
    client, server = connected(**options)
    for tag in range(count):
        client.call(tag=tag)
    server.exchange()
    return client, server


def ready_client(calls: int = 0) -> ClientUnderTest:
    """A client with calls in flight whose peer is written by hand in the test."""
    client = ClientUnderTest()
    client.receive(raw_frame(SETTINGS, 0, 0))
    for tag in range(calls):
        client.call(tag=tag)
    client.transport.take()
    return client


def answer_frames(*stream_ids: int, message: bytes = b"") -> bytes:
    return b"".join(
        raw_frame(HEADERS, 4, number, PLAIN)
        + raw_frame(DATA, 0, number, grpc_message(message))
        + raw_frame(HEADERS, 5, number, OK)
        for number in stream_ids
    )


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
    assert server.data(1) == grpc_message(b"hello")
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
    assert sorted(client.done) == [(tag, 0, b"for %d" % (2 * tag + 1), "") for tag in range(50)]
    assert client.connection.in_flight == 0
    assert client.connection.capacity == 100


PACKED = [*ANSWER_HEAD, ("grpc-encoding", "gzip")]
CUT_GZIP = b"\x01\x00\x00\x00\x0a" + gzip.compress(b"abc", mtime=0)[:10]
PONG = grpc_message(b"pong")
FULL = [*ANSWER_HEAD, ("grpc-status", "14"), ("grpc-message", "queue full: 100%25 %C3%BC")]


def ended(status: str, text: str = "") -> list[tuple[str, str]]:
    return [("grpc-status", status), ("grpc-message", text)]


def internal(text: str) -> tuple[str, bytes, str]:
    return "INTERNAL", b"", text.replace("…", "the call ended OK with").replace("!", "; one was expected")


def unknown(status: str) -> tuple[str, bytes, str]:
    return "UNKNOWN", b"", f"grpc-status is {status!r}: "


FLAGGED = internal("a message is flagged as compressed: grpc-encoding is 'absent'")
ANSWERS: dict[str, tuple[list[Any], tuple[str, bytes, str]]] = {
    "an empty message": ([ANSWER_HEAD, grpc_message(b""), ended("0")], ("OK", b"", "")),
    "trailers only": ([FULL], ("UNAVAILABLE", b"", "queue full: 100% ü")),
    "an error behind a message": ([ANSWER_HEAD, PONG, ended("13", "boom")], ("INTERNAL", b"", "boom")),
    "an early hint": ([[(":status", "103")], ANSWER_HEAD, PONG, ended("0")], ("OK", b"pong", "")),
    "gzip": ([PACKED, grpc_message(b"a" * 1000, compress=True), ended("0")], ("OK", b"a" * 1000, "")),
    "continuations": ([ANSWER_HEAD, ended("3", "x" * 40_000)], ("INVALID_ARGUMENT", b"", "x" * 40_000)),
    "no message": ([ANSWER_HEAD, b"", ended("0")], internal("… 0 messages!")),
    "two messages": ([ANSWER_HEAD, PONG * 2, ended("0")], internal("… 2 messages!")),
    "half a message": ([ANSWER_HEAD, PONG[:-1], ended("0")], internal("… a message cut short!")),
    "half a prefix": ([ANSWER_HEAD, PONG[:2], ended("0")], internal("… a message cut short!")),
    "a flag": (
        [ANSWER_HEAD, b"\7" + PONG[1:], ended("0")],
        internal("a message prefix has the unknown flag 7"),
    ),
    "gzip unannounced": ([ANSWER_HEAD, b"\1\0\0\0\1x", ended("0")], FLAGGED),
    "no trailers": ([ANSWER_HEAD, PONG], ("UNKNOWN", b"pong", "the stream ended without grpc-status")),
    "status 99": ([ANSWER_HEAD, PONG, ended("99")], unknown("99")),
    "status -1": ([ANSWER_HEAD, PONG, ended("-1")], unknown("-1")),
    "status x": ([ANSWER_HEAD, PONG, ended("x")], unknown("x")),
    "no status": ([ANSWER_HEAD, PONG, ended("")], unknown("")),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_server_may_answer_becomes_status_message_and_text(name: str) -> None:
    parts, (code, message, text) = ANSWERS[name]
    client, server = called()
    server.send(*parts)
    assert client.done == [(0, GRPC_CODES[code], message, text)]


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
    client, server = called()
    server.send([(":status", http_status), ("content-type", "text/html")], b"<html>sorry</html>")
    text = f"HTTP status {http_status} with content-type 'text/html'"
    assert client.done == [(0, GRPC_CODES[code], b"", text)]


@pytest.mark.parametrize(
    ("encoding", "body", "code"),
    [
        ("snappy", b"\x01\x00\x00\x00\x01x", "UNIMPLEMENTED"),
        ("gzip", b"\x01\x00\x00\x00\x01x", "INTERNAL"),
        ("gzip", CUT_GZIP, "INTERNAL"),
        ("gzip", grpc_message(b"a" * 10**6, compress=True), "RESOURCE_EXHAUSTED"),
    ],
)
def test_what_does_not_inflate_is_an_error(encoding: str, body: bytes, code: str) -> None:
    client, server = called(max_message_bytes=10_000)
    server.send([*ANSWER_HEAD, ("grpc-encoding", encoding)], body, ends=False)
    assert client.done[0][1] == GRPC_CODES[code]
    assert server.of(h2.events.StreamReset)


def test_a_message_above_the_limit_is_refused_before_it_is_kept() -> None:
    client, server = called(2, max_message_bytes=10)
    server.send(ANSWER_HEAD, grpc_message(b"01234567890")[:6], ends=False)
    server.answer(3, b"0123456789")
    refused, taken = client.done
    assert refused[:2] == (0, GRPC_CODES["RESOURCE_EXHAUSTED"])
    assert "11 vs. 10" in refused[3]
    assert taken == (1, 0, b"0123456789", "")
    assert server.of(h2.events.StreamReset)[0].error_code == ErrorCodes.CANCEL


def test_pings_are_answered_and_unknown_frames_ignored() -> None:
    client = ready_client()
    client.receive(
        raw_frame(PING, 0, 0, b"12345678"), raw_frame(0x55, 0xFF, 9, b"?"), raw_frame(PING, 1, 0, b"87654321")
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
    client, server = called()
    server.h2.reset_stream(1, error)
    server.exchange()
    assert client.done == [(0, GRPC_CODES[code], b"", f"the peer reset the stream: {error.name}")]
    assert not client.lost


def test_goaway_names_the_calls_that_were_not_processed_and_the_others_end_well() -> None:
    client, server = called(3)
    client.receive(raw_frame(GOAWAY, 0, 0, (3).to_bytes(4) + (0).to_bytes(4) + b"restart"))
    assert client.connection.capacity == 0
    ((tag, status, _, text),) = client.done
    assert (tag, status) == (2, GRPC_CODES["UNAVAILABLE"])
    assert text.startswith(NOT_PROCESSED)
    assert "restart" in text
    server.answer(1, b"one")
    server.answer(3, b"two")
    assert client.done[1:] == [(0, 0, b"one", ""), (1, 0, b"two", "")]
    ((tags, reason),) = client.lost
    assert tags == []
    assert "GOAWAY: NO_ERROR: restart" in reason
    assert client.transport.closed


def test_a_lost_connection_names_the_calls_without_answer() -> None:
    client, server = called(3)
    server.answer(3)
    for _ in range(2):
        client.connection.connection_lost(ConnectionResetError("reset by peer"))
        client.connection.close()
    assert client.done == [(1, 0, b"pong", "")]
    assert client.lost == [([0, 2], "connection lost: reset by peer")]


def test_capacity_follows_the_peers_concurrency_limit() -> None:
    client, server = called(4)
    for limit, capacity, told in ((2, 0, 0), (10, 6, 1)):
        server.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: limit})
        server.exchange()
        assert (client.connection.capacity, client.capacity_calls) == (capacity, told)


def test_a_clogged_socket_has_no_capacity() -> None:
    client, _ = connected()
    client.connection.pause_writing()
    assert client.connection.capacity == 0
    client.connection.resume_writing()
    assert client.connection.capacity == 100
    assert client.capacity_calls == 1


def test_a_new_initial_window_applies_to_requests_that_wait() -> None:
    client = ClientUnderTest()
    server = H2Server(client, {INITIAL_WINDOW_SIZE: 0})
    client.call(b"0123456789")
    server.exchange()
    assert not server.of(h2.events.DataReceived)
    for window, received in ((10, 10), (100, 15)):
        server.h2.update_settings({INITIAL_WINDOW_SIZE: window})
        server.exchange()
        assert server.data(1) == grpc_message(b"0123456789")[:received]


def test_an_answer_before_the_request_is_sent_entirely_ends_the_call() -> None:
    client = ClientUnderTest()
    server = H2Server(client, {INITIAL_WINDOW_SIZE: 10})
    client.call(b"x" * 1_000)
    server.exchange()
    server.send([*ANSWER_HEAD, ("grpc-status", "8")])
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
    client.receive(answer_frames(2**31 - 1, message=b"last"))
    assert client.done == [(0, 0, b"last", "")]
    assert client.lost == [([], "stream ids are used up")]


def test_a_cancelled_call_is_reset_and_never_heard_of_again() -> None:
    client, server = called(2)
    client.connection.cancel(0)
    client.connection.cancel(99)
    server.exchange()
    client.receive(answer_frames(1, message=b"late"), raw_frame(RST, 0, 1, bytes(4)))
    server.answer(3)
    assert client.done == [(1, 0, b"pong", "")]
    assert [event.error_code for event in server.of(h2.events.StreamReset)] == [ErrorCodes.CANCEL]


def test_calls_made_while_answers_are_read_leave_in_one_write() -> None:
    client = ready_client(calls=3)
    answers: list[int] = []

    def on_done(tag: int, *_: Any) -> None:
        answers.append(tag)
        client.call(tag=tag + 10)

    client.connection._on_done = on_done
    client.transport.writes = 0
    client.receive(answer_frames(1, 3, 5))
    assert answers == [0, 1, 2]
    assert client.transport.writes == 1
    assert [frame[2] for frame in frames_of(client.transport.take())] == [7, 7, 9, 9, 11, 11]


def test_closing_within_a_callback_stops_reading() -> None:
    client = ready_client(calls=2)
    client.connection._on_done = lambda *_: client.connection.close()
    client.receive(answer_frames(1, 3))
    assert client.lost == [([1], "closed by the client")]
    assert client.transport.closed
    assert frames_of(client.transport.take())[-1][0] == GOAWAY


BROKEN = {
    **{name: frames for name, (frames, _) in BROKEN_FRAMES.items()},
    "data before headers": raw_frame(DATA, 0, 1, b"abc"),
    "headers on an idle stream": raw_frame(HEADERS, 5, 77, PLAIN),
    "second head": raw_frame(HEADERS, 4, 1, PLAIN) * 2,
    "trailers that do not end": raw_frame(HEADERS, 4, 1, PLAIN) + raw_frame(HEADERS, 4, 1, OK),
    "dynamic table index": raw_frame(HEADERS, 4, 1, b"\xff\x20"),
    "non-numeric status": raw_frame(HEADERS, 4, 1, b"\x08\x03abc"),
    "continuation elsewhere": raw_frame(HEADERS, 0, 1, PLAIN) + raw_frame(CONTINUATION, 4, 3, b""),
    "endless continuations": raw_frame(HEADERS, 0, 1, PLAIN) + raw_frame(CONTINUATION, 0, 1, b"") * 1000,
    "huge block": raw_frame(HEADERS, 0, 1, b"a" * 60_000) + raw_frame(CONTINUATION, 0, 1, b"a" * 60_000),
    "push enabled": raw_frame(SETTINGS, 0, 0, b"\0\2\0\0\0\1"),
    "an HTTP/1 answer": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_malformed_peer_loses_the_connection_with_a_reason(name: str) -> None:
    client = ready_client(calls=2)
    client.receive(BROKEN[name])
    ((tags, reason),) = client.lost
    assert tags == [0, 1]
    assert ": " in reason
    assert not client.done
    assert client.transport.closed
    client.receive(b"more", b"and more")  # nothing happens any more
    assert frames_of(client.transport.take())[-1][0] == GOAWAY


def dialogue() -> bytes:
    """What a server says in answer to twelve calls, in all the ways that an answer can come."""
    message = grpc_message(b"pong")
    padded = b"\3\0\0\0\0\x10" + PLAIN + bytes(3)  # and with a priority
    refused = PLAIN + b"\x00\x0bgrpc-status\x0214\x00\x0cgrpc-message\x04full"
    head, tail, data = (HEADERS, 4, PLAIN), (HEADERS, 5, OK), (DATA, 0, message)
    answers = {
        1: [head, data, tail],
        3: [(HEADERS, 0x2C, padded), (DATA, 8, b"\4" + message + bytes(4)), tail],
        5: [
            (HEADERS, 0, PLAIN[:4]),
            (CONTINUATION, 4, PLAIN[4:]),
            (DATA, 0, message[:3]),
            (DATA, 0, message[3:]),
            tail,
        ],
        7: [(HEADERS, 5, refused)],
        9: [(RST, 0, b"\0\0\0\x08")],
        11: [
            (HEADERS, 4, PLAIN + b"\x00\x0dgrpc-encoding\x04gzip"),
            (DATA, 0, grpc_message(b"pong", compress=True)),
            tail,
        ],
        13: [head, (DATA, 0, b""), data, (DATA, 0, b""), tail],
        15: [head, data, (HEADERS, 1, OK[:5]), (CONTINUATION, 4, OK[5:])],
        17: [head, data, tail],
    }
    of_connection = {
        1: raw_frame(SETTINGS, 0, 0, b"\0\3\0\0\0\x64"),
        5: raw_frame(PING, 0, 0, b"12345678"),
        13: raw_frame(WINDOW, 0, 0, b"\0\0\1\0"),
        17: raw_frame(GOAWAY, 0, 0, (17).to_bytes(4) + bytes(4)),
    }
    return b"".join(
        of_connection.get(number, b"")
        + b"".join(raw_frame(kind, flags, number, payload) for kind, flags, payload in frames)
        for number, frames in answers.items()
    )


def answers_to(pieces: list[bytes]) -> tuple[list[Any], list[Any]]:
    client = ClientUnderTest()
    for tag in range(12):
        client.call(tag=tag)
    client.receive(*pieces)
    return client.done, client.lost


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=60))
@example(list(range(1_000)))
def test_frames_cut_at_any_byte_give_the_same_answers(cuts: list[int]) -> None:
    data = dialogue()
    edges = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    whole = answers_to([data])
    assert answers_to([data[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert len(whole[0]) == 12
    assert [tag for tag, status, *_ in whole[0] if status == 0] == [0, 1, 2, 5, 6, 7, 8]


def test_the_preface_comes_first_and_forbids_a_dynamic_table() -> None:
    written = ClientUnderTest().transport.take()
    assert written.startswith(PREFACE)
    (kind, _, _, payload), (update, *_) = frames_of(written[len(PREFACE) :])
    assert (kind, update) == (SETTINGS, WINDOW)
    assert payload[:6] == b"\0\1\0\0\0\0"
