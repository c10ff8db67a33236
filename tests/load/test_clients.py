"""The load clients over HTTP/1.1 and gRPC against servers that pause, break, refuse, dribble and lie.

grpcio's and Python's own servers are the honest ones; h2's frames and bytes by hand are those that misbehave.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import h2.errors
import hpack
import numpy as np
import pytest
import uvloop

from batchtune.errors import TargetError, UsageError
from batchtune.load.answers import difference, with_lone_answers
from batchtune.load.clients.client import PREDICT_PATH, http_posts
from batchtune.load.fleet import LoadJob
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.load.worker_process import Pacer
from batchtune.scenario.arrivals import Arrivals, ClosedLoop
from batchtune.scenario.payloads import RequestSet, build_requests
from batchtune.scenario.spec.target import TlsSpec
from batchtune.scenario.spec.workload import RequestSpec
from batchtune.target.endpoint import Endpoint, control_channel, url_failure
from batchtune.wire.kserve_infer import ModelInferRequest, json_length, signature_from_metadata
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.tfserving.messages import PredictRequest, PredictResponse
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto
from tests.load.load_servers import (
    BODY,
    Certificate,
    H2Connection,
    Predict,
    ScriptedGrpc,
    ScriptedHttp,
    a_job,
    always,
    certificate_in,
    closed,
    evenly,
    grpcio_server,
    http_answer,
    load_grpc,
    load_http,
    python_server,
    requests_for,
    run_here,
)
from tests.measure.send_lag import send_lag_ns
from tests.target.kserve_server import METADATA, KserveServer
from tests.wire.tensor_protos import tensor_to_proto
from tests.wire.wire_peers import HEADERS, raw_frame

RIGHT = http_answer()
Behaviour = Callable[[int, Callable[[], None]], Awaitable[None]]


def load_any(protocol: str, behave: Behaviour, arrivals: Arrivals, **job: Any) -> Samples:
    """Load a server that for each request calls `behave(number, answer)`."""
    if protocol == "rest":
        return load_http(
            lambda number, transport: behave(number, lambda: transport.write(RIGHT)), arrivals, **job
        )
    return load_grpc(
        lambda number, stream_id, connection: behave(number, lambda: connection.succeed(stream_id)),
        arrivals,
        **job,
    )


async def say_nothing(_number: int, _answer: Callable[[], None]) -> None:
    return


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_an_open_loop_sends_every_request_at_its_due_time_and_never_before() -> None:
    schedule = evenly(1000, 0.3)
    samples = load_http(always(RIGHT), schedule)
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
        transport.write(RIGHT)

    opened, looped = (load_http(pause_once, arrivals) for arrivals in (evenly(500, 1.0), closed(2, 500)))
    slow_ns = pause_s / 3 * 1e9
    assert np.quantile(opened.latency_ns, 0.99) > 0.8 * pause_s * 1e9
    assert np.mean(opened.latency_ns > slow_ns) > 0.15
    assert np.mean(looped.latency_ns > slow_ns) < 0.05


def test_a_closed_loop_never_has_more_requests_in_flight_than_users() -> None:
    samples = load_http(always(RIGHT), closed(3, 200))
    assert (len(samples), samples.concurrency, samples.errors()) == (200, 3, {})
    starts = np.sort(samples.sent_ns)
    ends = np.sort(samples.done_ns)
    in_flight = np.searchsorted(starts, starts, side="right") - np.searchsorted(ends, starts, side="right")
    assert in_flight.max() <= 3
    assert (samples.first_byte_ns == samples.done_ns).all(), "of an answer in one piece"


def test_users_think_between_an_answer_and_their_next_request() -> None:
    samples = load_http(always(RIGHT), closed(1, 8, think_s=0.02))
    gaps_ns = samples.due_ns[1:] - samples.done_ns[:-1]
    assert (gaps_ns >= 20_000_000).all()
    assert (samples.sent_ns >= samples.due_ns).all()


def test_a_closed_loop_ends_when_its_time_is_over() -> None:
    samples = load_http(always(RIGHT), ClosedLoop(concurrency=2, duration_s=0.1))
    assert len(samples) > 2
    assert (samples.due_ns < 100_000_000).all()
    assert samples.errors() == {}


def test_requests_rotate_through_the_set() -> None:
    bodies = (b'{"instances": [[1.0]]}', b'{"instances": [[2.0], [3.0]]}')
    order = np.array([0, 1, 1], dtype=np.int32)
    requests = requests_for(
        "rest", bodies=bodies, rows=(1, 2), order=order, headers=(("Authorization", "x y"),)
    )
    with ScriptedHttp(always(RIGHT)) as server:
        samples = run_here(a_job("rest", server.port, closed(1, 6), requests=requests))
    assert server.bodies == [bodies[which] for which in (0, 1, 1, 0, 1, 1)]
    assert samples.rows.tolist() == [1, 2, 2, 1, 2, 2]
    head = server.requests[0].decode()
    assert head.startswith("POST /v1/models/m:predict HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "\r\nAuthorization: x y\r\n" in head


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_a_refused_port_ends_every_request_as_refused(protocol: str) -> None:
    samples = run_here(a_job(protocol, free_port(), evenly(300, 0.1)))
    assert samples.errors() == {"REFUSED": 30}
    assert (samples.sent_ns == NEVER_NS).all()
    assert "no connection to 127.0.0.1" in samples.error_texts["REFUSED"]


def test_a_refused_port_does_not_make_a_closed_loop_spin() -> None:
    samples = run_here(a_job("rest", free_port(), ClosedLoop(concurrency=2, duration_s=0.2)))
    assert set(samples.errors()) == {"REFUSED"}
    assert len(samples) <= 2 * 21


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_a_server_that_never_answers_runs_into_the_timeout(protocol: str) -> None:
    samples = load_any(protocol, say_nothing, evenly(200, 0.1), timeout_s=0.15)
    assert samples.errors() == {"TIMEOUT": 20}
    assert (samples.latency_ns >= 150_000_000).all()
    assert samples.error_texts["TIMEOUT"] == "no answer within 0.15 s"


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_a_closed_loop_goes_on_after_a_timeout(protocol: str) -> None:
    async def forget_the_first(number: int, answer: Callable[[], None]) -> None:
        if number:
            answer()

    samples = load_any(protocol, forget_the_first, closed(1, 5), timeout_s=0.5)
    assert samples.status.tolist() == [Status.TIMEOUT, 0, 0, 0, 0]


@pytest.mark.parametrize(("protocol", "in_flight_max"), [("rest", 1), ("grpc", 2)])
def test_the_wait_of_requests_beyond_the_bound_is_no_send_lag(protocol: str, in_flight_max: int) -> None:
    async def slowly(_number: int, answer: Callable[[], None]) -> None:
        await asyncio.sleep(0.02)
        answer()

    samples = load_any(protocol, slowly, evenly(500, 0.04), in_flight_max=in_flight_max)
    assert samples.errors() == {}
    waited_ns = samples.connection_wait_ns
    assert waited_ns[0] < waited_ns[-1]
    assert waited_ns[-1] > 200_000_000 / in_flight_max
    assert (samples.sent_ns - samples.due_ns >= waited_ns).all()
    assert (send_lag_ns(samples) >= 0).all()


def test_what_is_unanswered_when_the_drain_ends_is_unfinished_and_what_waits_unsent() -> None:
    samples = load_any("rest", say_nothing, evenly(200, 0.05), drain_s=0.5, in_flight_max=4)
    assert samples.errors() == {"UNFINISHED": 4, "UNSENT": 6}
    assert (samples.done_ns == NEVER_NS).all()
    assert (samples.latency_ns == NEVER_NS).all()


def test_a_reset_counts_once_and_the_client_reconnects() -> None:
    async def reset_some(number: int, transport: asyncio.Transport) -> None:
        if number % 10 == 3:
            transport.abort()
        else:
            transport.write(RIGHT)

    for arrivals in (evenly(500, 0.2), closed(4, 100)):
        with ScriptedHttp(reset_some) as server:
            samples = run_here(a_job("rest", server.port, arrivals))
        assert (server.count, samples.errors()) == (100, {"RESET": 10})


def test_a_server_that_closes_after_each_answer_costs_no_request() -> None:
    async def close_after(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer(extra="Connection: close\r\n"))
        transport.close()

    for arrivals in (closed(3, 60), evenly(300, 0.2)):
        assert load_http(close_after, arrivals).errors() == {}


def test_a_server_that_dribbles_its_answer_runs_into_the_timeout() -> None:
    async def dribble(_number: int, transport: asyncio.Transport) -> None:
        for byte in RIGHT:
            if transport.is_closing():
                return
            transport.write(bytes([byte]))
            await asyncio.sleep(0.02)

    samples = load_http(dribble, evenly(100, 0.05), timeout_s=0.5)
    assert samples.errors() == {"TIMEOUT": 5}
    assert (samples.first_byte_ns != NEVER_NS).all()


def test_the_first_byte_of_an_answer_in_pieces_is_timed() -> None:
    """In the median: a machine that pauses sees both pieces of a few answers at once."""
    pause_s = 0.03

    async def in_two(_number: int, transport: asyncio.Transport) -> None:
        transport.write(RIGHT[:-5])
        await asyncio.sleep(pause_s)
        transport.write(RIGHT[-5:])

    samples = load_http(in_two, closed(1, 15))
    assert samples.errors() == {}
    assert np.median(samples.done_ns - samples.first_byte_ns) > pause_s / 2 * 1e9
    assert (samples.first_byte_ns > samples.sent_ns).all()


def test_every_address_of_a_name_is_tried() -> None:
    with ScriptedHttp(always(RIGHT)) as server:  # on 127.0.0.1 only; localhost may be ::1 as well
        named = Endpoint(model_name="m", host="localhost", rest_port=server.port)
        job = LoadJob(endpoint=named, requests=requests_for("rest"), arrivals=closed(2, 10))
        assert run_here(job).errors() == {}


@pytest.mark.parametrize("host", ["host.invalid", "a..b"])
def test_a_host_that_does_not_resolve_is_a_target_error(host: str) -> None:
    nowhere = Endpoint(model_name="m", host=host, rest_port=1)
    with pytest.raises(TargetError, match=f"host {host!r} cannot be resolved".replace(".", r"\.")):
        run_here(LoadJob(endpoint=nowhere, requests=requests_for("rest"), arrivals=closed(1, 1)))


def test_an_endpoint_without_the_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="does not answer gRPC"):
        run_here(a_job("grpc", None, closed(1, 1)))  # type: ignore[arg-type]


PAGE = b"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><style>body { color: red }</style>
<title>Sign in &amp; go on</title></head><body>welcome</body></html>"""
WORDS = b"<html><script>1</script><h1>Down</h1>\n for <b>now</b>"
BAD_GATEWAY = "502 Bad Gateway"
UNDECODED = "the answer does not decode: "


