"""What clients that mean harm do to a server: one function each, which gives the sockets that it leaves open.

For the test of what is kept afterwards, and for the benchmark that also times an innocent client.
"""

from __future__ import annotations

import contextlib
import gzip
import resource
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchtune.wire.http2 import LARGEST_WINDOW, PREFACE, encode_block
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.wire.wire_peers import REQUEST_HEADERS, grpc_message, raw_frame

DATA, HEADERS, _, RST, SETTINGS, _, PING, _, WINDOW, CONTINUATION = range(10)
PREDICT = "/tensorflow.serving.PredictionService/Predict"
CLASSIFY = "/tensorflow.serving.PredictionService/Classify"
MULTI_INFERENCE = "/tensorflow.serving.PredictionService/MultiInference"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MODEL = """
service_time: {base_ms: 0.0}
inputs: {x: {dtype: float32, shape: [2]}}
outputs: {y: {dtype: float32, shape: [%d]}}
"""
MODELS = """
model_config_list { config { name: "m" base_path: "%s" } config { name: "wide" base_path: "%s" } }
"""
ROW = {"x": np.zeros((1, 2), np.float32)}


@dataclass(frozen=True)
class Ports:
    """Where the server listens."""

    grpc: int
    rest: int


def write_models(directory: Path) -> list[str]:
    """Two emulated models, `m` and `wide` (64 kB an answer); the flags of a server of both."""
    for name, width in (("m", 2), ("wide", 1 << 14)):
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "emulated.yaml").write_text(MODEL % width)
    (directory / "models.txt").write_text(MODELS % (directory / "m", directory / "wide"))
    return [f"--model_config_file={directory / 'models.txt'}", "--enable_grpc_reflection"]


def rss_mb(pid: int) -> float:
    """Resident memory, with that of the processes that it has started."""
    process = Path(f"/proc/{pid}")
    try:
        own_mb = int((process / "statm").read_text().split()[1]) * resource.getpagesize() / 1e6
        children = [
            int(child)
            for task in (process / "task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # a child that has ended meanwhile
        return 0.0
    return own_mb + sum(map(rss_mb, children))


class Peak:
    """The most memory of a process, looked at every 20 ms until `stop` gives it."""

    def __init__(self, pid: int) -> None:
        self._highest_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid,))
        self._thread.start()

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self._highest_mb

    def _watch(self, pid: int) -> None:
        while not self._stop.wait(0.02):
            self._highest_mb = max(self._highest_mb, rss_mb(pid))


# A client of gRPC


def connect(port: int, *, receive_bytes: int = 0) -> socket.socket:
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    return client


def connect_grpc(port: int, *, window: int = LARGEST_WINDOW, receive_bytes: int = 0) -> socket.socket:
    client = connect(port, receive_bytes=receive_bytes)
    settings = raw_frame(SETTINGS, 0, 0, b"\0\4" + window.to_bytes(4)) + raw_frame(SETTINGS, 1, 0)
    client.sendall(PREFACE + settings + raw_frame(WINDOW, 0, 0, (LARGEST_WINDOW - 65_535).to_bytes(4)))
    return client


def head(stream_id: int, path: str = PREDICT, *more: tuple[str, str], flags: int = 4) -> bytes:
    fields = [*REQUEST_HEADERS[:2], (":path", path), *REQUEST_HEADERS[3:], *more]
    return raw_frame(HEADERS, flags, stream_id, encode_block(fields))


def data(stream_id: int, message: bytes, *, compressed: bytes = b"") -> bytes:
    whole = b"\1" + len(compressed).to_bytes(4) + compressed if compressed else grpc_message(message)
    chunks = [whole[at : at + 1_000_000] for at in range(0, len(whole), 1_000_000)]
    return b"".join(raw_frame(DATA, chunk is chunks[-1], stream_id, chunk) for chunk in chunks)


