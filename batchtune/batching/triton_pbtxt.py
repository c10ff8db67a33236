"""How is a model's configuration, read from Triton as JSON, written as `config.pbtxt`?

Scalars that have protobuf's default are left out; an empty block is kept, since being there is what it says. Names of
enumeration values stand bare in the text and quoted in JSON, and a map is a list of `{ key value }`: which fields are
which is in model_config.proto.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

_ENUMERATIONS: Final = frozenset({"data_type", "format", "kind", "device_kind", "timeout_action", "priority"})
_LONG_NUMBERS: Final = frozenset(
    {
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


def format_config_pbtxt(config: Mapping[str, Any]) -> str:
    """The text of a config.pbtxt."""
    return "".join(f"{line}\n" for line in _fields(config))


def _fields(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        yield from _field(name, value)


def _field(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and name in _MAPS:
        for key, entry in value.items():
            yield from _block(name, [f"key: {_scalar('', key, key=True)}", *_entry(entry)])
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


def _scalar(name: str, value: Any, *, key: bool = False) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if name in _ENUMERATIONS | _LONG_NUMBERS or (key and str(value).isdigit()):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False)
