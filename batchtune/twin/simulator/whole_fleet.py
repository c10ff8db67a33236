"""How is a whole fleet simulated, however large, in pieces that need not know of one another?

Steady arrivals are gaps drawn independently. What one replica gets of them has independent gaps too: of every R-th
request the sum of R of them, of requests dealt out at random the sum of a geometric number. Such a sum is one draw, so
that each replica is simulated by itself, and exactly. Routing to the least loaded ties replicas together: they are
simulated in blocks of BLOCK, each with its share of the requests at random. All latencies go into one histogram.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.latency_histogram import LatencyHistogram
from batchtune.twin.simulator.replica import Batcher, Device, Routing, drawn_lengths, drawn_rows
from batchtune.twin.simulator.run import OpenTraffic, run_open

BLOCK: Final = 64
"""Replicas among which the least loaded is chosen."""

PIECE_REQUESTS: Final = 400_000
"""Counted requests of a piece: some 40 MB in memory."""
RANGE_REQUESTS: Final = 1_000_000
"""Requests of a range of pieces, which one process does at once: a tenth of a second."""
SETTLING_REQUESTS: Final = 2_000
"""Of each replica at the beginning of a piece, not counted."""
TIED_SETTLING_REQUESTS: Final = 8_000
TIED_PIECE_REQUESTS: Final = 10_000
"""The same for each replica of a block, which fall into step with one another slowly: at 0.9 of the saturation p50 is
8 % lower after 2,000 and over 2,000 requests than after 8,000 and over 10,000; after 30,000 it is the same."""

_SEEDS: Final = 8
"""Jitter is drawn anew for so many pieces, and then used again."""

Gaps = Literal["poisson", "gamma", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFleet:
    """Replicas under steady arrivals for so long; `gaps_cv`: coefficient of variation of gamma gaps.

    `rows` and `weights`: the kinds of request; `lengths`: each that of an equal share of them, where they have any.
    """

    batcher: Batcher
    device: Device
    replicas: int
    rate_rps: float
    duration_s: float
    routing: Routing
    gaps: Gaps = "poisson"
    gaps_cv: float = 1.0
    rows: tuple[int, ...] = (1,)
    weights: tuple[float, ...] = (1.0,)
    lengths: tuple[int, ...] = ()
    seed: int = 1

    @property
    def block(self) -> int:
        """Replicas that are simulated together."""
        return min(BLOCK, self.replicas) if self.routing == "least_loaded" else 1

    @property
    def blocks(self) -> int:
        return math.ceil(self.replicas / self.block)

    @property
    def _requests_of_block(self) -> float:
        return self.rate_rps * self.duration_s * self.block / self.replicas

    @property
    def _pieces_of_block(self) -> int:
        most = PIECE_REQUESTS if self.block == 1 else TIED_PIECE_REQUESTS * self.block
        return max(math.ceil(self._requests_of_block / most), 1)

    @property
    def settling(self) -> int:
        """Requests of each replica that are not counted."""
        return SETTLING_REQUESTS if self.block == 1 else TIED_SETTLING_REQUESTS

    @property
    def requests(self) -> int:
        """About how many are counted."""
        return round(self.rate_rps * self.duration_s)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First and last (not included) piece of each range; all together are the fleet."""
        pieces = self.blocks * self._pieces_of_block
        of_piece = self._requests_of_block / self._pieces_of_block + self.settling * self.block
        step = max(int(RANGE_REQUESTS / of_piece), 1)
        for first in range(0, pieces, step):
            yield first, min(first + step, pieces)

    def of_piece(self, number: int) -> tuple[int, int]:
        """Replicas and counted requests of a piece; the last block may be smaller."""
        block = number // self._pieces_of_block
        replicas = min(self.block, self.replicas - block * self.block)
        requests = self._requests_of_block * replicas / self.block / self._pieces_of_block
        return replicas, max(round(requests), 1)


@dataclass(slots=True)
class Played:
    """What pieces sum up to: a histogram of the counted requests, and how long devices were busy, of how long."""

    latencies: LatencyHistogram
    busy_s: float = 0.0
    device_s: float = 0.0
    batches: int = 0
    rows: int = 0

    def add(self, other: Played) -> None:
        self.latencies.counts += other.latencies.counts
        self.busy_s += other.busy_s
        self.device_s += other.device_s
        self.batches += other.batches
        self.rows += other.rows


def play_range(fleet: WholeFleet, first: int, last: int) -> Played:
    """Simulate pieces `first` to `last` (not included); the same figures in whatever process."""
    played = Played(LatencyHistogram())
    for number in range(first, last):
        _play_piece(fleet, number, played)
    return played


def _play_piece(fleet: WholeFleet, number: int, played: Played) -> None:
    replicas, counted = fleet.of_piece(number)
    settling = fleet.settling * replicas
    rng = np.random.default_rng((fleet.seed, number))
    due_s = _due_s(fleet, replicas, settling + counted, rng)
    count_from_s = float(due_s[settling])
    traffic = OpenTraffic(
        due_s=due_s,
        rows=drawn_rows(fleet.rows, fleet.weights, len(due_s), rng),
        lengths=drawn_lengths(fleet.lengths, len(due_s), rng),
        replicas=replicas,
        routing=fleet.routing,
        seed=fleet.seed + number % _SEEDS,
    )
    outcome = run_open(traffic, fleet.batcher, fleet.device, count_from_s=count_from_s)
    played.latencies.add(outcome.latency_s[settling:])
    played.busy_s += outcome.busy_s
    played.device_s += replicas * (outcome.last_done_s - count_from_s)
    played.batches += len(outcome.batch_rows)
    played.rows += int(outcome.batch_rows.sum(dtype=np.int64))


def _due_s(fleet: WholeFleet, replicas: int, requests: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """When the requests of these replicas come, [requests]."""
    if fleet.routing == "round_robin":
        gaps = _sums(fleet, fleet.replicas, requests, rng)
    elif fleet.gaps == "poisson":
        gaps = rng.standard_exponential(requests) * (fleet.replicas / replicas)
    else:
        gaps = _sums(fleet, rng.geometric(replicas / fleet.replicas, requests), requests, rng)
    return np.asarray(np.cumsum(gaps) / fleet.rate_rps)


def _sums(
    fleet: WholeFleet, many: int | NDArray[np.int64], requests: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Sums of so many of the fleet's gaps, whose mean is 1."""
    match fleet.gaps:
        case "constant":
            return np.full(requests, 1.0) * many
        case "gamma":
            variance = fleet.gaps_cv**2
            return rng.standard_gamma(np.asarray(many) / variance, requests) * variance
        case "poisson":
            return rng.standard_gamma(np.asarray(many, dtype=np.float64), requests)
