"""Does the REST front end speak HTTP/1.1 to clients that we did not write, and survive those that mean harm?"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
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
import requests

from batchtune.server.rest.parser import Head, HttpRequest, RequestParser, RestLimits
from batchtune.wire.listener import SWEEP_S, SharedLimits
from tests.server.server_fakes import FakeServable, RunningRest, count_answers, running_rest
from tests.waiting import wait_until

PREDICT = "/v1/models/m:predict"
REQUEST = b'POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{"instances": [1.0]}'
STATUS = b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
ANSWER = {"predictions": [2.5]}


@pytest.fixture(scope="module")
def rest() -> Iterator[RunningRest]:
    with running_rest(monitoring_path="/metrics") as running:
        yield running


def exchange(rest: RunningRest, *pieces: bytes, answers: int = 1) -> bytes:
    """Send raw bytes and read until so many answers have come whole, or the server has closed."""
    received = b""
    with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
        for piece in pieces:
            client.sendall(piece)
        while count_answers(received) < answers and (chunk := client.recv(65536)):
            received += chunk
    return received


def curl(rest: RunningRest, *arguments: str, body: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = ["curl", "-sS", "--max-time", "20", *arguments]
    return subprocess.run(command, input=body, check=True, capture_output=True, timeout=30)


def test_curl_keeps_its_connection(rest: RunningRest) -> None:
    url = rest.url + PREDICT
    done = curl(rest, "-v", "-d", '{"instances": [1.0]}', url, url, url)
    assert done.stdout.count(b"2.5") == 3
    assert done.stderr.count(b"Re-using existing") == 2


@pytest.mark.parametrize(
    "arguments", [["--http1.0"], ["--http1.0", "-H", "Connection: keep-alive"], ["--http2"]]
)
def test_curl_of_other_versions_is_answered_in_http_1_1(rest: RunningRest, arguments: list[str]) -> None:
    """--http2 asks for an upgrade that a server may ignore; Java's client does so by default."""
    done = curl(rest, "-v", *arguments, "-d", '{"instances": [1.0]}', rest.url + PREDICT, rest.url + PREDICT)
    assert done.stdout.count(b"2.5") == 2
    assert done.stderr.count(b"< HTTP/1.1 200 OK") == 2


def test_curl_uploads_in_chunks_of_unknown_length(rest: RunningRest) -> None:
    body = json.dumps({"instances": [1.0] * 5_000}).encode()
    chunked = ["-T", "-", "-X", "POST", "-H", "Transfer-Encoding: chunked"]
    done = curl(rest, *chunked, rest.url + PREDICT, body=body)
    assert json.loads(done.stdout) == {"predictions": [2.5] * 5_000}


def test_curl_waits_for_100_continue(rest: RunningRest, tmp_path: Path) -> None:
    (tmp_path / "body").write_text('{"instances": [1.0]}')
    posted = [
        "--data-binary",
        f"@{tmp_path / 'body'}",
        "-H",
        "Expect: 100-continue",
        "--expect100-timeout",
        "15",
    ]
    began = time.monotonic()
    done = curl(rest, "-v", *posted, rest.url + PREDICT)
    assert json.loads(done.stdout) == ANSWER
    assert b"< HTTP/1.1 100 Continue" in done.stderr
    assert time.monotonic() - began < 10, "curl gave up waiting for the 100"


