"""Splits a load job into the parts of its workers, and makes samples of what the workers recorded."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchtune.load.samples import (
    ENDED,
    GAP_STRIDE,
    GAPS,
    GAPS_MAX,
    GOOD,
    NEVER_NS,
    PENDING,
    TEXTLESS,
    Columns,
    Samples,
    Status,
    Streams,
    drawn_rows,
)
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule, share_of
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.spec.workload import transport_of
from batchtune.target.endpoint import Endpoint

IN_FLIGHT_MAX: Final = 4096
ROWS_MAX: Final = 64_000_000


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
class WorkerJob:
    """One worker's part of a load job, for one endpoint; fields that `LoadJob` has too mean the same, for this part.

    The i-th request is number `request_order[i % len(request_order)]` of the set. `capacity`: most requests that can be
    recorded.
    """

    endpoint: Endpoint
    requests: RequestSet
    request_order: NDArray[np.int32]
    arrivals: Arrivals
    capacity: int
    timeout_s: float
    drain_s: float
    in_flight_max: int
    connections: int
    check_every: int

    @property
    def gaps_max(self) -> int:
        """Most gaps between tokens that can be recorded; 0 where answers are not streams of tokens."""
        return GAPS_MAX if self.requests.protocol == "openai" else 0

    def rows(self, count: int) -> NDArray[np.int32]:
        """Return the number of rows of each of the first `count` requests, shape (count,)."""
        rows_of = np.asarray(self.requests.rows, dtype=np.int32)[self.request_order]
        return np.resize(rows_of, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What one process did, apart from the columns of its requests.

    `issued`: number of requests that became due. `wall_s`: from the start to the end of the last request.
    `error_texts`: name of a status -> its first text. `pauses_ns`: (start, length) of each time that the process stood
    still.
    """

    issued: int
    wall_s: float
    cpu_s: float
    stopped_early: bool
    answers_checked: int
    error_texts: dict[str, str]
    notes: tuple[str, ...]
    pauses_ns: tuple[tuple[int, int], ...] = ()


def split(job: LoadJob, workers: int) -> list[WorkerJob]:
    """Split a job into parts, one for each worker and endpoint, all those of the first worker first.

    Together the parts send the same requests at the same times as one worker would. An open loop is dealt out request
    by request (`due[k::n]`), a closed loop user by user. With n endpoints, request i goes to endpoint i mod n, whatever
    the number of workers. The workers need not be on one machine.
    """
    timeout_s = job.timeout_or_default_s
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
            check_every=0 if job.requests.protocol == "openai" else job.check_every,
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
        rows=part.rows(report.issued)[issued],
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
    by_rate = ceil(part.duration_s * closed_loop_max_rps) + part.concurrency
    return min(by_rate, ROWS_MAX if part.requests_max is None else part.requests_max, ROWS_MAX)


def _offsets(times_ns: NDArray[np.int64], start_ns: int) -> NDArray[np.int64]:
    return np.where(times_ns == 0, NEVER_NS, times_ns - start_ns)
