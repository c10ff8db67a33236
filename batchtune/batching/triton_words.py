"""Triton's names for batching parameters, and those parameters that only it has. (model_config.proto)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

WORDS: Final[Mapping[str, str]] = {
    "batch_timeout_micros": "max_queue_delay_microseconds",
    "num_batch_threads": "instance_group.count",
}
"""TensorFlow Serving's name -> Triton's, of parameters that both have under different names.

The other modules use TensorFlow Serving's.
"""

INSTANCES: Final = "instance_group.count"

SettingKind = Literal["sizes", "boolean", "number", "action"]

SETTINGS: Final[Mapping[str, SettingKind]] = {
    "preferred_batch_size": "sizes",
    "preserve_ordering": "boolean",
    "default_queue_policy.max_queue_size": "number",
    "default_queue_policy.default_timeout_microseconds": "number",
    "default_queue_policy.timeout_action": "action",
    "default_queue_policy.allow_timeout_override": "boolean",
}
"""Fields of `dynamic_batching` that TensorFlow Serving has no counterpart for -> the kind of their value."""

ACTIONS: Final = ("REJECT", "DELAY")

MISSING: Final[Mapping[str, str]] = {
    "max_enqueued_batches": "Triton counts requests: default_queue_policy.max_queue_size",
    "allowed_batch_sizes": "Triton never pads a batch: preferred_batch_size",
    "pad_variable_length_inputs": "Triton never pads: leave it out",
    "enable_large_batch_splitting": "Triton never splits a request: leave it out",
    "max_execution_batch_size": "Triton never splits a request: leave it out",
    "thread_pool_name": "leave it out",
}
"""Parameters of TensorFlow Serving that Triton lacks -> what there is instead."""

GROUPS: Final = ("instance_group", "default_queue_policy")
"""Messages whose fields are parameters; a scenario may nest them as config.pbtxt does."""
