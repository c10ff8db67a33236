"""Runs the stages of a model (pre, lookup, post; see stages_file) in or around batches of its device part.

The device part is the run of the model itself. --batching_stage says what is batched:
`unit`: a batch passes all stages on its batch thread, as if they were one graph; an error fails all its
requests. `early`: as `unit`, but the batch's thread runs pre on each request as it comes, before the batch is
full; needs the streaming scheduler.
`device`: pre and post run on request threads, one request at a time, a lookup in batches of its own, and only
the device part in the batches that are tuned; an error of pre or post fails one request. Without batching a
request passes all stages on its handler thread, except with `device`, where they run as above.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from batchtune.batching.parameters import LENGTH_BUCKETS, Boundaries
from batchtune.server.backends.model import LoadedModel, Runner, Tensors
from batchtune.server.metrics import Sums
from batchtune.server.scheduling.batch_queue import SharedBatchScheduler
from batchtune.server.server_flags import ServerFlags
from batchtune.server.sessions.batched import (
    BatchingSession,
    BatchObserver,
    BatchRecord,
    Deliver,
    Done,
    EarlyRunner,
    Outputs,
    Queued,
)
from batchtune.server.sessions.bucketed_session import open_axes_of
from batchtune.server.sessions.input_shapes import SignatureInputs
from batchtune.server.sessions.pool import Session
from batchtune.server.sessions.unbatched import RequestThreads, outcome_before
from batchtune.server.stages.model_code import rows_of
from batchtune.server.stages.plan import Named, Stage, StagePlan
from batchtune.server.stages.stages_file import DeclaredStages, LookupStage
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError, invalid_argument

BatchingStage = Literal["device", "unit", "early"]


class ModelStages:
    """The stages of one version of a model (code or a lookup before and after the model itself), for its servable.

    `stage`: what is batched (--batching_stage). Raises StatusError INVALID_ARGUMENT if `stage` is early but there is a
    lookup or no pre, and the errors of `StagePlan`.
    """

    def __init__(
        self,
        declared: DeclaredStages,
        model: LoadedModel,
        *,
        model_name: str,
        stage: BatchingStage,
        use: Sums,
        options: ServerFlags,
        observer: BatchObserver,
        deliver: Deliver,
    ) -> None:
        self._name = declared.signature
        self._is_early = stage == "early"
        if self._is_early and (declared.lookup is not None or not declared.pre):
            what = (
                "lookups are batched, not early"
                if declared.lookup is not None
                else "there is no pre to run early"
            )
            message = f"{declared.file.path}: --batching_stage=early: {what}; give device or unit"
            raise StatusError("INVALID_ARGUMENT", message)
        self._plan = StagePlan(declared, model, model_name=model_name, use=use, options=options)
        self.signatures: Mapping[str, Signature] = {**model.signatures, self._name: self._plan.signature}
        self._threads: RequestThreads | None = None
        self._session: StagedSession | None = None
        # How long Python code of one thread keeps the others waiting (the default is 5 ms): a batch thread
        # whose run has ended, one whose batch has timed out, and the event loop want the interpreter soon while
        # a stage keeps it.
        switch_interval_s = 0.0005
        if declared.code:
            sys.setswitchinterval(switch_interval_s)
        if stage == "device":
            self._threads = RequestThreads(declared.request_threads, name="request_stage")
            self._session = StagedSession(self._plan, self._threads, observer=observer, deliver=deliver)

    def stand_around(self, name: str) -> bool:
        """Whether `name` is the signature that has stages."""
        return name == self._name

    def batched_signature(self, name: str, model: LoadedModel) -> Signature:
        """Return the signature of what is batched: the model's own with --batching_stage=device, otherwise that of
        requests."""
        return model.signatures[name] if self._session is not None else self.signatures[name]

    def in_words(self, *, batched: bool) -> str:
        """Describe which stages there are and what is batched, in half a sentence."""
        plan = self._plan
        present = {"pre": plan.pre, "lookup": plan.lookup, "post": plan.post}
        names = ", ".join(name for name, stage in present.items() if stage is not None)
        how = "batched with them as a unit" if self._session is None else "batched alone"
        how = "batched after early work on each request" if self._is_early else how
        return f"stages {names}; the device part is {how if batched else 'run request by request'}"

    def around(self, name: str, run: Runner, *, batched: bool, length_buckets: Boundaries) -> Runner:
        """Return the runner of signature `name`: the device part `run` with the stages that batches include; `run`
        itself where they include no stage.

        Raises:
            StatusError: INVALID_ARGUMENT for length buckets if the lengths are known only after early work.
        """
        plan = self._plan
        if name != self._name or self._session is not None:
            return run
        if not (self._is_early and batched):
            return _unit(plan, run)
        if length_buckets and open_axes_of(plan.device) and not open_axes_of(plan.signature):
            raise invalid_argument(
                f"{LENGTH_BUCKETS} with batching_stage early: the lengths of model {plan.model_name} come out of pre, "
                "when a request is in a batch already; give batching_stage device, or no length buckets"
            )
        return _early(plan, run)

    def before(self, sessions: Mapping[str, Session]) -> Mapping[str, Session]:
        """Return signature name -> session that accepts requests: with --batching_stage=device, the session of the
        signature with stages is replaced by one that also runs the stages.

        sessions: signature name -> session of the device part, used from now on. Called on the event loop.
        """
        if self._session is None or self._name not in sessions:
            return sessions
        self._session.device = sessions[self._name]
        return {**sessions, self._name: self._session}

    def drain(self) -> None:
        """Refuse new requests, wait until those in the stages are answered, then end the stages' threads.

        Call it before the model's sessions are closed: these requests still need them. Blocks, so not to be called on
        the event loop.
        """
        if self._session is not None:
            self._session.close()
        if self._threads is not None:
            self._threads.close()

    def close(self) -> None:
        """Close the stages' models and connections; call it after `drain`, when no batch needs them."""
        self._plan.close()


