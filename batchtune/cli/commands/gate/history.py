"""`batchtune history`: what all checks said, and when which figure changed."""

from __future__ import annotations

import json as json_text
from pathlib import Path

from batchtune.check.history import read_history, series_of
from batchtune.errors import UsageError
from batchtune.plain_values import fields_to_plain
from batchtune.report.gate.history import print_history


def run_history(results: Path, *, scenario: str | None, json: bool) -> int:
    """The exit code.

    Raises:
        ArchiveError: no check was kept there.
        UsageError: none of this scenario.
    """
    every = read_history(results)
    lines = [line for line in every if scenario in (None, line["scenario"])]
    if scenario is not None and not lines:
        names = ", ".join(sorted({line["scenario"] for line in every}))
        raise UsageError(
            f"--scenario: no check of {scenario!r} in {results}", hint=f"there are: {names or 'none'}"
        )
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
