"""Could a server stay up for months: under 80 % load and a crowd that troubles it, does any request fail or anything grow?

    python tests/benchmarks/server/soak.py [--minutes 30] [--rate 800]

The server has an emulated device whose limit is 1,000 requests/s. Innocent clients, half REST, half gRPC, ask by a
Poisson schedule and check each answer; the crowd connects and disconnects, reads slowly, is refused,
reloads, swaps versions and puts parameters. The bars: no innocent request fails; after the first fifth resident
memory grows by no more than 1 MB an hour, threads and descriptors not at all. A line a minute, then the conclusion,
also of a run that is interrupted (Ctrl-C) or whose server ends.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import uvloop
from grpc.aio import AioRpcError

sys.path += [str(Path(__file__).parents[3])]

from batchtune.wire.http2 import PREFACE, Setting, settings_frame
from batchtune.wire.tfserving.messages import GetModelMetadataRequest, ReloadConfigRequest
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.server.checked_clients import GrpcChannel, RestChannel, Tally, ask_once, end
from tests.benchmarks.server.front_ends import process_cpu_s
from tests.benchmarks.server.server_residue import Residue, growth_of, in_words, residue_of
from tests.server.hostile_attacks import data, head
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


METRICS = "/monitoring/prometheus/metrics"
_QUEUE = {"max_enqueued_batches": 100_000, "max_batch_size": 32, "batch_scheduler": "shared"}
TUNED: list[dict[str, Any]] = [
    {**_QUEUE, "batch_timeout_micros": 0, "num_batch_threads": 1},
    {**_QUEUE, "batch_timeout_micros": 2000, "num_batch_threads": 2},
    {**_QUEUE, "num_batch_threads": 2},
]
_WINDOW_SHUT = settings_frame({Setting.HEADER_TABLE_SIZE: 0, Setting.INITIAL_WINDOW_SIZE: 0})


def reload_request(base_path: Path, version: int | None = None) -> bytes:
    """Of the model "m": one version by its number, or the latest."""
    request = ReloadConfigRequest()
    model = request.config.model_config_list.config.add(name="m", base_path=str(base_path))
    model.model_platform = "tensorflow"
    if version is not None:
        model.model_version_policy.specific.versions.append(version)
    return request.SerializeToString()


def metadata_call(stream_id: int) -> bytes:
    request = GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "m"
    path = "/tensorflow.serving.PredictionService/GetModelMetadata"
    return head(stream_id, path) + data(stream_id, request.SerializeToString())


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


class Crowd:
    """Who troubles the server, which has one emulated model "m" below `base`; `acts` counts what each has done.

    None of it asks for much of the device, so that all of the innocents' load can be served.
    """

    def __init__(self, base: Path, ports: tuple[int, int], device: Emulated) -> None:
        self._base, self._device = base, device
        self._grpc_port, self._rest_port = ports
        self._random = random.Random(1)
        self._versions, self._tuned = itertools.count(2), itertools.cycle(TUNED)
        self._rest = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._rest_port}", trust_env=False)
        self._calls = GrpcChannel(self._grpc_port)
        self.acts: Counter[str] = Counter()
        every_s: dict[Callable[[], Awaitable[None]], float] = {
            self._come_and_go: 0.3,
            self._read_slowly: 1.0,
            self._be_refused: 0.1,
            self._scrape: 1.0,
            self._put: 2.0,
            self._reload: 5.0,
            self._swap: 20.0,
        }
        self._tasks = {asyncio.ensure_future(self._repeat(act, pause_s)) for act, pause_s in every_s.items()}

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                self.acts[f"ended by {ended!r}"] += 1
        await self._rest.aclose()
        await self._calls.close()

    async def _repeat(self, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """After its pause, seconds on average; of slow readers there are several at once."""
        name = act.__name__.removeprefix("_")
        while True:
            await asyncio.sleep(self._random.expovariate(1 / pause_s))
            if act == self._read_slowly:
                reader = asyncio.ensure_future(self._read_slowly())
                self._tasks.add(reader)
                reader.add_done_callback(self._tasks.discard)
            else:
                try:
                    await act()
                except (OSError, httpx.HTTPError, AioRpcError) as error:
                    self.acts[f"{name}: {error!r}"] += 1
                    continue
            self.acts[name] += 1

    async def _come_and_go(self) -> None:
        """Connections that ask and leave, leave at once, or leave in the middle of a request."""
        asked = {
            self._rest_port: b"GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n",
            self._grpc_port: PREFACE + settings_frame({}) + metadata_call(1),
        }
        for port, request in list(asked.items()) * 4:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request[: self._random.choice((0, len(request) // 2, len(request)))])
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(64), self._random.random() * 0.02)
            if self._random.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def _read_slowly(self) -> None:
        """Ask for much at once, take little of it for some 15 s, leave."""
        over_grpc = self._random.random() < 0.5
        loop = asyncio.get_running_loop()
        asked = f"GET {METRICS} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 100
        if over_grpc:
            asked = PREFACE + _WINDOW_SHUT + b"".join(map(metadata_call, range(1, 200, 2)))
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            try:
                await loop.sock_connect(
                    slow, ("127.0.0.1", self._grpc_port if over_grpc else self._rest_port)
                )
                with suppress(TimeoutError):
                    await asyncio.wait_for(loop.sock_sendall(slow, asked), 5)
                for _ in range(self._random.randrange(30)):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(loop.sock_recv(slow, 512), 1)
                    await asyncio.sleep(0.5)
            except OSError:
                self.acts["slow readers that the server sent away"] += 1

    async def _be_refused(self) -> None:
        name = self._random.randrange(1000)
        wide = [1.0] * self._random.randrange(2, 9)
        bodies = [
            ("m", f'{{"instances": [{wide}]}}'),
            ("m", '{"instances": [[1.0'),
            ("m", '{"instances": [["a"]]}'),
            (f"n{name}", '{"instances": [[1.0]]}'),
            ("m/labels/none", '{"instances": [[1.0]]}'),
        ]
        model, body = self._random.choice(bodies)
        await self._rest.post(f"/v1/models/{model}:predict", content=body)
        for model, signature in (("m", ""), (f"n{name}", ""), ("m", f"s{name}")):
            request = encode_predict_request(model, signature, {"x": np.array([wide], np.float32)})
            with suppress(AioRpcError):
                await self._calls.ask("PredictionService/Predict", request)

    async def _scrape(self) -> None:
        await self._rest.get(METRICS)

    async def _put(self) -> None:
        answer = await self._rest.put("/v1/tuning/batching_parameters", json=next(self._tuned))
        answer.raise_for_status()

    async def _reload(self) -> None:
        await self._calls.ask("ModelService/HandleReloadConfigRequest", reload_request(self._base / "m"))

    async def _swap(self) -> None:
        """A new version; folders of versions before the one that it replaces go."""
        version = next(self._versions)
        (self._device.write(self._base / "new") / "1").rename(self._base / "m" / str(version))
        for folder in (self._base / "m").iterdir():
            if int(folder.name) < version - 1:
                shutil.rmtree(folder)


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
