"""How far does one configuration differ from itself, block by block, and which change would be told?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from batchtune.measure.statistics.paired import detectable_shift
from batchtune.measure.statistics.quantiles import Estimate
from batchtune.report.comparison import bounded
from batchtune.report.html.comparison_figures import Arm
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
from batchtune.report.html.shell.shown import LOOKS
from batchtune.report.units import ratio
from batchtune.tune.compare.noise_floor import Floor, NoiseFloor
from batchtune.tune.compare.variant import figure_of, latency_of
from batchtune.tune.trials.trial import Trial

_LONGEST_LOG: Final = 5.0
"""Of a change: one of 150 times stands for any beyond it."""
_MOST_DRAWN: Final = 4.0
"""Times: an end of an interval further off leaves the picture and stays in the table."""


def detectable(floor: NoiseFloor) -> Section:
    """The smallest change of each figure that 6, 10 and 20 blocks find, with its interval."""
    section = Section(anchor="detectable", title="The smallest change that can be told")
    if not floor.floors:
        return replace(section, missing="no block has two runs that were both measured")
    data: list[Trace] = []
    for at, (name, figure) in enumerate(floor.floors.items()):
        look = LOOKS[at % len(LOOKS)]
        blocks = list(figure.smallest)
        changes = [_change(figure, count) for count in blocks]
        data.append(
            {
                "type": "bar",
                "x": [f"{count} blocks" for count in blocks],
                "y": numbers(change.value for change in changes),
                "error_y": {**bars(changes), "color": "@ink"},
                "name": safe(name),
                "marker": {"color": look.colour, "line": {"width": 1, "color": "@surface"}},
                "hovertemplate": f"{safe(name)}: a change of %{{y:.3~r}} % is found in 4 of 5 comparisons of %{{x}}"
                "<extra></extra>",
            }
        )
    layout = {
        "barmode": "group",
        "bargap": 0.25,
        "xaxis": axis("", type="category"),
        "yaxis": axis("change, %", rangemode="tozero"),
    }
    return replace(
        section,
        lead="Lower is better: a change below the bar is likely missed by a comparison of so many blocks.",
        figure=Figure(data=data, layout=layout, height_px=360),
        how=(
            "The standard deviation of the differences below times what so many blocks need to find a shift in 4 of 5 "
            "comparisons (by simulation of the same test). Bars: 95 % interval, from that of the deviation."
        ),
    )


def differences(floor: NoiseFloor, first: Arm, second: Arm) -> Section:
    """A again against A: in each block, and over all with the interval that should hold ×1."""
    section = Section(anchor="differences", title="One configuration against itself", clickable=True)
    if not floor.floors:
        return replace(section, missing="no block has two runs that were both measured")
    data: list[Trace] = []
    for at, name in enumerate(floor.floors):
        data.append(_by_block(name, first, second, at))
    names = list(floor.floors)[::-1]
    data += _over_all(floor, names)
    layout: dict[str, Any] = {
        "grid": {"rows": 1, "columns": 2, "pattern": "independent"},
        "xaxis": axis("block", dtick=max(1, math.ceil(floor.pairs / 12)), tick0=1),
        "yaxis": axis("A again differs from A by, %", zeroline=False),
        "xaxis2": axis("%", zeroline=False),
        "yaxis2": axis("", type="category", categoryorder="array", categoryarray=names),
        "shapes": [
            {
                "type": "line",
                "xref": "x domain",
                "x0": 0,
                "x1": 1,
                "yref": "y",
                "y0": 0,
                "y1": 0,
                "line": _NO_CHANGE,
            },
            {
                "type": "line",
                "xref": "x2",
                "x0": 0,
                "x1": 0,
                "yref": "y2 domain",
                "y0": 0,
                "y1": 1,
                "line": _NO_CHANGE,
            },
        ],
        "annotations": [panel_title("each block"), panel_title("all blocks, 95 % interval", "2")],
        "legend": legend_above(360),
    }
    strange = [name for name, figure in floor.floors.items() if figure.differs]
    lead = (
        "Nothing was changed between the two: what differs is noise."
        if not strange
        else f"{', '.join(strange)}: the interval does not hold 0: chance in one figure of twenty, else drift."
    )
    return replace(
        section,
        lead=lead,
        figure=Figure(data=data, layout=layout, height_px=360),
        how=(
            "Two runs of one configuration in every block, under one seed, in an order drawn at random and mirrored in "
            "the next block. The median of the ratios with its exact interval, as `batchtune compare` forms it."
        ),
    )


_NO_CHANGE: Final = {"color": "@ink", "width": 1.2, "dash": "dash"}


def _by_block(name: str, first: Arm, second: Arm, at: int) -> Trace:
    look, value = LOOKS[at % len(LOOKS)], _value_of(name)
    blocks = sorted(first.runs.keys() & second.runs.keys())
    return {
        "x": blocks,
        "y": [_difference(value, first.runs[block], second.runs[block]) for block in blocks],
        "mode": "lines+markers",
        "name": safe(name),
        "line": {"color": look.colour, "dash": look.dash, "width": 1.4},
        "marker": {"symbol": look.symbol, "size": 8, "color": look.colour},
        "customdata": [second.places[second.runs[block].number] for block in blocks],
        "text": [f"trials {first.runs[block].number} and {second.runs[block].number}" for block in blocks],
        "hovertemplate": f"block %{{x}}: {safe(name)} %{{y:+.3~r}} %, %{{text}}<extra></extra>",
    }


def _over_all(floor: NoiseFloor, names: Sequence[str]) -> list[Trace]:
    """A trace a figure, so that each keeps its look."""
    looks: Mapping[str, Any] = {name: LOOKS[at % len(LOOKS)] for at, name in enumerate(floor.floors)}
    traces: list[Trace] = []
    for name in names:
        shown = floor.floors[name].ratio
        ends = [end if 1 / _MOST_DRAWN < end < _MOST_DRAWN else math.nan for end in (shown.low, shown.high)]
        drawn = Estimate(value=shown.value, low=ends[0], high=ends[1])
        traces.append(
            {
                "x": [finite(shown.value - 1.0, 100)],
                "y": [safe(name)],
                "error_x": {**bars([drawn], 100), "color": looks[name].colour, "thickness": 2, "width": 5},
                "mode": "markers",
                "showlegend": False,
                "marker": {"symbol": looks[name].symbol, "size": 11, "color": looks[name].colour},
                "hovertemplate": f"{safe(name)}: {safe(ratio(bounded(shown)))}<extra></extra>",
                "xaxis": "x2",
                "yaxis": "y2",
            }
        )
    return traces


def _difference(value: Callable[[Trial], float], first: Trial, second: Trial) -> float | None:
    before, after = value(first), value(second)
    return finite(after / before - 1.0, 100) if before > 0.0 and math.isfinite(before) else None


def _value_of(name: str) -> Callable[[Trial], float]:
    match name:
        case "throughput" | "capacity":
            return figure_of(name)
        case _:
            return latency_of(name)


def _change(figure: Floor, blocks: int) -> Estimate:
    """What so many blocks find, in per cent; its interval is that of the spread."""
    shift = detectable_shift(blocks)
    low, high = (
        100 * math.expm1(min(shift * end, _LONGEST_LOG)) for end in (figure.spread.low, figure.spread.high)
    )
    return Estimate(value=100 * figure.smallest[blocks], low=low, high=high)
