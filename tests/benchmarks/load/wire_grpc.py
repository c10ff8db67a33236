"""CPU per request of the wire alone: our client beside h2load against nghttpd, and our server answering our client.

python tests/benchmarks/load/wire_grpc.py [--requests 200000] [--repeats 5]
The server on core 0, the client on core 1; requests and answers of 1 KB; runs interleaved, medians with range. Bars:
client ≤ h2load that records every request (`--log-file`); server ≤ 13 µs per echo with the PredictRequest parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import uvloop

from batchtune.wire.grpc.client_connection import GrpcClientConnection, PreparedCall, prepare_call
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.grpc.server_connection import serve
from batchtune.wire.tfserving.messages import PredictRequest
from batchtune.wire.tfserving.tensors import encode_predict_request

MESSAGE = encode_predict_request("model", "serving_default", {"x": np.ones((1, 240), np.float32)})
SHAPES = ((1, 32), (8, 4))


def cpu_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


class Load:
    """Closed loop: `streams` calls in flight on each of `connections`."""

    def __init__(self, call: PreparedCall, requests: int, connections: int, streams: int) -> None:
        self._call, self._requests = call, requests
        self._connections, self._streams = connections, streams
        self._unsent, self._done = requests, 0
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, port: int) -> float:
        """Return the CPU per request in µs."""
        loop = asyncio.get_running_loop()
        for _ in range(self._connections):
            await loop.create_connection(self._connection, "127.0.0.1", port)
        before_s = cpu_s(resource.RUSAGE_SELF)
        await self.finished
        return (cpu_s(resource.RUSAGE_SELF) - before_s) / self._requests * 1e6

    def _connection(self) -> GrpcClientConnection:
        sent_ns = [0] * self._streams
        latencies_ns: list[int] = []  # recording, as h2load does with --log-file

        def begin(connection: GrpcClientConnection, tag: int) -> None:
            if self._unsent:
                self._unsent -= 1
                sent_ns[tag] = time.monotonic_ns()
                connection.call(self._call, tag)

        def ready(connection: GrpcClientConnection) -> None:
            for tag in range(self._streams):
                begin(connection, tag)

        def done(tag: int, status: int, _: bytes, text: str) -> None:
            if status:
                self.finished.set_exception(RuntimeError(text))
            latencies_ns.append(time.monotonic_ns() - sent_ns[tag])
            self._done += 1
            if self._done == self._requests:
                self.finished.set_result(None)
            begin(connection, tag)

        def lost(_: GrpcClientConnection, __: list[int], reason: str) -> None:
            if not self.finished.done():
                self.finished.set_exception(RuntimeError(reason))

        connection = GrpcClientConnection(done, lost, ready)
        return connection


def our_client(call: PreparedCall, port: int, requests: int, shape: tuple[int, int]) -> float:
    async def run() -> float:
        return await Load(call, requests, *shape).run(port)

    return uvloop.run(run())


def h2load(url: str, body: Path, requests: int, shape: tuple[int, int], *options: str) -> float:
    command = [
        "taskset",
        "-c",
        "1",
        "h2load",
        f"-n{requests}",
        f"-c{shape[0]}",
        f"-m{shape[1]}",
        "-d",
        str(body),
    ]
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    before_s = cpu_s(resource.RUSAGE_CHILDREN)
    said = subprocess.run(
        [*command, *headers, *options, url], check=True, capture_output=True, text=True
    ).stdout
    if f"{requests} succeeded" not in said:
        raise RuntimeError(said)
    return (cpu_s(resource.RUSAGE_CHILDREN) - before_s) / requests * 1e6


@contextmanager
def nghttpd(folder: Path) -> Iterator[int]:
    """A null server in C that answers as gRPC does: head, one message of 1 KB, trailers."""
    (folder / "Predict.grpc").write_bytes(b"\0" + len(MESSAGE).to_bytes(4) + MESSAGE)
    (folder / "mime").write_text("application/grpc grpc\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [
        "--no-tls",
        "-d",
        str(folder),
        f"--mime-types-file={folder}/mime",
        "--trailer",
        "grpc-status: 0",
    ]
    process = subprocess.Popen(["taskset", "-c", "0", "nghttpd", *options, "-a", "127.0.0.1", str(port)])
    try:
        time.sleep(0.3)
        yield port
    finally:
        process.kill()
        process.wait()


async def echo_server() -> None:
    """Parse each request, send it back; print the CPU per call when told to end."""
    calls = 0

    def dispatch(call: GrpcCall) -> None:
        nonlocal calls
        calls += 1
        PredictRequest.FromString(call.message)
        call.reply(call.message)

    server = await serve("127.0.0.1", 0, dispatch)
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print(server.port, flush=True)
    before_s = cpu_s(resource.RUSAGE_SELF)
    await told.wait()
    print((cpu_s(resource.RUSAGE_SELF) - before_s) / calls * 1e6, flush=True)
    server.close()


def our_server_cpu_us(call: PreparedCall, requests: int, shape: tuple[int, int]) -> tuple[float, float]:
    """(server's, client's) CPU per request in µs."""
    command = ["taskset", "-c", "0", sys.executable, __file__, "--echo-server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout
        if output is None:
            raise RuntimeError("no output")
        client_us = our_client(call, int(output.readline()), requests, shape)
        process.terminate()
        return float(output.readline()), client_us


def show(name: str, values: list[float]) -> None:
    print(f"  {name:<34} {statistics.median(values):5.2f}   [{min(values):.2f} … {max(values):.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--echo-server", action="store_true")
    arguments = parser.parse_args()
    if arguments.echo_server:
        uvloop.run(echo_server())
        return
    os.sched_setaffinity(0, {1})
    requests, repeats = arguments.requests, arguments.repeats
    with tempfile.TemporaryDirectory() as name, nghttpd(Path(name)) as port:
        folder = Path(name)
        body = folder / "Predict.grpc"
        url = f"http://127.0.0.1:{port}/Predict.grpc"
        call = prepare_call("/Predict.grpc", f"127.0.0.1:{port}", MESSAGE)
        for shape in SHAPES:
            print(f"{shape[0]} connections of {shape[1]} streams: CPU per request in µs, median [range]")
            ours, recording, bare = [], [], []
            for _ in range(repeats):
                ours.append(our_client(call, port, requests, shape))
                log = ("--log-file", str(folder / "log"))
                recording.append(h2load(url, body, requests, shape, *log))
                (folder / "log").unlink()
                bare.append(h2load(url, body, requests, shape))
            show("our client, recording", ours)
            show("h2load --log-file", recording)
            show("h2load", bare)
            pairs = [our_server_cpu_us(call, requests, shape) for _ in range(repeats)]
            show("our server, echo with parse", [server for server, _ in pairs])
            show("our client against it", [client for _, client in pairs])


if __name__ == "__main__":
    main()