def test_curl_reads_why_its_large_body_is_refused(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(bytes(30 << 20))
    with running_rest(rest_api_max_body_bytes=1 << 20) as rest:
        for field in ("Content-Type: x", "Transfer-Encoding: chunked", "Expect:"):
            sent = ["--data-binary", f"@{tmp_path / 'body'}", "-H", field, "-w", "%{http_code}"]
            done = curl(rest, *sent, rest.url + PREDICT)
            assert done.stdout == b'{ "error": "the request body exceeds 1048576 bytes" }413'


def test_answers_are_gzipped_for_who_accepts_it_where_the_flag_says_so(rest: RunningRest) -> None:
    body = {"instances": [1.0] * 20_000}
    small = {"instances": [1.0]}
    assert "content-encoding" not in requests.post(rest.url + PREDICT, json=body, timeout=10).headers
    with running_rest(rest_api_enable_gzip_answers=True) as open_rest:
        for _ in range(2):
            for rows in (500, 20_000):
                body = {"instances": [1.0] * rows}
                answer = requests.post(open_rest.url + PREDICT, json=body, timeout=10)
                assert (answer.headers["content-encoding"], answer.headers["vary"]) == (
                    "gzip",
                    "accept-encoding",
                )
                assert answer.headers["content-type"] == "application/json"
                assert answer.json() == {"predictions": [2.5] * rows}
            assert (
                "content-encoding"
                not in requests.post(open_rest.url + PREDICT, json=small, timeout=10).headers
            )
            refusing = {"Accept-Encoding": "gzip;q=0, identity"}
            plain = requests.post(open_rest.url + PREDICT, json=body, headers=refusing, timeout=10)
            assert "content-encoding" not in plain.headers
        done = curl(open_rest, "--compressed", "-d", json.dumps(body), open_rest.url + PREDICT)
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


def test_large_gzipped_bodies_are_inflated_aside(rest: RunningRest) -> None:
    values = np.random.default_rng(1).random(5_000).round(6).tolist()
    packed = gzip.compress(json.dumps({"instances": values}).encode())
    assert len(packed) > 10_000
    answer = requests.post(rest.url + PREDICT, data=packed, headers={"Content-Encoding": "gzip"}, timeout=10)
    assert np.allclose(answer.json()["predictions"], np.array(values) / 2 + 2)
    broken = requests.post(
        rest.url + PREDICT, data=packed[:-9], headers={"Content-Encoding": "gzip"}, timeout=10
    )
    assert (broken.status_code, "cut short" in broken.json()["error"]) == (400, True)


def test_gzipped_bodies_that_wait_to_be_inflated_are_bounded(rest: RunningRest) -> None:
    packed = gzip.compress(np.random.default_rng(1).bytes(5_000))
    statuses = []
    for waiting_bytes in (1 << 26, 0):
        rest.api._inflating.waiting_bytes = waiting_bytes
        answer = requests.post(
            rest.url + PREDICT, data=packed, headers={"Content-Encoding": "gzip"}, timeout=10
        )
        statuses.append(answer.status_code)
        assert rest.api._inflating.waiting_bytes == waiting_bytes
        assert rest.api._inflating.held_bytes == 0
    assert statuses == [429, 400]


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk_finds_no_error(rest: RunningRest, tmp_path: Path) -> None:
    (tmp_path / "post.lua").write_text("wrk.method = 'POST'\nwrk.body = '{\"instances\": [1.0]}'\n")
    command = ["wrk", "-t1", "-c32", "-d1s", "-s", str(tmp_path / "post.lua"), rest.url + PREDICT]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    assert "requests in" in said
    assert "Socket errors" not in said
    assert "Non-2xx" not in said


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed")
@pytest.mark.parametrize("pipelined", [1, 10])
def test_h2load_over_http_1_is_answered_in_order(rest: RunningRest, tmp_path: Path, pipelined: int) -> None:
    (tmp_path / "body").write_bytes(b'{"instances": [1.0]}')
    command = [
        "h2load",
        "--h1",
        "-n2000",
        "-c8",
        f"-m{pipelined}",
        "-d",
        str(tmp_path / "body"),
        rest.url + PREDICT,
    ]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "2000 succeeded, 0 failed, 0 errored" in said


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
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_ends_the_connection(
    rest: RunningRest, fields: bytes
) -> None:
    """Whoever stands between us and the client might have read it the other way (request smuggling)."""
    smuggled = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n" + REQUEST[-20:]
    received = exchange(rest, smuggled + REQUEST, answers=2)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close\r\n" in received
    assert count_answers(received) == 1


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"-2\r\n{}\r\n",
        b"2\r\n{}x\r\n0\r\n\r\n",
        b"f" * 17 + b"\r\n{}",
        b"\r\n2\r\n{}",
    ],
)
def test_a_chunk_of_a_wrong_size_is_refused(rest: RunningRest, chunks: bytes) -> None:
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    received = exchange(rest, head + chunks)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"Malformed HTTP request" in received


