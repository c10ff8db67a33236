"""Peers for the wire tests: a socket in memory, and the hyper-h2 library at its other end."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Callable, Iterable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings

from batchtune.wire.grpc.client_connection import GrpcClientConnection, prepare_call
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.grpc.server_connection import GrpcServerConnection
from batchtune.wire.grpc.server_writer import AnswerWriter, ServerLimits
from batchtune.wire.http2 import PREFACE, encode_block
from batchtune.wire.listener import Listener

INITIAL_WINDOW_SIZE = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
REQUEST_HEADERS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/p.S/M"),
    (":authority", "test:1"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
BLOCK = encode_block(REQUEST_HEADERS)
ANSWER_HEAD = [(":status", "200"), ("content-type", "application/grpc")]


def grpc_message(payload: bytes, *, compress: bool = False) -> bytes:
    body = gzip.compress(payload) if compress else payload
    return struct.pack(">BI", compress, len(body)) + body


def raw_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


BROKEN_FRAMES = {
    "frame too large": (b"\xff\xff\xff\0\0\0\0\0\1", 6),
    "data on stream 0": (raw_frame(DATA, 0, 0, b"abc"), 1),
    "data on an idle stream": (raw_frame(DATA, 0, 77, b"abc"), 1),
    "headers on an even stream": (raw_frame(HEADERS, 4, 2, BLOCK), 1),
    "reset of an idle stream": (raw_frame(RST, 0, 77, b"\0\0\0\0"), 1),
    "reset of 3 bytes": (raw_frame(RST, 0, 1, b"\0\0\0"), 6),
    "window update by 0": (raw_frame(WINDOW, 0, 0, b"\0\0\0\0"), 1),
    "window overflow": (raw_frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), 3),
    "settings on a stream": (raw_frame(SETTINGS, 0, 1), 1),
    "settings of 5 bytes": (raw_frame(SETTINGS, 0, 0, b"\0\1\0\0\0"), 6),
    "settings ack with payload": (raw_frame(SETTINGS, 1, 0, b"\0\1\0\0\0\0"), 6),
    "initial window too large": (raw_frame(SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), 3),
    "max frame size too small": (raw_frame(SETTINGS, 0, 0, b"\0\5\0\0\0\1"), 1),
    "ping of 7 bytes": (raw_frame(PING, 0, 0, b"1234567"), 6),
    "ping on a stream": (raw_frame(PING, 0, 1, b"12345678"), 1),
    "goaway of 4 bytes": (raw_frame(GOAWAY, 0, 0, b"\0\0\0\0"), 6),
    "push promise": (raw_frame(PUSH, 4, 1, b"\0\0\0\2" + BLOCK), 1),
    "continuation alone": (raw_frame(CONTINUATION, 4, 1, BLOCK), 1),
    "interrupted block": (raw_frame(HEADERS, 0, 1, BLOCK) + raw_frame(PING, 0, 0, b"12345678"), 1),
    "padding longer than the frame": (raw_frame(DATA, 8, 1, b"\xffabc"), 1),
    "padded frame without length": (raw_frame(HEADERS, 0xC, 1, b""), 6),
    "garbage headers": (raw_frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), 9),
}
"""Frames that break the protocol, from whichever side, with the code of the error."""
OPENING = PREFACE + raw_frame(SETTINGS, 0, 0)


def request_frames(stream_id: int, payload: bytes = b"ping") -> bytes:
    return raw_frame(HEADERS, 4, stream_id, BLOCK) + raw_frame(DATA, 1, stream_id, grpc_message(payload))


async def turns(count: int = 10) -> None:
    """Let the loop go on with what it has begun."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def frames_of(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Split bytes that hold whole frames into (type, flags, stream id, payload)."""
    frames, position = [], 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 3])
        kind, flags, stream_id = struct.unpack_from(">BBI", data, position + 3)
        payload = data[position + 9 : position + 9 + size]
        assert len(payload) == size
        frames.append((kind, flags, stream_id, payload))
        position += 9 + size
    return frames


