"""What is in a batch, and why did it close?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from batchtune.batching.parameters import Configuration
from batchtune.report.html.shell.drawing import (
    Figure,
    Section,
    Shown,
    Trace,
    axis,
    legend_above,
    numbers,
    panel_title,
    safe,
)
from batchtune.report.tables import percent
from batchtune.target.telemetry import ServerActivity
from batchtune.tune.answer.reason import closing

_REASONS: Final = {"full": "@compute", "timeout": "@queue", "no_room": "@unbatched", "closed": "@other"}
"""The colour of each; what a later server says comes behind."""
_TELLING_SHARE: Final = 15.0
_SIZES_PX: Final = 190
_GAP_PX: Final = 96
_UPRIGHT: Final = 6
_SLANTED_PX: Final = 50
"""The names of more bars than that stand askew on a phone."""
_MOST_SIZES: Final = 20
"""Of bars side by side; more are summed up between powers of two."""


def sizes(shown: Sequence[Shown], *, which: str) -> Section:
    """How many rows the batches hold, as shares of all batches; beside it why they closed."""
    section = Section(anchor="batches", title="Batch sizes, and why batches closed")
    activities = [(curve, activity) for curve in shown if (activity := _activity(curve)) is not None]
    if not activities:
        return replace(section, missing="the server reports nothing about its batches")
    every_size = sorted({size for _, activity in activities for size in activity.batches_by_rows})
    names = {size: str(size) for size in every_size}
    if len(every_size) > _MOST_SIZES:
        names = {size: _range_of(size) for size in every_size}
    data = [_bars_of(curve, activity, names) for curve, activity in activities]
    closed = [(curve, activity) for curve, activity in activities if sum(activity.close_reasons.values())]
    bars_px = 34 * len(closed)
    gap_px = _GAP_PX if len(set(names.values())) <= _UPRIGHT else _GAP_PX + _SLANTED_PX
    area_px = _SIZES_PX + (gap_px + bars_px if closed else 0)
    height_px = area_px + 110
    layout: dict[str, Any] = {
        "barmode": "group",
        "bargap": 0.2 if len(set(names.values())) > 4 else 0.6,
        "xaxis": axis(
            "",
            type="category",
            categoryorder="array",
            categoryarray=list(dict.fromkeys(names.values())),
        ),
        "yaxis": axis("% of the batches", rangemode="tozero", domain=[1 - _SIZES_PX / area_px, 1]),
        "annotations": [panel_title("rows in a batch")],
        "legend": legend_above(height_px),
    }
    if closed:
        layout |= {
            "xaxis2": axis("% of the batches", range=[0, 100], anchor="y2"),
            "yaxis2": axis("", type="category", anchor="x2", domain=[0, bars_px / area_px]),
        }
        layout["annotations"].append(panel_title("why they closed", "2"))
        data += _reason_bars(closed)
    return replace(
        section,
        lead=_lead(activities) if len(activities) <= 3 else "",
        figure=Figure(data=data, layout=layout, height_px=height_px),
        how=f"By the server's counters, rows after padding. {which}, warm-up included.",
    )


def _activity(curve: Shown) -> ServerActivity | None:
    activity = None if curve.measured is None else curve.measured.server
    return activity if activity is not None and activity.batches_by_rows and activity.batches else None


def _bars_of(curve: Shown, activity: ServerActivity, names: Mapping[int, str]) -> Trace:
    batches = sum(activity.batches_by_rows.values())
    shares: dict[str, float] = {}
    for size, count in sorted(activity.batches_by_rows.items()):
        shares[names[size]] = shares.get(names[size], 0.0) + 100 * count / batches
    name = safe(curve.name)
    return {
        "type": "bar",
        "x": list(shares),
        "y": numbers(shares.values()),
        "name": name,
        "marker": {"color": curve.look.colour, "line": {"width": 1, "color": "@surface"}},
        "hovertemplate": "%{y:.3~r} % of the batches hold %{x} rows<extra>" + name + "</extra>",
    }


def _range_of(size: int) -> str:
    """The powers of two that it lies between: 5 to 8 are `5–8`."""
    most = 1 << max(size - 1, 0).bit_length()
    return f"{most // 2 + 1}–{most}" if most > 2 else str(size)


def _reason_bars(closed: Sequence[tuple[Shown, ServerActivity]]) -> list[Trace]:
    """One bar a name, its parts as texts within: they need no legend."""
    present = {reason for _, activity in closed for reason, count in activity.close_reasons.items() if count}
    begin = [0.0] * len(closed)
    bars: list[Trace] = []
    for reason in [*(known for known in _REASONS if known in present), *sorted(present - _REASONS.keys())]:
        bar, shares = _reason_bar(reason, closed[::-1], begin)
        bars.append(bar)
        begin = [start + share for start, share in zip(begin, shares, strict=True)]
    return bars


def _reason_bar(
    reason: str, closed: Sequence[tuple[Shown, ServerActivity]], begin: Sequence[float]
) -> tuple[Trace, list[float]]:
    """From where the reasons before end; with its shares, in per cent."""
    shares = [
        100 * activity.close_reasons.get(reason, 0) / sum(activity.close_reasons.values())
        for _, activity in closed
    ]
    reasons = [safe(_in_words(reason, curve.trial.configuration)) for curve, _ in closed]
    bar: Trace = {
        "type": "bar",
        "orientation": "h",
        "offsetgroup": "reasons",
        "width": 0.7,
        "y": [safe(curve.name) for curve, _ in closed],
        "x": numbers(shares),
        "base": numbers(begin),
        "text": [
            words if share >= _TELLING_SHARE else "" for words, share in zip(reasons, shares, strict=True)
        ],
        "hovertext": [f"{share:.3g} % {words}" for share, words in zip(shares, reasons, strict=True)],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "name": safe(reason),
        "showlegend": False,
        "marker": {"color": _REASONS.get(reason, "@other"), "line": {"width": 1, "color": "@surface"}},
        "hovertemplate": "%{hovertext}<extra>%{y}</extra>",
        "xaxis": "x2",
        "yaxis": "y2",
    }
    return bar, shares


def _in_words(reason: str, configuration: Configuration) -> str:
    return closing(reason, configuration).removeprefix("close ").removeprefix("because they are ")


def _lead(activities: Sequence[tuple[Shown, ServerActivity]]) -> str:
    lines = [
        _closings(curve.name, activity, curve.trial.configuration)
        for curve, activity in activities
        if activity.mean_batch_rows is not None or activity.close_reasons
    ]
    return " ".join(lines)


def _closings(name: str, activity: ServerActivity, configuration: Configuration) -> str:
    closed = sum(activity.close_reasons.values())
    held = "" if activity.mean_batch_rows is None else f"{activity.mean_batch_rows:.3g} rows on average"
    if not closed:
        return f"{name}: {held}."
    shares = sorted(activity.close_reasons.items(), key=lambda item: -item[1])
    why = ", ".join(f"{percent(count / closed)} {closing(reason, configuration)}" for reason, count in shares)
    return f"{name}: {held}; {why}."
