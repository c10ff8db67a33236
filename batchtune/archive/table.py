"""A run as a table: a row a trial, or a row a request, with the unit in each column's name."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from batchtune.batching.parameters import PARAMETER_NAMES, to_dict
from batchtune.errors import ArchiveError
from batchtune.load.samples import NEVER_NS, Samples, Status
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import QUANTILES, UNDEFINED, Estimate
from batchtune.tune.trials.trial import Trial

if TYPE_CHECKING:
    from pandas import DataFrame

Table = dict[str, list[Any]]
"""Column name -> values, one for each row; None: the row has no value there."""

_ASKED: Final = ("concurrency", "rate_rps", "block", "seed", "repeat_of", "started_utc", "seconds")
_BOUNDED: Final = ("throughput_rps", "throughput_rows_per_s", *(f"{name}_ms" for name in QUANTILES))
_FIGURES: Final = (
    "latency_mean_ms",
    "goodput_rps",
    "error_ratio",
    "requests",
    "window_s",
    "mean_batch_rows",
    "queue_ms",
    "compute_ms",
    "device_busy_ratio",
    "send_lag_p99_ms",
    "client_cpu_ratio",
    "verdict",
    "decision",
    "caveats",
    "emulated",
)


TRIAL_COLUMNS: Final = (
    *("number", "source", "reason", "state", "failure", "configuration", "batching"),
    *PARAMETER_NAMES,
    *_ASKED,
    "objective",
    "objective_low",
    "objective_high",
    "feasible",
    *(f"{name}{end}" for name in _BOUNDED for end in ("", "_low", "_high")),
    *_FIGURES,
)
"""Columns of `trial_table`; each server flag has one more, `--flag`, behind these.

`batching` is False without batching; a parameter that a trial left to the server has no value. `_low` and
`_high` are the ends of the 95 % interval of that one run. `objective` is in requests/s; under objective
latency it is p95 in seconds. `caveats` are codes, divided by spaces. `decision`: the verdict, where that is NOISY or
INVALID what it would be without that caveat (unknown in older runs).
"""

COMPANY_COLUMNS: Final = ("model", "load", "load_kind", "factor")
"""Columns that come before `configuration` in the trials of a sweep of several models; each model has a row.

All rows of one `load` were measured at once, at `factor` times the stated rates. `load_kind`: "together" or
"alone"; in runs of older versions "flood of " and the model that got more than its rate.
"""

HIGHER_IS_BETTER: Final = frozenset(
    (
        *("throughput_rps", "throughput_rows_per_s", "goodput_rps", "goodput_ratio", "output_tokens_per_s"),
        *("mean_batch_rows", "feasible", "requests"),
    )
)
"""Columns in which a higher value is the better one."""


def trial_table(trials: Sequence[Trial]) -> Table:
    """Make a table of the trials, in their order, a row for each trial: TRIAL_COLUMNS, then a column `--NAME` for each
    server flag that one of them sets.

    With several models a row for each model of each trial, and COMPANY_COLUMNS before `configuration`. Of streams first
    tokens (`ttft_p50_ms` …), gaps (`itl_p50_ms` …), counts of tokens and, with a goodput limit, `goodput_ratio` come
    before `p50_ms`.
    """
    rows = [_trial_row(part, trial) for trial in trials for part in trial.parts.values() or (trial,)]
    flags = dict.fromkeys(name for row in rows for name in row if name.startswith("--"))
    columns = [*TRIAL_COLUMNS, *flags]
    if any(trial.parts for trial in trials):
        at = columns.index("configuration")
        columns[at:at] = COMPANY_COLUMNS
    at = columns.index("p50_ms")
    streamed = ("ttft_", "itl_", "goodput_ratio", "prompt_tokens_", "output_tokens_")
    columns[at:at] = dict.fromkeys(name for row in rows for name in row if name.startswith(streamed))
    return {name: [_value(row.get(name)) for row in rows] for name in columns}


def parquet(table: Table) -> bytes:
    """Return a table as the bytes of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = io.BytesIO()
    pq.write_table(pa.table(table), content)
    return content.getvalue()


def trials_frame(trials: Sequence[Trial]) -> DataFrame:
    """Return `trial_table` as a pandas frame, with whole numbers as Int64.

    Raises:
        ArchiveError: pandas is not installed.
    """
    # Columns of whole numbers in which a row may have no value: a frame holds them as pandas' Int64.
    whole_numbers = (
        "max_batch_size",
        "batch_timeout_micros",
        "max_enqueued_batches",
        "num_batch_threads",
        "max_execution_batch_size",
        "concurrency",
        "block",
        "repeat_of",
        "requests",
        "load",
    )
    frame: DataFrame = _pandas().DataFrame(trial_table(trials))
    whole = [name for name in whole_numbers if name in frame and frame[name].notna().any()]
    return frame.astype(dict.fromkeys(whole, "Int64"))


