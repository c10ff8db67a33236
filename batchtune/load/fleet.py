"""Sends the load from processes of this machine: started once, each sends its slice of every job, and the samples of
all are merged."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Final, Literal, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from batchtune.errors import BatchtuneError, MeasurementInvalidError
from batchtune.load import worker_process as load_process
from batchtune.load.samples import (
    ENDED,
    GAP_STRIDE,
    GAPS,
    GAPS_MAX,
    GOOD,
    ISSUED,
    KEPT_MAX,
    NEVER_NS,
    OLDEST_PENDING,
    PENDING,
    TEXTLESS,
    Columns,
    Samples,
    Status,
    Streams,
    drawn_rows,
    kept_one_in,
    merge,
    merge_endpoints,
    new_memory,
)
from batchtune.load.worker_process import ROWS_MAX, WorkerJob, WorkerReport, start_undisturbed
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule, share_of
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.section import require_cpus
from batchtune.scenario.spec.workload import transport_of
from batchtune.system import ScratchFolder, interrupts_noted
from batchtune.target.endpoint import Endpoint

IN_FLIGHT_MAX: Final = 4096
START_DELAY_NS: Final = 20_000_000
LIVE_INTERVAL_S: Final = 0.25
EXIT_LIMIT_S: Final = 2.0

GRACE_S: Final = 30.0
"""A worker counts as hung when its part takes this much longer than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """One load test: what is sent where and when, and how long to wait for an answer.

    `timeout_s`: a request without an answer this long after it was due ends as TIMEOUT; None: the request set's
    timeout.
    `drain_s`: how long to wait for answers after the last request was due; None: `timeout_s`.
    `in_flight_max`: most requests in flight, summed over all workers; further ones wait in order, and their wait is
    recorded.
    `connections`: number opened before the start, over all workers; None: chosen for the protocol and the load.
    `check_every`: one good answer in so many is decoded after the run, and compared if the set has expected answers; 0:
    none. `overdue_after_s`: latency from which `LiveAggregate` counts a request as late; None: `timeout_s`.
    `replicas`: endpoints that get the requests in turn, each over its own connections; (): all go to `endpoint`.
    """

    endpoint: Endpoint
    requests: RequestSet
    arrivals: Arrivals
    timeout_s: float | None = None
    drain_s: float | None = None
    in_flight_max: int = IN_FLIGHT_MAX
    connections: int | None = None
    check_every: int = 100
    overdue_after_s: float | None = None
    replicas: tuple[Endpoint, ...] = ()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Addresses that get the requests: the replicas, or the only endpoint."""
        return self.replicas or (self.endpoint,)

    @property
    def timeout_or_default_s(self) -> float:
        """Seconds after which a request without an answer ends as TIMEOUT."""
        return self.requests.timeout_s if self.timeout_s is None else self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAggregate:
    """How the load is going: counts since the start; throughput and latency quantiles of the last second's answers.

    `late`: answers that took longer than `overdue_after_s`; `overdue`: requests in flight for longer than that.
    `errors`, `late` and `overdue` together are the misses so far, of `done + overdue` requests. `p50_s`, `p95_s`: nan
    without answers in the last second.
    """

    elapsed_s: float
    sent: int
    done: int
    errors: int
    late: int
    throughput_rps: float
    p50_s: float
    p95_s: float
    in_flight: int
    overdue: int


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

    `cpus`: numbers of the CPUs that the workers may use, dealt out in turn; None: all. If a worker died, or after
    `close`, the next `run` starts new workers. Of a job of more than `kept_max` requests one in n is returned, drawn at
    random (`Samples.one_in`).
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

        Both callbacks are called at most 4 times a second. When `should_stop` returns True the sending ends; the
        samples then hold the requests that had become due, and `stopped_early` is True.

        Raises:
            MeasurementInvalidError: a worker died, with its last words, or does not report back.
            TargetError, UsageError: the endpoint cannot be used at all (name, TLS files, port).
            LoadInterrupted: Ctrl-C; it carries the partial samples.
            KeyboardInterrupt: a signal that ended the workers too.
        """
        parts = split(job, self.processes)
        with interrupts_noted() as interrupts:
            try:
                done = self.run_parts(
                    parts,
                    stops=interrupts,
                    overdue_after_s=job.overdue_after_s,
                    on_progress=on_progress,
                    should_stop=should_stop,
                )
            except MeasurementInvalidError:
                if interrupts:  # a signal to the whole process group ends the workers too
                    raise KeyboardInterrupt from None
                raise
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
        """Run as many parts on each worker as there are endpoints, and return one `Samples` for each worker.

        `parts`: all parts of the first worker, then those of the next. `start_ns()`: called when all are ready; returns
        the common start (CLOCK_MONOTONIC), from which the samples count. The sending ends as soon as `stops` is not
        empty. `overdue_after_s`: latency from which an answer counts as late; None: the timeout. `on_progress`,
        `should_stop`: called with the live counts at most 4 times a second; True of `should_stop` ends the sending.

        Raises:
            MeasurementInvalidError: a worker died, with its last words, or does not report back.
            TargetError, UsageError: an endpoint cannot be used at all (name, TLS files, port).
        """
        self._start_workers()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            parts_each = len(parts) // self.processes
            shares = [parts[first : first + parts_each] for first in range(0, len(parts), parts_each)]
            tables = [
                self._hand_out(worker, share) for worker, share in zip(self._workers, shares, strict=True)
            ]
            self._await_ready(time.monotonic() + parts[0].timeout_s + GRACE_S)
            begun_ns = start_ns()
            self._tell("stop" if stops else begun_ns)
            late_s = parts[0].timeout_s if overdue_after_s is None else overdue_after_s
            is_stream = parts[0].gaps_max > 0
            live_tables = [
                LiveTable(columns, overdue_after_s=late_s, first_tokens=is_stream)
                for of_worker in tables
                for columns in of_worker
            ]
            give_up = time.monotonic() + parts[0].arrivals.duration_s + parts[0].drain_s + GRACE_S
            stopping = False
            done: dict[int, load_process.Reports] = {}
            next_look = 0.0
            while len(done) < self.processes:
                done |= self._heard(tuple, LIVE_INTERVAL_S)
                if time.monotonic() < next_look:
                    continue
                next_look = time.monotonic() + LIVE_INTERVAL_S
                live = live_of(live_tables, begun_ns)
                if on_progress is not None:
                    on_progress(live)
                if not stopping and (stops or (should_stop is not None and should_stop(live))):
                    stopping = True
                    self._tell("stop")
                if time.monotonic() > give_up:
                    raise MeasurementInvalidError(
                        "a load worker does not report back", hint="please report this"
                    )
            issued = sum(report.issued for reports in done.values() for report in reports)
            one_in = kept_one_in(issued, self._kept_max)
            samples = [
                _of_worker(of_worker, done[worker.number], share, begun_ns, one_in)
                for of_worker, worker, share in zip(tables, self._workers, shares, strict=True)
            ]
            on_error.pop_all()
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
            cpus = None if self._cpus is None else (self._cpus[number % len(self._cpus)],)
            ours, theirs = spawn.Pipe(duplex=True)
            process = spawn.Process(
                target=load_process.main,
                args=(theirs, cpus, str(last_words_file)),
                name=f"batchtune-load-{number}",
                daemon=True,
            )
            start_undisturbed(process)
            theirs.close()
            self._workers.append(
                _Worker(number=number, process=process, pipe=ours, last_words_file=last_words_file)
            )

    def retire(self, _name: str, _why: str) -> bool:
        """Return False: no worker of this machine is left out, since the others would not be better."""
        return False

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    @property
    def client_cores(self) -> int:
        """Number of CPU cores that the workers can keep busy: one each, at most as many as they are kept to. The
        machine's own number of cores is not looked at."""
        return self.processes if self._cpus is None else min(self.processes, len(set(self._cpus)))

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
            ready |= self._heard(str, LIVE_INTERVAL_S).keys()
            if time.monotonic() > give_up:
                raise MeasurementInvalidError("a load worker does not get ready", hint="please report this")

    def _tell(self, message: int | Literal["stop"]) -> None:
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send(message)

    def _heard(self, kind: type[Message], limit_s: float) -> dict[int, Message]:
        """Wait until a message comes or `limit_s` is over; returns those of this kind, worker's number -> message.

        Raises:
            MeasurementInvalidError: a worker died.
            BatchtuneError: as a worker sent it.
        """
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
    """Merge the workers' samples into those of the whole job; `names`: of the workers, (): "worker 0", "worker 1" …"""
    offered_rps = job.arrivals.offered_rps if isinstance(job.arrivals, Schedule) else None
    return replace(merge(parts, names=names), offered_rps=offered_rps, client_cores=client_cores)


