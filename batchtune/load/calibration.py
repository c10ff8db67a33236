"""Measures how fast the client itself is, once per run, against a server that does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final, cast

import uvloop

from batchtune.errors import MeasurementInvalidError
from batchtune.load.fleet import LoadFleet, LoadJob
from batchtune.load.worker_process import start_undisturbed
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.workload import OkSpec
from batchtune.target.endpoint import Endpoint
from batchtune.wire import http2 as h2
from batchtune.wire.grpc.framing import PREFIX_BYTES
from batchtune.wire.http2 import encode_block

# A server that does nothing: fixed answers over HTTP/1.1 and gRPC, to measure the client alone.
#
# It reads just enough of a request to know where it ends. It runs in a process of its own, and only for us: it
# checks nothing.

_HTTP_ANSWER: Final = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 24\r\n\r\n{"predictions": [[0.0]]}'
)


@contextmanager
def null_server(*, cpus: Sequence[int] | None = None) -> Iterator[Endpoint]:
    """Return a context manager that runs a server in a process of its own, which gives each request the same answer at
    once; its value is the server's address.

    `cpus`: numbers of the CPUs that it may run on; None: any.

    Raises:
        MeasurementInvalidError: the server does not start.
    """
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe(duplex=True)
    process = spawn.Process(target=serve, args=(theirs, cpus), name="batchtune-null-server", daemon=True)
    start_undisturbed(process)
    theirs.close()
    try:
        try:
            start_limit_s = 20.0
            if not pipe.poll(start_limit_s):
                raise MeasurementInvalidError(
                    "the null server does not start", hint="is the machine overloaded?"
                )
            rest_port, grpc_port = pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise MeasurementInvalidError("the null server died at its start", hint="see stderr") from error
        yield Endpoint(model_name="null", rest_port=rest_port, grpc_port=grpc_port)
    finally:
        pipe.close()
        process.join(1.0)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


def serve(pipe: Connection, cpus: Sequence[int] | None) -> None:
    """Listen on two free ports of 127.0.0.1, send their numbers through the pipe as `(rest, grpc)`, and serve until the
    pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    grpc_answer = _grpc_answer()
    servers = [
        await loop.create_server(_NullHttp, "127.0.0.1", 0, backlog=1024),
        await loop.create_server(lambda: _NullGrpc(grpc_answer), "127.0.0.1", 0, backlog=1024),
    ]
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent is gone already
        pipe.send(tuple(server.sockets[0].getsockname()[1] for server in servers))
        ended = asyncio.Event()
        loop.add_reader(pipe.fileno(), ended.set)
        await ended.wait()
        loop.remove_reader(pipe.fileno())
    for server in servers:
        server.close()


def _grpc_answer() -> tuple[bytes, ...]:
    """Encode HEADERS, DATA of an empty message, and trailers as pieces between which the packed stream id goes."""
    head = h2.header_frames(encode_block([(":status", "200"), ("content-type", "application/grpc")]), 0)
    trailers = h2.header_frames(encode_block([("grpc-status", "0")]), h2.END_STREAM)
    data_head = struct.pack(">IB", PREFIX_BYTES << 8 | h2.DATA, 0)
    return (*head[:-1], head[-1] + data_head, bytes(PREFIX_BYTES) + trailers[0], *trailers[1:])


class _NullHttp(asyncio.Protocol):
    """Answers each request when as many bytes as Content-Length says have come; heads seen before are looked up."""

    def __init__(self) -> None:
        self._whole_bytes: dict[bytes, int] = {}
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast("asyncio.Transport", transport).write

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        while data:
            end_of_head = data.find(b"\r\n\r\n") + 4
            if end_of_head < 4:
                break
            head = data[:end_of_head]
            whole_bytes = self._whole_bytes.get(head)
            if whole_bytes is None:
                whole_bytes = self._whole_bytes[head] = end_of_head + _content_length(head)
            if len(data) < whole_bytes:
                break
            self._write(_HTTP_ANSWER)
            data = data[whole_bytes:]
        self._rest = data


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


class _NullGrpc(asyncio.Protocol):
    """Answers each stream when the client ends it; never reads a header block, so needs no HPACK."""

    def __init__(self, answer: tuple[bytes, ...]) -> None:
        self._answer = answer
        self._rest = b""
        self._received_bytes = 0
        self._preface_left = len(h2.PREFACE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast("asyncio.Transport", transport).write
        settings = {
            h2.Setting.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW,
            h2.Setting.MAX_FRAME_SIZE: h2.OUR_FRAME_BYTES,
        }
        increment = h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW
        self._write(h2.settings_frame(settings) + h2.window_update_frame(0, increment))

    def data_received(self, data: bytes) -> None:
        if self._preface_left:
            cut = min(self._preface_left, len(data))
            self._preface_left -= cut
            data = data[cut:]
        if self._rest:
            data = self._rest + data
        out: list[bytes] = []
        position, end = 0, len(data)
        while end - position >= h2.HEADER_BYTES:
            word, flags, stream_id = h2.FRAME.unpack_from(data, position)
            after = position + h2.HEADER_BYTES + (word >> 8)
            if after > end:
                break
            kind = word & 0xFF
            if kind == h2.DATA:
                self._received_bytes += word >> 8
                if flags & h2.END_STREAM:
                    out.append(h2.STREAM_ID.pack(stream_id).join(self._answer))
            elif kind == h2.SETTINGS and not flags & h2.ACK:
                out.append(h2.SETTINGS_ACK)
            elif kind == h2.PING and not flags & h2.ACK:
                out.append(h2.frame(h2.PING, h2.ACK, 0, data[position + h2.HEADER_BYTES : after]))
            position = after
        self._rest = data[position:]
        if self._received_bytes > h2.WINDOW_UPDATE_AT:
            out.append(h2.window_update_frame(0, self._received_bytes))
            self._received_bytes = 0
        if out:
            self._write(b"".join(out))


def calibrate(
    fleet: LoadFleet,
    requests: RequestSet,
    *,
    duration_s: float = 0.7,
    server_cpus: Sequence[int] | None = None,
) -> float:
    """Measure the highest rate (requests/s) at which the client can send: the larger of the rate reached and of cores /
    (CPU time per request), at which its cores would be fully busy.

    `requests` go to a null server in a closed loop, after a short warm-up. The rate reached is as a rule the lower one,
    because the null server may share the client's cores.
    `server_cpus`: numbers of the CPUs for the null server; None: any.

    Raises:
        MeasurementInvalidError: a request failed, or none was answered.
    """
    with null_server(cpus=server_cpus) as endpoint:
        job = LoadJob(
            endpoint=endpoint,
            requests=replace(requests, ok=OkSpec()),
            arrivals=ClosedLoop(concurrency=32 * fleet.processes, duration_s=duration_s),
            check_every=0,
        )
        warm_up_s = 0.2
        fleet.run(replace(job, arrivals=replace(job.arrivals, duration_s=warm_up_s)))
        samples = fleet.run(job)
    errors = samples.errors()
    answered = len(samples) - sum(errors.values())
    if answered == 0 or errors:
        raise MeasurementInvalidError(
            f"the client cannot be calibrated: {errors or 'no answers'} from the null server",
            hint="is loopback traffic blocked?",
        )
    return max(answered / samples.wall_s, answered * samples.client_cores / samples.client_cpu_s)
