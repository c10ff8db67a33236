"""How much will be asked of a server at once, and has it the threads for it?

In TensorFlow Serving a request holds a thread from its arrival to its answer, also while its batch fills: fewer threads
than clients are a queue before the queue, and a batch never has more requests than there are threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.target import TargetSpec

THREAD_LIMITS: Final = ("grpc_max_threads", "rest_api_num_threads")

_OPEN_LOOP_REQUESTS: Final = 1024
"""In an open loop as many wait as the server lets: beyond this much it is overloaded."""

_SPARE_THREADS: Final = 16
"""Threads that the server needs for itself: gRPC's own pollers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`clients`: the most requests that are under way at once; `rows` of the largest; `protocol` as a scenario's."""

    clients: int
    rows: int
    protocol: str

    @property
    def threads(self) -> int:
        """A limit of threads that is none."""
        return self.clients + _SPARE_THREADS


NO_DEMAND: Final = Demand(clients=_OPEN_LOOP_REQUESTS, rows=1, protocol="grpc")


def demand_of(scenario: Scenario, *, clients_most: int = 0) -> Demand:
    """What a search of the scenario may send: its load, and closed loops that keep the largest batches full."""
    rows = scenario.request.rows_most
    space = scenario.search.space

    def most(name: str) -> int:
        knob = space.get(name)
        values = (scenario.fixed.get(name),) if knob is None else knob.values
        return max((value for value in values if isinstance(value, int)), default=1)

    full = most("max_batch_size") * (1 + most("num_batch_threads")) // rows
    load = scenario.load
    waiting = load.max_in_flight or _OPEN_LOOP_REQUESTS if load.open_loop else load.concurrency or 1
    clients = max(waiting, full, clients_most, _OPEN_LOOP_REQUESTS)
    return Demand(clients=clients, rows=rows, protocol=scenario.request.protocol)


def thread_limits(target: TargetSpec, demand: Demand) -> dict[str, str]:
    """TensorFlow Serving's own limits, by flag, above what is asked at once; none for a server that may have others."""
    if target.runs not in ("local", "docker"):
        return {}
    return dict.fromkeys(THREAD_LIMITS, str(demand.threads))


def thread_words(configuration: Configuration, flags: Mapping[str, str], demand: Demand) -> Iterator[str]:
    """What is to be said of a limit of threads that was asked for."""
    name = "rest_api_num_threads" if demand.protocol == "rest" else "grpc_max_threads"
    text = flags.get(name, "")
    batching = configuration.batching
    if not text.isdigit() or batching is None or batching.max_batch_size is None:
        return
    threads = int(text)
    if batching.max_batch_size > threads * demand.rows:
        rows = f"{demand.rows} row{'' if demand.rows == 1 else 's'}"
        yield (
            f"max_batch_size {batching.max_batch_size} never fills: each request, of {rows}, holds one of "
            f"{threads} threads ({name}) while it waits"
        )
