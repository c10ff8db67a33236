"""What does one process of the fleet do? It waits for jobs on a pipe, runs each in one event loop, and reports.

Messages to it: a tuple of `WorkerJob`, one for each endpoint, followed by the descriptors of their columns, `Start`,
`Stop`, and the end of the pipe, which ends it. Messages from it: `Ready`, `Done`, or a BatchtuneError that stopped it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import recv_handle
from typing import Final

import uvloop

from batchtune.errors import BatchtuneError
from batchtune.load.record.columns import Columns
from batchtune.load.worker.driver import Driver
from batchtune.load.worker.job import WorkerJob, WorkerReport

OF_A_TERMINAL: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C, a terminal that goes away, Ctrl-backslash: sent to all that it runs, and for the parent to answer."""


def start_undisturbed(process: SpawnProcess) -> None:
    """Start a child that inherits a mask without those signals; it ends when its parent does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
    try:
        resource_tracker.ensure_running()  # the first child would start it, which lets Ctrl-C through again
        signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Ready:
    """Connected, memory touched: the job can start."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start at this CLOCK_MONOTONIC time."""

    start_ns: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Send nothing more and report what there is."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was done of each part."""

    reports: tuple[WorkerReport, ...]


def main(pipe: Connection, cpus: Sequence[int] | None, last_words_file: str) -> None:
    """Serve jobs until the pipe ends; stderr goes to `last_words_file`. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    words = os.open(last_words_file, os.O_WRONLY | os.O_APPEND)
    os.dup2(words, 2)
    os.close(words)
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                jobs = pipe.recv()
                if isinstance(jobs, Stop):  # it came after the last job had ended by itself
                    continue
                memories = [recv_handle(pipe) for _ in jobs]
                pipe.send(runner.run(_run(pipe, jobs, memories)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return


async def _run(pipe: Connection, jobs: Sequence[WorkerJob], memories: Sequence[int]) -> Done | BatchtuneError:
    tables = [Columns(memory, job.capacity, job.gaps_max) for memory, job in zip(memories, jobs, strict=True)]
    for memory in memories:
        os.close(memory)
    try:
        drivers = [Driver(job, columns) for job, columns in zip(jobs, tables, strict=True)]
        await asyncio.gather(*(driver.prepare() for driver in drivers))
    except BatchtuneError as error:
        return error
    pipe.send(Ready())
    start = pipe.recv()
    if not isinstance(start, Start):
        return Done(tuple(driver.abandon() for driver in drivers))
    loop = asyncio.get_running_loop()

    def heard() -> None:
        loop.remove_reader(pipe.fileno())
        with contextlib.suppress(EOFError, ConnectionResetError):
            pipe.recv()  # Stop; the end of the pipe means the same
        for driver in drivers:
            driver.stop()

    loop.add_reader(pipe.fileno(), heard)
    os.set_blocking(pipe.fileno(), True)  # uvloop turned it off, and the pipe is read and written as blocking
    ended = asyncio.Barrier(len(drivers))
    try:
        reports = await asyncio.gather(*(driver.run(start.start_ns, ended=ended) for driver in drivers))
        return Done(tuple(replace(report, cpu_s=report.cpu_s / len(drivers)) for report in reports))
    finally:
        loop.remove_reader(pipe.fileno())
