"""What do `--rest`, `--rows`, `--shape` and `--range` say of the requests, of a scenario or of a bare model?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from batchtune.errors import UsageError

_SEPARATOR: Final = re.compile(r"[x×,]")


def request_overrides(
    *, rest: bool, rows: int | None, shapes: Sequence[str] | None, ranges: Sequence[str] | None
) -> list[str]:
    """The same as `--set` of a scenario.

    Raises:
        UsageError: a shape or a range that is none.
    """
    overrides = ["request.protocol=rest"] if rest else []
    if rows is not None:
        overrides.append(f"request.rows={rows}")
    if shapes:
        named = dict(_named("--shape", "NAME=128, or NAME=224x224x3", shapes, _dimensions))
        overrides.append(f"request.shapes={json.dumps(named)}")
    if ranges:
        by_input = dict(_named("--range", "NAME=0:20000", ranges, _limits))
        overrides.append(f"request.inputs={json.dumps({'random': {'by_input': by_input}})}")
    return overrides


def _named(option: str, expected: str, texts: Iterable[str], read: Any) -> Iterable[tuple[str, Any]]:
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not (name and equals):
                raise ValueError
            yield name.strip(), read(value.strip())
        except ValueError as error:
            raise UsageError(f"{option}: expected {expected}; was {text!r}") from error


def _dimensions(text: str) -> list[int]:
    """Those after the batch dimension; none: a scalar a row."""
    sizes = [int(size) for size in _SEPARATOR.split(text)] if text else []
    if any(size < 1 for size in sizes):
        raise ValueError
    return sizes


def _limits(text: str) -> dict[str, Any]:
    """`LOW:HIGH`; whole numbers where both are."""
    low, colon, high = text.partition(":")
    if not colon or not -math.inf < float(low) < float(high) < math.inf:
        raise ValueError
    if all(re.fullmatch(r"\s*-?\d+\s*", limit) for limit in (low, high)):
        return {"low": int(low), "high": int(high), "whole": True}
    return {"low": float(low), "high": float(high)}
