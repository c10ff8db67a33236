"""Is a command's argument a scenario, a model, or a server that runs already? What lies on disk decides."""

from __future__ import annotations

import os.path
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from batchtune.errors import UsageError
from batchtune.scenario.examples import example_names
from batchtune.scenario.reader import ScenarioText, scenario_text
from batchtune.target.address import is_address
from batchtune.target.model_files import located_model, only_model_below, readable, resolve_model

Kind = Literal["scenario", "model", "address"]

_STREAMS: Final = ("/dev/stdin", "/dev/fd", "/proc")
"""A file that is redirected there is one to the system, under a name that says nothing."""


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
    if any(path.is_relative_to(stream) for stream in _STREAMS):
        return True
    with readable(path):
        return path.exists() and not path.is_file() and not path.is_dir()
