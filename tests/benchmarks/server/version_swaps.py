"""Is any answer lost or wrong, and does anything stay behind, while the versions of a model replace each other?

    python tests/benchmarks/server/version_swaps.py [--backend onnx] [--batching on] [--swaps 50] [--weights-mb 100]

A model of 100 MB, 64 clients (REST and gRPC, think time 10 ms), PUTs of batching parameters all the while. A version
comes as a new folder, by a reload that names it, by a reload back to the one before, or by a reload to the latest.
The bars: every answer good and of a version that was available meanwhile; resident memory never above that of two
versions and SLACK_MB; memory at rest, threads and descriptors without a slope.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

sys.path += [str(Path(__file__).parents[3])]

from batchtune.wire.tfserving.messages import ReloadConfigResponse
from tests.benchmarks.server.checked_clients import ClosedClients, GrpcChannel, Tally
from tests.benchmarks.server.server_residue import (
    Residue,
    forget_peak,
    growth_of,
    in_words,
    peak_mb,
    residue_of,
)
from tests.benchmarks.server.soak import reload_request
from tests.benchmarks.server.version_models import installed_backends, version_of, write_version
from tests.server.server_process import ServerProcess

SLACK_MB = 20.0
"""Beside two versions: what requests, threads and a framework's own caches take while both are there."""
SETTLED_MIN = 5
"""Swaps after the first fifth: of fewer no slope is told."""
SWAP_LIMIT_S = 600.0
WAYS = ("folder", "named", "back", "latest")
_STARTED_WITH = "max_batch_size { value: 16 } max_enqueued_batches { value: 100000 }"
NO_TIMEOUT = "--rest_api_timeout_in_ms=600000"
"""A machine that pauses both server and clients is not to make answers fail."""
_POLL_S = 0.03
_QUEUE = {"max_enqueued_batches": 100_000}
_STREAMING = {"batch_scheduler": "streaming", "num_batch_threads": 64}
"""It refuses a batch for which no thread is free: one for each client."""
TUNED: dict[bool, list[dict[str, Any]]] = {
    True: [
        {**_QUEUE, "batch_scheduler": "shared", "max_batch_size": 16, "num_batch_threads": 2},
        {**_QUEUE, "max_batch_size": 8, "batch_timeout_micros": 2000, "num_batch_threads": 1},
        {**_QUEUE, "batch_scheduler": "shared", "max_batch_size": 32, "num_batch_threads": 4},
        {**_STREAMING, "max_batch_size": 4, "batch_timeout_micros": 1000},
        {"enable_batching": False},
    ],
    False: [{"enable_batching": False}],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the benchmark."""

    backend: str
    batched: bool
    swaps: int = 50
    clients: int = 64
    think_s: float = 0.01
    weights_mb: float = 100.0
    put_every_s: float = 0.1
    warm_up_s: float = 2.0


@dataclass(kw_only=True)
class Outcome:
    """What a run has shown; `base`: at rest with one version, before the first swap.

    Of each swap `rests` has what the server held at rest afterwards, and `peaks_mb` the most memory meanwhile.
    """

    case: Case
    base: Residue
    rests: list[Residue] = field(default_factory=list)
    peaks_mb: list[float] = field(default_factory=list)
    answers: Tally = field(default_factory=Tally)
    puts: Tally = field(default_factory=Tally)

    @property
    def over_two_versions_mb(self) -> float:
        """How far the peak was above two versions; negative: below."""
        weights_mb = self.case.weights_mb if self.case.backend != "emulated" else 0.0
        return max(self.peaks_mb) - self.base.resident_mb - weights_mb

    def __str__(self) -> str:
        growth = growth_of(range(len(self.rests)), self.rests, fewest=SETTLED_MIN)
        return (
            f"{self.case.backend}, {'batched' if self.case.batched else 'not batched'}: {len(self.rests)} swaps; "
            f"answers {self.answers}; PUTs {self.puts}; "
            f"peak {self.over_two_versions_mb:+.1f} MB beside two versions (bar: {SLACK_MB:+g}); "
            f"a swap, 95 %: {in_words(growth)}"
        )


class Availability:
    """When may which version have answered? A window opens where it is asked for and ends where it is seen gone."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.windows: dict[int, list[list[float]]] = defaultdict(list)

    def asked(self, version: int) -> None:
        self.windows[version].append([time.monotonic(), math.inf])

    def gone(self, version: int) -> None:
        self.windows[version][-1][1] = time.monotonic()

    def check(self, x: float, values: list[float], sent_s: float, done_s: float) -> str:
        """A `checked_clients.Check`."""
        version = version_of(self._backend, x, values)
        if version is None:
            return f"no version answers {x} with {values}"
        if any(begin_s <= done_s and sent_s <= end_s for begin_s, end_s in self.windows.get(version, ())):
            return ""
        return f"version {version} answered, which was not available"


class SwappedServer:
    """A server with one model "m", whose versions come and go."""

    def __init__(self, case: Case, base: Path, server: ServerProcess, writers: ProcessPoolExecutor) -> None:
        self._case = case
        self._base = base
        self._writers = writers
        self._control = GrpcChannel(server.grpc_port)
        self._rest = httpx.AsyncClient(base_url=server.rest.base_url, timeout=30, trust_env=False)
        self._tuning = asyncio.Lock()
        self._tuned = itertools.cycle(TUNED[case.batched])
        self.pid = server.pid
        self.puts = Tally()
        self.availability = Availability(case.backend)
        self.current, self.previous, self._newest = 1, 1, 1
        self.availability.asked(1)

    async def close(self) -> None:
        await self._control.close()
        await self._rest.aclose()

    async def swap(self, way: str) -> None:
        """Let another version take over; returns when all others have ended."""
        before = self.current
        target = self.previous if way == "back" else self._newest + 1
        if way == "named":
            await self._reload(before)  # or the folder alone would make it the latest
        self.availability.asked(target)
        if way != "back":
            await self._bring(target)
        if way != "folder":
            await self._reload(None if way == "latest" else target)
        await asyncio.wait_for(self._taken_over(before, target), SWAP_LIMIT_S)
        self.current, self.previous = target, before
        for folder in (self._base / "m").iterdir():
            if int(folder.name) not in {target, before}:
                shutil.rmtree(folder)

    async def tune_on(self) -> None:
        """Put one set of parameters after the other in force, until cancelled."""
        while True:
            async with self._tuning:
                await self._put(next(self._tuned))
            await asyncio.sleep(self._case.put_every_s)

    async def at_rest(self) -> Residue:
        """What is held under the first parameters, when those before have drained."""
        async with self._tuning:
            await self._put(TUNED[self._case.batched][0])
            residue = residue_of(self.pid, time.monotonic())
            unchanged = 0
            while unchanged < 3:
                await asyncio.sleep(_POLL_S)
                before, residue = residue, residue_of(self.pid, time.monotonic())
                unchanged = unchanged + 1 if residue.threads == before.threads else 0
            return residue

    async def _put(self, parameters: dict[str, Any]) -> None:
        answer = await self._rest.put("/v1/tuning/batching_parameters", json=parameters)
        self.puts.note(
            "good" if answer.status_code == 200 else "refused", answer.text * (answer.status_code != 200)
        )

    async def _bring(self, version: int) -> None:
        """Write a version, in another process, and move it into place."""
        arguments = str(self._base / "new"), version, int(self._case.weights_mb * 1e6)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writers, write_version, self._case.backend, *arguments)
        (self._base / "new").rename(self._base / "m" / str(version))
        self._newest = version

    async def _reload(self, version: int | None) -> None:
        """Ask for one version by its number, or for the latest."""
        method = "ModelService/HandleReloadConfigRequest"
        answer = await self._control.ask(method, reload_request(self._base / "m", version))
        if (said := ReloadConfigResponse.FromString(answer).status).error_code:
            raise RuntimeError(f"reload: {said}")

    async def _taken_over(self, before: int, target: int) -> None:
        replaced = False
        while True:
            listed = (await self._rest.get("/v1/models/m")).json()["model_version_status"]
            states = {int(status["version"]): status["state"] for status in listed}
            if states.get(before) != "AVAILABLE" and not replaced:
                self.availability.gone(before)
                replaced = True
            if states.get(target) == "AVAILABLE" and states.get(before, "END") == "END":
                return
            await asyncio.sleep(_POLL_S)