def check_allowed(declared: DeclaredStages, *, allow_code: bool) -> None:
    """Check that a model's stages need no permission, or that it is given (--allow_model_code).

    Raises:
        StatusError: FAILED_PRECONDITION without `allow_code`, for code of the model's folder or a lookup in Redis.
    """
    if allow_code:
        return
    for key, reference in declared.code.items():
        raise declared.file.fault(
            f"{key}: {reference} is code of the model's folder; it runs only with --allow_model_code",
            code="FAILED_PRECONDITION",
        )
    if declared.lookup is not None and declared.lookup.redis is not None:
        raise declared.file.fault(
            "lookup.redis: the model's folder says where to connect to; it is done only with --allow_model_code",
            code="FAILED_PRECONDITION",
        )


def _unit(plan: StagePlan, run: Runner) -> Runner:
    """Return a runner of all stages, one after the other: of a batch, or of a request where nothing is batched."""

    def run_stages(inputs: Tensors) -> Tensors:
        rows = rows_of(inputs)
        tensors: Named = dict(inputs) if plan.pre is None else plan.pre(inputs, rows)
        if plan.lookup is not None:
            tensors = {**tensors, **plan.lookup(plan.keys_of(tensors), rows)}
        outputs = run(plan.for_device(tensors))
        return outputs if plan.post is None else plan.post(outputs, rows)

    return run_stages


def _early(plan: StagePlan, run: Runner) -> EarlyRunner:
    """Return a runner of `pre` for each request by itself, then of the device part and `post` for the batch."""

    def prepare(inputs: Tensors) -> Tensors:
        return inputs if plan.pre is None else plan.for_device(plan.pre(inputs, rows_of(inputs)))

    def run_batch(inputs: Tensors) -> Tensors:
        outputs = run(inputs)
        return outputs if plan.post is None else plan.post(outputs, rows_of(inputs))

    names = tuple(spec.name for spec in plan.device.inputs)
    return EarlyRunner(merged_names=names, prepare=prepare, run=run_batch)


