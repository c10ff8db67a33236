"""`batchtune history`: what all checks said, and when which figure changed."""

from __future__ import annotations

import json as json_text
from pathlib import Path

from batchtune.check.history import read_history, series_of
from batchtune.plain_values import fields_to_plain
from batchtune.report.gate.history import print_history


def run_history(results: Path, *, scenario: str | None, json: bool) -> int:
    """The exit code.

    Raises:
        ArchiveError: no check was kept there.
    """
    lines = [line for line in read_history(results) if scenario in (None, line["scenario"])]
    series = series_of(lines)
    if json:
        print(
            json_text.dumps(
                {"checks": lines, "series": [fields_to_plain(figure) for figure in series]}, indent=2
            )
        )
    else:
        print_history(lines, series)
    return 0
