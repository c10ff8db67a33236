"""Requests over HTTP/1.1 against servers that pause, break, refuse, dribble and lie."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from batchtune.errors import TargetError, UsageError
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.target.endpoint import Endpoint
from tests.load.load_servers import (
    ANSWER_BODY,
    BODY,
    ScriptedHttp,
    a_job,
    closed,
    evenly,
    http_answer,
    requests_for,
    run_here,
)
from tests.measure.send_lag import send_lag_ns


async def answer(_number: int, transport: asyncio.Transport) -> None:
    transport.write(http_answer())


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def all_ended(samples: Samples) -> bool:
    unanswered = (samples.status == Status.UNFINISHED) | (samples.status == Status.UNSENT)
    return bool(((samples.done_ns != NEVER_NS) | unanswered).all())


def test_an_open_loop_sends_every_request_at_its_due_time_and_never_before() -> None:
    schedule = evenly(1000, 0.3)
    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("rest", server.port, schedule))
    assert samples.due_ns.tolist() == schedule.due_ns.tolist()
    assert (samples.sent_ns >= samples.due_ns).all()
    assert samples.errors() == {}
    assert (samples.done_ns > samples.sent_ns).all()
    assert (samples.latency_ns == samples.done_ns - samples.due_ns).all()


def test_a_server_pause_shows_in_the_open_loop_and_hides_in_the_closed_one() -> None:
    pause_s = 0.3

    async def pause_once(number: int, transport: asyncio.Transport) -> None:
        if number == 50:
            time.sleep(pause_s)  # noqa: ASYNC251  the whole server stands still
        transport.write(http_answer())

    with ScriptedHttp(pause_once) as server:
        opened = run_here(a_job("rest", server.port, evenly(500, 1.0)))
    with ScriptedHttp(pause_once) as server:
        looped = run_here(a_job("rest", server.port, closed(2, 500)))
    slow_ns = pause_s / 3 * 1e9
    assert np.quantile(opened.latency_ns, 0.99) > 0.8 * pause_s * 1e9
    assert np.mean(opened.latency_ns > slow_ns) > 0.15
    assert np.mean(looped.latency_ns > slow_ns) < 0.05


def test_a_closed_loop_never_has_more_requests_in_flight_than_users() -> None:
    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("rest", server.port, closed(3, 200)))
    assert len(samples) == 200
    starts = np.sort(samples.sent_ns)
    ends = np.sort(samples.done_ns)
    in_flight = np.searchsorted(starts, starts, side="right") - np.searchsorted(ends, starts, side="right")
    assert in_flight.max() <= 3
    assert samples.concurrency == 3
    assert samples.errors() == {}


def test_users_think_between_an_answer_and_their_next_request() -> None:
    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 8, think_s=0.02)))
    gaps_ns = samples.due_ns[1:] - samples.done_ns[:-1]
    assert (gaps_ns >= 20_000_000).all()
    assert (samples.sent_ns >= samples.due_ns).all()


def test_a_closed_loop_ends_when_its_time_is_over() -> None:
    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("rest", server.port, ClosedLoop(concurrency=2, duration_s=0.1)))
    assert len(samples) > 2
    assert (samples.due_ns < 100_000_000).all()
    assert samples.errors() == {}


def test_requests_rotate_through_the_set() -> None:
    bodies = (b'{"instances": [[1.0]]}', b'{"instances": [[2.0], [3.0]]}')
    order = np.array([0, 1, 1], dtype=np.int32)
    requests = requests_for(
        "rest", bodies=bodies, rows=(1, 2), order=order, headers=(("Authorization", "x y"),)
    )
    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 6), requests=requests))
        sent = [request.partition(b"\r\n\r\n") for request in server.requests]
    assert [body for _, _, body in sent] == [bodies[which] for which in (0, 1, 1, 0, 1, 1)]
    assert samples.rows.tolist() == [1, 2, 2, 1, 2, 2]
    head = sent[0][0].decode()
    assert head.startswith("POST /v1/models/m:predict HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nAuthorization: x y\r\n" in head


def test_a_refused_port_ends_every_request_as_refused() -> None:
    samples = run_here(a_job("rest", free_port(), evenly(300, 0.1)))
    assert samples.errors() == {"REFUSED": 30}
    assert (samples.sent_ns == NEVER_NS).all()
    assert "no connection to 127.0.0.1" in samples.error_texts["REFUSED"]


def test_a_refused_port_does_not_make_a_closed_loop_spin() -> None:
    samples = run_here(a_job("rest", free_port(), ClosedLoop(concurrency=2, duration_s=0.2)))
    assert set(samples.errors()) == {"REFUSED"}
    assert len(samples) <= 2 * 21


def test_a_reset_counts_once_and_the_client_reconnects() -> None:
    async def reset_some(number: int, transport: asyncio.Transport) -> None:
        if number % 10 == 3:
            transport.abort()
        else:
            transport.write(http_answer())

    with ScriptedHttp(reset_some) as server:
        samples = run_here(a_job("rest", server.port, evenly(500, 0.2)))
        assert server.count == 100
    assert samples.errors() == {"RESET": 10}
    with ScriptedHttp(reset_some) as server:
        samples = run_here(a_job("rest", server.port, closed(4, 100)))
    assert samples.errors() == {"RESET": 10}


def test_a_server_that_closes_after_each_answer_costs_no_request() -> None:
    async def close_after(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(extra="Connection: close\r\n"))
        transport.close()

    with ScriptedHttp(close_after) as server:
        looped = run_here(a_job("rest", server.port, closed(3, 60)))
        opened = run_here(a_job("rest", server.port, evenly(300, 0.2)))
    assert looped.errors() == {}
    assert opened.errors() == {}


def test_a_server_that_never_answers_runs_into_the_timeout() -> None:
    async def say_nothing(_number: int, _transport: asyncio.Transport) -> None:
        return

    with ScriptedHttp(say_nothing) as server:
        samples = run_here(a_job("rest", server.port, evenly(200, 0.1), timeout_s=0.15))
    assert samples.errors() == {"TIMEOUT": 20}
    assert (samples.latency_ns >= 150_000_000).all()
    assert samples.error_texts["TIMEOUT"] == "no answer within 0.15 s"


def test_a_closed_loop_goes_on_after_a_timeout() -> None:
    async def forget_the_first(number: int, transport: asyncio.Transport) -> None:
        if number:
            transport.write(http_answer())

    with ScriptedHttp(forget_the_first) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 5), timeout_s=0.5))
    assert samples.errors() == {"TIMEOUT": 1}
    assert samples.status.tolist() == [Status.TIMEOUT, 0, 0, 0, 0]


def test_a_server_that_dribbles_its_answer_runs_into_the_timeout() -> None:
    async def dribble(_number: int, transport: asyncio.Transport) -> None:
        for byte in http_answer():
            if transport.is_closing():
                return
            transport.write(bytes([byte]))
            await asyncio.sleep(0.02)

    with ScriptedHttp(dribble) as server:
        samples = run_here(a_job("rest", server.port, evenly(100, 0.05), timeout_s=0.5))
    assert samples.errors() == {"TIMEOUT": 5}
    assert (samples.first_byte_ns != NEVER_NS).all()


def test_the_first_byte_of_an_answer_in_pieces_is_timed() -> None:
    """In the median: a machine that pauses sees both pieces of a few answers at once."""
    pause_s = 0.03

    async def in_two(_number: int, transport: asyncio.Transport) -> None:
        whole = http_answer()
        transport.write(whole[:-5])
        await asyncio.sleep(pause_s)
        transport.write(whole[-5:])

    with ScriptedHttp(in_two) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 15)))
    assert samples.errors() == {}
    assert np.median(samples.done_ns - samples.first_byte_ns) > pause_s / 2 * 1e9
    assert (samples.first_byte_ns > samples.sent_ns).all()


def test_an_answer_in_one_piece_has_its_first_byte_when_it_is_done() -> None:
    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 4)))
    assert (samples.first_byte_ns == samples.done_ns).all()


def test_what_is_unanswered_when_the_drain_ends_is_unfinished_and_what_waits_unsent() -> None:
    async def say_nothing(_number: int, _transport: asyncio.Transport) -> None:
        return

    with ScriptedHttp(say_nothing) as server:
        job = a_job("rest", server.port, evenly(200, 0.05), drain_s=0.5, in_flight_max=4)
        samples = run_here(job)
    assert samples.errors() == {"UNFINISHED": 4, "UNSENT": 6}
    assert (samples.done_ns == NEVER_NS).all()
    assert (samples.latency_ns == NEVER_NS).all()


def test_the_wait_for_a_connection_is_no_send_lag() -> None:
    async def slowly(_number: int, transport: asyncio.Transport) -> None:
        await asyncio.sleep(0.02)
        transport.write(http_answer())

    with ScriptedHttp(slowly) as server:
        samples = run_here(a_job("rest", server.port, evenly(500, 0.04), in_flight_max=1))
    assert samples.errors() == {}
    waited_ns = samples.connection_wait_ns
    assert waited_ns[0] < waited_ns[-1]
    assert waited_ns[-1] > 200_000_000
    assert (samples.sent_ns - samples.due_ns >= waited_ns).all()
    assert (send_lag_ns(samples) >= 0).all()


def test_every_address_of_a_name_is_tried() -> None:
    with ScriptedHttp(answer) as server:  # listens on 127.0.0.1 only; localhost may be ::1 as well
        job = a_job("rest", server.port, closed(2, 10))
        named = Endpoint(model_name="m", host="localhost", rest_port=server.port)
        samples = run_here(LoadJob(endpoint=named, requests=job.requests, arrivals=job.arrivals))
    assert samples.errors() == {}


@pytest.mark.slow
def test_a_pause_of_1_4_seconds_shows_in_the_p99_of_the_open_loop() -> None:
    async def pause_once(number: int, transport: asyncio.Transport) -> None:
        if number == 500:
            time.sleep(1.4)  # noqa: ASYNC251  the whole server stands still
        transport.write(http_answer())

    with ScriptedHttp(pause_once) as server:
        opened = run_here(a_job("rest", server.port, evenly(500, 10.0)))
    with ScriptedHttp(pause_once) as server:
        looped = run_here(a_job("rest", server.port, closed(4, 5000)))
    assert np.quantile(opened.latency_ns, 0.99) > 1e9
    assert np.quantile(looped.latency_ns, 0.99) < 0.1e9


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (
            "503 Service Unavailable",
            "The batch scheduling queue to which this task was submitted is full",
            "QUEUE_FULL",
        ),
        ("429 Too Many Requests", "Run() timeout exceeded while waiting in batching queue", "EXPIRED"),
        ("429 Too Many Requests", "slow down", "QUEUE_FULL"),
        ("400 Bad Request", "Task size 9 is larger than maximum batch size 4", "TOO_LARGE"),
        ("404 Not Found", "Could not find any versions of model m", "INVALID_REQUEST"),
        ("504 Gateway Timeout", "Timed out waiting for notification", "TIMEOUT"),
        ("500 Internal Server Error", "kernel panic", "SERVER_ERROR"),
    ],
)
def test_failures_are_classed_by_the_servers_words(status: str, text: str, expected: str) -> None:
    async def refuse(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(json.dumps({"error": text}).encode(), status=status))

    with ScriptedHttp(refuse) as server:
        samples = run_here(a_job("rest", server.port, closed(2, 10)))
    assert samples.errors() == {expected: 10}
    assert text in samples.error_texts[expected]
    assert samples.error_texts[expected].startswith(f"HTTP {status[:3]}")


def test_a_503_with_a_time_to_come_back_is_a_refusal_and_one_without_an_error() -> None:
    async def refuse(number: int, transport: asyncio.Transport) -> None:
        extra = "Retry-After: 1\r\n" if number % 2 else ""
        transport.write(http_answer(b"{}", status="503 Service Unavailable", extra=extra))

    with ScriptedHttp(refuse) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 10)))
    assert samples.errors() == {"QUEUE_FULL": 5, "SERVER_ERROR": 5}


def test_an_answer_that_breaks_http_is_malformed_and_the_next_one_is_fine() -> None:
    async def garble_one(number: int, transport: asyncio.Transport) -> None:
        transport.write(b"HTP/1.1 200 OK\r\n\r\n" if number == 2 else http_answer())

    with ScriptedHttp(garble_one) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 6)))
    assert samples.errors() == {"MALFORMED": 1}
    assert "malformed answer" in samples.error_texts["MALFORMED"]


def test_sampled_answers_are_compared_with_what_is_expected() -> None:
    expected = ({"y": np.array([[0.5]], np.float32)},)

    async def lie_on_the_third(number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(b'{"predictions": [[0.75]]}' if number == 2 else ANSWER_BODY))

    with ScriptedHttp(lie_on_the_third) as server:
        job = a_job(
            "rest", server.port, closed(1, 6), requests=requests_for("rest", expected=expected), check_every=1
        )
        samples = run_here(job)
    assert samples.answers_checked == 6
    assert samples.errors() == {"WRONG_ANSWER": 1}
    assert samples.error_texts["WRONG_ANSWER"] == "output 'y' differs from the expected values"


def answered_with(bodies: list[bytes], *, check_every: int = 100) -> Samples:
    """One request of protocol http for each body, by one user; the answers have a status of success."""

    async def script(number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(bodies[number]))

    requests = requests_for("http", bodies=(BODY,), path="/score")
    with ScriptedHttp(script) as server:
        job = a_job("rest", server.port, closed(1, len(bodies)), requests=requests, check_every=check_every)
        return run_here(job)


def test_an_error_with_a_status_of_success_is_no_good_answer_under_load() -> None:
    """Unless it is null, lies deeper, or answers are judged by their status alone."""
    shed = b'{"error": "overloaded"}'
    good = [b'{"score": 1}', b'{"error": null, "score": 1}', b'{"scores": [{"error": "none"}]}', b'"error"']
    samples = answered_with([*good, shed, shed])
    assert samples.errors() == {"WRONG_ANSWER": 2}
    said = 'an error with a status of success: {"error": "overloaded"}'
    assert samples.error_texts["WRONG_ANSWER"] == said
    assert answered_with([shed, shed], check_every=0).errors() == {}


def test_an_error_is_looked_for_at_both_ends_of_a_long_answer() -> None:
    """Its middle is not searched, which would cost more than all else that the client does."""
    scores = b", ".join([b"0.5"] * 30_000)
    first, last = b'{"error": "busy", "scores": [%s]}' % scores, b'{"scores": [%s], "error": "busy"}' % scores
    between = b'{"scores": [%s], "error": "busy", "rest": [%s]}' % (scores, scores)
    assert answered_with([first, last, between]).errors() == {"WRONG_ANSWER": 2}


def test_a_good_status_with_an_undecodable_body_is_malformed_when_checked() -> None:
    async def nonsense(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(b"<html>"))

    with ScriptedHttp(nonsense) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 9), check_every=4))
    assert samples.answers_checked == 3
    assert samples.errors() == {"MALFORMED": 3}


PAGE = b"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><style>body { color: red }</style>
<title>Sign in &amp; go on</title></head><body>welcome</body></html>"""


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        ("502 Bad Gateway", PAGE, "HTTP 502: an HTML page: Sign in & go on"),
        ("200 OK", PAGE, ": an HTML page: Sign in & go on"),
        ("200 OK", b"<html><script>1</script><h1>Down</h1>\n for <b>now</b>", ": an HTML page: Down for now"),
        ("502 Bad Gateway", b"<html>", "HTTP 502: an HTML page: without a word"),
        ("502 Bad Gateway", b"no upstream", "HTTP 502: no upstream"),
    ],
)
def test_a_page_in_place_of_an_answer_is_named_by_its_title_or_its_words(
    status: str, page: bytes, said: str
) -> None:
    async def proxy(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(page, status=status))

    with ScriptedHttp(proxy) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 3), check_every=1))
    (text,) = samples.error_texts.values()
    assert text.endswith(said)
    assert text.startswith(said if status[0] == "5" else "the answer does not decode: ")


def test_an_endpoint_without_the_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="does not answer gRPC"):
        run_here(a_job("grpc", None, closed(1, 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["host.invalid", "a..b"])
def test_a_host_that_does_not_resolve_is_a_target_error(host: str) -> None:
    job = a_job("rest", 1, closed(1, 1))
    nowhere = Endpoint(model_name="m", host=host, rest_port=1)
    with pytest.raises(TargetError, match=f"host {host!r} cannot be resolved".replace(".", r"\.")):
        run_here(LoadJob(endpoint=nowhere, requests=job.requests, arrivals=job.arrivals))


class PythonHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        instances = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["instances"]
        body = json.dumps({"predictions": instances}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        return


@pytest.fixture
def python_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), PythonHandler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_answers_of_pythons_own_http_server_are_right(python_server: int) -> None:
    requests = requests_for("rest", expected=({"y": np.array([[1.0]], np.float32)},))
    for arrivals in (closed(4, 40), evenly(200, 0.2)):
        samples = run_here(a_job("rest", python_server, arrivals, requests=requests, check_every=1))
        assert len(samples) == 40
        assert samples.errors() == {}
        assert samples.answers_checked == 40
    assert BODY