def _of_worker(
    tables: Sequence[Columns],
    reports: load_process.Reports,
    share: Sequence[WorkerJob],
    start_ns: int,
    one_in: int,
) -> Samples:
    """Merge the samples of one worker over its endpoints, for each of which it has a table."""
    parts = [
        samples_of(table, report, part, start_ns, one_in=one_in)
        for table, report, part in zip(tables, reports, share, strict=True)
    ]
    authorities = [part.endpoint.authority(transport_of(part.requests.protocol)) for part in share]
    return merge_endpoints(parts, authorities)


def _death(worker: _Worker) -> MeasurementInvalidError:
    last_words_chars = 2_000
    worker.process.join(EXIT_LIMIT_S)
    code = worker.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    text = worker.last_words_file.read_text(errors="replace").strip()
    words = text[-last_words_chars:].splitlines()[-1] if text else "it said nothing"
    return MeasurementInvalidError(
        f"load worker {worker.number} died ({how}): {words}",
        hint="out of memory, or killed from outside; run it again",
    )


# The parts of a job, one for each worker and endpoint, and the samples of what the workers recorded.


def split(job: LoadJob, workers: int) -> list[WorkerJob]:
    """Split a job into parts, one for each worker and endpoint, all those of the first worker first.

    Together the parts send the same requests at the same times as one worker would. An open loop is dealt out request
    by request (`due[k::n]`), a closed loop user by user. With n endpoints, request i goes to endpoint i mod n, whatever
    the number of workers. The workers need not be on one machine.
    """
    timeout_s = job.timeout_or_default_s
    of_tokens = job.requests.protocol == "openai"
    parts = workers * len(job.endpoints)
    return [
        WorkerJob(
            endpoint=job.endpoints[part_number % len(job.endpoints)],
            requests=job.requests,
            request_order=_request_order(job, part_number, parts),
            arrivals=part,
            capacity=_capacity(part),
            timeout_s=timeout_s,
            drain_s=timeout_s if job.drain_s is None else job.drain_s,
            in_flight_max=share_of(job.in_flight_max, part_number, parts) or 1,
            connections=_connections(job, part, part_number, parts),
            check_every=0 if of_tokens else job.check_every,
            gaps_max=GAPS_MAX if of_tokens else 0,
        )
        for part_number, part in enumerate(job.arrivals.slice(number, parts) for number in range(parts))
    ]


