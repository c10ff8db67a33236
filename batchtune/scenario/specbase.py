"""What do all parts of a scenario have in common?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo

from batchtune.scenario.units import problem


class Spec(BaseModel):
    """A frozen part of a scenario: unknown keys are refused; attributes carry units, YAML keys need none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, protected_namespaces=()
    )


def _existing_file(value: str, info: ValidationInfo) -> str:
    if not info.context:
        return value
    path = Path(info.context["directory"], Path(value).expanduser())
    if not path.is_file():
        raise problem(f"no such file: {path}", hint="paths are relative to the scenario's own directory")
    return str(path)


def _nearby_model(value: str, info: ValidationInfo) -> str:
    if info.context:
        path = Path(info.context["directory"], Path(value).expanduser())
        if path.is_dir():
            return str(path)
    return value


FileName = Annotated[str, AfterValidator(_existing_file)]
ModelName = Annotated[str, AfterValidator(_nearby_model)]
