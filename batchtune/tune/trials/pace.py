"""Estimates a server's speed from the trials so far, and chooses how long a load must last by it.

The speed is the latency of a lone request, then the time of a batch by its rows. Until a batch was measured, each row
is assumed to take as long as a lone request: few servers are slower.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batchtune.batching.parameters import Configuration
from batchtune.measure.slo import primary_limit
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.spec.search_section import DEFAULT_TIME_BUDGET_S
from batchtune.tune.trials.trial import Trial
from batchtune.units import format_duration

# Throughput measured from the end of one batch to the end of another is exact with any number of them; 4 or 5 leave
# room for a slow one (twins of emulated devices of 250 ms a row, tests/tune/sweep/test_sweep.py).

WARM_UP_BATCHES = 1.5
"""Least warm-up in batches: a closed loop starts with a batch of its first request alone; the next batch is full."""

PROBE_WARM_UP_S = 0.3
"""Warm-up of a short run, at most, unless batches take longer (noisy.py, 20 s)."""

RUN_BATCHES, RUN_BATCHES_MIN, RUN_REQUESTS = 4, 2, 100
"""Batches in the measured part of a run: RUN_BATCHES as far as the time budget has room, RUN_BATCHES_MIN and the
RUN_BATCHES of a short closed loop always; requests of an open loop, at least: 72 independent ones bound p95."""

BATCHES, REQUESTS = 40, 1000
"""A run of a search lasts as long as so many batches and requests take, if its share of the budget allows (noisy.py,
very_slow)."""

LONG_SHARE = 0.067
"""Share of the time budget that a load may last that is longer than the scenario says (zoo.py)."""

TIME_BUDGET_MAX_S = 1800.0
"""The largest time budget that is chosen for a slow server, where the user gives none (zoo.py)."""


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


SIDE_BY_SIDE: Final = sys.maxsize
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

    `short_s`: seconds of the measured part of a short run, longer if a closed loop would have fewer than RUN_BATCHES
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
    if short_s is not None:
        duration_s = short_s if closed is None else max(short_s, RUN_BATCHES * batch_s)
    else:
        duration_s = load.duration_s
        if "duration_s" not in load.model_fields_set and load.arrivals not in {"ramp", "steps", "trace"}:
            requests_s = RUN_REQUESTS / rate_rps if rate_rps else 0.0
            wanted_s = min(max(RUN_BATCHES * batch_s, requests_s), _most_s(scenario))
            duration_s = max(duration_s, wanted_s, RUN_BATCHES_MIN * batch_s)
    in_flight = 2.0 * rows if closed is None else closed * scenario.request.rows_most
    turn_s = pace.turn_s(in_flight, rows)
    timeout_s = scenario.request.timeout_s
    if "timeout_s" not in scenario.request.model_fields_set:
        # Three times what the last request of the queue should take (a minute while the server's speed is unknown), but
        # no more than 600 s, so that a server that hangs is noticed (tests/tune/trials/test_pace.py).
        patience_s = 60.0 if math.isnan(pace.lone_s) else 3.0 * turn_s
        timeout_s = max(timeout_s, min(patience_s, 600.0))
    return RunTimes(
        warm_up_s=warm_up_s, duration_s=duration_s, timeout_s=timeout_s, batch_s=batch_s, turn_s=turn_s
    )


def usual_budget_s(batch_s: float) -> float:
    """Return how many seconds a sweep may take where the user gives no budget; `batch_s`: seconds that a batch
    takes."""
    return min(max(DEFAULT_TIME_BUDGET_S, BATCHES * batch_s / LONG_SHARE), TIME_BUDGET_MAX_S)


def _most_s(scenario: Scenario) -> float:
    """Seconds that a load which is longer than the scenario's may take, so that others still fit in the budget."""
    search = scenario.search
    budget_s = search.budget.time_s if search.budget_is_given else None
    return LONG_SHARE * (budget_s or TIME_BUDGET_MAX_S)


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


# How many rows the batches of a configuration hold, and how many clients fill them.

UNBATCHED_CLIENTS = 16
"""Clients of a closed loop that are enough to keep a server without batching busy (noisy.py, parallel)."""


def _has_no_size(configuration: Configuration, scenario: Scenario) -> bool:
    """Whether the server has no parameter that is known to be the largest batch."""
    named = {name for name, _, _ in configuration.words}
    return not scenario.sizes_batches and "max_batch_size" not in named


def rows_of(configuration: Configuration, scenario: Scenario) -> int:
    """Return the rows of the largest batch, with several models their sum over the models; without batching, or where
    the size of a batch is unknown, the rows of the largest request."""
    if configuration.batching is None or _has_no_size(configuration, scenario):
        return scenario.request.rows_most
    names = [f"{own.name}:max_batch_size" for own in scenario.target.models]
    return sum(int(configuration.in_force(name)) for name in names or ["max_batch_size"])


def fits_requests(configuration: Configuration, scenario: Scenario) -> bool:
    """Whether the scenario's largest request fits into a batch; with several models, that of each model into its batch.
    True where the size of a batch is unknown."""
    if _has_no_size(configuration, scenario):
        return True
    requests = {
        f"{own.name}:max_batch_size": own.request or scenario.request for own in scenario.target.models
    }
    sizes = requests or {"max_batch_size": scenario.request}
    return all(configuration.in_force(name) >= request.rows_most for name, request in sizes.items())


