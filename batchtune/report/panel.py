"""How does a sweep under way look on a terminal: phases, the trial that runs, the best, what was measured so far?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from batchtune.report.units import number
from batchtune.scenario.units import rounded_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PLOT_HEIGHTS: Final = (4, 7)
"""A plot has at least and at most so many lines; where there is no room for the least there is none."""
AROUND_PLOT: Final = 7
"""Lines of the panel that are neither row nor plot: border, gap, title, axis, its labels, legend."""
LIMIT_SHOWN: Final = 4.0
"""A limit that is further above the slowest point is told below the plot, so that the points keep their room."""

_BORDER: Final = 4
_LEFT_OF_PLOT: Final = 10

Kind = Literal["kept", "missed", "best"]
_MARKS: Final[Mapping[Kind, tuple[str, str]]] = {
    "kept": ("•", ""),
    "missed": ("×", "yellow"),
    "best": ("◆", "green"),
}
"""The later ones are drawn over the earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a trial under the scenario's own load measured, and whether it kept the SLO."""

    throughput_rps: float
    p95_s: float
    kind: Kind


def panel(
    rows: Iterable[tuple[str, str, str]],
    *,
    points: Sequence[Point],
    limit_s: float | None,
    console: Console,
) -> RenderableType:
    """The rows (label, text, style), and below them the points where there is room; `limit_s` is that of the p95."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, text, style in rows:
        table.add_row(Text(label, style="dim"), Text(text, style=style))
    width = min(console.width, 100)
    inside = console.options.update(width=width - _BORDER)
    least, most = PLOT_HEIGHTS
    height = min(most, console.height - 1 - AROUND_PLOT - len(console.render_lines(table, inside)))
    columns = min(56, width - _BORDER - _LEFT_OF_PLOT)
    shown: list[RenderableType] = [table]
    if points and height >= least and columns >= 20:
        shown += ["", *scatter(points, limit_s=limit_s, width=columns, height=height)]
    return Panel(Group(*shown), title="batchtune sweep", title_align="left", width=width)


def phases_text(phases_s: Mapping[str, float], *, current: str, expected: Sequence[str]) -> str:
    """The seconds spent in each phase, the `current` one in brackets, then those of the `expected` that follow it."""
    phases = [
        f"[{name} {seconds:.0f} s]" if name == current else f"{name} {seconds:.0f} s"
        for name, seconds in phases_s.items()
    ]
    following = expected[expected.index(current) + 1 :] if current in expected else ()
    return " · ".join([*phases, *(name for name in following if name not in phases_s)])


def scatter(points: Sequence[Point], *, limit_s: float | None, width: int, height: int) -> list[Text]:
    """Throughput to the right, p95 upwards on a logarithmic scale, with the limit as a line."""
    from rich.text import Text

    slowest_s = max(point.p95_s for point in points)
    is_limit_shown = limit_s is not None and limit_s <= LIMIT_SHOWN * slowest_s
    rows = _Axis.over(
        [*(point.p95_s for point in points), *([limit_s] if limit_s and is_limit_shown else [])]
    )
    columns = _Axis.over([point.throughput_rps for point in points], logarithmic=False)
    grid = [[(" ", "") for _ in range(width)] for _ in range(height)]
    if limit_s is not None and is_limit_shown:
        grid[rows.place(limit_s, height)] = [("┄", "dim")] * width
    for kind, mark in _MARKS.items():
        for point in points:
            if point.kind == kind:
                row, column = rows.place(point.p95_s, height), columns.place(point.throughput_rps, width)
                grid[row][column] = mark
    edges = {0: rounded_duration(rows.low), height - 1: rounded_duration(rows.high)}
    lines = [Text("p95", style="dim")]
    for row in reversed(range(height)):
        line = Text(f"{edges.get(row, ''):>8} ┤", style="dim")
        for character, style in grid[row]:
            line.append(character, style=style or "default")
        lines.append(line)
    lines.append(Text(f"{'':>8} └{'─' * width}", style="dim"))
    low, high = number(columns.low), f"{number(columns.high)} requests/s"
    lines.append(Text(f"{'':>{_LEFT_OF_PLOT}}{low}{high:>{max(1, width - len(low))}}", style="dim"))
    lines.append(Text(f"{'':>{_LEFT_OF_PLOT}}{_legend(points, limit_s, is_limit_shown)}", style="dim"))
    return lines


def _legend(points: Sequence[Point], limit_s: float | None, is_limit_shown: bool) -> str:
    kinds = {point.kind for point in points}
    names = {"kept": "measured", "missed": "misses the SLO", "best": "best so far"}
    entries = [f"{_MARKS[kind][0]} {name}" for kind, name in names.items() if kind in kinds]
    if limit_s is not None:
        entries.append(
            f"{'┄ ' if is_limit_shown else ''}SLO {rounded_duration(limit_s)}{'' if is_limit_shown else ' (above)'}"
        )
    return "  ".join(entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def over(cls, values: Iterable[float], *, logarithmic: bool = True) -> _Axis:
        known = list(values)
        return cls(low=min(known), high=max(known), logarithmic=logarithmic)

    def place(self, value: float, count: int) -> int:
        """Which of so many places the value has; in the middle where all are alike."""
        if self.high <= self.low:
            return count // 2
        if self.logarithmic and self.low > 0.0:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(share * (count - 1))
