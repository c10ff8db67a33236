"""Reads a file of batching parameters, whichever server it was written for.

What is in it decides, not only its name: TensorFlow Serving's text proto, a Triton model's config.pbtxt, Cortex's API
specification, Kubernetes manifests as `k8s` and `kserve` write them or `kubectl get` tells them, a script with a
`docker run` or a line that starts a server, or flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from batchtune.batching import text_proto
from batchtune.batching.cortex import parse_cortex
from batchtune.batching.docker_run import (
    OF_THE_MODEL,
    ServerCommand,
    ServerWords,
    is_docker_run,
    names_server,
    parse_docker_run,
    parse_server_command,
)
from batchtune.batching.flags import parse_flags
from batchtune.batching.kubernetes import parse_manifests
from batchtune.batching.parameters import (
    PARAMETER_NAMES,
    PER_MODEL_FLAG,
    SENSIBLE_MOST,
    SWITCH_FLAG,
    UINT32_MAX,
    BatchingFile,
    BatchingParameters,
    FileDialect,
    did_you_mean,
    require_sensible,
)
from batchtune.batching.text_proto import Field, Message
from batchtune.batching.tfserving_file import parse_tfserving_text
from batchtune.batching.triton_words import ACTIONS
from batchtune.errors import BatchingParametersError

# What a config.pbtxt says of batching, and what of it is left aside.
#
# Every field of the file must be one of ModelConfig's (model_config.proto); those that have nothing to do with batching
# are passed over.


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MODEL_FIELDS: Final = _words(
    "name platform backend runtime version_policy max_batch_size input output batch_input batch_output "
    "optimization dynamic_batching sequence_batching ensemble_scheduling instance_group "
    "default_model_filename cc_model_filenames metric_tags parameters model_warmup model_operations "
    "model_transaction_policy model_repository_agents response_cache model_metrics"
)
_DYNAMIC_FIELDS: Final = _words(
    "preferred_batch_size max_queue_delay_microseconds preserve_ordering priority_levels "
    "default_priority_level default_queue_policy priority_queue_policy"
)
_GROUP_FIELDS: Final = _words(
    "name kind count rate_limiter gpus secondary_devices profile passive host_policy"
)
_QUEUE_FIELDS: Final = _words(
    "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size"
)


def parse_config_pbtxt(text: str, *, source: str) -> BatchingFile:
    """Read the batching part of a Triton model's config.pbtxt; without `dynamic_batching` batching is off.

    Raises:
        BatchingParametersError: `source:line: …`: a field that ModelConfig lacks, a value of another type, another
            batcher than the dynamic one, or a model whose tensors have no batch dimension.
    """
    fields = _known(text_proto.parse_text_proto(text, source=source), MODEL_FIELDS, "ModelConfig", source)
    other_batchers = ("sequence_batching", "ensemble_scheduling")
    for field in fields:
        if field.name in other_batchers:
            raise text_proto.failure(source, field.line, f"{field.name}: it is no dynamic batcher")
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    notes: list[str] = []
    size = _last(fields, "max_batch_size")
    if size is not None:
        values["max_batch_size"] = _number(size, "max_batch_size", source)
        if values["max_batch_size"] == 0:
            raise text_proto.failure(
                source, size.line, "max_batch_size 0: the model's tensors have no batch dimension"
            )
    counts = [_count(group, source) for group in fields if group.name == "instance_group"]
    if counts:
        values["num_batch_threads"] = max(counts)
    dynamic = _last(fields, "dynamic_batching")
    aside = ("priority_levels", "default_priority_level", "priority_queue_policy")
    if dynamic is not None:
        message = text_proto.message(dynamic, source=source)
        for field in _known(message, _DYNAMIC_FIELDS, "dynamic_batching", source):
            if field.name == "max_queue_delay_microseconds":
                values["batch_timeout_micros"] = _number(field, "batch_timeout_micros", source)
            elif field.name in aside:
                notes.append(f"{source}:{field.line}: {field.name} stays out: no search changes priorities")
            else:
                _set(settings, field, source)
    return BatchingFile(
        dialect="triton",
        parameters=BatchingParameters(**values),
        enabled=dynamic is not None,
        settings=settings,
        notes=tuple(notes),
    )


def _set(settings: dict[str, Any], field: Field, source: str) -> None:
    """Add what a field of `dynamic_batching` says to the settings, in a scenario's words."""
    if field.name == "preferred_batch_size":
        size = text_proto.whole_number(field, source=source, least=1, most=SENSIBLE_MOST["max_batch_size"])
        settings.setdefault(field.name, []).append(size)
    elif field.name == "preserve_ordering":
        settings[field.name] = text_proto.boolean(field, source=source)
    else:
        message = text_proto.message(field, source=source)
        settings |= {
            f"{field.name}.{below.name}": _queue_value(below, source)
            for below in _known(message, _QUEUE_FIELDS, field.name, source)
        }


