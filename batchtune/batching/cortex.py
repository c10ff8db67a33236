"""How does Cortex's API specification write the parameters?

`server_side_batching` has `max_batch_size` (2 to 1024) and `batch_interval` (above 0), both required;
`processes_per_replica` becomes TF Serving's `num_batch_threads`. The rest keeps TF Serving's defaults.
(Cortex v0.31, `images/tensorflow-serving-gpu/run.sh`, `pkg/types/spec/validations.go`)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchtune.batching.parameters import DEFAULT_MAX_BATCH_SIZE, BatchingParameters, to_dict
from batchtune.errors import BatchingParametersError

_MICROS = {"ns": 0.001, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6}
_GO_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
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
    _check_limits(size, micros, "cortex")
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


def parse_cortex(text: str, *, source: str = "<string>") -> BatchingParameters | None:
    """The parameters of a Cortex API specification, whole or in part; None without `server_side_batching`.

    Raises:
        BatchingParametersError: no YAML, several batching blocks, an unknown key, a broken limit.
    """
    import yaml

    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BatchingParametersError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    holders = list(_holders(document))
    if len(holders) > 1:
        raise BatchingParametersError(
            f"{source}: {len(holders)} server_side_batching blocks", hint="give one API"
        )
    if not holders:
        return None
    predictor = holders[0]
    block = predictor["server_side_batching"]
    if block is None:
        return None
    if not isinstance(block, Mapping) or set(block) != {"max_batch_size", "batch_interval"}:
        raise BatchingParametersError(
            f"{source}: server_side_batching takes max_batch_size and batch_interval; was {block!r}"
        )
    size = _whole(block["max_batch_size"], "max_batch_size", source)
    micros = _micros(block["batch_interval"], source)
    _check_limits(size, micros, source)
    processes = predictor.get("processes_per_replica")
    if processes is not None:
        processes = _whole(processes, "processes_per_replica", source)
    _check_threads(predictor, size, processes or 1, source)
    return BatchingParameters(max_batch_size=size, batch_timeout_micros=micros, num_batch_threads=processes)


def _holders(document: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(document, Mapping):
        if "server_side_batching" in document:
            yield document
        for value in document.values():
            yield from _holders(value)
    elif isinstance(document, list):
        for value in document:
            yield from _holders(value)


def _check_limits(size: int, micros: int, source: str) -> None:
    if not 2 <= size <= 1024:
        raise BatchingParametersError(
            f"{source}: max_batch_size: Cortex accepts 2 to 1024; was {size}",
            hint="leave server_side_batching out: batches of one row are none"
            if size < 2
            else "search max_batch_size up to 1024",
        )
    if micros <= 0:
        raise BatchingParametersError(
            f"{source}: batch_interval: Cortex accepts only an interval above 0; was {micros} µs",
            hint="search a batch_timeout_micros of at least 1, or write batch_interval: 1us by hand",
        )


def _check_threads(predictor: Mapping[str, Any], size: int, processes: int, source: str) -> None:
    threads = predictor.get("threads_per_process")
    if threads is None:
        return
    threads = _whole(threads, "threads_per_process", source)
    if size > processes * threads:
        raise BatchingParametersError(
            f"{source}: max_batch_size ({size}) must be less than or equal to "
            f"processes_per_replica * threads_per_process ({processes} * {threads} = {processes * threads})"
        )


def _whole(value: object, name: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BatchingParametersError(f"{source}: {name} must be a whole number; was {value!r}")
    return value


def _micros(value: object, source: str) -> int:
    parts = _GO_DURATION_PART.findall(value) if isinstance(value, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise BatchingParametersError(
            f"{source}: batch_interval must be a duration such as 100ms or 0.1s; was {value!r}"
        )
    return round(sum(float(number) * _MICROS[unit] for number, unit in parts))


def _go_duration(micros: int) -> str:
    for unit, size in (("s", 1_000_000), ("ms", 1_000)):
        if micros % size == 0:
            return f"{micros // size}{unit}"
    return f"{micros}us"
