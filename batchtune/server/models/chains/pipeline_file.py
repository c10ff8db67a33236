"""Does a `pipeline.yaml` declare a chain? Every fault is named by file, line and key.

inputs:                       # of a request, without the batch dimension; -1: any size
  tokens: {dtype: float32, shape: [200]}
steps:                        # asked in this order
  trigger:
    model: trigger            # a model of this server; its version is the latest when the request comes
    signature: serving_default
    inputs: {tokens: request.tokens}
  select:
    model: selector
    inputs: {tokens: request.tokens}
    when: trigger.score > 0.5 # row by row; [1] after the name takes that element of a row
    otherwise: {scores: 0}    # of the other rows: a value, an earlier tensor of that shape, or {text: none}
outputs:                      # of an answer
  score: {from: trigger.score, dtype: float32, shape: [1]}
  scores: {from: select.scores, dtype: float32, shape: [2]}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from batchtune.server.backends.declared_file import DeclaredFile, read_declared
from batchtune.server.backends.declared_tensors import (
    FaultError,
    check_keys,
    did_you_mean,
    tensor_specs,
)
from batchtune.server.models.chains.pipeline import (
    COMPARISONS,
    REQUEST,
    Condition,
    Literal,
    Pipeline,
    Source,
    Step,
)
from batchtune.wire.signature import DEFAULT_SIGNATURE

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_CONDITION: Final = re.compile(
    r"(?P<source>[^\s\[<>=!]+)(?:\[(?P<element>\d+)\])?\s*"
    rf"(?P<comparison>{'|'.join(COMPARISONS)})\s*(?P<number>[-+]?[0-9.][0-9.eE+-]*)"
)
_NUMBER: Final = re.compile(r"[-+]?[0-9.][0-9.eE+-]*")
"""What YAML may take for a text: 1e4 is one to it, 1.0e+4 is not."""

_STEP_KEYS: Final = ("model", "signature", "inputs", "when", "otherwise")
_STEPS_MAX: Final = 64


def read_pipeline(path: Path) -> Pipeline:
    """Read and check the file; what its models take and give is not looked at.

    Raises:
        StatusError: INVALID_ARGUMENT `<path>:<line>: <key>: <what>; expected …`.
    """
    file = read_declared(path)
    try:
        return _pipeline(file)
    except FaultError as fault:
        raise file.fault(str(fault)) from fault


def _pipeline(file: DeclaredFile) -> Pipeline:
    document = check_keys(file.data, "", ("inputs", "steps", "outputs"))
    inputs = tensor_specs(document, "inputs", wildcard_allowed=True)
    known = {Source(REQUEST, spec.name) for spec in inputs}
    table = document.get("steps")
    if not isinstance(table, Mapping) or not table:
        raise FaultError(
            "steps: missing; expected a table such as {trigger: {model: m, inputs: {x: request.x}}}"
        )
    if len(table) > _STEPS_MAX:
        raise FaultError(f"steps: {len(table)} of them; expected {_STEPS_MAX} at most")
    steps: list[Step] = []
    for name, section in table.items():
        steps.append(_step(name, section, [step.name for step in steps], known))
    names = [step.name for step in steps]
    declared, sources = _outputs(document, names, known)
    pipeline = Pipeline(
        file=file,
        inputs=tuple(sorted(inputs, key=lambda spec: spec.name)),
        steps=tuple(steps),
        outputs=tuple(sorted(declared, key=lambda spec: spec.name)),
        sources=sources,
    )
    _check_otherwise(pipeline)
    return pipeline


def _step(name: Any, section: Any, earlier: list[str], known: set[Source]) -> Step:
    key = f"steps.{name}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == REQUEST:
        raise FaultError(
            f"{key}: no name of a step; expected a word of letters, digits, _ and -, but {REQUEST}"
        )
    check_keys(section, key, _STEP_KEYS)
    model = _word(section, key, "model", None)
    signature = _word(section, key, "signature", DEFAULT_SIGNATURE)
    inputs = section.get("inputs")
    if not isinstance(inputs, Mapping) or not inputs:
        raise FaultError(f"{key}.inputs: missing; expected a table such as {{x: request.x}}")
    sources = {
        str(name): _source(given, f"{key}.inputs.{name}", earlier, known) for name, given in inputs.items()
    }
    when = None
    if section.get("when") is not None:
        when = _condition(section["when"], f"{key}.when", earlier, known)
    otherwise = section.get("otherwise") or {}
    if when is None and otherwise:
        raise FaultError(f"{key}.otherwise: read only beside when; every row is asked")
    if not isinstance(otherwise, Mapping):
        raise FaultError(f"{key}.otherwise: {otherwise!r}; expected a table of outputs such as {{y: 0}}")
    return Step(
        name=name,
        model=model,
        signature=signature,
        inputs=sources,
        when=when,
        otherwise={
            str(name): _replacement(given, f"{key}.otherwise.{name}", earlier, known)
            for name, given in otherwise.items()
        },
    )


def _word(section: Mapping[str, Any], key: str, name: str, default: str | None) -> str:
    given = section.get(name, default)
    if not isinstance(given, str) or not given:
        what = "missing" if given is None else repr(given)
        raise FaultError(f"{key}.{name}: {what}; expected a {name}'s name")
    return given


def _source(given: Any, key: str, earlier: list[str], known: set[Source]) -> Source:
    """The tensor that is named; of the request it must be declared, of a step the step must come before."""
    step, dot, tensor = str(given).partition(".")
    if not isinstance(given, str) or not dot or not tensor:
        raise FaultError(f"{key}: {given!r}; expected {REQUEST}.INPUT or STEP.OUTPUT of an earlier step")
    if step == REQUEST:
        inputs = [source.tensor for source in known]
        if Source(step, tensor) not in known:
            listed = ", ".join(sorted(inputs))
            raise FaultError(
                f"{key}: the request has no input {tensor}{did_you_mean(tensor, inputs)}; it has {listed}"
            )
    elif step not in earlier:
        names = [REQUEST, *earlier]
        raise FaultError(
            f"{key}: no step {step} before this{did_you_mean(step, names)}; expected {', '.join(names)}"
        )
    return Source(step, tensor)


def _condition(given: Any, key: str, earlier: list[str], known: set[Source]) -> Condition:
    parts = _CONDITION.fullmatch(given.strip()) if isinstance(given, str) else None
    number = _finite(parts["number"]) if parts else None
    if parts is None or number is None:
        raise FaultError(
            f"{key}: {given!r}; expected STEP.OUTPUT COMPARISON NUMBER, such as trigger.score > 0.5 or "
            f"trigger.scores[1] >= 0.5; comparisons are {' '.join(COMPARISONS)}"
        )
    return Condition(
        source=_source(parts["source"], key, earlier, known),
        element=None if parts["element"] is None else int(parts["element"]),
        comparison=parts["comparison"],
        number=number,
    )


def _finite(text: str) -> float | None:
    """The number that a text is; None: none, or one beyond a float."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _replacement(given: Any, key: str, earlier: list[str], known: set[Source]) -> Source | Literal:
    if isinstance(given, bool | int | float):
        return given
    if isinstance(given, Mapping) and list(given) == ["text"] and isinstance(given["text"], str):
        return given["text"].encode()
    if isinstance(given, str) and _NUMBER.fullmatch(given):
        number = _finite(given)
        if number is not None:
            return number
    elif isinstance(given, str):
        return _source(given, key, earlier, known)
    raise FaultError(
        f"{key}: {given!r}; expected a number, an earlier tensor such as {REQUEST}.x, or {{text: none}}"
    )


