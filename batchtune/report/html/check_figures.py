"""By how much did each gate's figure change, and how did it move from check to check?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from batchtune.check.account import Account
from batchtune.check.change_points import ERROR_RATE, SIDE_MIN
from batchtune.check.finding import Finding, State
from batchtune.check.gate import margin_text
from batchtune.check.history import Series
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.gate.history import change_lines
from batchtune.report.gate.statement import change_text, unit_of
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Trace,
    axis,
    bars,
    finite,
    legend_above,
    numbers,
    panel_title,
    safe,
)
from batchtune.report.units import number
from batchtune.scenario.units import percentage

_STATES: Final[dict[State, tuple[str, str]]] = {
    "regressed": ("@limit", "x"),
    "improved": ("@defaults", "circle"),
    "ok": ("@chosen", "circle"),
    "open": ("@unbatched", "circle-open"),
}
_MOST_DRAWN: Final = 3.0
"""A change of four times, or an end of an interval there, leaves the picture and stays in the table."""


def gate_changes(account: Account) -> Section:
    """Each gate's change with its interval, and its margin as a mark on the side that is worse."""
    section = Section(anchor="gates", title="What changed, and from when on it counts")
    shown = [finding for finding in account.conclusion.findings if math.isfinite(finding.change.value)]
    if not shown:
        return replace(section, missing="no figure was measured on both sides")
    names = [_short_name(finding) for finding in shown]
    data: list[Trace] = []
    for state, (colour, symbol) in _STATES.items():
        mine = [(finding, name) for finding, name in zip(shown, names, strict=True) if finding.state == state]
        if mine:
            data.append(_changes(mine, state, colour, symbol))
    data.append(_margins(list(zip(shown, names, strict=True))))
    runs = "of two sessions, one of them kept" if account.stored else "made in turns"
    height_px = 150 + 40 * len(shown)
    layout: dict[str, Any] = {
        "xaxis": axis("change, % (of errors: points)", zeroline=True),
        "yaxis": axis("", type="category", categoryorder="array", categoryarray=names[::-1]),
        "legend": legend_above(height_px),
    }
    return replace(
        section,
        lead=f"{_counting(account)} Below 0 is less: worse of throughput and capacity alone.",
        figure=Figure(data=data, layout=layout, height_px=height_px),
        how=(
            f"One difference of logarithms a block, of two runs {runs}; the point is the Hodges-Lehmann median, "
            "the bar its one-sided signed-rank bounds at the levels of the last look. An end that so few blocks do not "
            "give, or beyond four times, is not drawn."
        ),
    )


def _short_name(finding: Finding) -> str:
    """Without the unit."""
    gate = finding.gate
    return f"{gate.model} {gate.metric}" if gate.model else unit_of(gate.name)[0].partition(" ")[0]


def history_of(series: Sequence[Series], *, utc: str | None) -> Section:
    """The candidates' figures from check to check, with the changes that lasted; `utc` is when this one was kept."""
    section = Section(anchor="history", title="From check to check")
    shown = [figure for figure in series if len(figure.values) > 1]
    if not shown:
        return replace(
            section, missing="the history holds no other check of this scenario on this kind of CPU"
        )
    data: list[Trace] = []
    layout: dict[str, Any] = {
        "grid": {"rows": len(shown), "columns": 1, "pattern": "independent"},
        "annotations": [],
        "shapes": [],
        "showlegend": False,
    }
    for at, figure in enumerate(shown):
        panel = "" if at == 0 else str(at + 1)
        data += [trace | {"xaxis": f"x{panel}", "yaxis": f"y{panel}"} for trace in _one_history(figure, utc)]
        layout[f"xaxis{panel}"] = axis("check" if at == len(shown) - 1 else "", dtick=_tick(figure), tick0=1)
        layout[f"yaxis{panel}"] = axis("")
        layout["annotations"].append(panel_title(unit_of(figure.metric)[0], panel))
        layout["shapes"] += [_change_mark(change.at, panel) for change in figure.changes]
    return replace(
        section,
        lead=" ".join(change_lines(shown)),
        figure=Figure(data=data, layout=layout, height_px=90 + 170 * len(shown)),
        how=(
            "The candidate's median of each check of this scenario on this kind of CPU; the star is this one. Dashed: "
            f"the split with the largest rank CUSUM, {SIDE_MIN} checks or more on either side, tested by permutation "
            f"({percentage(ERROR_RATE)} of series without a change show one); horizontal: the medians between."
        ),
    )


