"""How does a scenario read that a person is to go on with: short, in order, with a comment beside what was decided?"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

_COLUMN: Final = 28
"""Where comments begin, if the text before them ends earlier."""
_WIDTH: Final = 118


def commented(document: Mapping[str, Any], *, head: Iterable[str], comments: Mapping[str, str]) -> str:
    """The document as YAML, sections two deep and anything below in one line.

    `head` are lines of comment above it, `comments` those beside a key (`load`, `search.space`).
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
    """The comment behind the text, or above it where there is no room."""
    if not comment:
        return [text]
    line = f"{text:<{_COLUMN}}  # {comment}"
    if len(line) <= _WIDTH:
        return [line]
    above = textwrap.wrap(comment, _WIDTH - len(indent) - 2)
    return [*(f"{indent}# {words}" for words in above), text]


def _flow(value: Any) -> str:
    """The value in one line of YAML."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")
