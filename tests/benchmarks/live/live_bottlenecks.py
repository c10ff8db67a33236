"""Is each bottleneck named when it is planted? One short live run for each, on an emulated device.

    python tests/benchmarks/live/live_bottlenecks.py [--only client]

The bundled server on core 0, one client process on core 1, except where the case says otherwise. Prints what was planted,
what was named and on what evidence; exits with 1 when a name is wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchtune.measure.bottleneck import find_bottleneck
from batchtune.measure.caveats import settings_of
from batchtune.report.findings import text_of
from batchtune.scenario.arrivals import Schedule
from batchtune.tune.loader import Figures, LoadRun
from tests.benchmarks.live.burners import burning
from tests.benchmarks.live.live_target import CLIENT_CORE, SERVER_CORE, Case, Loading, live

Load = Callable[[Loading], Figures]


@dataclass(frozen=True)
class Planted:
    """What is planted, under which name it is to be found, and the load that shows it."""

    what: str
    expected: str
    case: Case
    load: Load
    disturbed_by: Callable[[Loading], AbstractContextManager[Any]] | None = None


def closed(clients: int) -> Load:
    return lambda server: server.closed_loop(clients, duration_s=2.0)


def open_at(rate_rps: float) -> Load:
    return lambda server: server.open_loop(rate_rps, seed=1, warm_up_s=0.5, duration_s=2.0)


def bursts(requests: int, every_s: float) -> Load:
    starts_s = np.repeat(np.arange(0.0, 2.5, every_s), requests)
    schedule = Schedule(
        due_ns=(starts_s * 1e9).astype(np.int64), duration_s=2.5, offered_rps=requests / every_s
    )
    return lambda server: server.load(LoadRun(arrivals=schedule, warm_up_s=0.5))


@contextmanager
def throttled_client(server: Loading) -> Iterator[None]:
    """Half of each 100 ms the client may not run, as under a CPU quota of one half."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in server.fleet.process_ids:
                    os.kill(pid, number)
                time.sleep(0.05)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def hog(core: int) -> Iterator[None]:
    with burning([core], pauses=False):
        time.sleep(0.3)
        yield


QUICK = Case(base_ms=0.0, per_row_ms=0.0, max_batch_size=64)
OF_64, UNBATCHED = Case(max_batch_size=64), Case(max_batch_size=None)
PATIENT = Case(max_batch_size=64, batch_timeout_micros=50_000)
TWO = {"processes_per_replica": 2, "threads_per_process": 1}
TWO_REST = Case(max_batch_size=64, protocol="rest", flags=TWO)
TWO_UNBATCHED = Case(max_batch_size=None, parallel=True, protocol="rest", flags=TWO)
QUICK_REST = Case(base_ms=0.0, per_row_ms=0.0, max_batch_size=64, protocol="rest")
SHORT_QUEUE = Case(max_batch_size=8, max_enqueued_batches=1)
PARALLEL = Case(max_batch_size=8, parallel=True)

PLANTED = (
    Planted("client throttled to half, closed loop", "client", QUICK, closed(16), throttled_client),
    Planted("client throttled to half, open loop", "client", QUICK, open_at(500.0), throttled_client),
    Planted("a hog on the server's core", "host_noise", Case(), open_at(600.0), lambda _: hog(SERVER_CORE)),
    Planted("a hog on the client's core", "host_noise", Case(), open_at(600.0), lambda _: hog(CLIENT_CORE)),
    Planted("2 request threads, REST, 16 clients", "server_threads", TWO_REST, closed(16)),
    Planted(
        "2 request threads, gRPC, 16 clients",
        "server_threads",
        Case(max_batch_size=64, flags=TWO),
        closed(16),
    ),
    Planted("2 request threads, REST, no batching", "server_threads", TWO_UNBATCHED, closed(16)),
    Planted("4 clients, max_batch_size 64", "concurrency", OF_64, closed(4)),
    Planted("batch timeout 50 ms, closed loop", "batch_timeout", PATIENT, closed(16)),
    Planted("batch timeout 50 ms, open loop", "batch_timeout", PATIENT, open_at(200.0)),
    Planted("device, 128 clients", "device", Case(), closed(128)),
    Planted("device, open loop beyond it", "device", Case(), open_at(1700.0)),
    Planted("device, no batching", "device", UNBATCHED, closed(32)),
    Planted("device time 0, REST, 128 clients", "front_end", QUICK_REST, closed(128)),
    Planted("bursts of 64 on a queue of 1 batch", "queue_limit", SHORT_QUEUE, bursts(64, 0.1)),
    Planted("1 batch thread, parallel device", "batch_threads", PARALLEL, closed(64)),
    Planted("a rate that is met", "none", Case(), open_at(600.0)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    print(f"{'planted':38} {'named':15} evidence")
    chosen = [each for each in PLANTED if asked.only in {"", each.expected}]
    right = sum(tried(each) for each in chosen)
    print(f"{right} of {len(chosen)} named as planted")
    sys.exit(right < len(chosen))


def tried(planted: Planted) -> bool:
    case = planted.case
    with ExitStack() as stack:
        server = stack.enter_context(live(case))
        server.closed_loop(4, duration_s=0.2)
        if planted.disturbed_by is not None:
            stack.enter_context(planted.disturbed_by(server))
        measured = planted.load(server).measurement
    settings = settings_of(case.configuration, server_cores=1.0, flags=case.flags, protocol=case.protocol)
    found = find_bottleneck(measured, settings)
    good = found.kind == planted.expected
    print(
        f"{planted.what:38} {found.kind + ('' if good else ' WRONG'):15} {text_of(found.text)}; {text_of(found.advice)}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    main()
