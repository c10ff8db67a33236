"""What do the configurations of a simulated device hold in truth, without noise? Known once, kept on disk.

A truth is the highest rate of Poisson arrivals within the limits, by halving, always on the same long stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.twin.simulator.simulate import Batcher, SimulatedTraffic, summary_of
from tests.benchmarks.noisy.devices import CPUS, DEVICES, SimulatedDevice

REQUESTS = 40_000
FULL_BATCHES = 400
LIMITS = 400
"""A stream is longer where it would fill fewer batches, or last fewer limits on p95: one per cent above what is sustained
the last of so many limits waits four of them."""

WITHIN = 0.002
ERROR_RATIO = 0.01
ANSWERED_RATIO = 0.98
"""Of the rate; a stream that ends with a queue is not held."""

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
TIMEOUTS_MICROS = (0, 2000)
QUEUED_BATCHES = 100

KEPT = Path(tempfile.gettempdir()) / "batchtune-noisy-truth"

NO_BATCHING = Configuration(batching=None)
DEFAULTS = Configuration(batching=BatchingParameters())


def grid(device: SimulatedDevice) -> list[Configuration]:
    """Sizes to 1,000 rows that hold a request, on as many threads as there are CPUs, with two timeouts."""
    sizes = [size for size in SIZES if size >= device.rows and size % device.rows == 0]
    return [
        Configuration(
            batching=BatchingParameters(
                max_batch_size=size,
                batch_timeout_micros=timeout_micros,
                num_batch_threads=threads,
                max_enqueued_batches=QUEUED_BATCHES,
            )
        )
        for size in sizes
        for timeout_micros in TIMEOUTS_MICROS
        for threads in range(1, len(CPUS) + 1)
    ]


@cache
def best(name: str) -> tuple[Configuration, float]:
    """Of the grid, the server's defaults and no batching: what holds the most, and how much, in requests/s."""
    device = DEVICES[name]
    contenders = [NO_BATCHING, DEFAULTS, *grid(device)]
    rates_rps = [capacity_rps(device, contender) for contender in contenders]
    at = int(np.argmax(rates_rps))
    return contenders[at], rates_rps[at]


def capacity_rps(device: SimulatedDevice, configuration: Configuration) -> float:
    """The highest rate of this configuration within the limits; 0.0 where none is."""
    batcher = device.batcher(configuration)
    known, key = _known(device.name), repr(batcher)
    if key not in known:
        known[key] = _highest(device, batcher)
        _keep(device, known)
    return known[key]


def holding_more(device: SimulatedDevice, rate_rps: float) -> list[Configuration]:
    """Those of the grid, the defaults and no batching that hold this rate: one simulation each."""
    contenders = [NO_BATCHING, DEFAULTS, *grid(device)]
    return [contender for contender in contenders if holds(device, contender, rate_rps)]


def holds(device: SimulatedDevice, configuration: Configuration, rate_rps: float) -> bool:
    batcher = device.batcher(configuration)
    size = batcher.batch_rows_max or device.rows
    if rate_rps >= _most_rps(device, batcher, size):
        return False
    return _is_held(device, batcher, _arrivals_s(device, size, rate_rps) / rate_rps)


def _arrivals_s(device: SimulatedDevice, size: int, most_rps: float) -> NDArray[np.float64]:
    """Due times of Poisson arrivals of one request per second."""
    requests = max(
        REQUESTS, FULL_BATCHES * size // device.rows, round(LIMITS * most_rps * device.p95_ms / 1e3)
    )
    return np.cumsum(np.random.default_rng(5).exponential(1.0, requests))


def _highest(device: SimulatedDevice, batcher: Batcher) -> float:
    size = batcher.batch_rows_max or device.rows
    low, high = 0.0, _most_rps(device, batcher, size)
    arrivals_s = _arrivals_s(device, size, high)
    while high - low > WITHIN * high and high > 1e-3:
        rate = 0.5 * (low + high)
        low, high = (rate, high) if _is_held(device, batcher, arrivals_s / rate) else (low, rate)
    return low


def _most_rps(device: SimulatedDevice, batcher: Batcher, size: int) -> float:
    """What its best batches add up to."""
    rows = np.arange(device.rows, size + 1)
    at_once = 1 if device.serial else batcher.batch_threads
    most_rps = at_once * float(np.max(rows / device.tau_ms[rows])) * 1e3 / device.rows
    return min(most_rps, device.client_max_rps or most_rps)


def _is_held(device: SimulatedDevice, batcher: Batcher, due_s: NDArray[np.float64]) -> bool:
    rate_rps = len(due_s) / float(due_s[-1])
    traffic, warm_up_s = SimulatedTraffic(due_s=due_s, rows=device.rows), 0.05 * float(due_s[-1])
    summary = summary_of(traffic, batcher, [device.device()], warm_up_s=warm_up_s, quantiles=(0.95,))
    return bool(
        summary.latency_s[0, 0] <= device.p95_ms / 1e3
        and summary.error_ratio[0] <= ERROR_RATIO
        and summary.throughput_rps[0] >= ANSWERED_RATIO * rate_rps
    )


@cache
def _known(name: str) -> dict[str, float]:
    """By the scheduler in words; what is on disk, in this process once."""
    return _on_disk(DEVICES[name])


def _on_disk(device: SimulatedDevice) -> dict[str, float]:
    try:
        known: dict[str, float] = json.loads(_path(device).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return known


def _keep(device: SimulatedDevice, known: dict[str, float]) -> None:
    """Together with what other processes have found meanwhile."""
    known.update({**_on_disk(device), **known})
    path = _path(device)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(known, indent=1), encoding="utf-8")
    part.replace(path)


def _path(device: SimulatedDevice) -> Path:
    """Another file for another device of this name, and for another way to find the truth."""
    made_of = repr((device.p95_ms, device.serial, device.jitter_ratio, device.rows, device.client_max_rps))
    method = repr((REQUESTS, FULL_BATCHES, LIMITS, WITHIN, ERROR_RATIO, ANSWERED_RATIO))
    made = hashlib.sha256(device.tau_ms.tobytes() + made_of.encode() + method.encode()).hexdigest()
    return KEPT / f"{device.name}-{made[:12]}.json"
