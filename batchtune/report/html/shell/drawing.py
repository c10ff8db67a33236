"""Draws figures as plotly's plain data: colours by role, intervals as bars, names escaped.

A colour is a role such as `@chosen`; the page puts in its own, light or dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from batchtune.archive.run import Run
from batchtune.batching.parameters import Configuration
from batchtune.errors import ArchiveError
from batchtune.measure.measurement import Measurement
from batchtune.measure.quantiles import Estimate
from batchtune.report.run_tables import short_label
from batchtune.scenario.spec.check import SloSpec
from batchtune.tune.trials.trial import Trial
from batchtune.units import rounded_duration

if TYPE_CHECKING:
    from batchtune.load.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStyle:
    """A colour of the page, a symbol and a dash, so that lines are told apart without colour too."""

    colour: str
    symbol: str
    dash: str


LINE_STYLES: Final = (
    LineStyle(colour="@chosen", symbol="circle", dash="solid"),
    LineStyle(colour="@unbatched", symbol="diamond", dash="dash"),
    LineStyle(colour="@defaults", symbol="square", dash="dot"),
    LineStyle(colour="@predicted", symbol="triangle-up", dash="dashdot"),
    LineStyle(colour="@queue", symbol="cross", dash="longdash"),
    LineStyle(colour="@compute", symbol="hexagon", dash="longdashdot"),
    LineStyle(colour="@muted", symbol="star-triangle-down", dash="solid"),
    LineStyle(colour="@other", symbol="pentagon", dash="dash"),
)
"""Of variants and load points, in their order; a ninth looks like the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedRun:
    """One trial that stands for a name in the figures; `run` keeps its requests."""

    name: str
    look: LineStyle
    trial: Trial
    run: Run

    @property
    def measured(self) -> Measurement | None:
        return self.trial.measurement

    def samples(self) -> Samples | None:
        """Every request of it; None where they were not kept."""
        try:
            return self.run.requests(self.trial.number)
        except ArchiveError:
            return None


def is_emulated(trials: Sequence[Trial]) -> bool:
    """Whether the device of any trial was emulated by its service time."""
    servers = (trial.measurement.server for trial in trials if trial.measurement is not None)
    return any(server is not None and server.emulated for server in servers)


def provenance_of(run: Run) -> Mapping[str, Any]:
    """On what it ran; empty where nobody kept it."""
    try:
        return run.provenance()
    except ArchiveError:
        return {}


Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Traces and layout as plotly.js takes them; `height_px` is that of the plot."""

    data: list[Trace]
    layout: dict[str, Any]
    height_px: int = 380


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Texts by row, below their `headings`; `marked` is the row that stands out."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A figure or a table, what it shows (`lead`) and `how` it was computed; without both `missing` says why.

    The points of a `clickable` figure have the number of a detail as their `customdata`. One of `paragraphs` has none.
    """

    anchor: str
    title: str
    lead: str = ""
    figure: Figure | None = None
    table: Table | None = None
    missing: str = ""
    how: str = ""
    clickable: bool = False
    paragraphs: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merit:
    """The objective as it is plotted: its name with the unit, its scale, and whether more is better."""

    title: str
    scale: float
    more_is_better: bool

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.more_is_better else min(values)


WIDE: Final = 8.0
"""Times that the ends of an axis are apart from which on it is logarithmic."""

MERITS: Final = {
    "throughput": Merit(title="requests/s", scale=1.0, more_is_better=True),
    "capacity": Merit(title="capacity, requests/s", scale=1.0, more_is_better=True),
    "latency": Merit(title="p95, ms", scale=1e3, more_is_better=False),
    "room": Merit(title="share of the tightest limit", scale=1.0, more_is_better=False),
}
"""By objective; `room` is the latency of several models."""


def safe(text: object) -> str:
    """A text for plotly, which reads tags in what it shows."""
    return html.escape(str(text))


def label(configuration: Configuration) -> str:
    """A configuration in a few words."""
    return short_label(configuration.label())


def finite(value: float | None, scale: float = 1.0) -> float | None:
    """Scaled to three or so digits, for JSON; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value * scale:.6g}")


def numbers(values: Iterable[float | None], scale: float = 1.0) -> list[float | None]:
    return [finite(value, scale) for value in values]


def bars(estimates: Sequence[Estimate], scale: float = 1.0) -> dict[str, Any]:
    """Error bars from each interval; an end that is not known has none."""

    def length(high: float, low: float) -> float:
        return abs(high - low) * scale if math.isfinite(high) and math.isfinite(low) else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [length(estimate.high, estimate.value) for estimate in estimates],
        "arrayminus": [length(estimate.value, estimate.low) for estimate in estimates],
        "thickness": 1.2,
        "width": 3,
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with its unit in the title."""
    return {"title": {"text": title, "standoff": 12}, "automargin": True, **more}


def log_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """A logarithmic axis; `span`, for the page's marks, is how many times its ends are apart."""
    known = [value for value in values if value is not None and value > 0.0]
    return axis(title, type="log", span=max(known) / min(known) if known else 10.0)


def spread_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """Logarithmic where the values lie more than WIDE times apart, else from zero."""
    known = [value for value in values if value is not None and value > 0.0]
    if known and max(known) > WIDE * min(known):
        return log_axis(title, known)
    return axis(title, rangemode="tozero")


def with_limit(layout: dict[str, Any], value: float, text: str, *, panel: str = "") -> dict[str, Any]:
    """The layout with the SLO's line across its panel; an annotation on a logarithmic axis stands at the exponent."""
    log = layout[f"yaxis{panel}"].get("type") == "log"
    line = {
        "type": "line",
        "xref": f"x{panel} domain",
        "x0": 0,
        "x1": 1,
        "yref": f"y{panel}",
        "y0": value,
        "y1": value,
        "line": {"color": "@limit", "width": 1.5, "dash": "dash"},
    }
    note = {
        "xref": f"x{panel} domain",
        "x": 1,
        "yref": f"y{panel}",
        "y": math.log10(value) if log else value,
        "text": safe(text),
        "showarrow": False,
        "font": {"color": "@limit", "size": 12},
        "xanchor": "right",
        "yanchor": "bottom",
    }
    drawn = {"shapes": [line], "annotations": [note]}
    return layout | {key: [*layout.get(key, ()), *drawn[key]] for key in drawn}


def limited(
    slo: SloSpec, layout: dict[str, Any], *, quantiles: Sequence[str] = ("p95",), panel: str = ""
) -> dict[str, Any]:
    """The layout with a line at each limit that the SLO sets for one of these quantiles."""
    for name, limit_s in slo.limits().items():
        if name in quantiles:
            layout = with_limit(
                layout, limit_s * 1e3, f"SLO: {name} ≤ {rounded_duration(limit_s)}", panel=panel
            )
    return layout


def legend_above(height_px: int) -> dict[str, float]:
    """Where the legend stands clear of the titles of panels, in a figure so high; also on paper, where it is less."""
    return {"y": 1.0 + 28.0 / max(height_px - 120, 50)}


def panel_title(text: str, panel: str = "") -> dict[str, Any]:
    """An annotation at the upper left of a panel."""
    return {
        "xref": f"x{panel} domain",
        "yref": f"y{panel} domain",
        "x": 0,
        "y": 1.02,
        "text": f"<b>{safe(text)}</b>",
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom",
    }
