"""Draws figures as plotly's plain data: colours by role, intervals as bars, names escaped.

A colour is a role such as `@chosen`; the page puts in its own, light or dark.
"""

from __future__ import annotations

import html
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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
    """How a line is drawn: colour by role, symbol and dash, so that lines differ without colour too."""

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
"""Styles of variants and load points, in their order; a ninth one looks like the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedRun:
    """One trial that a figure shows under `name`; `run` has its requests."""

    name: str
    look: LineStyle
    trial: Trial
    run: Run

    @property
    def measured(self) -> Measurement | None:
        """The trial's measurement; None where it failed."""
        return self.trial.measurement

    def samples(self) -> Samples | None:
        """Return every request of the trial; None where the run's folder lacks them."""
        try:
            return self.run.requests(self.trial.number)
        except ArchiveError:
            return None


def is_emulated(trials: Sequence[Trial]) -> bool:
    """Whether the device of any trial was emulated by its service time."""
    servers = (trial.measurement.server for trial in trials if trial.measurement is not None)
    return any(server is not None and server.emulated for server in servers)


def provenance_of(run: Run) -> Mapping[str, Any]:
    """Return a run's provenance; {} where it has none."""
    try:
        return run.provenance()
    except ArchiveError:
        return {}


Trace = dict[str, Any]
"""A trace of plotly.js."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Traces and layout of a figure, as plotly.js takes them; `height_px`: of the whole figure."""

    data: list[Trace]
    layout: dict[str, Any]
    height_px: int = 380


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts, the headings first; `marked`: index of the row, without the headings, that stands out."""

    rows: Sequence[Sequence[str]]
    marked: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page: a figure, a table or paragraphs, with the text around it.

    `anchor`: its id in the page. `lead`: what it shows. `how`: how it was computed. `missing`: why it has no
    content, "" where it has. `clickable`: each point of the figure has an index of `TrialTable.details` as
    its `customdata`.
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
    """How a figure that is searched for is plotted.

    `title`: with the unit. `scale`: factor that turns the stored value into that unit. `more_is_better`: else
    less is.
    """

    title: str
    scale: float
    more_is_better: bool

    def best(self, values: Sequence[float]) -> float:
        """Return the best of the values: the largest, or the smallest where less is better."""
        return max(values) if self.more_is_better else min(values)


WIDE: Final = 8.0
"""An axis is logarithmic where its greatest value is more than this many times the least."""

MERITS: Final = {
    "throughput": Merit(title="requests/s", scale=1.0, more_is_better=True),
    "capacity": Merit(title="capacity, requests/s", scale=1.0, more_is_better=True),
    "rows": Merit(title="rows/s", scale=1.0, more_is_better=True),
    "p95": Merit(title="p95, ms", scale=1e3, more_is_better=False),
    "room": Merit(title="share of the tightest limit", scale=1.0, more_is_better=False),
}
"""Figure that is searched for or compared -> how it is plotted; "room" is the latency of several models."""


@cache
def page_texts() -> Mapping[str, Mapping[str, str]]:
    """Return the texts of sections.toml: key of a section -> name of a text -> text."""
    with Path(__file__).with_name("sections.toml").open("rb") as file:
        return tomllib.load(file)


def section(
    key: str,
    content: Figure | Table | Sequence[str] | None,
    *,
    anchor: str = "",
    variant: str = "",
    clickable: bool = False,
    **figures: object,
) -> Section:
    """Make a section with the texts of sections.toml under `key`, in which `figures` are filled in.

    `content` None or empty: a section that says why it is missing. `variant`: of each text the one named
    `…_VARIANT`, where there is one. `anchor`, `clickable`: as in `Section`.
    """
    texts = page_texts()[key]

    def text(name: str) -> str:
        return texts.get(f"{name}_{variant}", texts.get(name, "")).format(**figures)

    if not content:
        return Section(anchor=anchor or key, title=text("title"), missing=text("missing"))
    return Section(
        anchor=anchor or key,
        title=text("title"),
        lead=text("lead"),
        how=text("how"),
        figure=content if isinstance(content, Figure) else None,
        table=content if isinstance(content, Table) else None,
        paragraphs=() if isinstance(content, Figure | Table) else content,
        clickable=clickable,
    )


def safe(text: object) -> str:
    """Escape a text for plotly, which reads tags in what it shows."""
    return html.escape(str(text))


def label(configuration: Configuration) -> str:
    """Return a configuration in a few words, such as `size 8 · 500 µs`."""
    return short_label(configuration.label())


def finite(value: float | None, scale: float = 1.0) -> float | None:
    """Return value × scale rounded to six significant digits, for JSON; None where `value` is None or the product is
    nan or infinite."""
    scaled = math.nan if value is None else value * scale
    return float(f"{scaled:.6g}") if math.isfinite(scaled) else None


def numbers(values: Iterable[float | None], scale: float = 1.0) -> list[float | None]:
    """Return each value × scale, rounded as by `finite`."""
    return [finite(value, scale) for value in values]


def trace(
    x: Sequence[object],
    y: Sequence[object],
    *,
    colour: object,
    marker: Mapping[str, object] | None = None,
    line: Mapping[str, object] | None = None,
    bars: Mapping[str, object] | None = None,
    hover: str = "",
    of: str = "",
    **more: Any,
) -> Trace:
    """Make a trace of points with a `marker`, a `line`, or both, in one colour.

    Values that are estimates get error bars, which look as `bars` says. `hover`: plotly template of the text
    at a point, shown beside `of`, the trace's name; "": no text. `more`: further keys of the trace.
    """
    drawn: Trace = {"mode": "+".join(["lines"] * (line is not None) + ["markers"] * (marker is not None))}
    drawn |= _along("x", x, {"color": colour, **(bars or {})})
    drawn |= _along("y", y, {"color": colour, **(bars or {})})
    if marker is not None:
        drawn["marker"] = {"color": colour, "size": 9, **marker}
    if line is not None:
        drawn["line"] = {"color": colour, **line}
    shown = {"hovertemplate": f"{hover}<extra>{of}</extra>"} if hover else {"hoverinfo": "skip"}
    return drawn | shown | more


def intervals(
    rows: Sequence[tuple[str, str, Estimate, str]],
    looks: Mapping[str, tuple[str, str, str]],
    **more: Any,
) -> list[Trace]:
    """Make a trace for each group of estimates, drawn with their intervals.

    `rows`: (group, name, estimate, text at the pointer). `looks`: group -> (its name, colour, symbol).
    """
    traces = []
    for group, (name, colour, symbol) in looks.items():
        mine = [row for row in rows if row[0] == group]
        if mine:
            drawn = trace(
                [estimate for _, _, estimate, _ in mine],
                [name for _, name, _, _ in mine],
                bars={"thickness": 2, "width": 5},
                colour=colour,
                marker={"symbol": symbol, "size": 11, "line": {"width": 2}},
                hover="%{text}",
                name=name,
                legendgroup=name,
                text=[text for _, _, _, text in mine],
                **more,
            )
            traces.append(drawn)
    return traces


def scaled(estimate: Estimate, scale: float) -> Estimate:
    """Return the estimate with value and interval times `scale`."""
    return Estimate(value=estimate.value * scale, low=estimate.low * scale, high=estimate.high * scale)


def _along(across: str, values: Sequence[object], look: Mapping[str, object]) -> Trace:
    """Return the keys of a trace for one axis: values as they are, estimates with error bars; an end that is
    infinite has none."""
    estimates = [value for value in values if isinstance(value, Estimate)]
    if not estimates:
        return {across: list(values)}

    def length(high: float, low: float) -> float:
        return abs(high - low) if math.isfinite(high) and math.isfinite(low) else 0.0

    ends = {
        "type": "data",
        "symmetric": False,
        "array": [length(estimate.high, estimate.value) for estimate in estimates],
        "arrayminus": [length(estimate.value, estimate.low) for estimate in estimates],
        "thickness": 1.2,
        "width": 3,
    }
    places = numbers(estimate.value for estimate in estimates)
    return {across: places, f"error_{across}": {**ends, **look}}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Make an axis; `title` has the unit, `more` are further keys."""
    return {"title": {"text": title, "standoff": 12}, "automargin": True, **more}


