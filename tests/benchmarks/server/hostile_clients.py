"""What do clients that mean harm cost: memory that stays, and an innocent client's p99?

    python tests/benchmarks/server/hostile_clients.py [--only unread_grpc] [--settle 25]

For each attack a server of its own (its real process, emulated models of no device time) and an innocent client in a
process of its own: a Predict over gRPC, one over REST and the model's status every 10 ms. Printed: resident memory above
that before the attack, child processes included, at its highest, `--settle` seconds after the last byte while the
attackers' connections are open, and once they are closed; the innocent's p50, p99 and longest wait before the attack and
during it. A status waits for the event loop only, a Predict also for the requests in the queue before it. Bars: at most
10 MB kept; no request of ≤ 1 MB delays another by more than 50 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.hostile_attacks import (
    ATTACKS,
    ROW,
    Peak,
    Ports,
    connect,
    connect_grpc,
    data,
    head,
    post,
    read_answers,
    read_http,
    rss_mb,
    write_models,
)
from tests.server.server_process import ServerProcess

PAUSE_S = 0.01
STATUS = b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="")
    arguments.add_argument("--settle", type=float, default=25.0)
    arguments.add_argument("--innocent", nargs=2, type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.innocent:
        run_innocent(Ports(*options.innocent))
        return
    print(
        f"{'attack':20}{'s':>6}{'MB peak':>9}{'kept':>7}{'closed':>8}   p50/p99/max ms, alone and meanwhile: gRPC, REST, status"
    )
    for attack in ATTACKS:
        if options.only in attack.__name__:
            print(measure(attack, options.settle), flush=True)


def measure(attack: Any, settle_s: float) -> str:
    """One attack on a server of its own, in a line."""
    with tempfile.TemporaryDirectory() as directory:
        flags = write_models(Path(directory))
        with ServerProcess(None, *flags) as server:
            ports = Ports(server.grpc_port, server.rest_port)
            start_reading_process(ports)
            alone = innocent_beside(ports, lambda: time.sleep(3))
            before_mb = rss_mb(server.pid)
            peak = Peak(server.pid)
            began_s = time.monotonic()
            clients: list[Any] = []
            meanwhile = innocent_beside(ports, lambda: clients.extend(attack(ports)))
            took_s = time.monotonic() - began_s
            time.sleep(settle_s)
            kept_mb = rss_mb(server.pid) - before_mb
            for client in clients:
                client.close()
            time.sleep(2)
            closed_mb = rss_mb(server.pid) - before_mb
            peak_mb = peak.stop() - before_mb
    waits = "; ".join(
        f"{protocol} {in_words(alone[protocol])} -> {in_words(meanwhile[protocol])}" for protocol in alone
    )
    return f"{attack.__name__:20}{took_s:6.1f}{peak_mb:9.1f}{kept_mb:7.1f}{closed_mb:8.1f}   {waits}"


def start_reading_process(ports: Ports) -> None:
    """Ask for one large REST body to be read: the process that does that stays, and counts as there before."""
    with connect(ports.rest) as client:
        rows = b", ".join([b"[0.0, 0.0]"] * 20_000)
        client.sendall(post("/v1/models/m:predict", b'{"instances": [%b]}' % rows))
        read_http(client)


def innocent_beside(ports: Ports, work: Any) -> dict[str, list[float]]:
    """The innocent client's waits in ms, by protocol, while `work` is done."""
    command = [sys.executable, __file__, "--innocent", str(ports.grpc), str(ports.rest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as innocent:
        assert innocent.stdout is not None
        innocent.stdout.readline()  # it has its first answers
        work()
        said, _ = innocent.communicate("", timeout=120)
    waits: dict[str, list[float]] = json.loads(said)
    return waits


def run_innocent(ports: Ports) -> None:
    """Ask until stdin ends, then print every wait."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    message = encode_predict_request("m", "", ROW)
    asked = {"REST": post("/v1/models/m:predict", b'{"instances": [[0.0, 0.0]]}'), "status": STATUS}
    waits: dict[str, list[float]] = {"gRPC": [], **{what: [] for what in asked}}
    stream_id = 1
    with connect_grpc(ports.grpc) as by_grpc, connect(ports.rest) as by_rest:
        while not ended.is_set():
            began_s = time.perf_counter()
            by_grpc.sendall(head(stream_id) + data(stream_id, message))
            read_answers(by_grpc, 1)
            waits["gRPC"].append(1000 * (time.perf_counter() - began_s))
            for what, request in asked.items():
                began_s = time.perf_counter()
                by_rest.sendall(request)
                read_http(by_rest)
                waits[what].append(1000 * (time.perf_counter() - began_s))
            if stream_id == 1:
                print(flush=True)
            stream_id += 2
            time.sleep(PAUSE_S)
    print(json.dumps(waits))


def in_words(waits_ms: list[float]) -> str:
    return f"{np.median(waits_ms):.1f}/{np.percentile(waits_ms, 99):.1f}/{max(waits_ms):.0f}"


if __name__ == "__main__":
    main()
