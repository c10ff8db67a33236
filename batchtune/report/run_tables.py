"""Renders the runs there are, and the trials of one: as a table, as JSON, CSV, Markdown or Parquet."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from typing import Final, Literal

from batchtune.archive.listing import RunEntry
from batchtune.archive.table import HIGHER_IS_BETTER, Table, parquet
from batchtune.errors import UsageError
from batchtune.report.findings import labels, print_json
from batchtune.report.tables import markdown_lines, print_rows, print_text
from batchtune.units import counted, percentage, rounded

TableFormat = Literal["table", "csv", "markdown", "parquet", "json"]

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
    "ttft_p95_ms": "ttft_p95 ms",
    "itl_p99_ms": "itl_p99 ms",
    "p50_ms": "p50 ms",
    "p95_ms": "p95 ms",
    "p99_ms": "p99 ms",
    "error_ratio": "errors",
    "mean_batch_rows": "mean batch",
    "verdict": "SLO",
}
"""Column of a trial table -> heading, of the columns that are printed."""


def print_runs(entries: Sequence[RunEntry], *, json: bool) -> None:
    """Print a line for each run in the order given, or with `json` one document `{"runs": […]}`, to stdout by
    default."""
    if json:
        print_json({"runs": [entry.to_dict() for entry in entries]})
        return
    headings = ["run", "scenario", "started (UTC)", "trials", "verdict", "recommended", "target"]
    rows = [
        [
            entry.path.name,
            entry.scenario,
            f"{entry.started:%Y-%m-%d %H:%M}",
            str(entry.trials),
            labels("answers").get(entry.verdict, entry.verdict),
            short_label(entry.recommended) or "–",
            entry.target or "–",
        ]
        for entry in entries
    ]
    print_rows([headings, *rows], dispensable=("started (UTC)", "target", "trials"))


def print_trials(
    trials: Table,
    *,
    sort: str | None,
    output: TableFormat,
    lower_is_better: bool = False,
) -> None:
    """Print the trials in the format `output`, sorted by column `sort`, the best first; None: in their order.

    `lower_is_better`: for the objective, which decides the order of the column `objective`.

    Raises:
        UsageError: no such column, or Parquet to a terminal.
    """
    dispensable = ("p50 ms", "mean batch", "source", "p99 ms", "errors", "offered /s")
    ordered = trials if sort is None else sorted_by(trials, sort, lower_is_better=lower_is_better)
    match output:
        case "csv":
            csv.writer(sys.stdout, lineterminator="\n").writerows([list(ordered), *_rows(ordered)])
        case "json":
            print_json([dict(zip(ordered, row, strict=True)) for row in _rows(ordered)])
        case "parquet":
            _write_parquet(ordered)
        case "markdown":
            labels = [short_label(str(label)) for label in ordered["configuration"]]
            rows = _cells({**ordered, "configuration": labels})
            sys.stdout.writelines(f"{line}\n" for line in markdown_lines(rows))
        case "table":
            shown, common = brief_labels(list(map(str, ordered["configuration"])))
            print_rows(_cells({**ordered, "configuration": shown}), dispensable=dispensable)
            if common:
                print_text(f"All configurations with batching: {common}.", whole=True)


def sorted_by(trials: Table, name: str, *, lower_is_better: bool) -> Table:
    """Return the trials sorted by a column, the best first, those without a value last.

    `name`: a column, or a short name such as `p95`, `throughput`, `capacity` or `time`. `lower_is_better`:
    for the column `objective`.

    Raises:
        UsageError: no such column.
    """
    short = {"throughput": "throughput_rps", "capacity": "objective", "time": "started_utc"}
    column = short.get(name, name)
    if column not in trials and f"{column}_ms" in trials:
        column = f"{column}_ms"
    if column not in trials:
        raise UsageError(f"--sort {name}: no such column", hint=f"one of: {', '.join(trials)}")
    figure = column.removesuffix("_low").removesuffix("_high")
    descending = not lower_is_better if figure == "objective" else figure in HIGHER_IS_BETTER
    values = trials[column]
    known = sorted(
        (at for at, value in enumerate(values) if value is not None),
        key=values.__getitem__,
        reverse=descending,
    )
    order = [*known, *(at for at, value in enumerate(values) if value is None)]
    return {name: [column[at] for at in order] for name, column in trials.items()}


def short_label(label: str | None) -> str:
    """Return a configuration's label, shortened for a table: `size 8 · 500 µs · 2 threads`; with several
    models a part for each; for None ""."""
    return "; ".join(map(_short_part, (label or "").split("; ")))


def _short_part(part: str) -> str:
    model, colon, parameters = part.rpartition(": ")
    names = {
        "max_batch_size": "size",
        "batch_timeout_micros": "µs",
        "num_batch_threads": "threads",
        "max_enqueued_batches": "queue",
    }
    words = []
    for word in parameters.split(" "):
        name, equals, value = word.partition("=")
        short = names.get(name, name)
        if short == "threads":
            words.append(counted(int(value), "thread") if value.isdecimal() else f"{value} threads")
        else:
            words.append(f"{value} µs" if short == "µs" else f"{short} {value}" if equals else word)
    return f"{model}{colon}{(' · ' if '=' in part else ' ').join(words)}"


def brief_labels(labels: Sequence[str]) -> tuple[list[str], str]:
    """Return (labels, common): short labels without the parameters that all labels which set any share, and
    these parameters.

    common is "" where nothing is shared or a label would become empty.
    """
    whole = [short_label(label) for label in labels]
    setting = [_words(label) for label in dict.fromkeys(labels) if "=" in label]
    if len(setting) < 2:
        return whole, ""
    common = [word for word in setting[0] if all(word in words for words in setting)]
    own = [_label([word for word in _words(label) if word not in common]) for label in labels]
    if not all(own):
        return whole, ""
    return list(map(short_label, own)), short_label(_label(common))


def _words(label: str) -> list[tuple[str, str]]:
    """Return (model, `name=value`) for each word of a label; model "": all models share it."""
    parts = [part.rpartition(": ") for part in label.split("; ")]
    return [(model, word) for model, _, parameters in parts for word in parameters.split(" ")]


def _label(words: Sequence[tuple[str, str]]) -> str:
    """Return the label with these words; the inverse of `_words`."""
    parts = {model: " ".join(word for own, word in words if own == model) for model, _ in words}
    return "; ".join(f"{model}: {text}" if model else text for model, text in parts.items())


def _rows(trials: Table) -> list[tuple[object, ...]]:
    return list(zip(*trials.values(), strict=True))


def _cells(trials: Table) -> list[list[str]]:
    """Return headings and rows of texts for the columns of `_SHOWN` in which a trial has a value."""
    shown = {
        name: trials[name] for name in _SHOWN if any(value is not None for value in trials.get(name, ()))
    }
    if "verdict" in shown:  # a noisy host or a late client is a mark behind what the figures say
        pairs = zip(trials["decision"], shown["verdict"], strict=True)
        shown["verdict"] = [" ".join(filter(None, dict.fromkeys(pair))) or None for pair in pairs]
    failed = ["failed" if state == "failed" else None for state in trials["state"]]
    if any(failed):
        verdicts = shown.get("verdict", trials["verdict"])
        shown["verdict"] = [verdict or fault for verdict, fault in zip(verdicts, failed, strict=True)]
    rows = [[_SHOWN[name] for name in shown]]
    return rows + [
        [_cell(name, value) for name, value in zip(shown, values, strict=True)] for values in _rows(shown)
    ]


def _cell(name: str, value: object) -> str:
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    if name == "error_ratio":
        return percentage(value)
    return f"{'×' if name == 'factor' else ''}{rounded(value)}"


def _write_parquet(trials: Table) -> None:
    if sys.stdout.isatty():
        raise UsageError(
            "--parquet is binary, not text for a terminal", hint="batchtune trials --parquet > trials.parquet"
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(parquet(trials))
    sys.stdout.buffer.flush()
