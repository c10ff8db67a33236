"""What all sections of a scenario have in common: their base class, and types for quantities, files and CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from batchtune.errors import ScenarioError, UsageError
from batchtune.system import absolute, schedulable_cpus
from batchtune.units import (
    DURATION,
    NUMBER,
    format_duration,
    parse_duration_s,
    parse_rate_rps,
    parse_ratio,
    with_unit,
)


class Spec(BaseModel):
    """A frozen part of a scenario: unknown keys are refused. Names of attributes end in the unit (`duration_s`); YAML
    keys have none, and their values may (`duration: 5s`)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, protected_namespaces=()
    )

    @classmethod
    def without_unset_parts(cls, given: Any) -> Any:
        """Return a mapping for this section without the sections in it that are null, as by `--set slo=null`, so that
        these have their defaults; what is no mapping is returned as it is."""
        if not isinstance(given, Mapping):
            return given
        parts: dict[str, Any] = {
            field.alias or name: field
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, Spec)
        }
        return {
            key: parts[key].annotation.without_unset_parts(value) if key in parts else value
            for key, value in given.items()
            if value is not None or key not in parts or parts[key].is_required()
        }


# Durations, rates and ratios with their unit, counts.


def problem(what: str, *, hint: str = "", at: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """Make the error that a validator of a scenario raises, and that `reader` turns into a message with file
    and line.

    `at`: the path from the validated value to the wrong key.
    """
    details: Mapping[str, Any] = {"what": what, "hint": hint, "at": at}
    return PydanticCustomError("problem", "{what}", dict(details))


def _seconds(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        return _parsed(parse_duration_s, value)
    if info.context and isinstance(value, int | float) and value != 0:
        is_latency = (info.field_name or "").startswith("p")
        raise problem(
            f"expected a duration with its unit, such as 20ms, 1.5s or 3m; was {value}",
            hint=with_unit(value, ("ms", "s") if is_latency else ("s", "m")),
        )
    return _number(value, "a duration such as 20ms, 1.5s or 3m")


def _rate(value: object) -> object:
    if isinstance(value, str):
        return _parsed(parse_rate_rps, value)
    return _number(value, "a rate such as 500/s")


def _not_negative(value: object) -> object:
    if isinstance(value, float) and not value >= 0:
        raise problem("expected 0 or more")
    return value


def _ratio(value: object) -> object:
    number = (
        _parsed(parse_ratio, value) if isinstance(value, str) else _number(value, "a percentage such as 1%")
    )
    if not 0 <= number <= 1:
        hint = f"write {value}%" if isinstance(value, int) and 1 < value <= 100 else ""
        raise problem(f"expected a percentage such as 1%, or a ratio from 0 to 1; was {value}", hint=hint)
    return number


def _number(value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem(f"expected {expected}; was {value!r}")
    return float(value)


def _parsed(parse: Any, text: str) -> float:
    try:
        number: float = parse(text)
    except UsageError as error:
        raise problem(error.message, hint=error.hint) from error
    return number


def _positive(value: object) -> object:
    if isinstance(value, float) and not value > 0:
        raise problem("expected more than 0")
    return value


_DURATION_SCHEMA = {
    "type": ["string", "integer"],
    "pattern": rf"^({DURATION}\s*)+$|^0$",
    "maximum": 0,
    "minimum": 0,
    "examples": ["20ms", "1.5s", "3m"],
}
_RATE_SCHEMA = {
    "type": ["number", "string"],
    "exclusiveMinimum": 0,
    "pattern": rf"^{NUMBER} ?[kM]?( ?(/s|/min|/m|/h|rps))?$",
    "examples": ["500/s", "30/min"],
}
_as_duration = PlainSerializer(format_duration, when_used="json")
# BeforeValidators run from the last to the first: the text is parsed before its sign is looked at.
_checked_positive = BeforeValidator(_positive)

Seconds = Annotated[float, BeforeValidator(_seconds), _as_duration, WithJsonSchema(_DURATION_SCHEMA)]
PositiveSeconds = Annotated[
    float, _checked_positive, BeforeValidator(_seconds), _as_duration, WithJsonSchema(_DURATION_SCHEMA)
]
RateRps = Annotated[float, _checked_positive, BeforeValidator(_rate), WithJsonSchema(_RATE_SCHEMA)]
RateOrNoneRps = Annotated[
    float,
    BeforeValidator(_not_negative),
    BeforeValidator(_rate),
    WithJsonSchema(
        {**{key: keyword for key, keyword in _RATE_SCHEMA.items() if key != "exclusiveMinimum"}, "minimum": 0}
    ),
]
"""0: nothing is sent."""
Ratio = Annotated[
    float,
    BeforeValidator(_ratio),
    WithJsonSchema(
        {
            "type": ["number", "string"],
            "minimum": 0,
            "maximum": 1,
            "pattern": rf"^{NUMBER} ?%?$",
            "examples": ["1%", 0.01],
        }
    ),
]
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
"""Of rows, clients, requests: what a server counts in 32 bits."""
Whole = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]


# Names of files, models and clusters; CPUs.

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
    """Check that this process may run on all CPUs that a scenario names under `key`; None: it names none. Reading a
    scenario does not check this, since a run may be read on another machine.

    Raises:
        ScenarioError: it may not, or this system cannot pin processes to CPUs.
    """
    if cpus is None:
        return
    if not hasattr(os, "sched_getaffinity"):
        raise ScenarioError(f"{key}: this system cannot pin processes to CPUs", hint=f"leave {key} out")
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
