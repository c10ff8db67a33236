"""Reads and writes the parameters in Cortex's API specification.

`server_side_batching` has `max_batch_size` (2 to 1024) and `batch_interval` (above 0), both required;
`processes_per_replica`, 1 where it is absent, becomes TF Serving's `num_batch_threads`. The rest keeps TF Serving's
defaults. Cortex counts requests, but hands the size on to TensorFlow Serving, which counts rows.
(Cortex v0.31, `images/tensorflow-serving-gpu/run.sh`, `pkg/types/spec/validations.go`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import yaml

from batchtune.batching.parameters import (
    DEFAULT_MAX_BATCH_SIZE,
    LARGEST_VALUES,
    BatchingFile,
    BatchingParameters,
    did_you_mean,
    to_dict,
)
from batchtune.errors import BatchingParametersError, UsageError
from batchtune.units import format_duration, parse_duration_s

_SIZES: Final = (2, 1024)
_BLOCK: Final = "server_side_batching"
_WORKERS: Final = ("processes_per_replica", "threads_per_process")

_Entries = dict[str, yaml.Node]


def format_cortex(parameters: BatchingParameters | None) -> str:
    """Write the keys that go under `predictor:` of a TensorFlow API; None: a comment that there is no batching.

    `threads_per_process` is twice the size, so that a batch can fill while another is executed: a request holds a
    thread while it waits.

    Raises:
        BatchingParametersError: a size or interval outside Cortex's limits.
    """
    if parameters is None:
        return "# no server_side_batching block: every request is executed by itself\n"
    size = DEFAULT_MAX_BATCH_SIZE if parameters.max_batch_size is None else parameters.max_batch_size
    micros = parameters.batch_timeout_micros or 0
    least, most = _SIZES
    if not least <= size <= most:
        raise BatchingParametersError(
            f"cortex: max_batch_size: Cortex accepts {least} to {most}; was {size}",
            hint="leave server_side_batching out: one row is not a batch"
            if size < least
            else f"search max_batch_size up to {most}",
        )
    if micros <= 0:
        raise BatchingParametersError(
            f"cortex: batch_interval: Cortex accepts only an interval above 0; was {micros} µs",
            hint="search a batch_timeout_micros of at least 1, or write batch_interval: 1us by hand",
        )
    processes = parameters.num_batch_threads or 1
    translated = {"max_batch_size", "batch_timeout_micros", "num_batch_threads"}
    lines = [
        f"# {name} has no counterpart in Cortex" for name in to_dict(parameters) if name not in translated
    ]
    if parameters.num_batch_threads is None:
        lines.append(
            "# num_batch_threads is absent, in TF Serving one per CPU; Cortex's default is one process"
        )
    lines += [
        "server_side_batching:",
        f"  max_batch_size: {size}",
        f"  batch_interval: {format_duration(micros / 1e6)}",
        f"processes_per_replica: {processes}",
        f"threads_per_process: {2 * size}",
    ]
    return "".join(f"{line}\n" for line in lines)


def parse_cortex(text: str, *, source: str) -> BatchingFile:
    """Read an API specification: the keys of a predictor, one API, or the list of APIs of a `cortex.yaml`.

    Raises:
        BatchingParametersError: `source:line: key: …`: no YAML, an unknown key, a value that Cortex refuses, or more
            APIs with batching than one.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise BatchingParametersError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise BatchingParametersError(f"{source}: the file is empty")
    return _CortexReader(source).file(_CortexReader(source).predictor(root))


