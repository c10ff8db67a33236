"""Does the simulator form the same batches at the same instants as the server's own scheduler?

Random traces go through the server's scheduler, with its real threads and a clock that is moved by hand from one event
to the next, and through the simulator. Times are whole microseconds in both, so starts and latencies must be equal.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from batchtune.server.scheduling.batch_queue import (
    Batch,
    QueueOptions,
    SharedBatchScheduler,
    next_allowed_size,
)
from batchtune.twin.simulator.simulate import Batcher, Device, SimulatedTraffic, run_by_events
from batchtune.wire.status import StatusError
from tests.server.scheduling.manual_clock import ManualClock
from tests.twin.simulated_run import SimulatedRun, run_of, simulate_open

pytestmark = pytest.mark.smoke
SEED = 20_261_121
NEVER = 2**61


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Arrivals in microseconds, and how the server is told to batch them."""

    due_micros: tuple[int, ...]
    rows: tuple[int, ...]
    options: QueueOptions
    threads: int
    tau_micros: tuple[int, ...]
    serial: bool
    lengths: tuple[int, ...] = ()
    length_buckets: tuple[int, ...] = ()
    per_length_micros: int = 0

    def length(self, request: int) -> int:
        return self.lengths[request] if self.lengths else 0


@dataclass
class Recorded:
    """What the server did: (start, rows) of each batch in order of start, latency of each accepted request."""

    batches: list[tuple[int, int]] = field(default_factory=list)
    members: list[tuple[int, ...]] = field(default_factory=list)
    done_micros: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)


class Task:
    """All rows of a request, or some."""

    def __init__(self, request: int, size: int) -> None:
        self.request = request
        self.size = size

    def split(self, sizes: Sequence[int]) -> list[Task]:
        return [Task(self.request, size) for size in sizes]


