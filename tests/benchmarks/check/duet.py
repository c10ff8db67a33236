"""How well do two servers' CPU seconds a request compare when the load alternates between them in short slices?

Two bundled servers of an emulated device, alive at once on CPU 0, the client on CPU 1; a closed loop of 16 gRPC clients. In a
pair of slices each server gets the load once, in an order drawn at random; at the end of a slice nothing is sent until the last
answer has come and GAP_MS more have passed, and the CPU clocks of both servers are read there. `both`: both are loaded at once,
and the clocks are read every so many ms. For each launch and length of slice: pairs, CPU µs a request of each server, the
median and the standard deviation of the log ratio, its correlation from pair to pair, the standard error of the mean by blocks
of 1 s, the seconds that would know it to ±2 % (95 %), and what the server without load spent meanwhile.
Run: python tests/benchmarks/check/duet.py [--slices 25,50,100,200,1000] [--seconds 12] [--launches 1] [--plant 0.05] [--both]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray

sys.path += [str(Path(__file__).parents[3])]

from batchtune.target.process import ServerProcess, free_ports
from batchtune.wire.grpc.client_connection import GrpcClientConnection, prepare_call
from batchtune.wire.tfserving.tensors import encode_predict_request

CLIENTS, CONNECTIONS = 16, 4
GAP_MS = 1.0
WARM_UP_S = 1.0
BLOCK_S = 1.0
PREDICT = "/tensorflow.serving.PredictionService/Predict"
SHAPES = "inputs: {x: {dtype: float32, shape: [200]}}\noutputs: {y: {dtype: float32, shape: [2]}}\n"
BATCHING = (
    f"max_batch_size {{ value: {CLIENTS} }} batch_timeout_micros {{ value: 2000 }} "
    "max_enqueued_batches { value: 1000000 } num_batch_threads { value: 1 }"
)


@dataclass
class Side:
    """A server and its clients; while `open` each of them sends as soon as it is answered."""

    pid: int
    port: int
    answered: int = 0
    in_flight: int = 0
    open: bool = False

    def __post_init__(self) -> None:
        self.connections: list[GrpcClientConnection] = []
        self.empty = asyncio.Event()

    def cpu_ns(self) -> int:
        return time.clock_gettime_ns((~self.pid << 3) | 2)

    async def connect(self) -> None:
        inputs = {"x": np.random.default_rng(1).random((1, 200), dtype=np.float32)}
        self.call = prepare_call(PREDICT, f"127.0.0.1:{self.port}", encode_predict_request("m", "", inputs))
        for _ in range(CONNECTIONS):
            ready = asyncio.get_running_loop().create_future()
            await asyncio.get_running_loop().create_connection(
                lambda ready=ready: self._connection(ready), "127.0.0.1", self.port
            )
            self.connections.append(await ready)

    def _connection(self, ready: asyncio.Future[GrpcClientConnection]) -> GrpcClientConnection:
        def done(tag: int, code: int, _message: bytes, text: str) -> None:
            if code:
                raise RuntimeError(text)
            self.answered += 1
            if self.open:
                connection.call(self.call, tag)
                return
            self.in_flight -= 1
            if not self.in_flight:
                self.empty.set()

        connection = GrpcClientConnection(done, lambda *_: None, ready.set_result)
        return connection

    def begin(self) -> None:
        self.open = True
        self.empty.clear()
        self.in_flight = CLIENTS
        for number in range(CLIENTS):
            self.connections[number % CONNECTIONS].call(self.call, number)
        for connection in self.connections:
            connection.flush()

    async def end(self) -> None:
        self.open = False
        await self.empty.wait()
        await asyncio.sleep(GAP_MS / 1e3)


async def alternated(sides: list[Side], slice_s: float, seconds: float, seed: int) -> list[list[float]]:
    """A row a pair: CPU ns a request of each, CPU ns that each spent while the other was loaded, wall seconds."""
    chance = random.Random(seed)
    rows = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        per_request, idle_ns = [0.0, 0.0], [0.0, 0.0]
        began_s = time.monotonic()
        for which in chance.sample((0, 1), 2):
            side, other = sides[which], sides[1 - which]
            before = side.cpu_ns(), other.cpu_ns(), side.answered
            side.begin()
            await asyncio.sleep(slice_s)
            await side.end()
            per_request[which] = (side.cpu_ns() - before[0]) / (side.answered - before[2])
            idle_ns[1 - which] = other.cpu_ns() - before[1]
        rows.append([*per_request, *idle_ns, time.monotonic() - began_s])
    return rows


async def together(sides: list[Side], window_s: float, seconds: float) -> list[list[float]]:
    """The same with both loaded at once."""
    rows = []
    for side in sides:
        side.begin()
    end_s = time.monotonic() + seconds
    last = [(side.cpu_ns(), side.answered) for side in sides]
    began_s = time.monotonic()
    while time.monotonic() < end_s:
        await asyncio.sleep(window_s)
        now = [(side.cpu_ns(), side.answered) for side in sides]
        per_request = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in zip(last, now, strict=True)]
        rows.append([*per_request, 0.0, 0.0, time.monotonic() - began_s])
        last, began_s = now, time.monotonic()
    for side in sides:
        await side.end()
    return rows


def told(name: str, rows: list[list[float]]) -> float:
    table = np.asarray(rows)
    logs = np.log(table[:, 1] / table[:, 0])
    pair_s = float(np.mean(table[:, 4]))
    per_block = max(1, round(BLOCK_S / pair_s))
    blocks = block_means(logs, per_block)
    error = float(np.std(blocks, ddof=1) / math.sqrt(len(blocks))) if len(blocks) > 1 else math.nan
    needed_s = len(rows) * pair_s * (1.96 * error / 0.02) ** 2
    lag = float(np.corrcoef(logs[:-1], logs[1:])[0, 1]) if len(logs) > 3 else math.nan
    swing = block_means(table[:, 0], per_block)
    idle = np.mean(table[:, 2:4]) / 1e3 / (pair_s / 2)
    print(
        f"{name:>14} {len(rows):5d} {np.median(table[:, 0]) / 1e3:7.2f} {np.median(table[:, 1]) / 1e3:7.2f} "
        f"{np.mean(logs):+8.4f} {np.median(logs):+8.4f} {np.std(logs):7.4f} {lag:+6.2f} {error:7.4f} {needed_s:7.1f} "
        f"{np.std(np.log(swing)):7.4f} {idle:7.0f}",
        flush=True,
    )
    return float(np.mean(logs))


def block_means(values: NDArray[np.float64], per_block: int) -> NDArray[np.float64]:
    whole = len(values) // per_block * per_block
    means: NDArray[np.float64] = values[:whole].reshape(-1, per_block).mean(axis=1)
    return means


async def measured(
    launched: list[tuple[int, int]], given: argparse.Namespace, launch: int
) -> dict[str, float]:
    sides = [Side(pid=pid, port=port) for pid, port in launched]
    for side in sides:
        await side.connect()
    await alternated(sides, 0.05, WARM_UP_S, 0)
    results = {}
    for text in given.slices.split(","):
        rows = await alternated(sides, float(text) / 1e3, given.seconds, launch)
        results[text] = told(f"{launch}: {text} ms", rows)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps({"launch": launch, "slice_ms": text, "rows": rows}) + "\n")
        if given.both:
            results[f"both {text}"] = told(
                f"{launch}: both {text}", await together(sides, float(text) / 1e3, given.seconds)
            )
    for side in sides:
        for connection in side.connections:
            connection.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slices", default="25,50,100,200,1000")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--plant", type=float, default=0.0, help="CPU ms more a batch of the second server")
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    heads = (
        "pairs",
        "µs A",
        "µs B",
        "mean",
        "median",
        "sd",
        "lag 1",
        "error",
        "s to 2%",
        "swing",
        "idle µs/s",
    )
    print(f"{'slice':>14} " + " ".join(f"{head:>7}" for head in heads))
    by_slice: dict[str, list[float]] = {}
    for launch in range(given.launches):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "batching.txt").write_text(BATCHING)
            launched = []
            for which, cpu_ms in enumerate((0.0, given.plant)):
                version = folder / f"model{which}" / "1"
                version.mkdir(parents=True)
                service = {"base_ms": 4.0, "per_row_ms": 0.1, "cpu_ms": cpu_ms}
                (version / "emulated.yaml").write_text(f"service_time: {json.dumps(service)}\n{SHAPES}")
                port, rest = free_ports(2)
                command = [
                    sys.executable, "-m", "batchtune.server", "--model_name=m", "--enable_batching",
                    f"--model_base_path={version.parent}", f"--port={port}", f"--rest_api_port={rest}",
                    f"--batching_parameters_file={folder / 'batching.txt'}",
                ]  # fmt: skip
                process = ServerProcess(log_path=folder / f"{which}.log", cpus=(0,))
                stack.callback(process.stop)
                process.launch(command)
                if process.pid is None:
                    raise RuntimeError("no server")
                launched.append((process.pid, port))
            os.sched_setaffinity(0, (1,))
            wait_for([port for _, port in launched])
            time.sleep(0.5)
            for name, value in uvloop.run(measured(launched, given, launch)).items():
                by_slice.setdefault(name, []).append(value)
    for name, values in by_slice.items():
        if len(values) > 1:
            print(
                f"{name:>14}: over {len(values)} launches mean {float(np.mean(values)):+.4f} sd {float(np.std(values, ddof=1)):.4f}"
            )


def wait_for(ports: list[int]) -> None:
    import socket

    for port in ports:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise RuntimeError("no server answers")


if __name__ == "__main__":
    main()