def read_answers(client: socket.socket, count: int) -> None:
    """Read until so many streams have ended."""
    held = b""
    while count > 0:
        chunk = client.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the server has closed")
        held += chunk
        position = 0
        while len(held) - position >= 9:
            size = int.from_bytes(held[position : position + 3])
            if len(held) - position - 9 < size:
                break
            kind, flags = held[position + 3], held[position + 4]
            count -= kind == RST or (kind in (DATA, HEADERS) and flags & 1)
            position += 9 + size
        held = held[position:]


def call_all(port: int, messages: Iterator[bytes], path: str = PREDICT, at_once: int = 20) -> None:
    """Send all, so many at a time, and read the answers."""
    with connect_grpc(port) as client:
        stream_id, waiting = 1, 0
        for message in messages:
            client.sendall(head(stream_id, path) + data(stream_id, message))
            stream_id, waiting = stream_id + 2, waiting + 1
            if waiting == at_once:
                read_answers(client, waiting)
                waiting = 0
        read_answers(client, waiting)


# A client of REST


def post(path: str, body: bytes, *lines: str) -> bytes:
    fields = "".join(f"{line}\r\n" for line in (f"content-length: {len(body)}", *lines))
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{fields}\r\n".encode() + body


def read_http(client: socket.socket, count: int = 1) -> None:
    """Read so many answers."""
    held = b""
    while count:
        if b"\r\n\r\n" in held:
            start, _, rest = held.partition(b"\r\n\r\n")
            size = int(start.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            if len(rest) >= size:
                held, count = rest[size:], count - 1
                continue
        chunk = client.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the server has closed")
        held += chunk


def read_to_end(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while client.recv(1 << 18):
            pass


# What they do


def refused_predicts(ports: Ports) -> list[socket.socket]:
    """2,000 of 64 kB with an output that does not exist (D1)."""
    large = {"x": np.zeros((8_000, 2), np.float32)}
    message = encode_predict_request("m", "", large, output_filter=["no"])
    call_all(ports.grpc, (message for _ in range(2_000)))
    return []


def unread_reflection(ports: Ports) -> list[socket.socket]:
    """4,000 questions of a client whose window stays closed (D3)."""
    client = connect_grpc(ports.grpc, window=0)
    question = raw_frame(DATA, 0, 1, grpc_message(_field(4, b"tensorflow.serving.PredictionService")))
    return [_send_on(client, [head(1, REFLECTION), *[question] * 4_000])]


def long_words(ports: Ports) -> list[socket.socket]:
    """40 of 4 MB with an unknown field, 600 names of 60 kB each way (D7)."""
    row = encode_predict_request("nobody", "", ROW)
    call_all(ports.grpc, (row + _field(127, bytes(4_000_000 + i)) for i in (1, 2) * 20), at_once=4)
    call_all(ports.grpc, (encode_predict_request(f"{i:05}" * 12_000, "", ROW) for i in range(600)))
    with connect(ports.rest) as client:
        for number in range(600):
            client.sendall(post(f"/v1/models/{number:05}{'n' * 60_000}:predict", b"{}"))
            read_http(client)
    return []


def refused_requests(ports: Ports) -> list[socket.socket]:
    """20,000 that the server refuses, each for something else."""
    call_all(ports.grpc, (encode_predict_request(f"name{i}", "", ROW) for i in range(5_000)), at_once=100)
    wrong = {"x": np.zeros((1, 3), np.float32)}
    call_all(ports.grpc, (encode_predict_request("m", "", wrong) for _ in range(5_000)), at_once=100)
    with connect(ports.rest) as client:
        for number in range(10_000):
            name = "m" if number % 2 else f"n{number}"
            client.sendall(post(f"/v1/models/{name}:predict", b'{"instances": [%d}' % number))
            read_http(client)
    return []


def unread_grpc(ports: Ports) -> list[socket.socket]:
    """1,000 clients that ask for 64 kB a hundred times over, and read nothing; every second keeps its windows closed."""
    message = encode_predict_request("wide", "", ROW)
    return [
        _send_on(
            connect_grpc(ports.grpc, window=LARGEST_WINDOW if number % 2 else 0, receive_bytes=4_096),
            (head(stream_id) + data(stream_id, message) for stream_id in range(1, 201, 2)),
            timeout_s=0.02,
        )
        for number in range(1_000)
    ]


def unread_rest(ports: Ports) -> list[socket.socket]:
    """1,000 clients that ask for 300 kB a hundred times over, and read nothing."""
    request = post("/v1/models/wide:predict", b'{"instances": [[0.0, 0.0]]}')
    return [
        _send_on(connect(ports.rest, receive_bytes=4_096), [request] * 100, timeout_s=0.02)
        for _ in range(1_000)
    ]


def _send_on(client: socket.socket, requests: Iterable[bytes], *, timeout_s: float = 30.0) -> socket.socket:
    """Send until the server reads no more."""
    client.settimeout(timeout_s)
    with contextlib.suppress(OSError):
        for request in requests:
            client.sendall(request)
    return client


def gzip_bombs(ports: Ports) -> list[socket.socket]:
    """20 of 65 kB that inflate to 64 MB, as many of 1 MB that would to 1 GB; five over REST."""
    small, large = gzip.compress(bytes(64_000_000)), gzip.compress(bytes(1_000_000_000), 1)[:1_000_000]
    with connect_grpc(ports.grpc) as client:
        for stream_id in range(1, 81, 2):
            bomb = small if stream_id % 4 == 1 else large
            client.sendall(
                head(stream_id, PREDICT, ("grpc-encoding", "gzip")) + data(stream_id, b"", compressed=bomb)
            )
        read_answers(client, 40)
    with connect(ports.rest) as client:
        for _ in range(5):
            client.sendall(post("/v1/models/m:predict", small, "content-encoding: gzip"))
            read_http(client)
    return []


def unread_inflated(ports: Ports) -> list[socket.socket]:
    """10 clients with 20 gzip requests each, of 16 MB once inflated, and as much to answer, that read nothing."""
    rows = np.zeros((2_000_000, 2), np.float32)
    message = gzip.compress(encode_predict_request("m", "", {"x": rows}), 1)
    body = gzip.compress(b'{"instances": [%b]}' % b",".join([b"[0,0]"] * 2_700_000), 1)
    gzipped = ("grpc-encoding", "gzip")
    streams = [head(i, PREDICT, gzipped) + data(i, b"", compressed=message) for i in range(1, 41, 2)]
    posts = [post("/v1/models/m:predict", body, "content-encoding: gzip")] * 20
    clients = []
    for _ in range(5):
        clients.append(_send_on(connect_grpc(ports.grpc, receive_bytes=4_096), streams))
        clients.append(_send_on(connect(ports.rest, receive_bytes=4_096), posts))
    clients[1].recv(1, socket.MSG_PEEK)  # the first answer is there
    return clients


def floods(ports: Ports) -> list[socket.socket]:
    """SETTINGS, PING, RST, CONTINUATION, endless heads, empty DATA: each until the server ends the connection."""
    block = encode_block([("a", "x" * 30_000)])
    frames = [
        raw_frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0") * 10_000,
        raw_frame(PING, 0, 0, b"12345678") * 100_000,
        b"".join(head(i) + raw_frame(RST, 0, i, b"\0\0\0\x08") for i in range(1, 200_001, 2)),
        raw_frame(HEADERS, 0, 1, block[:1_000]) + raw_frame(CONTINUATION, 0, 1, b"x" * 100) * 10_000,
        raw_frame(HEADERS, 4, 1, block) * 100,
        head(1) + raw_frame(DATA, 0, 1) * 100_000,
    ]
    for flood in frames:
        with connect_grpc(ports.grpc) as client:
            read_to_end(_send_on(client, [flood]))
    for endless in (b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1_000):
        with connect(ports.rest) as client:
            read_to_end(_send_on(client, [endless, b"x" * 10_000_000]))
    return []


def cut_bodies(ports: Ports) -> list[socket.socket]:
    """1,000 clients that send 0.9 MB of a request and not the rest, half of them in one unfinished frame."""
    part = bytes(900_000)
    posted = post("/v1/models/m:predict", b"", "x: y").replace(b"length: 0", b"length: 1000000") + part
    framed = head(1) + raw_frame(DATA, 1, 1, bytes(1_000_000))[:9] + part
    clients = []
    for _ in range(500):
        clients.append(_send_on(connect_grpc(ports.grpc), [framed]))
        clients.append(_send_on(connect(ports.rest), [posted]))
    return clients


def idle_streams(ports: Ports) -> list[socket.socket]:
    """20 clients that begin 20,000 requests each and send nothing of them."""
    heads = b"".join(head(stream_id) for stream_id in range(1, 40_001, 2))
    return [_send_on(connect_grpc(ports.grpc), [heads]) for _ in range(20)]


def expanding_messages(ports: Ports) -> list[socket.socket]:
    """Messages of at most 1 MB that stand for more, or that take long to read."""
    with connect_grpc(ports.grpc) as client:
        for stream_id, (path, message) in zip(range(1, 1_000, 2), expanding() * 5, strict=False):
            client.sendall(head(stream_id, path) + data(stream_id, message))
            read_answers(client, 1)
    return []


def expanding() -> list[tuple[str, bytes]]:
    """Path and message of each."""
    spec = _field(1, _field(1, b"m"))
    many = b"".join(_field(2, _field(1, b"%06d" % i) + _field(2, b"")) for i in range(70_000))
    context = _field(1, _field(1, _field(1, b"k") + _field(2, _field(1, _field(1, bytes(500_000))))))
    return [
        (PREDICT, spec + many),
        (PREDICT, spec + _field(2, b"") * 500_000),
        (PREDICT, spec + _field(3, b"") * 500_000),
        (PREDICT, predict_of(1, 2**28, 1)),
        (PREDICT, predict_of(1, 2**28, 2)),
        (PREDICT, _predict(_tensor(7, 2**27, _field(8, b"a") + _field(8, b"b")))),
        (PREDICT, _predict(_tensor(7, 490_000, _field(8, b"") * 490_000))),
        (PREDICT, _predict(_tensor(7, 1_000_000, _field(4, bytes(1_000_000))))),
        (PREDICT, _predict(_tensor(9, 500_000, b"\x50\x01" * 500_000))),
        (PREDICT, _predict(b"\xf8\x01\x01" * 330_000)),
        (CLASSIFY, spec + _field(2, _field(2, _field(1, b"") * 200_000 + _field(2, context)))),
        (CLASSIFY, spec + _field(2, _field(1, _field(1, b"") * 490_000))),
        (MULTI_INFERENCE, _field(1, _field(1, _field(1, b"m")) + _field(2, b"x")) * 90_000),
    ]


def predict_of(dtype: int, size: int, float_values: int) -> bytes:
    """A Predict of one tensor of `size` elements and as many values as are given."""
    return _predict(_tensor(dtype, size, _field(5, bytes(4 * float_values)) if float_values else b""))


def _predict(tensor: bytes) -> bytes:
    return _field(1, _field(1, b"m")) + _field(2, _field(1, b"x") + _field(2, tensor))


def _tensor(dtype: int, size: int, values: bytes) -> bytes:
    return bytes([8, dtype]) + _field(2, _field(2, b"\x08" + _varint(size))) + values


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 127:
        encoded, value = encoded + bytes([value & 127 | 128]), value >> 7
    return encoded + bytes([value])


Attack = Callable[[Ports], list[socket.socket]]
ATTACKS: list[Attack] = [
    refused_predicts,
    unread_reflection,
    long_words,
    refused_requests,
    unread_grpc,
    unread_rest,
    gzip_bombs,
    unread_inflated,
    floods,
    cut_bodies,
    idle_streams,
    expanding_messages,
]