@pytest.mark.parametrize(
    ("request_bytes", "status", "text"),
    [
        (b"GET /v1/models/m\0 HTTP/1.1\r\nhost: x\r\n\r\n", 400, b"Malformed HTTP request"),
        (b"GET /v1/models/\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n", 400, b"Malformed HTTP request"),
        (b"GET /v1/models/%C3%A9 HTTP/1.1\r\nhost: x\r\n\r\n", 404, "of model é".encode()),
        (b"GET http://x:1/v1/models/n?a HTTP/1.1\r\nhost: x\r\n\r\n", 404, b"of model n?a"),
        (b"GET /v1/models/n#m HTTP/1.1\r\nhost: x\r\n\r\n", 404, b"of model n"),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404, b"Not found: *"),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, b"CONNECT"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, b"Malformed HTTP request"),
        (b"GET /v1/models/m\r\n\r\n", 505, b"HTTP/0.9 is not spoken here"),
        (b"GET /v1/models/m HTTP/2.0\r\n\r\n", 505, b"HTTP/2.0 is not spoken here"),
        (b"GET /v1/models/m HTTP/1.7\r\n\r\n", 400, b"Malformed HTTP request"),
        (b"GET /v1/models/m HTTP/1.1\r\n\r\n", 400, b"one Host field"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n", 400, b"one Host field"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: x/y\r\n\r\n", 400, b"one Host field"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost:\r\n\r\n", 200, b"AVAILABLE"),
        (b"GET /v1/models/m HTTP/1.1\r\nhost: [::1]:80\r\n\r\n", 200, b"AVAILABLE"),
        (b"GET /v1/models/m HTTP/1.0\r\n\r\n", 200, b"AVAILABLE"),
        (CHUNKED.replace(b": chunked", b": gzip, chunked"), 501, b"other than chunked"),
        (
            CHUNKED.replace(b"transfer", b"transfer-encoding: gzip\r\ntransfer", 1),
            501,
            b"other than chunked",
        ),
    ],
)
def test_targets_of_every_form(rest: RunningRest, request_bytes: bytes, status: int, text: bytes) -> None:
    received = exchange(rest, request_bytes)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert text in received


def test_the_answer_to_head_has_no_body(rest: RunningRest) -> None:
    received = exchange(rest, b"HEAD /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", answers=2)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/plain" in head
    assert not body


def test_known_heads_and_unknown_ones_mix(rest: RunningRest) -> None:
    """The same head again is not parsed; what follows must not be misread for that."""
    other = REQUEST.replace(b"host: x", b"host: x\r\nx-request-id: %d")
    mixed = [
        REQUEST,
        STATUS,
        REQUEST,
        other % 1,
        REQUEST,
        REQUEST[:70],
        REQUEST[70:],
        REQUEST,
        other % 2,
        STATUS,
    ]
    with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
        for piece in mixed:
            client.sendall(piece)
            if piece != REQUEST[:70]:
                received = b""
                while not count_answers(received):
                    received += client.recv(65536)
                assert (b"AVAILABLE" if piece == STATUS else b"2.5") in received


def test_a_request_that_waits_behind_another_is_told_to_continue_in_its_turn(rest: RunningRest) -> None:
    head, _, body = REQUEST.replace(b"host: x", b"host: x\r\nexpect: 100-continue").rpartition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
        client.sendall(STATUS + head + b"\r\n\r\n")
        received = b""
        while b"100 Continue" not in received:
            received += client.recv(65536)
        assert received.index(b"AVAILABLE") < received.index(b"100 Continue")
        client.sendall(body)
        while b"2.5" not in received:
            received += client.recv(65536)


def test_a_refusal_waits_for_the_answers_before_it(rest: RunningRest) -> None:
    received = exchange(rest, REQUEST + STATUS + b"nonsense\r\n\r\n", answers=4)
    assert count_answers(received) == 3
    assert received.index(b"2.5") < received.index(b"AVAILABLE") < received.index(b"HTTP/1.1 400")


@pytest.mark.parametrize("sent", [REQUEST, STATUS, REQUEST * 2 + STATUS, CHUNKED], ids=range(4))
def test_a_client_that_sends_no_more_is_answered(rest: RunningRest, sent: bytes) -> None:
    """As `nc -N` and some clients of HTTP/1.0 do."""
    received = b""
    with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        while chunk := client.recv(65536):
            received += chunk
    assert count_answers(received) == sent.count(b" HTTP/1.1")
    wait_until(lambda: len(rest.server.connections) == 0)


@pytest.mark.parametrize(
    "cut",
    [
        REQUEST[:10],
        REQUEST[:60],
        REQUEST[:-1],
        b'POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"',
    ],
)
def test_a_request_cut_short_is_not_answered_and_leaves_nothing(cut: bytes) -> None:
    with running_rest() as rest:
        with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
            client.sendall(cut)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b""
        wait_until(lambda: len(rest.server.connections) == 0)
        assert not rest.models.servable.asked


@pytest.mark.parametrize(
    ("endless", "piece"),
    [
        (b"GET /", b"x" * 5_000),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: ", b"y" * 5_000),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n" * 800),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"y" * 5_000),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 800),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", b"y" * 5_000),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2;x=", b"y" * 5_000),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"0" * 5_000),
    ],
    ids=["target", "value", "fields", "name", "trailers", "trailer", "chunk extension", "chunk size"],
)
def test_what_has_no_end_is_refused_before_it_fills_the_memory(
    rest: RunningRest, endless: bytes, piece: bytes
) -> None:
    sent = len(endless)
    with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
        client.sendall(endless)
        try:
            while sent < 2 << 20:
                client.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            return
        client.settimeout(10)
        assert client.recv(20).startswith(b"HTTP/1.1 400"), "2 MB of it, and no end"


