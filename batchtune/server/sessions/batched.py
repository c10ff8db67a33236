"""The requests of one signature in batches: checked, queued, merged, run, cut out again.

Rules and texts: TF Serving's `batching_session.cc` and `batching_util.cc`. A request is a task of the scheduler;
where it is split, its parts may run in different batches, on different threads. `submit` is called on the event loop
and never blocks; batches run on the scheduler's threads; the answers of one batch are delivered together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.model import Runner, Tensors
from batchtune.server.scheduling.batch_queue import (
    Batch,
    BatchQueue,
    CloseReason,
    QueueOptions,
    SharedBatchScheduler,
    next_allowed_size,
)
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier
from batchtune.server.scheduling.streaming import StreamingBatchScheduler, StreamingQueue
from batchtune.server.sessions.input_shapes import SignatureInputs, numpy_dtype
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError, invalid_argument

Outputs = dict[str, NDArray[Any]]
Done = Callable[[Outputs | None, StatusError | None], None]
Completion = tuple[Done, Outputs | None, StatusError | None]
Deliver = Callable[[list[Completion]], None]

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)

EXPIRED_IN_QUEUE = "Run() timeout exceeded while waiting in batching queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRunner:
    """A runner in two steps: `prepare` for each request as soon as it is in a batch, then one call of `run` for the
    batch.

    merged_names: names of the tensors that `prepare` returns; they are merged into the batch.
    """

    merged_names: tuple[str, ...]
    prepare: Runner
    run: Runner

    def __call__(self, inputs: Tensors) -> Tensors:
        return self.run(inputs)


class Queued(Protocol):
    """A submitted request; `taken`: whether a batch thread has removed it from its queue."""

    @property
    def taken(self) -> bool: ...


def closed_runner(inputs: Tensors) -> Tensors:  # noqa: ARG001 a Runner
    """Raise StatusError UNAVAILABLE; the runner of a session that is closed."""
    raise StatusError("UNAVAILABLE", "The session is closed")


def outcome_of(run: Callable[[], _Result], failed: str) -> tuple[_Result | None, StatusError | None]:
    """Call `run`; return (its result, None) or (None, its error). An unexpected error is logged with the text `failed`.

    The error is a new StatusError: the frames of one that was raised would keep the batch and the model in memory.
    """
    try:
        return run(), None
    except StatusError as error:
        return None, StatusError(error.code, error.message)
    except BaseException as error:  # whatever it is, the requests end, and the thread serves on
        _logger.exception("%s", failed)
        return None, StatusError("INTERNAL", f"{type(error).__name__}: {error}")


def completions_of(
    tasks: list[Request], outputs: Outputs | None, error: StatusError | None
) -> list[Completion]:
    """Return (done, outputs, error) for each request that is answered when this batch has run.

    outputs: the batch's, by name, of which each task gets its own rows; None: every task gets `error`. A request that
    was split has a completion only if its last part has ended.
    """
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
    """One request as a task of the scheduler; `done` receives its outputs.

    size: rows. deadline_ns: on the scheduler's clock; None: no deadline. taken: whether a batch thread has removed the
    request, or a part of it, from the queue. For a part of a split request, join: where the answers of the parts are
    collected; part: index of this one.
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
        """Return parts of these sizes (rows); the answers of the parts are joined into the answer of this request."""
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
    """Collects the answers of the parts of a split request."""

    __slots__ = ("_error", "_lock", "_missing", "_outputs", "whole")

    def __init__(self, whole: Request, parts: int) -> None:
        self.whole = whole
        self._lock = threading.Lock()
        self._missing = parts
        self._outputs: list[Outputs | None] = [None] * parts
        self._error: StatusError | None = None

    def add(self, part: int, outputs: Outputs | None, error: StatusError | None) -> Completion | None:
        """Record the answer of part number `part`; return the request's completion, None while an answer is missing.

        The completion has the parts' outputs concatenated, or the error of the first part that failed.
        """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch that was run, or whose run failed.

    rows: without padding; padded_rows: with it. task_rows, queue_wait_micros: one entry for each task, in order.
    input_tensors: number of inputs. execution_micros: of the model's run alone. For inputs of variable length,
    sent_elements: elements that the requests brought, and padding_elements: those that pad them to the longest of the
    batch; padding rows count in neither. bucket: name of the length bucket, "" without buckets.
    """

    rows: int
    padded_rows: int
    task_rows: Sequence[int]
    input_tensors: int
    close_reason: CloseReason
    queue_wait_micros: Sequence[int]
    execution_micros: float
    sent_elements: int = 0
    padding_elements: int = 0
    bucket: str = ""


class BatchObserver(Protocol):
    """A protocol: receives a record of each batch and the reason of each refusal, for metrics."""

    def on_batch(self, record: BatchRecord) -> None:
        """Called on the batch thread when a batch has been run; delays that thread, so it must be quick."""

    def on_rejected(self, reason: str) -> None:
        """Called when a request is refused or dropped; reason: "queue_full", "too_large" or "expired"."""


SessionQueue = BatchQueue[Any] | StreamingQueue[Any]
SessionScheduler = SharedBatchScheduler | StreamingBatchScheduler


class BatchingSession:
    """Batches the requests of one signature.

    Requests for a subset of the outputs have a queue of their own, as in TF Serving; beyond 64 subsets they share the
    queue of all outputs.

    runner: runs a batch of merged inputs. deliver: called with the completions of a batch, on any thread.
    length_padding: what fills up inputs of different lengths. retrier: schedules a request again while the queue is
    full; None: such a request fails at once. bucket: name under which batches are recorded, set by a caller that has
    several sessions for one signature. Raises StatusError INVALID_ARGUMENT for options that break a rule.
    """

    def __init__(
        self,
        *,
        signature: Signature,
        runner: Runner,
        scheduler: SessionScheduler,
        options: QueueOptions,
        observer: BatchObserver,
        deliver: Deliver,
        length_padding: LengthPadding = "off",
        retrier: BatchSchedulerRetrier | None = None,
    ) -> None:
        options.validate(sizes=True)
        self.bucket = ""
        self._signature = signature
        self._inputs = SignatureInputs(signature)
        only = signature.inputs[0] if len(signature.inputs) == 1 else None
        self._only_input = only.name if only is not None else ""
        self._only_dtype = numpy_dtype(only.dtype) if only is not None else None
        self._rows_by_shape: dict[
            tuple[int, ...], int
        ] = {}  # shapes of the only input that passed every check
        self._output_names = tuple(spec.name for spec in signature.outputs)
        self._open_inputs = [
            spec.name for spec in signature.inputs if spec.shape is None or None in spec.shape[1:]
        ]
        self._runner = runner
        self._scheduler = scheduler
        self._now_micros = scheduler.clock.now_micros
        self._observer = observer
        self._deliver = deliver
        self._length_padding = length_padding
        self._retrier = retrier
        self._empty: Callable[..., NDArray[Any]] = getattr(runner, "empty", np.empty)
        self._options = options
        self._early: EarlyRunner | None = runner if isinstance(runner, EarlyRunner) else None
        self._merged_names = tuple(spec.name for spec in signature.inputs)
        if self._early is not None:
            self._merged_names, self._open_inputs = self._early.merged_names, []
        self._queue = self._new_queue()
        self._queues = {frozenset(self._output_names): self._queue}

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> Request | None:
        """Queue one request and return it; `deliver` later gets `done` with the outputs or the error.

        inputs: every input of the signature. output_names: None: all. deadline_ns: on the scheduler's clock
        (CLOCK_MONOTONIC), None: no deadline; a batch is dropped only if the deadlines of all its requests have passed.
        A request without rows is answered with empty outputs, and None is returned. Raises StatusError when the request
        is refused at once. Only one thread may call this.
        """
        rows = None
        array = inputs.get(self._only_input)
        if array is not None and array.dtype is self._only_dtype and len(inputs) == 1:
            rows = self._rows_by_shape.get(array.shape)
        if rows is None:
            rows = self._count_rows(inputs)
        names, queue = self._output_names, self._queue
        if output_names is not None:
            names, queue = output_names, self._queue_for(output_names)
        if rows == 0:
            self._deliver([(done, self._empty_outputs(names), None)])
            return None
        request = Request(inputs, rows, names, deadline_ns, done)
        try:
            queue.schedule(request)
        except StatusError as error:
            if error.code == "UNAVAILABLE" and self._retrier is not None and self._retrier.retries:
                self._retrier.schedule_later(queue, request, lambda last: self._refuse(request, last))
                return request
            self._count_refusal(error)
            raise
        return request

    def close(self) -> None:
        """Refuse new requests, answer the queued ones, then drop every reference to the model. Blocks.

        Session and queues refer to each other: with a reference to the model it would stay in memory until the garbage
        collector runs, and after gc.freeze for ever.
        """
        for queue in list(self._queues.values()):
            queue.close()
        self._runner = closed_runner
        self._early = None
        self._empty = np.empty

    @property
    def queue_depth(self) -> tuple[int, int]:
        """(batches, rows) that wait for a batch thread."""
        queues = list(self._queues.values())
        return sum(queue.num_enqueued_batches for queue in queues), sum(
            queue.num_enqueued_rows for queue in queues
        )

    def _count_rows(self, inputs: Tensors) -> int:
        if not inputs:
            raise invalid_argument("Batching Run() must have at least one input tensor")
        rows = self._inputs.count_rows(inputs)
        # Looking up a whole shape is 0.3 µs cheaper than the checks; clients send a model few.
        shapes_max = 64
        if self._only_input and len(self._rows_by_shape) < shapes_max:
            self._rows_by_shape[inputs[self._only_input].shape] = rows
        return rows

    def _queue_for(self, output_names: tuple[str, ...]) -> SessionQueue:
        wanted = frozenset(output_names)
        queue = self._queues.get(wanted)
        max_output_sets = 64
        if queue is None:
            if not wanted <= set(self._output_names):
                raise StatusError("INTERNAL", "Task does not conform to batch signature")
            if len(self._queues) > max_output_sets:
                return self._queue
            queue = self._queues[wanted] = self._new_queue()
        return queue

    def _new_queue(self) -> SessionQueue:
        if self._early is None:
            return self._scheduler.add_queue(self._options, self._process)
        if not isinstance(self._scheduler, StreamingBatchScheduler):
            raise invalid_argument("batching_stage early needs batch_scheduler streaming")
        return self._scheduler.add_queue(self._options, self._process, self._prepare)

    def _prepare(self, task: Request) -> bool:
        """Do the early work on one request; False where it failed: then its error has been delivered."""
        task.taken = True
        prepare = closed_runner if self._early is None else self._early.prepare
        inputs, error = outcome_of(partial(prepare, task.inputs), "early work on a request failed")
        if inputs is None:
            self._deliver(completions_of([task], None, error))
            return False
        task.inputs = inputs
        return True

    def _empty_outputs(self, names: tuple[str, ...]) -> Outputs:
        specs = {spec.name: spec for spec in self._signature.outputs}
        return {
            name: np.empty(
                (0, *(size or 0 for size in (specs[name].shape or ())[1:])), numpy_dtype(specs[name].dtype)
            )
            for name in names
        }

    def _refuse(self, request: Request, error: StatusError) -> None:
        self._count_refusal(error)
        self._deliver([(request.done, None, error)])

    def _count_refusal(self, error: StatusError) -> None:
        self._observer.on_rejected("queue_full" if error.code == "UNAVAILABLE" else "too_large")

    def _process(self, batch: Batch[Request]) -> None:
        tasks = batch.tasks
        if not tasks:
            return
        for task in tasks:
            task.taken = True
            if task.join is not None:
                task.join.whole.taken = True
        start_micros = self._now_micros()
        if _all_expired(tasks, start_micros * 1000):
            for _ in tasks:
                self._observer.on_rejected("expired")
            late = StatusError("RESOURCE_EXHAUSTED", EXPIRED_IN_QUEUE)
            self._deliver(completions_of(tasks, None, late))
            return
        failed = f"a batch of {batch.size} rows failed"
        outputs, error = outcome_of(partial(self._run, batch, start_micros), failed)
        self._deliver(completions_of(tasks, outputs, error))

    def _run(self, batch: Batch[Request], start_micros: int) -> Outputs:
        tasks, rows = batch.tasks, batch.size
        padded_rows = next_allowed_size(rows, self._options.allowed_batch_sizes)
        merged = {
            name: merge_tensors(
                name,
                [task.inputs[name] for task in tasks],
                rows=rows,
                padded_rows=padded_rows,
                length_padding=self._length_padding,
                empty=self._empty,
            )
            for name in self._merged_names
        }
        sent, padding = (0, 0)
        if self._open_inputs:
            sent, padding = elements_of(self._open_inputs, [task.inputs for task in tasks], merged)
        began_ns = time.monotonic_ns()
        try:
            results = self._runner(merged)
        finally:
            execution_micros = (time.monotonic_ns() - began_ns) / 1000
            self._observer.on_batch(
                BatchRecord(
                    rows=rows,
                    padded_rows=padded_rows,
                    task_rows=[task.size for task in tasks],
                    input_tensors=len(merged),
                    close_reason=batch.close_reason,
                    queue_wait_micros=[start_micros - micros for micros in batch.enqueued_micros],
                    execution_micros=execution_micros,
                    sent_elements=sent,
                    padding_elements=padding,
                    bucket=self.bucket,
                )
            )
        return checked_outputs(results, self._output_names, padded_rows)


def _all_expired(tasks: list[Request], now_ns: int) -> bool:
    return all(task.deadline_ns is not None and task.deadline_ns <= now_ns for task in tasks)


LengthPadding = Literal["off", "first_element", "zero"]


def merge_tensors(
    name: str,
    arrays: Sequence[NDArray[Any]],
    *,
    rows: int,
    padded_rows: int,
    length_padding: LengthPadding,
    empty: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] = np.empty,
) -> NDArray[Any]:
    """Concatenate `arrays` (together `rows` rows), and repeat the first row of the last array up to `padded_rows` rows.

    Returns an array of shape (padded_rows, …) in memory from `empty`; a single array that needs no padding is returned
    itself. length_padding: every dimension but the rows is filled up to the batch's largest, with the array's first
    element ("first_element", as TF Serving does), or with zeros or empty strings ("zero"); "off": it is not.
    Raises StatusError: FAILED_PRECONDITION where shapes differ and length_padding is "off"; INVALID_ARGUMENT or
    INTERNAL for ranks that cannot be padded; INVALID_ARGUMENT for an empty array among others.
    """
    if length_padding != "off":
        arrays = _pad_lengths(name, arrays, length_padding)
    first = arrays[0]
    if len(arrays) == 1 and rows == padded_rows:
        return first
    merged = empty((padded_rows, *first.shape[1:]), first.dtype)
    try:
        np.concatenate(arrays, out=merged[:rows])
    except ValueError as error:
        raise StatusError(
            "FAILED_PRECONDITION",
            f"Tensors with name '{name}' from different tasks have different shapes and padding is turned off. Set "
            "pad_variable_length_inputs to true, or ensure that all tensors with the same name have equal dimensions "
            "starting with the first dim.",
        ) from error
    if padded_rows > rows:
        merged[rows:] = arrays[-1][:1]
    return merged


def elements_of(
    names: Sequence[str], tasks: Sequence[Mapping[str, NDArray[Any]]], merged: Mapping[str, NDArray[Any]]
) -> tuple[int, int]:
    """Return (sent, padding): the numbers of elements of the inputs `names` that the tasks brought, and that pad their
    lengths.

    tasks: the inputs of each task, by name; merged: those of the batch. Padding rows count in neither number.
    """
    rows = sum(len(inputs[name]) for name in names[:1] for inputs in tasks)
    sent = sum(inputs[name].size for name in names for inputs in tasks)
    computed = sum(merged[name].size // len(merged[name]) * rows for name in names)
    return sent, computed - sent


def checked_outputs(
    outputs: Mapping[str, NDArray[Any]], names: Sequence[str], padded_rows: int
) -> dict[str, NDArray[Any]]:
    """Return the outputs `names`, each checked to have `padded_rows` rows.

    Raises StatusError: INTERNAL where an output is missing, FAILED_PRECONDITION for a wrong number of rows.
    """
    checked = {}
    for name in names:
        array = outputs.get(name)
        if array is None:
            raise StatusError("INTERNAL", "Wrong number of batched output tensors")
        if array.ndim == 0:
            raise StatusError("FAILED_PRECONDITION", "Batched output tensor has 0 dimensions")
        if array.shape[0] != padded_rows:
            raise StatusError(
                "FAILED_PRECONDITION",
                "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the "
                "input tensors",
            )
        checked[name] = array
    return checked


def split_tensor(array: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Return consecutive views of an array, one for each of `sizes`, with that many rows."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(array[start : start + size])
        start += size
    return pieces


def _pad_lengths(
    name: str, arrays: Sequence[NDArray[Any]], length_padding: LengthPadding
) -> Sequence[NDArray[Any]]:
    shapes = {array.shape[1:] for array in arrays}
    ranks = {len(shape) for shape in shapes}
    max_padded_rank = 6
    if max(ranks) >= max_padded_rank:
        raise StatusError("INVALID_ARGUMENT", "Only tensors with rank from 1 to 6 can be padded.")
    if len(shapes) == 1:
        return arrays
    if len(ranks) > 1:
        raise StatusError(
            "INTERNAL",
            f"Tensor concat operation failed: tensors with name '{name}' from different tasks have different ranks",
        )
    largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return [_pad_one(array, (array.shape[0], *largest), length_padding) for array in arrays]


def _pad_one(array: NDArray[Any], shape: tuple[int, ...], length_padding: LengthPadding) -> NDArray[Any]:
    if array.shape == shape:
        return array
    if length_padding == "first_element":
        if array.size == 0 and 0 not in shape:
            raise StatusError("INVALID_ARGUMENT", "Got empty tensor in batch of non-empty tensors.")
        fill = array.flat[0] if array.size else 0
    else:
        fill = b"" if array.dtype == object else 0
    padded: NDArray[Any] = np.full(shape, fill, array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded
