"""Can a server be told to run without batching, and if not, who asks for it?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from batchtune.batching.parameters import Configuration
from batchtune.errors import BatchingParametersError
from batchtune.scenario.spec.search import KnobValue, Space
from batchtune.scenario.spec.server_words import FILE_PLACE, JSON_PLACE, takes_file
from batchtune.scenario.spec.target import TargetSpec
from batchtune.scenario.units import problem

SWITCH: Final = "enable_batching"
UNSAYABLE: Final = "a tfserving file, all that target's commands name, cannot say no batching"
_HINT: Final = (
    "leave it out, or tell the server by {json} too, by JSON on the stdin of an apply that names no file, or by "
    "another dialect in target.render"
)


def can_be_off(target: TargetSpec) -> bool:
    """False for commands whose only word from here is a tfserving file: with none in it a server batches by its
    defaults."""
    words = [word for command in (target.launch, target.apply) for word in command or ()]
    reads_stdin = target.apply is not None and not takes_file(target.apply)
    names_json = any(JSON_PLACE in word for word in words)
    names_file = any(FILE_PLACE in word for word in words)
    return target.render != "tfserving" or not names_file or names_json or reads_stdin


def check_off(target: TargetSpec, fixed: Mapping[str, object], space: Mapping[str, Space]) -> None:
    """Raise a `problem` where no batching is fixed or searched and the target cannot be told so."""
    if can_be_off(target):
        return
    values: tuple[KnobValue, ...] = tuple(space[SWITCH].values) if SWITCH in space else ()
    for path, is_asked in (
        (("fixed", SWITCH), fixed.get(SWITCH) is False),
        (("search", "space", SWITCH), False in values),
    ):
        if is_asked:
            raise problem(UNSAYABLE, at=path, hint=_HINT)


def require_sayable(configuration: Configuration, target: TargetSpec) -> None:
    """Check that the server can be told this configuration.

    Raises:
        BatchingParametersError: it is no batching, and the target has no words for that.
    """
    if configuration.batching is None and not can_be_off(target):
        raise BatchingParametersError(UNSAYABLE, hint=_HINT)