@pytest.mark.parametrize(
    ("status", "body", "expected", "said"),
    [
        ("500 Internal Server Error", b'{"error": "x"}', "SERVER_ERROR", ('HTTP 500: {"error": "x"}', "")),
        ("503 Busy\r\nRetry-After: 1", b"{}", "QUEUE_FULL", ("HTTP 503", "")),
        ("503 Busy", b"{}", "SERVER_ERROR", ("HTTP 503", "")),
        ("200 OK", b"<html", "MALFORMED", (UNDECODED, "")),
        (BAD_GATEWAY, PAGE, "SERVER_ERROR", ("HTTP 502: an HTML page: Sign in & go on", "")),
        ("200 OK", PAGE, "MALFORMED", (UNDECODED, ": an HTML page: Sign in & go on")),
        ("200 OK", WORDS, "MALFORMED", (UNDECODED, ": an HTML page: Down for now")),
        (BAD_GATEWAY, b"<html>", "SERVER_ERROR", ("HTTP 502: an HTML page: without a word", "")),
        (BAD_GATEWAY, b"no upstream", "SERVER_ERROR", ("HTTP 502: no upstream", "")),
    ],
)
def test_a_failure_has_the_servers_words(
    status: str, body: bytes, expected: str, said: tuple[str, str]
) -> None:
    """A page in place of an answer is named by its title or its words."""
    samples = load_http(always(http_answer(body, status=status)), closed(2, 10), check_every=1)
    assert samples.errors() == {expected: 10}
    assert samples.error_texts[expected].startswith(said[0])
    assert samples.error_texts[expected].endswith(said[1])


