"""Holds the two compiled kernels of the simulator: the event loop, and a shorter one for plain traffic.

The event loop has one state for the whole run (`World`), in arrays that Python fills and reads. A replica has four
kinds of event: a batch ends, an open batch times out, the front end passes a request to its queue, a client of a closed
loop sends again. Events at one instant are handled in this order, and before requests that arrive then; these arrive
one after another, and after each one idle threads look at the queues. A request takes 164 µs interpreted and 0.08 µs
compiled on a core of a Xeon; compiling takes 2.5 to 5 s once (tests/benchmarks/twin/simulator.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

# Compiled functions create no arrays, so they need no reference counts (`_nrt`); without them the event loop is over
# ten times as fast (0.5-1.3 against 11-19 million requests per second). Divisions by zero give inf and nan as in numpy.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def compiled(function: Function) -> Function:
    """Return a function that numba compiles at its first call; the machine code is cached beside the module, or in the
    user's cache folder.

    The cache notices a change of the file of the function, but not of other files whose functions it calls, so that all
    compiled functions are in this file. Where neither folder can be written, each process compiles again.
    """
    try:
        return cast("Function", numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no locator available: neither folder can be written
        return cast("Function", numba.njit(**_OPTIONS)(function))


def compiled_part(function: Function) -> Function:
    """Return a function that is compiled as a part of its compiled callers, and that Python cannot call.

    Without a Python interface for each part the event loop compiles in 2.5 s instead of 4.1 s.
    """
    return cast("Function", numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function))


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
        ("turn", np.int64),  # the queue that is looked at next
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


class World(NamedTuple):
    """The state of the event loop: everything that a run reads and writes.

    `requests`, `parts`, `batches`, `replicas`, `queues` [replicas x `buckets`], `running` [replicas, threads]: records
    of the types above. `counts`: how many of them are in use, by SENT, PARTS, BATCHES, STARTED, ROUTED.
    `next_s`: when the next event of each replica comes, as the leaves of a binary tree whose nodes have the earlier
    time of their two children. `route` [requests]: replica of each request; empty: the least loaded one.
    `cost_s` [rows + 1]: seconds of a batch alone on the device, padding included. `length_cost_s` [rows + 1]: seconds
    that each unit of its longest request's length adds. `normals`: standard normal draws for the jitter.
    `planned`: requests whose due time is given; further ones (of a closed loop) are sent when one is answered.
    `lone`: without batching. `splits`: large requests are split. `serial`, `contention`: as in `Device`.
    `batch_rows_max`, `task_rows_max`: rows of a batch, and of a request that is accepted, at most.
    `batches_max`: waiting batches of a queue at most, the open one included. `timeout_s`: of a batch.
    `sigma`: of the log-normal jitter. `half_front_s`: half of the front end's time for a request.
    `delay_s`: added to each latency. `count_from_s`: when busy time begins to count.
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


# The plain kernel simulates one queue of equal requests batch by batch instead of event by event.
#
# It is for open arrivals whose rows fill a batch evenly, on one replica without a front end, and on a device that is
# serial, parallel or used by one thread. When a batch starts then follows at once from when a thread is free, when the
# batch is full, and when it times out. The event loop takes 7 to 26 times as long for the same figures: 10 million
# requests a second against 70 million in batches of 2, 12 against 320 in batches of 31
# (tests/benchmarks/twin/simulator.py).

QUEUE_FULL = -1


class PlainPlan(NamedTuple):
    """The parameters of the plain kernel: `size`, requests of a full batch; `batches_max`, waiting batches at most;
    `sigma` of the log-normal jitter; the others as in `World`."""

    size: int
    batches_max: int
    threads: int
    serial: bool
    timeout_s: float
    sigma: float
    delay_s: float
    count_from_s: float


class PlainRun(NamedTuple):
    """The arrays that the plain kernel writes, [requests] each: latency and batch number of each request; requests and
    start of each batch (as many entries as there are batches).

    `totals` [2]: seconds in which the device was busy from `count_from_s` on, and when the last answer came.
    `free_s` [threads]: from when on each thread is free, -inf at first.
    """

    latency_s: NDArray[np.float64]
    batch: NDArray[np.int32]
    batch_requests: NDArray[np.int32]
    batch_start_s: NDArray[np.float64]
    totals: NDArray[np.float64]
    free_s: NDArray[np.float64]


