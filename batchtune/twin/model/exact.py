"""What does the fleet do that a plan advises, simulated whole and not as a pool?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from batchtune.cpus import usable_threads
from batchtune.errors import TwinError
from batchtune.measure.statistics.quantiles import QUANTILES
from batchtune.twin.model.exact_processes import process_players
from batchtune.twin.model.reading import Fitted, rows_needed, timed
from batchtune.twin.model.traffic import Traffic
from batchtune.twin.simulator.latency_histogram import RELATIVE_ERROR, LatencyHistogram
from batchtune.twin.simulator.replica import Batcher, Routing
from batchtune.twin.simulator.whole_fleet import BLOCK, Played, WholeFleet, play_range

LONE_REQUESTS: Final = 3_000_000
"""Fewer are simulated in this process: to start others takes a second or two."""

Range = tuple[int, int]
OnProgress = Callable[[int, int], None]
"""Requests simulated, and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFigures:
    """The whole fleet by the best reading: latencies within `relative_error`, refused requests as inf.

    `pool_latency_s`: what the pool of the plan says by the same reading. `blocks`: parts that were simulated by
    themselves; `exact`: whether that is exact for this routing. `took_s` on `processes`.
    """

    replicas: int
    requests: int
    duration_s: float
    latency_s: dict[str, float]
    error_ratio: float
    busy_ratio: float
    mean_batch_rows: float
    relative_error: float
    pool_latency_s: dict[str, float]
    blocks: int
    exact: bool
    took_s: float
    processes: int

    @property
    def simulated_rps(self) -> float:
        return self.requests / self.took_s


def whole_fleet(
    reading: Fitted,
    batcher: Batcher,
    traffic: Traffic,
    *,
    replicas: int,
    rate_rps: float,
    duration_s: float,
    routing: Routing,
) -> WholeFleet:
    """The fleet to simulate.

    Raises:
        TwinError: arrivals whose rate changes.
    """
    load = traffic.load
    arrivals = "poisson" if load is None else load.arrivals
    if arrivals not in ("poisson", "gamma", "constant"):
        raise TwinError(
            f"--exact simulates steady arrivals; the scenario's are {arrivals}",
            hint="leave --exact out, or plan with --profile, whose peak is steady",
        )
    return WholeFleet(
        batcher=timed(batcher, reading.wake_s, traffic),
        device=reading.device(rows_needed(batcher, traffic), rate_rps=rate_rps / replicas),
        replicas=replicas,
        rate_rps=rate_rps,
        duration_s=duration_s,
        routing=routing,
        gaps=arrivals,
        gaps_cv=load.gamma.cv if load is not None and load.gamma is not None else 1.0,
        rows=traffic.rows,
        weights=traffic.weights,
        lengths=traffic.lengths,
        seed=traffic.seed,
    )


def simulate_whole(
    fleet: WholeFleet,
    *,
    pool_latency_s: dict[str, float],
    processes: int | None = None,
    cluster: str | None = None,
    on_progress: OnProgress = lambda _done, _total: None,
) -> ExactFigures:
    """All pieces of the fleet over `processes` (None: as many as can be kept busy), or the CPUs of a Ray cluster.

    `pool_latency_s`: what the pool says, by name of the latencies that are wanted.

    Raises:
        TwinError: a process was killed.
    """
    total = Played(LatencyHistogram())
    started_s = time.monotonic()
    with _workers(fleet, processes, cluster) as (many, play):
        for played in play(fleet.ranges()):
            total.add(played)
            on_progress(total.latencies.requests, fleet.requests)
    names = list(pool_latency_s)
    reached_s = total.latencies.quantiles([QUANTILES[name] for name in names])
    requests = total.latencies.requests
    return ExactFigures(
        replicas=fleet.replicas,
        requests=requests,
        duration_s=fleet.duration_s,
        latency_s=dict(zip(names, reached_s.tolist(), strict=True)),
        error_ratio=total.latencies.unanswered / requests,
        busy_ratio=total.busy_s / total.device_s,
        mean_batch_rows=total.rows / max(total.batches, 1),
        relative_error=RELATIVE_ERROR,
        pool_latency_s=pool_latency_s,
        blocks=fleet.blocks,
        exact=fleet.routing != "least_loaded" or fleet.replicas <= BLOCK,
        took_s=max(time.monotonic() - started_s, 1e-9),
        processes=many,
    )


Play = Callable[[Iterator[Range]], Iterator[Played]]
"""Plays ranges, in whatever order."""


@contextmanager
def _workers(fleet: WholeFleet, processes: int | None, cluster: str | None) -> Iterator[tuple[int, Play]]:
    """How many there are, and what plays ranges on them; they end with it."""
    if cluster is not None:
        from batchtune.twin.model.exact_ray import ray_players

        with ray_players(fleet, cluster) as players:
            yield players
        return
    play = partial(_play, fleet)
    many = processes or (1 if fleet.requests < LONE_REQUESTS else usable_threads())
    if many == 1:
        yield 1, partial(map, play)
        return
    with process_players(play, many) as players:
        yield many, players


def _play(fleet: WholeFleet, pieces: Range) -> Played:
    return play_range(fleet, *pieces)