def test_an_answer_that_breaks_http_is_malformed_and_the_next_one_is_fine() -> None:
    samples = load_http(always(RIGHT, RIGHT, b"HTP/1.1 200 OK\r\n\r\n", *[RIGHT] * 3), closed(1, 6))
    assert samples.errors() == {"MALFORMED": 1}
    assert "malformed answer" in samples.error_texts["MALFORMED"]


def test_sampled_answers_are_compared_with_what_is_expected() -> None:
    requests = requests_for("rest", expected=({"y": np.array([[0.5]], np.float32)},))
    lies = always(RIGHT, RIGHT, http_answer(b'{"predictions": [[0.75]]}'))
    samples = load_http(lies, closed(1, 5), requests=requests, check_every=1)
    assert samples.answers_checked == 5
    assert samples.errors() == {"WRONG_ANSWER": 1}
    assert samples.error_texts["WRONG_ANSWER"] == "output 'y' differs from the expected values"
    assert load_http(always(http_answer(b"no")), closed(1, 9), check_every=4).errors() == {"MALFORMED": 3}


def answered_with(*bodies: bytes, check_every: int = 100) -> Samples:
    """One request of protocol http for each body, by one user; the answers have a status of success."""
    requests = requests_for("http", bodies=(BODY,), path="/score")
    script = always(*map(http_answer, bodies))
    return load_http(script, closed(1, len(bodies)), requests=requests, check_every=check_every)


