"""Do the versions that a chain is to ask fit together, and which rows stand for those that are not asked?

Checked once for each set of versions: when the chain is loaded, and when one of its models has another version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.server.models.chains.pipeline import REQUEST, Condition, Literal, Pipeline, Source, Step
from batchtune.server.models.loaded import LoadedVersion
from batchtune.server.sessions.input_shapes import shown
from batchtune.wire.signature import Signature, TensorSpec

_Types = dict[Source, TensorSpec]


class MisfitError(Exception):
    """What a chain declares is not what its models take and give; `key` is that of the pipeline.yaml."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step and the rows that its outputs have where it is not asked: one row of a value, or another tensor's.

    `kept`: the outputs that the chain uses.
    """

    step: Step
    kept: frozenset[str]
    otherwise: Mapping[str, NDArray[Any] | Source]


def plan(pipeline: Pipeline, versions: Mapping[str, LoadedVersion]) -> tuple[PlannedStep, ...]:
    """The steps as these versions, by model name, can be asked.

    Raises:
        MisfitError: a signature, an input or an output that is not there, or of another type.
    """
    types: _Types = {Source(REQUEST, spec.name): spec for spec in pipeline.inputs}
    used = {source for _, source in pipeline.uses()}
    planned = []
    for step in pipeline.steps:
        version = versions[step.model]
        signature = _signature(step, version)
        _check_inputs(step, signature, version, types)
        if step.when is not None:
            _check_condition(f"steps.{step.name}.when", step.when, types)
        own = {Source(step.name, spec.name): spec for spec in signature.outputs}
        kept = frozenset(source.tensor for source in used if source.step == step.name)
        planned.append(PlannedStep(step=step, kept=kept, otherwise=_otherwise(step, own, types)))
        types |= own
    for spec in pipeline.outputs:
        key = f"outputs.{spec.name}"
        _check_fits(f"{key}.from", _type_of(pipeline.sources[spec.name], f"{key}.from", types), spec)
    return tuple(planned)


def padded_outputs(pipeline: Pipeline, versions: Mapping[str, LoadedVersion]) -> list[Source]:
    """The outputs used, of steps that fit, that may be as long as the longest request in a batch of their model."""
    used = {source for _, source in pipeline.uses()}
    return [
        Source(step.name, spec.name)
        for step in pipeline.steps
        if versions[step.model].pads_lengths(step.signature)
        for spec in versions[step.model].signatures[step.signature].outputs
        if Source(step.name, spec.name) in used and (spec.shape is None or None in spec.shape[1:])
    ]


def _signature(step: Step, version: LoadedVersion) -> Signature:
    signature = version.signatures.get(step.signature)
    if signature is None:
        has = ", ".join(sorted(version.signatures))
        raise MisfitError(
            f"steps.{step.name}.signature",
            f"{_named(version)} has no signature {step.signature}; it has {has}",
        )
    return signature


def _check_inputs(step: Step, signature: Signature, version: LoadedVersion, types: _Types) -> None:
    wanted = {spec.name: spec for spec in signature.inputs}
    key = f"steps.{step.name}.inputs"
    missing = sorted(wanted.keys() - step.inputs.keys())
    if missing:
        raise MisfitError(key, f"{_named(version)} also takes {', '.join(missing)}")
    for name, source in step.inputs.items():
        if name not in wanted:
            has = ", ".join(sorted(wanted))
            raise MisfitError(f"{key}.{name}", f"{_named(version)} has no input {name}; it takes {has}")
        _check_fits(f"{key}.{name}", _type_of(source, f"{key}.{name}", types), wanted[name])


def _check_condition(key: str, when: Condition, types: _Types) -> None:
    spec = _type_of(when.source, key, types)
    if spec.dtype == "object":
        raise MisfitError(key, f"{when.source} is text; expected numbers")
    sizes = None if spec.shape is None else spec.shape[1:]
    if sizes is None or None in sizes:
        return  # looked at again when its rows are there
    values = math.prod(size or 0 for size in sizes)
    if when.element is None and values != 1:
        raise MisfitError(
            key, f"a row of {when.source} has {values} values; name one, such as {when.source}[0]"
        )
    if when.element is not None and when.element >= values:
        raise MisfitError(key, f"a row of {when.source} has {values} values, from [0] to [{values - 1}]")


def _otherwise(step: Step, own: _Types, types: _Types) -> dict[str, NDArray[Any] | Source]:
    rows: dict[str, NDArray[Any] | Source] = {}
    for name, given in step.otherwise.items():
        key = f"steps.{step.name}.otherwise.{name}"
        spec = _type_of(Source(step.name, name), key, own)
        if isinstance(given, Source):
            _check_fits(key, _type_of(given, key, types), spec)
            rows[name] = given
        else:
            rows[name] = _row_of(given, spec, key)
    return rows


def _row_of(value: Literal, spec: TensorSpec, key: str) -> NDArray[Any]:
    """One row in which every element has this value."""
    if (spec.dtype == "object") != isinstance(value, bytes):
        expected = "{text: …}" if spec.dtype == "object" else "a number"
        raise MisfitError(key, f"{spec.name} is of {_type_name(spec)}; expected {expected}")
    if spec.shape is None or None in spec.shape[1:]:
        raise MisfitError(
            key,
            f"{spec.name} is {shown(spec.shape)}, so that it is not known how many values a row has; expected an "
            "earlier tensor of that shape",
        )
    shape = (1, *(size or 0 for size in spec.shape[1:]))
    try:
        row: NDArray[Any] = np.full(shape, value, dtype=spec.dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise MisfitError(key, f"{value!r} is no {spec.dtype}") from error
    if spec.dtype != "object" and row.size and row.flat[0] != value and np.dtype(spec.dtype).kind not in "fc":
        raise MisfitError(key, f"{value!r} is no {spec.dtype}")
    return row


def _type_of(source: Source, key: str, types: _Types) -> TensorSpec:
    spec = types.get(source)
    if spec is None:
        has = ", ".join(sorted(known.tensor for known in types if known.step == source.step))
        raise MisfitError(key, f"step {source.step} has no output {source.tensor}; it has {has}")
    return spec


def _check_fits(key: str, given: TensorSpec, wanted: TensorSpec) -> None:
    if given.dtype != wanted.dtype or not _shapes_fit(given.shape, wanted.shape):
        raise MisfitError(
            key,
            f"{_type_name(given)} {shown(given.shape)} is given where {_type_name(wanted)} {shown(wanted.shape)} "
            "is expected",
        )


def _shapes_fit(given: Sequence[int | None] | None, wanted: Sequence[int | None] | None) -> bool:
    if given is None or wanted is None:
        return True
    pairs = list(zip(given[1:], wanted[1:], strict=False))
    return len(given) == len(wanted) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def _type_name(spec: TensorSpec) -> str:
    return "string" if spec.dtype == "object" else spec.dtype


def _named(version: LoadedVersion) -> str:
    return f"model {version.name} version {version.version}"
