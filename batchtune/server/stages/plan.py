"""Which stages does a request pass, in which order, and what does each one take and give?"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from batchtune.server.backends.model import BackendOptions, LoadedModel, Tensors
from batchtune.server.metrics.stage_use import StageUse
from batchtune.server.sessions.input_shapes import InputShape, numpy_dtype
from batchtune.server.stages.lookup import RedisLookup, open_lookup
from batchtune.server.stages.model_code import ModelCode, rows_of
from batchtune.server.stages.stages_file import DeclaredStages, LookupStage
from batchtune.server.stages.sub_model import SubModel
from batchtune.wire.signature import Signature, TensorSpec
from batchtune.wire.status import StatusError

Named = dict[str, NDArray[Any]]


class Stage(Protocol):
    def __call__(self, inputs: Tensors, rows: int | None = None) -> Named:
        """What it gives, a row for each of `rows` (None: of the first input); on any thread; raises StatusError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A stage that calls out: `ask` gets the values of a batch of keys."""

    declared: LookupStage
    ask: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The stages of one signature, each counted as it runs; None where there is none.

    `signature` is what requests bring and answers hold, `device` the model's own.
    """

    signature: Signature
    device: Signature
    pre: Stage | None
    lookup: Lookup | None
    post: Stage | None
    code: ModelCode
    opened: ExitStack
    use: StageUse
    model_name: str
    device_shapes: Mapping[str, InputShape]

    def keys_of(self, lookup: Lookup, tensors: Tensors) -> Named:
        """The tensors that the lookup takes.

        Raises:
            StatusError: INTERNAL where one is missing or of another type.
        """
        return self._of(lookup.declared.inputs, tensors, "the lookup")

    def for_device(self, tensors: Tensors) -> Named:
        """The tensors that the model takes.

        Raises:
            StatusError: INTERNAL where one is missing, of another type or of another shape than the model's.
        """
        chosen = self._of(self.device.inputs, tensors, "the model")
        for name, array in chosen.items():
            shape = self.device_shapes[name]
            if array.shape[1:] not in shape.known:
                try:
                    shape.check(array.shape)
                except StatusError as error:
                    raise StatusError("INTERNAL", f"{self._maker()} {error.message}") from error
        return chosen

    def close(self) -> None:
        """Close what the stages hold open, and forget the code."""
        self.opened.close()

    def _of(self, specs: tuple[TensorSpec, ...], tensors: Tensors, taker: str) -> Named:
        chosen = {}
        for spec in specs:
            array = tensors.get(spec.name)
            if array is None:
                raise StatusError("INTERNAL", f"{self._maker()} gave no {spec.name!r}, which {taker} takes")
            if array.dtype != (numpy_dtype(spec.dtype) or array.dtype):
                raise StatusError(
                    "INTERNAL",
                    f"{self._maker()} gave {spec.name!r} as {array.dtype.name}; {taker} takes {spec.dtype}",
                )
            chosen[spec.name] = array
        return chosen

    def _maker(self) -> str:
        return "pre:" if self.pre is not None else "the request:"


def plan_of(
    declared: DeclaredStages,
    model: LoadedModel,
    *,
    model_name: str,
    use: StageUse,
    options: BackendOptions,
) -> StagePlan:
    """The stages of a loaded model; runs its code's files, loads those that are models.

    Raises:
        StatusError: INVALID_ARGUMENT: no such signature, or code that does not run; FAILED_PRECONDITION: a package
            is missing.
    """
    device = model.signatures.get(declared.signature)
    if device is None:
        known = ", ".join(sorted(model.signatures))
        raise declared.file.fault(
            f"signature: {declared.signature!r} is none of the model's; expected {known}"
        )
    signature = Signature(
        name=device.name,
        method_name=device.method_name,
        inputs=device.inputs if declared.inputs is None else _by_name(declared.inputs),
        outputs=device.outputs if declared.outputs is None else _by_name(declared.outputs),
    )
    _check_takers(declared, device)
    code = ModelCode(declared.folder)

    def counted(name: str, run: Callable[[Tensors, int], Tensors]) -> Stage:
        def stage(inputs: Tensors, rows: int | None = None) -> Named:
            rows = rows_of(inputs) if rows is None else rows
            began_ns = time.monotonic_ns()
            try:
                return dict(run(inputs, rows))
            finally:
                use.add(model_name, name, rows, time.monotonic_ns() - began_ns)

        return stage

    def opened_stage(
        key: str, reference: str, gives: Sequence[TensorSpec], kept: Collection[str]
    ) -> Stage | None:
        if not reference:
            return None
        if not reference.endswith("/"):
            return counted(key, code.function(key, reference, gives))
        sub_model = SubModel(key, declared.folder / reference, options, gives, kept)
        opened.callback(sub_model.close)
        return counted(key, sub_model)

    with ExitStack() as opened:
        opened.callback(code.close)
        lookup = None
        if declared.lookup is not None:
            source = open_lookup(declared.lookup, code)
            if isinstance(source, RedisLookup):
                opened.callback(source.close)
            lookup = Lookup(
                declared=declared.lookup, ask=counted("lookup", lambda inputs, _rows: source(inputs))
            )
        keys = () if declared.lookup is None else declared.lookup.inputs
        pre = opened_stage("pre", declared.pre, (), {spec.name for spec in (*device.inputs, *keys)})
        post = opened_stage(
            "post", declared.post, signature.outputs, {spec.name for spec in signature.outputs}
        )
        kept = opened.pop_all()
    return StagePlan(
        signature=signature,
        device=device,
        pre=pre,
        lookup=lookup,
        post=post,
        code=code,
        opened=kept,
        use=use,
        model_name=model_name,
        device_shapes={spec.name: InputShape(device.name, spec) for spec in device.inputs},
    )


def _check_takers(declared: DeclaredStages, device: Signature) -> None:
    """Without `pre` all that the lookup and the model take is known before a request comes."""
    if declared.pre or declared.lookup is None or declared.inputs is None:
        return
    given = {spec.name for spec in declared.inputs}
    for spec in declared.lookup.inputs:
        if spec.name not in given:
            raise declared.file.fault(
                f"lookup.inputs.{spec.name}: not among inputs, and there is no pre to give it"
            )
    given |= {spec.name for spec in declared.lookup.outputs}
    for spec in device.inputs:
        if spec.name not in given:
            raise declared.file.fault(f"inputs: the model takes {spec.name!r}, which nothing gives")


def _by_name(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(sorted(specs, key=lambda spec: spec.name))
