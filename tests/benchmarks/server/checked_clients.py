"""Who asks a server, over REST and gRPC, questions whose answers can be checked, and notes each answer that is wrong?"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import orjson

from batchtune.wire.grpc.client_connection import GrpcClientConnection, PreparedCall, prepare_call
from batchtune.wire.http1_client import AnswerHeads, Http1ClientConnection
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GIVEN_UP_S = 20.0
CLOSING_S = 0.01
"""Some turns of the loop, in which connections are closed."""
_FAULTS_KEPT = 20

Check = Callable[[float, list[float], float, float], str]
"""(x, the answer's values, sent, done) -> what is wrong with it, "" for a good one; times of time.monotonic()."""


def http_request(port: int, path: str, body: bytes = b"", *, method: str = "POST", extra: str = "") -> bytes:
    """A whole HTTP/1.1 request."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class RestChannel:
    """One HTTP/1.1 connection, dialled anew where the server has closed it between two requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._heads = AnswerHeads(1_024)
        self._connection: Http1ClientConnection | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Status and body; raises ConnectionError."""
        if self._connection is None or not self._connection.reusable:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                lambda: Http1ClientConnection(self, self._heads), "127.0.0.1", self.port
            )
        self._answer = asyncio.get_running_loop().create_future()
        self._connection.send(request, 1, keep_body=True)
        return await self._answer

    async def predict(self, x: float) -> list[float]:
        """The values that the model answers to one row; raises ValueError for a refusal, ConnectionError."""
        body = json.dumps({"instances": [[x]]}).encode()
        status, answer = await self.exchange(http_request(self.port, "/v1/models/m:predict", body))
        if status != 200:
            raise ValueError(f"HTTP {status}: {answer[:200].decode('utf-8', 'replace')}")
        row: list[float] = orjson.loads(answer)["predictions"][0]
        return row

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abandon()

    def ready(self, connection: Http1ClientConnection) -> None:
        """Nothing: `exchange` waits for the connection."""

    def first_byte(self, connection: Http1ClientConnection, tag: int) -> None:
        """Nothing: only whole answers are looked at."""

    def answered(self, connection: Http1ClientConnection, tag: int, status: int, body: bytes | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body or b""))

    def lost(self, connection: Http1ClientConnection, tag: int, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(reason))


class GrpcChannel:
    """One HTTP/2 connection for unary calls, dialled anew where it was lost."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection: GrpcClientConnection | None = None
        self._calls: dict[int, asyncio.Future[tuple[int, bytes, str]]] = {}
        self._dialling = asyncio.Lock()
        self._tag = 0
        self._prepared: dict[float, PreparedCall] = {}

    async def exchange(self, call: PreparedCall) -> tuple[int, bytes, str]:
        """Status, message and its text; raises ConnectionError."""
        async with self._dialling:
            if self._connection is None:
                await self._dial()
        if self._connection is None:
            raise ConnectionError("the connection was lost at once")
        self._tag += 1
        answer = self._calls[self._tag] = asyncio.get_running_loop().create_future()
        self._connection.call(call, self._tag)
        self._connection.flush()
        return await answer

    async def ask(self, method: str, message: bytes) -> tuple[int, bytes, str]:
        """Call "Service/Method" of tensorflow.serving once."""
        call = prepare_call(f"/tensorflow.serving.{method}", f"127.0.0.1:{self.port}", message)
        return await self.exchange(call)

    async def predict(self, x: float) -> list[float]:
        """The values that the model answers to one row; raises ValueError for a refusal, ConnectionError."""
        if x not in self._prepared:
            request = encode_predict_request("m", "", {"x": np.array([[x]], np.float32)})
            self._prepared[x] = prepare_call(PREDICT, f"127.0.0.1:{self.port}", request)
        status, message, text = await self.exchange(self._prepared[x])
        if status:
            raise ValueError(f"gRPC {status}: {text[:200]}")
        values: list[float] = decode_predict_response(message)["y"][0].tolist()
        return values

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def on_ready(_connection: GrpcClientConnection) -> None:
            if not ready.done():
                ready.set_result(None)

        def on_lost(connection: GrpcClientConnection, tags: list[int], reason: str) -> None:
            if connection is self._connection:
                self._connection = None
            if not ready.done():
                ready.set_exception(ConnectionError(reason))
            for answer in map(self._calls.pop, tags):
                if not answer.done():  # it is, where its asker was cancelled
                    answer.set_exception(ConnectionError(reason))

        _, self._connection = await loop.create_connection(
            lambda: GrpcClientConnection(self._done, on_lost, on_ready), "127.0.0.1", self.port
        )
        await ready

    def _done(self, tag: int, status: int, message: bytes, text: str) -> None:
        answer = self._calls.pop(tag)
        if not answer.done():
            answer.set_result((status, message, text))


class Channel(Protocol):
    async def predict(self, x: float) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came back: `lost` has no answer, `refused` an error, `wrong` other values than the model's."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def note(self, outcome: str, fault: str = "") -> None:
        self.counts[outcome] += 1
        text = f"{outcome}: {fault}"
        if fault and (text in self.faults or len(self.faults) < _FAULTS_KEPT):
            self.faults[text] += 1

    @property
    def failed(self) -> int:
        return self.counts.total() - self.counts["good"]

    def __str__(self) -> str:
        words = ", ".join(f"{self.counts[name]:,} {name}" for name in ("good", "lost", "refused", "wrong"))
        return f"{words}; slowest {1000 * self.slowest_s:,.0f} ms"


async def ask_once(channel: Channel, x: float, check: Check, tally: Tally) -> None:
    """One checked request; never raises for what the server does."""
    sent_s = time.monotonic()
    try:
        values = await channel.predict(x)
    except (ConnectionError, OSError) as error:
        tally.note("lost", str(error))
        return
    except (ValueError, LookupError) as error:
        tally.note("refused", str(error))
        return
    done_s = time.monotonic()
    tally.slowest_s = max(tally.slowest_s, done_s - sent_s)
    fault = check(x, values, sent_s, done_s)
    tally.note("wrong" if fault else "good", fault)


class ClosedClients:
    """So many clients, half REST, half gRPC (eight to a connection), each with one request at a time."""

    def __init__(self, ports: tuple[int, int], count: int, *, think_s: float, check: Check) -> None:
        grpc_port, rest_port = ports
        rest = [RestChannel(rest_port) for _ in range((count + 1) // 2)]
        grpc = [GrpcChannel(grpc_port) for _ in range((count // 2 + 7) // 8)]
        self._opened: list[Channel] = [*rest, *grpc]
        self._channels: list[Channel] = [*rest, *(grpc[index // 8] for index in range(count // 2))]
        self._think_s = think_s
        self._check = check
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self.tally = Tally()

    def start(self) -> None:
        self._tasks = [
            asyncio.ensure_future(self._ask_on(channel, float(number)))
            for number, channel in enumerate(self._channels)
        ]

    async def stop(self) -> None:
        """Wait for the answers under way; those that do not come within GIVEN_UP_S are lost."""
        self._stopped = True
        ended, late = await asyncio.wait(self._tasks, timeout=GIVEN_UP_S)
        for task in ended:
            task.result()
        for task in late:
            task.cancel()
            self.tally.note("lost", f"no answer within {GIVEN_UP_S:g} s")
        for channel in self._opened:
            channel.close()
        await asyncio.sleep(CLOSING_S)

    async def _ask_on(self, channel: Channel, x: float) -> None:
        while not self._stopped:
            await ask_once(channel, x, self._check, self.tally)
            await asyncio.sleep(self._think_s)
