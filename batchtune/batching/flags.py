"""Reads and writes the parameters as `--name=value` flags.

For servers that take them so, and for people. tensorflow_model_server does not: it prints `unknown argument`
and starts with its defaults, so it needs the parameters file.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from batchtune.batching.parameters import (
    PARAMETER_NAMES,
    BatchingFile,
    BatchingParameters,
    flag_text,
    from_dict,
    to_dict,
)
from batchtune.errors import BatchingParametersError

_SWITCH = "enable_batching"
WITHIN_A_WORD = re.compile(r"(?<=\S)#")
HASH = "\ue000"
"""Replaces a `#` within a word, which begins no comment in a shell; shlex would cut the line there."""


def format_flags(parameters: BatchingParameters | None) -> str:
    """Write the parameters as flags on one line for a shell; None: `--enable_batching=false`."""
    if parameters is None:
        return "--enable_batching=false"
    words = ["--enable_batching=true"]
    words += [f"--{name}={flag_text(value)}" for name, value in to_dict(parameters).items()]
    return shlex.join(words)


def parse_flags(text: str, *, source: str, line: int = 1) -> BatchingFile:
    """Read parameters from flags that begin on line `line`, quoted as for a shell; other flags become `settings`, flags
    of the server. Batching is on unless `--enable_batching=false` is among them.

    Raises:
        BatchingParametersError: `source:line: …`: no flag, a value of another type, a flag that is misspelt or given
            twice.
    """
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for at, word in _words(text, source):
        name, equals, given = word.removeprefix("--").partition("=")
        try:
            if not word.startswith("--") or not name:
                raise BatchingParametersError(f"expected --name=value; was {word!r}")
            if name in values or name in settings:
                raise BatchingParametersError(f"--{name} is given twice", hint="keep one of them")
            if name in PARAMETER_NAMES:
                values[name] = getattr(from_dict({name: _value(name, given)}), name)
            elif name == _SWITCH:
                settings[name] = _boolean(given) if equals else True
            else:
                settings[name] = _own_flag(name, given if equals else "true")
        except BatchingParametersError as error:
            where = f"{source}:{line + at - 1}"
            raise BatchingParametersError(f"{where}: {error.message}", hint=error.hint) from error
    enabled = settings.pop(_SWITCH, True)
    parameters = BatchingParameters(**values)
    return BatchingFile(dialect="flags", parameters=parameters, enabled=enabled, settings=settings)


def _words(text: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield (line on which the word ends, word); a backslash at the end of a line continues it."""
    text = WITHIN_A_WORD.sub(HASH, text)
    stream = io.StringIO(re.sub(r" \\\n", "  \n", text))
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split = True
    try:
        for word in lexer:
            ends_line = text[: stream.tell()].endswith("\n")
            yield lexer.lineno - ends_line, word.replace(HASH, "#")
    except ValueError as error:
        raise BatchingParametersError(f"{source}:{lexer.lineno}: {error}") from error


def _value(name: str, given: str) -> Any:
    if name == "thread_pool_name":
        return given
    if name == "allowed_batch_sizes":
        return [_number(size) for size in given.split(",")]
    return _boolean(given) if given in ("true", "false") else _number(given)


def _number(given: str) -> int | str:
    """Return the number, or the text itself where it is none."""
    return int(given) if re.fullmatch(r"[-+]?\d+", given, re.ASCII) else given


def _boolean(given: str) -> bool:
    if given not in ("true", "false"):
        raise BatchingParametersError(f"--{_SWITCH} must be true or false; was {given!r}")
    return given == "true"


def _own_flag(name: str, given: str) -> str:
    """Return the value of a flag that is no batching parameter.

    Raises:
        BatchingParametersError: it names a parameters file, or its name is a parameter's but for a letter or two.
    """
    if name == "batching_parameters_file":
        raise BatchingParametersError(f"--{name}={given} names another file", hint="give that one")
    near = get_close_matches(name, (*PARAMETER_NAMES, _SWITCH), n=1, cutoff=0.85)
    if near:
        raise BatchingParametersError(
            f"--{name}: unknown batching parameter", hint=f"did you mean --{near[0]}?"
        )
    return given