class MemoryTransport(asyncio.Transport):
    """What a protocol writes, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.writes = 0
        self.closed = False
        self.aborted = False
        self.reads_paused = False
        self.clogged_bytes = 0

    def write(self, data: Any) -> None:
        self.written += data
        self.writes += 1

    def take(self) -> bytes:
        data = bytes(self.written)
        self.written.clear()
        return data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads_paused = True

    def resume_reading(self) -> None:
        self.reads_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.clogged_bytes


class ClientUnderTest:
    """Our client connection with everything that its callbacks said; in memory unless a loop is to connect it."""

    def __init__(self, *, in_memory: bool = True, **options: Any) -> None:
        self.done: list[tuple[int, int, bytes, str]] = []
        self.lost: list[tuple[list[int], str]] = []
        self.ready = 0
        self.capacity_calls = 0
        self.transport = MemoryTransport()
        self.connection = GrpcClientConnection(
            lambda *answer: self.done.append(answer),
            lambda _, tags, reason: self.lost.append((tags, reason)),
            lambda _: setattr(self, "ready", self.ready + 1),
            on_capacity=lambda _: setattr(self, "capacity_calls", self.capacity_calls + 1),
            **options,
        )
        if in_memory:
            self.connection.connection_made(self.transport)

    def call(self, message: bytes = b"ping", tag: int = 0, path: str = "/p.S/M", **options: Any) -> None:
        self.connection.call(prepare_call(path, "test:1", message, **options), tag)
        self.connection.flush()

    def receive(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)


class H2Peer:
    """What the hyper-h2 library has heard."""

    events: list[Any]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def data(self, stream_id: int) -> bytes:
        return b"".join(
            event.data for event in self.of(h2.events.DataReceived) if event.stream_id == stream_id
        )


class H2Server(H2Peer):
    """The hyper-h2 library as the server of our client."""

    def __init__(self, client: ClientUnderTest, settings: dict[int, int] | None = None) -> None:
        self.client = client
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        values = {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 100, **(settings or {})}
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=values)
        self.h2.initiate_connection()
        self.events: list[Any] = []
        self.exchange()

    def exchange(self) -> None:
        """Carry bytes both ways until both ends are silent."""
        for _ in range(10_000):
            sent, received = self.h2.data_to_send(), self.client.transport.take()
            if not sent and not received:
                return
            if sent:
                self.client.connection.data_received(sent)
            if received:
                self.events += self.h2.receive_data(received)

    def send(self, *parts: Any, stream_id: int = 1, ends: bool = True) -> None:
        """Lists of header fields and pieces of the body, the last of which ends the stream."""
        for number, part in enumerate(parts, 1):
            end_stream = ends and number == len(parts)
            if isinstance(part, bytes):
                self.h2.send_data(stream_id, part, end_stream=end_stream)
            else:
                self.h2.send_headers(stream_id, part, end_stream=end_stream)
        self.exchange()

    def answer(self, stream_id: int, payload: bytes = b"pong") -> None:
        """Answer a call as a gRPC server does."""
        self.send(ANSWER_HEAD, grpc_message(payload), [("grpc-status", "0")], stream_id=stream_id)


class ServerUnderTest:
    """Our server connection in memory; needs a running event loop. Calls are kept until the test answers them.

    `now_s` is the clock of its turns; while that stands still, no slice is ever over.
    """

    def __init__(
        self, *, echo: bool = False, now_s: Callable[[], float] = lambda: 0.0, **options: Any
    ) -> None:
        self.calls: list[GrpcCall] = []
        self.transport = MemoryTransport()
        self._echo = echo
        shared = options.setdefault("listener", Listener(options.get("limits", ServerLimits()).shared))
        shared.turns.now_s = now_s
        self.connections = shared.connections
        self.connection = GrpcServerConnection(self._dispatch, **options)
        self.connection.connection_made(self.transport)

    def _dispatch(self, call: GrpcCall) -> None:
        self.calls.append(call)
        if self._echo:
            call.reply(call.message)

    @property
    def writer(self) -> AnswerWriter:
        assert self.connection._writer is not None
        return self.connection._writer

    @property
    def messages(self) -> list[bytes]:
        return [call.message for call in self.calls]

    def receive(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """What was written since the last look."""
        return frames_of(self.transport.take())


def opened(**options: Any) -> ServerUnderTest:
    """A server whose client is written by hand in the test."""
    server = ServerUnderTest(**options)
    server.receive(OPENING)
    server.transport.take()
    return server


class H2Client(H2Peer):
    """The hyper-h2 library as the client of our server."""

    def __init__(self, server: ServerUnderTest, settings: dict[int, int] | None = None) -> None:
        self.server = server
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = h2.settings.Settings(client=True, initial_values=settings or {})
        self.h2.initiate_connection()
        self.events: list[Any] = []

    async def exchange(self) -> None:
        """Carry bytes both ways until both ends are silent."""
        for _ in range(10_000):
            sent = self.h2.data_to_send()
            if sent:
                self.server.connection.data_received(sent)
            await asyncio.sleep(0)  # answers are flushed by call_soon
            received = self.server.transport.take()
            if received:
                self.events += self.h2.receive_data(received)
            if not sent and not received:
                return

    def request(
        self,
        payload: bytes = b"ping",
        *,
        headers: Iterable[tuple[str, str]] = REQUEST_HEADERS,
        extra: Iterable[tuple[str, str]] = (),
        raw: bytes | None = None,
        end_stream: bool = True,
    ) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, [*headers, *extra])
        self.h2.send_data(stream_id, grpc_message(payload) if raw is None else raw, end_stream=end_stream)
        return stream_id

    async def call(self, payload: bytes = b"ping", **options: Any) -> int:
        """A request, and what comes at once."""
        stream_id = self.request(payload, **options)
        await self.exchange()
        return stream_id

    async def take(self, increment: int, stream_id: int) -> None:
        self.h2.increment_flow_control_window(increment, stream_id)
        await self.exchange()

    async def reset(self, stream_id: int) -> None:
        self.h2.reset_stream(stream_id)
        await self.exchange()

    def status(self, stream_id: int) -> dict[str, str]:
        """All header fields of the answer, initial and trailing."""
        fields: dict[str, str] = {}
        for event in self.of(h2.events.ResponseReceived) + self.of(h2.events.TrailersReceived):
            if event.stream_id == stream_id:
                fields.update(event.headers)
        return fields


def served(window: int | None = None, **options: Any) -> tuple[ServerUnderTest, H2Client]:
    """A server and its client, which takes no more than `window` bytes of an answer until it says so."""
    server = ServerUnderTest(**options)
    return server, H2Client(server, None if window is None else {INITIAL_WINDOW_SIZE: window})
