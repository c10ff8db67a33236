"""Runs requests when batching is off: one at a time per handler thread, in the order of arrival."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from batchtune.batching.parameters import default_num_batch_threads
from batchtune.server.backends.model import Runner, Tensors
from batchtune.server.sessions.batched import (
    BatchObserver,
    Deliver,
    Done,
    Outputs,
    closed_runner,
    outcome_of,
)
from batchtune.server.sessions.input_shapes import InputShape
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError

Job = Callable[[], None]

_logger = logging.getLogger(__name__)

WAITING_MAX = 1024
"""Most requests that wait for a handler thread: 2,000 of 10 kB hold 20 MB and wait as long as retries do."""

HANDLERS_MAX = 512
"""Most handler threads of a model that batches in its graph, where each request holds a thread (100 kB)."""


class RequestThreads:
    """`count` threads that run requests, or their stages before and after the model, in the order of arrival.

    Last stages run first, so that what the device has computed does not wait behind what it has not. An error of a job
    is only logged: a job itself reports errors to its request. waiting_max: most jobs that wait for a thread, last
    stages aside; in TF Serving none waits over gRPC, any number over REST.
    """

    def __init__(self, count: int, *, name: str = "request_handler", waiting_max: int = WAITING_MAX) -> None:
        self._jobs: deque[Job] = deque()
        self._last_stages: deque[Job] = deque()
        # One for each job, and for each thread that is to end.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting_max = waiting_max
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Queue a request, or its first stage; raises StatusError RESOURCE_EXHAUSTED while too many wait, UNAVAILABLE
        after `close`."""
        if self._closed:
            raise StatusError("UNAVAILABLE", "The server is shutting down")
        if len(self._jobs) >= self._waiting_max:
            raise StatusError("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")
        self._jobs.append(job)
        self._calls.put(None)

    @property
    def has_room(self) -> bool:
        """Whether another request may begin: fewer than `waiting_max` last stages wait."""
        return len(self._last_stages) < self._waiting_max

    def put_last_stage(self, job: Job) -> None:
        """Queue the last stage of a request, ahead of all else; it is never refused."""
        self._last_stages.append(job)
        self._calls.put(None)

    def close(self) -> None:
        """Run the queued jobs, then end the threads."""
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                _logger.exception("a stage of a request failed to end it")
            del job

    def _next(self) -> Job | None:
        """Wait for a job and return it; None: the thread has to end."""
        self._calls.get()
        while True:
            for jobs in (self._last_stages, self._jobs):
                try:
                    return jobs.popleft()
                except IndexError:
                    continue  # another thread may have been faster; then there is one in the other queue
            if self._closed:
                return None


def outcome_before(
    deadline_ns: int | None, run: Callable[[], Outputs], failed: str
) -> tuple[Outputs | None, StatusError | None]:
    """Call `run` unless the deadline (CLOCK_MONOTONIC) has passed; return (its result, None) or (None, its error),
    which without a call is DEADLINE_EXCEEDED. An unexpected error is logged with the text `failed`."""
    if deadline_ns is not None and deadline_ns <= time.monotonic_ns():
        return None, StatusError("DEADLINE_EXCEEDED", "Deadline passed while the request waited for a thread")
    return outcome_of(run, failed)


def handlers_at_least() -> int:
    """Return the number of handler threads of a server whose models ask for no more: four per CPU, as in TF Serving."""
    return 4 * default_num_batch_threads()


class UnbatchedSession:
    """Runs the requests of one signature without batching; a `Session`.

    Call `submit` on the event loop; `done` is called there too.
    """

    def __init__(
        self,
        *,
        signature: Signature,
        runner: Runner,
        threads: RequestThreads,
        observer: BatchObserver,
        deliver: Deliver,
    ) -> None:
        self._output_names = tuple(spec.name for spec in signature.outputs)
        self._shapes = [(spec.name, InputShape(signature.name, spec)) for spec in signature.inputs]
        self._runner = runner
        self._threads = threads
        self._observer = observer
        self._deliver = deliver
        self._unanswered = 0
        self._closing = False
        self._drained = threading.Event()

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> None:
        """Queue one request; `done` is called later on the event loop. Requests may differ in their number of rows.

        A request whose deadline (CLOCK_MONOTONIC) passes in the queue ends with DEADLINE_EXCEEDED and is not run.

        Raises:
            StatusError: RESOURCE_EXHAUSTED while too many wait for a thread, INVALID_ARGUMENT for a wrong shape,
                UNAVAILABLE when the threads are closed.
        """
        for name, expected in self._shapes:
            array = inputs.get(name)
            if array is not None and (not array.shape or array.shape[1:] not in expected.known):
                expected.check(array.shape)

        answered = False

        def finish(outputs: Outputs | None, error: StatusError | None) -> None:
            nonlocal answered
            if not answered:  # it is called again where `done` fails
                answered = True
                self._unanswered -= 1
                if self._closing and not self._unanswered:
                    self._drained.set()
            done(outputs, error)

        names = output_names or self._output_names
        try:
            self._threads.put(
                partial(_answer, self._deliver, self._runner, names, inputs, deadline_ns, finish)
            )
        except StatusError as error:
            if error.code == "RESOURCE_EXHAUSTED":
                self._observer.on_rejected("queue_full")
            raise
        self._unanswered += 1

    def close(self) -> None:
        """Wait until the last request is answered, then drop the model. Blocks, so not to be called on the event
        loop."""
        self._closing = True
        if self._unanswered:
            self._drained.wait()
        self._runner = closed_runner


def _answer(
    deliver: Deliver,
    runner: Runner,
    names: tuple[str, ...],
    inputs: Tensors,
    deadline_ns: int | None,
    done: Done,
) -> None:
    run = partial(_run_chosen, runner, inputs, names)
    deliver([(done, *outcome_before(deadline_ns, run, "a request failed"))])


def _run_chosen(runner: Runner, inputs: Tensors, names: tuple[str, ...]) -> Outputs:
    """Run a request and return the outputs named; raises StatusError INTERNAL where one is missing."""
    results = runner(inputs)
    missing = [name for name in names if name not in results]
    if missing:
        raise StatusError("INTERNAL", f"The model gave no output {missing[0]}")
    return {name: results[name] for name in names}
