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

from typing import Literal

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, BatchingParameters, to_dict

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
