"""Requests over gRPC: grpcio's own server as the honest one, h2's frames for those that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc
import h2.errors
import numpy as np
import pytest

from batchtune.errors import UsageError
from batchtune.load.clients.client import PREDICT_PATH
from batchtune.load.samples import NEVER_NS, Status
from batchtune.wire.tfserving.messages import PredictRequest, PredictResponse
from batchtune.wire.tfserving.tensors import encode_predict_request, tensor_from_proto
from tests.load.load_servers import (
    H2Connection,
    ScriptedGrpc,
    ScriptedHttp,
    a_job,
    closed,
    evenly,
    http_answer,
    requests_for,
    run_here,
)
from tests.measure.send_lag import send_lag_ns
from tests.wire.tensor_protos import tensor_to_proto

Predict = Callable[[bytes, grpc.ServicerContext], bytes]


def double(request: bytes, _context: grpc.ServicerContext) -> bytes:
    message = PredictRequest.FromString(request)
    answer = PredictResponse()
    answer.outputs["y"].CopyFrom(
        tensor_to_proto(2 * tensor_from_proto(message.inputs["x"]), as_content=False)
    )
    return bytes(answer.SerializeToString())


class Grpcio:
    """grpcio's sync server with one method, whose behaviour a test may replace."""

    def __init__(self) -> None:
        self.predict: Predict = double
        self.metadata: dict[str, str | bytes] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        service, method = PREDICT_PATH[1:].split("/")
        handler = grpc.unary_unary_rpc_method_handler(self._handle)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def _handle(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.metadata = dict(context.invocation_metadata())
        return self.predict(request, context)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def grpcio() -> Iterator[Grpcio]:
    with Grpcio() as server:
        yield server


def test_answers_of_grpcios_server_are_right_in_both_loops(grpcio: Grpcio) -> None:
    arrays = [np.full((rows, 3), rows, np.float32) for rows in (1, 2, 4)]
    requests = requests_for(
        "grpc",
        bodies=tuple(encode_predict_request("m", "serving_default", {"x": array}) for array in arrays),
        rows=(1, 2, 4),
        expected=tuple({"y": 2 * array} for array in arrays),
        headers=(("authorization", "Bearer t"),),
    )
    for arrivals in (closed(4, 60), evenly(300, 0.2)):
        samples = run_here(a_job("grpc", grpcio.port, arrivals, requests=requests, check_every=1))
        assert len(samples) == 60
        assert samples.errors() == {}
        assert samples.answers_checked == 60
        assert samples.rows.tolist() == [1, 2, 4] * 20
        assert (samples.first_byte_ns == samples.done_ns).all()
    assert grpcio.metadata["authorization"] == "Bearer t"


def test_a_wrong_answer_is_told_from_a_right_one(grpcio: Grpcio) -> None:
    requests = requests_for("grpc", expected=({"y": np.array([[3.0]], np.float32)},))
    samples = run_here(a_job("grpc", grpcio.port, closed(1, 10), requests=requests, check_every=5))
    assert samples.errors() == {"WRONG_ANSWER": 2}


def test_big_messages_travel_both_ways(grpcio: Grpcio) -> None:
    array = np.arange(300_000, dtype=np.float32).reshape(1, -1)
    requests = requests_for(
        "grpc",
        bodies=(encode_predict_request("m", "serving_default", {"x": array}),),
        expected=({"y": 2 * array},),
    )
    samples = run_here(a_job("grpc", grpcio.port, closed(3, 9), requests=requests, check_every=1))
    assert samples.errors() == {}
    assert samples.answers_checked == 9


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "The batch scheduling queue is full", "QUEUE_FULL"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Run() timeout exceeded while waiting in batching queue",
            "EXPIRED",
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Server Threadpool Exhausted", "THREAD_POOL_EXHAUSTED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", "TOO_LARGE"),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "Task size 9 is larger than maximum input batch size 4",
            "TOO_LARGE",
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "input size does not match signature", "INVALID_REQUEST"),
        (grpc.StatusCode.NOT_FOUND, "Servable not found", "INVALID_REQUEST"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "TIMEOUT"),
        (grpc.StatusCode.INTERNAL, "ünexpected %", "SERVER_ERROR"),
    ],
)
def test_failures_are_classed_by_the_servers_words(
    grpcio: Grpcio, code: grpc.StatusCode, text: str, expected: str
) -> None:
    def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(code, text)
        raise AssertionError("abort raises")

    grpcio.predict = refuse
    samples = run_here(a_job("grpc", grpcio.port, closed(2, 10)))
    assert samples.errors() == {expected: 10}
    assert samples.error_texts[expected] == f"{code.name}: {text}"


def test_a_server_slower_than_the_timeout_ends_calls_as_timeouts() -> None:
    async def say_nothing(_number: int, _stream_id: int, _connection: H2Connection) -> None:
        return

    with ScriptedGrpc(say_nothing) as server:
        samples = run_here(a_job("grpc", server.port, evenly(200, 0.1), timeout_s=0.15))
    assert samples.errors() == {"TIMEOUT": 20}
    assert (samples.latency_ns >= 150_000_000).all()


def test_a_closed_loop_goes_on_after_a_timeout() -> None:
    async def forget_the_first(number: int, stream_id: int, connection: H2Connection) -> None:
        if number:
            connection.succeed(stream_id)

    with ScriptedGrpc(forget_the_first) as server:
        samples = run_here(a_job("grpc", server.port, closed(1, 5), timeout_s=0.5, check_every=0))
    assert samples.status.tolist() == [Status.TIMEOUT, 0, 0, 0, 0]


async def succeed(_number: int, stream_id: int, connection: H2Connection) -> None:
    connection.succeed(stream_id)


