"""How does a request run when batching is off? One at a time per handler thread, in the order of arrival."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

from numpy.typing import NDArray

from batchtune.batching import default_num_batch_threads
from batchtune.server.session_request import Deliver, Done, Outputs, Runner, Tensors
from batchtune.wire.status import StatusError
from batchtune.wire.tensors import Signature

_logger = logging.getLogger(__name__)
_Job = tuple[Runner, tuple[str, ...], Tensors, int | None, Done]


class HandlerThreads:
    """The threads that run unbatched requests, for all sessions of a server; TF Serving has 4 per CPU."""

    def __init__(self, *, deliver: Deliver, count: int | None = None) -> None:
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"request_handler_{index}", daemon=True)
            for index in range(4 * default_num_batch_threads() if count is None else count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: _Job) -> None:
        """Queue a request without limit; raises StatusError UNAVAILABLE after `close`."""
        if self._closed:
            raise StatusError("UNAVAILABLE", "The server is shutting down")
        self._jobs.put(job)

    def close(self) -> None:
        """Answer what is queued, then end the threads."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            runner, names, inputs, deadline_ns, done = job
            outputs, error = _answer(runner, names, inputs, deadline_ns)
            self._deliver([(done, outputs, error)])
            del job, runner, inputs, outputs, done


class UnbatchedSession:
    """Runs the requests of one signature without batching; the same `submit` as a BatchingSession."""

    def __init__(self, *, signature: Signature, runner: Runner, threads: HandlerThreads) -> None:
        self._output_names = tuple(spec.name for spec in signature.outputs)
        self._runner = runner
        self._threads = threads

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> None:
        """Queue one request; tensors without rows or dimensions are the model's affair here.

        A request whose deadline (CLOCK_MONOTONIC) passes in the queue ends with DEADLINE_EXCEEDED and is not run.
        """
        self._threads.put((self._runner, output_names or self._output_names, inputs, deadline_ns, done))


def _answer(
    runner: Runner, names: tuple[str, ...], inputs: Tensors, deadline_ns: int | None
) -> tuple[Outputs | None, StatusError | None]:
    if deadline_ns is not None and deadline_ns <= time.monotonic_ns():
        return None, StatusError("DEADLINE_EXCEEDED", "Deadline passed while the request waited for a thread")
    try:
        results = runner(inputs)
        return _chosen(results, names), None
    except StatusError as error:
        return None, error
    except Exception as error:
        _logger.exception("a request failed")
        return None, StatusError("INTERNAL", f"{type(error).__name__}: {error}")


def _chosen(results: Tensors, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    missing = [name for name in names if name not in results]
    if missing:
        raise StatusError("INTERNAL", f"The model gave no output {missing[0]}")
    return {name: results[name] for name in names}
