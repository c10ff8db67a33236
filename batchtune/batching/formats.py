"""Reads a file of batching parameters, whichever server it was written for.

What is in it decides, not only its name: TensorFlow Serving's text proto, a Triton model's config.pbtxt, Cortex's API
specification, Kubernetes manifests as `k8s` and `kserve` write them or `kubectl get` tells them, a script with a
`docker run` or a line that starts a server, or flags.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from batchtune.batching.cortex import parse_cortex
from batchtune.batching.flags import (
    OF_THE_MODEL,
    ServerArgs,
    is_docker_run,
    names_server,
    parse_docker_run,
    parse_flags,
    parse_server_command,
)
from batchtune.batching.kubernetes import parse_manifests
from batchtune.batching.parameters import (
    PARAMETER_NAMES,
    PER_MODEL_FLAG,
    SWITCH_FLAG,
    BatchingFile,
    BatchingParameters,
    FileDialect,
    require_sensible,
)
from batchtune.batching.tfserving_file import parse_tfserving_text
from batchtune.batching.triton_config import MODEL_FIELDS, parse_config_pbtxt
from batchtune.errors import BatchingParametersError

_COMMENT: Final = re.compile(r"#[^\n]*")
_TRITON: Final = re.compile(
    rf"(?<![\w\"'])(?:{'|'.join(name for name in MODEL_FIELDS if name != 'max_batch_size')})\s*[:{{\[<]"
)


def read_batching_file(path: Path) -> BatchingFile:
    """Read the batching parameters of a file in any of the known formats.

    Raises:
        BatchingParametersError: the file cannot be read, or has something that its server would not understand, refuse,
            or do otherwise; then with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BatchingParametersError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BatchingParametersError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return parse_batching(text, source=str(path))


def parse_batching(text: str, *, source: str) -> BatchingFile:
    """Read the batching parameters of a text in any of the known formats; `source` names it in errors.

    Raises:
        BatchingParametersError: `source:line: …`: its server would not understand it, refuse it, or do otherwise than
            it says.
    """
    try:
        file = _parsed(text, source)
    except RecursionError as error:
        raise BatchingParametersError(f"{source}: nested too deeply to be read") from error
    try:
        require_sensible(file.parameters)
    except BatchingParametersError as error:
        raise _at_its_line(error, text, source) from error
    return file


def _at_its_line(error: BatchingParametersError, text: str, source: str) -> BatchingParametersError:
    """Return the error with a place in front: the last line that has the parameter which the error names first."""
    said = f"{error.message} {error.hint}"
    name = min((name for name in PARAMETER_NAMES if name in said), key=said.index)
    lines = [line for line, words in enumerate(_COMMENT.sub("", text).splitlines(), 1) if name in words]
    key = "" if name in error.message else f"{name}: "
    where = f"{source}:{lines[-1]}" if lines else source
    return BatchingParametersError(f"{where}: {key}{error.message}", hint=error.hint)


def _parsed(text: str, source: str) -> BatchingFile:
    bare = _COMMENT.sub("", text)
    if is_docker_run(bare):
        return _of_command(parse_docker_run(text, source=source), source, dialect="docker")
    if re.search(r"(?:^|[{,]\s*)(['\"]?)apiVersion\1\s*:", bare, re.MULTILINE):
        return _of_manifests(text, source)
    compose = re.search(r"^services *:", bare, re.MULTILINE)
    if compose is not None:
        line = bare.count("\n", 0, compose.start()) + 1
        raise BatchingParametersError(
            f"{source}:{line}: a compose file is not read",
            hint="give the file of parameters that its service mounts, or its command as a docker run",
        )
    keys = "server_side_batching|processes_per_replica|threads_per_process"
    is_cortex = re.search(rf"^[ -]*(?:{keys}) *:", bare, re.MULTILINE)
    if is_cortex or Path(source).suffix in (".yaml", ".yml"):
        return parse_cortex(text, source=source)
    if bare.lstrip().startswith("--"):
        flags = parse_flags(text, source=source)
        own = {name: value for name, value in flags.settings.items() if name not in OF_THE_MODEL}
        return _without_per_model(replace(flags, settings=own))
    if names_server(bare):
        return _of_command(parse_server_command(text, source=source), source, dialect="flags")
    return _of_pbtxt(text, source, named=Path(source).name)


def _of_command(command: ServerArgs, source: str, *, dialect: FileDialect) -> BatchingFile:
    """Combine the flags of a command with the parameters of the file that it names."""
    try:
        file = read_batching_file(Path(command.file)) if command.file else None
    except BatchingParametersError as error:
        where = f"{source}:{command.line}"
        raise BatchingParametersError(f"{where}: {error.message}", hint=error.hint) from error
    return _with_flags(file, command, source=source, dialect=dialect)


def _of_manifests(text: str, source: str) -> BatchingFile:
    manifests = parse_manifests(text, source=source)
    file = None
    if manifests.file is not None and manifests.enabled:
        file = _of_pbtxt(manifests.file.text, manifests.file_source, named=manifests.file.name)
    read = _with_flags(file, manifests.arguments, source=source, dialect="kubernetes")
    return read if read.dialect == "triton" else replace(read, enabled=manifests.enabled)


def _with_flags(
    file: BatchingFile | None, arguments: ServerArgs, *, source: str, dialect: FileDialect
) -> BatchingFile:
    """Combine a server's flags with the file that they name; a Triton's file is returned as it is.

    Raises:
        BatchingParametersError: both have batching parameters.
    """
    if file is not None and file.dialect == "triton":
        return file
    flags = parse_flags(arguments.flags, source=source, line=arguments.line)
    if file is not None and flags.parameters != BatchingParameters():
        raise BatchingParametersError(
            f"{source}:{arguments.line}: batching parameters are in the command and in its file",
            hint="keep the file's",
        )
    read = replace(
        flags,
        dialect=dialect,
        parameters=flags.parameters if file is None else file.parameters,
        enabled=SWITCH_FLAG in arguments.flags and flags.enabled,
        notes=arguments.left_out,
    )
    return _without_per_model(read)


def _without_per_model(file: BatchingFile) -> BatchingFile:
    """Drop the flag PER_MODEL_FLAG, by which a server would ignore these parameters; add a note where it was on."""
    settings = {name: value for name, value in file.settings.items() if name != PER_MODEL_FLAG}
    on = file.settings.get(PER_MODEL_FLAG, "false") != "false"
    note = f"--{PER_MODEL_FLAG} is left out: what each model's own batching_params.pbtxt says is not read"
    return replace(file, settings=settings, notes=(*file.notes, *((note,) if on else ())))


def _of_pbtxt(text: str, source: str, *, named: str) -> BatchingFile:
    if named == "config.pbtxt" or _TRITON.search(_COMMENT.sub("", text)):
        return parse_config_pbtxt(text, source=source)
    return BatchingFile(dialect="tfserving", parameters=parse_tfserving_text(text, source=source))