@compiled
def simulate_plain(
    due_s: NDArray[np.float64],
    cost_s: NDArray[np.float64],
    normals: NDArray[np.float64],
    plan: PlainPlan,
    run: PlainRun,
) -> int:
    """Run the plain kernel (one replica, one queue, requests of equal rows) and write into `run`.

    Returns the number of batches; or QUEUE_FULL as soon as a request would be refused, and what `run` holds then
    means nothing. `due_s` [requests]: seconds, ascending. `cost_s` [`plan.size` + 1]: seconds of a batch of so
    many requests. `normals`: standard normal draws for the jitter, one for each batch; after the last one the
    first is used again. `run`: fresh from `simulate.new_plain_run`. Events at one instant have the order that
    they have in the event loop.
    """
    requests = len(due_s)
    free_s = run.free_s
    device_free_s = covered_s = last_done_s = -math.inf
    busy_s = 0.0
    first = arrived = batches = thread = 0
    while first < requests:
        for other in range(plan.threads):
            if free_s[other] < free_s[thread]:
                thread = other
        timed_out_s = due_s[first] + plan.timeout_s
        full_s = due_s[first + plan.size - 1] if first + plan.size <= requests else math.inf
        start_s = max(free_s[thread], min(timed_out_s, full_s))
        if start_s == full_s and full_s < timed_out_s:
            taken = plan.size
        else:
            while arrived < requests and due_s[arrived] < start_s:
                arrived += 1
            taken = max(1, min(plan.size, arrived - first))
            if arrived - first > plan.size * plan.batches_max:
                return QUEUE_FULL
        work_s = cost_s[taken]
        if plan.sigma > 0.0:
            draw = normals[batches % len(normals)]
            work_s *= math.exp(plan.sigma * draw - 0.5 * plan.sigma * plan.sigma)
        finish_s = start_s + work_s
        if plan.serial:
            finish_s = max(start_s, device_free_s) + work_s
            device_free_s = finish_s
        free_s[thread] = finish_s
        busy_s += max(finish_s - max(start_s, covered_s, plan.count_from_s), 0.0)
        covered_s = max(covered_s, finish_s)
        done_s = finish_s + plan.delay_s
        last_done_s = max(last_done_s, done_s)
        for request in range(first, first + taken):
            run.latency_s[request] = done_s - due_s[request]
            run.batch[request] = batches
        run.batch_requests[batches] = taken
        run.batch_start_s[batches] = start_s
        batches += 1
        first += taken
        arrived = max(arrived, first)
    run.totals[0] = busy_s
    run.totals[1] = last_done_s
    return batches


@compiled
def simulate(world: World) -> None:
    """Run the event loop until every request is answered or refused; results are written into `world`."""
    counts = world.counts
    while True:
        event_s = world.next_s[1]
        request = counts[SENT]
        due_s = world.requests[request].due_s if request < world.planned else math.inf
        if due_s == math.inf and event_s == math.inf:
            return
        if due_s < event_s:
            counts[SENT] += 1
            _arrive(world, request, due_s)
        else:
            _handle(world, _earliest(world), event_s)


@compiled_part
def _earliest(world: World) -> int:
    leaves = len(world.next_s) // 2
    node = 1
    while node < leaves:
        node *= 2
        if world.next_s[node + 1] < world.next_s[node]:
            node += 1
    return node - leaves


@compiled_part
def _reckon(world: World, index: int) -> None:
    """Write into `next_s` when the next event of a replica comes."""
    replica = world.replicas[index]
    event_s = min(_finish_s(world, index), replica.times_out_s)
    if replica.front_first != NONE:
        event_s = min(event_s, world.requests[replica.front_first].at_s)
    if replica.client_first != NONE:
        event_s = min(event_s, world.requests[replica.client_first].at_s)
    node = len(world.next_s) // 2 + index
    world.next_s[node] = event_s
    while node > 1:
        node //= 2
        world.next_s[node] = min(world.next_s[2 * node], world.next_s[2 * node + 1])


@compiled_part
def _finish_s(world: World, index: int) -> float:
    replica = world.replicas[index]
    if replica.running == 0:
        return math.inf
    finish_s = world.running[index, replica.running - 1].finish_s
    if world.serial or world.contention == 0.0:
        return float(finish_s)
    left_s = max(finish_s - replica.served_s, 0.0)
    return float(replica.served_at_s + left_s * (1.0 + world.contention * (replica.running - 1)))


@compiled_part
def _handle(world: World, index: int, now_s: float) -> None:
    replica = world.replicas[index]
    if _finish_s(world, index) <= now_s:
        _finish(world, index, now_s)
        _start(world, index, now_s)
    elif replica.times_out_s <= now_s:
        _start(world, index, now_s)
    elif replica.front_first != NONE and world.requests[replica.front_first].at_s <= now_s:
        request = replica.front_first
        replica.front_first = world.requests[request].next
        _offer(world, index, request, now_s)
    else:
        replica.client_first = world.requests[replica.client_first].next
        request = world.counts[SENT]
        if request < len(world.requests):
            world.counts[SENT] += 1
            world.requests[request].due_s = now_s
            _arrive(world, request, now_s)
    _reckon(world, index)


