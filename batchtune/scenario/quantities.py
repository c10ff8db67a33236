"""The quantities of a scenario's schema: durations, rates and ratios with their unit, counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from batchtune.errors import UsageError
from batchtune.units import (
    DURATION,
    NUMBER,
    format_duration,
    parse_duration_s,
    parse_rate_rps,
    parse_ratio,
    with_unit,
)


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
