"""How are durations, rates and ratios written, on the command line, in scenarios and in sentences?

`20ms`, `1m30s`; `500/s`, `2k/s`; `1%`, `0.01`. Numbers in scenario files carry their unit, so that `20` is never
taken for seconds by one reader and for milliseconds by the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from batchtune.errors import UsageError

_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"
_DURATION = rf"{_NUMBER} ?(?:ns|us|µs|μs|ms|s|min|m|h)"
_DURATION_PART = re.compile(rf"({_NUMBER}) ?(ns|us|µs|μs|ms|s|min|m|h)(?![a-zµμ])\s*")
_RATE = re.compile(rf"({_NUMBER}) ?([kM]?)(?: ?(/s|/min|/m|/h|rps))?")
_PER_SECOND = {"/s": 1.0, "rps": 1.0, None: 1.0, "/min": 1 / 60, "/m": 1 / 60, "/h": 1 / 3600}
_PERCENT = re.compile(rf"({_NUMBER}) ?%")


def parse_duration_s(text: str, *, units: tuple[str, str] = ("ms", "s")) -> float:
    """Seconds from a duration with its unit: `20ms`, `1.5s`, `3m`, `1m30s`, `500us`; `0` needs none.

    `units` are those that the hint proposes where the text is a bare number.

    Raises:
        UsageError: no number, no unit or an unknown one.
    """
    stripped = text.strip()
    if stripped == "0":
        return 0.0
    total, at = Decimal(0), 0
    while match := _DURATION_PART.match(stripped, at):
        total += Decimal(match[1]) * _SECONDS[match[2]]
        at = match.end()
    if at == 0 or at != len(stripped):
        bare = re.fullmatch(_NUMBER, stripped)
        raise UsageError(
            f"expected a duration with its unit, such as 20ms, 1.5s or 3m; was {text!r}",
            hint=_with_unit(stripped, units) if bare else "units: ns, us, ms, s, m, h",
        )
    return float(total)


def _with_unit(number: object, units: tuple[str, str]) -> str:
    return f"write {number}{units[0]} or {number}{units[1]}"


def format_duration(seconds: float) -> str:
    """The shortest exact text that `parse_duration_s` reads back as the same float: `20ms`, `1.5s`."""
    exact = Decimal(repr(float(seconds)))
    unit = "s" if exact >= 1 or not exact else "ms" if exact >= _SECONDS["ms"] else "us"
    return f"{_plain(exact / _SECONDS[unit])}{unit}"


def rounded(value: float) -> str:
    """Three significant digits for a sentence, thousands separated, never an exponent: `12,300`, `6.4`, `0.05`."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "unbounded"
    exact = Decimal(f"{value:.3g}")
    return _plain(exact) if abs(exact) < 1000 else f"{exact:,.0f}"


def rounded_duration(seconds: float) -> str:
    """Three significant digits for a sentence: `850 µs`, `20 ms`, `2.5 s`, `3 min 05 s`; `–` for nan."""
    if not math.isfinite(seconds):
        return rounded(seconds)
    shown_s = float(f"{seconds:.3g}")
    if shown_s >= 60:
        minutes, rest_s = divmod(round(seconds), 60)
        return f"{minutes} min {rest_s:02d} s"
    unit, unit_s = ("s", 1.0) if shown_s >= 1 else ("ms", 1e-3) if shown_s >= 1e-3 else ("µs", 1e-6)
    return f"{rounded(shown_s / unit_s)} {unit}" if shown_s else "0 ms"


def parse_rate_rps(text: str) -> float:
    """Requests per second from `500`, `500/s`, `30/min`, `2k/s` or `500rps`.

    Raises:
        UsageError: anything else.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"expected a rate such as 500/s or 30/min; was {text!r}")
    thousands = {"": 1, "k": 1_000, "M": 1_000_000}[match[2]]
    return float(Decimal(match[1]) * thousands) * _PER_SECOND[match[3]]


def parse_ratio(text: str) -> float:
    """A ratio from `1%` or `0.01`.

    Raises:
        UsageError: anything else.
    """
    percent = _PERCENT.fullmatch(text.strip())
    if percent:
        return float(Decimal(percent[1]) / 100)
    if re.fullmatch(_NUMBER, text.strip()):
        return float(text)
    raise UsageError(f"expected a percentage such as 1%, or a ratio such as 0.01; was {text!r}")


def percentage(ratio: float, decimals: int = 0) -> str:
    """A ratio for a sentence: `12 %`."""
    return f"{ratio * 100:.{decimals}f} %"


def counted(number: int, noun: str) -> str:
    """`1 run`, `3 runs`, `1,200 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def problem(what: str, *, hint: str = "", at: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """What a validator raises: `at` leads from the validated value to the key that is wrong."""
    details: Mapping[str, Any] = {"what": what, "hint": hint, "at": at}
    return PydanticCustomError("problem", "{what}", dict(details))


def _plain(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _seconds(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        return _parsed(parse_duration_s, value)
    if info.context and isinstance(value, int | float) and value != 0:
        is_latency = (info.field_name or "").startswith("p")
        raise problem(
            f"expected a duration with its unit, such as 20ms, 1.5s or 3m; was {value}",
            hint=_with_unit(value, ("ms", "s") if is_latency else ("s", "m")),
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
    "pattern": rf"^({_DURATION}\s*)+$|^0$",
    "maximum": 0,
    "minimum": 0,
    "examples": ["20ms", "1.5s", "3m"],
}
_RATE_SCHEMA = {
    "type": ["number", "string"],
    "exclusiveMinimum": 0,
    "pattern": rf"^{_NUMBER} ?[kM]?( ?(/s|/min|/m|/h|rps))?$",
    "examples": ["500/s", "30/min"],
}
_RATIO_SCHEMA = {
    "type": ["number", "string"],
    "minimum": 0,
    "maximum": 1,
    "pattern": rf"^{_NUMBER} ?%?$",
    "examples": ["1%", 0.01],
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
Ratio = Annotated[float, BeforeValidator(_ratio), WithJsonSchema(_RATIO_SCHEMA)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
"""Of rows, clients, requests: what a server counts in 32 bits."""
Whole = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