class PlayedServer:
    """The server's scheduler over a device that holds each batch for its tau by the manual clock."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.clock = ManualClock()
        self.recorded = Recorded()
        self.lock = threading.Lock()
        self.ends: list[int] = []
        self.device_free_micros = 0
        self.scheduler = SharedBatchScheduler(num_batch_threads=trace.threads, clock=self.clock)
        self.clock.watch(self.settled)
        self.queues = [
            self.scheduler.add_queue(trace.options, self.process)
            for _ in range(len(trace.length_buckets) + 1)
        ]

    def process(self, batch: Batch[Task]) -> None:
        now = self.clock.now_micros()
        rows = next_allowed_size(batch.size, self.trace.options.allowed_batch_sizes)
        longest = max(self.trace.length(task.request) for task in batch.tasks)
        cost = self.trace.tau_micros[rows] + self.trace.per_length_micros * rows * longest
        with self.lock:
            began = max(now, self.device_free_micros) if self.trace.serial else now
            end = self.device_free_micros = began + cost
            self.recorded.batches.append((now, batch.size))
            self.recorded.members.append(tuple(task.request for task in batch.tasks))
            self.ends.append(end)
        parker = self.clock.parker()
        while self.clock.now_micros() < end:
            parker.park(end)
        with self.lock:
            for task in batch.tasks:
                self.recorded.done_micros[task.request] = max(
                    end, self.recorded.done_micros.get(task.request, 0)
                )
            self.ends.remove(end)

    def settled(self) -> bool:
        """Every thread is asleep: in the pool, or in a batch that has not ended yet."""
        with self.lock:
            running = len(self.ends)
            ended = any(end <= self.clock.now_micros() for end in self.ends)
        return not ended and running + len(self.scheduler._threads._idle) == self.trace.threads

    def play(self) -> Recorded:
        self.clock.settle()
        for request, (due, rows) in enumerate(zip(self.trace.due_micros, self.trace.rows, strict=True)):
            self.go_on(due)
            try:
                bucket = bisect_left(self.trace.length_buckets, self.trace.length(request))
                self.queues[bucket].schedule(Task(request, rows))
            except StatusError:
                self.recorded.refused.add(request)
            self.clock.settle()
        self.go_on(NEVER)
        self.clock.unwatch(self.settled)
        self.scheduler.close()
        return self.recorded

    def go_on(self, until: int) -> None:
        """Move the clock over every instant at which something happens; stop at `until`, or when nothing is left."""
        while True:
            with self.lock:
                event = min([*self.ends, self.timeout_micros()])
            stop = min(event, until)
            if stop == NEVER:
                return
            self.clock.advance(max(stop - self.clock.now_micros(), 0))
            if stop == until:
                return

    def timeout_micros(self) -> int:
        """When an idle thread takes the open batch; a busy pool lets its timeout pass."""
        idle = self.scheduler._threads._idle
        return min([NEVER, *(queue.due_micros for queue in self.queues)]) if idle else NEVER


def batcher_of(trace: Trace) -> Batcher:
    options = trace.options
    return Batcher(
        max_batch_size=options.max_batch_size,
        batch_timeout_s=options.batch_timeout_micros,
        batch_threads=trace.threads,
        max_enqueued_batches=options.max_enqueued_batches,
        allowed_batch_sizes=options.allowed_batch_sizes,
        max_execution_batch_size=options.batch_size_limit if options.enable_large_batch_splitting else None,
        length_buckets=trace.length_buckets,
    )


def device_of(trace: Trace) -> Device:
    """Its times are those of batches of the length 3."""
    tau_s = np.array(trace.tau_micros, dtype=np.float64)
    length_s = trace.per_length_micros * np.arange(len(tau_s), dtype=np.float64)
    return Device(
        tau_s=tau_s + (3 * length_s if trace.lengths else 0.0),
        length_s=length_s if trace.lengths else None,
        usual_length=np.full(len(tau_s), 3.0),
        serial=trace.serial,
    )


def simulated(trace: Trace) -> SimulatedRun:
    """By the general kernel; a simulated second stands for a microsecond."""
    traffic = SimulatedTraffic(
        due_s=np.array(trace.due_micros, dtype=np.float64),
        rows=np.array(trace.rows, dtype=np.int32),
        lengths=np.array(trace.lengths, dtype=np.int32) if trace.lengths else None,
    )
    return run_of(run_by_events(traffic, batcher_of(trace), device_of(trace)))


def random_trace(seed: int, *, one_row: bool = False, lengths: bool = False) -> Trace:
    rng = np.random.default_rng([SEED, seed])
    threads = int(rng.integers(1, 5))
    splitting = not one_row and bool(rng.random() < 0.35)
    limit = int(rng.integers(1, 9))
    most = limit * int(rng.integers(1, 4)) if splitting else limit
    sizes = sorted({*rng.integers(1, most + 1, size=2).tolist(), most}) if rng.random() < 0.4 else []
    options = QueueOptions(
        max_batch_size=most,
        batch_timeout_micros=int(rng.choice([0, 0, 20, 60, 150])),
        max_enqueued_batches=int(rng.choice([0 if not splitting else 1, 1, 2, 3, 100])),
        enable_large_batch_splitting=splitting,
        max_execution_batch_size=limit if splitting else None,
        allowed_batch_sizes=tuple(sizes),
    )
    requests = 40
    gap = float(rng.choice([4.0, 12.0, 40.0]))
    due = np.cumsum(rng.geometric(1.0 / gap, requests) - 1)
    due[rng.random(requests) < 0.15] = -1  # some come at the same instant as the one before
    due = np.maximum.accumulate(due)
    rows = np.ones(requests, dtype=int) if one_row else rng.integers(1, most + 2, requests)
    fixed, per_row = int(rng.integers(5, 60)), int(rng.integers(0, 9))
    return Trace(
        due_micros=tuple(int(each) for each in np.maximum(due, 0)),
        rows=tuple(int(each) for each in rows),
        options=options,
        threads=threads,
        tau_micros=tuple(fixed + per_row * rows_run for rows_run in range(most + 1)),
        serial=threads == 1,
        lengths=tuple(rng.integers(1, 9, requests).tolist()) if lengths else (),
        length_buckets=((), (4,), (2, 5))[int(rng.integers(3))] if lengths else (),
        per_length_micros=int(rng.integers(1, 7)) if lengths else 0,
    )


@pytest.mark.parametrize(
    ("seed", "lengths"), [*((seed, False) for seed in range(60)), *((seed, True) for seed in range(200, 230))]
)
def test_batches_starts_latencies_and_refusals_are_those_of_the_server(seed: int, lengths: bool) -> None:
    trace = random_trace(seed, lengths=lengths)
    theirs, ours = PlayedServer(trace).play(), simulated(trace)
    refused = set(np.flatnonzero(np.isinf(ours.latency_s)).tolist())
    assert refused == theirs.refused
    starts = [
        (int(start), int(rows)) for start, rows in zip(ours.batch_start_s, ours.batch_rows, strict=True)
    ]
    assert sorted(starts) == sorted(theirs.batches)
    for request, done in theirs.done_micros.items():
        assert trace.due_micros[request] + ours.latency_s[request] == done


@pytest.mark.parametrize("seed", range(100, 120))
def test_batches_of_one_row_requests_hold_the_same_requests_by_either_kernel(seed: int) -> None:
    trace = random_trace(seed, one_row=True)
    theirs = PlayedServer(trace).play()
    plain = simulate_open(
        np.array(trace.due_micros, dtype=np.float64), 1, batcher_of(trace), device_of(trace)
    )
    for ours in (plain, simulated(trace)):
        members = [
            tuple(np.flatnonzero(ours.batch == batch).tolist()) for batch in range(len(ours.batch_rows))
        ]
        assert sorted(members) == sorted(theirs.members)
        assert set(np.flatnonzero(ours.batch == -1).tolist()) == theirs.refused
