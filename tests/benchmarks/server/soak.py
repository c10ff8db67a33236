"""Could a server stay up for months: under 80 % load and a crowd that troubles it, does any request fail or anything grow?

    python tests/benchmarks/server/soak.py [--minutes 30] [--rate 800]

The server has an emulated device whose limit is 1,000 requests/s. Innocent clients, half REST, half gRPC, ask by a
Poisson schedule and check each answer; the crowd (soak_crowd.py) connects and disconnects, reads slowly, is refused,
reloads, swaps versions and puts parameters. The bars: no innocent request fails; after the first fifth resident
memory grows by no more than 1 MB an hour, threads and descriptors not at all. A line a minute, then the conclusion,
also of a run that is interrupted (Ctrl-C) or whose server ends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from statistics import median

import uvloop

sys.path += [str(Path(__file__).parents[3])]

from tests.benchmarks.emulated import Emulated
from tests.benchmarks.server.checked_clients import GrpcChannel, RestChannel, Tally, ask_once, end
from tests.benchmarks.server.front_ends import process_cpu_s
from tests.benchmarks.server.server_residue import Residue, growth_of, in_words, residue_of
from tests.benchmarks.server.soak_crowd import Crowd
from tests.server.server_process import ServerProcess

LIMIT_RPS = 1000.0
"""32 rows in 8 ms + 32 × 0.75 ms."""
DEVICE = Emulated(base_ms=8.0, per_row_ms=0.75, floats=1)
SLOPE_MB_AN_HOUR = 1.0
SAMPLES_MIN = 20
_TICK_S = 0.01
_PAUSE_S = 1.0
"""What was due during a longer pause of this process is not sent all at once."""
_SAMPLES_A_MINUTE = 60
_GRPC_CONNECTIONS = 4
_REST_CONNECTIONS = 256
"""Requests under way after half a second in which this machine did something else; one more has one for itself."""


async def ask(ports: tuple[int, int], rate_rps: float, end_s: float, tally: Tally) -> None:
    """Send what is due until then, and wait for the answers; a REST connection carries one request at a time."""
    chance = random.Random(2)
    free = deque(RestChannel(ports[1]) for _ in range(_REST_CONNECTIONS))  # in turn: none idles
    grpc = [GrpcChannel(ports[0]) for _ in range(_GRPC_CONNECTIONS)]
    under_way: set[asyncio.Task[None]] = set()

    async def ask_one(number: int) -> None:
        if number % 2:
            await ask_once(grpc[number // 2 % _GRPC_CONNECTIONS], float(number % 1000), check, tally)
            return
        channel = free.popleft() if free else RestChannel(ports[1])
        await ask_once(channel, float(number % 1000), check, tally)
        if len(free) < _REST_CONNECTIONS:
            free.append(channel)
        else:
            await channel.close()

    due_s, number = time.monotonic(), 0
    while due_s < end_s:
        if time.monotonic() > due_s + _PAUSE_S:
            due_s = time.monotonic()
        while due_s <= time.monotonic():
            due_s += chance.expovariate(rate_rps)
            number += 1
            task = asyncio.ensure_future(ask_one(number))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.sleep(_TICK_S)
    await end(under_way, [*grpc, *free], tally)


async def watch(pid: int, begin_s: float, tally: Tally, residues: list[Residue]) -> None:
    """What the server holds, once a second, and a line a minute."""
    print("minute   answers  failed  slowest ms      MB  threads  descriptors  CPU % server")
    cpu_s = process_cpu_s(pid)
    while True:
        await asyncio.sleep(60 / _SAMPLES_A_MINUTE)
        residues.append(residue_of(pid, time.monotonic() - begin_s))
        if len(residues) % _SAMPLES_A_MINUTE == 0:
            minute, before_s, cpu_s = residues[-_SAMPLES_A_MINUTE:], cpu_s, process_cpu_s(pid)
            print(
                f"{minute[-1].at_s / 60:6.0f}{tally.counts.total():10,}{tally.failed:8}{1000 * tally.slowest_s:12.0f}"
                f"{median(one.resident_mb for one in minute):8.1f}{median(one.threads for one in minute):9.0f}"
                f"{median(one.descriptors for one in minute):13.0f}{100 * (cpu_s - before_s) / 60:14.0f}",
                flush=True,
            )


def check(x: float, values: list[float], _sent_s: float, _done_s: float) -> str:
    """A `checked_clients.Check`: every version of the emulated device answers x, x + 1."""
    return "" if values == [x, x + 1] else f"{x} was answered by {values}"


def conclude(ended: str, acts: Counter[str], tally: Tally, residues: list[Residue]) -> str:
    """What the run has shown; no slopes where the samples after the warm-up are too few."""
    growth = growth_of([one.at_s / 3600 for one in residues], residues, fewest=SAMPLES_MIN)
    return (
        f"ended {ended} after {residues[-1].at_s / 60:.1f} minutes\n"
        f"innocent: {tally}; slowest {1000 * tally.slowest_s:,.0f} ms\n"
        f"crowd: {', '.join(f'{count} {act}' for act, count in sorted(acts.items()))}\n"
        f"an hour, 95 %, after the first fifth: {in_words(growth)} (bar: {SLOPE_MB_AN_HOUR:+g} MB)"
    )


async def soak(base: Path, minutes: float, rate_rps: float) -> str:
    """One run, its conclusion."""
    tally, residues = Tally(), list[Residue]()
    with ServerProcess(base / "m", *prepare(base)) as server:
        ports, begin_s = (server.grpc_port, server.rest_port), time.monotonic()
        crowd = Crowd(base, ports, DEVICE)
        watching = asyncio.ensure_future(watch(server.pid, begin_s, tally, residues))
        asking = asyncio.ensure_future(ask(ports, rate_rps, begin_s + 60 * minutes, tally))
        ended = "in time"
        try:
            await asyncio.wait([asking, watching], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                ended = "with the server: " + "".join(server.lines[-5:])
        except asyncio.CancelledError:
            ended = "by a signal"
        finally:
            watching.cancel()
            asking.cancel()
            _, fault = await asyncio.gather(watching, asking, return_exceptions=True)
            if isinstance(fault, Exception):
                ended = f"by {fault!r}"
            await crowd.stop()
    return conclude(ended, crowd.acts, tally, residues)


def prepare(base: Path) -> list[str]:
    """The files of the server, its flags."""
    DEVICE.write(base / "m")
    (base / "batching.txt").write_text(
        "max_batch_size { value: 32 } max_enqueued_batches { value: 100000 } num_batch_threads { value: 1 }"
    )
    (base / "monitoring.txt").write_text("prometheus_config { enable: true }")
    files = [
        f"--batching_parameters_file={base}/batching.txt",
        f"--monitoring_config_file={base}/monitoring.txt",
    ]
    return ["--enable_batching", "--enable_tuning_api", *files]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--minutes", type=float, default=30)
    arguments.add_argument("--rate", type=float, default=0.8 * LIMIT_RPS)
    options = arguments.parse_args()
    print(f"{options.rate:g} requests/s of {LIMIT_RPS:g}, {options.minutes:g} minutes")
    with (
        tempfile.TemporaryDirectory() as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        print(runner.run(soak(Path(directory), options.minutes, options.rate)), flush=True)


if __name__ == "__main__":
    main()
