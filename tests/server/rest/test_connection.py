"""Does the REST front end speak HTTP/1.1 to clients that we did not write, and survive those that mean harm?

And does a connection that has more to do than a slice let others go first, and answer everything in order?
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import itertools
import json
import re
import resource
import shutil
import socket
import subprocess
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from batchtune.server.metrics import Metrics
from batchtune.server.rest.connection import RestConnection
from batchtune.server.rest.parser import Head, HttpRequest, RequestParser, RestLimits
from batchtune.server.rest.rest_api import RestApi
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.listener import LARGE_READ_BYTES, SWEEP_S, Listener, SharedLimits
from tests.server.server_fakes import (
    PREDICT,
    REQUEST,
    FakeModels,
    FakeServable,
    RunningRest,
    count_answers,
    running_rest,
)
from tests.waiting import wait_until
from tests.wire.wire_peers import MemoryTransport, turns

STATUS = b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"2\r\n{}\r\n0\r\n\r\n"
ONE = {"instances": [1.0]}
ANSWER = {"predictions": [2.5]}
SOON_CUT_OFF = SharedLimits(patience_s=SWEEP_S)  # in the second sweep


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningRest]:
    with running_rest(monitoring_path="/metrics") as running:
        yield running


@pytest.fixture
def rest(shared: RunningRest) -> RunningRest:
    shared.models.servable.hold = False
    shared.models.servable.asked.clear()
    wait_until(lambda: not shared.server.connections)
    return shared


def curl(*arguments: str, body: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = ["curl", "-sS", "--max-time", "20", *arguments]
    return subprocess.run(command, input=body, check=True, capture_output=True, timeout=30)


def read_until(client: socket.socket, part: bytes) -> bytes:
    received = b""
    while part not in received:
        received += client.recv(1 << 17)
    return received


def read_to_end(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    ("arguments", "reused"),
    [
        ([], 1),
        (["--http1.0"], 0),
        (["--http1.0", "-H", "Connection: keep-alive"], 1),
        (["--http2"], 1),
    ],
)
def test_curl_is_answered_in_http_1_1(rest: RunningRest, arguments: list[str], reused: int) -> None:
    """--http2 asks for an upgrade that a server may ignore; Java's client does so by default."""
    done = curl("-v", *arguments, "-d", json.dumps(ONE), rest.url + PREDICT, rest.url + PREDICT)
    assert done.stdout.count(b"2.5") == 2
    assert done.stderr.count(b"< HTTP/1.1 200 OK") == 2
    assert done.stderr.count(b"Re-using existing") == reused


def test_curl_uploads_in_chunks_of_unknown_length(rest: RunningRest) -> None:
    body = json.dumps({"instances": [1.0] * 5_000}).encode()
    chunked = ["-T", "-", "-X", "POST", "-H", "Transfer-Encoding: chunked"]
    done = curl(*chunked, rest.url + PREDICT, body=body)
    assert json.loads(done.stdout) == {"predictions": [2.5] * 5_000}


def test_curl_waits_for_100_continue(rest: RunningRest) -> None:
    expect = ["-d", json.dumps(ONE), "-H", "Expect: 100-continue", "--expect100-timeout", "15"]
    began = time.monotonic()
    done = curl("-v", *expect, rest.url + PREDICT)
    assert json.loads(done.stdout) == ANSWER
    assert b"< HTTP/1.1 100 Continue" in done.stderr
    assert time.monotonic() - began < 10, "curl gave up waiting for the 100"


