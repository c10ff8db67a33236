"""Proposes a space, a length of trials and a budget for a model of this speed, where the scenario leaves them open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from batchtune.measure.slo import primary_limit
from batchtune.scenario.spec.scenario import Scenario
from batchtune.scenario.units import format_duration
from batchtune.tune.sweep.sweep import usual_budget_s
from batchtune.tune.trials.pace import Pace

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
TIMEOUTS_MICROS: Final = (0, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 500_000)
THREADS: Final = (1, 2, 4, 8)

QUICK_BUDGET_S: Final = 90.0
"""Of a model so quick that two seconds are a trial; of a slower one it is what a sure answer takes."""
_QUICK_TIMES: Final = {"warm_up": "500ms", "duration": "2s"}
"""Of such a trial; of a slower model they follow from its speed."""
_QUICK_BATCHES: Final = 5
_QUICK_REQUESTS: Final = 100
"""Batches of the largest size, and requests, that two seconds must hold."""

_TIMEOUTS_MOST: Final = 6
_FEW_SIZES: Final = 4
"""Sizes and timeouts that are tried whatever the limit."""
_QUEUED_BATCHES: Final = 100
"""The server's own 10 refuse a burst that 100 would answer in time."""


def pace_of(scenario: Scenario, *, lone_s: float, larger_s: float, larger_rows: int) -> Pace:
    """`lone_s` is the time of one request, `larger_s` of one with `larger_rows` rows."""
    rows = scenario.request.rows
    batch_s_by_rows = {rows: lone_s, larger_rows: max(larger_s, lone_s)}
    return Pace(lone_s=lone_s, lone_rows=rows, batch_s_by_rows=batch_s_by_rows)


def proposed(scenario: Scenario, pace: Pace) -> dict[str, Any]:
    """What to add to a scenario's document: `load`, `search` and `fixed`, as far as the scenario leaves them open."""
    space = _space(scenario, pace)
    quick = _is_quick(scenario, pace, space)
    search: dict[str, Any] = {}
    if not scenario.search.budget_is_given:
        search["budget"] = {"time": _whole(QUICK_BUDGET_S if quick else usual_budget_s(pace.lone_s))}
    if "space" not in scenario.search.model_fields_set:
        search["grow"] = True
        search["space"] = {name: values for name, values in space.items() if name not in scenario.fixed}
    load: dict[str, Any] = {}
    if quick and not {"warm_up_s", "duration_s"} & scenario.load.model_fields_set:
        load = dict(_QUICK_TIMES)
    named = {*scenario.search.space, *scenario.fixed}
    fixed = {} if "max_enqueued_batches" in named else {"max_enqueued_batches": _QUEUED_BATCHES}
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
    """Powers of two that hold a request, that the clients can fill, and of which two are done within the limit."""
    rows, clients = scenario.request.rows_most, scenario.load.concurrency
    most = math.inf if clients is None else clients * rows
    sizes = [rows * size for size in SIZES]
    useful = [size for size in sizes if 2.0 * pace.batch_s(size) <= limit_s]
    return [size for size in sizes if size <= max([*useful, sizes[_FEW_SIZES - 1]]) and size <= most] or [
        rows
    ]


def _timeouts(pace: Pace, limit_s: float) -> list[int]:
    """From none to a quarter of the limit; those that a model of this speed does not notice are left out."""
    longest_s = min(limit_s / 4.0, max(10e-3, 2.0 * pace.lone_s))
    waiting = [micros for micros in TIMEOUTS_MICROS if pace.lone_s / 20.0 <= micros / 1e6 <= longest_s]
    return [0, *[micros for micros in waiting if micros][-_TIMEOUTS_MOST + 1 :]]


def _threads(scenario: Scenario) -> list[int]:
    """Up to twice the CPUs that the server has."""
    cpus = scenario.target.cpus
    return [count for count in THREADS if cpus is None or count <= max(2 * len(cpus), 2)]


def _is_quick(scenario: Scenario, pace: Pace, space: Mapping[str, list[int]]) -> bool:
    """Whether two seconds hold batches and requests enough for a trial."""
    batch_s = pace.batch_s(space["max_batch_size"][-1])
    rate_rps = scenario.load.rate_rps or math.inf
    return max(_QUICK_BATCHES * batch_s, _QUICK_REQUESTS / rate_rps) <= 2.0


def _whole(seconds: float) -> str:
    return format_duration(math.ceil(seconds))
