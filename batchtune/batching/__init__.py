"""Which batching parameters are meant, are they legal, and how does each server write them down?

`parameters` holds the values and TF Serving's rules; `text_proto` the protobuf text grammar;
`tfserving` reads and writes its file, `triton`, `cortex` and `flags` write their dialects.
"""

from batchtune.batching.cortex import format_cortex
from batchtune.batching.flags import format_flags
from batchtune.batching.parameters import (
    DEFAULT_BATCH_TIMEOUT_MICROS,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_ENQUEUED_BATCHES,
    PARAMETER_NAMES,
    BatchingParameters,
    Configuration,
    default_num_batch_threads,
    from_dict,
    to_dict,
    validate,
)
from batchtune.batching.tfserving import format_tfserving_text, parse_tfserving_text
from batchtune.batching.triton import format_triton

__all__ = [
    "DEFAULT_BATCH_TIMEOUT_MICROS",
    "DEFAULT_MAX_BATCH_SIZE",
    "DEFAULT_MAX_ENQUEUED_BATCHES",
    "PARAMETER_NAMES",
    "BatchingParameters",
    "Configuration",
    "default_num_batch_threads",
    "format_cortex",
    "format_flags",
    "format_tfserving_text",
    "format_triton",
    "from_dict",
    "parse_tfserving_text",
    "to_dict",
    "validate",
]
