"""What do clients that mean harm cost: memory that stays, and an innocent client's p99?

    python tests/benchmarks/server/hostile_clients.py [--only unread_grpc] [--settle 25]

For each attack a server of its own (its real process, emulated models of no device time) and an innocent client in a
process of its own: a Predict over gRPC, one over REST and the model's status every 20 ms. Printed: resident memory above
that before the attack, child processes included, at its highest, `--settle` seconds after the last byte while the
attackers' connections are open, and once they are closed; the innocent's p50, p99 and longest wait before the attack and
during it. A status waits for the event loop only, a Predict also for the requests in the queue before it. Bars: at most
10 MB kept; no request of ≤ 1 MB delays another by more than 50 ms.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from pathlib import Path

from tests.benchmarks.server.innocent import in_words, innocent_beside
from tests.server.hostile_attacks import (
    ATTACKS,
    Attack,
    Peak,
    Ports,
    connect,
    post,
    read_http,
    rss_mb,
    write_models,
)
from tests.server.server_process import ServerProcess


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="")
    arguments.add_argument("--settle", type=float, default=25.0)
    options = arguments.parse_args()
    words = "p50/p99/max ms, alone -> meanwhile, refused: gRPC; REST; status"
    print(f"{'attack':20}{'s':>6}{'MB peak':>9}{'kept':>7}{'closed':>8}   {words}")
    for attack in ATTACKS:
        if options.only in attack.__name__:
            print(measure(attack, options.settle), flush=True)


def measure(attack: Attack, settle_s: float) -> str:
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
            clients: list[socket.socket] = []
            meanwhile = innocent_beside(ports, lambda: clients.extend(attack(ports)))
            took_s = time.monotonic() - began_s
            time.sleep(settle_s)
            kept_mb = rss_mb(server.pid) - before_mb
            for client in clients:
                client.close()
            time.sleep(2)
            closed_mb = rss_mb(server.pid) - before_mb
            peak_mb = peak.stop() - before_mb
    return f"{attack.__name__:20}{took_s:6.1f}{peak_mb:9.1f}{kept_mb:7.1f}{closed_mb:8.1f}   {in_words(alone, meanwhile)}"


def start_reading_process(ports: Ports) -> None:
    """Ask for one large REST body to be read: the process that does that stays, and counts as there before."""
    with connect(ports.rest) as client:
        rows = b", ".join([b"[0.0, 0.0]"] * 20_000)
        client.sendall(post("/v1/models/m:predict", b'{"instances": [%b]}' % rows))
        read_http(client)


if __name__ == "__main__":
    main()
