"""Servers that misbehave on purpose, each on its own thread, and the smallest jobs to send to them.

They stand at the load room's boundary (the network); everything on our side of the socket is our own code.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import numpy as np
import uvloop

from batchtune.load.fleet import LoadJob, samples_of, split
from batchtune.load.samples import Columns, Samples, new_memory
from batchtune.load.worker_process import Driver
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.target import TlsSpec
from batchtune.target.endpoint import Endpoint
from batchtune.wire.tfserving.tensors import encode_predict_request

BODY = b'{"instances": [[1.0]]}'
ANSWER_BODY = b'{"predictions": [[0.5]]}'


def http_answer(body: bytes = ANSWER_BODY, *, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def requests_for(protocol: str, *, bodies: tuple[bytes, ...] | None = None, **changes: Any) -> RequestSet:
    if bodies is None:
        message = encode_predict_request("m", "serving_default", {"x": np.ones((1, 1), np.float32)})
        bodies = (BODY,) if protocol == "rest" else (message,)
    given: dict[str, Any] = {
        "protocol": protocol,
        "model_name": "m",
        "bodies": bodies,
        "rows": (1,) * len(bodies),
        "order": np.arange(len(bodies), dtype=np.int32),
        "timeout_s": 5.0,
    }
    return RequestSet(**(given | changes))


def a_job(
    protocol: str,
    port: int,
    arrivals: Arrivals,
    *,
    requests: RequestSet | None = None,
    tls: TlsSpec | None = None,
    **changes: Any,
) -> LoadJob:
    ports = {"rest_port": port} if protocol == "rest" else {"grpc_port": port}
    endpoint = Endpoint(model_name="m", tls=tls, **ports)  # type: ignore[arg-type]
    return LoadJob(
        endpoint=endpoint, requests=requests or requests_for(protocol), arrivals=arrivals, **changes
    )


def evenly(rate_rps: float, duration_s: float) -> Schedule:
    count = round(rate_rps * duration_s)
    due_ns = (np.arange(count) * (1e9 / rate_rps)).astype(np.int64)
    return Schedule(due_ns=due_ns, duration_s=duration_s, offered_rps=rate_rps)


def closed(users: int, requests_max: int, *, duration_s: float = 20.0, think_s: float = 0.0) -> ClosedLoop:
    """So many requests; the duration is only a limit."""
    return ClosedLoop(concurrency=users, duration_s=duration_s, think_s=think_s, requests_max=requests_max)


def run_here(job: LoadJob) -> Samples:
    """Run a job with one worker inside this process, whose other objects are none of its collector's business."""

    async def run() -> Samples:
        part = split(job, 1)[0]
        descriptor = new_memory(part.capacity, part.gaps_max)
        columns = Columns(descriptor, part.capacity, part.gaps_max)
        os.close(descriptor)
        driver = Driver(part, columns)
        await driver.prepare()
        start_ns = time.monotonic_ns() + 5_000_000
        return samples_of(columns, await driver.run(start_ns), part, start_ns)

    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    finally:
        gc.freeze()  # the driver lets go of what it froze


class ThreadedServer:
    """A context manager: an asyncio server on a thread of its own; subclasses say what a connection is."""

    port: int

    def protocol(self) -> asyncio.Protocol:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.transports: list[asyncio.Transport] = []
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        loop = self._loop
        server = loop.run_until_complete(loop.create_server(self.protocol, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        loop.run_forever()
        loop.run_until_complete(self._shut(server))
        loop.close()

    async def _shut(self, server: asyncio.Server) -> None:
        server.close()
        for transport in self.transports:
            transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


HttpScript = Callable[[int, asyncio.Transport], Awaitable[None]]


class ScriptedHttp(ThreadedServer):
    """Calls `script(number, transport)` for each whole request, counted from 0 over all connections."""

    def __init__(self, script: HttpScript) -> None:
        self.script = script
        self.count = 0
        self.requests: list[bytes] = []

    def protocol(self) -> asyncio.Protocol:
        return _HttpConnection(self)


class _HttpConnection(asyncio.Protocol):
    def __init__(self, server: ScriptedHttp) -> None:
        self.server = server
        self.data = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.transports.append(transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, blank, rest = self.data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if blank and len(rest) >= length:
            self.server.requests.append(self.data)
            self.data = b""
            number = self.server.count
            self.server.count += 1
            task = asyncio.get_running_loop().create_task(self._answer(number))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, number: int) -> None:
        await self.server.script(number, self.transport)


GrpcScript = Callable[[int, int, "H2Connection"], Awaitable[None]]


class ScriptedGrpc(ThreadedServer):
    """Calls `script(number, stream_id, connection)` for each whole call; frames are h2's, not ours."""

    def __init__(self, script: GrpcScript, *, streams_max: int = 100) -> None:
        self.script = script
        self.streams_max = streams_max
        self.count = 0
        self.connections: list[H2Connection] = []

    def protocol(self) -> asyncio.Protocol:
        return H2Connection(self)


class H2Connection(asyncio.Protocol):
    def __init__(self, server: ScriptedGrpc) -> None:
        self.server = server
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.transports.append(transport)
        self.server.connections.append(self)
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self.server.streams_max},
        )
        self.h2.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                number = self.server.count
                self.server.count += 1
                task = asyncio.get_running_loop().create_task(self._answer(number, event.stream_id))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        self.flush()

    async def _answer(self, number: int, stream_id: int) -> None:
        try:
            await self.server.script(number, stream_id, self)
        except (h2.exceptions.StreamClosedError, h2.exceptions.ProtocolError):
            return  # the client gave the call up meanwhile

    def flush(self) -> None:
        if not self.closed:
            self.transport.write(self.h2.data_to_send())

    def succeed(self, stream_id: int, message: bytes = b"") -> None:
        self.h2.send_headers(stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        self.h2.send_data(stream_id, b"\0" + len(message).to_bytes(4) + message)
        self.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        self.flush()

    def fail(self, stream_id: int, status: int, message: str) -> None:
        """Trailers only."""
        head = [(":status", "200"), ("content-type", "application/grpc")]
        trailers = [("grpc-status", str(status)), ("grpc-message", message)]
        self.h2.send_headers(stream_id, head + trailers, end_stream=True)
        self.flush()
