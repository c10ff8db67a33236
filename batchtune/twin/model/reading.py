"""One reading of a server's parameters, and the device that it means for the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from batchtune.twin.model.service_time import LengthCost, ServiceTime
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.replica import Batcher, Device

CROWDED_MOST: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One reading of the server's parameters.

    `wake_s`: how long a batch thread takes to get up for a lone request. `crowding_s`: in an open loop requests come
    one by one, and each takes CPU time from the execution where they share cores: at a rate λ a batch takes 1 +
    crowding_s · λ times as long. In a closed loop they come and go in the bunches of a batch, which costs little.
    `length`: what the longest request of a batch has to do with its time; None: nothing that is known.
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
        """Make the simulator's device of this reading, with τ up to `rows_max` rows; `rate_rps` is that of an open
        loop."""
        device = _device(self, rows_max)
        slower = crowding(self.crowding_s, rate_rps)
        if slower == 1.0:
            return device
        length_s = None if device.length_s is None else device.length_s * slower
        return replace(device, tau_s=device.tau_s * slower, length_s=length_s)

    def slower(self, factor: float) -> Fitted:
        """Return this reading with batches that take `factor` times as long."""
        factors = np.full(len(self.service_time.rows), factor)
        return replace(self, service_time=self.service_time.scaled(factors))

    def saturation_rps(self, batcher: Batcher, traffic: Traffic) -> float:
        """Saturation in an open loop, requests/s: every batch full and every thread busy (tuning.md 2.4)."""
        rows = batcher.batch_rows_max or traffic.rows_most
        tau_s = float(_device(self, rows_needed(batcher, traffic)).tau_s[rows])
        if self.length is not None and traffic.lengths:
            tau_s *= self.length.slower(rows, traffic.mean_longest(batcher.length_buckets, rows))
        threads = 1 if self.serial else batcher.batch_threads
        alone = threads / (1.0 + self.contention * (threads - 1)) * rows / tau_s / traffic.mean_rows
        crowded = _crowded_rps(alone, self.crowding_s)
        return min(crowded, 1.0 / self.front_end_s) if self.front_end_s > 0.0 else crowded


def crowding(crowding_s: float, rate_rps: float) -> float:
    """Factor by which a batch takes longer in an open loop at this rate: 1 + crowding_s · λ at first, at most 1 +
    CROWDED_MOST.

    Measured with a CPU model on two cores shared with the client: some 10-15 % at 1,000 requests/s, 18-24 % from 1,800
    to 4,800: it does not go on growing with the rate.
    """
    share = crowding_s * rate_rps
    return 1.0 + share / (1.0 + share / CROWDED_MOST)


def _crowded_rps(alone_rps: float, crowding_s: float) -> float:
    """The rate x at which x · crowding(x) is what batches alone would give: the root of a quadratic equation."""
    a = crowding_s * (1.0 + 1.0 / CROWDED_MOST)
    b = 1.0 - alone_rps * crowding_s / CROWDED_MOST
    return 2.0 * alone_rps / (b + math.sqrt(b * b + 4.0 * a * alone_rps))


def timed(batcher: Batcher, wake_s: float, traffic: Traffic) -> Batcher:
    """Add to the batch timeout the time that an idle batch thread needs to get up; requests that come meanwhile join
    the batch.

    Length buckets that the server chooses are those for this traffic.
    """
    if batcher.max_batch_size is None:
        return batcher
    boundaries = traffic.boundaries_of(batcher.length_buckets)
    return replace(batcher, batch_timeout_s=batcher.batch_timeout_s + wake_s, length_buckets=boundaries)


def rows_needed(batcher: Batcher, traffic: Traffic) -> int:
    """Rows of the largest batch that can be executed: the length that the simulator's τ needs."""
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