@compiled_part
def _arrive(world: World, request: int, now_s: float) -> None:
    index = world.route[request] if len(world.route) else _least_loaded(world)
    replica = world.replicas[index]
    replica.in_flight += 1
    if world.half_front_s > 0.0:
        replica.front_free_s = max(now_s, replica.front_free_s) + world.half_front_s
        world.requests[request].at_s = replica.front_free_s
        world.requests[request].next = NONE
        if replica.front_first == NONE:
            replica.front_first = request
        else:
            world.requests[replica.front_last].next = request
        replica.front_last = request
    else:
        _offer(world, index, request, now_s)
    _reckon(world, index)


@compiled_part
def _least_loaded(world: World) -> int:
    """Return the replica with the fewest unanswered requests; of several the next after the last one chosen."""
    many = len(world.replicas)
    best = turn = world.counts[ROUTED]
    for step in range(1, many):
        index = turn + step if turn + step < many else turn + step - many
        if world.replicas[index].in_flight < world.replicas[best].in_flight:
            best = index
    world.counts[ROUTED] = (best + 1) % many
    return int(best)


@compiled_part
def _offer(world: World, index: int, request: int, now_s: float) -> None:
    """Put a request into its queue and let idle threads look at the queues, or refuse it."""
    if _queue(world, index, request, now_s):
        _start(world, index, now_s)
        return
    replica = world.replicas[index]
    replica.in_flight -= 1
    world.requests[request].latency_s = math.inf
    # How soon at the earliest a refused client of a closed loop sends again: a loop without it would never move
    # on.
    refusal_s = 1e-4
    if world.planned < len(world.requests):
        _send_again(world, index, request, now_s + max(world.half_front_s + world.delay_s, refusal_s))


@compiled_part
def _queue(world: World, index: int, request: int, now_s: float) -> bool:
    """Put a request into its queue, as `BatchQueue.schedule` of the server does. Returns False if it is refused."""
    queue = world.queues[index * world.buckets + world.requests[request].queue]
    rows, most = world.requests[request].rows, world.batch_rows_max
    if world.lone:
        _join(world, queue, request, rows, now_s)
        _close(world, queue)
        return True
    if rows > world.task_rows_max:
        return False
    if queue.open_rows + rows > most:
        free_batches = world.batches_max - queue.waiting - 1
        if world.splits:
            if rows > free_batches * most + most - queue.open_rows:
                return False
        elif free_batches <= 0:
            return False
    if not world.splits:
        _join(world, queue, request, rows, now_s)
        return True
    while rows > 0:
        room = most - queue.open_rows
        part = min(rows, room if room > 0 else most)
        _join(world, queue, request, part, now_s)
        rows -= part
    return True


@compiled_part
def _join(world: World, queue: Any, request: int, rows: int, now_s: float) -> None:
    """Put `rows` rows of a request into the open batch, or into a new one where that has no room for them."""
    counts = world.counts
    if queue.open_batch != NONE and queue.open_rows + rows > world.batch_rows_max:
        _close(world, queue)
    part = counts[PARTS]
    counts[PARTS] += 1
    if queue.open_batch == NONE:
        queue.open_batch = counts[BATCHES]
        counts[BATCHES] += 1
        queue.opened_s = now_s
        world.batches[queue.open_batch].first_part = part
    else:
        world.parts[world.batches[queue.open_batch].last_part].next = part
    batch = world.batches[queue.open_batch]
    batch.last_part = part
    batch.rows += rows
    batch.longest = max(batch.longest, world.requests[request].length)
    queue.open_rows = batch.rows
    world.parts[part].request = request
    world.parts[part].next = NONE
    world.requests[request].parts_left += 1
    if world.requests[request].batch == NONE:
        world.requests[request].batch = queue.open_batch


@compiled_part
def _close(world: World, queue: Any) -> None:
    world.batches[queue.open_batch].next = NONE
    if queue.waiting == 0:
        queue.waiting_first = queue.open_batch
    else:
        world.batches[queue.waiting_last].next = queue.open_batch
    queue.waiting_last = queue.open_batch
    queue.waiting += 1
    queue.open_batch = NONE
    queue.open_rows = 0


