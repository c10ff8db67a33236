"""How does the history of checks read: a line a check, and when which figure changed?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from batchtune.check.change_points import ERROR_RATE, LEAST, ChangePoint
from batchtune.check.history import Series
from batchtune.report.gate.statement import UNITS, unit_of
from batchtune.report.tables import console_on, paragraph, print_table, table_of, text_width
from batchtune.report.units import number
from batchtune.scenario.units import counted, percentage


def print_history(
    lines: Sequence[Mapping[str, Any]], series: Sequence[Series], *, stream: TextIO | None = None
) -> None:
    """The checks, the oldest first, with what the candidate reached; then the changes."""
    console = console_on(stream)
    kept = {name: list(UNITS).index(name.rpartition(":")[2]) for line in lines for name in line["gates"]}
    metrics = sorted(kept, key=lambda name: (":" in name, kept[name]))
    table = table_of("when", "scenario", "verdict", *(unit_of(metric)[0] for metric in metrics), "commit")
    for line in lines:
        table.add_row(
            line["utc"][:16], line["scenario"], line["verdict"], *_cells(line, metrics), _commit(line)
        )
    print_table(console, table)
    for text in change_lines(series):
        console.print(paragraph(text, width=text_width(stream)), markup=False, soft_wrap=True)


def change_lines(series: Sequence[Series]) -> list[str]:
    """One sentence for each change, and what the silence of the others is worth."""
    sentences = [_change(figure, change) for figure in series for change in figure.changes]
    looked_at = [figure for figure in series if len(figure.values) >= LEAST]
    if not looked_at:
        return [f"Changes are looked for from {LEAST} checks of a scenario on one kind of host on."]
    worth = (
        f"{counted(len(looked_at), 'figure')} looked at; each without a change shows one in "
        f"{percentage(ERROR_RATE)} of all histories."
    )
    return [*(sentences or ["No change was found."]), worth]


def _change(series: Series, change: ChangePoint) -> str:
    title, scale = unit_of(series.metric)
    commit = series.commits[change.at]
    sign = "+" if change.change >= 0 else "−"
    share = "" if math.isnan(change.change) else f" ({sign}{percentage(abs(change.change), 1)})"
    return (
        f"{series.scenario}: {title} {number(change.before * scale)} → {number(change.after * scale)}"
        f"{share} from {series.utc[change.at][:16]} on"
        f"{f', commit {commit[:9]}' if commit else ''}"
    )


def _cells(line: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    cells = []
    for metric in metrics:
        after = line["gates"].get(metric, {}).get("after")
        cells.append(number(float(after) * unit_of(metric)[1]) if after is not None else "–")
    return cells


def _commit(line: Mapping[str, Any]) -> str:
    return (line.get("commit") or "–")[:9]
