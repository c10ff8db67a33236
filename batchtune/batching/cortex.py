"""How does Cortex's API specification write the parameters?

`server_side_batching` has `max_batch_size` (2 to 1024) and `batch_interval` (above 0), both required;
`processes_per_replica` becomes TF Serving's `num_batch_threads`. The rest keeps TF Serving's defaults.
(Cortex v0.31, `images/tensorflow-serving-gpu/run.sh`, `pkg/types/spec/validations.go`)
"""

from __future__ import annotations

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, BatchingParameters, to_dict
from batchtune.errors import BatchingParametersError

_TRANSLATED = {"max_batch_size", "batch_timeout_micros", "num_batch_threads"}


def format_cortex(parameters: BatchingParameters | None) -> str:
    """The keys to put under `predictor:` of a TensorFlow API; None gives one without batching.

    `threads_per_process` is written so that the batches in flight and the next one can fill:
    a request holds a thread while it waits.

    Raises:
        BatchingParametersError: a size or interval outside Cortex's limits.
    """
    if parameters is None:
        return "# no server_side_batching block: every request is executed by itself\n"
    size = DEFAULT_MAX_BATCH_SIZE if parameters.max_batch_size is None else parameters.max_batch_size
    micros = parameters.batch_timeout_micros or 0
    if not 2 <= size <= 1024:
        raise BatchingParametersError(
            f"cortex: max_batch_size: Cortex accepts 2 to 1024; was {size}",
            hint="leave server_side_batching out: batches of one row are none"
            if size < 2
            else "search max_batch_size up to 1024",
        )
    if micros <= 0:
        raise BatchingParametersError(
            f"cortex: batch_interval: Cortex accepts only an interval above 0; was {micros} µs",
            hint="search a batch_timeout_micros of at least 1, or write batch_interval: 1us by hand",
        )
    processes = parameters.num_batch_threads or 1
    lines = [
        f"# {name} has no counterpart in Cortex" for name in to_dict(parameters) if name not in _TRANSLATED
    ]
    if parameters.num_batch_threads is None:
        lines.append(
            "# num_batch_threads is absent, in TF Serving one per CPU; Cortex's default is one process"
        )
    lines += [
        "server_side_batching:",
        f"  max_batch_size: {size}",
        f"  batch_interval: {_go_duration(micros)}",
        f"processes_per_replica: {processes}",
        f"threads_per_process: {2 * size}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _go_duration(micros: int) -> str:
    for unit, size in (("s", 1_000_000), ("ms", 1_000)):
        if micros % size == 0:
            return f"{micros // size}{unit}"
    return f"{micros}us"
