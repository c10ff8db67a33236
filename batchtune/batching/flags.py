"""How are the parameters written as `--name=value` flags?

For servers that take them so, and for people. tensorflow_model_server does not: it prints `unknown argument`
and starts with its defaults, so it needs the parameters file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from batchtune.batching.parameters import (
    PARAMETER_NAMES,
    BatchingParameters,
    did_you_mean,
    from_dict,
    to_dict,
)
from batchtune.errors import BatchingParametersError

_FLAG = re.compile(r"--?([A-Za-z_][\w-]*)(?:=(.*))?", re.DOTALL)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_BOOLEANS = {"pad_variable_length_inputs", "enable_large_batch_splitting", "enable_batching"}


def format_flags(parameters: BatchingParameters | None) -> str:
    """One line for a shell; None gives `--enable_batching=false`."""
    if parameters is None:
        return "--enable_batching=false"
    words = ["--enable_batching=true"]
    for name, value in to_dict(parameters).items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"--{name}={shown.lower() if isinstance(value, bool) else shown}")
    return shlex.join(words)


def parse_flags(flags: str | Sequence[str], *, source: str = "flags") -> BatchingParameters | None:
    """The parameters of `--name=value` words (or one line of them); None for `--enable_batching=false`.

    Raises:
        BatchingParametersError: an unknown flag, a flag given twice, or a value of another type.
    """
    try:
        words = shlex.split(flags) if isinstance(flags, str) else list(flags)
    except ValueError as error:
        raise BatchingParametersError(f"{source}: {error}") from error
    values: dict[str, Any] = {}
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is None:
            raise BatchingParametersError(f"{source}: expected --name=value; was {word!r}")
        name = match[1].replace("-", "_")
        if name in values:
            raise BatchingParametersError(f"{source}: --{name} is given twice")
        if name not in {*PARAMETER_NAMES, "enable_batching"}:
            raise BatchingParametersError(
                f"{source}: unknown flag {word!r}", hint=did_you_mean(name, PARAMETER_NAMES)
            )
        values[name] = _value(name, match[2], source)
    if values.pop("enable_batching", True):
        return from_dict(values)
    if values:
        raise BatchingParametersError(f"{source}: --enable_batching=false goes with no other flag")
    return None


def _value(name: str, text: str | None, source: str) -> bool | int | str | list[int]:
    if name in _BOOLEANS:
        if text is None:
            return True
        if text.lower() not in _TRUTH:
            raise BatchingParametersError(f"{source}: --{name} must be true or false; was {text!r}")
        return _TRUTH[text.lower()]
    if text is None:
        raise BatchingParametersError(f"{source}: --{name} needs a value", hint=f"write --{name}=…")
    if name == "thread_pool_name":
        return text
    try:
        if name == "allowed_batch_sizes":
            return [int(size) for size in text.split(",")]
        return int(text)
    except ValueError as error:
        raise BatchingParametersError(f"{source}: --{name} must be a whole number; was {text!r}") from error