def samples_frame(samples: Samples) -> DataFrame:
    """Return the requests of a trial as a pandas frame, a row for each, in the order of due times.

    `due_s`: seconds since the run's start at which the request was due. `latency_ms`: from due to done, NaN
    for a request that never ended. `connection_wait_ms`: wait for a connection. `send_lag_ms`: delay by the
    client itself, NaN for a request never sent. `status`: OK or the class of the error. `rows`: rows in the
    request.

    Raises:
        ArchiveError: pandas is not installed.
    """
    pd = _pandas()
    never = samples.sent_ns == NEVER_NS
    latency_ms = np.where(samples.latency_ns == NEVER_NS, np.nan, samples.latency_ns / 1e6)
    lag_ns = samples.sent_ns - samples.due_ns - samples.connection_wait_ns
    names = [status.name for status in Status]
    frame: DataFrame = pd.DataFrame(
        {
            "due_s": samples.due_ns / 1e9,
            "latency_ms": latency_ms,
            "connection_wait_ms": samples.connection_wait_ns / 1e6,
            "send_lag_ms": np.where(never, np.nan, lag_ns / 1e6),
            "status": pd.Categorical(np.array(names)[samples.status], categories=names),
            "rows": samples.rows,
        }
    )
    return frame


def _pandas() -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise ArchiveError(
            "a frame needs pandas, which is not installed", hint="pip install 'batchtune[pandas]'"
        ) from error
    return pd


def _value(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _trial_row(trial: Trial, whole: Trial) -> dict[str, Any]:
    configuration = trial.configuration.of_model(trial.model) if trial.model else trial.configuration
    batching, known = configuration.batching, configuration.known
    row: dict[str, Any] = {name: getattr(trial, name) for name in ("number", "source", "reason", "state")}
    row |= {name: getattr(trial, name) for name in ("failure", "feasible", *_ASKED)}
    if trial.state == "failed" and row["concurrency"] is None and row["rate_rps"] is None:
        row |= {name: getattr(trial.request, name) for name in ("concurrency", "rate_rps")}
    if trial.model:
        kind = "alone" if whole.request.models else "together"
        load_kind = whole.reason if whole.reason.startswith("flood of ") else kind
        row |= {"model": trial.model, "load": whole.number, "load_kind": load_kind}
        row |= {"factor": whole.request.scale}
    row |= {"configuration": configuration.label(), "batching": batching is not None if known else None}
    for name, value in ({} if batching is None else to_dict(batching)).items():
        row[name] = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    row |= {f"--{name}": value for name, value in configuration.flags}
    row |= _bounded("objective", trial.objective, 1.0)
    return row if trial.measurement is None else row | figures_of_run(trial.measurement)


def figures_of_run(measured: Measurement) -> dict[str, Any]:
    """Return the columns of `trial_table` that one run measured: name -> value, with the unit in the name, such as
    `{"p95_ms": 12.5, "p95_ms_low": 11.0}`; None: not measured."""
    row: dict[str, Any] = {}
    for name in ("throughput_rps", "throughput_rows_per_s"):
        row |= _bounded(name, getattr(measured, name), 1.0)
    for name, estimate in {**dict.fromkeys(QUANTILES, UNDEFINED), **measured.latency_s}.items():
        if name == "goodput":  # the share that misses
            row["goodput_ratio"] = 1.0 - estimate.value
        else:
            row |= _bounded(f"{name}_ms", estimate, 1e3)
    server, tokens = measured.server, measured.tokens
    if tokens is not None:
        row |= _bounded("output_tokens_per_s", tokens.output_per_s, 1.0)
        row |= {"prompt_tokens_mean": tokens.prompt_mean, "output_tokens_mean": tokens.output_mean}
    return row | {
        "latency_mean_ms": measured.latency_mean_s * 1e3,
        "goodput_rps": measured.goodput_rps,
        "error_ratio": measured.error_ratio,
        "requests": measured.requests,
        "window_s": measured.window_s,
        "mean_batch_rows": None if server is None else server.mean_batch_rows,
        "queue_ms": _times_1000(measured.queue_mean_s),
        "compute_ms": _times_1000(measured.compute_mean_s),
        "device_busy_ratio": None if server is None else server.device_busy_ratio,
        "send_lag_p99_ms": measured.send_lag_p99_s * 1e3,
        "client_cpu_ratio": measured.client_cpu_ratio,
        "verdict": measured.verdict,
        "decision": measured.decision or measured.verdict,
        "caveats": " ".join(noted.code for noted in measured.caveats),
        "emulated": server is not None and server.emulated,
    }


def _bounded(name: str, estimate: Estimate | None, scale: float) -> dict[str, float]:
    if estimate is None:
        return {}
    ends = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
    return {f"{name}{end}": value * scale for end, value in ends.items()}


def _times_1000(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
