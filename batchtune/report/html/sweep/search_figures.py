"""What was tried, and what is the best that can be had?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchtune.report.html.shell.drawing import (
    MERITS,
    Figure,
    Section,
    Trace,
    axis,
    bars,
    finite,
    label,
    limited,
    log_axis,
    numbers,
    safe,
)
from batchtune.report.html.sweep.account import ROLE_LOOKS, Account
from batchtune.report.units import interval, milliseconds
from batchtune.scenario.units import counted
from batchtune.tune.evidence.pooled import Pooled
from batchtune.tune.evidence.run_noise import geometric_mean
from batchtune.tune.trials.trial import NO_CANDIDATES


def pareto(account: Account) -> Section:
    """Throughput against p95, a point a configuration; the front, the SLO, the roles."""
    section = Section(anchor="pareto", title="Throughput against latency", clickable=True)
    pooled = [
        pooled_point
        for pooled_point in account.choice.pooled
        if pooled_point.runs and _is_plotted(pooled_point)
    ]
    if not pooled:
        return replace(section, missing="no configuration has both a throughput and a p95")
    numbers_of = {id(point): at for at, point in enumerate(account.choice.pooled)}
    names = {id(point): name for name, point in account.roles.items()}
    others = [point for point in pooled if id(point) not in names]
    front = _front([point for point in pooled if point.feasible])
    data = [
        _points("tried", [point for point in others if point.feasible], numbers_of, "@other", "circle"),
        _points(
            "misses the SLO",
            [point for point in others if not point.feasible],
            numbers_of,
            "@limit",
            "x-thin",
        ),
    ]
    if len(front) > 1:
        line = {"color": "@muted", "width": 1.5, "shape": "hv"}
        x, y = zip(*((_rate(point), _p95_ms(point)) for point in front), strict=True)
        data.insert(
            0, {"x": x, "y": y, "mode": "lines", "name": "best to be had", "line": line, "hoverinfo": "skip"}
        )
    for name, point in account.roles.items():
        if _is_plotted(point):
            look = ROLE_LOOKS[name]
            data.append(_points(name, [point], numbers_of, look.colour, look.symbol, size=15, barred=True))
    layout: dict[str, Any] = {
        "xaxis": axis("requests/s", rangemode="tozero"),
        "yaxis": log_axis("p95, ms", numbers(map(_p95_ms, pooled))),
        "hovermode": "closest",
    }
    layout = limited(account.scenario.slo, layout)
    return replace(
        section,
        lead=f"{counted(len(pooled), 'configuration')}; further right and lower is better.",
        figure=Figure(data=[trace for trace in data if trace["x"]], layout=layout, height_px=440),
        how=(
            "A point is the geometric mean of a configuration's runs: of its fresh runs where there are any, else of "
            "those of the search. The line joins what no other configuration that keeps the SLO beats in both. Bars "
            "are the 95 % interval of its latest run."
        ),
    )


def history(account: Account) -> Section:
    """The trials in the order in which they were made, and the best so far."""
    section = Section(anchor="history", title="How the search went")
    merit = MERITS[account.scenario.objective]
    tried = [
        trial
        for trial in account.trials
        if trial.objective is not None
        and math.isfinite(trial.objective.value)
        and trial.source not in NO_CANDIDATES
    ]
    if not tried:
        return replace(section, missing="no trial has a figure")
    sources = dict.fromkeys(trial.source for trial in tried)
    symbols = dict(
        zip(
            sources,
            ("circle", "square", "diamond", "cross", "triangle-up", "hexagon", "star", "x") * 2,
            strict=False,
        )
    )
    data: list[Trace] = []
    for source in sources:
        mine = [trial for trial in tried if trial.source == source]
        data.append(
            {
                "x": [trial.number for trial in mine],
                "y": [finite(trial.objective.value, merit.scale) for trial in mine if trial.objective],
                "mode": "markers",
                "name": source.replace("_", " "),
                "marker": {"symbol": symbols[source], "size": 8, "line": {"width": 1, "color": "@surface"}},
                "text": [safe(f"{label(trial.configuration)}: {trial.reason}") for trial in mine],
                "hovertemplate": "trial %{x}: %{y:,.4~r}<br>%{text}<extra></extra>",
            }
        )
    return replace(
        section,
        lead="Probes and calibration ran under loads of their own and are left out.",
        figure=Figure(
            data=data,
            layout={"xaxis": axis("trial"), "yaxis": axis(merit.title, rangemode="tozero")},
            height_px=320,
        ),
        how="The objective of each trial as it was measured; a trial that was repeated stands by its last run.",
    )


def _is_plotted(pooled: Pooled) -> bool:
    return math.isfinite(_rate(pooled)) and math.isfinite(_p95_ms(pooled)) and _p95_ms(pooled) > 0.0


def _rate(pooled: Pooled) -> float:
    return geometric_mean(run.throughput_rps.value for run in pooled.runs)


def _p95_ms(pooled: Pooled) -> float:
    return pooled.latency_s.get("p95", math.nan) * 1e3


def _front(pooled: Sequence[Pooled]) -> list[Pooled]:
    """Those that none beats in both, by rising rate."""
    front: list[Pooled] = []
    for point in sorted(
        (point for point in pooled if _is_plotted(point)), key=lambda point: (-_rate(point), _p95_ms(point))
    ):
        if not front or _p95_ms(point) < _p95_ms(front[-1]):
            front.append(point)
    return front[::-1]


def _points(
    name: str,
    pooled: Sequence[Pooled],
    numbers_of: dict[int, int],
    colour: str,
    symbol: str,
    *,
    size: int = 9,
    barred: bool = False,
) -> Trace:
    """`customdata` is the number of the configuration, for the click."""
    trace: Trace = {
        "x": numbers(map(_rate, pooled)),
        "y": numbers(map(_p95_ms, pooled)),
        "mode": "markers",
        "name": name,
        "customdata": [numbers_of[id(point)] for point in pooled],
        "text": [_hover(point) for point in pooled],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": colour,
            "symbol": symbol,
            "size": size,
            "line": {"width": 1.2, "color": "@surface"},
        },
    }
    if symbol.endswith("thin"):
        trace["marker"]["line"] = {"width": 1.8, "color": colour}
    if barred:
        last = [point.runs[-1] for point in pooled]
        trace["error_x"] = {**bars([run.throughput_rps for run in last]), "color": colour}
        trace["error_y"] = {**bars([run.latency_s["p95"] for run in last], 1e3), "color": colour}
    return trace


def _hover(pooled: Pooled) -> str:
    run = pooled.runs[-1]
    numbers_run = ", ".join(str(run.trial.number) for run in pooled.runs)
    return (
        f"<b>{safe(label(pooled.configuration))}</b><br>{safe(interval(run.throughput_rps))} requests/s"
        f"<br>p95 {safe(milliseconds(run.latency_s.get('p95')))} ms"
        f"<br>p99 {safe(milliseconds(run.latency_s.get('p99')))} ms"
        f"<br>trial {safe(numbers_run)}, the figures of the last"
    )
