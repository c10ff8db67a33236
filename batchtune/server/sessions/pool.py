"""The scheduler, threads and queues of one set of batching settings.

Every change of the settings makes a new `SessionPool`; an existing one keeps its settings. So the same code
builds the same objects for settings of the command line and for settings that come later.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from batchtune.batching.parameters import (
    AUTO_BUCKETS,
    DEFAULT_BATCH_TIMEOUT_MICROS,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    LENGTH_BUCKETS,
    BatchingParameters,
    Boundaries,
    default_num_batch_threads,
    format_length_buckets,
)
from batchtune.server.backends.model import Runner
from batchtune.server.scheduling.batch_queue import QueueOptions, SharedBatchScheduler
from batchtune.server.scheduling.retrier import BatchSchedulerRetrier, RetrierOptions
from batchtune.server.scheduling.streaming import StreamingBatchScheduler
from batchtune.server.sessions.batched import (
    BatchingSession,
    BatchObserver,
    Deliver,
    Done,
    LengthPadding,
    Queued,
    SessionScheduler,
)
from batchtune.server.sessions.bucketed_session import LengthBuckets, LengthWindow, open_axes_of
from batchtune.server.sessions.unbatched import (
    HANDLERS_MAX,
    RequestThreads,
    UnbatchedSession,
    handlers_at_least,
)
from batchtune.wire.signature import Signature
from batchtune.wire.status import invalid_argument

SchedulerKind = Literal["shared", "streaming"]
_DEFAULTS = BatchingParameters()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """How requests become batches, for all models.

    enabled False: no request is batched. parameters: of every model, unless `per_model` or `models` say otherwise.
    per_model: each version directory's batching_params.pbtxt replaces `parameters`, except for the number of threads; a
    version without that file is not batched.
    zero_padding: pad lengths with zeros, not with an array's first element as TF Serving does. retry_max_time_micros:
    how long a request is retried, every retry_delay_micros, while its queue is full; 0: it fails at once.
    default_num_batch_threads: applies if `parameters` has no num_batch_threads; None: one for each CPU. length_buckets:
    ascending lengths, each the longest that shares a queue; (): one queue, as in TF Serving; "auto": they are chosen
    from the lengths of the requests. models: model name -> parameters that the tuning API has put in force, in place of
    `parameters` and of files.
    """

    enabled: bool = False
    parameters: BatchingParameters = _DEFAULTS
    scheduler: SchedulerKind = "shared"
    per_model: bool = False
    zero_padding: bool = False
    retry_max_time_micros: int = 0
    retry_delay_micros: int = 100
    default_num_batch_threads: int | None = None
    length_buckets: Boundaries = ()
    models: Mapping[str, BatchingParameters] = field(default_factory=dict)

    @property
    def num_batch_threads(self) -> int:
        """Number of batch threads, which is how many batches run at once."""
        return (
            self.parameters.num_batch_threads or self.default_num_batch_threads or default_num_batch_threads()
        )

    def parameters_of(self, name: str, file: BatchingParameters | None) -> BatchingParameters | None:
        """Return the parameters in force for model `name`; None: it is not batched.

        file: those of its version directory; None: it has no such file. After the tuning API has set parameters of any
        model, files are ignored: the parameters that it set for this model hold, or `parameters` if it set none.
        """
        if not self.enabled:
            return None
        if self.models:
            return self.models.get(name, self.parameters)
        return file if self.per_model else self.parameters


def in_words(
    settings: BatchingSettings, parameters: BatchingParameters | None, session: Session | None
) -> str:
    """Describe the parameters of a model's batches, such as `max_batch_size 32, batch_timeout_micros 1000`;
    `parameters` None: "not batched".

    Defaults are included, length buckets only if `session` has them.
    """
    if parameters is None:
        return "not batched"
    options = _queue_options(parameters)
    values = {
        "max_batch_size": options.max_batch_size,
        "batch_timeout_micros": options.batch_timeout_micros,
        "max_enqueued_batches": options.max_enqueued_batches,
        "num_batch_threads": settings.num_batch_threads,
        "allowed_batch_sizes": ",".join(map(str, options.allowed_batch_sizes)),
        "max_execution_batch_size": options.max_execution_batch_size,
        LENGTH_BUCKETS: (
            format_length_buckets(settings.length_buckets) if isinstance(session, LengthBuckets) else ""
        ),
    }
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in {None, ""})


class Session(Protocol):
    """A protocol: accepts the requests of one signature, and runs them batched or one by one."""

    def submit(
        self,
        inputs: Mapping[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Done,
    ) -> Queued | None:
        """Run a request; `done(outputs, None)` or `done(None, error)` is called later, on the event loop.

        output_names: None: all; deadline_ns: on CLOCK_MONOTONIC, None: no deadline. Returns the queued request; None:
        it waits in no batching queue. Raises StatusError when it is refused at once; then `done` is not called.
        """

    def close(self) -> None:
        """Refuse new requests and return when all requests submitted so far have been run."""


class SessionPool:
    """One scheduler with its threads, and the sessions opened on it.

    deliver: called on any thread with the completions of a batch. Raises StatusError INVALID_ARGUMENT where
    settings break a rule of the scheduler.
    """

    def __init__(self, settings: BatchingSettings, *, observer: BatchObserver, deliver: Deliver) -> None:
        self.settings = settings
        self._observer = observer
        self._deliver = deliver
        self._lock = threading.Lock()
        self._batched: list[BatchingSession | LengthBuckets] = []
        self._scheduler = _scheduler(settings) if settings.enabled else None
        self._handlers: dict[int, RequestThreads] = {}  # by their number
        self._retrier = None
        if settings.enabled and settings.retry_max_time_micros:
            self._retrier = BatchSchedulerRetrier(
                RetrierOptions(
                    max_time_micros=settings.retry_max_time_micros,
                    retry_delay_micros=settings.retry_delay_micros,
                )
            )

    def open(
        self,
        signature: Signature,
        run: Runner,
        *,
        parameters: BatchingParameters | None,
        name: str = "",
        at_once: int = 0,
    ) -> Session:
        """Open a session for one signature.

        parameters: those of its batches; None: it is not batched. name: for messages. at_once: number of requests that
        should run at the same time if it is not batched; 0: the server's default.

        Raises:
            StatusError: INVALID_ARGUMENT for parameters that break a rule.
        """
        with self._lock:
            if parameters is None or self._scheduler is None:
                count = max(handlers_at_least(), min(at_once, HANDLERS_MAX))
                if count not in self._handlers:
                    self._handlers[count] = RequestThreads(count)
                return UnbatchedSession(
                    signature=signature,
                    runner=run,
                    threads=self._handlers[count],
                    observer=self._observer,
                    deliver=self._deliver,
                )
            if self.settings.scheduler == "streaming" and not parameters.batch_timeout_micros:
                raise invalid_argument(
                    "batch_timeout_micros must be positive for the streaming scheduler: it never runs a batch that "
                    "neither fills up nor times out"
                )
            session = self._batching(self._scheduler, signature, run, parameters, name)
            self._batched.append(session)
            return session

    def forget(self, session: Session) -> None:
        """Close one session; returns when its queued requests are answered."""
        session.close()
        if isinstance(session, BatchingSession | LengthBuckets):
            with self._lock:
                if session in self._batched:
                    self._batched.remove(session)

    def queue_depths(self) -> tuple[int, int]:
        """Return (batches, rows) that wait for a batch thread, over all sessions."""
        depths = [session.queue_depth for session in tuple(self._batched)]
        return sum(batches for batches, _ in depths), sum(rows for _, rows in depths)

    def length_boundaries(self) -> dict[str, tuple[int, ...]]:
        """Return name -> present length boundaries of each session that has length buckets."""
        batched = tuple(self._batched)
        return {session.name: session.boundaries for session in batched if isinstance(session, LengthBuckets)}

    def close(self) -> None:
        """Answer all queued requests, then end the threads; requests that are still retried after 10 s are given up."""
        self._wait_for_retries()
        if self._retrier is not None:
            self._retrier.close()
        while (session := self._next_batched()) is not None:
            session.close()
        if self._scheduler is not None:
            self._scheduler.close()
        for handlers in self._handlers.values():
            handlers.close()

    def _batching(
        self,
        scheduler: SessionScheduler,
        signature: Signature,
        run: Runner,
        parameters: BatchingParameters,
        name: str,
    ) -> BatchingSession | LengthBuckets:
        """Open a batching session; with length buckets where set and the signature leaves a length open."""
        boundaries, axes = self.settings.length_buckets, open_axes_of(signature)
        bucketed = bool(boundaries and axes)
        padded = parameters.pad_variable_length_inputs or bucketed
        zero = self.settings.zero_padding

        def open_session() -> BatchingSession:
            return BatchingSession(
                signature=signature,
                runner=run,
                scheduler=scheduler,
                options=_queue_options(parameters),
                observer=self._observer,
                deliver=self._deliver,
                length_padding=_length_padding(padded=padded, zero=zero),
                retrier=self._retrier,
            )

        if not bucketed:
            return open_session()
        return LengthBuckets(
            () if boundaries == AUTO_BUCKETS else boundaries,
            axes,
            name=name,
            open_session=open_session,
            window=LengthWindow() if boundaries == AUTO_BUCKETS else None,
            settle=self._wait_for_retries,
        )

    def _wait_for_retries(self) -> None:
        retries_limit_s = 10.0
        if self._retrier is not None:
            self._retrier.wait_until_idle(retries_limit_s)

    def _next_batched(self) -> BatchingSession | LengthBuckets | None:
        with self._lock:  # a version that ends at the same time forgets its own
            return self._batched.pop() if self._batched else None


def _scheduler(settings: BatchingSettings) -> SessionScheduler:
    default_name = "model_server_batch_threads"  # server.cc: the pool's name when --enable_batching is given.
    threads = settings.num_batch_threads
    name = settings.parameters.thread_pool_name or default_name
    match settings.scheduler:
        case "shared":
            return SharedBatchScheduler(num_batch_threads=threads, thread_pool_name=name)
        case "streaming":
            return StreamingBatchScheduler(num_batch_threads=threads, thread_pool_name=name)


def _queue_options(parameters: BatchingParameters) -> QueueOptions:
    size, timeout_micros = parameters.max_batch_size, parameters.batch_timeout_micros
    waiting = parameters.max_enqueued_batches
    return QueueOptions(
        max_batch_size=DEFAULT_MAX_BATCH_SIZE if size is None else size,
        batch_timeout_micros=DEFAULT_BATCH_TIMEOUT_MICROS if timeout_micros is None else timeout_micros,
        max_enqueued_batches=DEFAULT_MAX_ENQUEUED_BATCHES if waiting is None else waiting,
        enable_large_batch_splitting=bool(parameters.enable_large_batch_splitting),
        max_execution_batch_size=parameters.max_execution_batch_size,
        allowed_batch_sizes=parameters.allowed_batch_sizes,
    )


def _length_padding(*, padded: bool, zero: bool) -> LengthPadding:
    if not padded:
        return "off"
    return "zero" if zero else "first_element"