def _counting(account: Account) -> str:
    """What a bar means for the verdict."""
    if account.conclusion.is_void:
        return "The check is void, so that no bar counts."
    return "A bar that lies beyond its margin fails the check; one that holds it is open."


def _changes(mine: Sequence[tuple[Finding, str]], state: State, colour: str, symbol: str) -> Trace:
    estimates = [_drawn(finding.change) for finding, _ in mine]
    return {
        "x": numbers((estimate.value for estimate in estimates), 100),
        "y": [name for _, name in mine],
        "error_x": {**bars(estimates, 100), "color": colour, "thickness": 2, "width": 5},
        "mode": "markers",
        "name": state,
        "marker": {"color": colour, "symbol": symbol, "size": 11, "line": {"width": 2}},
        "text": [
            f"{safe(finding.gate.name)} {safe(change_text(finding))}<br>margin "
            f"{safe(margin_text(finding.gate, finding.margin))}, {finding.blocks} blocks: {state}"
            for finding, _ in mine
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _margins(shown: Sequence[tuple[Finding, str]]) -> Trace:
    return {
        "x": numbers(
            (finding.gate.change(finding.gate.limit_of(finding.margin)) for finding, _ in shown), 100
        ),
        "y": [name for _, name in shown],
        "mode": "markers",
        "name": "margin",
        "marker": {"symbol": "line-ns-open", "size": 20, "color": "@ink", "line": {"width": 2}},
        "hovertemplate": "margin %{x:+.3~r} %<extra></extra>",
    }


def _drawn(change: Estimate) -> Estimate:
    value, low, high = (
        end if abs(end) <= _MOST_DRAWN else math.nan for end in (change.value, change.low, change.high)
    )
    return Estimate(value=value, low=low, high=high)


def _one_history(series: Series, utc: str | None) -> list[Trace]:
    title, scale = unit_of(series.metric)
    count = len(series.values)
    symbols = ["star" if time == utc else "circle" for time in series.utc]
    points: Trace = {
        "x": list(range(1, count + 1)),
        "y": numbers(series.values, scale),
        "mode": "lines+markers",
        "line": {"color": "@chosen", "width": 1.2},
        "marker": {
            "color": "@chosen",
            "symbol": symbols,
            "size": [14 if mark == "star" else 8 for mark in symbols],
        },
        "text": [
            f"{safe(time[:16])}{f', commit {safe(commit[:9])}' if commit else ''}"
            for time, commit in zip(series.utc, series.commits, strict=True)
        ],
        "hovertemplate": f"check %{{x}}: %{{y:,.4~r}} {safe(title)}<br>%{{text}}<extra></extra>",
    }
    edges = [0, *(change.at for change in series.changes), count]
    medians = (
        [series.changes[0].before, *(change.after for change in series.changes)] if series.changes else []
    )
    steps: list[Trace] = [
        {
            "x": [start + 0.5, end + 0.5],
            "y": [finite(median, scale)] * 2,
            "mode": "lines",
            "line": {"color": "@limit", "width": 2},
            "hovertemplate": f"median {number(median * scale)}<extra></extra>",
        }
        for (start, end), median in zip(pairwise(edges), medians, strict=False)
    ]
    return [points, *steps]


def _change_mark(at: int, panel: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": f"x{panel}",
        "x0": at + 0.5,
        "x1": at + 0.5,
        "yref": f"y{panel} domain",
        "y0": 0,
        "y1": 1,
        "line": {"color": "@limit", "width": 1.4, "dash": "dash"},
    }


def _tick(series: Series) -> int:
    return max(1, math.ceil(len(series.values) / 12))
