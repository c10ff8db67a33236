"""Reads and writes the parameters as `--name=value` flags, alone or in a script's command that starts a server.

For servers that take them so, and for people. tensorflow_model_server does not: it prints `unknown argument`
and starts with its defaults, so it needs the parameters file. A command is a `docker run`, whose server is in the
container, or a line that starts the server itself.
"""

from __future__ import annotations

import io
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any, Final

from batchtune.batching.parameters import (
    FILE_FLAG,
    PARAMETER_NAMES,
    BatchingFile,
    BatchingParameters,
    flag_text,
    from_dict,
    to_dict,
)
from batchtune.errors import BatchingParametersError

_SWITCH = "enable_batching"
_WITHIN_A_WORD = re.compile(r"(?<=\S)#")
_HASH = "\ue000"
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
    text = _WITHIN_A_WORD.sub(_HASH, text)
    stream = io.StringIO(re.sub(r" \\\n", "  \n", text))
    lexer = shlex.shlex(stream, posix=True)
    lexer.whitespace_split = True
    try:
        for word in lexer:
            ends_line = text[: stream.tell()].endswith("\n")
            yield lexer.lineno - ends_line, word.replace(_HASH, "#")
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


# A command in a script.

_WORDS_BEFORE: Final = r"(?:sudo(?:[ \t]+-\w+)*|exec|nohup|time|if|then|\w+=[^\s$`]*)"
_BEFORE: Final = rf"(?:^|(?<=[;&|({{`]))[ \t]*(?:{_WORDS_BEFORE}[ \t]+)*(?:ExecStart=)?(?:[\w./-]*/)?"
"""What may come before a command: the start of a line, list or substitution, and words that run another command."""
_RUN: Final = re.compile(_BEFORE + r"(?:docker|podman)[ \t]+(?:container[ \t]+)?run\s", re.MULTILINE)
_COMPOSE: Final = re.compile(
    _BEFORE + r"(?:(?:docker|podman)[ \t]+compose|docker-compose|podman-compose)\s", re.MULTILINE
)
_PROGRAMS: Final = r"(?:tensorflow_model_server|batchtune-model-server|tritonserver)(?![\w/.-])"
_NAMED: Final = re.compile(_PROGRAMS)
_COMMENT: Final = re.compile(r"^[ \t]*#[^\n]*", re.MULTILINE)