def test_an_error_with_a_status_of_success_is_no_good_answer_under_load() -> None:
    """Unless it is null, lies deeper, or answers are judged by their status alone."""
    shed = b'{"error": "overloaded"}'
    good = [b'{"score": 1}', b'{"error": null, "score": 1}', b'{"scores": [{"error": "none"}]}', b'"error"']
    samples = answered_with(*good, shed, shed)
    assert samples.errors() == {"WRONG_ANSWER": 2}
    said = 'an error with a status of success: {"error": "overloaded"}'
    assert samples.error_texts["WRONG_ANSWER"] == said
    assert answered_with(shed, shed, check_every=0).errors() == {}


def test_an_error_is_looked_for_at_both_ends_of_a_long_answer() -> None:
    """Its middle is not searched, which would cost more than all else that the client does."""
    scores = b", ".join([b"0.5"] * 30_000)
    first, last = b'{"error": "busy", "scores": [%s]}' % scores, b'{"scores": [%s], "error": "busy"}' % scores
    between = b'{"scores": [%s], "error": "busy", "rest": [%s]}' % (scores, scores)
    assert answered_with(first, last, between).errors() == {"WRONG_ANSWER": 2}


def doubled_rest(body: bytes) -> bytes:
    rows = np.array([row["x"] if isinstance(row, dict) else row for row in json.loads(body)["instances"]])
    return json.dumps({"predictions": (2 * rows).tolist()}).encode()


@pytest.mark.slow
def test_answers_of_pythons_own_http_server_are_right() -> None:
    requests = requests_for("rest", expected=({"y": np.array([[2.0]], np.float32)},))
    with python_server(doubled_rest) as port:
        for arrivals in (closed(4, 40), evenly(200, 0.2)):
            samples = run_here(a_job("rest", port, arrivals, requests=requests, check_every=1))
            assert (len(samples), samples.answers_checked, samples.errors()) == (40, 40, {})


