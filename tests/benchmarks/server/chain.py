"""Does a request of a chain take as long as its steps together, and has it one version of each model?

    python tests/benchmarks/server/chain.py [--requests 10000] [--swaps 5]

First one client asks a chain of two emulated models (2 ms, then 5 ms): mean latency by the client, by the server, and
the sum of the steps' own metrics; the bar is 5 %. Then 16 clients ask a chain that asks each of its two models twice,
while both are replaced by the next version, so often; an emulated version is known by the width of its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

sys.path += [str(Path(__file__).parents[2])]

from batchtune.target.telemetry import parse_prometheus
from batchtune.wire.grpc.prepared_call import prepare_call
from batchtune.wire.tfserving.tensors import decode_predict_response, encode_predict_request
from tests.benchmarks.server.checked_clients import PREDICT, GrpcChannel
from tests.server.server_process import ServerProcess
from tests.waiting import wait_until

BAR = 0.05
MODELS = ("trigger", "select")
CLIENTS = 16
_EMULATED = """
service_time: {{base_ms: {base_ms}}}
inputs: {{x: {{dtype: float32, shape: [1]}}}}
outputs: {{y: {{dtype: float32, shape: [{width}]}}}}
"""
TWICE = """
inputs: {x: {shape: [1]}}
steps:
  trigger: {model: trigger, inputs: {x: request.x}}
  select: {model: select, inputs: {x: request.x}, when: "trigger.y[0] > 0", otherwise: {y: -1}}
  trigger_again: {model: trigger, inputs: {x: request.x}}
  select_again: {model: select, inputs: {x: request.x}}
outputs:
  trigger: {from: trigger.y, shape: [-1]}
  select: {from: select.y, shape: [-1]}
  trigger_again: {from: trigger_again.y, shape: [-1]}
  select_again: {from: select_again.y, shape: [-1]}
"""
IN_TURN = """
inputs: {x: {shape: [1]}}
steps:
  trigger: {model: trigger, inputs: {x: request.x}}
  select: {model: select, inputs: {x: request.x}, when: "trigger.y[0] > 0", otherwise: {y: -1}}
outputs:
  trigger: {from: trigger.y, shape: [-1]}
  select: {from: select.y, shape: [-1]}
"""
_BATCHING = "max_batch_size { value: 16 } num_batch_threads { value: 4 } max_enqueued_batches { value: 1000 }"


def write_model(base: Path, name: str, version: int, base_ms: float) -> None:
    """A version whose answers are as wide as 1 + its number; there at once."""
    staging = base / f"new-{name}"
    staging.mkdir(parents=True)
    (staging / "emulated.yaml").write_text(_EMULATED.format(base_ms=base_ms, width=1 + version))
    (base / name).mkdir(exist_ok=True)
    staging.rename(base / name / str(version))


def write_chain(base: Path, pipeline: str, base_ms: tuple[float, float]) -> list[str]:
    """A chain `m` and, beside it, its two models, which take so long; the flags of a server."""
    for name, milliseconds in zip(MODELS, base_ms, strict=True):
        write_model(base, name, 1, milliseconds)
    (base / "m" / "1").mkdir(parents=True)
    (base / "m" / "1" / "pipeline.yaml").write_text(pipeline)
    (base / "batching.txt").write_text(_BATCHING)
    return [f"--batching_parameters_file={base / 'batching.txt'}", "--enable_batching"]


async def ask(channel: GrpcChannel, x: float) -> dict[str, list[float]]:
    """The chain's answer to one row; raises ValueError for a refusal."""
    message = encode_predict_request("m", "", {"x": np.array([[x]], np.float32)})
    status, answer, text = await channel.exchange(prepare_call(PREDICT, f"127.0.0.1:{channel.port}", message))
    if status:
        raise ValueError(f"gRPC {status}: {text[:200]}")
    return {name: values[0].tolist() for name, values in decode_predict_response(answer).items()}


def fault_of(x: float, answer: dict[str, list[float]]) -> str:
    """What is wrong with an answer of the chain that asks twice, "" if nothing."""
    for name in MODELS:
        first, again = answer[name], answer[f"{name}_again"]
        if len(first) != len(again):
            return f"{name}: version {len(first) - 1}, then {len(again) - 1}"
        expected = [x + index for index in range(len(again))]
        asked = name == "trigger" or x > 0
        if again != expected or first != (expected if asked else [-1.0] * len(first)):
            return f"{name}: {first}, {again} for {x}"
    return ""


@dataclass(kw_only=True)
class Swapped:
    """What a run of swaps has shown; `versions` counts answers by the two versions that gave them."""

    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    versions: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __str__(self) -> str:
        by_version = ", ".join(f"{count:,} of {pair}" for pair, count in sorted(self.versions.items()))
        return f"{self.requests:,} requests, {self.faults.total()} faults; by versions: {by_version}"


