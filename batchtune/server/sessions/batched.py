"""How does a request get through a batch: checked, queued, merged with others, run, cut out again?

Rules and texts: TF Serving's `batching_session.cc`. `submit` is called on the event loop and never blocks; batches
run on the scheduler's threads; the answers of one batch are delivered together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchtune.server.backends.model import Runner, Tensors
from batchtune.server.scheduling.batch_queue import (
    Batch,
    QueueOptions,
    check_allowed_sizes,
    next_allowed_size,
)
from batchtune.server.scheduling.clock import Clock
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier
from batchtune.server.scheduling.streaming import StreamingBatchScheduler
from batchtune.server.sessions.input_shapes import SignatureInputs, numpy_dtype
from batchtune.server.sessions.merging import LengthPadding, checked_outputs, elements_of, merge_tensors
from batchtune.server.sessions.request import (
    EXPIRED_IN_QUEUE,
    BatchObserver,
    BatchRecord,
    Deliver,
    Done,
    EarlyRunner,
    Outputs,
    Request,
    closed_runner,
    completions_of,
)
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError, invalid_argument

_MAX_OUTPUT_SETS = 64
_SHAPES_MAX = 64
"""Looking up a whole shape is 0.3 µs cheaper than the checks; clients send a model few."""

_logger = logging.getLogger(__name__)


class SessionQueue(Protocol):
    """What a session needs of a queue."""

    @property
    def num_enqueued_rows(self) -> int: ...
    @property
    def num_enqueued_batches(self) -> int: ...
    def schedule(self, task: Any, /) -> None: ...
    def close(self) -> None: ...


class SessionScheduler(Protocol):
    """What a session needs of a scheduler: shared or streaming."""

    @property
    def clock(self) -> Clock: ...
    def add_queue(
        self, options: QueueOptions, process_batch: Callable[[Batch[Any]], None], /
    ) -> SessionQueue: ...


class BatchingSession:
    """Batches the requests of one signature.

    A request for some of the outputs only is another signature to TF Serving, and has a queue of its own here too
    (up to 64 such sets; any further ones share the queue of all outputs).

    allowed sizes come from `options`; length_padding says what fills inputs of different lengths; retrier, if any,
    tries again while the queue is full. Raises StatusError INVALID_ARGUMENT for options that break a rule.
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
        check_allowed_sizes(options)
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
        """Queue one request; `done(outputs, None)` or `done(None, error)` follows through `deliver`.

        inputs: every input of the signature. output_names: None for all. deadline_ns: on the scheduler's clock
        (CLOCK_MONOTONIC); a batch whose requests have all passed theirs is not run. A request without rows is
        answered with empty outputs. Raises StatusError at once when the request is refused; call it on one thread.
        Gives the request in its queue, if it is in one.
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
        """Refuse new requests and return when all queued ones are answered; keeps nothing of the model.

        Session and queues refer to each other, so that what they kept would live until the collector comes by, and
        for ever where it does not look (gc.freeze).
        """
        for queue in list(self._queues.values()):
            queue.close()
        self._runner = closed_runner
        self._early = None
        self._empty = np.empty

    @property
    def queue_depth(self) -> tuple[int, int]:
        """(batches, rows) that wait."""
        queues = list(self._queues.values())
        return sum(queue.num_enqueued_batches for queue in queues), sum(
            queue.num_enqueued_rows for queue in queues
        )

    def _count_rows(self, inputs: Tensors) -> int:
        if not inputs:
            raise invalid_argument("Batching Run() must have at least one input tensor")
        rows = self._inputs.count_rows(inputs)
        if self._only_input and len(self._rows_by_shape) < _SHAPES_MAX:
            self._rows_by_shape[inputs[self._only_input].shape] = rows
        return rows

    def _queue_for(self, output_names: tuple[str, ...]) -> SessionQueue:
        wanted = frozenset(output_names)
        queue = self._queues.get(wanted)
        if queue is None:
            if not wanted <= set(self._output_names):
                raise StatusError("INTERNAL", "Task does not conform to batch signature")
            if len(self._queues) > _MAX_OUTPUT_SETS:
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
        """The early work on one request; False: it has ended with an error."""
        task.taken = True
        failure = StatusError("UNAVAILABLE", "The session is closed")
        try:
            if self._early is not None:
                task.inputs = self._early.prepare(task.inputs)
                return True
        except StatusError as error:
            failure = StatusError(error.code, error.message)
        except Exception as error:
            _logger.exception("early work on a request failed")
            failure = StatusError("INTERNAL", f"{type(error).__name__}: {error}")
        self._deliver(completions_of([task], None, failure))
        return False

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
        outputs: Outputs | None = None
        failure: StatusError | None = None
        try:
            outputs = self._run(batch, start_micros)
        except StatusError as error:
            # Not the error itself: its cause's frames refer back to this one, so to the batch and the model.
            failure = StatusError(error.code, error.message)
        except Exception as error:
            _logger.exception("a batch of %d rows failed", batch.size)
            failure = StatusError("INTERNAL", f"{type(error).__name__}: {error}")
        self._deliver(completions_of(tasks, outputs, failure))

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
        error_code: str | None = "INTERNAL"
        began_ns = time.monotonic_ns()
        try:
            results = self._runner(merged)
            error_code = None
        except StatusError as error:
            error_code = error.code
            raise
        finally:
            execution_micros = (time.monotonic_ns() - began_ns) / 1000
            self._observer.on_batch(
                BatchRecord(
                    rows=rows,
                    padded_rows=padded_rows,
                    tasks=len(tasks),
                    task_rows=[task.size for task in tasks],
                    input_tensors=len(merged),
                    close_reason=batch.close_reason,
                    queue_wait_micros=[start_micros - micros for micros in batch.enqueued_micros],
                    execution_micros=execution_micros,
                    error_code=error_code,
                    sent_elements=sent,
                    padding_elements=padding,
                )
            )
        return checked_outputs(results, self._output_names, padded_rows)


def _all_expired(tasks: list[Request], now_ns: int) -> bool:
    return all(task.deadline_ns is not None and task.deadline_ns <= now_ns for task in tasks)
