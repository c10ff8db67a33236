"""Clients over REST and gRPC whose questions have answers that can be checked, and a tally of those that were wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import grpc
import numpy as np
from grpc.aio import AioRpcError

from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.server.hostile_attacks import post

GIVEN_UP_S = 20.0
_FAULTS_KEPT = 20

Check = Callable[[float, list[float], float, float], str]
"""(x, the answer's values, sent, done) -> what is wrong with it, "" for a good one; times of time.monotonic()."""


class Channel(Protocol):
    async def predict(self, x: float) -> list[float]:
        """The values that the model answers to one row.

        Raises:
            OSError, EOFError: The connection was lost.
            AioRpcError, ValueError: The server refused.
        """

    async def close(self) -> None: ...


class RestChannel:
    """One HTTP/1.1 connection, dialled anew where the server has closed it between two requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def predict(self, x: float) -> list[float]:
        if self._streams is None or self._streams[0].at_eof():
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(post("/v1/models/m:predict", json.dumps({"instances": [[x]]}).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(size)
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"{head[:12]!r}: {body[:200]!r}")
        row: list[float] = json.loads(body)["predictions"][0]
        return row

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class GrpcChannel:
    """One HTTP/2 connection for unary calls."""

    def __init__(self, port: int) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]  # or all would share a connection
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own)

    async def ask(self, method: str, message: bytes) -> bytes:
        """Call "Service/Method" of tensorflow.serving once."""
        answer: bytes = await self._channel.unary_unary(f"/tensorflow.serving.{method}")(message)
        return answer

    async def predict(self, x: float) -> list[float]:
        answer = await self.ask("PredictionService/Predict", _predict_request(x))
        values: list[float] = decode_predict_response(answer)["y"][0].tolist()
        return values

    async def close(self) -> None:
        await self._channel.close()


@cache
def _predict_request(x: float) -> bytes:
    return encode_predict_request("m", "", {"x": np.array([[x]], np.float32)})


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
        words = [f"{count:,} {name}" for name, count in sorted(self.counts.items())]
        words += [f"{count} × {fault}" for fault, count in self.faults.most_common()]
        return ", ".join(words)


async def ask_once(channel: Channel, x: float, check: Check, tally: Tally) -> None:
    """One checked request; never raises for what the server does."""
    sent_s = time.monotonic()
    try:
        values = await channel.predict(x)
    except (OSError, EOFError) as error:
        tally.note("lost", str(error))
        return
    except (AioRpcError, ValueError, LookupError) as error:
        tally.note("refused", error.details() or "" if isinstance(error, AioRpcError) else str(error))
        return
    done_s = time.monotonic()
    tally.slowest_s = max(tally.slowest_s, done_s - sent_s)
    fault = check(x, values, sent_s, done_s)
    tally.note("wrong" if fault else "good", fault)


async def end(tasks: Iterable[asyncio.Task[None]], channels: Iterable[Channel], tally: Tally) -> None:
    """Wait for the answers under way; those that do not come within GIVEN_UP_S are lost."""
    if waited_for := list(tasks):
        ended, late = await asyncio.wait(waited_for, timeout=GIVEN_UP_S)
        for task in ended:
            task.result()
        for task in late:
            task.cancel()
            tally.note("lost", f"no answer within {GIVEN_UP_S:g} s")
    for channel in channels:
        await channel.close()


class ClosedClients:
    """So many clients, half REST, half gRPC (eight to a connection), each with one request at a time."""

    def __init__(self, ports: tuple[int, int], count: int, *, think_s: float, check: Check) -> None:
        grpc_port, rest_port = ports
        rest = [RestChannel(rest_port) for _ in range((count + 1) // 2)]
        grpc = [GrpcChannel(grpc_port) for _ in range((count // 2 + 7) // 8)]
        self._opened: list[Channel] = [*rest, *grpc]
        self._think_s, self._check, self._stopped = think_s, check, False
        self.tally = Tally()
        asking: list[Channel] = [*rest, *(grpc[index // 8] for index in range(count // 2))]
        self._tasks = [
            asyncio.ensure_future(self._ask_on(channel, float(number)))
            for number, channel in enumerate(asking)
        ]

    async def stop(self) -> None:
        self._stopped = True
        await end(self._tasks, self._opened, self.tally)

    async def _ask_on(self, channel: Channel, x: float) -> None:
        while not self._stopped:
            await ask_once(channel, x, self._check, self.tally)
            await asyncio.sleep(self._think_s)
