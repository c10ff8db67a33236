"""Could a server stay up for months: under 80 % load and a crowd that troubles it, does any request fail or anything grow?

    python tests/benchmarks/server/soak.py [--minutes 30] [--rate 800]

The server has an emulated device whose limit is 1,000 requests/s. Innocent clients, half REST, half gRPC, ask by a
Poisson schedule and check each answer; the crowd (soak_crowd.py) connects and disconnects, reads slowly, is refused,
reloads, swaps versions and puts parameters. The bars: no innocent request fails; after the first fifth resident
memory grows by no more than 1 MB an hour, threads and descriptors not at all. A line a minute, then the conclusion in
words and, last, in JSON; also of a run that is interrupted (Ctrl-C) or whose server ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from tests.benchmarks.server.checked_clients import GIVEN_UP_S, GrpcChannel, RestChannel, Tally, ask_once
from tests.benchmarks.server.front_ends import process_cpu_s
from tests.benchmarks.server.server_residue import Residue, Slope, residue_of, slope_of
from tests.benchmarks.server.soak_crowd import TUNED, Crowd
from tests.server.server_process import ServerProcess

LIMIT_RPS = 1000.0
"""32 rows in 8 ms + 32 × 0.75 ms."""
WARM_UP_RATIO = 0.2
SLOPE_MB_AN_HOUR = 1.0
SAMPLES_MIN = 20
_EMULATED = """
service_time: {base_ms: 8.0, per_row_ms: 0.75}
inputs: {x: {dtype: float32, shape: [1]}}
outputs: {y: {dtype: float32, shape: [2]}}
"""
_TICK_S = 0.01
_PAUSE_S = 1.0
"""What was due during a longer pause of this process is not sent all at once."""
_SAMPLE_S = 1.0
_GRPC_CONNECTIONS = 4
_REST_CONNECTIONS = 256
"""Requests under way after half a second in which this machine did something else; one more has one for itself."""


class Innocents:
    """Clients on a Poisson schedule; a REST connection carries one request at a time, a gRPC one many."""

    def __init__(self, ports: tuple[int, int], rate_rps: float) -> None:
        grpc_port, self._rest_port = ports
        self._rate_rps = rate_rps
        self._random = random.Random(2)
        free = (RestChannel(self._rest_port) for _ in range(_REST_CONNECTIONS))
        self._free = deque(free)  # in turn: none idles until the server closes it
        self._grpc = [GrpcChannel(grpc_port) for _ in range(_GRPC_CONNECTIONS)]
        self._under_way: set[asyncio.Task[None]] = set()
        self.tally = Tally()

    async def ask_until(self, end_s: float) -> None:
        """Send what is due until then, and wait for the answers."""
        due_s, number = time.monotonic(), 0
        while due_s < end_s:
            if time.monotonic() > due_s + _PAUSE_S:
                due_s = time.monotonic()
            while due_s <= time.monotonic():
                due_s += self._random.expovariate(self._rate_rps)
                number += 1
                asked = self._ask_rest(number % 1000) if number % 2 else self._ask_grpc(number)
                task = asyncio.ensure_future(asked)
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
            await asyncio.sleep(_TICK_S)
        if self._under_way:
            _, late = await asyncio.wait(self._under_way, timeout=GIVEN_UP_S)
            for task in late:
                task.cancel()
                self.tally.note("lost", f"no answer within {GIVEN_UP_S:g} s")
        for channel in (*self._grpc, *self._free):
            channel.close()

    async def _ask_grpc(self, number: int) -> None:
        await ask_once(self._grpc[number % _GRPC_CONNECTIONS], float(number % 1000), check, self.tally)

    async def _ask_rest(self, number: int) -> None:
        channel = self._free.popleft() if self._free else RestChannel(self._rest_port)
        await ask_once(channel, float(number), check, self.tally)
        if len(self._free) < _REST_CONNECTIONS:
            self._free.append(channel)
        else:
            channel.close()


class Watch:
    """What the server holds, once a second, and a line a minute."""

    def __init__(self, pid: int, innocents: Innocents) -> None:
        self._pid = pid
        self._tally = innocents.tally
        self.residues: list[Residue] = []
        self.slowest_s = 0.0

    async def watch(self, begin_s: float) -> None:
        print("minute   answers  failed  slowest ms      MB  threads  descriptors  CPU % server, clients")
        cpu_s = process_cpu_s(self._pid), process_cpu_s(os.getpid())
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self.residues.append(residue_of(self._pid, time.monotonic() - begin_s))
            if len(self.residues) % round(60 / _SAMPLE_S) == 0:
                now_s = process_cpu_s(self._pid), process_cpu_s(os.getpid())
                self._say(*(100 * (now - before) / 60 for now, before in zip(now_s, cpu_s, strict=True)))
                cpu_s = now_s

    def _say(self, server_ratio: float, own_ratio: float) -> None:
        minute = self.residues[-round(60 / _SAMPLE_S) :]
        tally = self._tally
        memory = statistics.median(residue.resident_mb for residue in minute)
        threads = statistics.median(residue.threads for residue in minute)
        descriptors = statistics.median(residue.descriptors for residue in minute)
        print(
            f"{minute[-1].at_s / 60:6.0f}{tally.counts.total():10,}{tally.failed:8}{1000 * tally.slowest_s:12.0f}"
            f"{memory:8.1f}{threads:9.0f}{descriptors:13.0f}{server_ratio:14.0f},{own_ratio:8.0f}",
            flush=True,
        )
        self.slowest_s = max(self.slowest_s, tally.slowest_s)
        tally.slowest_s = 0.0


def check(x: float, values: list[float], _sent_s: float, _done_s: float) -> str:
    """A `checked_clients.Check`: every version of the emulated device answers x, x + 1."""
    return "" if values == [x, x + 1] else f"{x} was answered by {values}"


def write_version(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "emulated.yaml").write_text(_EMULATED)


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What a run has shown; `ended` is "in time", or why it was not."""

    ended: str
    minutes: float
    tally: Tally
    acts: Counter[str]
    memory_mb: Slope | None
    threads: Slope | None
    descriptors: Slope | None

    def __str__(self) -> str:
        lines = [f"ended {self.ended} after {self.minutes:.1f} minutes", f"innocent: {self.tally}"]
        lines += [f"  {count} × {fault}" for fault, count in self.tally.faults.most_common()]
        lines.append("crowd: " + ", ".join(f"{count} {act}" for act, count in sorted(self.acts.items())))
        lines.append(
            f"an hour, 95 %, after the first {WARM_UP_RATIO:.0%}: {self.memory_mb} MB (bar: {SLOPE_MB_AN_HOUR:+g}), "
            f"{self.threads} threads, {self.descriptors} descriptors"
        )
        return "\n".join(lines)

    def as_json(self) -> str:
        """On one line; slopes are by the hour."""
        slopes = {"memory_mb": self.memory_mb, "threads": self.threads, "descriptors": self.descriptors}
        return json.dumps(
            {
                "ended": self.ended,
                "minutes": round(self.minutes, 2),
                "answers": dict(self.tally.counts),
                "failed": self.tally.failed,
                "faults": dict(self.tally.faults),
                "slowest_ms": round(1000 * self.tally.slowest_s, 1),
                "crowd": dict(self.acts),
                "an_hour": {name: slope and asdict(slope) for name, slope in slopes.items()},
            }
        )


