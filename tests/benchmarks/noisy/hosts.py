"""The hosts of the noisy bench: how often they stall, how often their guard cries, how much their runs differ.

Stalls: the way of the answers stands still, so what would come in a stall comes at its end; nothing is lost. The clients
of a closed loop stand still too, and send again after it. At capacity a stall of a server would hold up whatever follows
for long, and the truth would be another one on each host: here it is that of a host without noise on all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchtune.measure.caveats import MOST_FOREIGN_RATIO, HostNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of so many stalls a second, of `stall_s` on average (exponential).

    `noisy_ratio`: of the runs, those in which the guard cries NOISY, whether or not anything was wrong. `run_sd`: of the
    logarithm of a whole run's batch times.
    """

    name: str
    stalls_per_s: float
    stall_s: float
    noisy_ratio: float
    run_sd: float


HOSTS = {
    host.name: host
    for host in (
        Host(name="quiet", stalls_per_s=0.0, stall_s=0.0, noisy_ratio=0.0, run_sd=0.02),
        Host(name="ordinary", stalls_per_s=0.3, stall_s=0.03, noisy_ratio=0.3, run_sd=0.05),
        Host(name="harsh", stalls_per_s=1.0, stall_s=0.04, noisy_ratio=0.8, run_sd=0.1),
    )
}


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of one run: [stalls] start and length in seconds, in order."""

    start_s: NDArray[np.float64]
    length_s: NDArray[np.float64]

    def held_up(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """These instants, those within a stall moved to its end; inf stays inf."""
        if not len(self.start_s):
            return at_s
        end_s = np.maximum.accumulate(self.start_s + self.length_s)
        last = np.searchsorted(self.start_s, at_s, side="right") - 1
        inside = (last >= 0) & (at_s < end_s[last]) & np.isfinite(at_s)
        return np.where(inside, end_s[last], at_s)

    def stretched(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """These instants of a clock that stands still in each stall, by one that goes on; inf stays inf."""
        if not len(self.start_s):
            return at_s
        lost_s = np.concatenate([[0.0], np.cumsum(self.length_s)])
        return at_s + lost_s[np.searchsorted(self.start_s, at_s)]


def stalls_of(host: Host, duration_s: float, chance: np.random.Generator) -> Stalls:
    """Poisson, over this time."""
    count = int(chance.poisson(host.stalls_per_s * duration_s))
    start_s = np.sort(chance.uniform(0.0, duration_s, count))
    return Stalls(start_s, chance.exponential(host.stall_s, count))


class Guard:
    """A host's guard that cries NOISY by chance; stands where a `HostGuard` does."""

    def __init__(self, host: Host, chance: np.random.Generator) -> None:
        self._host, self._chance = host, chance

    def begin(self, *, cpus: Collection[int] | None = None) -> None:
        """Nothing: what `end` says does not depend on it."""

    def end(self, *, server_cpu_s: float | None = None, client_cpu_s: float = 0.0) -> HostNoise:
        noisy = self._chance.random() < self._host.noisy_ratio
        return HostNoise(
            steal_ratio=0.0,
            pressure_ratio=0.0,
            canary_change=0.0,
            foreign_ratio=(1.5 if noisy else 0.25) * MOST_FOREIGN_RATIO,
            canary_s=0.003 * math.exp(self._chance.normal(0.0, self._host.run_sd)),
        )


class VirtualClock:
    """Seconds of a sweep: those that its runs take in virtual time, and those that it thinks, in CPU time of its thread.

    `now_s` is the virtual part. What is spent within `simulating()` is the bench's own and counts for nothing.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._simulated_s = 0.0
        self._began_s = time.thread_time()

    def __call__(self) -> float:
        return self.now_s + self.thinking_s

    @property
    def thinking_s(self) -> float:
        return time.thread_time() - self._began_s - self._simulated_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @contextmanager
    def simulating(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._simulated_s += time.thread_time() - began_s
