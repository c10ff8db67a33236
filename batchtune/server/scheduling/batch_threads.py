"""Threads that run batches, and the clock that they sleep by.

A pool of threads takes work from a `BatchSource`. An idle thread parks; at most one of them, the timekeeper, parks with
a time limit: the earliest instant at which something becomes due. TensorFlow polls every millisecond instead. So a
batch costs at most two wake-ups (its timer is set, it becomes schedulable), and a task costs none.

A `Parker` belongs to one thread. `park` sleeps until `unpark`, or until the clock shows an instant; like LockSupport of
Java it holds one permit, so an `unpark` that comes before `park` is not lost.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from batchtune.wire.status import StatusError


def lower_timer_slack() -> None:
    """Let the kernel end this thread's sleeps on time: 1 ns of slack instead of 50 µs (prctl(2)).

    Does nothing where the system is not Linux.
    """
    pr_set_timerslack = 29
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_timerslack, 1, 0, 0, 0)


class Parker:
    """Puts the thread that owns it to sleep; any other thread may wake it.

    A lock used as a binary semaphore: about a third of the cost of `threading.Condition`.
    """

    __slots__ = ("_permit",)

    def __init__(self) -> None:
        self._permit = threading.Lock()
        self._permit.acquire()

    def park(self, until_micros: int | None) -> None:
        """Sleep until `unpark()` or until the clock shows `until_micros` (None: no limit); may return early."""
        if until_micros is None:
            self._permit.acquire()
            return
        remaining_s = (until_micros * 1000 - time.monotonic_ns()) / 1e9
        longest_sleep_s = 3600.0
        if remaining_s > 0:
            self._permit.acquire(timeout=min(remaining_s, longest_sleep_s))
        else:
            self._permit.acquire(blocking=False)

    def unpark(self) -> None:
        """End the owner's present `park`; if it is not parked, its next `park` returns at once."""
        if self._permit.locked():
            self._permit.release()


class Clock:
    """The time by which a scheduler's threads sleep, CLOCK_MONOTONIC; a test may use a clock that it sets by hand."""

    __slots__ = ()

    def now_micros(self) -> int:
        """Return the microseconds since an arbitrary origin; never goes back."""
        return time.monotonic_ns() // 1000

    def parker(self) -> Parker:
        """Make a parker that reads its instants from this clock."""
        return Parker()

    def watch(self, settled: Callable[[], bool]) -> None:
        """Register `settled`, which returns whether the threads have reacted to the time that the clock shows.

        A clock that is set by hand waits for that before it changes; this clock waits for no thread.
        """

    def unwatch(self, settled: Callable[[], bool]) -> None:
        """Remove a function that was registered by `watch`."""


NEVER_MICROS = 2**62
THREADS_MAX = 4_096
"""Most threads of a pool: more than a device runs batches at once; a system allows some 30,000 threads."""

_logger = logging.getLogger(__name__)

BatchT = TypeVar("BatchT")
BatchT_contra = TypeVar("BatchT_contra", contravariant=True)


class BatchOwner(Protocol[BatchT_contra]):
    """A protocol: runs batches that a BatchSource returned; `BatchThreads` calls both methods on a batch thread."""

    def process(self, batch: BatchT_contra) -> None:
        """Run the batch; a batch thread calls this without holding the scheduler's lock."""

    def finished(self, batch: BatchT_contra) -> None:
        """Note that `process` has returned or raised; called by the batch thread while it holds the scheduler's lock,
        so that this must not block."""


class BatchSource(Protocol[BatchT]):
    """A protocol: supplies `BatchThreads` with batches; both methods are called while `BatchThreads.lock` is held."""

    def take(self, now_micros: int) -> tuple[tuple[BatchOwner[BatchT], BatchT] | None, int]:
        """Return ((owner, batch), NEVER_MICROS) for a batch to run now; else (None, instant at which to call again).

        The instant is NEVER_MICROS if nothing will become due by itself.
        """

    def pending(self) -> bool:
        """Whether another thread should take work now, or should wait for the instant at which work becomes due."""


class _BatchThread:
    __slots__ = ("counted", "idle", "parker", "thread")
    thread: threading.Thread

    def __init__(self, parker: Parker) -> None:
        self.parker = parker
        self.idle = False
        self.counted = True  # woken, and has not looked at the source since