def test_curl_reads_why_its_large_body_is_refused(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(bytes(30 << 20))
    with running_rest(rest_api_max_body_bytes=1 << 20) as rest:
        for field in ("Content-Type: x", "Transfer-Encoding: chunked", "Expect:"):
            sent = ["--data-binary", f"@{tmp_path / 'body'}", "-H", field, "-w", "%{http_code}"]
            done = curl(*sent, rest.url + PREDICT)
            assert done.stdout == b'{ "error": "the request body exceeds 1048576 bytes" }413'


def test_answers_are_gzipped_for_who_accepts_it_where_the_flag_says_so(rest: RunningRest) -> None:
    large = {"instances": [1.0] * 20_000}
    assert "content-encoding" not in rest.ask(large).headers
    with running_rest(rest_api_enable_gzip_answers=True) as open_rest:
        for _ in range(2):
            for rows in (500, 20_000):
                answer = open_rest.ask({"instances": [1.0] * rows})
                told = [answer.headers[name] for name in ("content-encoding", "vary", "content-type")]
                assert told == ["gzip", "accept-encoding", "application/json"]
                assert answer.json() == {"predictions": [2.5] * rows}
            assert "content-encoding" not in open_rest.ask(ONE).headers
            refusing = open_rest.ask(large, accept_encoding="gzip;q=0, identity")
            assert "content-encoding" not in refusing.headers
        done = curl("--compressed", "-d", json.dumps(large), open_rest.url + PREDICT)
        assert json.loads(done.stdout) == {"predictions": [2.5] * 20_000}


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [
        (b"gzip", True),
        (b"br;q=1.0, gzip;q=0.8, *;q=0.1", True),
        (b"deflate,GZIP", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.000", False),
        (b"identity", False),
        (b"xgzip", False),
        (b"", False),
    ],
)
def test_a_client_takes_gzip_if_it_says_so(accepted: bytes, takes: bool) -> None:
    head = Head("GET", b"/", {b"accept-encoding": accepted}, keep_alive=True, is_http_1_0=False)
    assert head.takes_gzip == takes


@pytest.mark.parametrize("rows", [1, 5_000], ids=["on the loop", "aside"])
def test_gzipped_bodies_are_inflated_or_refused(rest: RunningRest, rows: int) -> None:
    values = np.random.default_rng(1).random(rows).round(6)
    packed = gzip.compress(json.dumps({"instances": values.tolist()}).encode(), mtime=0)
    assert (len(packed) > 10_000) is (rows > 1)
    for _ in range(2):
        answer = rest.ask(packed, content_encoding="gzip")
        assert np.allclose(answer.json()["predictions"], values / 2 + 2)
    for broken in (packed[:-9], b"no gzip" * rows):
        answer = rest.ask(broken, content_encoding="gzip")
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("Failed to uncompress the gzipped body")


def test_gzipped_bodies_that_wait_to_be_inflated_are_bounded(rest: RunningRest) -> None:
    packed = gzip.compress(np.random.default_rng(1).bytes(5_000))
    statuses = []
    for waiting_bytes in (1 << 26, 0):
        rest.api._inflating.waiting_bytes = waiting_bytes
        statuses.append(rest.ask(packed, content_encoding="gzip").status_code)
        assert rest.api._inflating.waiting_bytes == waiting_bytes
        assert rest.api._inflating.held_bytes == 0
    assert statuses == [429, 400]


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed")
@pytest.mark.parametrize("pipelined", [1, 10])
def test_h2load_over_http_1_is_answered_in_order(rest: RunningRest, tmp_path: Path, pipelined: int) -> None:
    (tmp_path / "body").write_bytes(b'{"instances": [1.0]}')
    command = ["h2load", "--h1", "-n2000", "-c8", f"-m{pipelined}", "-d", str(tmp_path / "body")]
    said = subprocess.run([*command, rest.url + PREDICT], check=True, capture_output=True, timeout=60).stdout
    assert b"2000 succeeded, 0 failed, 0 errored" in said


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 20\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 20\r\n",
        b"content-length: 20\r\ncontent-length: 21\r\n",
        b"content-length: 20, 20\r\n",
        b"content-length: +20\r\n",
        b"content-length: -1\r\n",
        b"content-length: 0x14\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"content-length : 20\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"content-length: 20\nx: y\r\n",
        b"x: a\0b\r\ncontent-length: 20\r\n",
        b"x\0: a\r\ncontent-length: 20\r\n",
        b"x: a\r\n folded\r\ncontent-length: 20\r\n",
        b"x\xff: a\r\ncontent-length: 20\r\n",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused_for_good(rest: RunningRest, fields: bytes) -> None:
    """Whoever stands between us and the client might have read it the other way (request smuggling)."""
    smuggled = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n" + REQUEST[-20:]
    received = rest.exchange(smuggled + REQUEST, answers=2)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close\r\n" in received
    assert count_answers(received) == 1


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (b"GET /v1/models/m\0 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "Malformed HTTP request"),
        (b"GET /v1/models/\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "Malformed HTTP request"),
        (b"GET /v1/models/%C3%A9 HTTP/1.1\r\nhost: x\r\n\r\n", 404, "of model é"),
        (b"GET http://x:1/v1/models/n?a HTTP/1.1\r\nhost: x\r\n\r\n", 404, "of model n?a"),
        (b"GET /v1/models/n#m HTTP/1.1\r\nhost: x\r\n\r\n", 404, "of model n"),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404, "Not found: *"),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "CONNECT"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "Malformed HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "Malformed HTTP request"),
        (b"nonsense\r\n\r\n", 400, "Malformed HTTP request"),
        (b"GET /v1/models/m\r\n\r\n", 505, "HTTP/0.9 is not spoken here"),
        (b"GET /v1/models/m HTTP/2.0\r\n\r\n", 505, "HTTP/2.0 is not spoken here"),
        (b"GET /v1/models/m HTTP/1.7\r\n\r\n", 400, "Malformed HTTP request"),
        (b"GET /v1/models/m HTTP/1.1\r\n\r\n", 400, "one Host field"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n", 400, "one Host field"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: x/y\r\n\r\n", 400, "one Host field"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost:\r\n\r\n", 200, "AVAILABLE"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: [::1]:80\r\n\r\n", 200, "AVAILABLE"),
        (b"GET /v1/models/m HTTP/1.0\r\n\r\n", 200, "AVAILABLE"),
        (CHUNKED.replace(b": chunked", b": gzip, chunked"), 501, "other than chunked"),
        (CHUNKED.replace(b"tr", b"transfer-encoding: gzip\r\ntr", 1), 501, "other than chunked"),
        (CHUNKED_HEAD + b"zz\r\n{}\r\n0\r\n\r\n", 400, "Malformed HTTP request"),
        (CHUNKED_HEAD + b"-2\r\n{}\r\n", 400, "Malformed HTTP request"),
        (CHUNKED_HEAD + b"2\r\n{}x\r\n0\r\n\r\n", 400, "Malformed HTTP request"),
        (CHUNKED_HEAD + b"f" * 17 + b"\r\n{}", 400, "Malformed HTTP request"),
        (CHUNKED_HEAD + b"\r\n2\r\n{}", 400, "Malformed HTTP request"),
    ],
)
def test_unusual_requests(rest: RunningRest, request_: bytes, status: int, text: str) -> None:
    received = rest.exchange(request_)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert text.encode() in received


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
def test_a_length_declared_beyond_the_limit_is_413_before_the_body(expect: bytes) -> None:
    head = REQUEST.partition(b"\r\n\r\n")[0].replace(b"length: 20", b"length: 1001")
    with running_rest(rest_api_max_body_bytes=1000) as rest:
        rest.exchange(REQUEST)
        for path in (b"m:predict", b"x:predict"):
            answer = rest.exchange(head.replace(b"m:predict", path) + b"\r\n" + expect + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"connection: close\r\n" in answer


def test_the_answer_to_head_has_no_body(rest: RunningRest) -> None:
    received = rest.exchange(b"HEAD /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", answers=2)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/plain" in head
    assert not body


def test_known_heads_and_unknown_ones_mix(rest: RunningRest) -> None:
    """The same head again is not parsed; what follows must not be misread for that."""
    other = REQUEST.replace(b"host: x", b"host: x\r\nx-request-id: %d")
    in_pieces = [bytes([byte]) for byte in REQUEST]
    mixed = [REQUEST, STATUS, REQUEST, other % 1, REQUEST, *in_pieces, REQUEST, other % 2, STATUS]
    with rest.connect() as client:
        for piece in mixed:
            client.sendall(piece)
            if len(piece) > 1 or piece == b"}":
                received = b""
                while not count_answers(received):
                    received += client.recv(65536)
                assert (b"AVAILABLE" if piece == STATUS else b"2.5") in received


def test_a_request_that_waits_behind_another_is_told_to_continue_in_its_turn(rest: RunningRest) -> None:
    head, _, body = REQUEST.replace(b"host: x", b"host: x\r\nexpect: 100-continue").rpartition(b"\r\n\r\n")
    with rest.connect() as client:
        client.sendall(STATUS + head + b"\r\n\r\n")
        received = read_until(client, b"100 Continue")
        assert received.index(b"AVAILABLE") < received.index(b"100 Continue")
        client.sendall(body)
        read_until(client, b"2.5")


def test_a_refusal_waits_for_the_answers_before_it(rest: RunningRest) -> None:
    received = rest.exchange(
        REQUEST + REQUEST.replace(b"[1", b"[3") + STATUS + b"nonsense\r\n\r\n", answers=5
    )
    assert count_answers(received) == 4
    places = [received.index(part) for part in (b"2.5", b"3.5", b"AVAILABLE", b"HTTP/1.1 400")]
    assert places == sorted(places)


@pytest.mark.parametrize("sent", [REQUEST, STATUS, REQUEST * 2 + STATUS, CHUNKED], ids=range(4))
def test_a_client_that_sends_no_more_is_answered(rest: RunningRest, sent: bytes) -> None:
    """As `nc -N` and some clients of HTTP/1.0 do."""
    with rest.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert count_answers(read_to_end(client)) == sent.count(b" HTTP/1.1")
    wait_until(lambda: not rest.server.connections)


@pytest.mark.parametrize("cut", [REQUEST[:10], REQUEST[:60], REQUEST[:-1], CHUNKED_HEAD + b'5\r\n{"'])
def test_a_request_cut_short_is_not_answered_and_leaves_nothing(rest: RunningRest, cut: bytes) -> None:
    with rest.connect() as client:
        client.sendall(cut)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    wait_until(lambda: not rest.server.connections)
    assert not rest.models.servable.asked


def test_who_leaves_is_not_answered(rest: RunningRest, caplog: pytest.LogCaptureFixture) -> None:
    servable = rest.models.servable
    servable.hold = True
    with rest.connect() as client:
        client.sendall(REQUEST * 3)
        wait_until(lambda: servable.held)
        servable.asked.clear()
        rest.thread.call(servable.release)
        wait_until(lambda: servable.asked)  # the second is under way, the third waits
    wait_until(lambda: not rest.server.connections)
    rest.thread.call(servable.release)
    assert len(servable.asked) == 1
    assert not caplog.records


@pytest.mark.parametrize("path", [b"m:predict", b"x:predict"])
def test_an_unfinished_body_is_freed_at_once(rest: RunningRest, path: bytes) -> None:
    """Not only when the garbage collector next looks for reference cycles, which is seldom."""
    size = 8 << 20
    head = REQUEST.partition(b"{")[0].replace(b"length: 20", b"length: %d" % (size + 1))
    rest.exchange(REQUEST)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with rest.connect() as client:
            client.sendall(head.replace(b"m:predict", path) + bytes(size))
            wait_until(lambda: tracemalloc.get_traced_memory()[0] > size * 3 // 4)
        wait_until(lambda: tracemalloc.get_traced_memory()[0] < size // 4)
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize(
    ("endless", "piece"),
    [
        (b"GET /", b"x" * 5_000),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: ", b"y" * 5_000),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n" * 800),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"y" * 5_000),
        (CHUNKED_HEAD + b"0\r\n", b"x: y\r\n" * 800),
        (CHUNKED_HEAD + b"0\r\nx: ", b"y" * 5_000),
        (CHUNKED_HEAD + b"2;x=", b"y" * 5_000),
        (CHUNKED_HEAD, b"0" * 5_000),
    ],
    ids=["target", "value", "fields", "name", "trailers", "trailer", "chunk extension", "chunk size"],
)
def test_what_has_no_end_is_refused(rest: RunningRest, endless: bytes, piece: bytes) -> None:
    with rest.connect() as client:
        client.sendall(endless)
        try:
            for _ in range(420):
                client.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert client.recv(20).startswith(b"HTTP/1.1 400"), "2 MB of it, and no end"


@pytest.mark.parametrize(
    ("sent", "trickled", "idle_s"),
    [
        (b"", b"", 0.05),
        (REQUEST[:1], b"", 60),  # of one byte the parser tells nothing
        pytest.param(REQUEST[:30], b"", 60, marks=pytest.mark.slow),
        pytest.param(b"GET / HTTP/1.1\r\nhost: x\r\n", b"x", 60, marks=pytest.mark.slow),
        (REQUEST[:-10], b" ", 60),
    ],
    ids=["idle", "a byte", "half a head", "trickled head", "trickled body"],
)
def test_silent_and_slow_clients_are_cut_off(sent: bytes, trickled: bytes, idle_s: float) -> None:
    with (
        running_rest(limits=RestLimits(idle_s=idle_s, shared=SOON_CUT_OFF)) as rest,
        rest.connect() as client,
    ):
        client.sendall(sent)
        with rest.connect():
            wait_until(lambda: len(rest.server.connections) == 2)

            def swept() -> bool:
                with contextlib.suppress(OSError):
                    client.sendall(trickled)
                rest.thread.call(rest.server.sweep)
                return len(rest.server.connections) == (idle_s == 60)

            wait_until(swept)
        if not trickled:
            assert client.recv(100).startswith(b"HTTP/1.1 503 " if sent else b"")


def test_a_client_may_be_silent_for_a_while() -> None:
    with running_rest(limits=RestLimits(idle_s=60)) as rest, rest.connect():
        wait_until(lambda: len(rest.server.connections) == 1)
        for _ in range(2):  # what the first closes is gone at the second
            rest.thread.call(rest.server.sweep)
            assert len(rest.server.connections) == 1


def test_a_client_that_reads_no_answers_is_read_no_more_and_cut_off() -> None:
    body = json.dumps({"instances": [[0.1] * 1000] * 20}).encode()
    request = REQUEST.replace(b"length: 20", b"length: %d" % len(body)).partition(b"{")[0] + body
    servable, limits = FakeServable(), RestLimits(idle_s=60, shared=SOON_CUT_OFF)
    with running_rest(servable, limits=limits) as rest, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", rest.port))
        wait_until(lambda: len(rest.server.connections) == 1)
        (connection,) = rest.server.connections
        while not connection.is_paused:
            asked = len(servable.asked)
            client.sendall(request)
            wait_until(lambda asked=asked: len(servable.asked) > asked or connection.is_paused)
            time.sleep(0.02 * connection.is_paused)  # the kernel may take more of the answer yet
            assert len(servable.asked) < 400, "40 MB of answers that nobody reads, and no end"
        assert connection._transport.get_write_buffer_size() < 1 << 20
        wait_until(lambda: rest.thread.call(rest.server.sweep) or not rest.server.connections)


def test_a_request_half_read_while_the_last_answer_is_stuck_goes_on(rest: RunningRest) -> None:
    with rest.connect() as client:
        client.sendall(REQUEST[:-10])
        wait_until(lambda: [one for one in rest.server.connections if one._parser.arriving])
        (connection,) = rest.server.connections
        rest.thread.call(connection.pause_writing)
        rest.thread.call(connection.resume_writing)
        client.sendall(REQUEST[-10:])
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_paths_and_heads_that_clients_invent_are_kept_within_bounds() -> None:
    with running_rest() as rest, rest.connect() as client:

        def ask(numbers: range) -> None:
            for number in numbers:
                path = b"/v1/models/%07d%b:predict" % (number, b"n" * 30_000)
                field = b"x-id: %07d%b" % (number, b"i" * 700)
                for target, more in ((path, b"x: y"), (b"/v1/models/m:predict", field)):
                    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (target, more)
                    client.sendall(head + b"content-length: 2\r\n\r\n{}")
                    received = b""
                    while not count_answers(received):
                        received += client.recv(1 << 17)

        ask(range(300))  # the metrics keep 256 names
        tracemalloc.start()
        try:
            ask(range(300, 600))
            assert tracemalloc.get_traced_memory()[0] < 4 << 20
        finally:
            tracemalloc.stop()


def test_thousand_clients_that_read_nothing_cost_little() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with running_rest() as rest, contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        tracemalloc.start()
        opened.callback(tracemalloc.stop)
        for _ in range(1_000):
            opened.enter_context(rest.connect()).sendall(STATUS * 2)
        wait_until(lambda: len(rest.server.connections) == 1_000, limit_s=60)
        assert rest.ask(ONE).json() == ANSWER
        assert tracemalloc.get_traced_memory()[0] < 10 << 20


def test_draining_answers_what_was_pipelined_and_takes_nobody_new() -> None:
    servable = FakeServable()
    servable.hold = True
    with running_rest(servable) as rest:
        with rest.connect() as client:
            client.sendall(REQUEST + STATUS + STATUS)
            wait_until(lambda: servable.held)
            rest.thread.loop.call_soon_threadsafe(rest.thread.loop.create_task, rest.server.drain(5))
            rest.thread.call(servable.release)
            received = read_to_end(client)
        assert count_answers(received) == 3
        assert received.count(b"connection: close\r\n") == 1
        with pytest.raises(ConnectionRefusedError):
            rest.connect()


def test_what_outlasts_the_grace_is_cut_off() -> None:
    servable = FakeServable()
    servable.hold = True
    with running_rest(servable) as rest, rest.connect() as client:
        client.sendall(REQUEST)
        wait_until(lambda: servable.held)
        rest.thread.run(rest.server.drain(0.01))
        assert not rest.server.connections
        rest.thread.call(servable.release)


def test_a_body_of_tiny_pieces_takes_little_more_than_its_bytes() -> None:
    request = HttpRequest(Head("POST", b"/", {}, keep_alive=True, is_http_1_0=False))
    body = bytes(range(256)) * 400
    tracemalloc.start()
    for start in range(0, len(body), 2):
        request.add(body[start : start + 2])
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 1.5 * len(body)
    assert (request.size, request.body()) == (len(body), body)
    short = HttpRequest(request.head)
    assert short.body() == b""
    for pieces in (1, 2):
        short.add(b"ab")
        assert short.body() == b"ab" * pieces


def test_a_closed_connection_dies_without_the_collector(rest: RunningRest) -> None:
    """A client that dials anew for each request would leave 60 kB of each until a collection, which is put off."""
    gc.collect()
    gc.disable()
    try:
        with rest.connect() as client:
            client.sendall(STATUS)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            kept = rest.thread.call(lambda: [weakref.ref(one) for one in rest.server.connections])
        wait_until(lambda: [one() for one in kept] == [None])
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("requests_", "waiting_max"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2_000, 30),
        (REQUEST.replace(b"20", b"40000", 1).replace(b'{"', b" " * 39_980 + b'{"') * 3 + STATUS * 500, 30),
        (CHUNKED * 500, 90),
    ],
    ids=["heads", "bodies", "chunks"],
)
def test_few_requests_are_parsed_before_their_turn(requests_: bytes, waiting_max: int) -> None:
    """A parsed one takes 0.5 kB, and of a client that takes no answers they stay."""
    parser = RequestParser(limits=RestLimits(), body_bytes_max=1 << 20, on_head=lambda _: None)
    unparsed, parsed, waiting = bytearray(requests_), 0, 0
    while unparsed:
        piece = unparsed[: parser.piece_bytes]
        del unparsed[: len(piece)]
        parser.feed(piece)
        waiting, parsed = max(waiting, len(parser.ready)), parsed + len(parser.ready)
        parser.ready.clear()
    assert parsed == requests_.count(b" / ") + requests_.count(b"/v1/")
    assert waiting <= waiting_max