def samples_of(
    columns: Columns, report: WorkerReport, part: WorkerJob, start_ns: int, *, one_in: int = 1
) -> Samples:
    """Copy a worker's records out of shared memory into Samples; times are offsets from `start_ns`.

    `one_in`: of so many rows, one is copied, drawn at random.
    """
    issued = slice(report.issued) if one_in == 1 else drawn_rows(report.issued, one_in)
    good = np.count_nonzero(columns.outcomes()[: report.issued] == GOOD)
    status = np.array(columns.outcomes()[issued])
    status[status == PENDING] = Status.UNFINISHED + ENDED
    status -= ENDED
    sent_ns = _offsets(columns.times("sent")[issued], start_ns)
    done_ns = _offsets(columns.times("done")[issued], start_ns)
    done_ns[(status == Status.UNFINISHED) | (status == Status.UNSENT)] = NEVER_NS
    first_byte_ns = _offsets(columns.times("first_byte")[issued], start_ns)
    in_one_piece = (first_byte_ns == NEVER_NS) & (status == Status.OK)
    wait_ns = np.array(columns.times("wait")[issued])
    wait_ns[sent_ns == NEVER_NS] = 0
    return Samples(
        due_ns=columns.times("due")[issued] - start_ns,
        sent_ns=sent_ns,
        first_byte_ns=np.where(in_one_piece, done_ns, first_byte_ns),
        done_ns=done_ns,
        connection_wait_ns=wait_ns,
        status=status,
        rows=rows_of(part, report.issued)[issued],
        started_ns=start_ns,
        wall_s=report.wall_s,
        client_cpu_s=report.cpu_s,
        client_cores=1,
        concurrency=part.arrivals.concurrency if isinstance(part.arrivals, ClosedLoop) else None,
        stopped_early=report.stopped_early,
        answers_checked=report.answers_checked,
        error_texts=report.error_texts,
        notes=report.notes,
        pauses_ns=report.pauses_ns,
        one_in=one_in,
        failures=None if one_in == 1 else report.issued - int(good),
        streams=_streams_of(columns, issued, start_ns) if part.gaps_max else None,
    )