def categories(title: str, names: Iterable[object], **more: Any) -> dict[str, Any]:
    """Make an axis of names, in the order given; `more`: as `axis`."""
    return axis(title, type="category", categoryorder="array", categoryarray=[*map(str, names)], **more)


def count_axis(title: str, last: int) -> dict[str, Any]:
    """Make an axis of whole numbers from 1 to `last`, with at most twelve ticks."""
    return axis(title, dtick=max(1, math.ceil(last / 12)), tick0=1, range=[0.5, last + 0.5])


def log_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """Make a logarithmic axis; its key `span`, by which the page's script places the ticks, is greatest over
    least value."""
    known = [value for value in values if value is not None and value > 0.0]
    return axis(title, type="log", span=max(known) / min(known) if known else 10.0)


def spread_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """Make an axis: logarithmic where the greatest value is more than WIDE times the least, else from zero
    on."""
    known = [value for value in values if value is not None and value > 0.0]
    if known and max(known) > WIDE * min(known):
        return log_axis(title, known)
    return axis(title, rangemode="tozero")


def with_limit(layout: dict[str, Any], value: float, text: str, *, panel: str = "") -> dict[str, Any]:
    """Return the layout with a dashed line at `value` across a panel, and `text` on it.

    `panel`: suffix of its axes, "" for the first, then "2", …
    """
    log = layout[f"yaxis{panel}"].get("type") == "log"
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
    drawn = {"shapes": [_dashed("y", value, panel, "@limit", 1.5)], "annotations": [note]}
    return layout | {key: [*layout.get(key, ()), *drawn[key]] for key in drawn}


