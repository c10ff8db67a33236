"""What does a config.pbtxt say of batching, and what of it is left aside?

Every field of the file must be one of ModelConfig's (model_config.proto); those that have nothing to do with batching
are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from batchtune.batching import text_proto
from batchtune.batching.batching_file import UINT32_MAX, BatchingFile
from batchtune.batching.parameters import SENSIBLE_MOST, BatchingParameters, did_you_mean
from batchtune.batching.text_proto import Field, Message
from batchtune.batching.triton_words import ACTIONS


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
_OTHER_BATCHERS: Final = ("sequence_batching", "ensemble_scheduling")
_ASIDE: Final = ("priority_levels", "default_priority_level", "priority_queue_policy")


def parse_config_pbtxt(text: str, *, source: str) -> BatchingFile:
    """The batching part of a model's configuration; without `dynamic_batching` it is off.

    Raises:
        BatchingParametersError: `source:line: …`: a field that ModelConfig lacks, a value of another type, another
            batcher than the dynamic one, or a model whose tensors have no batch dimension.
    """
    fields = _known(text_proto.parse_text_proto(text, source=source), MODEL_FIELDS, "ModelConfig", source)
    for field in fields:
        if field.name in _OTHER_BATCHERS:
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
    if dynamic is not None:
        message = text_proto.message(dynamic, source=source)
        for field in _known(message, _DYNAMIC_FIELDS, "dynamic_batching", source):
            if field.name == "max_queue_delay_microseconds":
                values["batch_timeout_micros"] = _number(field, "batch_timeout_micros", source)
            elif field.name in _ASIDE:
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