def test_the_peers_limit_of_streams_is_kept_by_opening_connections() -> None:
    most = 0

    async def slowly(_number: int, stream_id: int, connection: H2Connection) -> None:
        nonlocal most
        most = max(most, connection.h2.open_inbound_streams)
        await asyncio.sleep(0.01)
        connection.succeed(stream_id)

    with ScriptedGrpc(slowly, streams_max=2) as server:
        samples = run_here(a_job("grpc", server.port, closed(12, 120), connections=1, check_every=0))
        assert samples.errors() == {}
        assert most <= 2
        assert len(server.connections) >= 6


def test_requests_beyond_the_bound_wait_and_their_wait_is_recorded() -> None:
    async def slowly(_number: int, stream_id: int, connection: H2Connection) -> None:
        await asyncio.sleep(0.02)
        connection.succeed(stream_id)

    with ScriptedGrpc(slowly) as server:
        samples = run_here(a_job("grpc", server.port, evenly(500, 0.04), in_flight_max=2, check_every=0))
    assert samples.errors() == {}
    assert samples.connection_wait_ns[-1] > 100_000_000
    assert (send_lag_ns(samples) >= 0).all()


def test_a_goaway_in_mid_run_loses_nothing() -> None:
    async def say_goaway(number: int, stream_id: int, connection: H2Connection) -> None:
        if number == 40:
            connection.h2.close_connection(last_stream_id=stream_id - 2 if stream_id > 2 else 0)
            connection.flush()
            connection.transport.close()
            return
        connection.succeed(stream_id)

    with ScriptedGrpc(say_goaway) as server:
        for arrivals in (closed(4, 100), evenly(500, 0.2)):
            server.count = 0
            samples = run_here(a_job("grpc", server.port, arrivals, connections=1, check_every=0))
            assert len(samples) == 100
            assert samples.errors().keys() <= {"RESET"}
            assert len(server.connections) >= 2


def test_calls_that_a_goaway_left_out_are_sent_again() -> None:
    held: list[int] = []

    async def leave_two_out(number: int, stream_id: int, connection: H2Connection) -> None:
        if number < 4:
            held.append(stream_id)
            if number == 3:
                connection.h2.close_connection(last_stream_id=min(held))
                connection.flush()
                head = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "13")]
                connection.transport.write(_headers_frame(min(held), head))
        else:
            connection.succeed(stream_id)

    with ScriptedGrpc(leave_two_out) as server:
        samples = run_here(a_job("grpc", server.port, closed(4, 20), connections=1, check_every=0))
    assert len(samples) == 20
    assert samples.errors() == {"SERVER_ERROR": 1}


def _headers_frame(stream_id: int, fields: list[tuple[str, str]]) -> bytes:
    import hpack

    block = hpack.Encoder().encode(fields)
    return len(block).to_bytes(3) + b"\x01\x05" + stream_id.to_bytes(4) + block


def test_a_reset_stream_costs_one_request() -> None:
    async def reset_some(number: int, stream_id: int, connection: H2Connection) -> None:
        if number % 10 == 3:
            connection.h2.reset_stream(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            connection.flush()
        else:
            connection.succeed(stream_id)

    with ScriptedGrpc(reset_some) as server:
        samples = run_here(a_job("grpc", server.port, closed(4, 100), check_every=0))
    assert samples.errors() == {"RESET": 10}


def test_a_lost_connection_costs_what_was_in_flight_and_the_client_reconnects() -> None:
    async def abort_once(number: int, stream_id: int, connection: H2Connection) -> None:
        if number == 30:
            connection.transport.abort()
        elif not connection.closed:
            connection.succeed(stream_id)

    with ScriptedGrpc(abort_once) as server:
        for arrivals in (closed(4, 100), evenly(500, 0.2)):
            server.count = 0
            job = a_job("grpc", server.port, arrivals, connections=1, in_flight_max=4, check_every=0)
            samples = run_here(job)
            assert len(samples) == 100
            assert set(samples.errors()) == {"RESET"}
            assert 1 <= samples.errors()["RESET"] <= 4
            assert (samples.done_ns != NEVER_NS).all()


def test_trailers_only_failures_and_fragmented_frames_are_understood() -> None:
    async def in_bits(number: int, stream_id: int, connection: H2Connection) -> None:
        if number % 2:
            connection.fail(stream_id, 14, "The batch scheduling queue is full")
            return
        connection.h2.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        connection.h2.send_data(stream_id, b"\0\0\0")
        connection.h2.send_data(stream_id, b"\0\x03ab")
        connection.h2.send_data(stream_id, b"c")
        connection.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        for byte in connection.h2.data_to_send():
            connection.transport.write(bytes([byte]))
            await asyncio.sleep(0)

    with ScriptedGrpc(in_bits) as server:
        samples = run_here(a_job("grpc", server.port, closed(1, 10), check_every=0))
    assert samples.errors() == {"QUEUE_FULL": 5}


def test_a_refused_port_ends_every_request_as_refused() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    samples = run_here(a_job("grpc", port, evenly(300, 0.1)))
    assert samples.errors() == {"REFUSED": 30}


def test_a_server_that_speaks_http1_fails_every_request() -> None:
    async def answer(_number: int, transport: asyncio.Transport) -> None:
        transport.write(http_answer())

    with ScriptedHttp(answer) as server:
        samples = run_here(a_job("grpc", server.port, evenly(200, 0.05), timeout_s=0.3))
    assert sum(samples.errors().values()) == 10


def test_metadata_that_cannot_be_sent_is_a_usage_error() -> None:
    requests = requests_for("grpc", headers=(("Authorization", "grüße"),))
    with pytest.raises(UsageError, match=r"request\.headers: "):
        run_here(a_job("grpc", 1, closed(1, 1), requests=requests))
