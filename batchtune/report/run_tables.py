"""Renders the runs there are, and the trials of one: as a table, as JSON, CSV, Markdown or Parquet."""

from __future__ import annotations

import io
import json as json_text
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, TextIO

from batchtune.archive.listing import RunEntry
from batchtune.errors import UsageError
from batchtune.report.tables import print_rows
from batchtune.units import counted, percentage, rounded

if TYPE_CHECKING:
    from pandas import DataFrame

TableFormat = Literal["table", "csv", "markdown", "parquet", "json"]

_SHORT: Final = {"throughput": "throughput_rps", "capacity": "objective", "time": "started_utc"}
_SHOWN: Final = {
    "number": "trial",
    "source": "source",
    "model": "model",
    "load_kind": "load",
    "factor": "rates",
    "configuration": "configuration",
    "concurrency": "clients",
    "rate_rps": "offered /s",
    "throughput_rps": "requests/s",
    "p50_ms": "p50 ms",
    "p95_ms": "p95 ms",
    "p99_ms": "p99 ms",
    "error_ratio": "errors",
    "mean_batch_rows": "mean batch",
    "verdict": "SLO",
}
_DISPENSABLE: Final = ("p50 ms", "mean batch", "source", "p99 ms", "errors", "offered /s")
_NAMES: Final = {
    "max_batch_size": "size",
    "batch_timeout_micros": "µs",
    "num_batch_threads": "threads",
    "max_enqueued_batches": "queue",
}


def print_runs(entries: Sequence[RunEntry], *, json: bool, stream: TextIO | None = None) -> None:
    """One line a run, the newest first."""
    if json:
        document = {"runs": [entry.to_dict() for entry in entries]}
        print(json_text.dumps(document, indent=2), file=stream or sys.stdout)
        return
    headings = ["run", "scenario", "started (UTC)", "trials", "verdict", "recommended", "target"]
    rows = [
        [
            entry.path.name,
            entry.scenario,
            f"{entry.started:%Y-%m-%d %H:%M}",
            str(entry.trials),
            entry.verdict,
            short_label(entry.recommended) or "–",
            entry.target or "–",
        ]
        for entry in entries
    ]
    print_rows([headings, *rows], stream=stream, dispensable=("started (UTC)", "target", "trials"))


def print_trials(
    frame: DataFrame,
    *,
    sort: str | None,
    output: TableFormat,
    lower_is_better: bool = False,
    stream: TextIO | None = None,
) -> None:
    """The trials, sorted by a column (best first), as whatever is wanted; `lower_is_better` of the objective.

    Raises:
        UsageError: no such column, or Parquet to a terminal.
    """
    ordered = frame if sort is None else sorted_by(frame, sort, lower_is_better=lower_is_better)
    out = stream or sys.stdout
    match output:
        case "csv":
            ordered.to_csv(out, index=False)
        case "json":
            print(ordered.to_json(orient="records", indent=2, force_ascii=False), file=out)
        case "parquet":
            _write_parquet(ordered, out)
        case "markdown":
            labels = [short_label(str(label)) for label in ordered["configuration"]]
            _print_markdown(_cells(ordered.assign(configuration=labels)), out)
        case "table":
            labels = list(map(str, ordered["configuration"]))
            shown, common = brief_labels(labels)
            table = ordered.assign(configuration=shown)
            print_rows(_cells(table), stream=stream, dispensable=_DISPENSABLE)
            if common:
                print(f"All configurations with batching: {common}.", file=out)


def sorted_by(frame: DataFrame, name: str, *, lower_is_better: bool) -> DataFrame:
    """By a column of the frame, or `p95`, `throughput`: the best first, what has no value last.

    Raises:
        UsageError: no such column.
    """
    from batchtune.archive.table import HIGHER_IS_BETTER

    column = _SHORT.get(name, name)
    if column not in frame.columns and f"{column}_ms" in frame.columns:
        column = f"{column}_ms"
    if column not in frame.columns:
        raise UsageError(
            f"--sort {name}: no such column", hint=f"one of: {', '.join(map(str, frame.columns))}"
        )
    figure = column.removesuffix("_low").removesuffix("_high")
    descending = not lower_is_better if figure == "objective" else figure in HIGHER_IS_BETTER
    return frame.sort_values(column, ascending=not descending, kind="stable")


def short_label(label: str | None) -> str:
    """`size 8 · 500 µs · 2 threads` of a configuration's label, for a table."""
    words = []
    for word in (label or "").split(" "):
        name, equals, value = word.partition("=")
        short = _NAMES.get(name, name)
        if short == "threads":
            words.append(counted(int(value), "thread") if value.isdecimal() else f"{value} threads")
        else:
            words.append(f"{value} µs" if short == "µs" else f"{short} {value}" if equals else word)
    return (" · " if "=" in (label or "") else " ").join(words)


def brief_labels(labels: Sequence[str]) -> tuple[list[str], str]:
    """Short labels for a column, without the parameters that all which set any have in common, and these parameters."""
    whole = [short_label(label) for label in labels]
    setting = [label.split(" ") for label in dict.fromkeys(labels) if "=" in label]
    if len(setting) < 2 or any(word.endswith(";") for words in setting for word in words):
        return whole, ""
    common = [word for word in setting[0] if all(word in words for words in setting)]
    own = [" ".join(word for word in label.split(" ") if word not in common) for label in labels]
    if not all(own):
        return whole, ""
    return list(map(short_label, own)), short_label(" ".join(common))


def _print_markdown(rows: Sequence[Sequence[str]], out: TextIO) -> None:
    for row in (rows[0], ["---", *("---:" for _ in rows[0][1:])], *rows[1:]):
        cells = " | ".join(cell.replace("|", "\\|") for cell in row)
        print(f"| {cells} |", file=out)


def _cells(frame: DataFrame) -> list[list[str]]:
    """Head and rows; columns without any value stay away."""
    names = [name for name in _SHOWN if name in frame and not frame[name].isna().all()]
    known = frame[names].notna()
    rows = [[_SHOWN[name] for name in names]]
    rows += [
        [
            _cell(name, value) if there else "–"
            for name, value, there in zip(names, values, which, strict=True)
        ]
        for values, which in zip(
            frame[names].itertuples(index=False), known.itertuples(index=False), strict=True
        )
    ]
    return rows


def _cell(name: str, value: object) -> str:
    if name == "factor" and isinstance(value, float):
        return f"×{rounded(value)}"
    if name == "error_ratio" and isinstance(value, float):
        return percentage(value)
    if isinstance(value, float):
        return rounded(value)
    return str(value)


def _write_parquet(frame: DataFrame, out: TextIO) -> None:
    if out.isatty():
        raise UsageError(
            "--parquet is no text for a terminal", hint="batchtune trials --parquet > trials.parquet"
        )
    content = io.BytesIO()
    frame.to_parquet(content, index=False)
    out.flush()
    out.buffer.write(content.getvalue())
    out.buffer.flush()
