"""One process of the load fleet: it waits for jobs on a pipe, runs each in one event loop, and reports.

Messages to it: a tuple of `WorkerJob`, one for each endpoint, followed by the descriptors of their columns; the start,
ns of CLOCK_MONOTONIC; "stop": send nothing more, and report; and the end of the pipe, which ends it. Messages from it:
"ready": connected, memory touched, the job can start; `Reports`; or a BatchtuneError that stopped it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import recv_handle
from typing import Final

import numpy as np
import uvloop
from numpy.typing import NDArray

from batchtune.errors import BatchtuneError, UsageError
from batchtune.load.answers import check_answers
from batchtune.load.clients.client import make_client
from batchtune.load.clients.source import Client, ClosedSource, OpenSource, Source
from batchtune.load.samples import ISSUED, OLDEST_PENDING, PENDING, STARTED_NS, Columns, Recorder, Status
from batchtune.scenario.arrivals import Arrivals, ClosedLoop, Schedule
from batchtune.scenario.payloads import RequestSet
from batchtune.system import interrupts_noted
from batchtune.target.endpoint import Endpoint

ROWS_MAX: Final = 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """One worker's part of a load job, for one endpoint; fields that `LoadJob` has too mean the same, for this part.

    The i-th request is number `request_order[i % len(request_order)]` of the set. `capacity`: most requests that can be
    recorded; `gaps_max`: most gaps between tokens, 0 where answers are not streams of tokens.
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
    gaps_max: int


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


def start_undisturbed(process: SpawnProcess) -> None:
    """Start a child process that a terminal's signals (Ctrl-C, hang-up, Ctrl-backslash) do not reach; it ends when its
    parent does.

    After an interrupt during the start, the child is killed and KeyboardInterrupt raised when it has started: cut
    short, it would print a traceback, because it reads what to run from its parent.
    """
    # A terminal sends them to all; the parent handles them.
    of_a_terminal = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    with interrupts_noted() as interrupts:  # the mask is of this thread, and others may take the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, of_a_terminal)
        try:
            resource_tracker.ensure_running()  # the first child would start it, which lets Ctrl-C through again
            signal.pthread_sigmask(signal.SIG_BLOCK, of_a_terminal)
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if interrupts:
        process.kill()
        process.join()
        raise KeyboardInterrupt


Reports = tuple[WorkerReport, ...]
"""Of a job that has ended, one for each of its parts."""


