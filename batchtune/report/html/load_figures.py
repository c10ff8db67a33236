"""What does the server do under each load: throughput, latency, and which points count?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from batchtune.measure.measurement import Measurement
from batchtune.report.html.shell.drawing import (
    WIDE,
    Figure,
    Section,
    Trace,
    axis,
    bars,
    finite,
    limited,
    log_axis,
    numbers,
    safe,
    spread_axis,
)
from batchtune.report.units import interval, milliseconds
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.evidence.bottleneck_of import spoilt_by
from batchtune.tune.trials.trial import Trial

_KINDS: Final = {
    "best": ("best", "@chosen", "star", 15),
    "PASS": ("keeps the SLO", "@chosen", "circle", 9),
    "UNSURE": ("not sure", "@queue", "diamond-open", 10),
    "FAIL": ("misses the SLO", "@limit", "x-thin", 10),
    "none": ("measured", "@chosen", "circle", 9),
    "client": ("invalid: client-limited", "@muted", "circle-x-open", 11),
    "host": ("invalid: noisy host", "@muted", "square-x-open", 11),
}
"""Of a point: name, colour, symbol, size."""
_BESIDE: Final = ("p50", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A load that was measured: `load` is clients, or requests/s offered; `place` its row in the ledger."""

    name: str
    load: float
    trial: Trial
    measured: Measurement
    place: int
    is_best: bool

    @property
    def kind(self) -> str:
        """Of `_KINDS`: who spoilt it, else its verdict."""
        spoiler = spoilt_by(self.trial)
        return spoiler or ("best" if self.is_best else self.measured.verdict or "none")


def against_load(points: Sequence[Point], scenario: Scenario, *, quantile: str) -> Section:
    """Throughput and one latency quantile against the load, with the SLO, and which points are invalid."""
    section = Section(anchor="load", title="Throughput and latency against the load", clickable=True)
    if not points:
        return replace(section, missing="no point was measured")
    in_order = sorted(points, key=lambda point: point.load)
    open_loop = in_order[0].measured.concurrency is None
    title = "offered requests/s" if open_loop else "clients"
    loads = [point.load for point in in_order]
    wide = min(loads) > 0.0 and max(loads) > WIDE * min(loads)
    across = log_axis(title, loads) if wide else axis(title, rangemode="tozero")
    data = [*_throughput(in_order, open_loop=open_loop), *_latency(in_order, quantile)]
    latencies = [y for trace in data if trace.get("yaxis") == "y2" for y in trace["y"]]
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": 2, "pattern": "independent"},
        "xaxis": across,
        "yaxis": axis("requests/s", rangemode="tozero"),
        "xaxis2": across,
        "yaxis2": spread_axis(f"{quantile}, ms", latencies),
        "hovermode": "closest",
        "legend": {"y": 1.06},
    }
    return replace(
        section,
        lead="Only the points on the line count; those beside it are not the server's figures."
        if any(point.kind in ("client", "host") for point in points)
        else "",
        figure=Figure(
            data=data, layout=limited(scenario.slo, layout, quantiles=(quantile,), panel="2"), height_px=420
        ),
        how=(
            "A run a point, with 95 % intervals. Best is the most throughput within the SLO; of points that cannot be "
            f"told apart the one with the least load. The thin dotted lines beside {quantile} are {_beside(quantile)}."
        ),
    )


def few_of(points: Sequence[Point], *, most: int) -> list[Point]:
    """At most so many, from the least load to the greatest, the best among them: more cannot be told apart."""
    in_order = sorted(points, key=lambda point: point.load)
    if len(in_order) <= most:
        return in_order
    step = (len(in_order) - 1) / (most - 1)
    kept = {round(at * step) for at in range(most)}
    best = next((at for at, point in enumerate(in_order) if point.is_best), None)
    if best is not None and best not in kept:
        inner = kept - {0, len(in_order) - 1}
        kept = kept - {min(inner, key=lambda at: abs(at - best))} | {best} if inner else kept | {best}
    return [in_order[at] for at in sorted(kept)]