# A request on its way through the stages around the device part, each on its own threads.
#
#     loop: submit ─► request threads: pre ─► loop ─► lookup's queue ─► loop ─► device's queue ─► loop
#                                                                       └► request threads: post ─► loop: done
#
# Only lookups and the device part are batched, each by its own scheduler. A deadline goes along; an error of any stage
# is the end of that request.


class StagedSession:
    """Accepts the requests of a signature with stages; a `Session`.

    device: the model's session that is in force; None: not yet, or no longer open. Everything but the stages runs on
    the event loop.
    """

    def __init__(
        self, plan: StagePlan, threads: RequestThreads, *, observer: BatchObserver, deliver: Deliver
    ) -> None:
        self.plan = plan
        self.threads = threads
        self.deliver = deliver
        self.device: Session | None = None
        self.lookup = (
            None
            if plan.lookup is None or plan.declared.lookup is None
            else _LookupQueue(plan, plan.lookup, plan.declared.lookup, observer, deliver)
        )
        self._observer = observer
        self._inputs = SignatureInputs(plan.signature)
        self._unanswered = 0
        self._closing = False
        self._drained = threading.Event()

    def submit(
        self, inputs: Tensors, output_names: tuple[str, ...] | None, deadline_ns: int | None, done: Done
    ) -> Queued:
        """Run a request; `done` is called later on the event loop. Returns the request, whose `taken` says whether it
        waits in no batching queue.

        Raises:
            StatusError: INVALID_ARGUMENT or INTERNAL for wrong tensors, RESOURCE_EXHAUSTED while too many wait,
                UNAVAILABLE after `close`.
        """
        if self._closing:
            raise StatusError("UNAVAILABLE", "The server is shutting down")
        rows = self._inputs.count_rows(inputs)
        request = _StagedRequest(self, rows, output_names, deadline_ns, done)
        try:
            request.start(inputs)
        except StatusError:
            self._observer.on_rejected("queue_full")
            raise
        return request

    def close(self) -> None:
        """Refuse new requests and return when all are answered; until then the model's own session must accept
        requests.

        Blocks, so not to be called on the event loop.
        """
        entered = threading.Event()

        def stop() -> None:
            self._closing = True
            if not self._unanswered:
                self._drained.set()
            entered.set()

        self.deliver([(lambda _outputs, _error: stop(), {}, None)])
        entered.wait()
        self._drained.wait()
        if self.lookup is not None:
            self.lookup.close()
        self.device = None

    def enter(self) -> None:
        """Count a request as under way; on the event loop."""
        self._unanswered += 1

    def leave(self) -> None:
        """Count a request as answered; on the event loop."""
        self._unanswered -= 1
        if self._closing and not self._unanswered:
            self._drained.set()


