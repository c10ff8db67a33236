"""`batchtune runs` and `batchtune trials`: what is there to look at?"""

from __future__ import annotations

import sys
from pathlib import Path

from batchtune.archive.listing import runs_under
from batchtune.cli.arguments.kept_run import asked_run
from batchtune.errors import ArchiveError
from batchtune.report.listing import TableFormat, print_runs, print_trials


def run_runs(results: Path, *, json: bool) -> int:
    """The exit code, 0; without any run an empty list in JSON, else an error.

    Raises:
        ArchiveError: there is none.
    """
    entries = runs_under(results)
    if not entries and not json:
        raise ArchiveError(f"no run under {results}", hint="`batchtune sweep MODEL --slo-p95 20ms` makes one")
    print_runs(entries, json=json)
    return 0


def run_trials(path: Path | None, *, sort: str | None, output: TableFormat, results: Path) -> int:
    """The exit code, 0."""
    run = asked_run(path, results=results)
    frame = run.trials()
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    print_trials(frame, sort=sort, output=output, lower_is_better=run.scenario().objective == "latency")
    return 0