def _queue_value(field: Field, source: str) -> int | bool | str:
    match field.name:
        case "timeout_action":
            word = "" if isinstance(field.value, Message) else field.value.text
            if word not in ACTIONS:
                raise text_proto.failure(
                    source,
                    field.line,
                    f"{field.name} must be {' or '.join(ACTIONS)}; was {word or 'a block'}",
                )
            return word
        case "allow_timeout_override":
            return text_proto.boolean(field, source=source)
        case "max_queue_size":
            return text_proto.whole_number(field, source=source, least=0, most=UINT32_MAX)
        case _:
            return _number(field, "batch_timeout_micros", source)


def _count(group: Field, source: str) -> int:
    fields = _known(text_proto.message(group, source=source), _GROUP_FIELDS, "instance_group", source)
    count = _last(fields, "count")
    return max(1, 0 if count is None else _number(count, "num_batch_threads", source))


def _number(field: Field, parameter: str, source: str) -> int:
    """A number from 0 to the most of TensorFlow Serving's parameter that it stands for."""
    return text_proto.whole_number(field, source=source, least=0, most=SENSIBLE_MOST[parameter])


def _last(fields: Iterable[Field], name: str) -> Field | None:
    return next((field for field in reversed(list(fields)) if field.name == name), None)


def _known(message: Message, names: Iterable[str], where: str, source: str) -> list[Field]:
    """The fields of a message, all of them known.

    Raises:
        BatchingParametersError: one is not; the hint says which was meant.
    """
    return list(_checked(message, tuple(names), where, source))


def _checked(message: Message, names: tuple[str, ...], where: str, source: str) -> Iterator[Field]:
    for field in message.fields:
        if field.name not in names:
            raise text_proto.failure(
                source,
                field.line,
                f"{where} has no field {field.name!r}",
                hint=did_you_mean(field.name, names),
            )
        yield field


_COMMENT: Final = re.compile(r"#[^\n]*")
_CORTEX: Final = re.compile(
    r"^[ -]*(?:server_side_batching|processes_per_replica|threads_per_process) *:", re.MULTILINE
)
_MANIFEST: Final = re.compile(r"(?:^|[{,]\s*)(['\"]?)apiVersion\1\s*:", re.MULTILINE)
_COMPOSE: Final = re.compile(r"^services *:", re.MULTILINE)
_TRITON: Final = re.compile(
    rf"(?<![\w\"'])(?:{'|'.join(name for name in MODEL_FIELDS if name != 'max_batch_size')})\s*[:{{\[<]"
)


def read_batching_file(path: Path) -> BatchingFile:
    """Read the batching parameters of a file, whichever server it was written for.

    Raises:
        BatchingParametersError: it cannot be read; else as `parse_batching`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BatchingParametersError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BatchingParametersError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return parse_batching(text, source=str(path))


def parse_batching(text: str, *, source: str) -> BatchingFile:
    """Read the batching parameters of a text, whichever server it was written for; `source` names it in errors.

    Raises:
        BatchingParametersError: `source:line: …` for what its server would not understand, refuse, or do otherwise.
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
    """The error with the last line that has the parameter which it names first."""
    said = f"{error.message} {error.hint}"
    name = min((name for name in PARAMETER_NAMES if name in said), key=said.index)
    lines = [line for line, words in enumerate(_COMMENT.sub("", text).splitlines(), 1) if name in words]
    key = "" if name in error.message else f"{name}: "
    where = f"{source}:{lines[-1]}" if lines else source
    return BatchingParametersError(f"{where}: {key}{error.message}", hint=error.hint)


