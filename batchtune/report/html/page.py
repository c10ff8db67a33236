"""Which page does a run get: that of a sweep, a comparison, a check or a load test?"""

from __future__ import annotations

from typing import Literal

from batchtune.archive.listing import kind_by_name
from batchtune.archive.run import CHECK, Run
from batchtune.errors import UsageError
from batchtune.report.html.check_page import check_document
from batchtune.report.html.comparison_page import comparison_document
from batchtune.report.html.load_page import load_document
from batchtune.report.html.shell.document import Document
from batchtune.tune.compare.noise_floor import ARMS

Kind = Literal["sweep", "compare", "check", "load", "noise"]


def kind_of(run: Run) -> Kind:
    """By what its trials are, whatever its folder is called; without any, by the end of that name. A check that was
    interrupted is a comparison.

    Raises:
        ArchiveError: the ledger cannot be read.
    """
    trials = run.ledger()
    if not trials:
        named = kind_by_name(run)
        return "sweep" if named == "check" else named
    match trials[0].source:
        case "load":
            return "load"
        case "variant":
            if (run.path / CHECK).is_file():
                return "check"
            return "noise" if all(trial.reason in ARMS for trial in trials) else "compare"
        case _:
            return "sweep"


def measured_document(run: Run, kind: Literal["compare", "check", "load", "noise"]) -> Document:
    """The page of a run that chooses nothing.

    Raises:
        ArchiveError, ScenarioError: the run cannot be read.
        UsageError: a noise floor, or a load of several models, which have no page.
    """
    what = "a noise floor"
    match kind:
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
