"""Estimates a server's speed from the trials so far, and chooses how long a load must last by it.

The speed is the latency of a lone request, then the time of a batch by its rows. Until a batch was measured, each row
is assumed to take as long as a lone request: few servers are slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.measure.slo import primary_limit
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.tune.trials.trial import Trial

# Throughput measured from the end of one batch to the end of another is exact with any number of them; 4 or 5 leave
# room for a slow one (twins of emulated devices of 250 ms a row, tests/tune/sweep/test_speed.py).

WARM_UP_BATCHES = 1.5
"""Least warm-up in batches: a closed loop starts with a batch of its first request alone; the next batch is full."""

PROBE_WARM_UP_S = 0.3
"""Warm-up of a short run, at most, unless batches take longer."""

PROBE_BATCHES = 4
"""Batches in the measured part of a short closed loop, at least."""

RUN_BATCHES, RUN_BATCHES_MIN = 5, 2
"""Batches in the measured part of a run: RUN_BATCHES as far as the time budget has room, RUN_BATCHES_MIN always."""


TIME_BUDGET_MAX_S = 1800.0
"""The largest time budget that is chosen for a slow server, where the user gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is known of a server's speed.

    `lone_s`: latency of a request while no other is in flight, in seconds; NaN before one was answered.
    `lone_rows`: rows of that request, or SIDE_BY_SIDE for a server that batches continuously.
    `batch_s_by_rows`: rows of a batch, ascending -> the least mean time of its execution in any trial, seconds.
    `full_rps`: requests/s answered while all of the scenario's clients send at once; NaN: not tried.
    """

    lone_s: float = math.nan
    lone_rows: int = 1
    batch_s_by_rows: Mapping[int, float] = field(default_factory=dict)
    full_rps: float = math.nan

    def batch_s(self, rows: float) -> float:
        """Estimate the seconds that a batch of this many rows takes; 0 while nothing is known.

        Linear between the sizes measured, and continued beyond the largest; for fewer rows than the smallest, the time
        of the smallest.
        """
        points = sorted(self.batch_s_by_rows.items())
        if math.isfinite(self.lone_s) and not any(size <= self.lone_rows for size, _ in points):
            points.insert(0, (self.lone_rows, self.lone_s))
        if not points:
            return 0.0
        if len(points) == 1:
            size, seconds = points[0]
            return seconds * max(rows / size, 1.0)
        if rows <= points[0][0]:
            return points[0][1]
        above = next((at for at, (size, _) in enumerate(points) if size >= rows), len(points) - 1)
        (low, low_s), (high, high_s) = points[above - 1 : above + 1]
        return max(low_s + (high_s - low_s) * (rows - low) / (high - low), low_s)

    def turn_s(self, in_flight_rows: float, size: float) -> float:
        """Estimate the seconds until `in_flight_rows` rows are answered, in batches of `size` rows, one after
        another."""
        size = max(min(size, in_flight_rows), 1.0)
        return math.ceil(in_flight_rows / size) * self.batch_s(size)


SIDE_BY_SIDE: Final = 10**9
"""`Pace.lone_rows` of a server that batches continuously: a turn of any number of requests takes as long as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Lengths of one load in seconds: its warm-up, its measured part, and the timeout of a request.

    `batch_s`: how long a batch is expected to take. `turn_s`: how long the last request in the queue is expected to
    wait. 0: unknown.
    """

    warm_up_s: float
    duration_s: float
    timeout_s: float
    batch_s: float = 0.0
    turn_s: float = 0.0

    @property
    def run_s(self) -> float:
        """Seconds from the start of the warm-up to the last answer."""
        return self.warm_up_s + self.duration_s + self.turn_s


def pace_of(trials: Sequence[Trial], scenario: Scenario) -> Pace:
    """Compute the server's pace from these trials.

    The time of a batch size is its shortest mean execution time: with more threads, batches share the device. For a
    server that counts no batches, such as one of kind http, it is the time in which that many rows were answered.
    """
    lone_s = math.nan
    shortest_s: dict[int, float] = {}
    for trial in trials:
        measured = trial.measurement
        if measured is None:
            continue
        if trial.source in ("probe", "node") and trial.request.concurrency == 1:
            lone_s = measured.latency_s["p50"].value
        if trial.configuration.batching is None:
            continue
        times_s = {} if measured.server is None else measured.server.execution_s_by_rows
        if not times_s and trial.source == "calibration" and measured.throughput_rows_per_s.value > 0.0:
            asked = trial.request
            size = int(_batch_rows(scenario, asked.configuration, clients=asked.concurrency, rate_rps=None))
            times_s = {size: size / measured.throughput_rows_per_s.value}
        for rows, seconds in times_s.items():
            shortest_s[rows] = min(seconds, shortest_s.get(rows, math.inf))
    return Pace(
        lone_s=lone_s if math.isfinite(lone_s) else math.nan,
        lone_rows=SIDE_BY_SIDE if scenario.streams else scenario.request.rows_most,
        batch_s_by_rows=_alone_on_the_device(shortest_s),
    )


def _alone_on_the_device(batch_s_by_rows: Mapping[int, float]) -> dict[int, float]:
    """Lower each time to the least of all batches with at least as many rows (rows -> seconds, ascending).

    A batch does not take longer than one of more rows: where it seems to, other threads used the device meanwhile.
    """
    least_s = math.inf
    alone_s: dict[int, float] = {}
    for rows in sorted(batch_s_by_rows, reverse=True):
        least_s = alone_s[rows] = min(least_s, batch_s_by_rows[rows])
    return dict(sorted(alone_s.items()))


def times_of(
    pace: Pace,
    scenario: Scenario,
    configuration: Configuration,
    *,
    clients: int | None = None,
    rate_rps: float | None = None,
    short_s: float | None = None,
) -> RunTimes:
    """Choose the times of a load of this configuration with `clients`, or at `rate_rps`; without both, of the
    scenario's load.

    `short_s`: seconds of the measured part of a short run, longer if a closed loop would have fewer than PROBE_BATCHES
    batches; its warm-up is short too. None: the scenario's times, extended for a slow server where the scenario's file
    does not set them.
    """
    load = scenario.load
    closed = clients if clients is not None or load.open_loop else load.concurrency
    rate_rps = None if closed is not None else rate_rps or load.rate_rps
    rows = _batch_rows(scenario, configuration, clients=closed, rate_rps=rate_rps)
    batch_s = pace.batch_s(rows)
    warm_up_s = load.warm_up_s
    if short_s is not None:
        warm_up_s = min(warm_up_s, PROBE_WARM_UP_S)
    if short_s is not None or "warm_up_s" not in load.model_fields_set:
        warm_up_s = max(warm_up_s, WARM_UP_BATCHES * batch_s)
    run_requests = 100  # Requests of a run of an open loop, at least: 72 independent ones bound p95.
    if short_s is not None:
        duration_s = short_s if closed is None else max(short_s, PROBE_BATCHES * batch_s)
    else:
        duration_s = load.duration_s
        if "duration_s" not in load.model_fields_set and load.arrivals not in {"ramp", "steps", "trace"}:
            requests_s = run_requests / rate_rps if rate_rps else 0.0
            wanted_s = min(max(RUN_BATCHES * batch_s, requests_s), _most_s(scenario))
            duration_s = max(duration_s, wanted_s, RUN_BATCHES_MIN * batch_s)
    in_flight = 2.0 * rows if closed is None else closed * scenario.request.rows_most
    turn_s = pace.turn_s(in_flight, rows)
    timeout_s = scenario.request.timeout_s
    if "timeout_s" not in scenario.request.model_fields_set:
        # Three times what the last request of the queue should take (60 s while the server's speed is unknown), but no
        # more than 600 s, so that a server that hangs is noticed.
        patience_s = 60.0 if math.isnan(pace.lone_s) else 3.0 * turn_s
        timeout_s = max(timeout_s, min(patience_s, 600.0))
    return RunTimes(
        warm_up_s=warm_up_s, duration_s=duration_s, timeout_s=timeout_s, batch_s=batch_s, turn_s=turn_s
    )


def usual_budget_s(batch_s: float) -> float:
    """Return how many seconds a sweep may take where the user gives no budget; `batch_s`: seconds that a batch
    takes."""
    # Lone requests that a sweep may last, at least, where there is no budget: some forty runs of some
    # batches.
    sure_batches = 600
    return min(max(DEFAULT_TIME_BUDGET_S, sure_batches * batch_s), TIME_BUDGET_MAX_S)


def _most_s(scenario: Scenario) -> float:
    """Seconds that a load which is longer than the scenario's may take, so that others still fit in the budget."""
    search = scenario.search
    budget_s = search.budget.time_s if search.budget_is_given else None
    run_share = 1 / 12  # A load that is longer than the scenario's takes at most this share of the budget.
    return run_share * (budget_s or TIME_BUDGET_MAX_S)


def _batch_rows(
    scenario: Scenario, configuration: Configuration, *, clients: int | None, rate_rps: float | None
) -> float:
    """Rows that a batch of this traffic can have: at most those of all clients, or those that arrive while a request
    may wait by the SLO; without batching those of the largest request."""
    rows = scenario.request.rows_most
    if configuration.batching is None:
        return rows
    size = float(configuration.in_force("max_batch_size"))
    limit = primary_limit(scenario.slo)
    if clients is not None:
        size = min(size, float(clients * rows))
    elif rate_rps is not None and limit is not None:
        size = min(size, rate_rps * limit.seconds * rows)
    return max(size, float(rows))