async def soak(base: Path, minutes: float, rate_rps: float) -> Conclusion:
    """One run, its conclusion."""
    with ServerProcess(base / "m", *prepare(base)) as server:
        ports = server.grpc_port, server.rest_port
        innocents, crowd = Innocents(ports, rate_rps), Crowd(base, ports, write_version)
        watch = Watch(server.pid, innocents)
        begin_s = time.monotonic()
        crowd.start()
        watching = asyncio.ensure_future(watch.watch(begin_s))
        asking = asyncio.ensure_future(innocents.ask_until(begin_s + 60 * minutes))
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
    minutes_run = (time.monotonic() - begin_s) / 60
    innocents.tally.slowest_s = max(innocents.tally.slowest_s, watch.slowest_s)
    return conclude(ended, minutes_run, crowd.acts, innocents.tally, watch.residues)


def prepare(base: Path) -> list[str]:
    """The files of the server, its flags."""
    write_version(base / "m" / "1")
    (base / "batching.txt").write_text(
        "max_batch_size { value: 32 } max_enqueued_batches { value: 100000 } num_batch_threads { value: 1 }"
    )
    (base / "monitoring.txt").write_text("prometheus_config { enable: true }")
    return [
        "--enable_batching",
        f"--batching_parameters_file={base / 'batching.txt'}",
        "--enable_tuning_api",
        f"--monitoring_config_file={base / 'monitoring.txt'}",
    ]


def conclude(
    ended: str,
    minutes: float,
    acts: Counter[str],
    tally: Tally,
    residues: list[Residue],
) -> Conclusion:
    """What the samples after the warm-up say; no slopes where they are too few."""
    settled = residues[round(len(residues) * WARM_UP_RATIO) :]
    hours = [residue.at_s / 3600 for residue in settled]

    def slope(values: list[float]) -> Slope | None:
        return slope_of(hours, values) if len(values) >= SAMPLES_MIN else None

    return Conclusion(
        ended=ended,
        minutes=minutes,
        tally=tally,
        acts=acts,
        memory_mb=slope([residue.resident_mb for residue in settled]),
        threads=slope([float(residue.threads) for residue in settled]),
        descriptors=slope([float(residue.descriptors) for residue in settled]),
    )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--minutes", type=float, default=30)
    arguments.add_argument("--rate", type=float, default=0.8 * LIMIT_RPS)
    options = arguments.parse_args()
    print(
        f"{options.rate:g} requests/s of {LIMIT_RPS:g}, {options.minutes:g} minutes, {len(TUNED)} configurations"
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        conclusion = runner.run(soak(Path(directory), options.minutes, options.rate))
        print(conclusion, conclusion.as_json(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
