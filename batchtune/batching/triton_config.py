"""The batching part of a model's Triton configuration: read, and changed alone.

A configuration is the JSON of `GET /v2/models/M/config`: the whole ModelConfig, spelt out by Triton, which the
repository's load takes back as its parameter `config`. (extension_model_configuration.md, model_config.proto)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchtune.batching.parameters import BatchingParameters, Configuration
from batchtune.batching.triton_words import ACTIONS, INSTANCES, SETTINGS, SettingKind
from batchtune.errors import BatchingParametersError


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBatching:
    """The batching part of a model's configuration as it was found.

    `dynamic_batching` False: every request is executed by itself. `preferred_batch_size` is empty where Triton filled
    in its default, the maximum. `instance_count` is that of each group and GPU, where they differ the largest.
    """

    max_batch_size: int
    dynamic_batching: bool = False
    max_queue_delay_microseconds: int = 0
    instance_count: int = 1
    preferred_batch_size: tuple[int, ...] = ()

    def words(self) -> str:
        """Describe the batching, such as `max_batch_size 8, dynamic_batching with a delay of 500 µs, 1 instance`."""
        batching = (
            f"dynamic_batching with a delay of {self.max_queue_delay_microseconds} µs"
            if self.dynamic_batching
            else "no dynamic_batching"
        )
        preferred = (
            f", preferred sizes {sizes_text(self.preferred_batch_size)}" if self.preferred_batch_size else ""
        )
        instances = f"{self.instance_count} instance{'' if self.instance_count == 1 else 's'}"
        return f"max_batch_size {self.max_batch_size}, {batching}{preferred}, {instances}"


def found_batching(config: Mapping[str, Any]) -> FoundBatching:
    """Read the batching part of a model's configuration.

    Raises:
        BatchingParametersError: the model has no batch dimension, or another batcher than the dynamic one.
    """
    name = config.get("name", "the model")
    other_batchers = {
        "sequence_batching": "it batches sequences",
        "ensemble_scheduling": "it is an ensemble: tune its parts",
    }
    for batcher, why in other_batchers.items():
        if batcher in config:
            raise BatchingParametersError(f"{name} has no dynamic batcher: {why}")
    size = int(config.get("max_batch_size", 0))
    if size < 1:
        raise BatchingParametersError(
            f"{name} has max_batch_size 0: its tensors have no batch dimension, so nothing can be batched",
            hint="give its configuration a max_batch_size, and tensors without their first dimension",
        )
    dynamic = config.get("dynamic_batching")
    preferred = tuple(int(rows) for rows in (dynamic or {}).get("preferred_batch_size", ()))
    return FoundBatching(
        max_batch_size=size,
        dynamic_batching=dynamic is not None,
        max_queue_delay_microseconds=int((dynamic or {}).get("max_queue_delay_microseconds", 0)),
        instance_count=_instance_count(config.get("instance_group", ())),
        preferred_batch_size=() if preferred == (size,) else preferred,
    )


def configuration_as_found(
    server_batching: FoundBatching, *, flags: tuple[tuple[str, str], ...] = (), batching: bool = True
) -> Configuration:
    """Make a Configuration of the batching found; `batching` True switches the dynamic batcher on in any case."""
    if not (batching or server_batching.dynamic_batching):
        instances = (INSTANCES, str(server_batching.instance_count))
        return Configuration(batching=None, dialect="triton", flags=tuple(sorted({*flags, instances})))
    preferred = (
        [("preferred_batch_size", sizes_text(server_batching.preferred_batch_size))]
        if server_batching.preferred_batch_size
        else []
    )
    return Configuration(
        batching=BatchingParameters(
            max_batch_size=server_batching.max_batch_size,
            batch_timeout_micros=server_batching.max_queue_delay_microseconds,
            num_batch_threads=server_batching.instance_count,
        ),
        dialect="triton",
        flags=tuple(sorted([*flags, *preferred])),
    )


def with_batching(config: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """Return a model's configuration with another batching part; everything else stays as it is.

    `preferred_batch_size` is written only where the configuration names sizes: Triton's own filled-in default follows
    `max_batch_size`. Other fields of `dynamic_batching` (ordering, queue policies, priorities) stay unless named, as
    do groups whose counts differ where the largest is what is wanted.
    """
    changed = copy.deepcopy(dict(config))
    settings = {name: text for name, text in configuration.flags if name in SETTINGS}
    batching = configuration.batching
    if batching is None:
        changed.pop("dynamic_batching", None)
        count = int(dict(configuration.flags).get(INSTANCES, found_batching(config).instance_count))
    else:
        dynamic = {
            name: value
            for name, value in (changed.get("dynamic_batching") or {}).items()
            if name != "preferred_batch_size"
        }
        dynamic["max_queue_delay_microseconds"] = batching.batch_timeout_micros or 0
        for name, text in settings.items():
            _set(dynamic, name, _value(text, SETTINGS[name]))
        changed["dynamic_batching"] = dynamic
        changed["max_batch_size"] = batching.max_batch_size
        count = batching.num_batch_threads or 1
    groups = changed.get("instance_group") or [{"kind": "KIND_AUTO", "count": 0}]
    if count != _instance_count(groups):
        groups = [{**group, "count": count} for group in groups]
    changed["instance_group"] = groups
    return changed


def dropped(config: Mapping[str, Any], configuration: Configuration) -> tuple[str, ...]:
    """List what the model's configuration says of its dynamic batcher and `configuration` would leave out, as `name
    value`.

    The delay is none of it, nor is what Triton spells out where nobody said anything.
    """
    before = {"preferred_batch_size": sizes_text(found_batching(config).preferred_batch_size)}
    for name, value in (config.get("dynamic_batching") or {}).items():
        if name not in ("preferred_batch_size", "max_queue_delay_microseconds"):
            before[name] = _said(value)
    kept = with_batching(config, configuration).get("dynamic_batching") or {}
    return tuple(f"{name} {text}" for name, text in before.items() if text and name not in kept)


def _said(value: Any) -> str:
    """A field's value in words; "": protobuf's default."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, inner in value.items() if (text := _said(inner)))
    if value in (0, "0", False, None, "", ACTIONS[0]):
        return ""
    return "true" if value is True else str(value)


def other_batching(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describe the batching that a model runs with where it is not the `wanted` one; "" where it is.

    A field that Triton leaves out has protobuf's default.

    Raises:
        BatchingParametersError: as `found_batching`.
    """
    runs = found_batching(config)
    if runs != found_batching(wanted):
        return runs.words()
    dynamic, asked = config.get("dynamic_batching") or {}, wanted.get("dynamic_batching") or {}
    names = [name for name in SETTINGS if name != "preferred_batch_size"]
    fields = {name: (_field(dynamic, name), _field(asked, name)) for name in names}
    return ", ".join(f"{name} {has}" for name, (has, wants) in fields.items() if has != wants)


def _instance_count(groups: Iterable[Mapping[str, Any]]) -> int:
    return max((int(group.get("count", 1)) for group in groups), default=1)


def sizes_text(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _set(message: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        message[name] = dict(message.get(name) or {})
        message = message[name]
    message[last] = value


def _field(message: Mapping[str, Any], path: str) -> Any:
    """A field's value as a configuration's flags have it."""
    value: Any = message
    for name in path.split("."):
        value = (value or {}).get(name)
    match SETTINGS[path]:
        case "boolean":
            return "true" if value else "false"
        case "action":
            return value or ACTIONS[0]
        case _:
            return str(value or 0)


def _value(text: str, kind: SettingKind) -> Any:
    match kind:
        case "sizes":
            return [int(size) for size in text.split(",") if size]
        case "boolean":
            return text == "true"
        case "number":
            return int(text)
        case "action":
            return text
