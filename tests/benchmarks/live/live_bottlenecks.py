"""Is each bottleneck named when it is planted? One short live run for each, on an emulated device.

    python tests/benchmarks/live/live_bottlenecks.py [--only client]

The bundled server on core 0, one client process on core 1, except where the case says otherwise. Prints what was planted,
what was named and on what evidence; exits with 1 when a name is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from batchtune.measure.bottleneck import find_bottleneck
from batchtune.measure.caveats import settings_of
from batchtune.report.findings import text_of
from batchtune.scenario.arrivals import Schedule
from batchtune.tune.loader import Figures, LoadRun
from tests.benchmarks.live.live_target import CLIENT_CORE, SERVER_CORE, Case, Live, live

QUICK = Case(base_ms=0.0, per_row_ms=0.0, max_batch_size=64)
TWO_THREADS = {"processes_per_replica": 2, "threads_per_process": 1}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is planted, under which name it is to be found, and the load that shows it."""

    what: str
    expected: str
    case: Case
    load: Callable[[Live], Figures]
    disturbed_by: Callable[[Live], object] | None = None


def closed(clients: int) -> Callable[[Live], Figures]:
    return lambda server: server.closed_loop(clients, duration_s=2.0)


def open_at(rate_rps: float) -> Callable[[Live], Figures]:
    return lambda server: server.open_loop(rate_rps, seed=1, warm_up_s=0.5, duration_s=2.0)


def bursts(requests: int, every_s: float) -> Callable[[Live], Figures]:
    def load(server: Live) -> Figures:
        starts = np.repeat(np.arange(0.0, 2.5, every_s), requests)
        schedule = Schedule(
            due_ns=(starts * 1e9).astype(np.int64), duration_s=2.5, offered_rps=requests / every_s
        )
        return server.load(LoadRun(arrivals=schedule, warm_up_s=0.5))

    return load


@contextmanager
def throttled_client(server: Live) -> Iterator[None]:
    """Half of each 100 ms the client may not run, as under a CPU quota of one half."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in server.client_pids():
                    os.kill(pid, number)
                time.sleep(0.05)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def hog(core: int) -> Callable[[Live], object]:
    @contextmanager
    def running(_server: Live) -> Iterator[None]:
        process = multiprocessing.get_context("spawn").Process(target=spin, args=(core,), daemon=True)
        process.start()
        time.sleep(0.3)
        try:
            yield
        finally:
            process.kill()
            process.join()

    return running


def spin(core: int) -> None:
    os.sched_setaffinity(0, (core,))
    while True:
        pass


PLANTED = (
    Planted(
        what="client throttled to half, closed loop",
        expected="client",
        case=QUICK,
        load=closed(16),
        disturbed_by=throttled_client,
    ),
    Planted(
        what="client throttled to half, open loop",
        expected="client",
        case=QUICK,
        load=open_at(500.0),
        disturbed_by=throttled_client,
    ),
    Planted(
        what="a hog on the server's core",
        expected="host_noise",
        case=Case(),
        load=open_at(600.0),
        disturbed_by=hog(SERVER_CORE),
    ),
    Planted(
        what="a hog on the client's core",
        expected="host_noise",
        case=Case(),
        load=open_at(600.0),
        disturbed_by=hog(CLIENT_CORE),
    ),
    Planted(
        what="2 request threads, REST, 16 clients",
        expected="server_threads",
        case=Case(max_batch_size=64, protocol="rest", flags=TWO_THREADS),
        load=closed(16),
    ),
    Planted(
        what="2 request threads, gRPC, 16 clients",
        expected="server_threads",
        case=Case(max_batch_size=64, flags=TWO_THREADS),
        load=closed(16),
    ),
    Planted(
        what="2 request threads, REST, no batching",
        expected="server_threads",
        case=Case(max_batch_size=None, concurrency="parallel", protocol="rest", flags=TWO_THREADS),
        load=closed(16),
    ),
    Planted(
        what="4 clients, max_batch_size 64",
        expected="concurrency",
        case=Case(max_batch_size=64),
        load=closed(4),
    ),
    Planted(
        what="batch timeout 50 ms, closed loop",
        expected="batch_timeout",
        case=Case(max_batch_size=64, batch_timeout_micros=50_000),
        load=closed(16),
    ),
    Planted(
        what="batch timeout 50 ms, open loop",
        expected="batch_timeout",
        case=Case(max_batch_size=64, batch_timeout_micros=50_000),
        load=open_at(200.0),
    ),
    Planted(what="device, 128 clients", expected="device", case=Case(), load=closed(128)),
    Planted(what="device, open loop beyond it", expected="device", case=Case(), load=open_at(1700.0)),
    Planted(
        what="device, no batching",
        expected="device",
        case=Case(max_batch_size=None),
        load=closed(32),
    ),
    Planted(
        what="device time 0, REST, 128 clients",
        expected="front_end",
        case=Case(base_ms=0.0, per_row_ms=0.0, max_batch_size=64, protocol="rest"),
        load=closed(128),
    ),
    Planted(
        what="bursts of 64 on a queue of 1 batch",
        expected="queue_limit",
        case=Case(max_batch_size=8, max_enqueued_batches=1),
        load=bursts(64, 0.1),
    ),
    Planted(
        what="1 batch thread, parallel device",
        expected="batch_threads",
        case=Case(max_batch_size=8, concurrency="parallel"),
        load=closed(64),
    ),
    Planted(what="a rate that is met", expected="none", case=Case(), load=open_at(600.0)),
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
    settings = settings_of(
        case.configuration,
        server_cores=float(len(case.server_cores)),
        flags=case.flags,
        protocol=case.protocol,
    )
    found = find_bottleneck(measured, settings)
    good = found.kind == planted.expected
    print(
        f"{planted.what:38} {found.kind + ('' if good else ' WRONG'):15} {text_of(found.text)}; {text_of(found.advice)}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    main()
