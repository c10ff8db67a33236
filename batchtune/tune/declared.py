"""Does a value that was read from a file have the type that its dataclass declares?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from reprlib import repr as shortened
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_declared(one: Any) -> None:
    """Return if every field of a dataclass, and of those in it, holds what its annotation says; a whole number is a
    float too.

    Raises:
        TypeError: the first that does not, by its place: `measurement.server.gpu_busy_ratio is 'x'`.
    """
    for place, value in _misfits(one, type(one), ""):
        raise TypeError(f"{place.removeprefix('.')} is {shortened(value)}")


def _misfits(value: Any, declared: Any, place: str) -> Iterator[tuple[str, Any]]:
    origin, arguments = get_origin(declared), get_args(declared)
    if is_dataclass(declared) and type(value) is declared:
        for name, hint in _hints(type(value)).items():
            yield from _misfits(getattr(value, name), hint, f"{place}.{name}")
    elif origin in (Union, UnionType):
        yield from _misfits_of_all(value, arguments, place)
    elif origin is tuple and isinstance(value, tuple):
        each = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        for at, (item, hint) in enumerate(zip(value, each, strict=True)):
            yield from _misfits(item, hint, f"{place}[{at}]")
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _misfits(key, arguments[0], f"{place}: a key")
            yield from _misfits(item, arguments[1], f"{place}.{key}")
    elif not _is_plain(value, declared, origin, arguments):
        yield place, value


def _misfits_of_all(value: Any, kinds: tuple[Any, ...], place: str) -> Iterator[tuple[str, Any]]:
    """None when one of the kinds fits; else where the only one that is not None does not."""
    found = [list(_misfits(value, kind, place)) for kind in kinds if kind is not type(None) or value is None]
    if all(found):
        yield from found[0] if len(found) == 1 else [(place, value)]


def _is_plain(value: Any, declared: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if declared is Any:
        return True
    if origin is Literal:
        return isinstance(value, str | int) and value in arguments
    if declared in (int, float) and isinstance(value, bool):
        return False
    kind = int | float if declared is float else origin or declared
    return isinstance(value, kind)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
