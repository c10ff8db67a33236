"""Models held in memory, and a REST or gRPC front end over them on a loop of its own thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import requests
import uvloop
from numpy.typing import NDArray

from batchtune.server.grpc_api.services import make_grpc_api
from batchtune.server.metrics import Metrics
from batchtune.server.models.model_config import models_of
from batchtune.server.models.servable import VersionStatus
from batchtune.server.rest.connection import serve_rest
from batchtune.server.rest.parser import RestLimits
from batchtune.server.rest.rest_api import RestApi
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.grpc.server_call import GrpcCall
from batchtune.wire.grpc.server_connection import serve
from batchtune.wire.listener import Listener
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import SignatureDefMap
from batchtune.wire.tfserving.tensors import signature_to_def

PREDICT = "/v1/models/m:predict"
REQUEST = b'POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{"instances": [1.0]}'
Run = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]


def spec(name: str, dtype: str = "float32", *shape: int | None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(None, *shape))


def signature(
    name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], method: str = "predict"
) -> Signature:
    return Signature(
        name=name,
        method_name=f"tensorflow/serving/{method}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


HALF_PLUS_TWO = signature("serving_default", [spec("x")], [spec("y")])


def half_plus_two(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {"y": inputs["x"] / np.float32(2) + np.float32(2)}


class FakeServable:
    """A version that runs on the loop, one turn after it was asked; `hold` keeps the answers back."""

    def __init__(
        self, runs: dict[str, tuple[Signature, Run]] | None = None, *, name: str = "m", version: int = 123
    ) -> None:
        runs = runs or {"serving_default": (HALF_PLUS_TWO, half_plus_two)}
        self.name = name
        self.version = version
        self.signatures = {key: value[0] for key, value in runs.items()}
        self.metadata = SignatureDefMap(
            signature_def={key: signature_to_def(value[0]) for key, value in runs.items()}
        ).SerializeToString()
        self._runs = {key: value[1] for key, value in runs.items()}
        self.error: StatusError | None = None
        self.hold = False
        self.held: list[Callable[[], None]] = []
        self.asked: list[tuple[str, dict[str, NDArray[Any]], tuple[str, ...] | None, int | None]] = []

    def submit(
        self,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Callable[[Any, StatusError | None], None],
    ) -> None:
        self.asked.append((signature_name, inputs, output_names, deadline_ns))
        if self.error is not None and self.error.code == "UNAVAILABLE":
            raise self.error
        if self.error is not None:
            answer = (None, self.error)
        else:
            outputs = self._runs[signature_name](inputs)
            wanted = output_names or tuple(one.name for one in self.signatures[signature_name].outputs)
            answer = ({name: outputs[name] for name in wanted}, None)
        if self.hold:
            self.held.append(lambda: done(*answer))
        else:
            asyncio.get_running_loop().call_soon(done, *answer)

    def release(self) -> None:
        """Answer what was held; on the loop's thread."""
        held, self.held = self.held, []
        for one in held:
            one()


