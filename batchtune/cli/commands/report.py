"""`batchtune runs`, `batchtune trials` and `batchtune report`: runs and trials as tables, a run as one HTML file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from batchtune.archive.listing import kind_by_trials, runs_under
from batchtune.archive.run import Run
from batchtune.archive.table import trial_table
from batchtune.cli.commands.run_recommend import deploying, to_establish
from batchtune.cli.session import asked_run, kept_trials
from batchtune.errors import ArchiveError, BatchtuneError, UsageError
from batchtune.report.html.check_page import check_document
from batchtune.report.html.comparison_page import comparison_document
from batchtune.report.html.load_page import load_document
from batchtune.report.html.shell.document import PAGE_FILE, Report, write_page
from batchtune.report.run_tables import TableFormat, print_runs, print_trials


def run_runs(results: Path, *, json: bool) -> int:
    """Run `batchtune runs`. Returns the exit code, 0; without any run it prints an empty list with `json`,
    else it raises.

    Raises:
        ArchiveError: there is no run, and `json` is False.
    """
    entries = runs_under(results)
    if not entries and not json:
        raise ArchiveError(f"no run under {results}", hint="`batchtune sweep MODEL --slo-p95 20ms` makes one")
    print_runs(entries, json=json)
    return 0


def run_trials(path: Path | None, *, sort: str | None, output: TableFormat, results: Path) -> int:
    """Run `batchtune trials`. Returns the exit code, 0.

    Raises:
        ArchiveError: no such run.
        UsageError: `sort` names no column.
    """
    run = asked_run(path, results=results)
    trials = kept_trials(run)
    if not trials and output == "table":
        print(f"no trial is finished in {run.path}", file=sys.stderr)
        return 0
    lower_is_better = run.scenario().objective == "latency"
    print_trials(trial_table(trials), sort=sort, output=output, lower_is_better=lower_is_better)
    return 0


def run_report(path: Path | None, *, output: Path | None, results: Path) -> int:
    """Run `batchtune report`, which prints the file's name. Returns the exit code, 0.

    Raises:
        ArchiveError: no such run, or the file cannot be written.
    """
    print(write_report(asked_run(path, results=results), output=output))
    return 0


def write_report(run: Run, *, output: Path | None = None) -> Path:
    """Write the HTML page of a run, and return the page's path.

    `output`: the file; None: report.html in the run's folder. The page of a sweep has the command that
    deploys its answer.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read, or the file not written.
        UsageError: a noise floor, or a load of several models: these have no page.
    """
    return write_page(_document_of(run), output or run.path / PAGE_FILE)


def report_at_end(run: Run, *, quiet: bool = False) -> None:
    """Write the HTML page at the end of a run, and print its path on stderr unless `quiet`.

    Whatever fails here is printed as a note: it changes neither the run's answer nor the exit code.
    """
    try:
        path = write_report(run)
        if quiet:
            return
        line = f"report: {path}"
    except BatchtuneError as error:
        line = f"note: no report: {error.message}"
    except Exception as error:  # noqa: BLE001 - a fault of the page is not one of the run before it
        line = " ".join(f"note: no report: {type(error).__name__}: {error}".split())
    print(line, file=sys.stderr)


def _document_of(run: Run) -> Report:
    """Return the page of a run as data.

    Raises:
        UsageError: a run of this kind has no page.
    """
    what = "a noise floor"
    match kind_by_trials(run):
        case "sweep":
            return _of_sweep(run)
        case "compare":
            return comparison_document(run)
        case "check":
            return check_document(run)
        case "load":
            if not run.scenario().target.models:
                return load_document(run)
            what = "a load of several models"
    hint = f"`batchtune trials {run.path}` shows its figures; the command prints them, and has --json"
    raise UsageError(f"{what} has no page", hint=hint)


def _of_sweep(run: Run) -> Report:
    """Return the page of a sweep as data, with the command that deploys its answer and, where that is open,
    the next step."""
    from batchtune.report.html.contender_figures import sweep_results_of
    from batchtune.report.html.sweep_page import sweep_document

    account = sweep_results_of(run)
    chosen, command = account.chosen, None
    if chosen is not None:
        again = f"batchtune recommend {shlex.quote(str(run.path))}"
        command = deploying(run, chosen, account.scenario, recommend=again)
    is_settled = account.missed or not account.trials if chosen is None else chosen.established
    step = None if is_settled else to_establish(run, account.scenario, account.trials)
    return sweep_document(account, deployment=command, step=step)
