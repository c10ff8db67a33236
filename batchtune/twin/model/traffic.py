"""The requests that a simulated server gets, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.batching.length_buckets import AUTO_BUCKETS, Boundaries, boundaries_for, rounded_up
from batchtune.errors import ScenarioError
from batchtune.scenario.arrivals import draw, read_trace
from batchtune.scenario.payloads import draw_lengths
from batchtune.scenario.spec.load import LoadSpec
from batchtune.scenario.spec.request import DISTINCT_LENGTHS, FileInputs, LengthsSpec, RequestSpec
from batchtune.scenario.spec.scenario import Scenario
from batchtune.twin.simulator.replica import Rows, drawn_lengths, drawn_rows

LONGEST_REQUESTS = 400_000
"""Most requests that one simulation sends, whatever the length of its ramp, steps or trace."""

_CHANGING = frozenset({"ramp", "steps", "trace"})
_OWN_LENGTH = _CHANGING | {"on_off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests to simulate: a closed loop of `clients`, or an open one of `rate_rps` in the pattern of `load`.

    `rows` and `weights` are the kinds of request; `load` None means Poisson arrivals; `think_s` is a client's pause
    between answer and request. The same seed gives the same pattern at every rate. `lengths`, each for an equal share
    of the requests, are those of a model that leaves a length open; (): they are not known.
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
        return self.clients is not None

    @property
    def mean_rows(self) -> float:
        return float(np.average(self.rows, weights=self.weights))

    @property
    def rows_most(self) -> int:
        return max(self.rows)

    @property
    def changes(self) -> bool:
        """Whether the rate changes over time by itself: a ramp, steps, a trace."""
        return not self.closed and self.load is not None and self.load.arrivals in _CHANGING

    @property
    def offered_rps(self) -> float | None:
        """Mean rate of an open loop, requests/s, over its ramp, steps or trace; None for a closed loop, or without a
        rate."""
        load = self.load
        if self.rate_rps is not None or load is None or not self.changes:
            return None if self.closed else self.rate_rps
        return len(_due_s(load, load.rate_rps, load.duration_s, self.seed)) / load.duration_s

    def at(self, rate_rps: float) -> Traffic:
        """Return the same pattern of arrivals as an open loop at this mean rate, requests/s."""
        return replace(self, clients=None, rate_rps=rate_rps, think_s=0.0)

    def due_s(self, requests: int) -> NDArray[np.float64]:
        """Draw about `requests` due times, shape (n,), seconds from the start, ascending.

        A ramp, steps, a trace and bursts have a length of their own: they are played for as long as the load says, and
        where that is cut to LONGEST_REQUESTS (or `requests`, if they are more) each of the steps is as much shorter.
        """
        load = self.load or _POISSON
        rate_rps = self.rate_rps if self.rate_rps is not None else load.rate_rps
        if load.arrivals in _OWN_LENGTH:
            duration_s = load.duration_s
            if rate_rps is not None:
                most = max(LONGEST_REQUESTS, requests)
                duration_s = min(max(duration_s, requests / rate_rps), most / rate_rps)
                load = _shortened(load, duration_s / load.duration_s)
        else:
            duration_s = requests / (rate_rps or 1.0)
        return _due_s(load, rate_rps, duration_s, self.seed)

    def rows_of(self, requests: int) -> Rows:
        """Draw the rows of each of `requests` requests; one number when all are alike."""
        return drawn_rows(self.rows, self.weights, requests, np.random.default_rng(self.seed + 1))

    def boundaries_of(self, buckets: Boundaries) -> tuple[int, ...]:
        """Resolve length buckets to boundaries; "auto" becomes those that the server would choose for this traffic."""
        return _automatic(self.lengths) if buckets == AUTO_BUCKETS else buckets

    def mean_longest(self, buckets: Boundaries, rows: float) -> float:
        """Mean length of the longest request in a batch of `rows` rows, whose requests share one length bucket."""
        return _mean_longest(self.lengths, self.boundaries_of(buckets), max(rows / self.mean_rows, 1.0))

    def lengths_of(self, requests: int) -> NDArray[np.int32] | None:
        """Draw the length of each request, shape (requests,); None where the traffic has no lengths."""
        return drawn_lengths(self.lengths, requests, np.random.default_rng(self.seed + 2))

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for the reader of a prediction; the pattern of arrivals by its name."""
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
    """With all its steps in this share of its duration."""
    if load.steps is None or ratio >= 1.0:
        return load
    steps = [step.model_copy(update={"duration_s": ratio * step.duration_s}) for step in load.steps]
    return load.model_copy(update={"steps": tuple(steps)})


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
        seed=load.seed if seed is None else seed,
        lengths=lengths_of(scenario.request),
    )


def _weights(request: RequestSpec, load: LoadSpec | None) -> dict[int, float]:
    """How often requests have so many rows: as a trace says of its own, else by the kinds."""
    if load is not None and load.trace is not None:
        traced = _traced(load.trace.file, _rows_of_bodies(request))
        if traced:
            return dict(traced)
    weights: dict[int, float] = {}
    for kind in request.kinds():
        weights[kind.rows or 1] = weights.get(kind.rows or 1, 0.0) + kind.weight
    return weights


def _rows_of_bodies(request: RequestSpec) -> tuple[int, ...]:
    """Rows of each body in the order of `payloads.build_requests`; (): files say how many there are."""
    rows: list[int] = []
    for kind in request.kinds():
        if isinstance(kind.inputs, FileInputs):
            return ()
        alike = kind.inputs == "zeros" and kind.lengths is None
        rows += [kind.rows or 1] * (1 if alike else request.distinct)
    return tuple(rows)


@lru_cache(maxsize=16)
def _traced(file: str, rows_of_bodies: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Numbers of rows, each with its requests in a trace; () where it says none, or cannot be read any more."""
    try:
        trace = read_trace(file)
    except ScenarioError:
        return ()
    rows = trace.rows
    if trace.request_index is not None and rows_of_bodies:
        rows = np.array(rows_of_bodies, dtype=np.int32)[trace.request_index % len(rows_of_bodies)]
    return () if rows is None else tuple(sorted(Counter(rows.tolist()).items()))


def lengths_of(request: RequestSpec) -> tuple[int, ...]:
    """Return the lengths that stand for those of the scenario's requests; () where they have none, or not all kinds the
    same."""
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
