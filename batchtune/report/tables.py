"""How is a table drawn so that a terminal, a log and a pipe all keep its columns?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def table_of(*headings: str) -> Table:
    """An empty table; the first column is text, the others are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def console_on(stream: TextIO | None = None, *, wide: int = 160) -> Console:
    """A console on the stream (default: stdout); where there is no terminal it is `wide` enough to cut nothing."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else wide)