def _parsed(text: str, source: str) -> BatchingFile:
    bare = _COMMENT.sub("", text)
    if is_docker_run(bare):
        run = parse_docker_run(text, source=source)
        return _of_command(run, source, dialect="docker")
    if _MANIFEST.search(bare):
        return _of_manifests(text, source)
    compose = _COMPOSE.search(bare)
    if compose is not None:
        line = bare.count("\n", 0, compose.start()) + 1
        raise BatchingParametersError(
            f"{source}:{line}: a compose file is not read",
            hint="give the file of parameters that its service mounts, or its command as a docker run",
        )
    if Path(source).suffix in (".yaml", ".yml") or _CORTEX.search(bare):
        return parse_cortex(text, source=source)
    if bare.lstrip().startswith("--"):
        flags = parse_flags(text, source=source)
        own = {name: value for name, value in flags.settings.items() if name not in OF_THE_MODEL}
        return _without_per_model(replace(flags, settings=own))
    if names_server(bare):
        return _of_command(parse_server_command(text, source=source), source, dialect="flags")
    return _of_pbtxt(text, source, named=Path(source).name)


def _of_command(command: ServerCommand, source: str, *, dialect: FileDialect) -> BatchingFile:
    """The flags of a command, with the parameters of the file that it names."""
    try:
        file = None if command.file is None else read_batching_file(command.file)
    except BatchingParametersError as error:
        where = f"{source}:{command.words.line}"
        raise BatchingParametersError(f"{where}: {error.message}", hint=error.hint) from error
    return _with_flags(file, command.words, source=source, dialect=dialect)


def _of_manifests(text: str, source: str) -> BatchingFile:
    manifests = parse_manifests(text, source=source)
    file = None
    if manifests.file is not None and manifests.enabled:
        file = _of_pbtxt(manifests.file.text, manifests.file_source, named=manifests.file.name)
    read = _with_flags(file, manifests.words, source=source, dialect="kubernetes")
    return read if read.dialect == "triton" else replace(read, enabled=manifests.enabled)


def _with_flags(
    file: BatchingFile | None, words: ServerWords, *, source: str, dialect: FileDialect
) -> BatchingFile:
    """What a server is told by its flags and by the file that they name; a Triton's file says it all."""
    if file is not None and file.dialect == "triton":
        return file
    flags = parse_flags(words.flags, source=source, line=words.line)
    if file is not None and flags.parameters != BatchingParameters():
        raise BatchingParametersError(
            f"{source}:{words.line}: batching parameters stand in the command and in its file",
            hint="keep the file's",
        )
    read = replace(
        flags,
        dialect=dialect,
        parameters=flags.parameters if file is None else file.parameters,
        enabled=SWITCH_FLAG in words.flags and flags.enabled,
        notes=words.left_out,
    )
    return _without_per_model(read)


def _without_per_model(file: BatchingFile) -> BatchingFile:
    """Without the flag by which a server would not hear what it is given here."""
    settings = {name: value for name, value in file.settings.items() if name != PER_MODEL_FLAG}
    on = file.settings.get(PER_MODEL_FLAG, "false") != "false"
    note = f"--{PER_MODEL_FLAG} is left out: what each model's own batching_params.pbtxt says is not read"
    return replace(file, settings=settings, notes=(*file.notes, *((note,) if on else ())))


def _of_pbtxt(text: str, source: str, *, named: str) -> BatchingFile:
    if named == "config.pbtxt" or _TRITON.search(_COMMENT.sub("", text)):
        return parse_config_pbtxt(text, source=source)
    return BatchingFile(dialect="tfserving", parameters=parse_tfserving_text(text, source=source))
