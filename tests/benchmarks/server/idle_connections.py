"""Do 10,000 idle connections cost a loaded server anything?

    python tests/benchmarks/server/idle_connections.py [--connections 10000] [--seconds 2] [--rounds 3]

Server on core 0, load on core 1. Each round measures without and with idle connections, half of them REST and half
gRPC (silent after their preface), and prints the ratio of throughputs. The bar: within 5 %, memory bounded.
"""

from __future__ import annotations

import argparse
import resource
import socket
import statistics
import time
from pathlib import Path

from tests.benchmarks.server.front_ends import CASES, PREDICT_PATHS, load, served

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--connections", type=int, default=10_000)
    arguments.add_argument("--seconds", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    case = next(one for one in CASES if one.name == "b32")
    ratios: dict[str, list[float]] = {protocol: [] for protocol in PREDICT_PATHS}
    with served(case) as (ports, pid, base):
        for protocol, port in ports.items():
            load(case, protocol, port, pid, 1, base)
        for number in range(options.rounds):
            alone = {
                name: rate(load(case, name, port, pid, options.seconds, base)) for name, port in ports.items()
            }
            before_mb = resident_mb(pid)
            idle = open_idle(ports, options.connections)
            beside = {
                name: rate(load(case, name, port, pid, options.seconds, base)) for name, port in ports.items()
            }
            print(
                f"round {number + 1}: {len(idle)} idle connections, {before_mb:.0f} -> {resident_mb(pid):.0f} MB"
            )
            for one in idle:
                one.close()
            for name in ports:
                ratios[name].append(beside[name] / alone[name])
                print(f"  {name}: {alone[name]:,.0f}/s alone, {beside[name]:,.0f}/s beside them")
            time.sleep(1)
    for name, found in ratios.items():
        print(
            f"{name}: throughput beside / alone {statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})"
        )


def open_idle(ports: dict[str, int], count: int) -> list[socket.socket]:
    """Sockets that are connected, taken by the server and silent."""
    found = []
    for number in range(count):
        protocol = "gRPC" if number % 2 else "REST"
        one = socket.create_connection(("127.0.0.1", ports[protocol]), timeout=30)
        if protocol == "gRPC":
            one.sendall(PREFACE)
        found.append(one)
    time.sleep(1)
    return found


def rate(row: str) -> float:
    return float(row.split()[2].replace(",", ""))


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


if __name__ == "__main__":
    main()
