"""Parses a YAML text into values and the line of each key, applies overrides to them, and writes YAML with
comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final, TypeAlias

import yaml

from batchtune.errors import ScenarioError
from batchtune.scenario.spec.served_models import refuse_unheard

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


Path: TypeAlias = tuple[str | int, ...]

_TOO_DEEP = "nested too deep for a scenario"
_ComposeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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


def too_deep(error: yaml.YAMLError) -> bool:
    """Whether the parser refused a document for its depth alone, as PyYAML does from 6.0.4 on."""
    return getattr(error, "problem", None) == "exceeded maximum nesting depth"


def parse_yaml(text: str, *, source: str) -> Document:
    """Parse one YAML mapping into a document with the line of each key.

    Keys are taken as they are written, so that `on` stays `on`.

    Raises:
        ScenarioError: `source:line: …` for text that is no YAML, no mapping, or has a key twice.
    """
    try:
        root = yaml.compose(text, Loader=_ComposeLoader)
    except yaml.MarkedYAMLError as error:
        if too_deep(error):
            raise ScenarioError(f"{source}: {_TOO_DEEP}") from error
        raise _syntax_error(error, text, source) from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ScenarioError(f"{source}: {_TOO_DEEP}") from error
    if root is None:
        raise ScenarioError(f"{source}: the file is empty", hint="a scenario begins with name: and target:")
    if not isinstance(root, yaml.MappingNode):
        raise ScenarioError(
            f"{source}:{_line(root)}: expected keys such as name: and target:, not a list or a word"
        )
    reader = _NodeReader(source)
    data = reader.plain(root, ())
    return Document(data=data, places=reader.places)


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
        root = yaml.compose(value, Loader=_ComposeLoader)
    except yaml.YAMLError as error:
        if too_deep(error):
            raise ScenarioError(f"{source}: {_TOO_DEEP}") from error
        raise ScenarioError(f"{source}: the value is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ScenarioError(f"{source}: {_TOO_DEEP}") from error
    if root is None:
        raise empty_value(name.strip(), option=option)
    data: Any = _NodeReader(source).plain(root, ())
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


class _NodeReader:
    """Turns YAML nodes into plain data and notes the place of each."""

    def __init__(self, source: str) -> None:
        self.places: dict[Path, str] = {(): f"{source}:1"}
        self._source = source
        self._scalars = yaml.SafeLoader("")
        self._open: list[yaml.Node] = []
        self._nodes = 0

    def plain(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        # A scenario nests six deep; each level takes three of the 1,000 frames that Python allows.
        depth_max = 50
        if len(self._open) > depth_max:
            raise ScenarioError(f"{self._source}:{_line(node)}: {_TOO_DEEP}")
        nodes_max = 100_000
        if node in self._open or self._nodes > nodes_max:
            raise ScenarioError(
                f"{self._source}:{_line(node)}: an alias that contains itself, or too large a document"
            )
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._item(item, (*path, at)) for at, item in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for mapping in self._merged_in(value_node, path):
                    inherited = {**mapping, **inherited}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ScenarioError(f"{self._source}:{_line(key_node)}: a key must be a word")
            key = key_node.value
            if key in lines:
                raise ScenarioError(
                    f"{self._source}:{_line(key_node)}: {'.'.join(map(str, (*path, key)))}: given twice, "
                    f"first on line {lines[key]}",
                    hint="keep one of them",
                )
            lines[key] = _line(key_node)
            self.places[(*path, key)] = f"{self._source}:{lines[key]}"
            own[key] = self.plain(value_node, (*path, key))
        return {**inherited, **own}

    def _merged_in(self, node: yaml.Node, path: Path) -> Iterator[Mapping[str, Any]]:
        for mapping in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(mapping, yaml.MappingNode):
                raise ScenarioError(f"{self._source}:{_line(mapping)}: <<: expected a mapping to merge")
            yield self.plain(mapping, path)

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self.places[path] = f"{self._source}:{_line(node)}"
        return self.plain(node, path)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise ScenarioError(f"{self._source}:{_line(node)}: {node.value!r} cannot be read") from error


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


def _syntax_error(error: yaml.MarkedYAMLError, text: str, source: str) -> ScenarioError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    culprit = lines[line - 1] if line <= len(lines) else ""
    hint = ""
    if "\t" in culprit[: len(culprit) - len(culprit.lstrip())] or "'\\t'" in str(error.problem):
        hint = "indent with spaces; YAML allows no tabs there"
    elif ":" in str(error.problem) or "mapping" in str(error.problem):
        hint = "check the indentation of this line and the one before"
    return ScenarioError(f"{source}:{line}: not YAML: {error.problem or error.context}", hint=hint)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
