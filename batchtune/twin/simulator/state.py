"""What is the state of a simulated run? Records that Python fills, the compiled event loop changes, Python reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

# Compiled functions create no arrays, so they need no reference counts (`_nrt`); without them the event loop is over
# ten times as fast (0.5-1.3 against 11-19 million requests per second). Divisions by zero give inf and nan as in numpy.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call and keep the machine code beside the module, or in the user's cache.

    numba's cache notices a change of the file that holds the function, not of another file that it calls into: what
    is compiled together lives in one file. Where nothing can be written, each process compiles anew.
    """
    try:
        return cast("Callable[P, R]", numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no locator available: neither folder can be written
        return cast("Callable[P, R]", numba.njit(**_OPTIONS)(function))


def compiled_part(function: Callable[P, R]) -> Callable[P, R]:
    """Compile as a part of the compiled functions that call it; kept with them, not callable from Python.

    Without an entry from Python for each part the event loop compiles in 2.5 s instead of 4.1 s.
    """
    return cast(
        "Callable[P, R]", numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    )


REQUEST = np.dtype(
    [
        ("due_s", np.float64),
        ("latency_s", np.float64),
        ("at_s", np.float64),  # when it leaves the list that it is in: the front end's or the clients'
        ("batch", np.int32),
        ("rows", np.int32),
        ("length", np.int32),  # 0 where requests have none
        ("queue", np.int32),  # of its replica's, that of its length
        ("parts_left", np.int32),
        ("next", np.int32),
    ]
)
PART = np.dtype([("request", np.int32), ("next", np.int32)])
BATCH = np.dtype(
    [
        ("start_s", np.float64),
        ("rows", np.int32),
        ("longest", np.int32),
        ("first_part", np.int32),
        ("last_part", np.int32),
        ("next", np.int32),
    ]
)
RUNNING = np.dtype([("finish_s", np.float64), ("batch", np.int64)])
QUEUE = np.dtype(
    [
        ("open_batch", np.int64),
        ("open_rows", np.int64),
        ("opened_s", np.float64),
        ("waiting", np.int64),
        ("waiting_first", np.int64),
        ("waiting_last", np.int64),
    ]
)
REPLICA = np.dtype(
    [
        ("turn", np.int64),  # the queue that is asked next
        ("times_out_s", np.float64),  # the first open batch that an idle thread waits for
        ("idle_threads", np.int64),
        ("running", np.int64),
        ("in_flight", np.int64),
        ("device_free_s", np.float64),
        ("served_s", np.float64),  # what each running batch has got of a shared device so far
        ("served_at_s", np.float64),
        ("busy_since_s", np.float64),
        ("busy_s", np.float64),
        ("front_free_s", np.float64),
        ("front_first", np.int64),
        ("front_last", np.int64),
        ("client_first", np.int64),
        ("client_last", np.int64),
        ("last_done_s", np.float64),
    ]
)
SENT, PARTS, BATCHES, STARTED, ROUTED = range(5)
NONE = -1
REFUSAL_S = 1e-4
"""How soon at the earliest a refused client of a closed loop sends again: a loop without it would never move on."""


class World(NamedTuple):
    """Everything a run reads and writes.

    `requests`, `parts`, `batches`, `replicas`, `queues` [replicas x `buckets`], `running` [replicas, threads]:
    records as above; `counts`: how many of each are used; `route` [requests]: the replica of each request, empty for
    the least loaded; `cost_s` [rows + 1]: execution alone on the device, padding included, and what each unit of the
    longest request's length adds to it (`length_cost_s`); `normals`: standard normal draws for the jitter; `next_s`: a
    binary tree whose leaves are the next events of the replicas, each node the earlier of its two children.
    `planned`: requests whose due time is given; further ones (a closed loop's) are sent when one is answered.
    """

    requests: NDArray[Any]
    parts: NDArray[Any]
    batches: NDArray[Any]
    replicas: NDArray[Any]
    queues: NDArray[Any]
    buckets: int
    running: NDArray[Any]
    counts: NDArray[np.int64]
    next_s: NDArray[np.float64]
    route: NDArray[np.int32]
    cost_s: NDArray[np.float64]
    length_cost_s: NDArray[np.float64]
    normals: NDArray[np.float64]
    planned: int
    lone: bool
    splits: bool
    serial: bool
    batch_rows_max: int
    task_rows_max: int
    batches_max: int
    timeout_s: float
    contention: float
    sigma: float
    half_front_s: float
    delay_s: float
    count_from_s: float
