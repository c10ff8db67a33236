"""Which requests does a simulated server get, and when?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.scenario.arrivals import draw
from batchtune.scenario.spec.load import LoadSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.twin.simulator.replica import Rows, drawn_rows

LONGEST_REQUESTS = 400_000
"""Most requests that one simulation sends, whatever the length of its ramp, steps or trace."""

_CHANGING = frozenset({"ramp", "steps", "trace"})
_OWN_LENGTH = _CHANGING | {"on_off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests to simulate: a closed loop of `clients`, or an open one of `rate_rps` in the pattern of `load`.

    `rows` and `weights` are the kinds of request; `load` None means Poisson arrivals; `think_s` is a client's pause
    between answer and request. The same seed gives the same pattern at every rate.
    """

    clients: int | None = None
    rate_rps: float | None = None
    load: LoadSpec | None = None
    rows: tuple[int, ...] = (1,)
    weights: tuple[float, ...] = (1.0,)
    think_s: float = 0.0
    seed: int = 1

    @property
    def closed(self) -> bool:
        return self.clients is not None

    @property
    def mean_rows(self) -> float:
        return float(np.average(self.rows, weights=self.weights))

    @property
    def rows_most(self) -> int:
        return max(self.rows)

    def at(self, rate_rps: float) -> Traffic:
        """The same pattern in an open loop at this mean rate."""
        return replace(self, clients=None, rate_rps=rate_rps, think_s=0.0)

    def steady(self) -> Traffic:
        """Poisson arrivals where the rate changes over time, else the same."""
        changing = self.load is not None and self.load.arrivals in _CHANGING
        return replace(self, load=None) if changing else self

    def due_s(self, requests: int) -> NDArray[np.float64]:
        """When about so many requests are due, shape (n,) in seconds, ascending.

        A ramp, steps, a trace and bursts have a length of their own: they are played for as long as the load says.
        """
        load = self.load or _POISSON
        rate_rps = self.rate_rps if self.rate_rps is not None else load.rate_rps
        if load.arrivals in _OWN_LENGTH:
            duration_s = load.duration_s
            if rate_rps is not None:
                duration_s = min(max(duration_s, requests / rate_rps), LONGEST_REQUESTS / rate_rps)
        else:
            duration_s = requests / (rate_rps or 1.0)
        return _due_s(load, rate_rps, duration_s, self.seed)

    def rows_of(self, requests: int) -> Rows:
        """Rows of each request; one number when all are alike."""
        return drawn_rows(self.rows, self.weights, requests, np.random.default_rng(self.seed + 1))

    def to_dict(self) -> dict[str, Any]:
        """For the reader of a prediction; the pattern by its name."""
        load = self.load or _POISSON
        return {
            "clients": self.clients,
            "rate_rps": self.rate_rps,
            "arrivals": "closed" if self.closed else load.arrivals,
            "rows": list(self.rows),
            "weights": list(self.weights),
            "think_s": self.think_s,
        }


_POISSON = LoadSpec(arrivals="poisson", rate=1.0, warm_up=0.0)


def traffic_of(
    scenario: Scenario,
    *,
    rate_rps: float | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
) -> Traffic:
    """The scenario's traffic; a rate or a number of clients given here replaces its loop.

    A closed loop that is asked for a rate becomes Poisson arrivals.
    """
    load, kinds = scenario.load, scenario.request.kinds()
    clients = concurrency
    if concurrency is None and rate_rps is None and not load.open_loop:
        clients = load.concurrency
    shape = None
    if clients is None and load.open_loop:
        shape = load.model_copy(update={"warm_up_s": 0.0})
        rate_rps = load.rate_rps if rate_rps is None else rate_rps
    weights: dict[int, float] = {}
    for kind in kinds:
        weights[kind.rows or 1] = weights.get(kind.rows or 1, 0.0) + kind.weight
    return Traffic(
        clients=clients,
        rate_rps=None if clients is not None else rate_rps,
        load=shape,
        rows=tuple(weights),
        weights=tuple(weights.values()),
        think_s=load.think_time_s if clients is not None else 0.0,
        seed=load.seed if seed is None else seed,
    )


@lru_cache(maxsize=64)
def _due_s(load: LoadSpec, rate_rps: float | None, duration_s: float, seed: int) -> NDArray[np.float64]:
    due_s: NDArray[np.float64] = draw(load, rate_rps=rate_rps, duration_s=duration_s, seed=seed).due_ns / 1e9
    due_s.setflags(write=False)
    return due_s
