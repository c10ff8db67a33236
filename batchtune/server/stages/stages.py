"""How do a model's stages get between its requests and its sessions: as a unit with the device part, or around it?

`unit`: a batch passes all stages on its batch thread, as one graph would; an error is that of all its requests.
`early`: the same, but a batch's thread runs pre on each request as it comes, before the batch is full; needs the
streaming scheduler, whose purpose that is.
`device`: pre and post run in request threads, a lookup in batches of its own, and only the device part in the batches
that are tuned; an error of pre or post is that of its request.
Where nothing is batched a request passes all stages on its handler thread, but for `device`, as above.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Literal

from batchtune.batching.length_buckets import LENGTH_BUCKETS, Boundaries
from batchtune.server.backends.model import BackendOptions, LoadedModel, Runner, Tensors
from batchtune.server.metrics.counters import Sums
from batchtune.server.sessions.batched import BatchObserver, Deliver
from batchtune.server.sessions.bucketed_session import open_axes_of
from batchtune.server.sessions.pool import Session
from batchtune.server.stages.model_code import RequestThreads, rows_of
from batchtune.server.stages.plan import Named, StagePlan, plan_of
from batchtune.server.stages.staged_session import StagedSession
from batchtune.server.stages.stages_file import DeclaredStages
from batchtune.wire.signature import Signature
from batchtune.wire.status import StatusError, invalid_argument

BatchingStage = Literal["device", "unit", "early"]


class ModelStages:
    """The stages of one version, for its servable."""

    def __init__(
        self,
        declared: DeclaredStages,
        model: LoadedModel,
        *,
        model_name: str,
        stage: BatchingStage,
        use: Sums,
        options: BackendOptions,
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
        self._plan = plan_of(declared, model, model_name=model_name, use=use, options=options)
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
            self._threads = RequestThreads(declared.request_threads)
            self._session = StagedSession(self._plan, self._threads, observer=observer, deliver=deliver)

    def stand_around(self, name: str) -> bool:
        """Whether they are those of this signature."""
        return name == self._name

    def batched_signature(self, name: str, model: LoadedModel) -> Signature:
        """What the batches of a signature are made of."""
        return model.signatures[name] if self._session is not None else self.signatures[name]

    def in_words(self, *, batched: bool) -> str:
        """Which there are, and what is batched."""
        plan = self._plan
        present = {"pre": plan.pre, "lookup": plan.lookup, "post": plan.post}
        names = ", ".join(name for name, stage in present.items() if stage is not None)
        how = "batched with them as a unit" if self._session is None else "batched alone"
        how = "batched after early work on each request" if self._is_early else how
        return f"stages {names}; the device part is {how if batched else 'run request by request'}"

    def around(self, name: str, run: Runner, *, batched: bool, length_buckets: Boundaries) -> Runner:
        """What runs a batch, or a request that is not batched: `run`, the device part, with the stages around it where
        they are a unit.

        Raises:
            StatusError: INVALID_ARGUMENT: length buckets for lengths that only early work gives.
        """
        plan = self._plan
        if name != self._name or self._session is not None:
            return run
        if not (self._is_early and batched):
            return _Unit(plan, run)
        if length_buckets and open_axes_of(plan.device) and not open_axes_of(plan.signature):
            raise invalid_argument(
                f"{LENGTH_BUCKETS} with batching_stage early: the lengths of model {plan.model_name} come out of pre, "
                "when a request is in a batch already; give batching_stage device, or no length buckets"
            )
        return _Early(plan, run)

    def before(self, sessions: Mapping[str, Session]) -> Mapping[str, Session]:
        """The sessions that take requests, given those of the device part in force from now on; on the loop."""
        if self._session is None or self._name not in sessions:
            return sessions
        self._session.device = sessions[self._name]
        return {**sessions, self._name: self._session}

    def drain(self) -> None:
        """Answer what is under way, while the device part still takes; then end the threads. Not on the loop."""
        if self._session is not None:
            self._session.close()
        if self._threads is not None:
            self._threads.close()

    def close(self) -> None:
        """Close what the stages hold open; drained, and no batch may wait for them any more."""
        self._plan.close()


def check_allowed(declared: DeclaredStages, *, allow_code: bool) -> None:
    """Refuse a model's own code, and connections that its folder asks for, unless they are allowed.

    Raises:
        StatusError: FAILED_PRECONDITION.
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


class _Unit:
    """All stages of a batch, or of a request that is not batched, one after the other."""

    def __init__(self, plan: StagePlan, run: Runner) -> None:
        self._plan = plan
        self._run = run

    def __call__(self, inputs: Tensors) -> Tensors:
        plan, rows = self._plan, rows_of(inputs)
        tensors: Named = dict(inputs) if plan.pre is None else plan.pre(inputs, rows)
        if plan.lookup is not None:
            tensors = {**tensors, **plan.lookup.ask(plan.keys_of(plan.lookup, tensors), rows)}
        outputs = self._run(plan.for_device(tensors))
        return outputs if plan.post is None else plan.post(outputs, rows)


class _Early:
    """`pre` of each request by itself, then the device part and `post` of a batch."""

    def __init__(self, plan: StagePlan, run: Runner) -> None:
        self._plan = plan
        self._run = run
        self.merged_names = tuple(spec.name for spec in plan.device.inputs)

    def prepare(self, inputs: Tensors) -> Tensors:
        plan = self._plan
        return inputs if plan.pre is None else plan.for_device(plan.pre(inputs))

    def __call__(self, inputs: Tensors) -> Tensors:
        outputs = self._run(inputs)
        return outputs if self._plan.post is None else self._plan.post(outputs, rows_of(inputs))
