"""The tables of the noisy bench: figures by host and budget, each sweep by device, and the bars."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tests.benchmarks.bars import Bar
from tests.benchmarks.noisy.hosts import HOSTS
from tests.benchmarks.noisy.judge import Judged, Sweep

OVERSTATED = 1.05
NEVER_BELOW = 0.95
SHORT_S, USUAL_S, LONG_S = 25.0, 45.0, 90.0
THINKING_RATIO = 0.05
"""The bars: no rate stated so far too high, no answer so far below a reference, and the budgets that they speak of."""


Cell = tuple[str, float, str]
"""Host, budget in seconds, whose search."""


def by_cell(results: Sequence[Judged]) -> dict[Cell, list[Judged]]:
    """In the order of hosts, budgets and searches."""
    cells: defaultdict[Cell, list[Judged]] = defaultdict(list)
    for one in results:
        cells[one.sweep.host, one.sweep.budget_s, one.sweep.search].append(one)
    hosts = list(HOSTS)
    return dict(sorted(cells.items(), key=lambda cell: (hosts.index(cell[0][0]), *cell[0][1:])))


COLUMNS: tuple[tuple[str, Callable[[Sequence[Judged]], str]], ...] = (
    ("sweeps", lambda cell: str(len(cell))),
    ("no answer", lambda cell: str(sum(one.error is not None for one in cell))),
    ("share, median", lambda cell: f"{statistics.median(one.share for one in cell):.0%}"),
    ("worst", lambda cell: f"{min(one.share for one in cell):.0%}"),
    (">= 95 / 92 / 85 %", lambda cell: " / ".join(f"{_ratio(cell, partial(_reaches, share)):.0%}" for share in (0.95, 0.92, 0.85))),
    ("< 95 % of a reference", lambda cell: str(_count(cell, _below_reference))),
    ("< 95 % of held", lambda cell: str(_count(cell, _below_held))),
    ("(of any that held)", lambda cell: str(_count(cell, lambda one: one.of_any_held < NEVER_BELOW))),
    ("stated / true, median (p10-max)", lambda cell: _spread([one.stated for one in cell if one.stated is not None])),
    ("> 1.05", lambda cell: f"{_ratio(cell, _is_overstated):.0%}"),
    ("bracket holds", lambda cell: f"{_ratio(cell, lambda one: one.bracket_holds):.0%}"),
    ("too high / low", lambda cell: f"{_ratio(cell, lambda one: one.too_high):.0%} / {_ratio(cell, lambda one: one.too_low):.0%}"),
    ("no upper end", lambda cell: f"{_ratio(cell, lambda one: one.error is None and one.high is None):.0%}"),
    ("established", lambda cell: f"{_ratio(cell, lambda one: one.established):.0%}"),
    ("wrongly", lambda cell: str(_count(cell, lambda one: one.wrongly_established))),
    ("runs", lambda cell: f"{statistics.mean(one.runs for one in cell):.0f}"),
    ("seconds, worst", lambda cell: f"{max(one.seconds for one in cell):.0f}"),
    ("thinking, worst", lambda cell: f"{max(_thinking_ratio(one) for one in cell):.1%}"),
    ("real s a sweep", lambda cell: f"{statistics.mean(one.real_s for one in cell):.1f}"),
)  # fmt: skip


def figures(results: Sequence[Judged]) -> str:
    """A line for each host, budget and search."""
    head = ["host", "budget s", "search", *(name for name, _ in COLUMNS)]
    rows = [
        [host, f"{budget_s:g}", search, *(figure(cell) for _, figure in COLUMNS)]
        for (host, budget_s, search), cell in by_cell(results).items()
    ]
    return _aligned([head, *rows])


def each_sweep(results: Sequence[Judged]) -> str:
    """Share of the best of each sweep in the order of seeds, with what is stated over the truth, and what went wrong."""
    lines = [
        "share of the best (stated / true; E established, W wrongly; !lo, !hi: the truth lies below, above the bracket)"
    ]
    devices = list(dict.fromkeys(one.sweep.device for one in results))
    searches = sorted({one.sweep.search for one in results}, reverse=True)
    for device in devices:
        lines.append(device)
        for (host, budget_s, search), cell in by_cell(
            [one for one in results if one.sweep.device == device]
        ).items():
            by_seed = sorted(cell, key=lambda one: one.sweep.seed)
            name = f" {search:<10}" if len(searches) > 1 else ""
            lines.append(f"  {host:<9}{budget_s:>4g}s{name} {' '.join(map(_in_short, by_seed))}")
    return "\n".join(lines)


def errors(results: Sequence[Judged]) -> str:
    """Each sweep without an answer, and why."""
    return "\n".join(
        f"no answer: {_named(one.sweep)}: {one.error}" for one in results if one.error is not None
    )


def bars(results: Sequence[Judged]) -> Iterator[str]:
    """Those that the sweeps at hand can show; of one search."""
    for (host, budget_s, _), cell in by_cell(results).items():
        at_least = _floor(host, budget_s)
        if at_least is not None:
            share, ratio = at_least
            says = f"{host}, {budget_s:g} s: at least {share:.0%} of the best"
            yield Bar(says=says, good=partial(_reaches, share), ratio=ratio).line(cell)
    for (host, budget_s, _), cell in by_cell(results).items():
        if host == "quiet" and budget_s >= USUAL_S:
            ratio = 0.85 if budget_s >= LONG_S else 0.7
            says = f"{host}, {budget_s:g} s: established"
            yield Bar(says=says, good=lambda one: one.established, ratio=ratio).line(cell)
    yield from (bar.line(results) for bar in BARS)


def compared(results: Sequence[Judged], beside: Sequence[Judged]) -> str:
    """Share of the best, sweep by sweep: ours less the other's with its standard error, of sweeps that both made."""
    theirs = {replace(other.sweep, search=""): other for other in beside}
    pairs: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    for one in results:
        other = theirs.get(replace(one.sweep, search=""))
        if other is not None:
            pairs[one.sweep.host, one.sweep.budget_s].append(one.share - other.share)
    rows = [["host", "budget s", "pairs", "share of the best"]]
    for (host, budget_s), gains in pairs.items():
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        rows.append([host, f"{budget_s:g}", str(len(gains)), f"{statistics.mean(gains):+.1%} ± {error:.1%}"])
    return _aligned(rows) if pairs else "no sweep was made by both"


