"""One HTTP/1.1 answer at a time, whole or in any pieces, read the same."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchtune.wire.http1_client import (
    HEAD_MAX_BYTES,
    NO_TAG,
    AnswerHeads,
    Http1ClientConnection,
)
from tests.wire.wire_peers import MemoryTransport

pytestmark = pytest.mark.smoke

REQUEST = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Heard:
    ready_count: int = 0
    first_bytes: list[int] = field(default_factory=list)
    answers: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    losses: list[tuple[int, str]] = field(default_factory=list)

    def ready(self, _connection: Http1ClientConnection) -> None:
        self.ready_count += 1

    def first_byte(self, _connection: Http1ClientConnection, tag: int) -> None:
        self.first_bytes.append(tag)

    def answered(self, _connection: Http1ClientConnection, tag: int, status: int, body: bytes | None) -> None:
        self.answers.append((tag, status, body))

    def lost(self, _connection: Http1ClientConnection, tag: int, reason: str) -> None:
        self.losses.append((tag, reason))


class Wire:
    def __init__(self, heads: AnswerHeads | None = None) -> None:
        self.heard = Heard()
        self.heads = AnswerHeads(64) if heads is None else heads
        self.transport = MemoryTransport()
        self.connection = Http1ClientConnection(self.heard, self.heads)
        self.connection.connection_made(self.transport)

    def ask(self, tag: int, *pieces: bytes, keep_body: bool = True) -> None:
        self.connection.send(REQUEST, tag, keep_body)
        for piece in pieces:
            self.connection.data_received(piece)


def with_length(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes) -> bytes:
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n" if body else b""
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"


def test_a_request_is_written_whole_and_the_head_of_its_answer_is_parsed_once() -> None:
    wire = Wire()
    for tag, body, heads in ((7, b"abc", 1), (1, b"xyz", 1), (2, b"longer", 2)):
        wire.ask(tag, with_length(body))
        assert (wire.transport.take(), wire.heard.answers[-1]) == (REQUEST, (tag, 200, body))
        assert (len(wire.heads), wire.connection.tag, wire.connection.reusable) == (heads, NO_TAG, True)
    assert (wire.heard.ready_count, len(wire.heard.answers)) == (1, 3)


def test_a_body_nobody_asked_for_is_not_kept_unless_the_status_is_an_error() -> None:
    wire = Wire()
    for tag in (0, 1):
        wire.ask(tag, with_length(b"fine"), keep_body=False)
    for tag in (2, 3):
        wire.ask(tag, with_length(b"full", "503 Service Unavailable"), keep_body=False)
    assert wire.heard.answers == [(0, 200, None), (1, 200, None), (2, 503, b"full"), (3, 503, b"full")]


@given(
    body=st.binary(max_size=40),
    build=st.sampled_from([with_length, chunked]),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    warm=st.booleans(),
    keep_body=st.booleans(),
)
def test_any_pieces_give_the_same_answer(
    body: bytes, build: object, cuts: list[int], warm: bool, keep_body: bool
) -> None:
    whole = with_length(body) if build is with_length else chunked(body)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges) if a < b]
    wire = Wire()
    if warm:
        wire.ask(0, whole)
        wire.heard.answers.clear()
        wire.heard.first_bytes.clear()
    wire.ask(1, *pieces, keep_body=keep_body)
    wire.ask(2, whole)
    assert wire.heard.answers == [(1, 200, body if keep_body else None), (2, 200, body)]
    assert wire.heard.first_bytes == ([1] if len(pieces) > 1 else [])
    assert wire.connection.malformed == ""
    assert wire.connection.reusable


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(b"abc")], (200, b"abc")),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", with_length(b"abc")], (200, b"abc")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na"], (200, b"a")),
    ],
)
def test_such_answers_leave_the_connection_usable(pieces: list[bytes], answer: tuple[int, bytes]) -> None:
    wire = Wire()
    for tag in range(2):
        wire.ask(tag, *pieces)
    assert wire.heard.answers == [(0, *answer), (1, *answer)]
    assert wire.connection.reusable


@pytest.mark.parametrize(
    "answer",
    [with_length(b"abc", extra="Connection: close\r\n"), b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc"],
)
def test_an_announced_close_makes_the_connection_unusable_and_closes_it(answer: bytes) -> None:
    wire = Wire()
    for tag in range(2):
        wire = Wire(heads=wire.heads)
        wire.ask(tag, answer)
        assert wire.heard.answers == [(tag, 200, b"abc")]
        assert not wire.connection.reusable
        assert wire.transport.closed
    assert not wire.heads


@pytest.mark.parametrize(
    ("pieces", "answers", "lost"),
    [
        ([b"HTTP/1.1 200 OK\r\n\r\nab", b"c"], [(5, 200, b"abc")], NO_TAG),
        ([with_length(b"abcdef")[:-3]], [], 5),
    ],
    ids=["a body that lasts until then", "in mid-answer"],
)
def test_the_end_of_a_connection_may_end_an_answer(
    pieces: list[bytes], answers: list[Any], lost: int
) -> None:
    wire = Wire()
    wire.ask(5, *pieces)
    assert wire.heard.answers == []
    wire.connection.eof_received()
    wire.connection.connection_lost(None)
    assert wire.heard.answers == answers
    assert wire.heard.losses == [(lost, "connection closed by the server")]
    assert not wire.connection.reusable


def test_a_reset_names_its_cause_and_an_abandoned_request_is_not_heard_of_again() -> None:
    reset, abandoned = Wire(), Wire()
    for wire in (reset, abandoned):
        wire.ask(5)
    reset.connection.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
    assert reset.heard.losses == [(5, "connection lost: [Errno 104] Connection reset by peer")]
    abandoned.connection.abandon()
    assert abandoned.transport.aborted
    abandoned.connection.connection_lost(None)
    assert abandoned.heard.losses == [(NO_TAG, "connection closed by the server")]


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 1\n\na",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        with_length(b"abc") + b"more",
        with_length(b"abc") + with_length(b"abc"),
        chunked(b"abc")[:-5] + b"zz\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + (b"X: " + b"x" * 1000 + b"\r\n") * (HEAD_MAX_BYTES // 1000),
    ],
)
@pytest.mark.parametrize("size", [100_000, 1_000, 20])
@pytest.mark.parametrize("warm", [False, True])
def test_what_breaks_the_protocol_ends_the_connection(answer: bytes, size: int, warm: bool) -> None:
    wire = Wire()
    if warm:
        wire.ask(0, with_length(b"abc"))
    wire.ask(1, *(answer[at : at + size] for at in range(0, len(answer), size)))
    assert wire.transport.aborted
    assert not wire.connection.reusable
    wire.connection.connection_lost(None)
    assert wire.heard.losses == [(1, wire.connection.malformed)]
    assert wire.connection.malformed.startswith("malformed answer: ")
    assert all(tag != 1 for tag, _, _ in wire.heard.answers)


def test_too_many_bytes_for_a_known_head_are_malformed_in_later_pieces_too() -> None:
    wire = Wire()
    wire.ask(0, with_length(b"abcdef"))
    whole = with_length(b"abcdef")
    wire.ask(1, whole[:-2], b"efgh")
    assert "more bytes" in wire.connection.malformed


def test_bytes_without_a_request_end_the_connection() -> None:
    wire = Wire()
    wire.connection.data_received(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
    assert wire.transport.aborted
    wire.connection.connection_lost(None)
    assert wire.heard.losses == [(NO_TAG, "malformed answer: bytes without a request")]


def test_the_memory_of_heads_is_bounded() -> None:
    wire = Wire()
    for tag in range(64 + 10):
        wire.ask(tag, with_length(b"a", extra=f"Date: {tag}\r\n"))
    assert len(wire.heads) <= 64
    assert len(wire.heard.answers) == 64 + 10