async def ask_while_swapped(server: ServerProcess, base: Path, *, requests: int, swaps: int) -> Swapped:
    """So many requests by 16 clients at least, and go on until both models have been replaced so often."""
    swapped = Swapped()
    channels = [GrpcChannel(server.grpc_port) for _ in range(2)]
    swapping = asyncio.ensure_future(_swap(server, base, swapped, requests=requests, swaps=swaps))

    async def ask_on(number: int) -> None:
        channel = channels[number % len(channels)]
        while swapped.requests < requests or not swapping.done():
            swapped.requests += 1
            x = float(swapped.requests % 7 - 3)
            try:
                answer = await ask(channel, x)
            except (ValueError, ConnectionError) as error:
                swapped.faults[str(error)] += 1
                continue
            fault = fault_of(x, answer)
            swapped.faults.update([fault] if fault else [])
            swapped.versions[len(answer["trigger"]) - 1, len(answer["select"]) - 1] += 1

    try:
        await asyncio.gather(*(ask_on(number) for number in range(CLIENTS)))
        await swapping
    finally:
        swapping.cancel()
        for channel in channels:
            channel.close()
    return swapped


async def _swap(server: ServerProcess, base: Path, swapped: Swapped, *, requests: int, swaps: int) -> None:
    """Spread over the requests; each swap has ended when no older version is left."""
    for version in range(2, swaps + 2):
        wanted = requests * (version - 1) / (swaps + 1)
        await asyncio.to_thread(wait_until, lambda wanted=wanted: swapped.requests >= wanted, limit_s=600.0)
        for name in MODELS:
            write_model(base, name, version, 1.0)
        for name in MODELS:
            await asyncio.to_thread(_wait_until_alone, server, name, version)


def _wait_until_alone(server: ServerProcess, name: str, version: int) -> None:
    def is_alone() -> bool:
        listed = server.rest.get(f"/v1/models/{name}").json()["model_version_status"]
        states = {int(status["version"]): status["state"] for status in listed}
        others = {state for number, state in states.items() if number != version}
        return states.get(version) == "AVAILABLE" and others <= {"END"}

    wait_until(is_alone, limit_s=60.0)


async def latencies_ms(port: int, requests: int) -> list[float]:
    channel = GrpcChannel(port)
    took = []
    for _ in range(requests):
        began_s = time.monotonic()
        await ask(channel, 1.0)
        took.append(1000 * (time.monotonic() - began_s))
    channel.close()
    return took


def mean_ms(server: ServerProcess, name: str, **labels: str) -> float:
    """Of a histogram of micros on the metrics page."""
    series = parse_prometheus(server.rest.get("/monitoring/prometheus/metrics").text)

    def value(part: str) -> float:
        return next(
            value
            for found, value in series[f"{name}_{part}"].items()
            if labels.items() <= dict(found).items()
        )

    return value("sum") / value("count") / 1000


def measure_latency(base: Path, requests: int) -> None:
    flags = write_chain(base, IN_TURN, (2.0, 5.0))
    (base / "monitoring.txt").write_text("prometheus_config { enable: true }")
    with ServerProcess(base / "m", *flags, f"--monitoring_config_file={base / 'monitoring.txt'}") as server:
        took = uvloop.run(latencies_ms(server.grpc_port, requests))
        steps = [
            mean_ms(server, ":batchtune:serving:chain_step_latency", model_name="m", step=name)
            for name in MODELS
        ]
        whole = mean_ms(server, ":tensorflow:serving:request_latency", model_name="m")
    print(
        f"client: mean {statistics.mean(took):.3f} ms, median {statistics.median(took):.3f} ms ({requests} requests)"
    )
    print(
        f"server: request {whole:.3f} ms; steps {' + '.join(f'{step:.3f}' for step in steps)} = {sum(steps):.3f} ms"
    )
    for who, latency in (("server", whole), ("client", statistics.mean(took))):
        ratio = latency / sum(steps) - 1
        print(
            f"{who}: {ratio:+.2%} beside the steps (bar: {BAR:.0%}): {'met' if abs(ratio) <= BAR else 'missed'}"
        )


def measure_swaps(base: Path, requests: int, swaps: int) -> bool:
    with ServerProcess(base / "m", *write_chain(base, TWICE, (1.0, 1.0))) as server:
        began_s = time.monotonic()
        swapped = uvloop.run(ask_while_swapped(server, base, requests=requests, swaps=swaps))
        print(f"{swaps} swaps of both models in {time.monotonic() - began_s:.1f} s: {swapped}")
    for fault, count in swapped.faults.most_common(10):
        print(f"  {count} × {fault}")
    return not swapped.faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--swaps", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        measure_latency(Path(base), 500)
    with tempfile.TemporaryDirectory() as base:
        sys.exit(0 if measure_swaps(Path(base), asked.requests, asked.swaps) else 1)


if __name__ == "__main__":
    main()
