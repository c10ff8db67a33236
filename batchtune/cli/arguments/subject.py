"""Is a command's argument a scenario, a model, or a server that runs already? What lies on disk decides."""

from __future__ import annotations

import json
import math
import os.path
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from batchtune.errors import UsageError
from batchtune.scenario.examples import example_names
from batchtune.scenario.reader import ScenarioText, scenario_text
from batchtune.target.address import is_address
from batchtune.target.model_files import located_model, only_model_below, readable, resolve_model

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


Kind = Literal["scenario", "model", "address"]


def kind_of(argument: str) -> Kind:
    """A `.yaml` is a scenario, there or not; so is what is no plain file (/dev/stdin).

    Raises:
        UsageError: the path cannot be looked at.
    """
    if Path(argument).suffix in (".yaml", ".yml") or _is_stream(argument):
        return "scenario"
    return "address" if is_address(argument) else "model"


def scenario_source(argument: str) -> Path | ScenarioText:
    """The scenario's file; of a stream, which can be read once, what it says.

    Raises:
        ScenarioError: a stream that is no text.
    """
    if not _is_stream(argument):
        return Path(argument)
    return replace(scenario_text(argument), directory=Path())


def model_of(argument: str) -> str:
    """What a scenario's `target.model` says for it: the path of the model, or the name of a sample model.

    Raises:
        UsageError: neither is there; the message says what was looked for.
    """
    path = Path(argument).expanduser()
    with readable(path):
        if path.exists():
            only = only_model_below(Path(os.path.abspath(path)))  # noqa: PTH100  # a link keeps its own name
            return str(located_model(argument) if only is None else only)
    if "/" in argument:
        return str(located_model(argument))
    try:
        resolve_model(argument)
    except UsageError as error:
        hint = error.hint
        if argument in example_names():
            hint = f"`batchtune init --example {argument}` writes that example here"
        raise UsageError(
            f"{argument!r} is no scenario (.yaml), model file or directory, HOST:PORT/MODEL, or sample model",
            hint=hint,
        ) from error
    return argument


def _is_stream(argument: str) -> bool:
    path = Path(argument)
    # A file that is redirected there is one to the system, under a name that says nothing.
    streams = ("/dev/stdin", "/dev/fd", "/proc")
    if any(path.is_relative_to(stream) for stream in streams):
        return True
    with readable(path):
        return path.exists() and not path.is_file() and not path.is_dir()