class _StagedRequest:
    """One request on its way through the stages.

    Each `_after_…` is called on the event loop with the outputs, or the error, of the stage in its name.
    """

    __slots__ = ("_deadline_ns", "_done", "_ended", "_names", "_queued", "_rows", "_session", "_tensors")

    def __init__(
        self,
        session: StagedSession,
        rows: int,
        names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Done,
    ) -> None:
        self._session = session
        self._rows = rows
        self._names = names
        self._deadline_ns = deadline_ns
        self._done = done
        self._ended = False
        self._tensors: Named = {}
        self._queued: Queued | None = None

    @property
    def taken(self) -> bool:
        """Whether the request waits in no batching queue, neither for its lookup nor for its device part."""
        return self._queued is None or self._queued.taken

    def start(self, inputs: Tensors) -> None:
        pre = self._session.plan.pre
        if pre is not None:
            self._session.threads.put(
                partial(self._stage, pre, "pre", inputs, self._after_pre, time.monotonic_ns())
            )
            self._session.enter()
            return
        if not self._session.threads.has_room:  # no first stage holds requests back while the last ones wait
            raise StatusError("RESOURCE_EXHAUSTED", "Server Threadpool Exhausted")
        self._session.enter()
        self._after_pre(dict(inputs), None)

    def _stage(self, stage: Stage, name: str, inputs: Tensors, after: Done, queued_ns: int) -> None:
        """Run `pre` or `post`; on a request thread."""
        plan = self._session.plan
        plan.use.add((plan.model_name, name), 0, 0, 0, (time.monotonic_ns() - queued_ns) / 1000)
        run = partial(stage, inputs, self._rows)
        outputs, error = outcome_before(self._deadline_ns, run, "a stage of a request failed")
        self._session.deliver([(after, outputs, error)])

    def _after_pre(self, outputs: Outputs | None, error: StatusError | None) -> None:
        if outputs is None:
            self._finish(None, error)
            return
        self._tensors = outputs
        lookup = self._session.lookup
        if lookup is None:
            self._run_device()
            return
        self._try(lambda: lookup.submit(outputs, self._deadline_ns, self._after_lookup))

    def _after_lookup(self, outputs: Outputs | None, error: StatusError | None) -> None:
        self._queued = None
        if outputs is None:
            self._finish(None, error)
            return
        self._tensors = {**self._tensors, **outputs}
        self._run_device()

    def _run_device(self) -> None:
        tensors, self._tensors = self._tensors, {}
        session = self._session
        names = self._names if session.plan.post is None else None

        def run() -> Queued | None:
            if session.device is None:
                raise StatusError("UNAVAILABLE", "The server is shutting down")
            return session.device.submit(
                session.plan.for_device(tensors), names, self._deadline_ns, self._after_device
            )

        self._try(run)

    def _after_device(self, outputs: Outputs | None, error: StatusError | None) -> None:
        self._queued = None
        post = self._session.plan.post
        if outputs is None or post is None:
            self._finish(outputs, error)
            return
        self._session.threads.put_last_stage(
            partial(self._stage, post, "post", outputs, self._finish, time.monotonic_ns())
        )

    def _try(self, submit: Callable[[], Queued | None]) -> None:
        try:
            self._queued = submit()
        except StatusError as error:
            self._finish(None, error)

    def _finish(self, outputs: Outputs | None, error: StatusError | None) -> None:
        """Answer the request; called a second time, with an error, where `done` failed."""
        if not self._ended:
            self._ended = True
            self._session.leave()
        if outputs is not None and self._names is not None:
            outputs = {name: outputs[name] for name in self._names}
        self._done(outputs, error)


class _LookupQueue:
    """A batching session of lookups, with batch threads of its own.

    As a BatchObserver it counts only how long lookups waited: their batches are not the model's.
    """

    def __init__(
        self,
        plan: StagePlan,
        lookup: Stage,
        declared: LookupStage,
        observer: BatchObserver,
        deliver: Deliver,
    ) -> None:
        self._plan = plan
        self.on_rejected = observer.on_rejected
        self._scheduler = SharedBatchScheduler(
            num_batch_threads=declared.num_batch_threads, thread_pool_name="lookup_threads"
        )
        self._session = BatchingSession(
            signature=Signature(
                name="lookup", method_name="", inputs=declared.inputs, outputs=declared.outputs
            ),
            runner=lambda keys: lookup(keys, rows_of(keys)),
            scheduler=self._scheduler,
            options=declared.queue,
            observer=self,
            deliver=deliver,
        )

    def submit(self, tensors: Named, deadline_ns: int | None, done: Done) -> Queued | None:
        return self._session.submit(self._plan.keys_of(tensors), None, deadline_ns, done)

    def on_batch(self, record: BatchRecord) -> None:
        wait_ns = sum(record.queue_wait_micros) * 1000
        self._plan.use.add((self._plan.model_name, "lookup"), 0, 0, 0, wait_ns / 1000)

    def close(self) -> None:
        """Answer the queued lookups, then end the threads."""
        self._session.close()
        self._scheduler.close()