OF_THE_MODEL: Final = (
    *("port", "rest_api_port", "model_name", "model_base_path", "model_config_file"),
    "monitoring_config_file",
)
"""Flags that say what a server serves, and on which ports; they are not read: the scenario's target has its own."""
_OF_THE_MODEL: Final = re.compile(rf"--(?:{'|'.join(OF_THE_MODEL)})(?:=|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The arguments of a server, which begin on line `line` of their source.

    `flags`: quoted for a shell, without those of ports, model and parameters file. `file`: path of the parameters file,
    as the arguments name it (`parse_docker_run`, `parse_server_command`: on this machine); "": none. `left_out`: a
    sentence for each flag that cannot be used.
    """

    flags: str = ""
    file: str = ""
    left_out: tuple[str, ...] = ()
    line: int = 1


def is_docker_run(text: str) -> bool:
    """Whether a text holds a `docker run` (or podman) command, or one for a compose file."""
    return _RUN.search(text) is not None or _COMPOSE.search(text) is not None


def names_server(text: str) -> bool:
    """Whether a text names the program of a server: tensorflow_model_server, batchtune-model-server or tritonserver."""
    return _NAMED.search(text) is not None


def parse_docker_run(text: str, *, source: str) -> ServerArgs:
    """Read the server's flags and parameters file from the only `docker run` of a text, which may be a shell script.

    A path that begins with the working directory (`$PWD`, `$(pwd)`) or has no folder is taken to lie beside `source`.
    For Triton the parameters file is the config.pbtxt that is mounted.

    Raises:
        BatchingParametersError: `source:line: …`: no command, a second one, a compose file, a command without an image,
            or a file that is not in a mount.
    """
    text = _COMMENT.sub("", text)
    starts = list(_RUN.finditer(text))
    if not starts:
        compose = _COMPOSE.search(text)
        line = text.count("\n", 0, compose.end() if compose else 0) + 1
        raise BatchingParametersError(
            f"{source}:{line}: the server's flags are in a compose file, which batchtune does not read",
            hint="give the file of parameters that its service mounts, or its command as a docker run",
        )
    line, words = _only(starts, text, "docker run", source)
    options, args = _split(words)
    if not args:
        raise BatchingParametersError(f"{source}:{line}: docker run names no image")
    mounts = _mounts(options)
    own = next((host for host in mounts.values() if host.name == "config.pbtxt"), None)
    if own is not None and not any(word.startswith(FILE_FLAG) for word in args):
        return ServerArgs(line=line, file=str(Path(source).parent / own))
    said = server_args(args, source=source, line=line, in_container=True)
    file = said.file and str(_on_the_host(said.file, mounts, source=source, line=line))
    return replace(said, file=file)


def parse_server_command(text: str, *, source: str) -> ServerArgs:
    """Read the server's flags and parameters file from the line of a shell script or service that starts it.

    Raises:
        BatchingParametersError: `source:line: …`: no line or a second one begins with the server's program, a path
            needs a shell to be expanded, or the server is a Triton.
    """
    text = _COMMENT.sub("", text)
    starts = list(re.finditer(_BEFORE + f"(?={_PROGRAMS})", text, re.MULTILINE))
    if not starts:
        named = _NAMED.search(text)
        line = text.count("\n", 0, named.start() if named else 0) + 1
        raise BatchingParametersError(
            f"{source}:{line}: cannot read how the server is started here",
            hint="give the file of parameters itself, or a script with a line that begins with the server's program",
        )
    line, words = _only(starts, text, "server", source)
    said = server_args(words, source=source, line=line)
    if said.file.startswith("~"):
        raise _only_the_shell_knows(said.file, f"{source}:{line}")
    return replace(said, file=said.file and str(Path(source).parent / said.file))


def server_args(args: Sequence[str], *, source: str, line: int, in_container: bool = False) -> ServerArgs:
    """Split the words of a server's command line, its program first, into flags, parameters file and what cannot be
    used.

    `in_container`: whether a path in a flag is a path inside the container, and so cannot be used.

    Raises:
        BatchingParametersError: `source:line: …`: a Triton, a shell that starts the server, a variable, or a flag in
            another form than --name=value.
    """
    if any("tritonserver" in word for word in args):
        raise BatchingParametersError(
            f"{source}:{line}: a Triton's parameters are in the model's config.pbtxt", hint="give that file"
        )
    _require_plain(args[1:], where=f"{source}:{line}")
    flags = [word for word in args[1:] if word.startswith("--") and not _OF_THE_MODEL.match(word)]
    file = next((word.partition("=")[2] for word in flags if word.startswith(f"{FILE_FLAG}=")), "")
    own = [word for word in flags if not word.startswith(FILE_FLAG)]
    paths = [word for word in own if in_container and re.match(r"--[^=]+=/", word)]
    return ServerArgs(
        flags=shlex.join(word for word in own if word not in paths),
        file=file,
        left_out=tuple(f"{word} is left out: that path is the container's" for word in paths),
        line=line,
    )


def _only(starts: Sequence[re.Match[str]], text: str, what: str, source: str) -> tuple[int, list[str]]:
    """Return (line, words) of the only command of its kind; the words are those after the match in `starts`.

    Raises:
        BatchingParametersError: there is another, or its quotes do not end.
    """
    line, *others = (text.count("\n", 0, start.end()) + 1 for start in starts)
    if others:
        raise BatchingParametersError(
            f"{source}:{others[0]}: a second {what}", hint="keep one of them, in a file of its own"
        )
    command = re.split(r"(?<!\\)\n", text[starts[0].end() :], maxsplit=1)[0].replace("\\\n", " ")
    opened = text[: starts[0].start()][-1:]
    command = re.sub(r"\$\(pwd\)|`pwd`|\$\{PWD\}|\$PWD\b", ".", command)
    try:
        return line, list(_command_words(_of_substitution(command, opened)))
    except ValueError as error:
        raise BatchingParametersError(f"{source}:{line}: {error}") from error


def _of_substitution(command: str, opened: str) -> str:
    """Cut off what follows the parenthesis or the quote that ends the command's substitution; `opened` began it."""
    if opened == "`":
        return command.partition("`")[0]
    if opened != "(":
        return command
    depth = 0
    for at, character in enumerate(command):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return command[:at]
    return command


def _command_words(command: str) -> Iterator[str]:
    """Yield the words of the first command of a line: up to a pipe, a redirection, `;` or `&`."""
    # The number before a redirection is no word of the command.
    command = re.sub(r"(?<=\s)\d+(?=[<>])", "", _WITHIN_A_WORD.sub(_HASH, command))
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words = (word.replace(_HASH, "#") for word in lexer)
    return itertools.takewhile(lambda word: not word or not set(word) <= set(";&|<>"), words)


def _require_plain(args: Sequence[str], *, where: str) -> None:
    """Raise for words that would be lost: a shell's command, an unknown variable, a flag of a form that fails."""
    hint = "give the file of parameters itself, or a command whose arguments are the server's own"
    for before, word in itertools.pairwise(("", *args)):
        if re.match(r"-\w*c$", word) or " --" in word:
            raise BatchingParametersError(f"{where}: a shell in the container starts the server", hint=hint)
        if "$" in word and word not in ("$@", "$*") and not _OF_THE_MODEL.match(word):
            raise BatchingParametersError(f"{where}: {word}: its value is not known here", hint=hint)
        if re.match(r"-\w", word) or word == FILE_FLAG:
            name = word.lstrip("-")
            equals = "" if "=" in name or word != FILE_FLAG else "=PATH"
            raise BatchingParametersError(
                f"{where}: {word}: the server takes flags as --name=value", hint=f"write --{name}{equals}"
            )
        if re.match(r"--[^=]+$", before) and not word.startswith(("-", "$")):
            raise BatchingParametersError(
                f"{where}: {before} {word}: the server takes flags as --name=value",
                hint=f"write {before}={word}",
            )


def _split(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (options with their values, the words after them: image and arguments) of a `docker run`."""
    # The options of `docker run` without a value; every other has one (docker run --help).
    bare = [
        *(
            "detach",
            "disable-content-trust",
            "help",
            "init",
            "interactive",
            "no-healthcheck",
            "oom-kill-disable",
        ),
        *("privileged", "publish-all", "quiet", "read-only", "rm", "sig-proxy", "tty"),
    ]
    options: list[tuple[str, str]] = []
    rest = list(words)
    short_switches = "diPqt"
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        is_short = not word.startswith("--")
        if is_short and name[:1] not in short_switches and len(name) > 1:  # -v/host:/inside
            options.append((name[0], word[2:]))
        elif equals or name in bare or (is_short and set(name) <= set(short_switches)):
            options.append((name, value))
        else:
            options.append((name, rest.pop(0) if rest else ""))
    return options, rest


def _mounts(options: Sequence[tuple[str, str]]) -> Mapping[PurePosixPath, Path]:
    """Return what is mounted: path in the container -> path on the host."""
    return dict(
        mount for name, value in options if name in ("v", "volume", "mount") for mount in _mount(name, value)
    )


def _mount(name: str, value: str) -> Iterator[tuple[PurePosixPath, Path]]:
    if name != "mount":
        host, colon, inside = value.partition(":")
        if colon:
            yield PurePosixPath(inside.partition(":")[0]), Path(host)
        return
    fields = dict(part.partition("=")[::2] for part in value.split(","))
    host = fields.get("source") or fields.get("src") or ""
    inside = fields.get("target") or fields.get("destination") or fields.get("dst") or ""
    if host and inside:
        yield PurePosixPath(inside), Path(host)


def _on_the_host(named: str, mounts: Mapping[PurePosixPath, Path], *, source: str, line: int) -> Path:
    inside = PurePosixPath(named)
    for place in (inside, *inside.parents):
        if place not in mounts:
            continue
        if re.search(r"[$`]|^~", str(mounts[place])):  # a variable, a command, the home
            raise _only_the_shell_knows(mounts[place], f"{source}:{line}")
        return Path(source).parent / mounts[place] / inside.relative_to(place)
    raise BatchingParametersError(
        f"{source}:{line}: no --mount or --volume holds {named}, which {FILE_FLAG} names",
        hint="give the file itself, as it lies on this machine",
    )


def _only_the_shell_knows(path: Path | str, where: str) -> BatchingParametersError:
    return BatchingParametersError(
        f"{where}: {path} depends on the shell",
        hint="write the path out, or give the file itself",
    )
