"""How is a `config.pbtxt` written: its batching part from the parameters, the whole from what Triton says as JSON?

| TF Serving | Triton |
|---|---|
| `max_batch_size` | `max_batch_size` |
| `batch_timeout_micros` | `dynamic_batching.max_queue_delay_microseconds` |
| `num_batch_threads` | `instance_group.count` (batches that run at once) |
| `max_enqueued_batches` | `dynamic_batching.default_queue_policy.max_queue_size`, in requests |

Triton never pads and never splits, so the other fields have no counterpart there. (model_config.proto)

Of the whole, scalars that have protobuf's default are left out; an empty block is kept, since being there is what it
says. Names of enumeration values stand bare in the text and quoted in JSON, and a map is a list of `{ key value }`;
which fields are which is in model_config.proto.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from batchtune.batching.batching_file import UINT32_MAX, requests_a_batch
from batchtune.batching.parameters import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    BatchingParameters,
    to_dict,
)

InstanceKind = Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]

_TRANSLATED = {"max_batch_size", "batch_timeout_micros", "num_batch_threads", "max_enqueued_batches"}
_ENUMERATIONS: Final = frozenset({"data_type", "format", "kind", "device_kind", "timeout_action", "priority"})
_LONG_NUMBERS: Final = frozenset(
    {
        "dim",
        "dims",
        "shape",
        "versions",
        "priority_levels",
        "default_priority_level",
        "max_queue_delay_microseconds",
        "default_timeout_microseconds",
        "max_sequence_idle_microseconds",
    }
)
"""Of 64 bits: protobuf's JSON has them as strings, Triton's as numbers."""
_MAPS: Final = frozenset(
    {
        "parameters",
        "cc_model_filenames",
        "metric_tags",
        "priority_queue_policy",
        "input_map",
        "output_map",
        "inputs",
        "input",
    }
)
"""Fields that are maps where their JSON is an object; `input` is a map in a profile of TensorRT, else a list."""
_BY_NUMBER: Final = "priority_queue_policy"
"""The map whose keys are numbers, not texts."""


def format_triton(
    parameters: BatchingParameters | None, *, kind: InstanceKind = "KIND_AUTO", rows_per_request: int = 1
) -> str:
    """The batching part of a `config.pbtxt`; None gives one without a dynamic batcher.

    An absent `max_batch_size` is written as TF Serving's default, because Triton's own means "no batches".
    `rows_per_request` turns the limit on waiting batches into Triton's on waiting requests (at least 1).
    """
    if parameters is None:
        return "# no dynamic_batching block: every request is executed by itself\n"
    size = DEFAULT_MAX_BATCH_SIZE if parameters.max_batch_size is None else parameters.max_batch_size
    lines = [
        f"# {name} has no counterpart in Triton" for name in to_dict(parameters) if name not in _TRANSLATED
    ]
    lines += [f"max_batch_size: {size}", "dynamic_batching {"]
    if parameters.batch_timeout_micros is not None:
        lines.append(f"  max_queue_delay_microseconds: {parameters.batch_timeout_micros}")
    if parameters.max_enqueued_batches is not None:
        requests = parameters.max_enqueued_batches * requests_a_batch(size, rows_per_request)
        requests = min(requests, UINT32_MAX)
        lines.append(f"  default_queue_policy {{ max_queue_size: {requests} }}")
    lines.append("}")
    if parameters.max_enqueued_batches is None:
        default = DEFAULT_MAX_ENQUEUED_BATCHES
        lines.append(
            f"# max_enqueued_batches is absent, in TF Serving {default}; Triton's queue has no limit"
        )
    if parameters.num_batch_threads is None:
        lines.append("# num_batch_threads is absent, in TF Serving one per CPU; Triton's own default applies")
    else:
        lines.append(f"instance_group [{{ count: {parameters.num_batch_threads} kind: {kind} }}]")
    return "".join(f"{line}\n" for line in lines)


def format_config_pbtxt(config: Mapping[str, Any]) -> str:
    """The text of a config.pbtxt."""
    return "".join(f"{line}\n" for line in _fields(config))


def _fields(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        yield from _field(name, value)


def _field(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and name in _MAPS:
        for key, entry in value.items():
            shown = key if name == _BY_NUMBER else _scalar("", key)
            yield from _block(name, [f"key: {shown}", *_entry(entry)])
    elif isinstance(value, Mapping):
        yield from _block(name, list(_fields(value)))
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Mapping):
                yield from _block(name, list(_fields(entry)))
            else:
                yield f"{name}: {_scalar(name, entry)}"
    elif value not in ("", 0, False, None):
        yield f"{name}: {_scalar(name, value)}"


def _entry(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _block("value", list(_fields(value)))
    else:
        yield f"value: {_scalar('', value)}"


def _block(name: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        yield f"{name} {{ }}"
        return
    yield f"{name} {{"
    yield from (f"  {line}" for line in lines)
    yield "}"


def _scalar(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if name in _ENUMERATIONS | _LONG_NUMBERS:
        return str(value)
    return json.dumps(str(value), ensure_ascii=False)