async def swap_versions(case: Case, base: Path, writers: ProcessPoolExecutor) -> Outcome:
    """One run; `base` is an empty directory."""
    (base / "m").mkdir()
    first = str(base / "m" / "1"), 1, int(case.weights_mb * 1e6)
    await asyncio.get_running_loop().run_in_executor(writers, write_version, case.backend, *first)
    flags = ["--enable_tuning_api", NO_TIMEOUT]
    if case.batched:
        (base / "batching.txt").write_text(_STARTED_WITH)
        flags += ["--enable_batching", f"--batching_parameters_file={base / 'batching.txt'}"]
    with ServerProcess(base / "m", *flags) as process:
        server = SwappedServer(case, base, process, writers)
        ports, check = (process.grpc_port, process.rest_port), server.availability.check
        clients = ClosedClients(ports, case.clients, think_s=case.think_s, check=check)
        tuner = asyncio.ensure_future(server.tune_on())
        try:
            await asyncio.sleep(case.warm_up_s)
            outcome = Outcome(case=case, base=await server.at_rest(), answers=clients.tally, puts=server.puts)
            for way in itertools.islice(itertools.cycle(WAYS), case.swaps):
                forget_peak(server.pid)
                await server.swap(way)
                outcome.peaks_mb.append(peak_mb(server.pid))
                outcome.rests.append(await server.at_rest())
                print(f"{way}: {outcome.rests[-1]}, {outcome.peaks_mb[-1]:.0f} MB at most", file=sys.stderr)
        finally:
            tuner.cancel()
            await asyncio.gather(tuner, return_exceptions=True)
            await server.close()
            await clients.stop()
        return outcome


def new_writers() -> ProcessPoolExecutor:
    """One process that writes the versions: a framework stays out of the clients' one."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", choices=installed_backends(), action="append")
    arguments.add_argument("--batching", choices=("on", "off"), action="append")
    arguments.add_argument("--swaps", type=int, default=Case.swaps)
    arguments.add_argument("--weights-mb", type=float, default=Case.weights_mb)
    given = arguments.parse_args()
    cases = itertools.product(given.backend or installed_backends(), given.batching or ("on", "off"))
    with new_writers() as writers, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for backend, batching in cases:
            batched, weights_mb = batching == "on", given.weights_mb
            case = Case(backend=backend, batched=batched, swaps=given.swaps, weights_mb=weights_mb)
            with tempfile.TemporaryDirectory() as directory:
                print(runner.run(swap_versions(case, Path(directory), writers)), flush=True)


if __name__ == "__main__":
    main()
