"""Who troubles a server beside its innocent clients: connects and disconnects, slow readers, refusals, reloads, PUTs.

None of it asks for much of the device, so that all of the innocents' load can be served.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from grpc.aio import AioRpcError

from batchtune.wire.http2 import PREFACE, Setting, settings_frame
from batchtune.wire.tfserving.messages import GetModelMetadataRequest, ReloadConfigRequest
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.benchmarks.emulated import Emulated
from tests.benchmarks.server.checked_clients import GrpcChannel
from tests.server.hostile_attacks import data, head

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


class Crowd:
    """All of them, on one server with one emulated model "m" below `base`; `acts` counts what each has done."""

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
