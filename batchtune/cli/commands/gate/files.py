"""Where does a job want the result of a check too?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchtune.check.account import Account
from batchtune.errors import UsageError
from batchtune.report.gate.files import code_quality, comment, github_annotations, junit_xml, markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFiles:
    """None: nowhere. Markdown is appended, by default to the summary of a GitHub job; the others are written anew."""

    junit: Path | None = None
    markdown: Path | None = None
    comment: Path | None = None
    code_quality: Path | None = None


def hand_on(account: Account, files: CheckFiles, *, scenario: Path) -> None:
    """The files asked for, the summary of the job's page, annotations for its runner.

    Raises:
        UsageError: a file that cannot be written.
    """
    summary = files.markdown
    if summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    texts: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (files.junit, lambda: junit_xml(account)),
        (files.comment, lambda: comment(account)),
        (files.code_quality, lambda: code_quality(account, file=str(scenario))),
    )
    try:
        for path, text in texts:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text(), encoding="utf-8")
        if summary is not None:
            summary.parent.mkdir(parents=True, exist_ok=True)
            with summary.open("a", encoding="utf-8") as file:
                file.write(markdown(account))
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(account, file=str(scenario)):
            print(line, file=sys.stderr)
