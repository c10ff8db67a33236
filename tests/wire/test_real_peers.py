"""Our wire against programs that we did not write: grpcio on both sides, curl, nghttp, h2load, TLS by openssl."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream
from batchtune.wire.grpc.server_connection import serve
from batchtune.wire.listener import Listener
from batchtune.wire.status import GRPC_CODES
from tests.load.load_servers import certificate_in
from tests.wire.wire_peers import ClientUnderTest, until

loop_factory = uvloop.new_event_loop
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def answer(call: GrpcCall) -> None:
    """Echo, or end with the status that the path names."""
    method = call.path.rsplit("/", 1)[1]
    if method in GRPC_CODES:
        call.fail(method, f"as asked: {method} ü%\n")
    elif method == "Metadata":
        call.reply(repr((call.head.metadata, call.deadline_ns is not None)).encode())
    elif method != "Hang":
        call.reply(call.message)


def reverse(stream: GrpcStream) -> None:
    stream.on_message = lambda message: stream.send(message[::-1])
    stream.on_end = stream.finish


@asynccontextmanager
async def our_server(
    dispatch: Callable[[GrpcCall], None] = answer, **options: Any
) -> AsyncIterator[Listener]:
    server = await serve("127.0.0.1", 0, dispatch, streams={"/p.S/Reverse": reverse}, **options)
    try:
        yield server
    finally:
        server.close()
        await server.drain(5)


def grpcio_channel(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED)


def use_grpcio(port: int) -> None:
    with grpcio_channel(port) as channel:
        echo = channel.unary_unary("/p.S/Echo")
        for size in (0, 1, 1_000, 100_000, 64 * 2**20):
            message = b"\xa5" * size
            assert echo(message, timeout=60) == message
        pending = [echo.future(b"%d" % i, timeout=60) for i in range(500)]
        assert [future.result() for future in pending] == [b"%d" % i for i in range(500)]
        for code in set(GRPC_CODES) - {"OK"}:
            with pytest.raises(grpc.RpcError) as failure:
                channel.unary_unary(f"/p.S/{code}")(b"", timeout=60)
            assert failure.value.code() is grpc.StatusCode[code]
            assert failure.value.details() == f"as asked: {code} ü%\n"
        assert echo(b"a" * 9_999, compression=grpc.Compression.Gzip, timeout=60) == b"a" * 9_999
        told = channel.unary_unary("/p.S/Metadata")(
            b"", timeout=60, metadata=[("key", "v"), ("raw-bin", b"\0\xff")]
        )
        assert b"('key', 'v')" in told
        assert b"('raw-bin', 'AP8')" in told
        assert told.endswith(b", True)")
        reversed_parts = channel.stream_stream("/p.S/Reverse")(iter([b"abc", b"de"]), timeout=60)
        assert list(reversed_parts) == [b"cba", b"ed"]
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary("/p.S/Hang")(b"", timeout=0.05)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_grpcio_is_served() -> None:
    async with our_server() as server:
        await asyncio.to_thread(use_grpcio, server.port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            echo = channel.unary_unary("/p.S/Echo")
            answers = await asyncio.gather(*(echo(b"%d" % i, timeout=60) for i in range(300)))
            assert answers == [b"%d" % i for i in range(300)]


async def test_a_drained_server_finishes_what_grpcio_has_sent() -> None:
    calls: list[GrpcCall] = []
    async with our_server(calls.append) as server:
        with grpcio_channel(server.port) as channel:
            echo = channel.unary_unary("/p.S/Echo")
            pending = [echo.future(b"%d" % i, timeout=60) for i in range(50)]
            await until(lambda: len(calls) == 50)
            draining = asyncio.create_task(server.drain(60))
            await asyncio.sleep(0.02)
            for call in calls:
                call.reply(call.message)
            assert await draining
            assert [future.result() for future in pending] == [b"%d" % i for i in range(50)]


async def test_a_drain_ends_after_its_grace_though_a_call_hangs() -> None:
    calls: list[GrpcCall] = []
    async with our_server(calls.append) as server:
        with grpcio_channel(server.port) as channel:
            hanging = channel.unary_unary("/p.S/Echo").future(b"", timeout=60)
            await until(lambda: calls)
            assert not await server.drain(0.05)
            with pytest.raises(grpc.RpcError):
                await asyncio.to_thread(hanging.result)


async def run(*command: str) -> str:
    """Run a program against the server in this loop; its output."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.fixture
def of_grpc(tmp_path: Path) -> list[str]:
    """Options of curl, nghttp and h2load for a request of 1,000 bytes."""
    path = tmp_path / "request"
    path.write_bytes(b"\0\0\0\3\xe8" + b"x" * 1_000)
    return ["-d", str(path), "-H", "content-type: application/grpc", "-H", "te: trailers"]


