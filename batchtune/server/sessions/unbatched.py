"""Runs requests when batching is off: one at a time per handler thread, in the order of arrival."""

from __future__ import annotations

import queue
import threading
import time
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

WAITING_MAX = 1024
"""Most requests that wait for a handler thread: 2,000 of 10 kB hold 20 MB and wait as long as retries do."""

_Job = tuple[Runner, tuple[str, ...], Tensors, int | None, Done]


HANDLERS_MAX = 512
"""Most handler threads of a model that batches in its graph, where each request holds a thread (100 kB)."""


class HandlerThreads:
    """The threads that run unbatched requests, shared by the sessions of a pool.

    count: number of threads; None: `handlers_at_least()`. waiting_max: most requests that wait for a thread; in TF
    Serving none waits over gRPC, any number over REST.
    """

    def __init__(self, *, deliver: Deliver, count: int | None = None, waiting_max: int = WAITING_MAX) -> None:
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting_max = waiting_max
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"request_handler_{index}", daemon=True)
            for index in range(handlers_at_least() if count is None else count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: _Job) -> None:
        """Queue a request; raises StatusError RESOURCE_EXHAUSTED while too many wait, UNAVAILABLE after `close`."""
        if self._closed:
            raise StatusError("UNAVAILABLE", "The server is shutting down")
        if self._jobs.qsize() >= self._waiting_max:
            raise StatusError("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")
        self._jobs.put(job)

    def close(self) -> None:
        """Answer the queued requests, then end the threads."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            runner, names, inputs, deadline_ns, done = job
            outputs, error = outcome_before(
                deadline_ns, partial(_run_chosen, runner, inputs, names), "a request failed"
            )
            self._deliver([(done, outputs, error)])
            del job, runner, inputs, outputs, done, error


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
        self, *, signature: Signature, runner: Runner, threads: HandlerThreads, observer: BatchObserver
    ) -> None:
        self._output_names = tuple(spec.name for spec in signature.outputs)
        self._shapes = [(spec.name, InputShape(signature.name, spec)) for spec in signature.inputs]
        self._runner = runner
        self._threads = threads
        self._observer = observer
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
            self._threads.put((self._runner, names, inputs, deadline_ns, finish))
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


def _run_chosen(runner: Runner, inputs: Tensors, names: tuple[str, ...]) -> Outputs:
    """Run a request and return the outputs named; raises StatusError INTERNAL where one is missing."""
    results = runner(inputs)
    missing = [name for name in names if name not in results]
    if missing:
        raise StatusError("INTERNAL", f"The model gave no output {missing[0]}")
    return {name: results[name] for name in names}