def main(pipe: Connection, cpus: Sequence[int] | None, last_words_file: str) -> None:
    """Run jobs until the pipe ends; stderr goes to `last_words_file`. Ctrl-C is ignored: the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    words = os.open(last_words_file, os.O_WRONLY | os.O_APPEND)
    os.dup2(words, 2)
    os.close(words)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                jobs = pipe.recv()
                if jobs == "stop":  # it came after the last job had ended by itself
                    continue
                memories = [recv_handle(pipe) for _ in jobs]
                pipe.send(runner.run(_run(pipe, jobs, memories)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return


async def _run(
    pipe: Connection, jobs: Sequence[WorkerJob], memories: Sequence[int]
) -> Reports | BatchtuneError:
    tables = [Columns(memory, job.capacity, job.gaps_max) for memory, job in zip(memories, jobs, strict=True)]
    for memory in memories:
        os.close(memory)
    try:
        drivers = [Driver(job, columns) for job, columns in zip(jobs, tables, strict=True)]
        await asyncio.gather(*(driver.prepare() for driver in drivers))
    except BatchtuneError as error:
        return error
    pipe.send("ready")
    start_ns = pipe.recv()
    if start_ns == "stop":
        return tuple(driver.abandon() for driver in drivers)
    loop = asyncio.get_running_loop()

    def heard() -> None:
        loop.remove_reader(pipe.fileno())
        with contextlib.suppress(EOFError, ConnectionResetError):
            pipe.recv()  # "stop"; the end of the pipe means the same
        for driver in drivers:
            driver.stop()

    loop.add_reader(pipe.fileno(), heard)
    os.set_blocking(pipe.fileno(), True)  # uvloop turned it off, and the pipe is read and written as blocking
    ended = asyncio.Barrier(len(drivers))
    try:
        reports = await asyncio.gather(*(driver.run(start_ns, ended=ended) for driver in drivers))
        return tuple(replace(report, cpu_s=report.cpu_s / len(drivers)) for report in reports)
    finally:
        loop.remove_reader(pipe.fileno())


# One part of a load job: connect, start on time, send, time out, drain, stop.

DRAIN_AFTER_STOP_S: Final = 1.0

_monotonic_ns = time.monotonic_ns


class Driver:
    """Runs one WorkerJob in the running event loop: `prepare()`, then `run(start_ns)`; `stop()` ends it early."""

    def __init__(self, job: WorkerJob, columns: Columns) -> None:
        self._job = job
        self._columns = columns
        self._outcomes = columns.outcomes()
        self._recorder = Recorder(columns, check_every=job.check_every)
        self._loop = asyncio.get_running_loop()
        self._pacer = Pacer(self._loop, self._wake)
        self._source = self._make_source()
        self._client = self._make_client()
        self._source.sender = self._client
        self._oldest = 0
        self._give_up_ns = 0
        self._start_ns = 0
        self._tick_due_ns = 0
        self._pauses_ns: list[tuple[int, int]] = []
        self._stopped = False
        self._finished: asyncio.Future[None] = self._loop.create_future()

    async def prepare(self) -> None:
        """Open the connections and touch the memory.

        Raises:
            TargetError: the host's name does not resolve, or its TLS files cannot be read.
        """
        prefaulted_rows = 200_000
        self._columns.prefault(min(self._job.capacity, prefaulted_rows))
        await self._client.open(self._job.connections)
        gc.collect()

    async def run(self, start_ns: int, *, ended: asyncio.Barrier | None = None) -> WorkerReport:
        """Send from `start_ns` (CLOCK_MONOTONIC) on; return the report when every request that was due has ended.

        `ended`: a barrier at which the drivers of one loop wait for each other before they check answers, which takes
        time; None: no others.
        """
        gc.freeze()
        gc.disable()
        try:
            cpu_before_ns = time.process_time_ns()
            self._start(start_ns)
            await self._finished
            cpu_s = (time.process_time_ns() - cpu_before_ns) / 1e9
            wall_s = (_monotonic_ns() - start_ns) / 1e9
            if ended is not None:
                await ended.wait()
        finally:
            gc.enable()
            gc.unfreeze()
            self._pacer.close()
            self._client.close()
            await asyncio.sleep(0.001)  # a turn or two of the event loop, to close the connections
        return self._report(wall_s, cpu_s)

    def abandon(self) -> WorkerReport:
        """Close the connections of a job that is not started; return a report without requests."""
        self._pacer.close()
        self._client.close()
        self._stopped = True
        return self._report(0.0, 0.0)

    def stop(self) -> None:
        """Send no more requests, and wait a second at most for the answers under way."""
        if not self._stopped and self._give_up_ns:
            self._stopped = True
            self._source.stop()
            drain_ns = int(min(self._job.drain_s, DRAIN_AFTER_STOP_S) * 1e9)
            self._give_up_ns = min(self._give_up_ns, _monotonic_ns() + drain_ns)

    def _make_client(self) -> Client:
        job = self._job
        try:
            return make_client(
                job.endpoint,
                job.requests,
                job.request_order,
                self._recorder,
                self._source,
                in_flight_max=job.in_flight_max,
                timeout_s=job.timeout_s,
            )
        except ValueError as error:
            raise UsageError(
                f"request.headers: {error}", hint="names and values are printable ASCII"
            ) from error

    def _make_source(self) -> Source:
        arrivals = self._job.arrivals
        if isinstance(arrivals, Schedule):
            return OpenSource(self._columns, len(arrivals.due_ns), self._pacer.wake_at)
        return ClosedSource(
            self._columns,
            users=arrivals.concurrency,
            think_ns=int(arrivals.think_s * 1e9),
            requests_max=ROWS_MAX if arrivals.requests_max is None else arrivals.requests_max,
            wake_at=self._pacer.wake_at,
            turns_ns=arrivals.turns_ns,
        )

    def _start(self, start_ns: int) -> None:
        self._columns.header[STARTED_NS] = start_ns
        arrivals = self._job.arrivals
        end_ns = start_ns + int(arrivals.duration_s * 1e9)
        if isinstance(arrivals, Schedule):
            self._columns.times("due")[:] = arrivals.due_ns + start_ns
            last_ns = int(arrivals.due_ns[-1]) + start_ns if len(arrivals.due_ns) else start_ns
        else:
            last_ns = end_ns
        self._give_up_ns = last_ns + int(self._job.drain_s * 1e9)
        self._source.start(start_ns, end_ns)
        self._start_ns = start_ns
        self._call_tick(max(start_ns, _monotonic_ns()))

    def _call_tick(self, now_ns: int) -> None:
        tick_ns = 20_000_000
        self._tick_due_ns = now_ns + tick_ns
        self._loop.call_later((self._tick_due_ns - _monotonic_ns()) / 1e9, self._tick)

    def _wake(self) -> None:
        self._source.wake()

    def _tick(self) -> None:
        """Publish the counters, end requests that have waited too long, and finish where the job is over."""
        # A later tick shows a pause: the process did not run, or ran other code.
        pause_ns, pauses_max = 5_000_000, 1000
        now_ns = _monotonic_ns()
        late_ns = now_ns - self._tick_due_ns
        if late_ns > pause_ns and len(self._pauses_ns) < pauses_max:
            self._pauses_ns.append((self._tick_due_ns - self._start_ns, late_ns))
        issued = self._source.issued
        pending = self._oldest + np.flatnonzero(self._outcomes[self._oldest : issued] == PENDING)
        self._oldest = int(pending[0]) if len(pending) else issued
        self._columns.header[ISSUED] = issued
        self._columns.header[OLDEST_PENDING] = self._oldest
        over = now_ns >= self._give_up_ns
        if over:
            self._source.stop()
        self._end_overdue(pending, now_ns, over=over)
        if over or (self._source.exhausted and not len(pending)):
            self._columns.header[ISSUED] = self._source.issued
            self._finished.set_result(None)
        else:
            self._call_tick(_monotonic_ns())

    def _end_overdue(self, pending: NDArray[np.int64], now_ns: int, *, over: bool) -> None:
        """End the pending requests that timed out; when the job is over, the others too."""
        timeout_s = self._job.timeout_s
        timed_out = self._columns.times("due")[pending] + int(timeout_s * 1e9) <= now_ns
        was_sent = self._columns.times("sent")[pending] != 0
        ended = timed_out | over
        if not ended.any():
            return
        for index in pending[timed_out].tolist():
            self._recorder.fail(index, Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        for index in pending[ended & ~timed_out & was_sent].tolist():
            self._recorder.fail(index, Status.UNFINISHED, "no answer before the client stopped waiting")
        for index in pending[ended & ~timed_out & ~was_sent].tolist():
            self._recorder.fail(index, Status.UNSENT, "no connection or stream came free for it")
        self._client.cancel(pending[ended & was_sent].tolist())

    def _report(self, wall_s: float, cpu_s: float) -> WorkerReport:
        notes: list[str] = []
        issued = self._source.issued
        arrivals = self._job.arrivals
        if isinstance(arrivals, ClosedLoop) and issued == self._job.capacity != arrivals.requests_max:
            notes.append(f"stopped after {issued} requests, as many as memory was set aside for")
        checked = check_answers(self._recorder, self._job.requests, self._job.request_order)
        return WorkerReport(
            issued=issued,
            wall_s=wall_s,
            cpu_s=cpu_s,
            stopped_early=self._stopped,
            answers_checked=checked,
            error_texts={status.name: text for status, text in self._recorder.error_texts.items()},
            notes=tuple(notes),
            pauses_ns=tuple(self._pauses_ns),
        )


# Waking the event loop at the nanosecond at which a request is due.
#
# By a timerfd on CLOCK_MONOTONIC: Linux's high-resolution timer, absolute, free of slack. Loops' own timers round:
# asyncio's to the clock resolution of its selector (1 ms), uvloop's to whole milliseconds.


class Pacer:
    """Calls `on_wake()` in the loop once, as soon as the absolute time given to `wake_at` is reached.

    A new `wake_at` replaces the previous one. A time in the past wakes at once. `close()` when done.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_wake: Callable[[], None]) -> None:
        self._loop = loop
        self._on_wake = on_wake
        self._armed = False
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        # struct itimerspec of timerfd_settime(2): seconds and nanoseconds of the interval, then of the instant
        self._spec = (ctypes.c_int64 * 4)()
        self._spec_pointer = ctypes.addressof(self._spec)
        clock_monotonic = 1
        self._descriptor = libc.timerfd_create(clock_monotonic, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop.add_reader(self._descriptor, self._timer_fired)

    def wake_at(self, when_ns: int) -> None:
        """Wake at `when_ns` (CLOCK_MONOTONIC); never after `close`."""
        if self._descriptor < 0:
            return
        self._armed = True
        spec = self._spec
        spec[2], spec[3] = divmod(when_ns if when_ns > 0 else 1, 1_000_000_000)
        timer_abstime = 1
        if self._settime(self._descriptor, timer_abstime, self._spec_pointer, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Wake no more, and free the timer."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _timer_fired(self) -> None:
        # Readable until read or set again; on_wake usually sets it again, which saves the read.
        self._armed = False
        self._on_wake()
        if not self._armed and self._descriptor >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._descriptor, 8)
