"""Finds values in a JSON document by their place, and fills the places of a template.

A place is names and numbers with dots between them (`outputs.0.score`); `*` stands for every key of an
object, or every item of a list. In a template {{NAME}} stands for a value, and {{2 * NAME}} for twice a
number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from batchtune.errors import ScenarioError

_HOLE: Final = re.compile(r"\{\{\s*(?:(\d+)\s*\*\s*)?([^{}]*?)\s*\}\}")
_HALF_HOLE: Final = re.compile(r"(?:\{+\s*)?\b(\w+)(?:\s*\}+)?")


def json_lines(path: Path) -> Iterator[tuple[int, bytes, Any]]:
    """Yield (line number, bytes, parsed JSON) of each line of a file that is not blank.

    Raises:
        ScenarioError: the file cannot be read, or a line is no JSON.
    """
    import orjson

    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield number, line.strip(), orjson.loads(line)
                    except orjson.JSONDecodeError as error:
                        raise ScenarioError(f"{path}:{number}: not JSON: {error}") from error
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error


def values_at(document: Any, place: str) -> list[Any]:
    """Return the values at a place of a JSON document: none, one, or with `*` in the place several."""
    there = [document]
    for step in filter(None, place.split(".")):
        there = [below for above in there for _, below in _below(above, step)]
    return there


def places_of(document: Any, above: str = "") -> list[str]:
    """Return the place of each value of a JSON document that is no object or list; `above`: place of the document."""
    if not isinstance(document, Mapping | list):
        return [above] if above else []
    return [
        place
        for name, below in _below(document, "*")
        for place in places_of(below, f"{above}.{name}" if above else str(name))
    ]


def has_value(document: Any, place: str) -> bool:
    """Whether there is a value other than null at a place of a JSON document."""
    return any(value is not None for value in values_at(document, place))


def with_values(document: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of the document with new values; `changes`: place -> value. Objects that are missing on
    the way are made."""
    for place, value in changes.items():
        document = _with_value(document, list(filter(None, place.split("."))), value)
    return document


def _with_value(document: Any, steps: list[str], value: Any) -> Any:
    if not steps:
        return value
    step, *further = steps
    if isinstance(document, list):
        changed = list(document)
        for at, below in _below(document, step):
            changed[at] = _with_value(below, further, value)
        return changed
    above = dict(document) if isinstance(document, Mapping) else {}
    keys = list(above) if step == "*" else [step]
    return {**above, **{key: _with_value(above.get(key), further, value) for key in keys}}


def _below(document: Any, step: str) -> Iterator[tuple[Any, Any]]:
    if isinstance(document, Mapping):
        keys = list(document) if step == "*" else [step]
        yield from ((key, document[key]) for key in keys if key in document)
    elif isinstance(document, list):
        indices = range(len(document)) if step == "*" else [int(step)] if step.isdecimal() else []
        yield from ((at, document[at]) for at in indices if at < len(document))


def holes(template: Any) -> Iterator[str]:
    """Yield the NAME of each {{NAME}} in a template, as often as it occurs."""
    for text in _texts(template):
        yield from (name for _, name in _HOLE.findall(text))


def half_holes(template: Any, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (text, NAME) for each of the names that a template has in other braces than {{NAME}}, such as {NAME} or
    {{NAME}."""
    for text in _texts(template):
        for half in _HALF_HOLE.finditer(_HOLE.sub("", text)):
            if half[1] in names and half[0] != half[1]:
                yield half[0], half[1]


def _texts(template: Any) -> Iterator[str]:
    """Yield each text in a template, nested as it is; keys are left out."""
    if isinstance(template, str):
        yield template
    elif isinstance(template, Mapping | list | tuple):
        for value in template.values() if isinstance(template, Mapping) else template:
            yield from _texts(value)


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Return the template, nested as it is, with values in place of each {{NAME}}.

    A string that is only one such place becomes the value itself, with its type; {{N * NAME}} is N times a
    number. A NAME without a value stays as it is.
    """
    if isinstance(template, Mapping):
        return {name: filled(value, values) for name, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, values) for value in template]
    if not isinstance(template, str):
        return template
    whole = _HOLE.fullmatch(template)
    if whole is not None and whole[2] in values:
        return _times(whole[1], values[whole[2]])
    return _HOLE.sub(
        lambda hole: str(_times(hole[1], values[hole[2]])) if hole[2] in values else hole[0], template
    )


def _times(factor: str | None, value: Any) -> Any:
    return int(factor) * value if factor and isinstance(value, int | float) else value
