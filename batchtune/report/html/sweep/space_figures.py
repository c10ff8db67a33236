"""Draws the space as it was measured: its two widest knobs as a map, and what each knob does by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchtune.batching.parameters import Configuration
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.html.shell.drawing import (
    MERITS,
    Figure,
    Section,
    Trace,
    axis,
    bars,
    finite,
    label,
    numbers,
    safe,
)
from batchtune.report.html.sweep.account import Account, keeping
from batchtune.tune.trials.space import in_force

Measured = list[tuple[Configuration, Estimate]]
"""Batched configurations that keep the SLO, with their merits."""


def heat_map(account: Account) -> Section:
    """The two knobs of which most values were tried; each cell the best over the other knobs."""
    section = Section(anchor="space", title="The space as it was measured")
    measured = _measured(account)
    values = _values(account, measured)
    knobs = sorted((name for name in values if len(values[name]) > 1), key=lambda name: -len(values[name]))[
        :2
    ]
    if len(knobs) < 2:
        return replace(section, missing="of fewer than two knobs two values were measured")
    across, down = knobs
    merit = MERITS[account.scenario.objective]

    def cell(x: Any, y: Any) -> tuple[float | None, str]:
        there = [
            (estimate.value, configuration)
            for configuration, estimate in measured
            if _value(account, configuration, across) == x and _value(account, configuration, down) == y
        ]
        if not there:
            return None, ""
        best = merit.best([value for value, _ in there])
        configuration = next(configuration for value, configuration in there if value == best)
        return finite(best, merit.scale), safe(label(configuration))

    grid = [[cell(x, y) for x in values[across]] for y in values[down]]
    heat: Trace = {
        "type": "heatmap",
        "x": [str(x) for x in values[across]],
        "y": [str(y) for y in values[down]],
        "z": [[value for value, _ in row] for row in grid],
        "text": [[text for _, text in row] for row in grid],
        "hovertemplate": f"%{{z:,.4~r}} {merit.title}<br>%{{text}}<extra></extra>",
        "colorscale": "Cividis",
        "reversescale": not merit.more_is_better,
        "colorbar": {"title": {"text": merit.title}, "thickness": 14, "outlinewidth": 0},
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
    }
    rest = [name for name in values if name not in (across, down)]
    return replace(
        section,
        lead=f"Each cell is the best over {' and '.join(rest) or 'its runs'}; empty: nothing kept the SLO there, or "
        "nothing was tried.",
        figure=Figure(
            data=[heat, *_chosen_cell(account, across, down)],
            layout={
                "xaxis": axis(safe(across), type="category", showgrid=False),
                "yaxis": axis(safe(down), type="category", showgrid=False),
                "showlegend": False,
            },
            height_px=400,
        ),
        how="Of each configuration that keeps the SLO what the table of all contenders has; the star is recommended.",
    )


def slices(account: Account) -> Section:
    """For each knob those configurations that differ from the recommended one in it alone."""
    section = Section(anchor="knobs", title="What each knob does")
    chosen = account.chosen
    if chosen is None or chosen.configuration.batching is None:
        return replace(section, missing="no batching parameters are recommended")
    measured, merit = _measured(account), MERITS[account.scenario.objective]
    knobs = list(account.scenario.search.space)
    sliced = {}
    for knob in knobs:
        beside = [
            (configuration, estimate)
            for configuration, estimate in measured
            if all(
                _value(account, configuration, name) == _value(account, chosen.configuration, name)
                for name in knobs
                if name != knob
            )
        ]
        if len(beside) > 1:
            sliced[knob] = beside
    if not sliced:
        return replace(
            section, missing="nothing that keeps the SLO differs from what is recommended in one knob alone"
        )
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": len(sliced), "pattern": "independent"},
        "showlegend": False,
    }
    data = []
    for at, (knob, beside) in enumerate(sliced.items(), start=1):
        suffix = "" if at == 1 else str(at)
        beside.sort(key=lambda pair: _sortable(_value(account, pair[0], knob)))
        layout[f"xaxis{suffix}"] = axis(safe(knob), type="category")
        layout[f"yaxis{suffix}"] = axis(merit.title if at == 1 else "", rangemode="tozero")
        data.append(_slice(account, beside, knob, chosen.configuration, suffix))
    return replace(
        section,
        lead="All other knobs as recommended; the star is what is recommended.",
        figure=Figure(data=data, layout=layout, height_px=340),
        how="What the table of all contenders has of each: a capacity with the way to the rate that was missed, else "
        "the median and the range of its runs.",
    )


def _slice(account: Account, beside: Measured, knob: str, chosen: Configuration, suffix: str) -> Trace:
    merit = MERITS[account.scenario.objective]
    estimates = [estimate for _, estimate in beside]
    stars = [configuration == chosen for configuration, _ in beside]
    return {
        "x": [str(_value(account, configuration, knob)) for configuration, _ in beside],
        "y": numbers((estimate.value for estimate in estimates), merit.scale),
        "error_y": {**bars(estimates, merit.scale), "color": "@other"},
        "mode": "markers",
        "marker": {
            "color": ["@chosen" if star else "@other" for star in stars],
            "symbol": ["star" if star else "circle" for star in stars],
            "size": [13 if star else 9 for star in stars],
        },
        "hovertemplate": "%{x}: %{y:,.4~r}<extra></extra>",
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
    }


def _measured(account: Account) -> Measured:
    return [
        (contender.configuration, merit)
        for contender, merit in keeping(account)
        if contender.configuration.batching is not None
    ]


def _values(account: Account, measured: Measured) -> dict[str, list[Any]]:
    """Of each knob that was searched, the values that were measured."""
    return {
        name: sorted({_value(account, configuration, name) for configuration, _ in measured}, key=_sortable)
        for name in account.scenario.search.space
    }


def _value(account: Account, configuration: Configuration, name: str) -> Any:
    return in_force(configuration, name, cpus=account.scenario.target.cpus)


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number, float(value) if is_number else 0.0, str(value)


def _chosen_cell(account: Account, across: str, down: str) -> Sequence[Trace]:
    """A star where the recommended configuration lies."""
    chosen = account.chosen
    if chosen is None or chosen.configuration.batching is None:
        return []
    marker = {"symbol": "star", "size": 16, "color": "#fff", "line": {"color": "#000", "width": 1.5}}
    return [
        {
            "x": [str(_value(account, chosen.configuration, across))],
            "y": [str(_value(account, chosen.configuration, down))],
            "mode": "markers",
            "marker": marker,
            "hovertemplate": "recommended<extra></extra>",
        }
    ]
