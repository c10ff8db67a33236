"""What all sections of a scenario have in common: their base class, and types for files, models and CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from batchtune.errors import ScenarioError
from batchtune.scenario.quantities import Whole, problem
from batchtune.system import absolute, schedulable_cpus


class Spec(BaseModel):
    """A frozen part of a scenario: unknown keys are refused; attributes carry units, YAML keys need none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, protected_namespaces=()
    )


ClusterAddress = Annotated[
    str,
    Field(
        pattern=r"^(auto|(ray://)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5})$",
        description="auto: the cluster that this machine belongs to; another by its address",
        examples=["auto", "ray://head.example:10001", "10.0.0.1:6379"],
    ),
]


def _existing_file(value: str, info: ValidationInfo) -> str:
    if not info.context:
        return value
    path = Path(info.context["directory"], Path(value).expanduser())
    try:
        if info.context["files_exist"] and not path.is_file():
            raise problem(f"no such file: {path}", hint="paths are relative to the scenario's own directory")
    except OSError as error:
        raise problem(f"{path} cannot be read: {error.strerror}") from error
    return str(absolute(path))


def _nearby_model(value: str, info: ValidationInfo) -> str:
    if info.context:
        path = Path(info.context["directory"], Path(value).expanduser())
        try:
            return str(absolute(path)) if path.exists() else value
        except OSError as error:
            raise problem(f"{path} cannot be read: {error.strerror}") from error
    return value


def _every_cpu(given: object) -> object:
    return tuple(sorted(schedulable_cpus())) if given == "all" else given


HttpStatus = Annotated[int, Field(ge=100, le=599)]
Cpus = Annotated[tuple[Whole, ...], Field(min_length=1)]
ServerCpus = Annotated[
    Cpus,
    BeforeValidator(_every_cpu),
    WithJsonSchema(
        {
            "oneOf": [
                {"const": "all"},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            ]
        }
    ),
]
FileName = Annotated[str, AfterValidator(_existing_file)]
ModelName = Annotated[str, AfterValidator(_nearby_model)]


def require_cpus(key: str, cpus: Sequence[int] | None) -> None:
    """Check that this process may run on the CPUs that a scenario asks for under this key. Not part of
    reading a scenario, since a run is read on any machine.

    Raises:
        ScenarioError: it may not, or the system keeps no process on some of its CPUs.
    """
    if cpus is None:
        return
    if not hasattr(os, "sched_getaffinity"):
        raise ScenarioError(
            f"{key}: this system keeps no process on some of its CPUs", hint=f"leave {key} out"
        )
    usable = os.sched_getaffinity(0)
    missing = set(cpus) - usable
    if missing:
        raise ScenarioError(f"{key}: this process may run on {cpu_list(usable)}, not on {cpu_list(missing)}")


def cpu_list(cpus: Iterable[int]) -> str:
    """Write CPU numbers as text, such as "CPU 3" or "CPUs 0-3, 8"."""
    numbers = sorted(set(cpus))
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"CPU{'' if len(numbers) == 1 else 's'} {', '.join(texts)}"