def _throughput(points: Sequence[Point], *, open_loop: bool) -> list[Trace]:
    traces: list[Trace] = []
    if open_loop:
        ends = [min(point.load for point in points), max(point.load for point in points)]
        traces.append(
            {
                "x": ends,
                "y": ends,
                "mode": "lines",
                "name": "all that is offered",
                "line": {"color": "@muted", "width": 1, "dash": "dot"},
                "hoverinfo": "skip",
            }
        )
    traces.append(_joined(points, [point.measured.throughput_rps.value for point in points], 1.0, panel=""))
    for kind in dict.fromkeys(point.kind for point in points):
        mine = [point for point in points if point.kind == kind]
        estimates = [point.measured.throughput_rps for point in mine]
        traces.append(
            _markers(kind, mine)
            | {"y": numbers(estimate.value for estimate in estimates), "error_y": bars(estimates)}
        )
    return [_coloured_bars(trace) for trace in traces]


def _latency(points: Sequence[Point], quantile: str) -> list[Trace]:
    place = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    traces: list[Trace] = []
    for name in _BESIDE:
        if name != quantile:
            values = [_latency_s(point, name) for point in points]
            thin = _joined(points, values, 1e3, panel="2")
            traces.append(thin | {"line": {"color": "@other", "width": 1, "dash": "dot"}})
    traces.append(_joined(points, [_latency_s(point, quantile) for point in points], 1e3, panel="2"))
    for kind in dict.fromkeys(point.kind for point in points):
        mine = [point for point in points if point.kind == kind]
        estimates = [point.measured.latency_s[quantile] for point in mine]
        shown = {
            "y": numbers((estimate.value for estimate in estimates), 1e3),
            "error_y": bars(estimates, 1e3),
        }
        traces.append(_markers(kind, mine) | shown | place)
    return [_coloured_bars(trace) for trace in traces]


def _beside(quantile: str) -> str:
    return " and ".join(name for name in _BESIDE if name != quantile)


def _joined(points: Sequence[Point], values: Sequence[float], scale: float, *, panel: str) -> Trace:
    """The line through the points that count."""
    counting = [at for at, point in enumerate(points) if point.kind not in ("client", "host")]
    return {
        "x": [points[at].load for at in counting],
        "y": [finite(values[at], scale) for at in counting],
        "mode": "lines",
        "line": {"color": "@chosen", "width": 1.6},
        "hoverinfo": "skip",
        "showlegend": False,
        "xaxis": f"x{panel}",
        "yaxis": f"y{panel}",
    }


def _markers(kind: str, points: Sequence[Point]) -> Trace:
    name, colour, symbol, size = _KINDS[kind]
    thin = symbol.endswith(("thin", "open"))
    return {
        "x": [point.load for point in points],
        "mode": "markers",
        "name": name,
        "legendgroup": kind,
        "marker": {
            "color": colour,
            "symbol": symbol,
            "size": size,
            "line": {"width": 1.8, "color": colour} if thin else {"width": 1.2, "color": "@surface"},
        },
        "customdata": [point.place for point in points],
        "text": [_hover(point, name) for point in points],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _coloured_bars(trace: Trace) -> Trace:
    if "error_y" in trace:
        trace["error_y"]["color"] = trace["marker"]["color"]
    return trace


def _hover(point: Point, kind: str) -> str:
    measured = point.measured
    return (
        f"<b>{safe(point.name)}</b>, {kind}<br>{safe(interval(measured.throughput_rps))} requests/s"
        f"<br>p95 {safe(milliseconds(measured.latency_s.get('p95')))} ms"
        f"<br>p99 {safe(milliseconds(measured.latency_s.get('p99')))} ms<br>trial {point.trial.number}"
    )


def _latency_s(point: Point, quantile: str) -> float:
    estimate = point.measured.latency_s.get(quantile)
    return math.nan if estimate is None else estimate.value
