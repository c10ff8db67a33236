"""The simulated devices of the noisy bench, each with the limit on p95 within which its capacity is looked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import Configuration
from batchtune.twin.simulator.simulate import Batcher, Device, batcher_of

CPUS = (0, 1)
"""Of the server, wherever the bench runs: the threads of its defaults and of no batching follow from them."""

ROWS_MAX = 4096
"""Of a batch whose time is given; beyond, time is in proportion."""

BEYOND = 0.05
"""Of a curve that is flat: each doubling loses 3 % of the rows a second, as caches do that are too small."""

DELAY_S = 0.0003
"""Of each answer, on its way and outside the queue."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedDevice:
    """What is served, and how it is asked.

    tau_ms: [ROWS_MAX + 1], time of a batch by its rows. `p95_ms`: the limit. `serial` False: two batches run at once,
    one for each of CPUS. `jitter_ratio`: of the log-normal factor of each batch. `rows`: of a request.
    `client_max_rps`: what the client can send and take at most; None: anything.
    """

    name: str
    tau_ms: NDArray[np.float64]
    p95_ms: float
    serial: bool = True
    jitter_ratio: float = 0.0
    rows: int = 1
    client_max_rps: float | None = None

    def device(self, *, slower: float = 1.0) -> Device:
        """As the simulator has it, its batches so many times slower.

        A client at its limit is a front end that each request takes so long: in the same thread, before and after.
        """
        return Device(
            tau_s=self.tau_ms * (slower / 1e3),
            serial=self.serial,
            jitter_ratio=self.jitter_ratio,
            delay_s=DELAY_S,
            front_end_s=1.0 / self.client_max_rps if self.client_max_rps else 0.0,
        )

    def batcher(self, configuration: Configuration) -> Batcher:
        """Its scheduler; of a device that runs batches at once no more threads run than it has CPUs."""
        batcher = batcher_of(configuration, cpus=CPUS)
        return (
            batcher if self.serial else replace(batcher, batch_threads=min(batcher.batch_threads, len(CPUS)))
        )


def line(fixed_ms: float, per_row_ms: float) -> NDArray[np.float64]:
    """τ(b) = fixed + per row · b."""
    return fixed_ms + per_row_ms * np.arange(ROWS_MAX + 1)


def steps(ms_by_rows: Mapping[int, float]) -> NDArray[np.float64]:
    """The time of the next size that is given; beyond the last one in proportion."""
    sizes, times_ms = np.array(list(ms_by_rows)), np.array(list(ms_by_rows.values()))
    rows = np.arange(ROWS_MAX + 1)
    at = np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)
    return np.asarray(times_ms[at] * np.maximum(rows / sizes[-1], 1.0))


def flat_from(rows: int, fixed_ms: float, per_row_ms: float) -> NDArray[np.float64]:
    """A line up to so many rows, from there on a little more than in proportion: larger batches only take longer."""
    every = np.arange(ROWS_MAX + 1)
    beyond = np.maximum(every / rows, 1.0) ** (1.0 + BEYOND)
    return np.asarray((fixed_ms + per_row_ms * np.minimum(every, rows)) * beyond)


DEVICES = {
    device.name: device
    for device in (
        SimulatedDevice(name="fast", tau_ms=line(1.0, 0.01), p95_ms=30.0),
        # The server's defaults hold the most.
        SimulatedDevice(name="tiny", tau_ms=line(0.08, 0.008), p95_ms=20.0),
        SimulatedDevice(name="mid", tau_ms=line(7.0, 0.11), p95_ms=45.0),
        SimulatedDevice(name="slow", tau_ms=line(40.0, 2.0), p95_ms=400.0),
        SimulatedDevice(name="very_slow", tau_ms=line(250.0, 5.0), p95_ms=2000.0),
        # Batching cannot pay.
        SimulatedDevice(name="linear", tau_ms=line(0.05, 1.5), p95_ms=30.0),
        SimulatedDevice(name="parallel", tau_ms=line(5.0, 0.2), p95_ms=30.0, serial=False),
        SimulatedDevice(name="steps", tau_ms=steps({1: 2, 8: 2.6, 16: 3.6, 32: 14, 64: 60}), p95_ms=60.0),
        # A thousand rows hold the most, three times as much as 128.
        SimulatedDevice(name="thousand", tau_ms=line(10.0, 0.01), p95_ms=100.0),
        # As a transformer on a CPU: batches of more than 8 rows only take longer, and hold 7 % less.
        SimulatedDevice(name="flat", tau_ms=flat_from(8, 1.2, 0.05), p95_ms=5.0),
        # Anything from 32 rows on holds what the client can send.
        SimulatedDevice(name="client", tau_ms=line(1.0, 0.01), p95_ms=30.0, client_max_rps=20_000.0),
        SimulatedDevice(name="jitter", tau_ms=line(5.0, 0.1), p95_ms=50.0, jitter_ratio=0.4),
        SimulatedDevice(name="four_rows", tau_ms=line(4.0, 0.1), p95_ms=50.0, rows=4),
    )
}
