"""Who sends the load? Processes that are started once, each with its slice of every job, merged exactly at the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, cast

import numpy as np
import psutil
from numpy.typing import NDArray

from batchtune.errors import BatchtuneError, MeasurementInvalidError
from batchtune.load.live import LiveAggregate, LiveView
from batchtune.load.record.columns import Columns, new_memory
from batchtune.load.record.samples import KEPT_MAX, NEVER_NS, Samples, kept_one_in, merge, merge_endpoints
from batchtune.load.worker import worker_process as load_process
from batchtune.load.worker.job import LoadJob, WorkerJob, samples_of, split
from batchtune.load.worker.worker_process import start_undisturbed
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule
from batchtune.scenario.spec.section import require_cpus
from batchtune.system import ScratchFolder, interrupts_noted

START_DELAY_NS: Final = 20_000_000
LIVE_INTERVAL_S: Final = 0.25
LAST_WORDS_CHARS: Final = 2_000
EXIT_LIMIT_S: Final = 2.0

GRACE_S: Final = 30.0
"""How much longer than it should take a worker may be silent before it counts as hung."""

Message = TypeVar("Message")
OnProgress = Callable[[LiveAggregate], None]
ShouldStop = Callable[[LiveAggregate], bool]


class LoadInterrupted(KeyboardInterrupt):
    """Ctrl-C during a job: sending stopped, and `samples` holds what was measured until then."""

    def __init__(self, samples: Samples) -> None:
        super().__init__("interrupted")
        self.samples = samples


@dataclass(slots=True)
class _Worker:
    number: int
    process: SpawnProcess
    pipe: Connection
    last_words_file: Path


class LoadFleet:
    """A context manager around `processes` workers; `run` may be called any number of times, one job at a time.

    `cpus`: the CPUs that the workers may use, dealt out in turn; None: all. A fleet whose worker died, or that was
    closed, starts afresh with the next `run`. Of more than about `kept_max` requests of a job some are drawn, and their
    samples say so (`Samples.one_in`).
    """

    def __init__(
        self, *, processes: int = 1, cpus: Sequence[int] | None = None, kept_max: int = KEPT_MAX
    ) -> None:
        if processes < 1:
            raise ValueError("a fleet needs at least one process")
        require_cpus("load.cpus", cpus)
        self.processes = processes
        self._cpus = tuple(cpus) if cpus is not None else None
        self._kept_max = kept_max
        self._workers: list[_Worker] = []
        self._scratch: ScratchFolder | None = None

    def __enter__(self) -> Self:
        self._start_workers()
        return self

    def __exit__(self, *_fault: object) -> None:
        self.close()

    def run(
        self, job: LoadJob, *, on_progress: OnProgress | None = None, should_stop: ShouldStop | None = None
    ) -> Samples:
        """Run one job and return what happened to each request.

        Both callbacks hear at most 4 times a second; `should_stop` ends the sending, and the samples then hold the
        requests that had become due, `stopped_early` set.

        Raises:
            MeasurementInvalidError: a worker died; its last words are in the message.
            TargetError, UsageError: the endpoint cannot be used at all (name, TLS files, port).
            LoadInterrupted: Ctrl-C; it carries the partial samples.
        """
        parts = split(job, self.processes)
        with interrupts_noted_here() as interrupts:
            done = self.run_parts(
                parts,
                stops=interrupts,
                overdue_after_s=job.overdue_after_s,
                on_progress=on_progress,
                should_stop=should_stop,
            )
        samples = summed_up(job, done, client_cores=self.client_cores)
        if interrupts:
            raise LoadInterrupted(samples)
        return samples

    def run_parts(
        self,
        parts: Sequence[WorkerJob],
        *,
        start_ns: Callable[[], int] = lambda: time.monotonic_ns() + START_DELAY_NS,
        stops: Sequence[int] = (),
        overdue_after_s: float | None = None,
        on_progress: OnProgress | None = None,
        should_stop: ShouldStop | None = None,
    ) -> list[Samples]:
        """Run as many parts on each worker as there are endpoints, and return the samples of each worker.

        `parts` are those of one worker after those of another; samples are offsets from the common start.

        `start_ns` is asked for the start once all are ready; as soon as `stops` is not empty the sending ends.

        Raises:
            MeasurementInvalidError, TargetError, UsageError: as `run`.
        """
        self._start_workers()
        intact = False
        try:
            samples = self._run(parts, start_ns, stops, overdue_after_s, on_progress, should_stop)
            intact = True
        finally:
            if not intact:
                self.close()
        return samples

    def close(self) -> None:
        """End the workers; those that do not end by themselves are killed."""
        for worker in self._workers:
            worker.pipe.close()
        give_up = time.monotonic() + EXIT_LIMIT_S
        for worker in self._workers:
            worker.process.join(max(0.0, give_up - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers.clear()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _start_workers(self) -> None:
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.close()
        self._scratch = ScratchFolder()
        spawn = multiprocessing.get_context("spawn")
        for number in range(self.processes):
            last_words_file = self._scratch.path / f"worker-{number}.txt"
            last_words_file.touch()
            ours, theirs = spawn.Pipe(duplex=True)
            process = spawn.Process(
                target=load_process.main,
                args=(theirs, self._cpus_of(number), str(last_words_file)),
                name=f"batchtune-load-{number}",
                daemon=True,
            )
            start_undisturbed(process)
            theirs.close()
            self._workers.append(
                _Worker(number=number, process=process, pipe=ours, last_words_file=last_words_file)
            )

    def _cpus_of(self, number: int) -> tuple[int, ...] | None:
        return None if self._cpus is None else (self._cpus[number % len(self._cpus)],)

    def retire(self, _name: str, _why: str) -> bool:
        """A worker of this machine is no better elsewhere: all stay."""
        return False

    @property
    def process_ids(self) -> list[int]:
        """The workers that run now."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    @property
    def client_cores(self) -> int:
        """How many cores the workers can keep busy: each is one thread."""
        return self.processes if self._cpus is None else min(self.processes, len(set(self._cpus)))

    def _run(
        self,
        parts: Sequence[WorkerJob],
        ask_start_ns: Callable[[], int],
        stops: Sequence[int],
        overdue_after_s: float | None,
        on_progress: OnProgress | None,
        should_stop: ShouldStop | None,
    ) -> list[Samples]:
        parts_each = len(parts) // self.processes
        shares = [parts[first : first + parts_each] for first in range(0, len(parts), parts_each)]
        tables = [self._hand_out(worker, share) for worker, share in zip(self._workers, shares, strict=True)]
        self._await_ready(time.monotonic() + parts[0].timeout_s + GRACE_S)
        start_ns = ask_start_ns()
        self._tell(load_process.Stop() if stops else load_process.Start(start_ns))
        late_s = parts[0].timeout_s if overdue_after_s is None else overdue_after_s
        view = LiveView(
            [table for of_worker in tables for table in of_worker],
            start_ns=start_ns,
            overdue_after_s=late_s,
            first_tokens=parts[0].gaps_max > 0,
        )
        give_up = time.monotonic() + parts[0].arrivals.duration_s + parts[0].drain_s + GRACE_S
        stopping = False
        done: dict[int, load_process.Done] = {}
        next_look = 0.0
        while len(done) < self.processes:
            done |= self._heard(load_process.Done, LIVE_INTERVAL_S)
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + LIVE_INTERVAL_S
            live = view.look()
            if on_progress is not None:
                on_progress(live)
            if not stopping and (stops or (should_stop is not None and should_stop(live))):
                stopping = True
                self._tell(load_process.Stop())
            if time.monotonic() > give_up:
                raise MeasurementInvalidError("a load worker does not report back", hint="please report this")
        issued = sum(report.issued for worker in done.values() for report in worker.reports)
        one_in = kept_one_in(issued, self._kept_max)
        return [
            _of_worker(of_worker, done[worker.number], share, start_ns, one_in)
            for of_worker, worker, share in zip(tables, self._workers, shares, strict=True)
        ]

    def _hand_out(self, worker: _Worker, share: Sequence[WorkerJob]) -> list[Columns]:
        descriptors = [new_memory(part.capacity, part.gaps_max) for part in share]
        try:
            worker.pipe.send(tuple(share))
            for descriptor in descriptors:
                send_handle(worker.pipe, descriptor, worker.process.pid)
            return [
                Columns(descriptor, part.capacity, part.gaps_max)
                for descriptor, part in zip(descriptors, share, strict=True)
            ]
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _death(worker) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _await_ready(self, give_up: float) -> None:
        ready: set[int] = set()
        while len(ready) < self.processes:
            ready |= self._heard(load_process.Ready, LIVE_INTERVAL_S).keys()
            if time.monotonic() > give_up:
                raise MeasurementInvalidError("a load worker does not get ready", hint="please report this")

    def _tell(self, message: load_process.Start | load_process.Stop) -> None:
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send(message)

    def _heard(self, kind: type[Message], limit_s: float) -> dict[int, Message]:
        """The messages of this kind that arrive until one does or the time is up, by worker."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        heard: dict[int, Message] = {}
        for pipe in wait(list(by_pipe), limit_s):
            worker = by_pipe[cast("Connection", pipe)]
            try:
                message = worker.pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                raise _death(worker) from error
            if isinstance(message, BatchtuneError):
                raise message
            if isinstance(message, kind):
                heard[worker.number] = message
        return heard


def summed_up(
    job: LoadJob, parts: Sequence[Samples], *, client_cores: int, names: Sequence[str] = ()
) -> Samples:
    """The parts of a job as the whole that was asked for."""
    offered_rps = job.arrivals.offered_rps if isinstance(job.arrivals, Schedule) else None
    return replace(merge(parts, names=names), offered_rps=offered_rps, client_cores=client_cores)


def _of_worker(
    tables: Sequence[Columns], done: load_process.Done, share: Sequence[WorkerJob], start_ns: int, one_in: int
) -> Samples:
    """What one worker sent, whichever endpoints it went to."""
    parts = [
        samples_of(table, report, part, start_ns, one_in=one_in)
        for table, report, part in zip(tables, done.reports, share, strict=True)
    ]
    return merge_endpoints(parts, [part.endpoint.authority(part.requests.transport) for part in share])


def _death(worker: _Worker) -> MeasurementInvalidError:
    worker.process.join(EXIT_LIMIT_S)
    code = worker.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    text = worker.last_words_file.read_text(errors="replace").strip()
    words = text[-LAST_WORDS_CHARS:].splitlines()[-1] if text else "it said nothing"
    return MeasurementInvalidError(
        f"load worker {worker.number} died ({how}): {words}",
        hint="out of memory, or killed from outside; run it again",
    )


@contextlib.contextmanager
def interrupts_noted_here() -> Iterator[list[int]]:
    """Collect the first Ctrl-C instead of raising; only the main thread can hear any."""
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    with interrupts_noted() as noted:
        yield noted


# The CPU time that a request costs two servers when the load goes from one to the other in short turns.
#
# On a shared host the CPU time of the same work changes by a fifth from second to second. What is slower than a turn
# has the same part in both turns of a pair and cancels in their ratio: of two equal servers that of a pair of 25 ms
# turns has a standard deviation of 0.15, its mean over a second 0.035, and of runs of a second, one after another, 0.19
# (tests/benchmarks/check/duet.py).

READ_BEFORE_NS: Final = 1_000_000
"""The clocks are read so long before the next turn begins: they have that time to be woken for it."""

CpuClock = Callable[[], float]
"""CPU seconds so far; raises psutil.Error once the server has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuetPlan:
    """Turn i is that of server `order[i]`, 0 or 1; the turns 2k and 2k + 1 are a pair. It is sent to for `turn_ns`,
    then for `gap_ns` nobody is, so that its last answer has come before the clocks are read."""

    turn_ns: int
    gap_ns: int
    order: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return len(self.order) // 2

    @property
    def begins_ns(self) -> NDArray[np.int64]:
        """When each turn begins after the start, and when one more would."""
        return np.arange(len(self.order) + 1, dtype=np.int64) * (self.turn_ns + self.gap_ns)

    def arranged(self, arrivals: Arrivals, server: int) -> Arrivals:
        """The part of one server: its clients rest between its turns, its schedule goes on in the next of them."""
        begins_ns = self.begins_ns[:-1][np.equal(self.order, server)]
        duration_s = float(self.begins_ns[-1]) / 1e9
        if isinstance(arrivals, ClosedLoop):
            turns_ns = tuple((begin_ns, begin_ns + self.turn_ns) for begin_ns in begins_ns.tolist())
            return replace(arrivals, duration_s=duration_s, requests_max=None, turns_ns=turns_ns)
        within = arrivals.due_ns < self.turn_ns * len(begins_ns)
        due_ns = arrivals.due_ns[within]
        names, rows = arrivals.request_index, arrivals.trace_rows
        return replace(
            arrivals,
            due_ns=begins_ns[due_ns // self.turn_ns] + due_ns % self.turn_ns,
            duration_s=duration_s,
            offered_rps=len(due_ns) / duration_s,
            request_index=None if names is None else names[within],
            trace_rows=None if rows is None else rows[within],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """CPU seconds of both servers, read between two times after the start."""

    before_ns: int
    after_ns: int
    cpu_s: tuple[float, ...]


def run_duet(
    fleet: LoadFleet, jobs: Sequence[LoadJob], plan: DuetPlan, clocks: Sequence[CpuClock]
) -> list[tuple[float, float]]:
    """CPU seconds a request of both servers, for each pair of turns that can be told; a job and a clock a server.

    Raises:
        MeasurementInvalidError, TargetError, UsageError: as `LoadFleet.run`.
    """
    parts = [
        split(replace(job, arrivals=plan.arranged(job.arrivals, server)), fleet.processes)
        for server, job in enumerate(jobs)
    ]
    with ClockReader(clocks, plan) as reader:
        samples = fleet.run_parts(
            [part for of_worker in zip(*parts, strict=True) for part in of_worker], start_ns=reader.start
        )
    return pair_costs(merge(samples), reader.readings, plan)


def pair_costs(samples: Samples, readings: Sequence[Reading], plan: DuetPlan) -> list[tuple[float, float]]:
    """CPU seconds a request of both servers in each pair.

    Left out: a pair of which a request of either turn was still under way when the clocks were read, or the clocks
    were read when the next turn had begun.
    """
    turns = len(plan.order)
    turn_of = np.searchsorted(plan.begins_ns, samples.due_ns, side="right") - 1
    requests = np.bincount(turn_of, minlength=turns)
    last_done_ns = np.zeros(turns, dtype=np.int64)
    never = np.iinfo(np.int64).max
    np.maximum.at(last_done_ns, turn_of, np.where(samples.done_ns == NEVER_NS, never, samples.done_ns))

    def cost_s(turn: int) -> float:
        """0 where it cannot be told."""
        first, last = readings[turn], readings[turn + 1]
        in_time = all(
            reading.after_ns <= begin_ns
            for reading, begin_ns in zip((first, last), plan.begins_ns[turn : turn + 2], strict=True)
        )
        if not in_time or not requests[turn] or last_done_ns[turn] > last.before_ns:
            return 0.0
        server = plan.order[turn]
        return (last.cpu_s[server] - first.cpu_s[server]) / float(requests[turn])

    costs = []
    for pair in range(min(plan.pairs, (len(readings) - 1) // 2)):
        by_server = sorted((plan.order[turn], cost_s(turn)) for turn in (2 * pair, 2 * pair + 1))
        costs.append((by_server[0][1], by_server[1][1]))
    return [pair for pair in costs if min(pair) > 0.0]


class ClockReader:
    """A thread that reads the clocks between the turns; it lives in a with block, which waits for its end."""

    def __init__(self, clocks: Sequence[CpuClock], plan: DuetPlan) -> None:
        self.readings: list[Reading] = []
        self._clocks = clocks
        self._reads_ns = (plan.begins_ns - READ_BEFORE_NS).tolist()
        self._start_ns = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="batchtune-cpu-clocks", daemon=True)

    def start(self) -> int:
        """Begin, and say when the load is to start (CLOCK_MONOTONIC)."""
        self._start_ns = time.monotonic_ns() + START_DELAY_NS
        self._thread.start()
        return self._start_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        for read_ns in self._reads_ns:
            if self._ended.wait(max(0.0, (self._start_ns + read_ns - time.monotonic_ns()) / 1e9)):
                return
            before_ns = time.monotonic_ns()
            try:
                cpu_s = tuple(clock() for clock in self._clocks)
            except psutil.Error:  # a server ended: what was read until then stands
                return
            after_ns = time.monotonic_ns()
            self.readings.append(
                Reading(before_ns=before_ns - self._start_ns, after_ns=after_ns - self._start_ns, cpu_s=cpu_s)
            )