async def test_curl_nghttp_and_h2load_are_served(of_grpc: list[str]) -> None:
    async with our_server() as server:
        url = f"http://127.0.0.1:{server.port}/p.S/Echo"
        known = ("curl", "-si", "--http2-prior-knowledge")
        assert (await run(*known, url)).startswith("HTTP/2 405")
        assert (await run(*known, "-d", "{}", url)).startswith("HTTP/2 415")
        assert (await run("curl", "-si", url)).startswith("HTTP/1.1 505")
        said = await run("nghttp", "-nv", "--no-dep", *of_grpc, url)
        assert ":status: 200" in said
        assert re.search(r"recv DATA frame <length=1005, flags=0x00", said)
        assert "grpc-status: 0" in said
        assert "grpc-status: 0" in await run("nghttp", "-nv", "-b", "200", *of_grpc, url)  # PADDED frames
        said = await run("h2load", "-n2000", "-c5", "-m10", *of_grpc, url)
        assert "2000 succeeded, 0 failed, 0 errored" in said


async def connected(port: int, tls: ssl.SSLContext | None = None) -> ClientUnderTest:
    client = ClientUnderTest(in_memory=False)
    name = "localhost" if tls is not None else None
    await asyncio.get_running_loop().create_connection(
        lambda: client.connection, "127.0.0.1", port, ssl=tls, server_hostname=name
    )
    await until(lambda: client.connection.capacity)
    return client


async def ask(client: ClientUnderTest, path: str, message: bytes, **options: Any) -> tuple[int, bytes, str]:
    before = len(client.done)
    client.call(message, path=path, **options)
    await until(lambda: len(client.done) > before)
    return client.done[-1][1:]


def echo(request: bytes, _: grpc.ServicerContext) -> bytes:
    return request


def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAVAILABLE, "voll ü%\n")
    raise AssertionError


def tell(_: bytes, context: grpc.ServicerContext) -> bytes:
    remaining = context.time_remaining()
    timeout = remaining is not None and 40 < remaining < 60
    return repr((sorted(context.invocation_metadata()), timeout)).encode()


def squeeze(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.set_compression(grpc.Compression.Gzip)
    context.send_initial_metadata([("big", "x" * 5_000)])
    return request


@contextmanager
def grpcio_server() -> Iterator[tuple[grpc.Server, int]]:
    methods = {"Echo": echo, "Refuse": refuse, "Tell": tell, "Squeeze": squeeze}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server = grpc.server(
        futures.ThreadPoolExecutor(4), options=[*UNLIMITED, ("grpc.max_concurrent_streams", 64)]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("p.S", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield server, port
    finally:
        server.stop(None).wait()


async def test_a_grpcio_server_answers_our_client() -> None:
    with grpcio_server() as (_, port):
        client = await connected(port)
        assert client.connection.capacity == 64
        for size in (0, 1, 1_000, 70_000, 20 * 2**20):
            message = b"\x5a" * size
            assert await ask(client, "/p.S/Echo", message) == (0, message, "")
        assert await ask(client, "/p.S/Refuse", b"") == (14, b"", "voll ü%\n")
        assert (await ask(client, "/p.S/None", b""))[0] == GRPC_CODES["UNIMPLEMENTED"]
        metadata = [("key", "v"), ("raw-bin", b"\0\xff")]
        status, told, _ = await ask(client, "/p.S/Tell", b"", metadata=metadata, timeout_s=50)
        assert status == 0
        assert b"key='key', value='v'" in told
        assert b"value=b'\\x00\\xff'" in told
        assert told.endswith(b", True)")
        accepting = [("grpc-accept-encoding", "identity,gzip")]
        assert await ask(client, "/p.S/Squeeze", b"a" * 50_000, metadata=accepting) == (0, b"a" * 50_000, "")
        client.connection.close()


async def test_every_call_is_accounted_for_when_a_grpcio_server_stops() -> None:
    tags = itertools.count()
    with grpcio_server() as (server, port):
        client = await connected(port)
        while not client.lost and len(client.done) < 200_000:
            while client.connection.capacity:
                client.call(b"x" * 100, next(tags), "/p.S/Echo")
            await asyncio.sleep(0)
            if len(client.done) > 1_000 and not client.connection.retiring:
                server.stop(0.5)
    ((lost, reason),) = client.lost
    assert reason
    assert sorted([*(tag for tag, *_ in client.done), *lost]) == list(range(next(tags)))
    assert {status for _, status, *_ in client.done} <= {0, 1, 14}


async def test_tls_with_alpn_works_for_both_ends(tmp_path: Path) -> None:
    chain, key = certificate_in(tmp_path)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(chain, key)
    ours.set_alpn_protocols(["h2"])
    theirs = ssl.create_default_context(cafile=chain)
    theirs.set_alpn_protocols(["h2"])

    def use_grpcio_tls(port: int) -> None:
        credentials = grpc.ssl_channel_credentials(chain.read_bytes())
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            assert channel.unary_unary("/p.S/Echo")(b"safe", timeout=60) == b"safe"

    async with our_server(tls=ours) as server:
        client = await connected(server.port, theirs)
        assert await ask(client, "/p.S/Echo", b"x" * 10**6, scheme="https") == (0, b"x" * 10**6, "")
        client.connection.close()
        await asyncio.to_thread(use_grpcio_tls, server.port)
