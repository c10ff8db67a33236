"""What becomes of requests when some of the replicas die in the middle of a run?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.twin.simulator.event_kernel import simulate
from batchtune.twin.simulator.replica import Batcher, Device
from batchtune.twin.simulator.run import OpenTraffic, new_requests, new_world
from batchtune.twin.simulator.state import BATCH, NONE, World

_BEYOND: Final = 2**40
"""No replica is the least loaded with so many unanswered requests, or full with so many batches fewer than none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The last `replicas` of a fleet die at `at_s`; from `forgotten_s` on no request is sent to them."""

    replicas: int
    at_s: float
    forgotten_s: float


def run_failing(traffic: OpenTraffic, batcher: Batcher, device: Device, death: Death) -> NDArray[np.float64]:
    """Latency of each request, [requests]: inf where it was refused, nan where it was lost with its replica.

    A dead replica answers nothing: what it had and what it is sent is lost. While routing by the least load does not
    know of the death, it goes by the requests that are unanswered there, and so sends it few.
    """
    requests = new_requests(len(traffic.due_s), traffic.rows)
    requests["due_s"] = traffic.due_s
    requests["latency_s"] = math.nan
    world = new_world(traffic, requests, len(requests), batcher, device, -math.inf)
    spare = np.zeros(len(world.batches) + 1, dtype=BATCH)
    world = world._replace(route=_around(world.route, traffic, death), batches=spare)
    simulate(world._replace(until_s=float(death.at_s)))
    dead = slice(traffic.replicas - death.replicas, traffic.replicas)
    _kill(world, dead)
    simulate(world._replace(until_s=float(death.forgotten_s)))
    world.replicas["in_flight"][dead] = _BEYOND
    simulate(world)
    return np.array(requests["latency_s"])


def _around(route: NDArray[np.int32], traffic: OpenTraffic, death: Death) -> NDArray[np.int32]:
    """The route with the survivors alone from when the dead are forgotten; none where the least loaded is chosen."""
    if not len(route):
        return route
    first = int(np.searchsorted(traffic.due_s, death.forgotten_s))
    survivors = traffic.replicas - death.replicas
    if traffic.routing == "random":
        rng = np.random.default_rng((traffic.seed, 1))
        rest = rng.integers(survivors, size=len(route) - first, dtype=np.int32)
    else:
        rest = np.asarray(np.arange(len(route) - first) % survivors, dtype=np.int32)
    return np.concatenate([route[:first], rest])


def _kill(world: World, dead: slice) -> None:
    """No thread is left to take a batch, so nothing that these replicas have, or get, is ever answered.

    Nor do their queues get full, which would be an answer: what they get is linked behind the spare batch.
    """
    for name in ("idle_threads", "running"):
        world.replicas[name][dead] = 0
    world.replicas["front_first"][dead] = NONE
    world.replicas["times_out_s"][dead] = math.inf
    queues = world.queues[dead.start * world.buckets : dead.stop * world.buckets]
    queues["waiting"] = -_BEYOND
    queues["waiting_last"] = len(world.batches) - 1
    leaves = len(world.next_s) // 2
    world.next_s[leaves + dead.start : leaves + dead.stop] = math.inf
    for node in range(leaves - 1, 0, -1):
        world.next_s[node] = min(world.next_s[2 * node], world.next_s[2 * node + 1])
