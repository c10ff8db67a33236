"""Reads a YAML text as plain data with the line of each key, bounded in depth and size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import yaml

Path: TypeAlias = tuple[str | int, ...]

TOO_DEEP: Final = "nested too deep"
_DEPTH_MAX: Final = 50
"""Our files nest six deep; each level takes three of the 1,000 frames that Python allows."""


class YamlError(Exception):
    """What is wrong in a YAML text or with a value of it, in which line (0: not known), and how to correct it."""

    def __init__(self, what: str, line: int = 0, *, hint: str = "") -> None:
        super().__init__(what)
        self.line = line
        self.hint = hint


def read_yaml(text: str, *, nodes_max: int = 100_000) -> tuple[Any, dict[Path, int]]:
    """Parse one YAML document into (plain data, path of a key or list item -> its line); without a document (None, {}).

    Keys are taken as they are written, so that `on` stays `on`. `nodes_max`: most keys and values, each alias counted
    as what it stands for: ten aliases of ten aliases, nine deep, stand for 10⁹.

    Raises:
        YamlError: it is no YAML, too deep or too large, has a key twice or a value that its type does not have.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(yaml.parse(text, Loader=loader))
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text) from error
    except yaml.YAMLError as error:
        raise YamlError(f"not YAML: {' '.join(str(error).split())}") from error
    reader = _NodeReader(nodes_max)
    return (None if root is None else reader.noted(root, _line(root), ())), reader.lines


def _check_depth(events: Iterator[Any]) -> None:
    """Look at the parser's events alone: to compose nodes takes a frame of the stack for each level."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH_MAX:
            raise YamlError(TOO_DEEP, event.start_mark.line + 1)


class _NodeReader:
    """Turns YAML nodes into plain data and notes the line of each."""

    def __init__(self, nodes_max: int) -> None:
        self.lines: dict[Path, int] = {}
        self._scalars = yaml.SafeLoader("")
        self._open: list[yaml.Node] = []
        self._nodes_left = nodes_max

    def plain(self, node: yaml.Node, path: Path) -> Any:
        self._nodes_left -= 1
        if len(self._open) > _DEPTH_MAX:
            raise YamlError(TOO_DEEP, _line(node))
        if node in self._open or self._nodes_left < 0:
            raise YamlError("an alias that contains itself, or too large a document", _line(node))
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.noted(item, _line(item), (*path, at)) for at, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for mapping in self._merged_in(value_node, path):
                    inherited = {**mapping, **inherited}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlError("a key must be a word", _line(key_node))
            key = key_node.value
            if key in own:
                what = f"{_dotted((*path, key))}: given twice, first on line {self.lines[(*path, key)]}"
                raise YamlError(what, _line(key_node), hint="keep one of them")
            own[key] = self.noted(value_node, _line(key_node), (*path, key))
        return {**inherited, **own}

    def _merged_in(self, node: yaml.Node, path: Path) -> Iterator[Mapping[str, Any]]:
        for mapping in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(mapping, yaml.MappingNode):
                raise YamlError("<<: expected a mapping to merge", _line(mapping))
            yield self.plain(mapping, path)

    def noted(self, node: yaml.Node, line: int, path: Path) -> Any:
        self.lines[path] = line
        return self.plain(node, path)

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            place = f"{_dotted(path)}: " if path else ""
            why = " ".join(str(error).split())
            raise YamlError(f"{place}{node.value!r} cannot be read: {why}", _line(node)) from error


def _syntax_error(error: yaml.MarkedYAMLError, text: str) -> YamlError:
    mark, problem = error.problem_mark or error.context_mark, str(error.problem or error.context)
    line = mark.line + 1 if mark else 1
    if problem == "exceeded maximum nesting depth":  # PyYAML from 6.0.4 on
        return YamlError(TOO_DEEP, line)
    lines = text.splitlines()
    culprit = lines[line - 1] if line <= len(lines) else ""
    hint = ""
    if "\t" in culprit[: len(culprit) - len(culprit.lstrip())] or "'\\t'" in problem:
        hint = "indent with spaces; YAML allows no tabs there"
    elif ":" in problem or "mapping" in problem:
        hint = "check the indentation of this line and the one before"
    return YamlError(f"not YAML: {problem}", line, hint=hint)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