def _dashed(of: str, value: float, panel: str, colour: str, width: float) -> dict[str, Any]:
    """Return a dashed line through a panel, at a value of its axis `of` ("x" or "y")."""
    across = "x" if of == "y" else "y"
    return {
        "type": "line",
        f"{across}ref": f"{across}{panel} domain",
        f"{across}0": 0,
        f"{across}1": 1,
        f"{of}ref": f"{of}{panel}",
        f"{of}0": value,
        f"{of}1": value,
        "line": {"color": colour, "width": width, "dash": "dash"},
    }


def limited(
    slo: SloSpec, layout: dict[str, Any], *, quantiles: Sequence[str] = ("p95",), panel: str = ""
) -> dict[str, Any]:
    """Return the layout with a line at each limit, in milliseconds, that the SLO sets for one of these quantiles;
    `panel`: as in `with_limit`."""
    for name, limit_s in slo.limits().items():
        if name in quantiles:
            layout = with_limit(
                layout, limit_s * 1e3, f"SLO: {name} ≤ {rounded_duration(limit_s)}", panel=panel
            )
    return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of a figure with its own axes; `line_at`: value on the x axis of a dashed line, None: no line."""

    traces: Sequence[Trace]
    x: dict[str, Any]
    y: dict[str, Any]
    title: str = ""
    line_at: float | None = None


def in_panels(panels: Sequence[Panel], *, height_px: int, **layout: Any) -> Figure:
    """Make a figure of panels side by side.

    `height_px`: of the whole figure. `layout`: further keys of its layout.
    """
    grid = {"rows": 1, "columns": len(panels), "pattern": "independent"}
    layout = {"grid": grid, "annotations": [], "shapes": [], **layout}
    data: list[Trace] = []
    for at, panel in enumerate(panels):
        suffix = str(at + 1) if at else ""
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
        data += [drawn | place for drawn in panel.traces]
        layout |= {f"xaxis{suffix}": panel.x, f"yaxis{suffix}": panel.y}
        layout["annotations"] += [panel_title(panel.title, suffix)] if panel.title else []
        if panel.line_at is not None:
            layout["shapes"].append(_dashed("x", panel.line_at, suffix, "@ink", 1.2))
    return Figure(data=data, layout=layout, height_px=height_px)


def legend_above(height_px: int) -> dict[str, float]:
    """Return the place of a legend above the panels, clear of their titles, in a figure `height_px` high."""
    return {"y": 1.0 + 28.0 / max(height_px - 120, 50)}


def panel_title(text: str, panel: str = "") -> dict[str, Any]:
    """Make an annotation, in bold, at the upper left of a panel; `panel`: suffix of its axes, as in `with_limit`."""
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
