"""What does a client that asks as fast as it can cost another?

    python tests/benchmarks/server/greedy_clients.py [--only rest_] [--counts 1 64] [--seconds 3] [--beside OTHER_CHECKOUT]

For each greedy client a server of its own (its real process, an emulated model of no device time, batches of 8 or what
came within 2 ms, 2 batch threads) on core 0. Beside 1 and then 64 of the greedy client, each in a process of its own on
core 1 at a lower priority, an innocent client asks for a Predict over gRPC, one over REST and the model's status, each
every 20 ms on a connection of its own. An innocent request counts from the instant at which it was due, so one long wait
counts for all that were due in it. Printed: p50, p99 and longest wait in ms, before the greedy clients and beside them,
the innocent requests that were refused or never answered, and how many answers or bytes the greedy clients had. Bars:
p99 at most 50 ms over REST and gRPC; the same p50 as before where nobody is greedy.
With --beside the other checkout's server is measured first, in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import select
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path += [str(Path(__file__).parents[3])]

from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.benchmarks.commands import ROOT
from tests.benchmarks.rivals import CLIENT_CORE, served
from tests.benchmarks.server.innocent import in_words, innocent_beside
from tests.server.hostile_attacks import (
    DATA,
    PING,
    ROW,
    RST,
    WINDOW,
    Ports,
    connect,
    connect_grpc,
    data,
    head,
    post,
    write_models,
)
from tests.server.server_process import ServerProcess
from tests.wire.wire_peers import raw_frame

QUIET_S = 2.0
BATCHING = (
    "max_batch_size { value: 8 } batch_timeout_micros { value: 2000 } num_batch_threads { value: 2 } "
    "max_enqueued_batches { value: 1000000 }"
)
PREDICT = encode_predict_request("m", "", ROW)
REST_PREDICT = post("/v1/models/m:predict", b'{"instances": [[0.0, 0.0]]}')
STATUS = b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
FLOOD_BYTES = 16 << 20
"""As much as 200,000 small Predicts; then the client comes again."""


@dataclass(frozen=True)
class Greedy:
    """A client that connects, writes `opening` and then `flood`, again and again."""

    name: str
    is_grpc: bool
    opening: bytes
    flood: bytes


def greedy_clients() -> list[Greedy]:
    def flood(piece: bytes) -> bytes:
        return piece * (FLOOD_BYTES // len(piece))

    predicts = b"".join(head(i) + data(i, PREDICT) for i in range(1, 240_001, 2))
    resets = b"".join(head(i) + raw_frame(RST, 0, i, b"\0\0\0\x08") for i in range(1, 240_001, 2))
    refused = b"".join(head(i) + data(i, b"\xff") for i in range(1, 240_001, 2))
    large = head(1) + raw_frame(DATA, 0, 1, b"\0" + (1 << 30).to_bytes(4))
    grant = raw_frame(WINDOW, 0, 1, b"\0\0\0\1")
    upload = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 60000000\r\n\r\n"
    return [
        Greedy("grpc_predicts", True, b"", predicts),
        Greedy("grpc_malformed_predicts", True, b"", refused),
        Greedy("grpc_window_updates", True, head(1), flood(grant)),
        Greedy("grpc_connection_window_updates", True, b"", flood(raw_frame(WINDOW, 0, 0, b"\0\0\0\1"))),
        Greedy("grpc_one_byte_data", True, large, flood(raw_frame(DATA, 0, 1, b"x"))),
        Greedy("grpc_100_byte_data", True, large, flood(raw_frame(DATA, 0, 1, b"x" * 100))),
        Greedy("grpc_resets", True, b"", resets),
        Greedy("grpc_pings", True, b"", flood(raw_frame(PING, 0, 0, b"12345678"))),
        Greedy("grpc_upload", True, large, flood(raw_frame(DATA, 0, 1, b"x" * (1 << 20)))),
        Greedy("rest_predicts", False, b"", flood(REST_PREDICT)),
        Greedy("rest_statuses", False, b"", flood(STATUS)),
        Greedy("rest_one_byte_chunks", False, CHUNKED, flood(b"1\r\nx\r\n")),
        Greedy("rest_upload", False, upload, flood(b"x")),
    ]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="")
    arguments.add_argument("--counts", type=int, nargs="+", default=[1, 64])
    arguments.add_argument("--seconds", type=float, default=3.0)
    arguments.add_argument("--beside", type=Path)
    options = arguments.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    checkouts = [("", ROOT)] if options.beside is None else [("old", options.beside.resolve()), ("new", ROOT)]
    print(f"{'greedy client':42}p50/p99/max ms, quiet -> beside them, refused: gRPC; REST; status")
    for greedy in greedy_clients():
        for count in options.counts:
            for name, checkout in checkouts:
                if options.only in greedy.name:
                    print(f"{greedy.name:31}{count:4} {name:4}", end="  ", flush=True)
                    print(measure(greedy, count, options.seconds, checkout), flush=True)


def measure(greedy: Greedy, count: int, seconds: float, checkout: Path) -> str:
    """Measure one kind of greedy client on a server of its own; the figures in a line."""
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), checkout) as server:
        ports = Ports(server.grpc_port, server.rest_port)
        quiet = innocent_beside(ports, lambda: time.sleep(QUIET_S))
        moved: list[int] = []
        beside = innocent_beside(ports, lambda: moved.append(run_greedy(greedy, count, seconds, ports)))
    return f"{in_words(quiet, beside)}  {moved[0] / 1e6 / seconds:.1f} MB/s taken"


def serving(folder: Path, checkout: Path) -> contextlib.AbstractContextManager[ServerProcess]:
    """A checkout's server on core 0."""
    (folder / "batching.txt").write_text(BATCHING)
    batching = ["--enable_batching", f"--batching_parameters_file={folder / 'batching.txt'}"]
    return served(None, *write_models(folder), *batching, checkout=checkout)


def run_greedy(greedy: Greedy, count: int, seconds: float, ports: Ports) -> int:
    """Run so many in processes of their own; the bytes that the server took."""
    fork, end_s = multiprocessing.get_context("fork"), time.monotonic() + seconds
    taken = fork.SimpleQueue()

    def work() -> None:
        os.nice(10)
        taken.put(ask_on(greedy, ports, end_s))

    children = [fork.Process(target=work, daemon=True) for _ in range(count)]
    for child in children:
        child.start()
    taken_bytes = sum(taken.get() for _ in children)
    for child in children:
        child.join()
    return taken_bytes


def dial(greedy: Greedy, ports: Ports) -> socket.socket:
    return connect_grpc(ports.grpc) if greedy.is_grpc else connect(ports.rest)


def ask_on(greedy: Greedy, ports: Ports, end_s: float) -> int:
    """Write as fast as the server takes it, and read what it answers; again on a new connection where it ends."""
    taken_bytes = 0
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), dial(greedy, ports) as client:
            client.sendall(greedy.opening)
            client.setblocking(False)
            left = memoryview(greedy.flood)
            while time.monotonic() < end_s:
                readable, writable, _ = select.select([client], [client] if left else [], [], 0.1)
                if writable:
                    sent_bytes = client.send(left[: 1 << 18])
                    taken_bytes += sent_bytes
                    left = left[sent_bytes:]
                if readable and not client.recv(1 << 18):
                    break
                if not left and not readable:  # it has all answers
                    break
    return taken_bytes


if __name__ == "__main__":
    main()
