"""Describes the requests that a simulated server gets: when they come, their rows, their lengths."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.parameters import AUTO_BUCKETS, Boundaries, boundaries_for, rounded_up
from batchtune.errors import ScenarioError
from batchtune.scenario.arrivals import draw, read_trace
from batchtune.scenario.payloads import draw_lengths
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.workload import DISTINCT_LENGTHS, FileInputs, LengthsSpec, LoadSpec, RequestSpec
from batchtune.twin.simulator.simulate import Rows

LONGEST_REQUESTS = 400_000
"""Requests that one simulation sends at most, however long its ramp, steps or trace is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests to simulate: a closed loop of `clients`, or an open loop at the mean rate `rate_rps`.

    `load`: the pattern of arrivals of an open loop; None: Poisson. `think_s`: pause of a client after an answer.
    `rows`, `weights`: rows of each kind of request, and how often it comes. `seed`: one seed gives the same pattern at
    every rate. `lengths`: each is the length of an equal share of the requests; (): the model's inputs have one length,
    or the lengths are unknown.
    """

    clients: int | None = None
    rate_rps: float | None = None
    load: LoadSpec | None = None
    rows: tuple[int, ...] = (1,)
    weights: tuple[float, ...] = (1.0,)
    think_s: float = 0.0
    seed: int = 1
    lengths: tuple[int, ...] = ()

    @property
    def closed(self) -> bool:
        """Whether the requests are those of a closed loop."""
        return self.clients is not None

    @property
    def mean_rows(self) -> float:
        """Mean number of rows of a request."""
        return float(np.average(self.rows, weights=self.weights))

    @property
    def rows_most(self) -> int:
        """Rows of the largest kind of request."""
        return max(self.rows)

    @property
    def changes(self) -> bool:
        """Whether the load itself changes the rate over time: a ramp, steps, a trace."""
        return not self.closed and self.load is not None and self.load.arrivals in ("ramp", "steps", "trace")

    @property
    def offered_rps(self) -> float | None:
        """Mean rate of an open loop over its whole length, requests/s; None for a closed loop, or without a rate."""
        load = self.load
        if self.rate_rps is not None or load is None or not self.changes:
            return None if self.closed else self.rate_rps
        return len(_due_s(load, load.rate_rps, load.duration_s, self.seed)) / load.duration_s

    def at(self, rate_rps: float) -> Traffic:
        """Return an open loop with this pattern of arrivals at another mean rate, requests/s."""
        return replace(self, clients=None, rate_rps=rate_rps, think_s=0.0)

    def due_s(self, requests: int) -> NDArray[np.float64]:
        """Draw about `requests` due times: seconds from the start, ascending, shape (n,).

        A ramp, steps, a trace and bursts last as long as the load, or longer where `requests` need it, but for at most
        LONGEST_REQUESTS requests if `requests` are fewer: a ramp and steps are then shortened as a whole, a trace and
        bursts end earlier.
        """
        load = self.load or _POISSON
        rate_rps = self.rate_rps if self.rate_rps is not None else load.rate_rps
        if load.arrivals in ("ramp", "steps", "trace", "on_off"):
            duration_s = load.duration_s
            if rate_rps is not None:
                most = max(LONGEST_REQUESTS, requests)
                duration_s = min(max(duration_s, requests / rate_rps), most / rate_rps)
                load = _shortened(load, duration_s / load.duration_s)
        else:
            duration_s = requests / (rate_rps or 1.0)
        return _due_s(load, rate_rps, duration_s, self.seed)

    def rows_of(self, requests: int) -> Rows:
        """Draw the rows of each request, shape (requests,); one number where all requests have equally many."""
        if len(self.rows) == 1:
            return self.rows[0]
        shares = np.array(self.weights) / math.fsum(self.weights)
        kinds = np.array(self.rows, dtype=np.int32)
        return np.random.default_rng(self.seed + 1).choice(kinds, size=requests, p=shares)

    def boundaries_of(self, buckets: Boundaries) -> tuple[int, ...]:
        """Return the boundaries of length buckets; for "auto" those that the server would choose for this traffic."""
        return _automatic(self.lengths) if buckets == AUTO_BUCKETS else buckets

    def mean_longest(self, buckets: Boundaries, rows: float) -> float:
        """Return the mean length of the longest request in a batch of `rows` rows from one length bucket."""
        return _mean_longest(self.lengths, self.boundaries_of(buckets), max(rows / self.mean_rows, 1.0))

    def lengths_of(self, requests: int) -> NDArray[np.int32] | None:
        """Draw the length of each request, shape (requests,); None where the traffic has no lengths."""
        if not self.lengths:
            return None
        lengths = np.array(self.lengths, dtype=np.int32)
        return np.random.default_rng(self.seed + 2).choice(lengths, size=requests)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, safe for JSON: `clients`, `rate_rps`, `arrivals` (the name of their pattern, such as
        `poisson`, or `closed`), `rows`, `weights`, `think_s`."""
        load = self.load or _POISSON
        return {
            "clients": self.clients,
            "rate_rps": self.offered_rps,
            "arrivals": "closed" if self.closed else load.arrivals,
            "rows": list(self.rows),
            "weights": list(self.weights),
            "think_s": self.think_s,
        }


