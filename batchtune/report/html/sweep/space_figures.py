"""What does the space look like, measured beside predicted, and what does each knob do?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from batchtune.batching.parameters import Configuration
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.html.shell.drawing import (
    MERITS,
    Figure,
    Merit,
    Section,
    Trace,
    axis,
    bars,
    finite,
    label,
    numbers,
    panel_title,
    safe,
)
from batchtune.report.html.sweep.account import CHOSEN, Account
from batchtune.report.html.sweep.forecast import Forecast
from batchtune.tune.trials.space import Space

MOST_CELLS: Final = 400
"""Of the space, for the predicted heat map: more cannot be read, nor predicted in time."""


def heat_maps(account: Account, forecast: Forecast | None) -> Section:
    """The two knobs with most values: measured, and beside it predicted; each cell the best over the other knobs."""
    section = Section(anchor="space", title="The space, measured and predicted")
    merit, space = MERITS[account.scenario.objective], Space(account.scenario)
    knobs = sorted(space.shape, key=lambda name: -space.shape[name])[:2]
    if len(knobs) < 2 or min(space.shape[name] for name in knobs) < 2:
        return replace(section, missing="the space has fewer than two knobs with two values or more")
    across, down = sorted(knobs, key=list(space.shape).index)
    values = {name: list(account.scenario.search.space[name].values) for name in (across, down)}
    measured: dict[tuple[str, str], list[tuple[float, Configuration]]] = {}
    for pooled in account.choice.pooled:
        point = pooled.point or space.locate(pooled.configuration)
        if point is not None and math.isfinite(pooled.value) and pooled.runs:
            measured.setdefault((str(point[across]), str(point[down])), []).append(
                (pooled.value, pooled.configuration)
            )
    panels = [("measured", measured)]
    if forecast is not None and space.size <= MOST_CELLS:
        expected = dict(_expected_cells(space, forecast, across, down))
        if expected:
            panels.append(("predicted", expected))
    if not measured:
        return replace(section, missing="no point of the space has a figure")
    rest = [name for name in space.shape if name not in (across, down)]
    data = [
        _heat(panel, cells, values[across], values[down], merit, at)
        for at, (panel, cells) in enumerate(panels)
    ]
    layout = _two_panels([panel for panel, _ in panels], across, down, merit)
    data += _chosen_cells(account, space, across, down, panels=len(panels))
    without = "" if len(panels) == 2 else f" The prediction is left out: {_why_no_forecast(account, space)}."
    return replace(
        section,
        lead=f"Each cell is the best over {' and '.join(rest) or 'its runs'}; empty cells were not tried.{without}",
        figure=Figure(data=data, layout=layout, height_px=400),
        how=(
            "Measured: the best of the configurations in the cell, whether they keep the SLO or not. Predicted: the "
            "best reading of the model of the server (the twin), simulated under the scenario's own load; it was "
            "fitted to trials of this run, so it is no second opinion where these are."
        ),
    )


def slices(account: Account, forecast: Forecast | None) -> Section:
    """For each knob the recommended configuration with other values of that knob alone."""
    section = Section(anchor="knobs", title="What each knob does")
    base = account.choice.chosen
    space, merit = Space(account.scenario), MERITS[account.scenario.objective]
    point = None if base is None else base.point or space.locate(base.configuration)
    if base is None or point is None:
        return replace(section, missing="the recommended configuration is no point of the space")
    knobs = [name for name, count in space.shape.items() if count > 1]
    data: list[Trace] = []
    layout: dict[str, Any] = {"grid": {"rows": 1, "columns": len(knobs), "pattern": "independent"}}
    for at, knob in enumerate(knobs, start=1):
        values = list(account.scenario.search.space[knob].values)
        sliced = [space.configuration({**point, knob: value}) for value in values]
        data += _slice(account, forecast, sliced, values, merit, at)
        suffix = "" if at == 1 else str(at)
        layout[f"xaxis{suffix}"] = axis(safe(knob), type="category", categoryorder="array")
        layout[f"xaxis{suffix}"]["categoryarray"] = [str(value) for value in values]
        layout[f"yaxis{suffix}"] = axis(merit.title if at == 1 else "", rangemode="tozero")
    return replace(
        section,
        lead="All other knobs as recommended. Bars are 95 % intervals of single runs; the dashed line is predicted.",
        figure=Figure(data=data, layout=layout, height_px=340),
        how=(
            "Every run of a configuration that differs from the recommended one in this knob alone, with the interval "
            "of that run; the larger star is what is recommended. The dashed line is the best reading of the twin."
        ),
    )


def _expected_cells(
    space: Space, forecast: Forecast, across: str, down: str
) -> Iterator[tuple[tuple[str, str], list[tuple[float, Configuration]]]]:
    cells: dict[tuple[str, str], list[tuple[float, Configuration]]] = {}
    for point in space.points():
        configuration = space.configuration(point)
        if configuration is None:
            continue
        value = forecast.objective(configuration, turn="heat")
        if value is not None and math.isfinite(value) and value > 0.0:
            cells.setdefault((str(point[across]), str(point[down])), []).append((value, configuration))
    yield from cells.items()


def _heat(
    panel: str,
    cells: dict[tuple[str, str], list[tuple[float, Configuration]]],
    across: Sequence[Any],
    down: Sequence[Any],
    merit: Merit,
    at: int,
) -> Trace:
    def cell(x: Any, y: Any) -> tuple[float | None, str]:
        tried = cells.get((str(x), str(y)))
        if not tried:
            return None, ""
        best = merit.best([value for value, _ in tried])
        configuration = next(configuration for value, configuration in tried if value == best)
        return finite(best, merit.scale), safe(label(configuration))

    grid = [[cell(x, y) for x in across] for y in down]
    suffix = "" if at == 0 else "2"
    return {
        "type": "heatmap",
        "name": panel,
        "x": [str(x) for x in across],
        "y": [str(y) for y in down],
        "z": [[value for value, _ in row] for row in grid],
        "text": [[text for _, text in row] for row in grid],
        "hovertemplate": f"{panel}: %{{z:,.4~r}} {merit.title}<br>%{{text}}<extra></extra>",
        "coloraxis": "coloraxis",
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
    }


def _two_panels(panels: Sequence[str], across: str, down: str, merit: Merit) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": len(panels), "pattern": "independent"},
        "coloraxis": {
            "colorscale": "Cividis",
            "reversescale": not merit.more_is_better,
            "colorbar": {"title": {"text": merit.title}, "thickness": 14, "outlinewidth": 0},
        },
        "showlegend": False,
        "annotations": [],
    }
    for at, panel in enumerate(panels):
        suffix = "" if at == 0 else "2"
        layout[f"xaxis{suffix}"] = axis(safe(across), type="category", showgrid=False)
        layout[f"yaxis{suffix}"] = axis(safe(down) if at == 0 else "", type="category", showgrid=False)
        layout["annotations"].append(panel_title(panel, suffix))
    return layout


def _chosen_cells(account: Account, space: Space, across: str, down: str, *, panels: int) -> list[Trace]:
    """A star in each panel where the recommended configuration lies."""
    base = account.choice.chosen
    point = None if base is None else base.point or space.locate(base.configuration)
    if point is None:
        return []
    marker = {"symbol": "star", "size": 16, "color": "#fff", "line": {"color": "#000", "width": 1.5}}
    return [
        {
            "x": [str(point[across])],
            "y": [str(point[down])],
            "mode": "markers",
            "name": CHOSEN,
            "marker": marker,
            "xaxis": f"x{'' if at == 0 else '2'}",
            "yaxis": f"y{'' if at == 0 else '2'}",
            "hovertemplate": "recommended<extra></extra>",
        }
        for at in range(panels)
    ]


def _why_no_forecast(account: Account, space: Space) -> str:
    if account.twin is None:
        return account.twin_missing
    return f"the space has {space.size:,} points" if space.size > MOST_CELLS else "the twin cannot tell"


def _slice(
    account: Account,
    forecast: Forecast | None,
    sliced: Sequence[Configuration | None],
    values: Sequence[Any],
    merit: Merit,
    at: int,
) -> list[Trace]:
    suffix = "" if at == 1 else str(at)
    place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": at == 1}
    by_configuration = {pooled.configuration: pooled for pooled in account.choice.pooled}
    chosen = None if account.choice.chosen is None else account.choice.chosen.configuration
    xs: list[str] = []
    estimates: list[Estimate] = []
    stars: list[bool] = []
    for configuration, value in zip(sliced, values, strict=True):
        pooled = None if configuration is None else by_configuration.get(configuration)
        for run in () if pooled is None else pooled.repeats:
            estimate = _merit_of(run.trial.objective, run.latency_s.get("p95"), account)
            if estimate is not None and math.isfinite(estimate.value):
                xs.append(str(value))
                estimates.append(estimate)
                stars.append(configuration == chosen)
    marker = {
        "color": ["@chosen" if star else "@other" for star in stars],
        "symbol": ["star" if star else "circle" for star in stars],
        "size": [13 if star else 9 for star in stars],
        "opacity": 1,
    }
    traces: list[Trace] = [
        {
            "x": xs,
            "y": numbers((estimate.value for estimate in estimates), merit.scale),
            "error_y": {**bars(estimates, merit.scale), "color": "@other"},
            "mode": "markers",
            "name": "measured",
            "marker": marker,
            "hovertemplate": "%{x}: %{y:,.4~r}<extra></extra>",
            **place,
        }
    ]
    expected = [
        None
        if forecast is None or configuration is None
        else forecast.objective(configuration, turn="slices")
        for configuration in sliced
    ]
    if any(value is not None for value in expected):
        traces.append(
            {
                "x": [str(value) for value in values],
                "y": numbers(expected, merit.scale),
                "mode": "lines",
                "name": "predicted",
                "line": {"color": "@predicted", "dash": "dash", "width": 2},
                "hovertemplate": "%{x}: %{y:,.4~r} predicted<extra></extra>",
                **place,
            }
        )
    return traces


def _merit_of(objective: Estimate | None, p95: Estimate | None, account: Account) -> Estimate | None:
    return p95 if account.scenario.objective == "latency" else objective