class _CortexReader:
    """Reads the YAML nodes of a specification; `source` names the file in errors."""

    def __init__(self, source: str) -> None:
        self._source = source

    def predictor(self, root: yaml.Node) -> _Entries:
        """Return name -> node of the keys of the only predictor that batches; where no predictor does, those of the
        first.

        Raises:
            BatchingParametersError: two predictors batch, or one has an unknown key.
        """
        apis = root.value if isinstance(root, yaml.SequenceNode) else [root]
        predictors = [self._predictor_of(api) for api in apis]
        batching = [predictor for predictor in predictors if _BLOCK in predictor]
        if len(batching) > 1:
            raise self._wrong(
                batching[1][_BLOCK], _BLOCK, "a second API with batching", "keep the one that is asked for"
            )
        return (batching or predictors or [{}])[0]

    def file(self, predictor: _Entries) -> BatchingFile:
        processes, threads = (self._whole(predictor, name) for name in _WORKERS)
        values: dict[str, Any] = {"num_batch_threads": processes or 1}
        block = predictor.get(_BLOCK)
        if block is None:
            return BatchingFile(dialect="cortex", parameters=BatchingParameters(**values), enabled=False)
        block_keys = ("max_batch_size", "batch_interval")
        entries = self._entries(block, block_keys, _BLOCK)
        for name in block_keys:
            if name not in entries:
                raise self._wrong(block, f"{_BLOCK}.{name}", "missing")
        size = self._whole(entries, "max_batch_size") or 0
        least, most = _SIZES
        if not least <= size <= most:
            raise self._wrong(
                entries["max_batch_size"], "max_batch_size", f"Cortex accepts {least} to {most}; was {size}"
            )
        self._check_workers(size, predictor, processes or 1, threads or 1)
        values |= {"max_batch_size": size, "batch_timeout_micros": self._micros(entries["batch_interval"])}
        under_way = (processes or 1) * (threads or 1)
        return BatchingFile(
            dialect="cortex",
            parameters=BatchingParameters(**values),
            notes=(f"Cortex's processes and threads keep at most {under_way} requests under way at once",),
        )

    def _check_workers(self, size: int, predictor: _Entries, processes: int, threads: int) -> None:
        """Raise where there are too few threads to fill a batch: a waiting request holds one; in Cortex's own words."""
        kind = predictor.get("type")
        node = predictor[_BLOCK]
        if kind is not None and kind.value == "python":
            if threads != size:
                raise self._wrong(
                    node, _BLOCK, f"threads_per_process ({threads}) must be max_batch_size ({size})"
                )
        elif size > processes * threads:
            raise self._wrong(
                node,
                _BLOCK,
                f"max_batch_size ({size}) must be less than or equal to processes_per_replica * threads_per_process "
                f"({processes} * {threads} = {processes * threads})",
                "raise threads_per_process: a request holds one while its batch fills",
            )

    def _predictor_of(self, api: yaml.Node) -> _Entries:
        known = (
            *("type", "path", "models", "model_path", "config", "python_path", "image"),
            *("tensorflow_serving_image", "env", "signature_key", "dependencies", "log_level", "shm_size"),
            *("multi_model_reloading", "protobuf_path", _BLOCK, *_WORKERS),
        )
        if not isinstance(api, yaml.MappingNode):
            raise self._wrong(api, "", "expected the keys of an API, such as predictor")
        if not any(key.value in ("predictor", "name", "kind") for key, _ in api.value):
            return self._entries(api, known, "predictor")
        keys = "name kind predictor networking compute autoscaling update_strategy monitoring apis"
        entries = self._entries(api, keys.split(), "an API")
        return self._entries(entries["predictor"], known, "predictor") if "predictor" in entries else {}

    def _entries(self, node: yaml.Node, known: Sequence[str], where: str) -> _Entries:
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, where, f"expected keys, such as {known[0]}")
        for key, _ in node.value:
            if key.value not in known:
                raise self._wrong(
                    key, str(key.value), f"{where} has no such key", did_you_mean(key.value, known)
                )
        names = [key.value for key, _ in node.value]
        for at, (key, _) in enumerate(node.value):
            if key.value in names[:at]:
                raise self._wrong(key, str(key.value), "given twice", "keep one of them")
        return {key.value: value for key, value in node.value}

    def _whole(self, entries: _Entries, name: str) -> int | None:
        node = entries.get(name)
        if node is None:
            return None
        if not isinstance(node, yaml.ScalarNode) or not re.fullmatch(r"[1-9][0-9]{0,8}", node.value):
            raise self._wrong(node, name, f"expected a whole number above 0; was {_shown(node)}")
        number, most = int(node.value), LARGEST_VALUES["num_batch_threads"]
        if name == "processes_per_replica" and number > most:
            raise self._wrong(node, name, f"expected at most {most}; was {number}")
        return number

    def _micros(self, node: yaml.Node) -> int:
        """Read a Go duration, such as 0.1s or 1m30s, as whole microseconds, at least 1."""
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        # Go's units; fewer than ours, and no spaces between.
        is_duration = re.fullmatch(r"(?=.{1,64}$)(?:[0-9.]+(?:ns|us|µs|μs|ms|s|m|h))+", text)
        try:
            interval_s = parse_duration_s(text if is_duration else "")
        except UsageError as error:
            raise self._wrong(
                node, "batch_interval", f"expected a duration, such as 100ms; was {_shown(node)}"
            ) from error
        if interval_s <= 0:
            raise self._wrong(node, "batch_interval", "Cortex accepts only an interval above 0")
        if interval_s * 1e6 > LARGEST_VALUES["batch_timeout_micros"]:
            raise self._wrong(node, "batch_interval", f"expected at most 24h; was {text}")
        return max(1, round(interval_s * 1e9) // 1000)

    def _wrong(self, node: yaml.Node, key: str, what: str, hint: str = "") -> BatchingParametersError:
        line = int(node.start_mark.line) + 1
        return BatchingParametersError(f"{self._source}:{line}: {f'{key}: ' if key else ''}{what}", hint=hint)


def _shown(node: Any) -> str:
    return repr(node.value[:80]) if isinstance(node, yaml.ScalarNode) else "a list or keys"
