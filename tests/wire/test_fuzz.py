"""Feed both ends of the wire broken HTTP/2, tensors and JSON: no exception, no hang, no growth.

A few thousand inputs; for more, `BATCHTUNE_FUZZ=1000000:7 pytest --timeout 0 tests/wire/test_fuzz.py`, of seed 7.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
from collections.abc import Awaitable, Callable

import numpy as np
from google.protobuf.message import DecodeError

from batchtune.wire.grpc.server_call import GrpcCall, GrpcStream
from batchtune.wire.grpc.server_connection import GrpcServerConnection
from batchtune.wire.grpc.server_writer import ServerLimits
from batchtune.wire.http2 import PREFACE, encode_block
from batchtune.wire.tfserving.messages import PredictRequest, TensorProto
from batchtune.wire.tfserving.rest_json import decode_predict_json
from batchtune.wire.tfserving.tensors import decode_predict_response, tensor_from_proto
from tests.wire.tensor_protos import tensor_to_proto
from tests.wire.wire_peers import REQUEST_HEADERS, ClientUnderTest, ServerUnderTest, grpc_message, raw_frame

LIMITS = ServerLimits(max_message_bytes=100_000, max_buffered_bytes=200_000, max_concurrent_streams=20)
REQUEST_BLOCK = encode_block(REQUEST_HEADERS)
RESPONSE_BLOCK = encode_block([(":status", "200"), ("content-type", "application/grpc")])
TRAILERS = encode_block([("grpc-status", "0")])
BLOCKS = (
    REQUEST_BLOCK,
    REQUEST_BLOCK[1:],
    encode_block([*REQUEST_HEADERS, ("grpc-timeout", "1S"), ("grpc-encoding", "gzip")]),
    encode_block([(":method", "POST"), (":scheme", "http"), (":path", "/stream"), *REQUEST_HEADERS[3:]]),
    RESPONSE_BLOCK,
    TRAILERS,
    encode_block([(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "14")]),
    encode_block([(":status", "200"), ("content-type", "application/grpc"), ("grpc-encoding", "gzip")]),
    encode_block([(":status", "503"), ("content-type", "text/html")]),
    b"\x3f\xe1\x1f" + REQUEST_BLOCK[1:],
    b"\x40\x01a\x01b\xbe\xbe",
    b"",
)
MESSAGES = (
    grpc_message(b"ping"),
    grpc_message(b""),
    grpc_message(b"x" * 20_000),
    grpc_message(b"a" * 50_000, compress=True),
    grpc_message(b"z" * 300_000, compress=True),
    b"\x00\x00\x02\x00\x00",
    b"\x00",
    b"",
)


def random_frame(rng: random.Random, ids: range) -> bytes:
    """One frame, mostly plausible, of a stream in `ids` mostly."""
    stream_id = rng.choice(ids) if rng.random() < 0.95 else rng.choice((0, 2, 99, 2**31 - 1))
    flags = rng.choice((0, 1, 4, 4, 5, 5, 8, 0xC, 0x2C, rng.randrange(256)))
    kind = rng.choice((*(0, 1, 3, 4, 6, 8) * 4, 2, 5, 7, 9, 10, 255))
    of_connection = 0 if rng.random() < 0.95 else stream_id
    block = rng.choice(BLOCKS)
    block = block[: rng.randrange(len(block) + 1)] if rng.random() < 0.1 else block
    setting = rng.choice((0, 1, 100, 16_384, 2**20, 2**31 - 1, rng.getrandbits(32)))
    pair = rng.choice((1, 3, 4, 4, 4, 5, 6, 8)).to_bytes(2) + setting.to_bytes(4)
    increment = rng.choice((1, 1_000, 2**20, 2**30, rng.getrandbits(32)))
    head = (flags if rng.random() < 0.2 else rng.choice((4, 5)), stream_id, block)
    flags, stream_id, payload = {
        0: (flags & rng.choice((1, 9)), stream_id, rng.choice(MESSAGES)),
        1: head,
        3: (flags, stream_id, rng.choice((0, 7, 8, 99)).to_bytes(4)),
        4: (int(rng.random() < 0.1), of_connection, pair * rng.randrange(3)),
        6: (flags, of_connection, rng.choice((b"draining", b"12345678"))),
        7: (0, of_connection, rng.choice((1, 5, 2**31 - 1)).to_bytes(4) + bytes(4) + b"why"),
        8: (0, rng.choice((0, stream_id)), increment.to_bytes(4)),
        9: head,
    }.get(kind, (flags, stream_id, rng.randbytes(5)))
    return raw_frame(kind, flags, stream_id, payload)


def well_formed(rng: random.Random, to_server: bool, stream_id: int) -> bytes:
    """A right request or answer, so that what follows meets a connection in use."""
    message = rng.choice(MESSAGES[:4])
    if to_server:
        return raw_frame(1, 4, stream_id, rng.choice(BLOCKS[:4])) + raw_frame(0, 1, stream_id, message)
    head = raw_frame(1, 4, stream_id, RESPONSE_BLOCK) + raw_frame(0, 0, stream_id, message)
    return head + raw_frame(1, 5, stream_id, TRAILERS)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5)) if data else 0):
        at = rng.randrange(len(changed) + 1)
        piece = changed[at : at + rng.choice((1, 9, 100))]
        changed[at : at + 1] = rng.choice((rng.randbytes(1), b"", piece * 2))
    return bytes(changed)


def conversation(rng: random.Random, to_server: bool) -> bytes:
    """What a bad peer says on one connection."""
    parts = [raw_frame(4, 0, 0, b"")]
    for stream_id in range(1, 1 + 2 * rng.randrange(12), 2):
        if rng.random() < 0.7:
            parts.append(well_formed(rng, to_server, stream_id))
        ids = range(max(1, stream_id - 4), stream_id + 1, 2)
        parts += [random_frame(rng, ids) for _ in range(rng.choice((0, 0, 1, 1, 2, 4)))]
    opening = PREFACE if to_server else b""
    what = rng.random()
    if what < 0.5:
        return opening + b"".join(parts)
    if what < 0.9:
        return opening + mutate(rng, b"".join(parts))
    return mutate(rng, opening + b"".join(parts)) if what < 0.97 else rng.randbytes(rng.randrange(200))


def pieces_of(rng: random.Random, data: bytes) -> list[bytes]:
    if rng.random() < 0.5 or len(data) < 2:
        return [data]
    size = rng.choice((1, 7, 100, 5_000)) if len(data) < 3_000 else 5_000
    return [data[at : at + size] for at in range(0, len(data), size)]


async def fuzz_server(rng: random.Random) -> None:
    """One connection to our server; some calls are answered at once, some later, some never."""

    def dispatch(call: GrpcCall) -> None:
        if rng.random() < 0.7:
            call.reply(call.message)
        elif rng.random() < 0.5:
            call.fail("UNAVAILABLE", "no")

    def stream_service(stream: GrpcStream) -> None:
        stream.on_message = stream.send
        stream.on_end = stream.finish

    server = ServerUnderTest(limits=LIMITS, streams={"/stream": stream_service})
    server.connection._dispatch = lambda call: (server.calls.append(call), dispatch(call))
    for piece in pieces_of(rng, conversation(rng, to_server=True)):
        server.connection.data_received(piece)
    check_server(server.connection)
    for call in server.calls:
        call.reply(b"late")
    await asyncio.sleep(0)
    assert len(server.transport.written) < 5_000_000
    server.connection.connection_lost(None)


def check_server(connection: GrpcServerConnection) -> None:
    """The account of held bytes is exact and within the limits."""
    if (writer := connection._writer) is None:
        return
    held = sum(stream.buffer.held_bytes for stream in writer.streams.values() if stream.buffer is not None)
    assert writer.held_bytes == held
    assert held <= LIMITS.max_buffered_bytes + LIMITS.max_message_bytes
    assert len(writer.streams) <= LIMITS.max_concurrent_streams


async def fuzz_client(rng: random.Random) -> None:
    """One connection of our client with eight calls in flight; each is answered at most once, none twice."""
    client = ClientUnderTest(max_message_bytes=100_000)
    for tag in range(8):
        client.call(b"x" * rng.choice((1, 100, 70_000)), tag=tag)
    for piece in pieces_of(rng, conversation(rng, to_server=False)):
        client.receive(piece)
    if rng.random() < 0.1:
        client.connection.cancel(rng.randrange(8))
    client.connection.connection_lost(None)
    ended = [answer[0] for answer in client.done] + [tag for tags, _ in client.lost for tag in tags]
    assert len(ended) == len(set(ended))
    assert len(ended) >= 7
    assert len(client.lost) == 1


TENSOR = tensor_to_proto(np.arange(12.0).reshape(3, 4), as_content=True).SerializeToString()
TYPED = tensor_to_proto(np.array([b"ab", b"c"], object), as_content=False).SerializeToString()
REQUEST = PredictRequest(inputs={"x": TensorProto.FromString(TENSOR)}).SerializeToString()
JSON = b'{"predictions": [{"a": [1.5, NaN], "b": {"b64": "AA=="}}, {"a": [2, 3], "b": "x"}]}'


async def fuzz_payload(rng: random.Random) -> None:
    """Tensor and answer bytes: an array or a ValueError."""
    data = mutate(rng, mutate(rng, rng.choice((TENSOR, TYPED, REQUEST, JSON))))
    with contextlib.suppress(ValueError):
        decode_predict_response(data)
    with contextlib.suppress(ValueError):
        decode_predict_json(data)
    try:
        proto = TensorProto.FromString(data)
    except DecodeError:
        return
    with contextlib.suppress(ValueError):
        tensor_from_proto(proto)


TARGETS: tuple[Callable[[random.Random], Awaitable[None]], ...] = (fuzz_server, fuzz_client, fuzz_payload)


async def fuzz(inputs: int, seed: int) -> None:
    """Run `inputs` inputs; input i depends on (seed, i) only, and a failure names both."""
    for index in range(inputs):
        try:
            await TARGETS[index % len(TARGETS)](random.Random(f"{seed}:{index}"))
        except BaseException as error:
            error.add_note(f"input {index} of seed {seed}")
            raise


async def test_thousands_of_broken_inputs_raise_nothing_and_do_not_grow() -> None:
    inputs, seed = map(int, os.environ.get("BATCHTUNE_FUZZ", "2500:2").split(":"))
    await fuzz(600, seed=0)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await fuzz(inputs, seed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000