@compiled_part
def _start(world: World, index: int, now_s: float) -> None:
    """Start batches on idle threads, as `SharedBatchScheduler.take` of the server does: from the queues in turn.

    Writes into `times_out_s` when the first open batch times out for which an idle thread waits; inf: none.
    """
    replica, queues = world.replicas[index], world.buckets
    asked = 0
    times_out_s = math.inf
    while replica.idle_threads > 0 and asked < queues:
        queue = world.queues[index * queues + replica.turn]
        replica.turn = replica.turn + 1 if replica.turn + 1 < queues else 0
        asked += 1
        batch = queue.open_batch
        if queue.waiting > 0:
            batch = queue.waiting_first
            queue.waiting_first = world.batches[batch].next
            queue.waiting -= 1
        elif batch == NONE:
            continue
        elif queue.open_rows >= world.batch_rows_max or now_s >= queue.opened_s + world.timeout_s:
            queue.open_batch = NONE
            queue.open_rows = 0
        else:
            times_out_s = min(times_out_s, queue.opened_s + world.timeout_s)
            continue
        _run(world, index, batch, now_s)
        asked = 0
        times_out_s = math.inf
    replica.times_out_s = times_out_s if replica.idle_threads > 0 else math.inf


@compiled_part
def _run(world: World, index: int, batch: int, now_s: float) -> None:
    replica, counts = world.replicas[index], world.counts
    world.batches[batch].start_s = now_s
    rows, longest = world.batches[batch].rows, world.batches[batch].longest
    work_s = world.cost_s[rows] + world.length_cost_s[rows] * longest
    if world.sigma > 0.0:
        draw = world.normals[counts[STARTED] % len(world.normals)]
        work_s *= math.exp(world.sigma * draw - 0.5 * world.sigma * world.sigma)
    counts[STARTED] += 1
    if replica.running == 0:
        replica.busy_since_s = now_s
    if world.serial:
        replica.device_free_s = max(now_s, replica.device_free_s) + work_s
        finish_s = replica.device_free_s
    elif world.contention == 0.0:
        finish_s = now_s + work_s
    else:
        _serve(world, index, now_s)
        finish_s = replica.served_s + work_s
    place = replica.running  # descending, so that the first to finish is the last entry
    while place > 0 and world.running[index, place - 1].finish_s <= finish_s:
        world.running[index, place].finish_s = world.running[index, place - 1].finish_s
        world.running[index, place].batch = world.running[index, place - 1].batch
        place -= 1
    world.running[index, place].finish_s = finish_s
    world.running[index, place].batch = batch
    replica.running += 1
    replica.idle_threads -= 1


@compiled_part
def _serve(world: World, index: int, now_s: float) -> None:
    """Add to `served_s` the time of the shared device that each running batch got since the last call."""
    replica = world.replicas[index]
    if replica.running > 0:
        replica.served_s += (now_s - replica.served_at_s) / (1.0 + world.contention * (replica.running - 1))
    replica.served_at_s = now_s


@compiled_part
def _finish(world: World, index: int, now_s: float) -> None:
    replica = world.replicas[index]
    _serve(world, index, now_s)
    replica.running -= 1
    replica.idle_threads += 1
    if replica.running == 0:
        replica.busy_s += max(now_s - max(replica.busy_since_s, world.count_from_s), 0.0)
    part = world.batches[world.running[index, replica.running].batch].first_part
    while part != NONE:
        request = world.parts[part].request
        world.requests[request].parts_left -= 1
        if world.requests[request].parts_left == 0:
            _answer(world, index, request, now_s)
        part = world.parts[part].next


@compiled_part
def _answer(world: World, index: int, request: int, now_s: float) -> None:
    replica = world.replicas[index]
    replica.in_flight -= 1
    done_s = now_s
    if world.half_front_s > 0.0:
        replica.front_free_s = max(now_s, replica.front_free_s) + world.half_front_s
        done_s = replica.front_free_s
    done_s += world.delay_s
    replica.last_done_s = max(replica.last_done_s, done_s)
    world.requests[request].latency_s = done_s - world.requests[request].due_s
    if world.planned < len(world.requests):
        _send_again(world, index, request, done_s)


@compiled_part
def _send_again(world: World, index: int, request: int, again_s: float) -> None:
    """Put the client of an answered request at the end of the list of clients that send again at `again_s`."""
    replica = world.replicas[index]
    world.requests[request].next = NONE
    if replica.client_first == NONE:
        replica.client_first = request
    else:
        again_s = max(again_s, world.requests[replica.client_last].at_s)
        world.requests[replica.client_last].next = request
    world.requests[request].at_s = again_s
    replica.client_last = request
