"""Lays tables and paragraphs out for terminals, logs and pipes."""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from batchtune.measure.quantiles import Estimate
from batchtune.units import three_digits

if TYPE_CHECKING:
    from rich.console import Console


def interval(estimate: Estimate | None, *, scale: float = 1.0) -> str:
    """Write an estimate as `value [low, high]`, each times `scale`, with three digits; None: `–`.

    Without an interval the value alone; without an upper end `value [≥ low]`; with an infinite value, as
    where too many requests failed, `≥ low` or `unbounded`.
    """
    if estimate is None:
        return "–"
    if math.isinf(estimate.value):
        return f"≥ {three_digits(estimate.low * scale)}" if math.isfinite(estimate.low) else "unbounded"
    if math.isinf(estimate.high) and math.isfinite(estimate.low):
        return f"{three_digits(estimate.value * scale)} [≥ {three_digits(estimate.low * scale)}]"
    if not (math.isfinite(estimate.low) or math.isfinite(estimate.high)):
        return three_digits(estimate.value * scale)
    value, low, high = (three_digits(end * scale) for end in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def span(estimate: Estimate | None, *, scale: float = 1.0) -> str:
    """Write the range of some runs as `8.90-9.40`, each end times `scale`; one figure where both read alike.

    Without an upper end `8.90 or more`; without a lower end, and for None, `–`.
    """
    if estimate is None or not math.isfinite(estimate.low):
        return "–"
    low = three_digits(estimate.low * scale)
    if not math.isfinite(estimate.high):
        return f"{low} or more"
    high = three_digits(estimate.high * scale)
    return low if low == high else f"{low}-{high}"


def milliseconds(estimate: Estimate | None) -> str:
    """Write an estimate in seconds as milliseconds, in the form of `interval`, without the unit."""
    return interval(estimate, scale=1e3)


def ratio(estimate: Estimate | None) -> str:
    """Write a factor as `×1.83 [1.79, 1.88]`; `at least ×1.83` where it has no upper end; None: `–`."""
    if estimate is None:
        return "–"
    return (
        f"at least ×{three_digits(estimate.value)}" if math.isinf(estimate.high) else f"×{interval(estimate)}"
    )


def latency(estimate: Estimate | None) -> str:
    """Write an estimate in seconds with its unit, s from 1 s on, else ms: `2.10 [1.90, 2.40] s`; None or nan:
    `–`."""
    if estimate is None or math.isnan(estimate.value):
        return "–"
    told_s = estimate.value if math.isfinite(estimate.value) else estimate.low
    unit, scale = ("s", 1.0) if math.isfinite(told_s) and abs(told_s) >= 0.9995 else ("ms", 1e3)
    text = interval(estimate, scale=scale)
    return text if text in ("–", "unbounded") else f"{text} {unit}"


_GAP: Final = 2


def print_rows(
    rows: Sequence[Sequence[str]],
    *,
    dispensable: Sequence[str] = (),
    elsewhere: str = "--json has them",
) -> list[list[str]]:
    """Print headings and rows as a table that fits the terminal. Returns what was printed of them.

    Columns without any value are left out. Then the columns `dispensable` are left out, in that order, until
    the rest fits, but `errors` only where there are none; a line below names them, and `elsewhere` says where to find
    them. Other columns are printed whole even where they do not fit.
    """
    filled = without_empty_columns(rows)
    records = [dict(zip(filled[0], row, strict=True)) for row in filled[1:]]
    failing = {"errors"} if any(re.search("[1-9]", row.get("errors", "")) for row in records) else set()
    names = [name for name in dispensable if name in filled[0] and name not in failing]
    shown = rows_that_fit(filled, width=table_width(), dispensable=[filled[0].index(name) for name in names])
    head, *lines = aligned(shown)
    rule = "─" * max(map(len, (head, *lines)))
    print_text(head, rule, *lines, whole=True)
    left_out = ", ".join(name for name in names if name not in shown[0])
    if left_out:
        print_text(f"Columns that do not fit: {left_out}; {elsewhere}.")
    return shown


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each row, its columns padded to one width: numbers to the right, words to the
    left."""
    columns = list(zip(*rows, strict=True))
    is_number = re.compile(r"[×≤≥~+−-]?\d").match
    to_right = [at > 0 and any(map(is_number, cells[1:])) for at, cells in enumerate(columns)]
    widths = [max(map(len, cells)) for cells in columns]
    return [
        (" " * _GAP)
        .join(
            f"{cell:>{width}}" if right else f"{cell:<{width}}"
            for cell, width, right in zip(row, widths, to_right, strict=True)
        )
        .rstrip()
        for row in rows
    ]


def markdown_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return headings and rows as the lines of a Markdown table."""
    rule = ["---", *("---:" for _ in rows[0][1:])]
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in (rows[0], rule, *rows[1:])
    ]


def without_empty_columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return headings and rows without the columns in which no row has a value (`–`); the first column stays."""
    kept = [
        at
        for at in range(len(rows[0]))
        if not at or any(row[at].removeprefix("–")[:1].strip() for row in rows[1:])
    ]
    return [[row[at] for at in kept] for row in rows]


def rows_that_fit(
    rows: Sequence[Sequence[str]], *, width: int, dispensable: Sequence[int]
) -> list[list[str]]:
    """Return the rows without as many of the `dispensable` columns (indices), in that order, as `width`
    characters require."""
    kept = list(range(len(rows[0])))
    for column in dispensable:
        if sum(max(len(row[index]) for row in rows) + _GAP for index in kept) - _GAP <= width:
            break
        kept.remove(column)
    return [[row[index] for index in kept] for row in rows]


def print_text(*texts: str, indent: str = "  ", bold: bool = False, whole: bool = False) -> None:
    """Print paragraphs, wrapped to the width of the terminal; further lines begin with `indent`.

    `whole`: print them as they are, such as rows of a table or commands to copy.
    """
    console, width = plain_console(), text_width()
    for text in texts:
        shown = text if whole else paragraph(text, width=width, indent=indent)
        console.print(shown, markup=False, soft_wrap=True, style="bold" if bold else "")


def plain_console() -> Console:
    """Make a rich console on stdout, at least 200 columns wide, so that nothing is cut off.

    Markup is off: a variant may be called `m[int8]`.
    """
    from rich.console import Console

    width = max(table_width(), 200)
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)


def table_width() -> int:
    """Return how many columns a table may take on stdout: 100 where it is no terminal, because CI systems wrap
    what is wider."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 100


def text_width() -> int:
    """Return how many columns a paragraph may take on stdout: 60 to 100, and 80 where it is no terminal."""
    return min(max(shutil.get_terminal_size().columns, 60), 100) if sys.stdout.isatty() else 80


def paragraph(text: str, *, width: int, indent: str = "  ") -> str:
    """Wrap the text to lines of at most `width` characters, all but the first beginning with `indent`.

    Words stay whole, so that a long one may exceed the width, and a number stays with its unit.
    """
    tie = "\N{NO-BREAK SPACE}"
    filled = textwrap.fill(
        re.sub(r"(?<=\d) (?=(?:%|µs|ms|s|min)(?!\w))", tie, text),
        width=width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(tie, " ")
