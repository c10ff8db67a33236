"""Who troubles a server beside its innocent clients: connects and disconnects, slow readers, refusals, reloads, PUTs?

None of it asks for much of the device, so that all of the innocents' load can be served.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import socket
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from batchtune.wire import http2 as h2
from batchtune.wire.grpc.client_connection import prepare_call
from batchtune.wire.http2 import Setting
from batchtune.wire.tfserving.messages import GetModelMetadataRequest, ReloadConfigRequest
from batchtune.wire.tfserving.tensors import encode_predict_request
from tests.benchmarks.server.checked_clients import GrpcChannel, RestChannel, http_request

METRICS = "/monitoring/prometheus/metrics"
_QUEUE = {"max_enqueued_batches": 100_000, "max_batch_size": 32}
TUNED: list[dict[str, Any]] = [
    {**_QUEUE, "batch_scheduler": "shared", "batch_timeout_micros": 0, "num_batch_threads": 1},
    {**_QUEUE, "batch_scheduler": "shared", "batch_timeout_micros": 2000, "num_batch_threads": 2},
    {**_QUEUE, "batch_scheduler": "shared", "num_batch_threads": 2},
]
_READ_BYTES = 512
_SLOW_ASKED = 100
_WINDOW_SHUT = h2.settings_frame({Setting.HEADER_TABLE_SIZE: 0, Setting.INITIAL_WINDOW_SIZE: 0})


class Crowd:
    """All of them, on one server with one emulated model "m" below `base`; `acts` counts what each has done."""

    def __init__(self, base: Path, ports: tuple[int, int], write_version: Callable[[Path], None]) -> None:
        self._base = base
        self._grpc_port, self._rest_port = ports
        self._write_version = write_version
        self._random = random.Random(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._versions = itertools.count(2)
        self._tuned = itertools.cycle(TUNED)
        self._rest = defaultdict(lambda: RestChannel(self._rest_port))  # one for each act
        self._calls = GrpcChannel(self._grpc_port)
        self.acts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin; each act is repeated after its pause, seconds on average."""
        acts: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._come_and_go, 0.3),
            (self._read_slowly, 1.0),
            (self._be_refused, 0.1),
            (self._scrape, 1.0),
            (self._put, 2.0),
            (self._reload, 5.0),
            (self._swap, 20.0),
        ]
        self._tasks = [asyncio.ensure_future(self._repeat(act, pause_s)) for act, pause_s in acts]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                self.acts[f"ended by {ended!r}"] += 1
        for channel in self._rest.values():
            channel.close()
        self._calls.close()

    async def _repeat(self, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        readers: set[asyncio.Task[None]] = set()
        name = act.__name__.removeprefix("_")
        while True:
            await asyncio.sleep(self._random.expovariate(1 / pause_s))
            try:
                if act == self._read_slowly:  # several at once
                    readers.add(asyncio.ensure_future(self._read_slowly()))
                    readers = {reader for reader in readers if not reader.done()}
                else:
                    await act()
                self.acts[name] += 1
            except OSError as error:
                self.acts[f"{name}: {error}"] += 1

    async def _come_and_go(self) -> None:
        """Connections that ask and leave, leave at once, or leave in the middle of a request."""
        for number in range(8):
            port = self._rest_port if number % 2 else self._grpc_port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if number % 2:
                asked = http_request(port, "/v1/models/m", method="GET")
            else:
                asked = h2.PREFACE + h2.settings_frame({}) + self._metadata_call(1)
            writer.write(asked[: self._random.choice((0, len(asked) // 2, len(asked)))])
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(64), self._random.random() * 0.02)
            if self._random.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def _read_slowly(self) -> None:
        """Ask for much at once, take little of it for some 15 s, leave."""
        over_grpc = self._random.random() < 0.5
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(slow, ("127.0.0.1", self._grpc_port if over_grpc else self._rest_port))
            asked = http_request(self._rest_port, METRICS, method="GET") * _SLOW_ASKED
            if over_grpc:
                asked = h2.PREFACE + _WINDOW_SHUT + b"".join(map(self._metadata_call, range(1, 200, 2)))
            with suppress(TimeoutError):
                await asyncio.wait_for(loop.sock_sendall(slow, asked), 5)
            for _ in range(self._random.randrange(30)):
                with suppress(TimeoutError):
                    await asyncio.wait_for(loop.sock_recv(slow, _READ_BYTES), 1)
                await asyncio.sleep(0.5)
        except OSError:
            self.acts["slow readers that the server sent away"] += 1
        finally:
            slow.close()

    def _metadata_call(self, stream_id: int) -> bytes:
        request = GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = "m"
        method = "/tensorflow.serving.PredictionService/GetModelMetadata"
        call = prepare_call(method, "m", request.SerializeToString())
        return h2.STREAM_ID.pack(stream_id).join(call.at_once)

    async def _be_refused(self) -> None:
        wrong = {"instances": [[1.0] * self._random.randrange(2, 9)]}
        name = self._random.randrange(1000)
        bodies = {
            "/v1/models/m:predict": [orjson.dumps(wrong), b'{"instances": [[1.0', b'{"instances": [["a"]]}'],
            f"/v1/models/n{name}:predict": [b'{"instances": [[1.0]]}'],
            "/v1/models/m/labels/none:predict": [b'{"instances": [[1.0]]}'],
        }
        path, choices = self._random.choice(list(bodies.items()))
        await self._rest["be_refused"].exchange(
            http_request(self._rest_port, path, self._random.choice(choices))
        )
        inputs = {"x": np.ones((1, self._random.randrange(2, 9)), np.float32)}
        for model, signature in (("m", ""), (f"n{name}", ""), ("m", f"s{name}")):
            request = encode_predict_request(model, signature, inputs)
            await self._calls.ask("PredictionService/Predict", request)

    async def _scrape(self) -> None:
        await self._rest["scrape"].exchange(http_request(self._rest_port, METRICS, method="GET"))

    async def _put(self) -> None:
        body = orjson.dumps(next(self._tuned))
        path = "/v1/tuning/batching_parameters"
        self._expect(
            "put", await self._rest["put"].exchange(http_request(self._rest_port, path, body, method="PUT"))
        )

    async def _reload(self) -> None:
        request = ReloadConfigRequest()
        model = request.config.model_config_list.config.add(name="m", base_path=str(self._base / "m"))
        model.model_platform = "tensorflow"
        method = "ModelService/HandleReloadConfigRequest"
        status, _, text = await self._calls.ask(method, request.SerializeToString())
        self._expect("reload", (200 if status == 0 else status, text.encode()))

    async def _swap(self) -> None:
        """A new version; folders of versions before the one that it replaces go."""
        version = next(self._versions)
        self._write_version(self._base / "new")
        (self._base / "new").rename(self._base / "m" / str(version))
        for folder in (self._base / "m").iterdir():
            if int(folder.name) < version - 1:
                shutil.rmtree(folder)

    def _expect(self, act: str, answer: tuple[int, bytes]) -> None:
        if answer[0] != 200:
            self.acts[f"{act} failed: {answer[1].decode()}"] += 1
