"""How is a figure drawn: plotly's plain data, colours by role, intervals as bars, names escaped?

A colour is a role such as `@chosen`; the page puts in its own, light or dark. Roles differ in shape and dash too, for
those who do not see the difference in colour.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batchtune.batching.parameters import Configuration
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.html.account import CHOSEN
from batchtune.report.listing import short_label
from batchtune.report.words import REFERENCES

Trace = dict[str, Any]

COLOURS: Final = {
    CHOSEN: "@chosen",
    REFERENCES["no_batching"]: "@unbatched",
    REFERENCES["defaults"]: "@defaults",
}
SYMBOLS: Final = {CHOSEN: "star", REFERENCES["no_batching"]: "diamond", REFERENCES["defaults"]: "square"}
DASHES: Final = {CHOSEN: "solid", REFERENCES["no_batching"]: "dash", REFERENCES["defaults"]: "dot"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Traces and layout as plotly.js takes them; `height_px` is that of the plot."""

    data: list[Trace]
    layout: dict[str, Any]
    height_px: int = 380


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A figure, what it shows (`lead`) and `how` it was computed; without one `missing` says why, in one line."""

    anchor: str
    title: str
    lead: str = ""
    figure: Figure | None = None
    missing: str = ""
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merit:
    """The objective as it is plotted: its name with the unit, its scale, and whether more is better."""

    title: str
    scale: float
    more_is_better: bool

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.more_is_better else min(values)


MERITS: Final = {
    "throughput": Merit(title="requests/s", scale=1.0, more_is_better=True),
    "capacity": Merit(title="capacity, requests/s", scale=1.0, more_is_better=True),
    "latency": Merit(title="p95, ms", scale=1e3, more_is_better=False),
}


def safe(text: object) -> str:
    """A text for plotly, which reads tags in what it shows."""
    return html.escape(str(text))


def label(configuration: Configuration, *, common: Mapping[str, Any] | None = None) -> str:
    """A configuration in a few words, without the parameters that all have in `common`."""
    text = short_label(configuration.label())
    for name, value in (common or {}).items():
        text = text.replace(f" · {short_label(f'{name}={value}')}", "")
    return text


def finite(value: float | None, scale: float = 1.0) -> float | None:
    """Scaled to three or so digits, for JSON; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value * scale:.6g}")


def numbers(values: Iterable[float | None], scale: float = 1.0) -> list[float | None]:
    return [finite(value, scale) for value in values]


def bars(estimates: Sequence[Estimate], scale: float = 1.0) -> dict[str, Any]:
    """Error bars from each interval; an end that is not known has none."""

    def length(one: float, other: float) -> float:
        return abs(one - other) * scale if math.isfinite(one) and math.isfinite(other) else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [length(each.high, each.value) for each in estimates],
        "arrayminus": [length(each.value, each.low) for each in estimates],
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


def limit_line(value: float, text: str, *, vertical: bool = False) -> dict[str, Any]:
    """A layout's shapes and annotations for the SLO."""
    along, across = ("y", "x") if vertical else ("x", "y")
    line = {
        "type": "line",
        f"{along}ref": "paper",
        f"{along}0": 0,
        f"{along}1": 1,
        f"{across}0": value,
        f"{across}1": value,
        "line": {"color": "@limit", "width": 1.5, "dash": "dash"},
    }
    note = {
        f"{along}ref": "paper",
        f"{along}": 1,
        across: value,
        "text": safe(text),
        "showarrow": False,
        "font": {"color": "@limit", "size": 12},
        "xanchor": "left" if vertical else "right",
        "yanchor": "top" if vertical else "bottom",
    }
    return {"shapes": [line], "annotations": [note]}


def with_limit(layout: dict[str, Any], value: float, text: str, *, log: bool = False) -> dict[str, Any]:
    """The layout with the SLO's line across; an annotation on a logarithmic axis stands at the exponent."""
    drawn = limit_line(value, text)
    if log:
        drawn["annotations"][0]["y"] = math.log10(value)
    return layout | {key: [*layout.get(key, ()), *drawn[key]] for key in ("shapes", "annotations")}
