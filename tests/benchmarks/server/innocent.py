"""What does a client wait that asks in a fixed rhythm, while others trouble the server? A process of its own.

A Predict over gRPC, one over REST and the model's status, each every 20 ms on a connection of its own. A request counts
from the instant at which it was due, so one long wait counts for all that were due in it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

sys.path += [str(Path(__file__).parents[3])]

from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.server.hostile_attacks import PREDICT, ROW, Ports

DUE_EVERY_S = 0.02
GIVEN_UP_S = 15.0
"""After the others have ended, for the last answers."""
ASKED = ("gRPC", "REST", "status")


def innocent_beside(ports: Ports, work: Callable[[], object]) -> dict[str, list[float]]:
    """Ask while `work` is done; the waits in ms by what was asked, NaN for those refused or never answered."""
    command = [sys.executable, __file__, str(ports.grpc), str(ports.rest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as innocent:
        assert innocent.stdout is not None
        innocent.stdout.readline()  # it has its first answers
        work()
        said, _ = innocent.communicate("", timeout=GIVEN_UP_S + 30)
    waits: dict[str, list[float]] = json.loads(said)
    return waits


def in_words(quiet: dict[str, list[float]], beside: dict[str, list[float]]) -> str:
    """p50/p99/max before -> beside the others, and how many then were refused."""
    refused = {what: f"{np.isnan(waits).sum()} of {len(waits)}" for what, waits in beside.items()}
    return "; ".join(
        f"{_quantiles(quiet[what])} -> {_quantiles(beside[what])}, {refused[what]}" for what in ASKED
    )


def _quantiles(waits_ms: list[float]) -> str:
    answered = [wait_ms for wait_ms in waits_ms if wait_ms == wait_ms]
    if not answered:
        return "no answer"
    return f"{np.median(answered):.1f}/{np.percentile(answered, 99):.1f}/{max(answered):.0f}"


def ask_when_due(ask: Callable[[], bool], waits: list[float], ended: threading.Event) -> None:
    """Ask in a fixed rhythm until `ended`; who is late asks at once, and counts from when it was due."""
    due_s = time.perf_counter()
    while not ended.wait(max(due_s - time.perf_counter(), 0.0)):
        try:
            answered = ask()
        except (OSError, http.client.HTTPException, grpc.RpcError):
            answered = False
        done_s = time.perf_counter()
        waits.append(1000 * (done_s - due_s) if answered else float("nan"))
        due_s += DUE_EVERY_S
        if ended.is_set():  # what was due while the last one waited
            waits += [1000 * (done_s - late_s) for late_s in np.arange(due_s, done_s, DUE_EVERY_S)]


def rest_asker(port: int, method: str, path: str, body: bytes | None) -> Callable[[], bool]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVEN_UP_S)

    def ask() -> bool:
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()  # the next request connects anew
            raise
        return answer.status == 200

    return ask


def main(grpc_port: int, rest_port: int) -> None:
    """Ask until stdin ends, then print every wait."""
    with contextlib.suppress(PermissionError):  # the server is measured, not who else wants this core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    message, row = encode_predict_request("m", "", ROW), b'{"instances": [[0.0, 0.0]]}'
    call = grpc.insecure_channel(f"127.0.0.1:{grpc_port}").unary_unary(PREDICT)
    asks = (
        lambda: bool(call(message, timeout=GIVEN_UP_S)),
        rest_asker(rest_port, "POST", "/v1/models/m:predict", row),
        rest_asker(rest_port, "GET", "/v1/models/m", None),
    )
    ended, waits = threading.Event(), {what: list[float]() for what in ASKED}
    threads = [
        threading.Thread(target=ask_when_due, args=(ask, waits[what], ended))
        for what, ask in zip(ASKED, asks, strict=True)
        if ask()
    ]
    for thread in threads:
        thread.start()
    print(flush=True)
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps(waits))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