def double(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Double what is sent; refuse who does not say who they are."""
    if ("authorization", "Bearer t") not in context.invocation_metadata():
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "quöta %")
    answer = PredictResponse()
    doubled = 2 * tensor_from_proto(PredictRequest.FromString(request).inputs["x"])
    answer.outputs["y"].CopyFrom(tensor_to_proto(doubled, as_content=False))
    return bytes(answer.SerializeToString())


def test_answers_of_grpcios_server_are_right_in_both_loops() -> None:
    arrays = [np.full((rows, 3), rows, np.float32) for rows in (1, 2, 4)]
    arrays.append(np.arange(300_000, dtype=np.float32).reshape(1, -1))

    def requests(factor: int, token: str) -> Any:
        return requests_for(
            "grpc",
            bodies=tuple(encode_predict_request("m", "serving_default", {"x": array}) for array in arrays),
            rows=(1, 2, 4, 1),
            expected=tuple({"y": factor * array} for array in arrays),
            headers=(("authorization", token),),
        )

    with grpcio_server(double) as port:
        for arrivals in (closed(4, 60), evenly(300, 0.2)):
            job = a_job("grpc", port, arrivals, requests=requests(2, "Bearer t"), check_every=1)
            samples = run_here(job)
            assert (len(samples), samples.answers_checked, samples.errors()) == (60, 60, {})
            assert samples.rows.tolist() == [1, 2, 4, 1] * 15
            assert (samples.first_byte_ns == samples.done_ns).all()
        wrong = run_here(a_job("grpc", port, closed(1, 10), requests=requests(3, "Bearer t"), check_every=5))
        refused = run_here(a_job("grpc", port, closed(2, 10), requests=requests(2, "nobody")))
    assert wrong.errors() == {"WRONG_ANSWER": 2}
    assert refused.errors() == {"QUEUE_FULL": 10}
    assert refused.error_texts == {"QUEUE_FULL": "RESOURCE_EXHAUSTED: quöta %"}


def test_the_peers_limit_of_streams_is_kept_by_opening_connections() -> None:
    open_streams: list[int] = []

    async def slowly(_number: int, stream_id: int, connection: H2Connection) -> None:
        open_streams.append(connection.h2.open_inbound_streams)
        await asyncio.sleep(0.01)
        connection.succeed(stream_id)

    with ScriptedGrpc(slowly, streams_max=2) as server:
        samples = run_here(a_job("grpc", server.port, closed(12, 120), connections=1, check_every=0))
    assert samples.errors() == {}
    assert max(open_streams) <= 2
    assert len(server.connections) >= 6


@pytest.mark.parametrize("arrivals", [closed(4, 100), evenly(500, 0.2)], ids=["closed", "open"])
def test_a_goaway_or_a_lost_connection_costs_what_was_in_flight(arrivals: Arrivals) -> None:
    async def say_goaway(number: int, stream_id: int, connection: H2Connection) -> None:
        if number == 40:
            connection.h2.close_connection(last_stream_id=stream_id - 2 if stream_id > 2 else 0)
            connection.flush()
            connection.transport.close()
        else:
            connection.succeed(stream_id)

    async def abort_once(number: int, stream_id: int, connection: H2Connection) -> None:
        if number == 30:
            connection.transport.abort()
        elif not connection.closed:
            connection.succeed(stream_id)

    samples = load_grpc(say_goaway, arrivals, connections=1)
    assert len(samples) == 100
    assert samples.errors().keys() <= {"RESET"}
    samples = load_grpc(abort_once, arrivals, connections=1, in_flight_max=4)
    assert len(samples) == 100
    assert set(samples.errors()) == {"RESET"}
    assert 1 <= samples.errors()["RESET"] <= 4
    assert (samples.done_ns != NEVER_NS).all()


def test_calls_that_a_goaway_left_out_are_sent_again() -> None:
    held: list[int] = []
    block = hpack.Encoder().encode(
        [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "13")]
    )

    async def leave_two_out(number: int, stream_id: int, connection: H2Connection) -> None:
        if number < 4:
            held.append(stream_id)
            if number == 3:
                connection.h2.close_connection(last_stream_id=min(held))
                connection.flush()
                connection.transport.write(raw_frame(HEADERS, 5, min(held), block))
        else:
            connection.succeed(stream_id)

    samples = load_grpc(leave_two_out, closed(4, 20), connections=1)
    assert len(samples) == 20
    assert samples.errors() == {"SERVER_ERROR": 1}


def test_a_reset_stream_costs_one_request() -> None:
    async def reset_some(number: int, stream_id: int, connection: H2Connection) -> None:
        if number % 10 == 3:
            connection.h2.reset_stream(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            connection.flush()
        else:
            connection.succeed(stream_id)

    assert load_grpc(reset_some, closed(4, 100)).errors() == {"RESET": 10}


def test_a_server_that_speaks_http1_fails_every_request() -> None:
    with ScriptedHttp(always(RIGHT)) as server:
        samples = run_here(a_job("grpc", server.port, evenly(200, 0.05), timeout_s=0.3))
    assert sum(samples.errors().values()) == 10


def test_metadata_that_cannot_be_sent_is_a_usage_error() -> None:
    requests = requests_for("grpc", headers=(("Authorization", "grüße"),))
    with pytest.raises(UsageError, match=r"request\.headers: "):
        run_here(a_job("grpc", 1, closed(1, 1), requests=requests))


# -- batched answers are compared with what the same server answers to each request alone --


def drawn(protocol: str, token: str = "Bearer t") -> RequestSet:
    spec = RequestSpec.model_validate({"protocol": protocol, "rows": 2, "headers": {"authorization": token}})
    outputs, inputs = ((TensorSpec(name=name, dtype="float32", shape=(None, 3)),) for name in "yx")
    signature = Signature(name="serving_default", method_name="", inputs=inputs, outputs=outputs)
    return build_requests(spec, signature, model_name="m", seed=1, distinct=4)


def test_answers_to_each_request_alone_are_what_is_expected() -> None:
    with python_server(doubled_rest) as port:
        requests = with_lone_answers(Endpoint(model_name="m", rest_port=port), drawn("rest"))
    assert requests.expected is not None
    assert [one[""].shape for one in requests.expected if one] == [(2, 3)] * 4
    with grpcio_server(double) as port:
        requests = with_lone_answers(Endpoint(model_name="m", grpc_port=port), drawn("grpc"))
    assert requests.expected is not None
    for body, expected in zip(requests.bodies, requests.expected, strict=True):
        rows = tensor_from_proto(PredictRequest.FromString(body).inputs["x"])
        assert expected is not None
        assert difference({"y": 2 * rows}, expected) == ""
        assert difference({"y": 2 * rows + np.float32(0.1)}, expected) != ""


@pytest.mark.parametrize(
    ("predict", "told"), [(double, "quöta"), (lambda *_: b"\xff\xff nonsense", "does not decode")]
)
def test_a_server_that_does_not_answer_is_told_with_its_own_words(predict: Predict, told: str) -> None:
    with grpcio_server(predict) as port, pytest.raises(TargetError, match=told):
        with_lone_answers(Endpoint(model_name="m", grpc_port=port), drawn("grpc", "nobody"))


# -- TLS --


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate_in(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def ports(certificate: Certificate) -> Iterator[dict[str, int]]:
    with (
        python_server(lambda _body: b"{}", certificate) as rest,
        grpcio_server(lambda *_: b"", certificate) as grpcs,
    ):
        yield {"rest": rest, "grpc": grpcs}


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_who_proves_themselves_is_served(
    protocol: str, ports: dict[str, int], certificate: Certificate
) -> None:
    tls = TlsSpec(ca_file=str(certificate[0]))
    samples = run_here(a_job(protocol, ports[protocol], closed(3, 30), tls=tls, check_every=0))
    assert (len(samples), samples.errors()) == (30, {})
    elsewhere = tls.model_copy(update={"server_name": "elsewhere.example"})
    for refused, words in ((TlsSpec(), "CERTIFICATE_VERIFY_FAILED"), (elsewhere, "mismatch")):
        samples = run_here(a_job(protocol, ports[protocol], closed(1, 3), tls=refused))
        assert samples.errors() == {"REFUSED": 3}
        assert words in samples.error_texts["REFUSED"]


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [("localhost", "HTTP 501", None), ("elsewhere.example", "mismatch", grpc.StatusCode.UNAVAILABLE)],
)
def test_the_control_plane_verifies_the_name_that_was_given(
    name: str, words: str, code: grpc.StatusCode | None, ports: dict[str, int], certificate: Certificate
) -> None:
    tls = TlsSpec(ca_file=str(certificate[0]), server_name=name)
    endpoint = Endpoint(model_name="m", rest_port=ports["rest"], grpc_port=ports["grpc"], tls=tls)
    assert words in url_failure(f"{endpoint.rest_url}/ready", endpoint)
    assert "HTTP 501" in url_failure(f"https://localhost:{ports['rest']}/of-another-host", endpoint)
    with control_channel(endpoint) as channel:
        error = channel.unary_unary(PREDICT_PATH).future(b"", timeout=20.0).exception()
    assert (None if error is None else error.code()) == code


def test_a_ca_file_that_cannot_be_read_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="TLS files cannot be used"):
        run_here(a_job("rest", 1, closed(1, 1), tls=TlsSpec(ca_file="/does/not/exist.pem")))


# -- KServe v2: what is sent and what is decoded --


PROTOCOLS = ["kserve_grpc", "kserve_rest", "kserve_rest_binary"]
SIGNATURE = signature_from_metadata("serving_default", METADATA)


@pytest.fixture(scope="module")
def started() -> Iterator[KserveServer]:
    with KserveServer() as server:
        yield server


@pytest.fixture
def server(started: KserveServer) -> KserveServer:
    started.fail, started.garbage = None, False
    started.heads.clear()
    started.paths.clear()
    return started


def requests_of(protocol: str, *, version: int | None = None, **keys: Any) -> RequestSet:
    spec = RequestSpec.model_validate({"protocol": protocol, "distinct": 3, **keys})
    return build_requests(spec, SIGNATURE, model_name="m", version=version)


def job(server: KserveServer, requests: RequestSet, arrivals: Any, **changes: Any) -> LoadJob:
    endpoint = Endpoint(model_name="m", rest_port=server.rest_port, grpc_port=server.grpc_port, **changes)
    return LoadJob(endpoint=endpoint, requests=requests, arrivals=arrivals, check_every=1)


def doubles(requests: RequestSet, factor: float) -> tuple[dict[str, Any], ...]:
    """What is to be expected of gRPC bodies."""
    messages = [ModelInferRequest.FromString(body) for body in requests.bodies]
    arrays = [
        np.frombuffer(one.raw_input_contents[0], np.float32).reshape(one.inputs[0].shape) for one in messages
    ]
    return tuple({"y": factor * array} for array in arrays)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("arrivals", [closed(4, 40), evenly(200, 0.2)], ids=["closed", "open"])
@pytest.mark.parametrize(
    ("factor", "errors"), [(2.0, {}), (3.0, {"WRONG_ANSWER": 40})], ids=["right", "wrong"]
)
def test_every_answer_is_decoded_and_compared(
    server: KserveServer, protocol: str, arrivals: Any, factor: float, errors: dict[str, int]
) -> None:
    expected = doubles(requests_of("kserve_grpc", rows=2), factor)  # the same seed draws the same values
    samples = run_here(job(server, replace(requests_of(protocol, rows=2), expected=expected), arrivals))
    assert (samples.answers_checked, len(samples), samples.errors()) == (40, 40, errors)
    assert samples.rows.tolist() == [2] * 40


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_that_do_not_decode_are_malformed(server: KserveServer, protocol: str) -> None:
    server.garbage = True
    assert run_here(job(server, requests_of(protocol), closed(1, 3))).errors() == {"MALFORMED": 3}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_headers_travel_and_the_version_is_named(server: KserveServer, protocol: str) -> None:
    requests = requests_of(protocol, headers={"authorization": "Bearer x"}, version=7)
    run_here(job(server, requests, closed(1, 1), model_version=7))
    if protocol == "kserve_grpc":
        assert server.paths == ["/inference.GRPCInferenceService/ModelInfer"]
        assert ModelInferRequest.FromString(requests.bodies[0]).model_version == "7"
    else:
        assert server.paths == ["/v2/models/m/versions/7/infer"]
    assert server.heads[0]["authorization"] == "Bearer x"


def test_binary_posts_say_where_their_json_ends() -> None:
    endpoint = Endpoint(model_name="m", rest_port=80)
    plain, binary = requests_of("kserve_rest"), requests_of("kserve_rest_binary")
    head, _, body = http_posts(endpoint, binary)[0].partition(b"\r\n\r\n")
    assert body == binary.bodies[0]
    assert head.split(b"\r\n") == [
        b"POST /v2/models/m/infer HTTP/1.1",
        b"Host: 127.0.0.1:80",
        b"Content-Type: application/octet-stream",
        b"Inference-Header-Content-Length: %d" % json_length(body),
        b"Content-Length: %d" % len(body),
    ]
    head = http_posts(endpoint, plain)[0].partition(b"\r\n\r\n")[0]
    assert b"\r\nContent-Type: application/json\r\nContent-Length: " in head


def test_what_json_cannot_hold_is_a_usage_error_that_names_the_way_out() -> None:
    document = {"inputs": [{"name": "x", "datatype": "FP16", "shape": [-1]}]}
    signature = signature_from_metadata("serving_default", document)
    for protocol in ("kserve_grpc", "kserve_rest_binary"):
        build_requests(RequestSpec(protocol=protocol), signature, model_name="m")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="FP16 cannot travel as JSON, only as binary data"):
        build_requests(RequestSpec(protocol="kserve_rest"), signature, model_name="m")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_full_queue_is_seen_through_the_whole_client(server: KserveServer, protocol: str) -> None:
    server.fail = (503, grpc.StatusCode.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size")
    samples = run_here(job(server, requests_of(protocol), closed(2, 8)))
    assert samples.errors() == {"QUEUE_FULL": 8}
    assert "Exceeds maximum queue size" in samples.error_texts["QUEUE_FULL"]


# -- the loop is woken on time, by timerfd --


MILLISECOND_NS = 1_000_000
loop_factory = uvloop.new_event_loop


@contextmanager
def paced(on_wake: Callable[[Pacer], None] = lambda _: None) -> Iterator[tuple[Pacer, list[int]]]:
    """A pacer in this loop, and the instants at which it woke."""
    wakes: list[int] = []

    def wake() -> None:
        wakes.append(time.monotonic_ns())
        on_wake(pacer)

    pacer = Pacer(asyncio.get_running_loop(), wake)
    yield pacer, wakes
    pacer.close()
    pacer.close()


async def woken(wakes: list[int], count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(wakes) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_it_never_wakes_before_the_time_and_at_once_for_one_in_the_past() -> None:
    with paced() as (pacer, wakes):
        for offset_ns in (3 * MILLISECOND_NS, 100_000, 12_345_678, -1):
            wakes.clear()
            when_ns = time.monotonic_ns() + offset_ns
            pacer.wake_at(when_ns)
            await woken(wakes)
            assert wakes[0] >= when_ns
        for when_ns in (0, -5):
            wakes.clear()
            pacer.wake_at(when_ns)
            await woken(wakes)


async def test_it_wakes_once_for_each_time_and_the_last_time_given_holds() -> None:
    with paced() as (pacer, wakes):
        now_ns = time.monotonic_ns()
        pacer.wake_at(now_ns + 2 * MILLISECOND_NS)
        pacer.wake_at(now_ns + 20 * MILLISECOND_NS)
        await woken(wakes)
        await asyncio.sleep(0.02)
        assert len(wakes) == 1
        assert wakes[0] >= now_ns + 19 * MILLISECOND_NS


async def test_a_wake_may_set_the_next() -> None:
    with paced(lambda pacer: pacer.wake_at(time.monotonic_ns() - 1) if len(wakes) < 20 else None) as (
        pacer,
        wakes,
    ):
        pacer.wake_at(time.monotonic_ns())
        await woken(wakes, 20)
        await asyncio.sleep(0.005)
        assert len(wakes) == 20


async def test_a_closed_pacer_stays_silent() -> None:
    with paced() as (pacer, wakes):
        pacer.wake_at(time.monotonic_ns() + MILLISECOND_NS)
    await asyncio.sleep(0.01)
    assert wakes == []
