"""What is a request inside a batching session, and how does its answer come together?

A request is a task of the scheduler. Where it is split, its parts may run in different batches, on different threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.model import Tensors
from batchtune.server.sessions.merging import split_tensor
from batchtune.wire.status import StatusError

Outputs = dict[str, NDArray[Any]]
Done = Callable[[Outputs | None, StatusError | None], None]
Completion = tuple[Done, Outputs | None, StatusError | None]
Deliver = Callable[[list[Completion]], None]

EXPIRED_IN_QUEUE = "Run() timeout exceeded while waiting in batching queue"


@runtime_checkable
class EarlyRunner(Protocol):
    """A runner of requests that are prepared one by one, as they come, and merged by the names that they have then."""

    merged_names: tuple[str, ...]

    def prepare(self, inputs: Tensors) -> Tensors: ...
    def __call__(self, inputs: Tensors) -> Tensors: ...


class Queued(Protocol):
    """A request in a batching queue; `taken` once a batch thread has taken it out. `step`: `step NAME: ` of the step
    that a chain's request is in, before what is said of it, else ""."""

    @property
    def taken(self) -> bool: ...
    @property
    def step(self) -> str: ...


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
    step = ""

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
