"""Is any answer lost or wrong, and does anything stay behind, while the versions of a model replace each other?

    python tests/benchmarks/server/version_swaps.py [--backend onnx] [--batching on] [--swaps 50] [--weights-mb 100]
    python tests/benchmarks/server/version_swaps.py --all    # TensorFlow, ONNX, PyTorch, batched and not: a line each

A model of 100 MB, 64 clients (REST and gRPC, think time 10 ms), PUTs of batching parameters all the while. A version
comes as a new folder, by a reload that names it, by a reload back to the one before, or by a reload to the latest.
The bars: every answer good and of a version that was available meanwhile; resident memory never above that of two
versions and SLACK_MB; memory at rest, threads and descriptors without a slope.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import uvloop

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from batchtune.wire.tfserving.messages import ReloadConfigRequest, ReloadConfigResponse
from tests.benchmarks.server.checked_clients import ClosedClients, GrpcChannel, Tally
from tests.benchmarks.server.server_residue import Residue, forget_peak, peak_mb, residue_of
from tests.benchmarks.server.version_models import installed_backends, version_of, write_version
from tests.benchmarks.server.version_outcome import Case, Outcome, Swap, report, summary
from tests.server.server_process import ServerProcess

FRAMEWORKS = ("tensorflow", "onnx", "torch")
SWAP_LIMIT_S = 600.0
WAYS = ("folder", "named", "back", "latest")
_STARTED_WITH = "max_batch_size { value: 16 } max_enqueued_batches { value: 100000 }"
NO_TIMEOUT = "--rest_api_timeout_in_ms=600000"
"""A machine that pauses both server and clients is not to make answers fail."""
_POLL_S = 0.03
_logger = logging.getLogger(__name__)
_QUEUE = {"max_enqueued_batches": 100_000}
TUNED: dict[bool, list[dict[str, Any]]] = {
    True: [
        {**_QUEUE, "batch_scheduler": "shared", "max_batch_size": 16, "num_batch_threads": 2},
        {**_QUEUE, "max_batch_size": 8, "batch_timeout_micros": 2000, "num_batch_threads": 1},
        {**_QUEUE, "batch_scheduler": "shared", "max_batch_size": 32, "num_batch_threads": 4},
        # The streaming scheduler refuses a batch for which no thread is free: one for each client.
        {
            "batch_scheduler": "streaming",
            "max_batch_size": 4,
            "batch_timeout_micros": 1000,
            "num_batch_threads": 64,
        },
        {"enable_batching": False},
    ],
    False: [{"enable_batching": False}],
}


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
        self._control.close()
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
        request = ReloadConfigRequest()
        model = request.config.model_config_list.config.add(name="m", base_path=str(self._base / "m"))
        model.model_platform = "tensorflow"
        if version is not None:
            model.model_version_policy.specific.versions.append(version)
        method = "ModelService/HandleReloadConfigRequest"
        status, message, text = await self._control.ask(method, request.SerializeToString())
        said = ReloadConfigResponse.FromString(message).status if not status else text
        if status or said.error_code:
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
        clients = ClosedClients(
            (process.grpc_port, process.rest_port),
            case.clients,
            think_s=case.think_s,
            check=server.availability.check,
        )
        clients.start()
        tuner = asyncio.ensure_future(server.tune_on())
        try:
            await asyncio.sleep(case.warm_up_s)
            outcome = Outcome(case=case, base=await server.at_rest(), answers=clients.tally, puts=server.puts)
            for way in itertools.islice(itertools.cycle(WAYS), case.swaps):
                forget_peak(server.pid)
                await server.swap(way)
                peak = peak_mb(server.pid)
                outcome.swaps.append(Swap(way=way, rest=await server.at_rest(), peak_mb=peak))
                rest = outcome.swaps[-1].rest
                print(
                    f"{case}: swap {len(outcome.swaps)} of {case.swaps} ({way}): {rest.resident_mb:.0f} MB at rest, "
                    f"{peak:.0f} at most, {rest.threads} threads, {outcome.answers.failed} failed",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            tuner.cancel()
            await asyncio.gather(tuner, return_exceptions=True)
            await server.close()
            await clients.stop()
        outcome.lines = process.lines
        return outcome


def new_writers() -> ProcessPoolExecutor:
    """One process that writes the versions: a framework stays out of the clients' one."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", choices=installed_backends(), action="append")
    arguments.add_argument("--batching", choices=("on", "off"), action="append")
    arguments.add_argument("--all", action="store_true", help=f"{', '.join(FRAMEWORKS)}; a line for each run")
    arguments.add_argument("--swaps", type=int, default=Case.swaps)
    arguments.add_argument("--clients", type=int, default=Case.clients)
    arguments.add_argument("--think-ms", type=float, default=1000 * Case.think_s)
    arguments.add_argument("--weights-mb", type=float, default=Case.weights_mb)
    options = arguments.parse_args()
    frameworks = [name for name in FRAMEWORKS if name in installed_backends()]
    with new_writers() as writers, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for backend in options.backend or (frameworks if options.all else installed_backends()):
            for batching in options.batching or ("on", "off"):
                case = Case(
                    backend=backend,
                    batched=batching == "on",
                    swaps=options.swaps,
                    clients=options.clients,
                    think_s=options.think_ms / 1000,
                    weights_mb=options.weights_mb,
                )
                print(run(case, runner, writers, in_one_line=options.all), flush=True)


def run(case: Case, runner: asyncio.Runner, writers: ProcessPoolExecutor, *, in_one_line: bool) -> str:
    """What one run has to say; of one that fails why, so that the others follow."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        try:
            outcome = runner.run(swap_versions(case, Path(directory), writers))
        except Exception as error:
            _logger.exception("%s failed", case)
            return f"{case}: failed: {type(error).__name__}: {error}"
    return summary(outcome, time.monotonic() - began_s) if in_one_line else report(outcome)


if __name__ == "__main__":
    main()