def test_slow_heads_and_trickled_bodies_are_cut_off() -> None:
    limits = RestLimits(shared=SharedLimits(patience_s=SWEEP_S))
    with running_rest(limits=limits) as rest:
        clients = [socket.create_connection(("127.0.0.1", rest.port), timeout=10) for _ in range(3)]
        clients[0].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
        clients[1].sendall(REQUEST[:-10])
        wait_until(lambda: len(rest.server.connections) == 3)
        end = time.monotonic() + 10

        def cut_off() -> bool:
            rest.thread.call(rest.server.sweep)
            return len(rest.server.connections) == 1

        while not cut_off():
            assert time.monotonic() < end, "a client that sends a byte now and then was never cut off"
            for client, byte in zip(clients, (b"x", b" "), strict=False):
                with contextlib.suppress(OSError):
                    client.sendall(byte)
            time.sleep(0.02)
        for client in clients:
            client.close()


def test_paths_and_heads_that_clients_invent_are_kept_within_bounds() -> None:
    with running_rest() as rest:

        def ask(number: int) -> None:
            path = b"/v1/models/%07d%b:predict" % (number, b"n" * 30_000)
            field = b"x-id: %07d%b" % (number, b"i" * 700)
            for target, more in ((path, b"x: y"), (b"/v1/models/m:predict", field)):
                client.sendall(
                    b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\ncontent-length: 2\r\n\r\n{}" % (target, more)
                )
                received = b""
                while not count_answers(received):
                    received += client.recv(1 << 17)

        with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
            for number in range(300):  # the metrics keep 256 names
                ask(number)
            tracemalloc.start()
            try:
                for number in range(300, 900):
                    ask(number)
                assert tracemalloc.get_traced_memory()[0] < 4 << 20
            finally:
                tracemalloc.stop()


def test_many_pipelined_requests_keep_nobody_else_waiting() -> None:
    with running_rest() as rest, socket.create_connection(("127.0.0.1", rest.port), timeout=30) as flood:
        flood.sendall(STATUS * 20_000)
        waits_ms = []
        with requests.Session() as session:
            for _ in range(10):
                began = time.monotonic()
                session.get(rest.url + "/v1/models/m", timeout=10)
                waits_ms.append(1000 * (time.monotonic() - began))
        assert sorted(waits_ms)[5] < 2_000, "an order of magnitude above what a busy machine may add"


def test_thousand_clients_that_read_nothing_cost_little() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asked = STATUS * 2
    with running_rest() as rest:
        tracemalloc.start()
        clients = []
        try:
            for _ in range(1_000):
                client = socket.create_connection(("127.0.0.1", rest.port), timeout=10)
                client.sendall(asked)
                clients.append(client)
            wait_until(lambda: len(rest.server.connections) == 1_000, limit_s=60)
            assert requests.post(rest.url + PREDICT, json={"instances": [1.0]}, timeout=30).json() == ANSWER
            assert tracemalloc.get_traced_memory()[0] < 10 << 20
        finally:
            tracemalloc.stop()
            for client in clients:
                client.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_draining_answers_what_was_pipelined() -> None:
    servable = FakeServable()
    servable.hold = True
    with (
        running_rest(servable) as rest,
        socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client,
    ):
        client.sendall(REQUEST + STATUS + STATUS)
        wait_until(lambda: servable.held)
        drained = rest.thread.loop.call_soon_threadsafe(rest.thread.loop.create_task, rest.server.drain(5))
        assert drained is not None
        rest.thread.call(servable.release)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
        assert count_answers(received) == 3
        assert received.count(b"connection: close\r\n") == 1


def test_a_body_of_tiny_pieces_takes_little_more_than_its_bytes() -> None:
    request = HttpRequest(Head("POST", b"/", {}, keep_alive=True, is_http_1_0=False))
    body = bytes(range(256)) * 1600
    tracemalloc.start()
    for start in range(0, len(body), 2):
        request.add(body[start : start + 2])
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 1.5 * len(body)
    assert request.size == len(body)
    assert request.body() == body
    short = HttpRequest(request.head)
    assert short.body() == b""
    for pieces in (1, 2):
        short.add(b"ab")
        assert short.body() == b"ab" * pieces


def test_a_closed_connection_dies_without_the_collector() -> None:
    """A client that dials anew for each request would leave 60 kB of each until a collection, which is put off."""
    with running_rest() as rest:
        gc.collect()
        gc.disable()
        try:
            with socket.create_connection(("127.0.0.1", rest.port), timeout=10) as client:
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
