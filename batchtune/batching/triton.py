"""How does Triton's `config.pbtxt` write the parameters?

| TF Serving | Triton |
|---|---|
| `max_batch_size` | `max_batch_size` |
| `batch_timeout_micros` | `dynamic_batching.max_queue_delay_microseconds` |
| `num_batch_threads` | `instance_group.count` (batches that run at once) |
| `max_enqueued_batches` | `dynamic_batching.default_queue_policy.max_queue_size`, in requests |

Triton never pads and never splits, so the other fields have no counterpart there. (model_config.proto)
"""

from __future__ import annotations

from typing import Any, Literal

from batchtune.batching import text_proto
from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, BatchingParameters, to_dict
from batchtune.batching.text_proto import Field, Message
from batchtune.errors import BatchingParametersError

InstanceKind = Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]

_UINT32_MAX = 2**32 - 1
_TRANSLATED = {"max_batch_size", "batch_timeout_micros", "num_batch_threads", "max_enqueued_batches"}


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
        requests = max(1, parameters.max_enqueued_batches * size // rows_per_request)
        requests = min(requests, _UINT32_MAX)
        lines.append(f"  default_queue_policy {{ max_queue_size: {requests} }}")
    lines.append("}")
    if parameters.num_batch_threads is None:
        lines.append("# num_batch_threads is absent, in TF Serving one per CPU; Triton's own default applies")
    else:
        lines.append(f"instance_group [{{ count: {parameters.num_batch_threads} kind: {kind} }}]")
    return "".join(f"{line}\n" for line in lines)


def parse_triton(
    text: str, *, source: str = "<string>", rows_per_request: int = 1
) -> BatchingParameters | None:
    """The batching parameters of a `config.pbtxt`, whole or in part; None without a `dynamic_batching` block.

    What has no counterpart in TF Serving (preferred sizes, priorities, timeouts of requests) is left out.

    Raises:
        BatchingParametersError: `source:line: …`, also for a dynamic batcher without a `max_batch_size`.
    """
    top = text_proto.parse_text_proto(text, source=source)
    batcher = _last(top, "dynamic_batching")
    if batcher is None:
        return None
    size = _number(top, "max_batch_size", source)
    if not size:
        raise text_proto.failure(
            source,
            batcher.line,
            "dynamic_batching needs a max_batch_size of at least 1",
            hint="add a line such as max_batch_size: 32",
        )
    policy = text_proto.message(batcher, source=source)
    values: dict[str, Any] = {
        "max_batch_size": size,
        "batch_timeout_micros": _number(policy, "max_queue_delay_microseconds", source),
        "num_batch_threads": _instances(top, source),
    }
    queue = _last(policy, "default_queue_policy")
    waiting = _number(text_proto.message(queue, source=source), "max_queue_size", source) if queue else None
    if waiting:
        values["max_enqueued_batches"] = max(1, -(-waiting * rows_per_request // size))
    return BatchingParameters(**values)


def _instances(top: Message, source: str) -> int | None:
    groups = [
        text_proto.message(field, source=source) for field in top.fields if field.name == "instance_group"
    ]
    counts = [
        1 if count is None else count for count in (_number(group, "count", source) for group in groups)
    ]
    if any(count < 1 for count in counts):
        raise BatchingParametersError(f"{source}: instance_group count must be positive; was {min(counts)}")
    return sum(counts) if counts else None


def _number(block: Message, name: str, source: str) -> int | None:
    field = _last(block, name)
    return None if field is None else text_proto.whole_number(field, source=source)


def _last(block: Message, name: str) -> Field | None:
    found = [field for field in block.fields if field.name == name]
    return found[-1] if found else None
