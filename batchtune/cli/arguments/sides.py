"""Which words say how the two sides of a check differ?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from batchtune.errors import UsageError

BASELINE, CANDIDATE = "baseline", "candidate"
SIDES: Final = (BASELINE, CANDIDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideWords:
    """What the command line says of one side; None or empty: as the scenario says."""

    model: str | None = None
    ref: str | None = None
    image: str | None = None
    command: str | None = None
    batching: str | None = None
    flag: Sequence[str] = ()
    set: Sequence[str] = ()


_WORDS: Final[Mapping[str, tuple[Any, str, str]]] = {
    "model": (str | None, "PATH", "The model of the {side}. Default: the scenario's."),
    "ref": (str | None, "GIT_REF", "That model as it is in a git commit, e.g. {ref}."),
    "image": (str | None, "IMAGE", "The container image that serves the {side}."),
    "command": (str | None, "COMMAND", "The server of the {side}, as target.command, in one word."),
    "batching": (
        str | None,
        "FILE",
        "Batching parameters of the {side}: TensorFlow Serving's file, config.pbtxt, …",
    ),
    "flag": (list[str] | None, "NAME=VALUE", "A flag of the {side}'s server; may be repeated."),
    "set": (list[str] | None, "KEY=VALUE", "A key of the scenario, for the {side} only; may be repeated."),
}
_REFS: Final = {BASELINE: "main", CANDIDATE: "HEAD"}


def takes_sides(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--baseline-model` to `--candidate-set`; as `sides` it gets the words of each side."""

    @functools.wraps(command)
    def with_sides(**given: Any) -> None:
        sides = {
            side: _side_words(side, {word: given.pop(f"{side}_{word}") for word in _WORDS}) for side in SIDES
        }
        command(**given, sides=sides)

    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "sides"]
    for side in SIDES:
        for word, (kind, metavar, text) in _WORDS.items():
            help_text = text.format(side=side, ref=_REFS[side])
            spelt = typer.Option(f"--{side}-{word}", metavar=metavar, help=help_text)
            option = Annotated[kind, spelt]  # type: ignore[valid-type]
            name = f"{side}_{word}"
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
            )
    with_sides.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_sides


def _side_words(side: str, given: Mapping[str, str | Sequence[str] | None]) -> SideWords:
    """An empty word would be the scenario's own: a check of a model with itself, which passes."""
    words: dict[str, Any] = {
        word: value for word, value in given.items() if value is not None and value != []
    }
    for word, value in words.items():
        texts = [value] if isinstance(value, str) else value
        if not all(text.strip() for text in texts):
            raise UsageError(
                f"--{side}-{word}: is empty",
                hint="give it a value (is a variable of the shell unset?), or leave it out: as the scenario says",
            )
    for key, equals, value in (text.partition("=") for text in words.get("set", ())):
        if equals and not value.strip():
            from batchtune.scenario.yaml_document import empty_value

            raise empty_value(key.strip(), option=f"--{side}-set")
    for name, equals, value in (text.partition("=") for text in words.get("flag", ())):
        if equals and not value.strip():
            raise UsageError(
                f"--{side}-flag: {name.strip()} is empty", hint="give it a value, or leave it out"
            )
    return SideWords(**words)
