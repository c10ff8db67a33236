"""Parses a YAML text into values and the line of each key, applies overrides to them, and writes YAML with
comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

import yaml

from batchtune.errors import ScenarioError
from batchtune.scenario.spec.served_models import refuse_unheard
from batchtune.yaml_lines import Path, YamlError, read_yaml

_WIDTH: Final = 118


def commented(document: Mapping[str, Any], *, head: Iterable[str], comments: Mapping[str, str]) -> str:
    """Write a document as YAML: mappings on lines of their own two deep, anything below in one line.

    `head` are paragraphs of comment above it; `comments`: key (`load`, `search.space`) -> comment beside it.
    """
    lines = [
        f"# {line}".rstrip() for paragraph in head for line in textwrap.wrap(paragraph, _WIDTH - 2) or [""]
    ]
    lines.append("")
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append("")
        lines += _lines(key, value, path=key, comments=comments, depth=0)
    return "\n".join(lines).strip() + "\n"


def _lines(key: str, value: Any, *, path: str, comments: Mapping[str, str], depth: int) -> list[str]:
    indent, comment = "  " * depth, comments.get(path, "")
    nested = isinstance(value, Mapping) and value and (depth == 0 or path == "search.space")
    if not nested:
        return _beside(f"{indent}{key}: {_flow(value)}", comment, indent)
    lines = _beside(f"{indent}{key}:", comment, indent)
    for below, inner in value.items():
        lines += _lines(below, inner, path=f"{path}.{below}", comments=comments, depth=depth + 1)
    return lines


def _beside(text: str, comment: str, indent: str) -> list[str]:
    """Return the text with the comment after it, or above it where there is no room."""
    if not comment:
        return [text]
    column = 28  # Where comments begin, if the text before them ends earlier.
    line = f"{text:<{column}}  # {comment}"
    if len(line) <= _WIDTH:
        return [line]
    above = textwrap.wrap(comment, _WIDTH - len(indent) - 2)
    return [*(f"{indent}# {words}" for words in above), text]


def _flow(value: Any) -> str:
    """Write the value in one line of YAML."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Plain data with the place of each key and list item."""

    data: dict[str, Any]
    # Path of a key or item -> `file:line`, or the option that set it.
    places: dict[Path, str] = field(default_factory=dict)

    def place_of(self, path: Path) -> str:
        """Return the place of a key's path, or of the nearest enclosing key that has one; "": there is
        none."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "")

    def overlaid(self, other: Document) -> Document:
        """Return this document with `other` merged in: mappings key by key, a list item by item where `other` names
        items by number (`{"0": …}`); any other value of `other` replaces this document's."""
        return Document(data=_merged(self.data, other.data), places={**self.places, **other.places})

    def under(self, *prefix: str | int) -> Document:
        """Return the part below `prefix` as a document of its own."""
        data: Any = self.data
        for part in prefix:
            data = data[part]
        places = {
            path[len(prefix) :]: at for path, at in self.places.items() if path[: len(prefix)] == prefix
        }
        return Document(data=data, places=places)


def parse_yaml(text: str, *, source: str) -> Document:
    """Parse one YAML mapping into a document with the line of each key.

    Keys are taken as they are written, so that `on` stays `on`.

    Raises:
        ScenarioError: `source:line: …` for text that is no YAML, no mapping, or has a key twice.
    """
    try:
        data, lines = read_yaml(text)
    except YamlError as error:
        place = f"{source}:{error.line}" if error.line else source
        raise ScenarioError(f"{place}: {error}", hint=error.hint) from error
    if not lines:
        raise ScenarioError(f"{source}: the file is empty", hint="a scenario begins with name: and target:")
    if not isinstance(data, dict):
        raise ScenarioError(
            f"{source}:{lines[()]}: expected keys such as name: and target:, not a list or a word"
        )
    places = {path: f"{source}:{line}" for path, line in lines.items()}
    return Document(data=data, places={**places, (): f"{source}:1"})


def parse_override(text: str, *, option: str = "--set") -> Document:
    """Parse one override `a.b.c=value`, the value being YAML (`--set load.rate=500/s`), into a document with
    that one value.

    Raises:
        ScenarioError: no `=`, an empty key or value, or a value that is no YAML.
    """
    source = f"{option} {text if len(text) <= 200 else text[:200] + '…'}"
    name, separator, value = text.partition("=")
    # The one key that has a dot in its name.
    keys = ["p99.9" if key == "p99_9" else key for key in name.strip().replace("p99.9", "p99_9").split(".")]
    if not separator or not all(keys):
        raise ScenarioError(f"{source}: expected key=value, such as load.duration=10s")
    try:
        data, lines = read_yaml(value)
    except YamlError as error:
        raise ScenarioError(f"{source}: {error}") from error
    if not lines:
        raise empty_value(name.strip(), option=option)
    for key in reversed(keys):
        data = {key: data}
    in_lists = tuple(int(key) if re.fullmatch(r"0|[1-9]\d?", key) else key for key in keys)
    return Document(data=data, places={tuple(keys): source, in_lists: source})


def overridden(document: Document, overrides: Iterable[str], side: str = "") -> Document:
    """Apply overrides `a.b.c=value` to a document; `side` names the option in errors: `--SIDE-set`, else
    `--set`.

    Raises:
        ScenarioError: as `parse_override`.
        UsageError: an override sets a key of which one of several models has its own value.
    """
    option = f"--{side}-set" if side else "--set"
    laid_over = [parse_override(override, option=option) for override in overrides]
    document = reduce(Document.overlaid, laid_over, document)
    refuse_unheard(document.data, [other.data for other in laid_over], option=option)
    return document


def empty_value(key: str, *, option: str) -> ScenarioError:
    """Make the error for `KEY=` without a value, as an unset variable of the shell leaves it."""
    return ScenarioError(
        f"{option}: {key} is empty",
        hint=f"give it a value (is a variable of the shell unset?), or write {key}=null where null is meant",
    )


def _merged(base: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**base, **{key: _replaced(base.get(key), value) for key, value in other.items()}}


def _replaced(ours: Any, other: Any) -> Any:
    if isinstance(other, dict) and isinstance(ours, dict):
        return _merged(ours, other)
    if isinstance(other, dict) and isinstance(ours, list):
        items = {str(at): item for at, item in enumerate(ours)}
        if other and other.keys() <= items.keys():
            return list(_merged(items, other).values())
    return other