def rows_of(part: WorkerJob, count: int) -> NDArray[np.int32]:
    """Return the number of rows of each of the first `count` requests of a part, shape (count,)."""
    return np.resize(np.asarray(part.requests.rows, dtype=np.int32)[part.request_order], count)


def _streams_of(columns: Columns, issued: slice | NDArray[np.int64], start_ns: int) -> Streams:
    gaps_ns, ended_ns = columns.gaps[:, : columns.header[GAPS]].copy()
    return Streams(
        prompt_tokens=np.array(columns.times("prompt_tokens")[issued]),
        output_tokens=np.array(columns.times("output_tokens")[issued]),
        gap_p99_ns=np.array(columns.times("gap_p99")[issued]),
        gaps_ns=gaps_ns,
        gap_ended_ns=ended_ns - start_ns,
        gaps_one_in=columns.header[GAP_STRIDE] or 1,
        textless=columns.header[TEXTLESS],
    )


def _request_order(job: LoadJob, worker: int, workers: int) -> NDArray[np.int32]:
    """Return the request numbers that worker k of n sends in turn: those that a single worker would send as requests
    k, k + n, k + 2n …"""
    if isinstance(job.arrivals, Schedule) and job.arrivals.request_index is not None:
        return np.asarray(job.arrivals.request_index[worker::workers], dtype=np.int32)
    order = np.asarray(job.requests.order, dtype=np.int32)
    return order[(worker + workers * np.arange(len(order))) % len(order)]


def _connections(job: LoadJob, part: Arrivals, worker: int, workers: int) -> int:
    closed_loop_grpc_connections = 4
    open_loop_connections = {"rest": 32, "grpc": 4}
    limit = share_of(job.in_flight_max, worker, workers) or 1
    transport = transport_of(job.requests.protocol)
    if isinstance(part, ClosedLoop) and transport == "rest":
        return min(part.concurrency, limit)
    if job.connections is not None:
        return min(share_of(job.connections, worker, workers) or 1, limit)
    if isinstance(part, ClosedLoop):
        return min(part.concurrency, closed_loop_grpc_connections)
    return min(open_loop_connections[transport], limit, len(part.due_ns))


def _capacity(part: Arrivals) -> int:
    # Rows are set aside for this many requests per second and worker, beyond what any client here reaches.
    closed_loop_max_rps = 500_000
    if isinstance(part, Schedule):
        return len(part.due_ns)
    by_rate = math.ceil(part.duration_s * closed_loop_max_rps) + part.concurrency
    return min(by_rate, ROWS_MAX if part.requests_max is None else part.requests_max, ROWS_MAX)


def _offsets(times_ns: NDArray[np.int64], start_ns: int) -> NDArray[np.int64]:
    return np.where(times_ns == 0, NEVER_NS, times_ns - start_ns)


# How the load is going: read from the workers' columns by the parent, without asking the workers.

RECENT_NS: Final = 1_000_000_000


def together(lives: Sequence[LiveAggregate]) -> LiveAggregate:
    """Merge the live figures of several workers: sums; for quantiles means weighted by the workers' throughput, nan
    where none has any; the longest `elapsed_s`."""
    answering = [live for live in lives if live.throughput_rps > 0.0]
    throughput_rps = sum(live.throughput_rps for live in answering)

    def weighted(name: str) -> float:
        if not answering:
            return math.nan
        return float(sum(getattr(live, name) * live.throughput_rps for live in answering)) / throughput_rps

    return LiveAggregate(
        elapsed_s=max(live.elapsed_s for live in lives),
        sent=sum(live.sent for live in lives),
        done=sum(live.done for live in lives),
        errors=sum(live.errors for live in lives),
        late=sum(live.late for live in lives),
        throughput_rps=throughput_rps,
        p50_s=weighted("p50_s"),
        p95_s=weighted("p95_s"),
        in_flight=sum(live.in_flight for live in lives),
        overdue=sum(live.overdue for live in lives),
    )