def _floor(host: str, budget_s: float) -> tuple[float, float] | None:
    """The share of the best that so many of the sweeps must reach."""
    if budget_s >= USUAL_S:
        return {"quiet": (0.95, 0.97), "ordinary": (0.92, 0.97), "harsh": (0.85, 0.95)}[host]
    return (0.85, 0.95) if budget_s <= SHORT_S and host != "harsh" else None


def _reaches(share: float, one: Judged) -> bool:
    return one.share >= share


def _below_reference(one: Judged) -> bool:
    return min(one.of_defaults, one.of_no_batching) < NEVER_BELOW


def _below_held(one: Judged) -> bool:
    return one.of_held < NEVER_BELOW


def _is_overstated(one: Judged) -> bool:
    return one.stated is not None and one.stated > OVERSTATED


def _thinking_ratio(one: Judged) -> float:
    return one.thinking_s / one.sweep.budget_s


BARS: tuple[Bar[Judged], ...] = (
    Bar(says="below 95 % of the defaults or of no batching", good=_below_reference, ratio=0.0, most=True),
    Bar(says="below 95 % of what the sweep's own runs held", good=_below_held, ratio=0.0, most=True),
    Bar(says="stated more than 5 % above the truth", good=_is_overstated, ratio=0.02, most=True),
    Bar(says="wrongly established", good=lambda one: one.wrongly_established, ratio=0.01, most=True),
    Bar(
        says="thinking takes more than 5 % of the budget",
        good=lambda one: _thinking_ratio(one) > THINKING_RATIO,
        ratio=0.0,
        most=True,
    ),
    Bar(says="the bracket holds the truth", good=lambda one: one.bracket_holds, ratio=0.9),
)


def _count(cell: Sequence[Judged], is_so: Callable[[Judged], bool]) -> int:
    return sum(map(is_so, cell))


def _ratio(cell: Sequence[Judged], is_so: Callable[[Judged], bool]) -> float:
    return _count(cell, is_so) / len(cell)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low = statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]
    return f"{statistics.median(values):.2f} ({max(low, 0.0):.2f}-{max(values):.2f})"


def _in_short(one: Judged) -> str:
    if one.error is not None:
        return "none"
    outside = "!lo" if one.too_high else "!hi" if one.too_low else ""
    sure = "W" if one.wrongly_established else "E" if one.established else ""
    stated = "-" if one.stated is None else f"{one.stated:.2f}"
    return f"{one.share:.0%}({stated}{sure}{outside})"


def _named(sweep: Sweep) -> str:
    return f"{sweep.search}, {sweep.device}, {sweep.host}, {sweep.budget_s:g} s, seed {sweep.seed}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
