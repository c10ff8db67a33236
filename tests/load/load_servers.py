"""Servers that misbehave on purpose, each on its own thread, and the smallest jobs to send to them.

They stand at the load room's boundary (the network); everything on our side of the socket is our own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import numpy as np
import pytest
import uvloop

from batchtune.load.clients.client import PREDICT_PATH
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
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(self._loop.create_server(self.protocol, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _shut(self) -> None:
        self._server.close()
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
        self.requests: list[bytes] = []

    @property
    def count(self) -> int:
        return len(self.requests)

    @property
    def bodies(self) -> list[bytes]:
        return [request.partition(b"\r\n\r\n")[2] for request in self.requests]

    def protocol(self) -> asyncio.Protocol:
        reader = asyncio.StreamReader()
        return asyncio.StreamReaderProtocol(reader, self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.transports.append(writer.transport)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                await self.script(self.count - 1, writer.transport)


def always(*answers: bytes) -> HttpScript:
    """These answers in turn; an empty one is none."""

    async def script(number: int, transport: asyncio.Transport) -> None:
        transport.write(answers[number % len(answers)])

    return script


def load_http(script: HttpScript, arrivals: Arrivals, **job: Any) -> Samples:
    with ScriptedHttp(script) as server:
        return run_here(a_job("rest", server.port, arrivals, **job))


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
        limits = {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self.server.streams_max}
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=limits)
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


def load_grpc(
    script: GrpcScript, arrivals: Arrivals, *, streams_max: int = 100, check_every: int = 0, **job: Any
) -> Samples:
    with ScriptedGrpc(script, streams_max=streams_max) as server:
        return run_here(a_job("grpc", server.port, arrivals, check_every=check_every, **job))


Certificate = tuple[Path, Path]
"""A certificate that is its own authority, and its key."""


def certificate_in(folder: Path) -> Certificate:
    """One for localhost and 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, chain = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(key), "-out", str(chain), "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return chain, key


class _PythonServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that does not trust us ends its handshake."""


@contextlib.contextmanager
def python_server(answer: Callable[[bytes], bytes], certificate: Certificate | None = None) -> Iterator[int]:
    """Python's own HTTP server; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = answer(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = _PythonServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with server:
        yield server.server_address[1]
        server.shutdown()
        thread.join()


Predict = Callable[[bytes, grpc.ServicerContext], bytes]


@contextlib.contextmanager
def grpcio_server(predict: Predict, certificate: Certificate | None = None) -> Iterator[int]:
    """grpcio's server of Predict; its port."""
    server = grpc.server(ThreadPoolExecutor(4))
    service, method = PREDICT_PATH[1:].split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(predict)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    if certificate is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        chain, key = (path.read_bytes() for path in certificate)
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