@pytest.mark.parametrize(
    ("version", "answers", "field"),
    [
        (b"HTTP/1.1\r\nconnection: close", 1, b"connection: close\r\n"),
        (b"HTTP/1.0", 1, b"connection: close\r\n"),
        (b"HTTP/1.0\r\nconnection: keep-alive", 2, b"connection: keep-alive\r\n"),
    ],
)
def test_the_client_says_what_is_kept(
    shared: RunningRest, version: bytes, answers: int, field: bytes
) -> None:
    received = shared.exchange(REQUEST.replace(b"HTTP/1.1", version, 1) * 2, answers=2)
    assert count_answers(received) == received.count(field) == answers


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


async def test_no_more_is_read_while_much_waits_for_an_answer() -> None:
    rest = RestUnderTest()
    rest.models.servable.hold = True
    rest.connection.data_received(REQUEST)
    piece = requests()[: LARGE_READ_BYTES - 1]
    for _ in range(1 + 2**16 // len(piece)):
        assert not rest.transport.reads_paused
        rest.connection.data_received(piece)
    assert rest.transport.reads_paused


async def test_a_large_read_waits_for_a_turn() -> None:
    rest = RestUnderTest()
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    rest.connection.data_received(head.ljust(LARGE_READ_BYTES))
    assert rest.transport.reads_paused
    assert rest.connection.waiting_bytes == LARGE_READ_BYTES
    await turns(4 * REQUESTS)
    assert not rest.transport.reads_paused
    assert rest.connection.waiting_bytes == 0
