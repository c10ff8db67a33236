"""Do 10,000 idle connections cost a loaded server anything?

    python tests/benchmarks/server/idle_connections.py [--connections 10000] [--seconds 2] [--rounds 3]

Server on core 0, load on core 1. Each round measures without and with idle connections, half of them REST and half
gRPC (silent after their preface), and prints the ratio of throughputs. The bar: within 5 %, memory bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import time

from batchtune.wire.http2 import PREFACE, settings_frame
from tests.benchmarks.rivals import PREDICT_PATHS, spread
from tests.benchmarks.server.front_ends import CASES, load, served_case
from tests.benchmarks.server.server_residue import residue_of


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--connections", type=int, default=10_000)
    arguments.add_argument("--seconds", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ratios: dict[str, list[float]] = {protocol: [] for protocol in PREDICT_PATHS}
    with served_case(CASES["b32"]) as server:
        load(CASES["b32"], server, 1)
        for number in range(options.rounds):
            alone = load(CASES["b32"], server, options.seconds)
            before_mb = residue_of(server.pid, 0).resident_mb
            with contextlib.ExitStack() as idle:
                for at in range(options.connections):
                    port = server.grpc_port if at % 2 else server.rest_port
                    one = idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                    one.sendall((PREFACE + settings_frame({})) * (at % 2))
                time.sleep(1)
                beside = load(CASES["b32"], server, options.seconds)
                after_mb = residue_of(server.pid, 0).resident_mb
            print(f"round {number + 1}: {options.connections} idle, {before_mb:.0f} -> {after_mb:.0f} MB")
            for protocol, found in ratios.items():
                found.append(beside[protocol].rate_rps / alone[protocol].rate_rps)
    for protocol, found in ratios.items():
        print(f"{protocol}: throughput beside / alone {spread(found, '.3f')}")


if __name__ == "__main__":
    main()