class FakeModels:
    """One model with one version and a label for it."""

    def __init__(self, servable: FakeServable | None = None) -> None:
        self.servable = servable or FakeServable()
        self.reloaded: list[Any] = []
        self.reload_error: StatusError | None = None
        self.on_reload: Callable[[], None] = lambda: None

    def find(self, name: str, *, version: int | None = None, label: str | None = None) -> FakeServable:
        if not name:
            raise StatusError("INVALID_ARGUMENT", "ModelSpec has no name specified.")
        if label not in {None, "stable"}:
            raise StatusError("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        if name != self.servable.name or version not in {None, self.servable.version}:
            wanted = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise StatusError("NOT_FOUND", f"Servable not found for request: {wanted}")
        return self.servable

    def statuses(self, name: str, *, version: int | None = None) -> list[VersionStatus]:
        if name != self.servable.name:
            raise StatusError("NOT_FOUND", f"Could not find any versions of model {name}")
        if version not in {None, self.servable.version}:
            raise StatusError("NOT_FOUND", f"Could not find version {version} of model {name}")
        return [VersionStatus(version=self.servable.version, state="AVAILABLE")]

    def reload_config(self, config: Any) -> None:
        if self.reload_error is not None:
            raise self.reload_error
        models_of(config)
        self.on_reload()
        self.reloaded.append(config)

    def names(self) -> tuple[str, ...]:
        return (self.servable.name,)


class LoopThread:
    """A uvloop in a thread."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=20)

    def call(self, function: Callable[[], Any]) -> Any:
        async def once() -> Any:
            return function()

        return self.run(once())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


@dataclass
class RunningRest:
    """A REST front end that serves now."""

    thread: LoopThread
    server: Listener
    api: RestApi
    models: FakeModels
    metrics: Metrics

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, body: Any = b"", path: str = PREDICT, *, method: str = "POST", **headers: str
    ) -> requests.Response:
        """Ask by requests; `body` is JSON unless it is bytes, a header is written with _ for -."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return requests.request(method, self.url + path, data=data, headers=named, timeout=60)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def exchange(self, *pieces: bytes, answers: int = 1) -> bytes:
        """Send raw bytes and read until so many answers have come whole, or the server has closed."""
        received = b""
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
            while count_answers(received) < answers and (chunk := client.recv(65536)):
                received += chunk
        return received


@contextmanager
def running_rest(
    servable: FakeServable | None = None, *, limits: RestLimits | None = None, **flags: Any
) -> Iterator[RunningRest]:
    """Serve `servable` over REST on a free port of the loopback."""
    thread = LoopThread()
    models, metrics = FakeModels(servable), Metrics()
    own = {name: flags.pop(name) for name in ("monitoring_path", "tuning") if name in flags}
    api = RestApi(models, metrics, ServerFlags(**flags), **own)
    server = thread.run(serve_rest(api, "127.0.0.1", 0, limits=limits))
    try:
        yield RunningRest(thread, server, api, models, metrics)
    finally:
        thread.run(server.drain(0.2))
        api.close()
        thread.close()


def count_answers(received: bytes) -> int:
    """Whole answers by HTTP/1.1, but for `100 Continue`."""
    count = 0
    while b"\r\n\r\n" in received:
        head, _, rest = received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(rest) < length:
            break
        count += b" 100 " not in head
        received = rest[length:]
    return count


@dataclass
class RunningGrpc:
    """A gRPC front end that serves now."""

    thread: LoopThread
    port: int
    dispatch: Callable[[GrpcCall], None]
    announce_stop: Callable[[], None]
    models: FakeModels
    metrics: Metrics

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def running_grpc(servable: FakeServable | None = None, **flags: Any) -> Iterator[RunningGrpc]:
    """Serve `servable` over gRPC on a free port of the loopback."""
    thread = LoopThread()
    models, metrics = FakeModels(servable), Metrics()
    dispatch, streams, announce_stop = make_grpc_api(
        models, metrics, ServerFlags(enable_grpc_healthcheck_service=True, **flags)
    )
    server = thread.run(serve("127.0.0.1", 0, dispatch, streams=streams))
    try:
        yield RunningGrpc(thread, server.port, dispatch, announce_stop, models, metrics)
    finally:
        thread.call(server.close)
        thread.close()


class RecordedCall(GrpcCall):
    """A call without a connection, which remembers every answer, a second one too."""

    answered: Any = property(lambda _: False, lambda _, value: None)

    def __init__(self, path: str, message: bytes) -> None:
        super().__init__(self, 1, SimpleNamespace(path=path, metadata=()), None)  # type: ignore[arg-type]
        self.message = message
        self.answers: list[tuple[str, Any]] = []

    def send_reply(self, _call: GrpcCall, message: bytes) -> None:
        self.answers.append(("OK", message))

    def send_failure(self, _call: Any, code: str, message: str) -> None:
        self.answers.append((code, message))
