"""Reads and changes the batching part of a Triton model's configuration, as JSON and as a config.pbtxt.

The JSON is that of `GET /v2/models/M/config`: the whole ModelConfig, spelt out by Triton, which the repository's load
takes back as its parameter `config`. (extension_model_configuration.md, model_config.proto)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batchtune.batching import text_proto
from batchtune.batching.parameters import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    LARGEST_VALUES,
    UINT32_MAX,
    BatchingFile,
    BatchingParameters,
    Configuration,
    did_you_mean,
    requests_a_batch,
    to_dict,
)
from batchtune.batching.text_proto import Field, Message
from batchtune.batching.triton_words import ACTIONS, INSTANCES, SETTINGS, SettingKind
from batchtune.errors import BatchingParametersError


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBatching:
    """The batching part of a model's configuration as it was found on the server.

    `dynamic_batching` False: every request is executed by itself. `preferred_batch_size`: () where Triton filled in its
    default, the maximum. `instance_count`: the maximum over the instance groups.
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
    """Read the batching part of a model's configuration, given as Triton's JSON.

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
    """Return the batching that was found as a Configuration.

    `batching`: whether a dynamic batcher that is off is switched on in it; False: `Configuration.batching` is then
    None.
    """
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
    """Return a model's configuration with its batching part replaced by that of `configuration`, all else unchanged.

    `preferred_batch_size` is written only if the configuration names sizes: Triton's own filled-in default follows
    `max_batch_size`. Other fields of `dynamic_batching` (ordering, queue policies, priorities) stay unless named.
    Instance groups with different counts stay if the largest count is the configuration's. Without batching
    `dynamic_batching` is left out, and `max_batch_size` stays.
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
    """Return `name value` of each field of the model's dynamic batcher that applying `configuration` would remove.

    The delay is left out, and fields with protobuf's default, which Triton spells out.

    Raises:
        BatchingParametersError: as `found_batching`.
    """
    before = {"preferred_batch_size": sizes_text(found_batching(config).preferred_batch_size)}
    for name, value in (config.get("dynamic_batching") or {}).items():
        if name not in ("preferred_batch_size", "max_queue_delay_microseconds"):
            before[name] = _said(value)
    kept = with_batching(config, configuration).get("dynamic_batching") or {}
    return tuple(f"{name} {text}" for name, text in before.items() if text and name not in kept)


def _said(value: Any) -> str:
    """Format a field's value; "" where it is protobuf's default."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, inner in value.items() if (text := _said(inner)))
    if value in (0, "0", False, None, "", ACTIONS[0]):
        return ""
    return "true" if value is True else str(value)


def other_batching(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describe the batching that a model runs with if it differs from the `wanted` one; "": it does not.

    A field that Triton leaves out has protobuf's default.

    Raises:
        BatchingParametersError: the model has no batch dimension, or another batcher than the dynamic one.
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
    """Write batch sizes as the value of a flag: `4,8,16`; "" for ()."""
    return ",".join(map(str, sizes))


def _set(message: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        message[name] = dict(message.get(name) or {})
        message = message[name]
    message[last] = value


def _field(message: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path as a configuration's flags write it; where it is absent, protobuf's default."""
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


# Writing a config.pbtxt: its batching part from the parameters, the whole from what Triton says as JSON.
#
# | TF Serving | Triton |
# |---|---|
# | `max_batch_size` | `max_batch_size` |
# | `batch_timeout_micros` | `dynamic_batching.max_queue_delay_microseconds` |
# | `num_batch_threads` | `instance_group.count` (batches that run at once) |
# | `max_enqueued_batches` | `dynamic_batching.default_queue_policy.max_queue_size`, in requests |
#
# Triton never pads and never splits, so the other fields have no counterpart there. (model_config.proto)
#
# Of the whole, scalars that have protobuf's default are left out; an empty block is kept, since being there is what it
# says. Names of enumeration values stand bare in the text and quoted in JSON, and a map is a list of `{ key value }`;
# which fields are which is in model_config.proto.

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
"""Fields of 64 bits, which protobuf's JSON has as strings and Triton's as numbers."""
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


def format_triton(parameters: BatchingParameters | None, *, rows_per_request: int = 1) -> str:
    """Write the batching part of a `config.pbtxt`; `parameters` None: one without a dynamic batcher.

    An absent `max_batch_size` is written as TF Serving's default, because Triton's own means "no batches".
    `rows_per_request` is used to convert the limit on waiting batches into Triton's on waiting requests (at least 1).
    """
    if parameters is None:
        return "# no dynamic_batching block: every request is executed by itself\n"
    size = DEFAULT_MAX_BATCH_SIZE if parameters.max_batch_size is None else parameters.max_batch_size
    translated = {"max_batch_size", "batch_timeout_micros", "num_batch_threads", "max_enqueued_batches"}
    lines = [
        f"# {name} has no counterpart in Triton" for name in to_dict(parameters) if name not in translated
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
        lines.append(f"instance_group [{{ count: {parameters.num_batch_threads} kind: KIND_AUTO }}]")
    return "".join(f"{line}\n" for line in lines)


def format_config_pbtxt(config: Mapping[str, Any]) -> str:
    """Write a whole config.pbtxt from Triton's JSON of the model's configuration."""
    return "".join(f"{line}\n" for line in _lines_of(config))


def _lines_of(message: Mapping[str, Any]) -> Iterator[str]:
    for name, value in message.items():
        yield from _lines_of_field(name, value)


def _lines_of_field(name: str, value: Any) -> Iterator[str]:
    by_number = "priority_queue_policy"  # The map whose keys are numbers, not texts.
    if isinstance(value, Mapping) and name in _MAPS:
        for key, entry in value.items():
            shown = key if name == by_number else _scalar("", key)
            yield from _lines_of_block(name, [f"key: {shown}", *_lines_of_entry(entry)])
    elif isinstance(value, Mapping):
        yield from _lines_of_block(name, list(_lines_of(value)))
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Mapping):
                yield from _lines_of_block(name, list(_lines_of(entry)))
            else:
                yield f"{name}: {_scalar(name, entry)}"
    elif value not in ("", 0, False, None):
        yield f"{name}: {_scalar(name, value)}"


