"""Turns dataclasses into plain values for JSON, and reads them again.

A class that says more of itself than its fields, or has a version, has its own `to_dict` and `from_dict`; every other
one is its fields by name. JSON has neither nan nor inf: they travel as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Coded:
    """A finding, such as a caveat or a verdict: a code and its figures by name; `report` turns it into English.

    Names of figures end in their unit. The figure `text` is a finished sentence, of an older run or of a server, or
    another `Coded`.
    """

    code: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Coded:
        """Make a finding from `code` and `figures`, or from `code`, `text` and `advice`, as in older runs and --json.
        Figures that are findings become `Coded` too.

        Raises:
            TypeError: not a finding.
        """
        figures = {name: text for name, text in values.items() if name in ("text", "advice")}
        for name, figure in from_plain(cls, values).figures.items():
            is_finding = isinstance(figure, Mapping) and figure.keys() == {"code", "figures"}
            figures[name] = cls.from_dict(figure) if is_finding else figure
        return cls(values["code"], figures)


def coded(code: str, **figures: Any) -> Coded:
    """Make a finding of a code and its figures, given by name."""
    return Coded(code, figures)


def as_text(text: str) -> Coded:
    """Make a finding whose only figure is a finished sentence."""
    return Coded("text", {"text": text})


def to_plain(value: Any) -> Any:
    """Convert a value to mappings, lists, strings and numbers that `json.dumps(…, allow_nan=False)` writes; nan and
    infinities become the texts `nan`, `inf` and `-inf`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return fields_to_plain(value) if is_dataclass(value) else value


def fields_to_plain(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance by name, their values converted as in `to_plain`.

    Goodput, which a field `latency_s` has as the share of requests that miss a limit, is written beside it as
    `goodput_ratio`, the share that meets every limit.
    """
    plain = {own.name: getattr(value, own.name) for own in fields(value)}
    if "goodput" in (latency_s := plain.get("latency_s") or {}):
        plain["latency_s"] = {name: figure for name, figure in latency_s.items() if name != "goodput"}
        plain["goodput_ratio"] = complement(latency_s["goodput"])
    return {name: to_plain(own) for name, own in plain.items()}


def complement(share: Any) -> Any:
    """Return 1 - share, of a float or of an estimate with its interval, rounded to 12 digits: applied twice, it returns
    the share."""
    if isinstance(share, float | int):
        return round(1.0 - share, 12)
    low, high = complement(share.high), complement(share.low)
    return replace(share, value=complement(share.value), low=low, high=high)


def check_version(values: Mapping[str, Any], version: int) -> None:
    """Raise ValueError where the `schema_version` of a document is missing or is not `version`."""
    if values.get("schema_version") != version:
        written = values.get("schema_version")
        writer = "written by another version of batchtune: " if isinstance(written, int) else ""
        raise ValueError(f"{writer}schema_version {written!r} where {version} is read")


def from_plain(kind: type[T], values: Any, place: str = "") -> T:
    """Make an instance of the dataclass `kind` from what `fields_to_plain` returned, directly or read from JSON.

    Keys that are no field are ignored, absent fields take their default, an int is accepted for a float, and keys of
    mappings become int where the field says so (in JSON they are strings). `place` precedes the names in errors.

    Raises:
        TypeError: a value is not what its field declares, or a field without default is missing; names the first
            one by its place: `.measurement.requests is 'x'`.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{place or kind.__name__} is {shortened(values)}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for own in fields(kind):  # type: ignore[arg-type]
        if own.name in values:
            given[own.name] = _read(hints[own.name], values[own.name], f"{place}.{own.name}")
        elif own.default is MISSING and own.default_factory is MISSING:
            raise TypeError(f"{place}.{own.name} is missing")
    if "goodput_ratio" in values and "latency_s" in given:
        figure = _read(get_args(hints["latency_s"])[1], values["goodput_ratio"], f"{place}.goodput_ratio")
        given["latency_s"]["goodput"] = complement(figure)
    return kind(**given)


def _read(declared: Any, value: Any, place: str) -> Any:
    origin, arguments = get_origin(declared), get_args(declared)
    if declared is Any or (value is None and NoneType in arguments):
        return value
    if origin in (Union, UnionType):
        (declared,) = (kind for kind in arguments if kind is not NoneType)
        return _read(declared, value, place)
    if declared is Coded and isinstance(value, str):
        return as_text(value)
    if is_dataclass(declared):
        own = getattr(declared, "from_dict", None)
        if own is not None and isinstance(value, Mapping):
            return own(value)
        return from_plain(declared, value, place)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, tuple | list):
        kinds = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(kinds) == len(value):
            return tuple(_read(kinds[at], item, f"{place}[{at}]") for at, item in enumerate(value))
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {_key(arguments[0], key): _read(arguments[1], value[key], f"{place}.{key}") for key in value}
    elif origin is Literal and isinstance(value, str | int) and value in arguments:
        return value
    elif declared is float and isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    elif is_number(value) if declared is float else type(value) is declared:
        return value
    raise TypeError(f"{place} is {shortened(value)}")


def _key(declared: Any, key: Any) -> Any:
    return int(key) if declared is int else key


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float; a bool does not count as one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
