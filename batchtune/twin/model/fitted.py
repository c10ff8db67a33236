"""Defines a reading, one set of a server's parameters, and makes the simulator's device of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from batchtune.twin.model.service_time import LengthCost, ServiceTime, crowded_rps, crowding
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A reading: one set of parameters of a server that fits its measurements.

    `service_time`: execution time of a batch alone, by its rows. `length`: how that time depends on the longest request
    of the batch; None: not at all, or unknown.
    `contention`, `serial`, `jitter_ratio`, `delay_s`, `front_end_s`: as in the simulator's `Device`.
    `wake_s`: seconds that an idle batch thread takes to wake up for a request.
    `crowding_s`: CPU seconds that each request of an open loop takes from the execution, where they share cores: at a
    rate λ a batch takes 1 + crowding_s · λ times as long. In a closed loop requests come and go with the batches, which
    costs little.
    """

    service_time: ServiceTime
    contention: float
    serial: bool
    jitter_ratio: float
    delay_s: float
    front_end_s: float
    wake_s: float
    crowding_s: float = 0.0
    length: LengthCost | None = None

    def device(self, rows_max: int, *, rate_rps: float = 0.0) -> Device:
        """Make the simulator's device of this reading, with τ for 0 to `rows_max` rows.

        `rate_rps`: of an open loop, which slows execution down (`crowding`); 0: a closed loop.
        """
        device = _device(self, rows_max)
        slower = crowding(self.crowding_s, rate_rps)
        if slower == 1.0:
            return device
        length_s = None if device.length_s is None else device.length_s * slower
        return replace(device, tau_s=device.tau_s * slower, length_s=length_s)

    def slower(self, factor: float) -> Fitted:
        """Return a copy of this reading in which every batch takes `factor` times as long."""
        factors = np.full(len(self.service_time.rows), factor)
        return replace(self, service_time=self.service_time.scaled(factors))

    def saturation_rps(self, batcher: Batcher, traffic: Traffic) -> float:
        """Compute the saturation in an open loop, requests/s: the rate answered when every batch is full and every
        thread busy."""
        rows = batcher.batch_rows_max or traffic.rows_most
        tau_s = float(_device(self, rows_needed(batcher, traffic)).tau_s[rows])
        if self.length is not None and traffic.lengths:
            tau_s *= self.length.slower(rows, traffic.mean_longest(batcher.length_buckets, rows))
        threads = 1 if self.serial else batcher.batch_threads
        alone = threads / (1.0 + self.contention * (threads - 1)) * rows / tau_s / traffic.mean_rows
        crowded = crowded_rps(alone, self.crowding_s)
        return min(crowded, 1.0 / self.front_end_s) if self.front_end_s > 0.0 else crowded


def timed(batcher: Batcher, wake_s: float, traffic: Traffic) -> Batcher:
    """Return the batcher as the simulator needs it; without batching unchanged.

    Its timeout is longer by `wake_s`, the seconds that an idle batch thread takes to wake up: requests that arrive
    meanwhile join the batch. Length buckets "auto" become those that the server would choose for `traffic`.
    """
    if batcher.max_batch_size is None:
        return batcher
    boundaries = traffic.boundaries_of(batcher.length_buckets)
    return replace(batcher, batch_timeout_s=batcher.batch_timeout_s + wake_s, length_buckets=boundaries)


def rows_needed(batcher: Batcher, traffic: Traffic) -> int:
    """Return how many rows the largest batch that can be executed has, padding included; τ must be known up
    to there."""
    return max(batcher.max_batch_size or 1, traffic.rows_most, *batcher.allowed_batch_sizes, 1)


@lru_cache(maxsize=4096)
def _device(fit: Fitted, rows_max: int) -> Device:
    tau_s, length, rows = fit.service_time.tau_s(rows_max), fit.length, np.arange(rows_max + 1.0)
    return Device(
        tau_s=tau_s,
        length_s=None if length is None else tau_s * length.share(rows),
        usual_length=None if length is None else length.usual(rows),
        contention=fit.contention,
        serial=fit.serial,
        jitter_ratio=fit.jitter_ratio,
        delay_s=fit.delay_s,
        front_end_s=fit.front_end_s,
    )
