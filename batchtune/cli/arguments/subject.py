"""Is a command's argument a scenario, a model, or a server that runs already? What lies on disk decides."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from batchtune.errors import UsageError
from batchtune.scenario.examples import example_names
from batchtune.target.address import is_address
from batchtune.target.model_files import located_model, only_model_below, resolve_model

Kind = Literal["scenario", "model", "address"]


def kind_of(argument: str) -> Kind:
    """A `.yaml` is a scenario, there or not; so is what is no plain file (/dev/stdin)."""
    path = Path(argument)
    if path.suffix in (".yaml", ".yml") or (path.exists() and not path.is_file() and not path.is_dir()):
        return "scenario"
    return "address" if is_address(argument) else "model"


def model_of(argument: str) -> str:
    """What a scenario's `target.model` says for it: the path of the model, or the name of a sample model.

    Raises:
        UsageError: neither is there; the message says what was looked for.
    """
    path = Path(argument).expanduser()
    if path.exists():
        only = only_model_below(path.resolve())
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
