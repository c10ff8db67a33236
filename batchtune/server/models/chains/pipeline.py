"""What is a chain? Steps in order, each a model asked with tensors of the request or of the steps before it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batchtune.server.backends.declared_file import DeclaredFile
from batchtune.wire.signature import TensorSpec

PIPELINE_FILE: Final = "pipeline.yaml"
REQUEST: Final = "request"
"""The request's own tensors, where a step is named."""

COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def is_chain(version_directory: Path) -> bool:
    """Whether a version directory holds a chain, no model."""
    return (version_directory / PIPELINE_FILE).is_file()


@dataclass(frozen=True, slots=True)
class Source:
    """An output of a step, or with the step `request` an input of the request."""

    step: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.step}.{self.tensor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`source[element] comparison number`, for each row; `element` None: the row's only value."""

    source: Source
    element: int | None
    comparison: str
    number: float


Literal = bool | int | float | bytes
"""The value of every element of a row; bytes: a string's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model asked: `inputs` by its signature's names; rows for which `when` does not hold are not asked and have
    the outputs of `otherwise`."""

    name: str
    model: str
    signature: str
    inputs: Mapping[str, Source]
    when: Condition | None
    otherwise: Mapping[str, Source | Literal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The checked content of a `pipeline.yaml`."""

    file: DeclaredFile
    inputs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    outputs: tuple[TensorSpec, ...]
    sources: Mapping[str, Source]

    def uses(self) -> list[tuple[str, Source]]:
        """Every key that names a tensor, and the tensor."""
        uses = [(f"outputs.{name}.from", source) for name, source in self.sources.items()]
        for step in self.steps:
            uses += [(f"steps.{step.name}.inputs.{name}", source) for name, source in step.inputs.items()]
            if step.when is not None:
                uses.append((f"steps.{step.name}.when", step.when.source))
            uses += [
                (f"steps.{step.name}.otherwise.{name}", given)
                for name, given in step.otherwise.items()
                if isinstance(given, Source)
            ]
        return uses