def _lines_of_entry(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _lines_of_block("value", list(_lines_of(value)))
    else:
        yield f"value: {_scalar('', value)}"


def _lines_of_block(name: str, lines: list[str]) -> Iterator[str]:
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
    enumerations = frozenset({"data_type", "format", "kind", "device_kind", "timeout_action", "priority"})
    if name in enumerations | _LONG_NUMBERS:
        return str(value)
    return json.dumps(str(value), ensure_ascii=False)


# What a config.pbtxt says of batching, and what of it is left aside.
#
# Every field of the file must be one of ModelConfig's (model_config.proto); those that have nothing to do with batching
# are passed over.


MODEL_FIELDS: Final = (
    *("name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output"),
    *("batch_input", "batch_output", "optimization", "dynamic_batching", "sequence_batching"),
    *("ensemble_scheduling", "instance_group", "default_model_filename", "cc_model_filenames", "metric_tags"),
    *("parameters", "model_warmup", "model_operations", "model_transaction_policy"),
    *("model_repository_agents", "response_cache", "model_metrics"),
)


def parse_config_pbtxt(text: str, *, source: str) -> BatchingFile:
    """Read the batching part of a Triton model's config.pbtxt; without `dynamic_batching` batching is off.

    A max_batch_size that is absent stays absent. num_batch_threads is the largest count of the instance groups, each
    at least 1. Priorities go into `notes`; all else of the model's configuration is left out.

    Raises:
        BatchingParametersError: `source:line: …`: a field that ModelConfig lacks, a value of another type, another
            batcher than the dynamic one, or a model whose tensors have no batch dimension.
    """
    fields = _known(text_proto.parse_text_proto(text, source=source), MODEL_FIELDS, "ModelConfig", source)
    other_batchers = ("sequence_batching", "ensemble_scheduling")
    for field in fields:
        if field.name in other_batchers:
            raise text_proto.failure(source, field.line, f"{field.name}: it is not a dynamic batcher")
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
        settable = ("preferred_batch_size", "preserve_ordering", "default_queue_policy")
        known = ("max_queue_delay_microseconds", *settable, *aside)
        for field in _known(message, known, "dynamic_batching", source):
            if field.name == "max_queue_delay_microseconds":
                values["batch_timeout_micros"] = _number(field, "batch_timeout_micros", source)
            elif field.name in aside:
                notes.append(f"{source}:{field.line}: {field.name} stays out: no search changes priorities")
            else:
                _add_setting(settings, field, source)
    return BatchingFile(
        dialect="triton",
        parameters=BatchingParameters(**values),
        enabled=dynamic is not None,
        settings=settings,
        notes=tuple(notes),
    )


def _add_setting(settings: dict[str, Any], field: Field, source: str) -> None:
    """Add a field of `dynamic_batching` to the settings, under the name that a scenario uses."""
    if field.name == "preferred_batch_size":
        size = text_proto.whole_number(field, source=source, least=1, most=LARGEST_VALUES["max_batch_size"])
        settings.setdefault(field.name, []).append(size)
    elif field.name == "preserve_ordering":
        settings[field.name] = text_proto.boolean(field, source=source)
    else:
        message = text_proto.message(field, source=source)
        names = ("timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size")
        settings |= {
            f"{field.name}.{below.name}": _queue_value(below, source)
            for below in _known(message, names, field.name, source)
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
    names = (
        *("name", "kind", "count", "rate_limiter", "gpus"),
        *("secondary_devices", "profile", "passive", "host_policy"),
    )
    fields = _known(text_proto.message(group, source=source), names, "instance_group", source)
    count = _last(fields, "count")
    return max(1, 0 if count is None else _number(count, "num_batch_threads", source))


def _number(field: Field, parameter: str, source: str) -> int:
    """Return the field's value, 0 to the LARGEST_VALUES of the TensorFlow Serving parameter that it corresponds to."""
    return text_proto.whole_number(field, source=source, least=0, most=LARGEST_VALUES[parameter])


def _last(fields: Iterable[Field], name: str) -> Field | None:
    return next((field for field in reversed(list(fields)) if field.name == name), None)


def _known(message: Message, names: Sequence[str], where: str, source: str) -> list[Field]:
    """Return the fields of a message, whose names must be among `names`.

    Raises:
        BatchingParametersError: one is not; the hint says which was meant.
    """
    for field in message.fields:
        if field.name not in names:
            raise text_proto.failure(
                source,
                field.line,
                f"{where} has no field {field.name!r}",
                hint=did_you_mean(field.name, names),
            )
    return list(message.fields)
