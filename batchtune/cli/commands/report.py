"""`batchtune report`: a run as one HTML file that explains itself."""

from __future__ import annotations

import sys
from pathlib import Path

from batchtune.archive.run import Run, open_run
from batchtune.cli.commands.recommend import parameters_file
from batchtune.cli.deployment import deployment
from batchtune.errors import BatchtuneError, UsageError
from batchtune.report.html.account import account_of
from batchtune.report.html.page import write_page


def run_report(path: Path | None, *, output: Path | None, results: Path) -> int:
    """The exit code, 0; the file's name is printed.

    Raises:
        UsageError: a comparison or a load test, which have no page yet.
        ArchiveError: no such run, or the file cannot be written.
    """
    run = open_run(path, root=results)
    if any(trial.source in ("variant", "load") for trial in run.ledger()):
        raise UsageError(
            f"{run.path} is no sweep; only a sweep has a page",
            hint="`batchtune trials` shows its trials, and --json of load and compare all that they say",
        )
    print(write_report(run, output=output))
    return 0


def write_report(run: Run, *, output: Path | None = None) -> Path:
    """The page of a sweep, with the command that deploys what is recommended.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read, or the file not written.
    """
    account = account_of(run)
    chosen = account.chosen
    command = None
    if chosen is not None:
        command = deployment(chosen.configuration, account.scenario, parameters_file(run, None, chosen))
    return write_page(account, deployment=command, path=output)


def report_of_sweep(run: Run) -> None:
    """The page at the end of a sweep; that it cannot be written costs neither the recommendation nor the exit code."""
    try:
        line = f"report: {write_report(run)}"
    except BatchtuneError as error:
        line = f"note: no report: {error.message}"
    except Exception as error:  # noqa: BLE001 - a fault of the page is not one of the sweep before it
        line = " ".join(f"note: no report: {type(error).__name__}: {error}".split())
    print(line, file=sys.stderr)