def _outputs(
    document: Mapping[str, Any], steps: list[str], known: set[Source]
) -> tuple[Any, dict[str, Source]]:
    """What an answer holds, and where it comes from."""
    table = document.get("outputs")
    if not isinstance(table, Mapping) or not table:
        example = "{y: {from: trigger.y, dtype: float32, shape: [2]}}"
        raise FaultError(f"outputs: missing; expected a table such as {example}")
    sources, plain = {}, {}
    for name, section in table.items():
        key = f"outputs.{name}"
        check_keys(section, key, ("from", "dtype", "shape"))
        if "from" not in section:
            raise FaultError(f"{key}.from: missing; expected STEP.OUTPUT")
        sources[str(name)] = _source(section["from"], f"{key}.from", steps, known)
        plain[name] = {word: given for word, given in section.items() if word != "from"}
    return tensor_specs({"outputs": plain}, "outputs", wildcard_allowed=True), sources


def _check_otherwise(pipeline: Pipeline) -> None:
    """Every output that is used of a step with a condition needs a value for the rows that are not asked."""
    conditional = {step.name: step for step in pipeline.steps if step.when is not None}
    for key, source in pipeline.uses():
        step = conditional.get(source.step)
        if step is not None and source.tensor not in step.otherwise:
            raise FaultError(
                f"steps.{step.name}.otherwise.{source.tensor}: missing; {key} uses it for rows that when leaves out: "
                f"expected a value such as 0, or an earlier tensor"
            )