_POISSON = LoadSpec(arrivals="poisson", rate=1.0, warm_up=0.0)


def _shortened(load: LoadSpec, ratio: float) -> LoadSpec:
    """Return the load with each of its steps shortened to `ratio` of its duration; from 1 on, and without steps,
    unchanged."""
    if load.steps is None or ratio >= 1.0:
        return load
    steps = [step.model_copy(update={"duration_s": ratio * step.duration_s}) for step in load.steps]
    return load.model_copy(update={"steps": tuple(steps)})


def traffic_of(
    scenario: Scenario,
    *,
    rate_rps: float | None = None,
    concurrency: int | None = None,
) -> Traffic:
    """Return the scenario's traffic; `rate_rps` makes it an open loop at this rate, `concurrency` a closed loop of this
    many clients.

    The scenario's pattern of arrivals is kept; where it is a closed loop, `rate_rps` means Poisson arrivals.
    """
    load = scenario.load
    clients = concurrency
    if concurrency is None and rate_rps is None and not load.open_loop:
        clients = load.concurrency
    shape = None
    if clients is None and load.open_loop:
        shape = load.model_copy(update={"warm_up_s": 0.0})
        rate_rps = load.rate_rps if rate_rps is None else rate_rps
    weights = _weights(scenario.request, shape)
    return Traffic(
        clients=clients,
        rate_rps=None if clients is not None else rate_rps,
        load=shape,
        rows=tuple(weights),
        weights=tuple(weights.values()),
        think_s=load.think_time_s if clients is not None else 0.0,
        seed=load.seed,
        lengths=lengths_of(scenario.request),
    )


def _weights(request: RequestSpec, load: LoadSpec | None) -> dict[int, float]:
    """Rows of a request -> how often they come (in any unit), by the trace where it says so, else by the kinds of
    requests."""
    if load is not None and load.trace is not None:
        traced = _traced(load.trace.file, _rows_of_bodies(request))
        if traced:
            return dict(traced)
    weights: dict[int, float] = {}
    for kind in request.kinds():
        weights[kind.rows or 1] = weights.get(kind.rows or 1, 0.0) + kind.weight
    return weights


def _rows_of_bodies(request: RequestSpec) -> tuple[int, ...]:
    """Rows of each request body, in the order of `payloads.build_requests`; (): bodies come from files, so that their
    number is unknown."""
    rows: list[int] = []
    for kind in request.kinds():
        if isinstance(kind.inputs, FileInputs):
            return ()
        alike = kind.inputs == "zeros" and kind.lengths is None
        rows += [kind.rows or 1] * (1 if alike else request.distinct)
    return tuple(rows)


@lru_cache(maxsize=16)
def _traced(file: str, rows_of_bodies: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """(rows, number of requests) of a trace, rows ascending; (): it names no rows, or cannot be read any more."""
    try:
        _, request_index, rows = read_trace(file)
    except ScenarioError:
        return ()
    if request_index is not None and rows_of_bodies:
        rows = np.array(rows_of_bodies, dtype=np.int32)[request_index % len(rows_of_bodies)]
    return () if rows is None else tuple(sorted(Counter(rows.tolist()).items()))


def lengths_of(request: RequestSpec) -> tuple[int, ...]:
    """Return lengths drawn from the distribution of the scenario's requests, ascending; (): the requests have none, or
    their kinds have different ones."""
    kinds = request.kinds()
    spec = kinds[0].lengths
    if spec is None or any(kind.lengths != spec for kind in kinds):
        return ()
    return _drawn(spec)


@lru_cache(maxsize=16)
def _drawn(spec: LengthsSpec) -> tuple[int, ...]:
    try:
        lengths = draw_lengths(spec, DISTINCT_LENGTHS, np.random.default_rng(1))
    except ScenarioError:
        return ()
    return tuple(sorted(lengths.tolist()))


@lru_cache(maxsize=16)
def _automatic(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return boundaries_for(Counter(map(rounded_up, lengths)))


@lru_cache(maxsize=1024)
def _mean_longest(lengths: tuple[int, ...], boundaries: tuple[int, ...], requests: float) -> float:
    every = np.sort(np.array(lengths, dtype=np.float64))
    total = 0.0
    for members in np.split(every, np.searchsorted(every, boundaries, side="right")):
        if len(members):
            levels = np.arange(len(members) + 1) / len(members)
            total += len(members) * float(members @ np.diff(levels**requests))
    return total / len(every)


@lru_cache(maxsize=64)
def _due_s(load: LoadSpec, rate_rps: float | None, duration_s: float, seed: int) -> NDArray[np.float64]:
    due_s: NDArray[np.float64] = draw(load, rate_rps=rate_rps, duration_s=duration_s, seed=seed).due_ns / 1e9
    due_s.setflags(write=False)
    return due_s