def live_of(tables: Sequence[LiveTable], start_ns: int) -> LiveAggregate:
    """Return the live figures of a job now, over all of its workers; `start_ns`: when it started (CLOCK_MONOTONIC)."""
    now_ns = time.monotonic_ns()
    elapsed_s = max(0.0, (now_ns - start_ns) / 1e9)
    counts, recents = zip(*(table.look(now_ns) for table in tables), strict=True)
    sent, done, errors, late, overdue = (sum(of_one) for of_one in zip(*counts, strict=True))
    recent = np.concatenate(recents)
    p50_ns, p95_ns = np.quantile(recent, (0.5, 0.95)) if len(recent) else (float("nan"), float("nan"))
    return LiveAggregate(
        elapsed_s=elapsed_s,
        sent=sent,
        done=done,
        errors=errors,
        late=late,
        throughput_rps=len(recent) / min(max(elapsed_s, 1e-3), RECENT_NS / 1e9),
        p50_s=float(p50_ns) / 1e9,
        p95_s=float(p95_ns) / 1e9,
        in_flight=sent - done,
        overdue=overdue,
    )


class LiveTable:
    """Counts the requests in one worker's columns; the cost of `look` grows with the number of recent requests only.

    `first_tokens`: whether requests count as late and overdue by their first token instead of the end of the answer.
    """

    def __init__(self, columns: Columns, *, overdue_after_s: float, first_tokens: bool = False) -> None:
        self._header = columns.header
        self._begun = columns.times("first_byte") if first_tokens else None
        self._due, self._done = columns.times("due"), columns.times("done")
        self._outcome = columns.outcomes()
        self._overdue_after_ns = int(overdue_after_s * 1e9)
        self._settled = 0
        self._settled_errors = 0
        self._settled_late = 0
        self._recent_from = 0

    def look(self, now_ns: int) -> tuple[tuple[int, int, int, int, int], NDArray[np.int64]]:
        """Return ((issued, done, errors, late, overdue), latencies): counts of requests since the start, and the
        latencies, ns, of the good answers of the last second before `now_ns` (CLOCK_MONOTONIC)."""
        oldest = self._header[OLDEST_PENDING]
        # Read last: meanwhile the worker goes on, and the other never passes it.
        issued = self._header[ISSUED]
        errors, late, _ = self._count(self._settled, oldest)
        self._settled_errors += errors
        self._settled_late += late
        self._settled = oldest
        errors, late, pending = self._count(oldest, issued)
        begun_ns = 0 if self._begun is None else self._begun[oldest:issued]
        waits_ns = (np.where(begun_ns, begun_ns, now_ns) - self._due[oldest:issued])[pending]
        overdue = int(np.count_nonzero(waits_ns > self._overdue_after_ns))
        done = issued - int(np.count_nonzero(pending))
        counts = (issued, done, self._settled_errors + errors, self._settled_late + late, overdue)
        return counts, self._recent(issued, oldest, now_ns)

    def _count(self, start: int, end: int) -> tuple[int, int, NDArray[np.bool_]]:
        outcome = self._outcome[start:end]
        good = outcome == GOOD
        done_ns = (self._done if self._begun is None else self._begun)[start:end]
        late = good & (done_ns - self._due[start:end] > self._overdue_after_ns)
        pending = outcome == PENDING
        errors = len(outcome) - int(np.count_nonzero(good)) - int(np.count_nonzero(pending))
        return errors, int(np.count_nonzero(late)), pending

    def _recent(self, issued: int, oldest: int, now_ns: int) -> NDArray[np.int64]:
        """Return the latencies (ns) of good answers that came within the last second."""
        start = self._recent_from
        done = self._done[start:issued]
        recent = (done > now_ns - RECENT_NS) & (self._outcome[start:issued] == GOOD)
        latencies: NDArray[np.int64] = done[recent] - self._due[start:issued][recent]
        # Rows before the first recent or pending one can never become recent again.
        first = start + int(np.argmax(recent)) if recent.any() else oldest
        self._recent_from = min(first, oldest)
        return latencies