class BatchThreads(Generic[BatchT]):
    """`count` threads that run the batches of `source`; call methods marked (locked) with `self.lock` held.

    Raises StatusError INVALID_ARGUMENT for a count below 1 or above THREADS_MAX.
    """

    def __init__(self, *, count: int, clock: Clock, name: str, source: BatchSource[BatchT]) -> None:
        self.lock = threading.Lock()
        self.clock = clock
        self._name = name
        self._source = source
        self._idle: list[_BatchThread] = []
        self._count = count
        self._timekeeper: _BatchThread | None = None
        self._timer_micros = NEVER_MICROS
        self._unsettled = count
        if count < 1:
            raise StatusError("INVALID_ARGUMENT", f"num_batch_threads must be positive; was {count}")
        if count > THREADS_MAX:
            raise StatusError(
                "INVALID_ARGUMENT", f"num_batch_threads must be at most {THREADS_MAX}; was {count}"
            )
        clock.watch(self._settled)
        self._workers = [self._new_worker(index) for index in range(count)]
        for worker in self._workers:
            worker.thread.start()

    @property
    def count(self) -> int:
        """Number of threads."""
        return self._count

    def wake(self) -> None:
        """(locked) Wake one idle thread, if there is one, so that it takes a batch from the source."""
        if not self._idle:
            return
        worker = self._idle.pop()
        worker.idle = False
        if worker is self._timekeeper:
            self._timekeeper = None
            self._timer_micros = NEVER_MICROS
        worker.counted = True
        self._unsettled += 1
        worker.parker.unpark()

    def wake_all(self) -> None:
        """(locked) Wake every idle thread."""
        while self._idle:
            self.wake()

    def wake_at(self, due_micros: int) -> None:
        """(locked) Let an idle thread, if there is one, take a batch from the source at `due_micros`."""
        if due_micros < self._timer_micros:
            self.wake()

    def stop(self) -> None:
        """End the threads, each after the batch that it runs, and wait for them."""
        with self.lock:
            self._count = 0
            self.wake_all()
        for worker in self._workers:
            if worker.thread is not threading.current_thread():
                worker.thread.join()
        self.clock.unwatch(self._settled)

    def _new_worker(self, index: int) -> _BatchThread:
        worker = _BatchThread(self.clock.parker())
        worker.thread = threading.Thread(
            target=self._run, args=(worker,), name=f"{self._name}_{index}", daemon=True
        )
        return worker

    def _run(self, worker: _BatchThread) -> None:
        lower_timer_slack()
        while True:
            with self.lock:
                self._get_up(worker)
                if not self._count:
                    self._unsettled -= worker.counted
                    return
                job, due_micros = self._source.take(self.clock.now_micros())
                until_micros = self._lie_down(worker, due_micros) if job is None else None
                if worker.counted:
                    worker.counted = False
                    self._unsettled -= 1
                if job is not None and self._idle and self._timekeeper is None and self._source.pending():
                    self.wake()
            if job is None:
                worker.parker.park(until_micros)
                continue
            self._process(*job)
            job = None  # a parked thread must not keep the last batch alive

    def _process(self, owner: BatchOwner[BatchT], batch: BatchT) -> None:
        try:
            owner.process(batch)
        except Exception:
            _logger.exception("a batch's callback raised; its tasks may go unanswered")
        finally:
            with self.lock:
                owner.finished(batch)

    def _lie_down(self, worker: _BatchThread, due_micros: int) -> int | None:
        worker.idle = True
        self._idle.append(worker)
        if due_micros >= self._timer_micros:
            return None
        self._timekeeper = worker
        self._timer_micros = due_micros
        return due_micros

    def _get_up(self, worker: _BatchThread) -> None:
        if worker.idle:  # time woke it, no other thread did
            worker.idle = False
            self._idle.remove(worker)
            if worker is self._timekeeper:
                self._timekeeper = None
                self._timer_micros = NEVER_MICROS

    def _settled(self) -> bool:
        with self.lock:
            return self._unsettled == 0 and self._timer_micros > self.clock.now_micros()
