"""Opens the run that a command reads, and reads its trials."""

from __future__ import annotations

import sys
from pathlib import Path

from batchtune.archive.listing import swept_scenarios
from batchtune.archive.run import Run, open_run
from batchtune.tune.trials.trial import Trial


def asked_run(path: Path | None, *, results: Path) -> Run:
    """The run in `path`, or the newest in that folder of runs; None: the latest under `results`.

    Where there are runs of other scenarios too, the latest may be of another than the one that is meant: stderr says
    of which it is, and how to ask for another.

    Raises:
        ArchiveError: there is none.
    """
    run = open_run(path, root=results)
    if path is None:
        here = run.path.parent.name
        others = [name for name in swept_scenarios(results) if name != here]
        if others:
            print(
                f"note: {run.path} is the latest run, of scenario {here}; name another by its folder: "
                f"{', '.join(str(results / name) for name in others)}",
                file=sys.stderr,
            )
    return run


def kept_trials(run: Run) -> list[Trial]:
    """The trials of a run; what could not be read of it is told on stderr."""
    trials = run.ledger()
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    return trials
