"""What is a request inside a batching session, how does its answer come together, and what is told of its batch?

A request is a task of the scheduler. Where it is split, its parts may run in different batches, on different threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.model import Tensors
from batchtune.server.scheduling.batch_queue import CloseReason
from batchtune.server.sessions.merging import split_tensor
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError

Outputs = dict[str, NDArray[Any]]
Done = Callable[[Outputs | None, StatusError | None], None]
Completion = tuple[Done, Outputs | None, StatusError | None]
Deliver = Callable[[list[Completion]], None]

_logger = logging.getLogger(__name__)

EXPIRED_IN_QUEUE = "Run() timeout exceeded while waiting in batching queue"


@runtime_checkable
class EarlyRunner(Protocol):
    """A runner of requests that are prepared one by one, as they come, and merged by the names that they have then."""

    merged_names: tuple[str, ...]

    def prepare(self, inputs: Tensors) -> Tensors: ...
    def __call__(self, inputs: Tensors) -> Tensors: ...


class Queued(Protocol):
    """A request in a batching queue; `taken` once a batch thread has taken it out."""

    @property
    def taken(self) -> bool: ...


def closed_runner(inputs: Tensors) -> Tensors:  # noqa: ARG001 a Runner
    """Stands where a closed session had its model."""
    raise StatusError("UNAVAILABLE", "The session is closed")


def completions_of(
    tasks: list[Request], outputs: Outputs | None, error: StatusError | None
) -> list[Completion]:
    """Each task's rows of `outputs`, in the order it asked for, or `error` for all of them."""
    completions: list[Completion] = []
    start = 0
    names = tasks[0].output_names if tasks else ()
    single = outputs[names[0]] if outputs is not None and len(names) == 1 else None
    for task in tasks:
        stop = start + task.size
        pieces: Outputs | None = None
        if single is not None and task.output_names == names:
            pieces = {names[0]: single[start:stop]}
        elif outputs is not None:
            pieces = {name: outputs[name][start:stop] for name in task.output_names}
        start = stop
        if task.join is None:
            completions.append((task.done, pieces, error))
        elif (completion := task.join.add(task.part, pieces, error)) is not None:
            completions.append(completion)
    return completions


class Request:
    """One request as a task of the scheduler; `done` receives its own outputs.

    `taken`: a batch thread has taken it, or a part of it, out of the queue.
    """

    __slots__ = ("deadline_ns", "done", "inputs", "join", "output_names", "part", "size", "taken")

    def __init__(
        self, inputs: Tensors, size: int, output_names: tuple[str, ...], deadline_ns: int | None, done: Done
    ) -> None:
        self.inputs = inputs
        self.size = size
        self.output_names = output_names
        self.deadline_ns = deadline_ns
        self.done = done
        self.join: _Join | None = None
        self.part = 0
        self.taken = False

    def split(self, sizes: Sequence[int]) -> list[Request]:
        """Parts of these sizes, whose answers are put together again."""
        pieces = {name: split_tensor(array, sizes) for name, array in self.inputs.items()}
        join = _Join(self, len(sizes))
        parts = []
        for index, size in enumerate(sizes):
            inputs = {name: arrays[index] for name, arrays in pieces.items()}
            part = Request(inputs, size, self.output_names, self.deadline_ns, self.done)
            part.join = join
            part.part = index
            parts.append(part)
        return parts


class _Join:
    """The answers of a split request; complete when every part has one."""

    __slots__ = ("_error", "_lock", "_missing", "_outputs", "whole")

    def __init__(self, whole: Request, parts: int) -> None:
        self.whole = whole
        self._lock = threading.Lock()
        self._missing = parts
        self._outputs: list[Outputs | None] = [None] * parts
        self._error: StatusError | None = None

    def add(self, part: int, outputs: Outputs | None, error: StatusError | None) -> Completion | None:
        """Keep a part's answer; the whole request's completion if it was the last one, else None."""
        with self._lock:
            self._outputs[part] = outputs
            self._error = self._error or error
            self._missing -= 1
            if self._missing:
                return None
        if self._error is not None:
            return self.whole.done, None, self._error
        try:
            return self.whole.done, self._concatenated(), None
        except (ValueError, MemoryError) as failure:
            error = StatusError("INTERNAL", f"Tensor concat operation failed: {failure}")
            return self.whole.done, None, error

    def _concatenated(self) -> Outputs:
        parts = [outputs for outputs in self._outputs if outputs is not None]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.whole.output_names}


class LoopPort:
    """Hands answers and functions to one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon_threadsafe

    def deliver(self, completions: list[Completion]) -> None:
        """Let the loop call each completion; one wake-up of the loop for all of them."""
        self._call_soon(_complete, completions)

    def run_soon(self, function: Callable[[], None]) -> None:
        """Let the loop call `function` after what it has been given before."""
        self._call_soon(function)


def _complete(completions: list[Completion]) -> None:
    for done, outputs, error in completions:
        try:
            done(outputs, error)
        except Exception:
            _logger.exception("an answer could not be given")
            if error is None:
                _complete([(done, None, StatusError("INTERNAL", "the server failed to write the answer"))])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch that was run.

    rows: without padding. task_rows, queue_wait_micros: one entry per task, in order. execution_micros: the model's
    run alone. error_code: gRPC's name where the run failed. sent_elements, padding_elements: of the inputs that may
    differ in length, what the requests brought and what fills them up to the batch's longest, without the rows that
    only fill up the batch. bucket: the length bucket; "" without buckets.
    """

    rows: int
    padded_rows: int
    tasks: int
    task_rows: Sequence[int]
    input_tensors: int
    close_reason: CloseReason
    queue_wait_micros: Sequence[int]
    execution_micros: float
    error_code: str | None
    sent_elements: int = 0
    padding_elements: int = 0
    bucket: str = ""


class BatchObserver(Protocol):
    def on_batch(self, record: BatchRecord) -> None:
        """One batch has been run; called on its batch thread, which is not running a model meanwhile."""

    def on_rejected(self, reason: str) -> None:
        """One request was refused: queue_full, too_large; or dropped: expired."""


class Servable(Protocol):
    """One loaded version of a model."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def version(self) -> int:
        """Its version number."""
        ...

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """Its signatures by name."""
        ...

    @property
    def metadata(self) -> bytes:
        """A serialised tensorflow.serving.SignatureDefMap."""
        ...

    def submit(
        self,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Done,
    ) -> Queued | None:
        """Run a request. On the loop's thread, `done(outputs, None)` or `done(None, error)` follows, unless
        StatusError is raised at once. `output_names` None: all; `deadline_ns` on CLOCK_MONOTONIC. Gives what stands
        for the request in a batching queue, if there is one."""
        ...


class LoadedVersion(Servable, Protocol):
    """One version; the front ends see it as a Servable."""

    def summary(self) -> str:
        """What it takes and gives, in a line."""
        ...

    def close(self) -> None:
        """Answer what is queued, free what it holds. Not on the loop."""
        ...
