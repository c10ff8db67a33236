"""Reads and writes TF Serving's `--batching_parameters_file`.

The text format of `BatchingParameters` (`session_bundle_config.proto`): most fields are wrapper messages and
need `{ value: N }`; `allowed_batch_sizes` and `pad_variable_length_inputs` are plain.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any, Literal

from batchtune.batching import text_proto
from batchtune.batching.cortex import format_cortex
from batchtune.batching.flags import format_flags
from batchtune.batching.kubernetes import ParametersFile, format_k8s, format_kserve
from batchtune.batching.parameters import (
    PARAMETER_NAMES,
    BatchingParameters,
    Configuration,
    did_you_mean,
    to_dict,
)
from batchtune.batching.text_proto import Field, Message, Scalar
from batchtune.batching.triton_config import format_triton


def parse_tfserving_text(text: str, *, source: str = "<string>") -> BatchingParameters:
    """Read a batching parameters file, as TF Serving's protobuf parser does; `validate` checks the rules between
    values.

    Raises:
        BatchingParametersError: `source:line: …`: no text proto, an unknown parameter, one given twice, a value of
            another form; for `max_batch_size: 128` the hint says how to write it.
    """
    values: dict[str, Any] = {}
    sizes: list[int] = []
    message = text_proto.parse_text_proto(text, source=source)
    for name, line in message.empty_lists:
        if name != "allowed_batch_sizes":
            raise text_proto.failure(source, line, f"{name} takes one value, not a list")
    for field in message.fields:
        if field.name not in PARAMETER_NAMES:
            raise text_proto.failure(
                source,
                field.line,
                f"unknown batching parameter {field.name!r}",
                hint=did_you_mean(field.name, PARAMETER_NAMES),
            )
        if field.name == "allowed_batch_sizes":
            sizes.append(text_proto.whole_number(_plain(field, source), source=source))
            continue
        if field.name in values:
            raise text_proto.failure(
                source, field.line, f"{field.name} is given twice", hint="keep one of them"
            )
        values[field.name] = _single(field, source)
    return BatchingParameters(**values, allowed_batch_sizes=tuple(sizes))


def format_tfserving_text(parameters: BatchingParameters) -> str:
    """Write a batching parameters file: one line a field, only the fields that are present."""
    lines: list[str] = []
    for name, value in to_dict(parameters).items():
        if name == "allowed_batch_sizes":
            lines.extend(f"{name}: {size}" for size in value)
        elif name == "pad_variable_length_inputs":
            lines.append(f"{name}: {_literal(value)}")
        else:
            lines.append(f"{name} {{ value: {_literal(value)} }}")
    return "".join(f"{line}\n" for line in lines)


def _single(field: Field, source: str) -> int | bool | str:
    if field.listed:
        raise text_proto.failure(source, field.line, f"{field.name} takes one value, not a list")
    if field.name == "pad_variable_length_inputs":
        return text_proto.boolean(_plain(field, source), source=source)
    return _wrapped(field, source)


def _wrapped(field: Field, source: str) -> int | bool | str:
    empty_wrappers: dict[str, bool | str] = {"thread_pool_name": "", "enable_large_batch_splitting": False}
    if isinstance(field.value, Scalar):
        wanted = f"{field.name} {{ value: {text_proto.described(field.value)} }}"
        raise text_proto.failure(
            source,
            field.line,
            f"{field.name} is a wrapper message and takes a block",
            hint=f"write it as {wanted}",
        )
    inner = field.value.fields
    if field.value.empty_lists or any(entry.listed for entry in inner):
        raise text_proto.failure(source, field.line, f"{field.name} holds one value, not a list")
    for entry in inner:
        if entry.name != "value":
            raise text_proto.failure(
                source, entry.line, f"{field.name} holds only 'value', not {entry.name!r}"
            )
    if len(inner) > 1:
        raise text_proto.failure(source, inner[1].line, f"{field.name} holds more than one value")
    if not inner:
        return empty_wrappers.get(field.name, 0)
    value = Field(name=field.name, value=inner[0].value, line=inner[0].line)
    if field.name == "thread_pool_name":
        return text_proto.string(value, source=source)
    if field.name == "enable_large_batch_splitting":
        return text_proto.boolean(value, source=source)
    return text_proto.whole_number(value, source=source)


def _plain(field: Field, source: str) -> Field:
    if isinstance(field.value, Message):
        raise text_proto.failure(
            source,
            field.line,
            f"{field.name} is a plain field and takes no block",
            hint=f"write it as {field.name}: {_first_value(field.value)}",
        )
    return field


def _first_value(block: Message) -> str:
    scalars = [field.value for field in block.fields if isinstance(field.value, Scalar)]
    return text_proto.described(scalars[0]) if scalars else "…"


def _literal(value: int | bool | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        return f'"{escaped}"'
    return str(value)


RenderedDialect = Literal["tfserving", "triton", "cortex", "flags", "k8s", "kserve", "json", "http"]


def rendered(
    configuration: Configuration,
    dialect: RenderedDialect,
    *,
    model: str,
    rows_per_request: int = 1,
    file: ParametersFile | None = None,
) -> str:
    """Write a configuration in the dialect of a server or tool; a comment names what the dialect cannot express.

    `model`: the name under which it is served. `file`: the file that the server reads, for `k8s` and `kserve`; None:
    TensorFlow Serving's parameters file.

    Raises:
        BatchingParametersError: the dialect cannot express the configuration at all.
    """
    batching, flags = configuration.batching, configuration.flags
    match dialect:
        case "tfserving":
            return parameters_file(configuration).text
        case "triton":
            alien = () if configuration.dialect == "triton" else flags
            return without_counterpart(alien, "Triton") + format_triton(
                batching, rows_per_request=rows_per_request
            )
        case "cortex":
            return without_counterpart(flags, "Cortex") + format_cortex(batching)
        case "flags":
            own = [shlex.quote(f"--{name}={value}") for name, value in flags]
            return " ".join([format_flags(batching), *own]) + "\n"
        case "k8s":
            return format_k8s(configuration, file or parameters_file(configuration), model=model)
        case "kserve":
            return format_kserve(configuration, file or parameters_file(configuration), model=model)
        case "json" if configuration.dialect != "http":
            return json.dumps(configuration.to_dict(), indent=2) + "\n"
        case "json" | "http":
            return json.dumps(configuration.server_values(rows_per_request), indent=2) + "\n"


def parameters_file(configuration: Configuration) -> ParametersFile:
    """Make TensorFlow Serving's parameters file for a configuration; it begins with a comment that describes the
    configuration. Without batching the file has comments only."""
    comment = f"# batchtune: {' '.join(configuration.label().split())}\n"
    if configuration.batching is None:
        text = "# Leave out --enable_batching; with it this file would mean the server's defaults.\n"
    else:
        text = format_tfserving_text(configuration.batching).rstrip("\n") + "\n"
    return ParametersFile(name="batching_parameters.txt", text=comment + text)


def without_counterpart(flags: Sequence[tuple[str, str]], server: str) -> str:
    """Write a comment line for each of these flags, which says that `server` has no such flag."""
    return "".join(f"# --{name}={value} has no counterpart in {server}\n" for name, value in flags)