def clients_to_fill(configuration: Configuration, scenario: Scenario) -> int:
    """Return how many clients of a closed loop keep every batch full: so many that each thread has the requests of two
    batches.

    Without batching UNBATCHED_CLIENTS; for a server of kind http without a known largest batch, 64.
    """
    if configuration.batching is None:
        return UNBATCHED_CLIENTS
    # Clients of a closed loop that keep a server busy whose largest batch, or most of sequences, is not known
    # (virtual_llm.py).
    clients_of_unknown = 64
    if _has_no_size(configuration, scenario):
        return clients_of_unknown
    requests = -(-int(configuration.in_force("max_batch_size")) // scenario.request.rows_most)
    threads = int(configuration.in_force("num_batch_threads", cpus=scenario.target.cpus) or 1)
    return max(2 * requests * threads, 2)


# The space and the times that a new scenario gets by the pace of its server.


def tried_pace(scenario: Scenario, *, lone_s: float, larger_s: float, larger_rows: int) -> Pace:
    """Return a server's pace from two probes: `lone_s` is the latency of one of the scenario's requests sent alone,
    `larger_s` that of a request of `larger_rows` rows, in seconds."""
    rows = scenario.request.rows
    batch_s_by_rows = {rows: lone_s, larger_rows: max(larger_s, lone_s)}
    return Pace(lone_s=lone_s, lone_rows=rows, batch_s_by_rows=batch_s_by_rows)


def proposed(scenario: Scenario, pace: Pace) -> dict[str, Any]:
    """Return the keys to add to a scenario's file for a server of this pace: {"load", "search", "fixed"} -> {key:
    value}, such as `{"load": {}, "search": {"budget": {"time": "3m"}}, "fixed": {}}`, without keys that the scenario
    sets itself."""
    space = _space(scenario, pace)
    quick = _is_quick(scenario, pace, space)
    search: dict[str, Any] = {}
    # Of a model so quick that two seconds are a trial; of a slower one it is what a sure answer takes.
    quick_budget_s = 90.0
    if not scenario.search.budget_is_given:
        budget_s = quick_budget_s if quick else usual_budget_s(pace.lone_s)
        search["budget"] = {"time": format_duration(math.ceil(budget_s))}
    if "space" not in scenario.search.model_fields_set:
        search["grow"] = True
        search["space"] = {name: values for name, values in space.items() if name not in scenario.fixed}
    load: dict[str, Any] = {}
    # Of such a trial; of a slower model they follow from its speed.
    quick_times = {"warm_up": "500ms", "duration": "2s"}
    if quick and not {"warm_up_s", "duration_s"} & scenario.load.model_fields_set:
        load = dict(quick_times)
    named = {*scenario.search.space, *scenario.fixed}
    queued_batches = 100  # The server's own 10 refuse a burst that 100 would answer in time.
    fixed = {} if "max_enqueued_batches" in named else {"max_enqueued_batches": queued_batches}
    return {"load": load, "search": search, "fixed": fixed}


def _space(scenario: Scenario, pace: Pace) -> dict[str, list[int]]:
    limit = primary_limit(scenario.slo)
    limit_s = math.inf if limit is None else limit.seconds
    return {
        "max_batch_size": _sizes(scenario, pace, limit_s),
        "batch_timeout_micros": _timeouts(pace, limit_s),
        "num_batch_threads": _threads(scenario),
    }


def _sizes(scenario: Scenario, pace: Pace, limit_s: float) -> list[int]:
    """Batch sizes to search: the request's rows times 1, 2, 4, … 128, as far as the clients can fill them.

    Those of which two batches take longer than the limit are left out, but for the smallest four.
    """
    rows, clients = scenario.request.rows_most, scenario.load.concurrency
    most = math.inf if clients is None else clients * rows
    sizes = [rows << power for power in range(8)]
    useful = [size for size in sizes if 2.0 * pace.batch_s(size) <= limit_s]
    few_sizes = 4  # Sizes and timeouts that are tried whatever the limit.
    return [size for size in sizes if size <= max([*useful, sizes[few_sizes - 1]]) and size <= most] or [rows]


def _timeouts(pace: Pace, limit_s: float) -> list[int]:
    """Batch timeouts to search, in microseconds: 0, then the five largest up to a quarter of the limit."""
    longest_s = min(limit_s / 4.0, max(10e-3, 2.0 * pace.lone_s))
    timeouts_micros = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 500_000)
    return [0, *[micros for micros in timeouts_micros if micros / 1e6 <= longest_s][-5:]]


def _threads(scenario: Scenario) -> list[int]:
    """Numbers of batch threads to search: 1, 2, 4, 8, up to twice the server's CPUs."""
    cpus = scenario.target.cpus
    threads = (1, 2, 4, 8)
    return [count for count in threads if cpus is None or count <= max(2 * len(cpus), 2)]


def _is_quick(scenario: Scenario, pace: Pace, space: Mapping[str, list[int]]) -> bool:
    """Whether two seconds are long enough for a trial: for RUN_BATCHES of the largest size and for RUN_REQUESTS."""
    batch_s = pace.batch_s(space["max_batch_size"][-1])
    rate_rps = scenario.load.rate_rps or math.inf
    return max(RUN_BATCHES * batch_s, RUN_REQUESTS / rate_rps) <= 2.0
